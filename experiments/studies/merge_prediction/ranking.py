"""Ranks predictors by Spearman's correlation with outcomes, with bootstrap intervals."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Ranking(NamedTuple):
    """Rank correlations and their 95 % bootstrap intervals.

    Attributes:
      rho: The correlations on all the data.
      low: The 2.5th percentiles over bootstrap samples.
      high: The 97.5th percentiles over bootstrap samples.
    """

    rho: Float[np.ndarray, "scope outcome predictor"]
    low: Float[np.ndarray, "scope outcome predictor"]
    high: Float[np.ndarray, "scope outcome predictor"]


def spearman(
    x: Float[np.ndarray, "merge predictor"], y: Float[np.ndarray, "merge outcome"]
) -> Float[np.ndarray, "outcome predictor"]:
    """Computes Spearman's rank correlation of all columns of one array with all of another.

    Equal values share their mean rank. A constant column has correlation 0.

    >>> spearman(np.array([[1.0], [2.0], [9.0]]), np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]))
    array([[0.5],
           [0. ]])
    """
    from scipy.stats import rankdata

    a, b = (rankdata(side, axis=0) for side in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    norms = np.sqrt(np.outer((b**2).sum(0), (a**2).sum(0)))
    return np.divide(b.T @ a, norms, out=np.zeros_like(norms), where=norms > 0)


def rank(
    x: Float[np.ndarray, "merge predictor"],
    y: Float[np.ndarray, "merge outcome"],
    cluster: Int[np.ndarray, "merge"],
    stratum: Int[np.ndarray, "merge"],
    scopes: Sequence[Bool[np.ndarray, "merge"]],
    draws: int,
    seed: int,
) -> Ranking:
    """Computes rank correlations in several sets of merges, with bootstrap intervals.

    Merges of one base model are not independent. The bootstrap therefore draws whole clusters with
    replacement, as many as there are in each stratum.

    It returns the correlations and their intervals, by scope, outcome and predictor.
    """
    rng = np.random.default_rng(seed)
    rows = {c: np.flatnonzero(cluster == c) for c in np.unique(cluster)}
    strata = [np.unique(cluster[stratum == s]) for s in np.unique(stratum)]
    resampled = []
    for _ in range(draws):
        drawn = np.concatenate([rng.choice(clusters, len(clusters)) for clusters in strata])
        at = np.concatenate([rows[c] for c in drawn])
        resampled.append([spearman(x[at[scope[at]]], y[at[scope[at]]]) for scope in scopes])
    low, high = np.percentile(np.array(resampled), [2.5, 97.5], axis=0)
    return Ranking(np.array([spearman(x[scope], y[scope]) for scope in scopes]), low, high)


def scopes(families: Sequence[str], about: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Lists the sets of merges in which predictors are compared.

    It returns masks over merges by name: each family, "all", and each of these followed by ",
    tuned", which keeps only experts fine-tuned from one pre-trained model.
    """
    masks = {name: about["family"] == i for i, name in enumerate(families)}
    masks["all"] = np.ones(len(about["family"]), bool)
    ordinary = about["related"] & (about["pretrain"] > 0)
    return masks | {f"{name}, tuned": mask & ordinary for name, mask in masks.items()}
