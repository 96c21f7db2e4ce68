"""How well numbers known before rank what came after: Spearman's correlation, by bootstrap."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Ranking(NamedTuple):
    """Correlations, and the 2.5th and 97.5th percentiles of their bootstrap distributions."""

    rho: Float[np.ndarray, "scope outcome predictor"]
    low: Float[np.ndarray, "scope outcome predictor"]
    high: Float[np.ndarray, "scope outcome predictor"]


def spearman(
    x: Float[np.ndarray, "merge predictor"], y: Float[np.ndarray, "merge outcome"]
) -> Float[np.ndarray, "outcome predictor"]:
    """Of all columns of one with all of the other; equal values share their mean rank, and with a
    constant nothing correlates.

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
    """Clusters are drawn with replacement, as many of each stratum as there are: merges of one
    base model are not independent."""
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
    """Which merges are compared: each family's, all; and of these the ordinary ones, of experts
    tuned from one pre-trained model."""
    masks = {name: about["family"] == i for i, name in enumerate(families)}
    masks["all"] = np.ones(len(about["family"]), bool)
    ordinary = about["related"] & (about["pretrain"] > 0)
    return masks | {f"{name}, tuned": mask & ordinary for name, mask in masks.items()}
