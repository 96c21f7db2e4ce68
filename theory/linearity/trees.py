"""Lemma 2 of cross-task linearity, from pairs of models to k models, with explicit constants.

Models are merged two at a time along a binary tree. The gap of all is then an exact sum over the
merges v, where s_v is the total weight of the models under v:

    gap(all) = sum_v s_v gap(pair at v)

If all merged pairs have gaps up to epsilon, the k models have a gap up to growth x epsilon. The
growth sum_v s_v is the mean depth of the models in the tree. Huffman's tree has the smallest
growth. It exceeds the entropy of the weights in bits by less than one.

The paper is Zhou et al., 2024 (arXiv 2402.03660). A list of merges contains pairs of nodes: nodes
0, ..., k-1 are the models, and node k + n is the result of merge n, counted from 0.
"""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory.linearity.identities import Weights, check_weights
from theory.linearity.networks import Model, gap
from theory.problems import defined

Merges = Sequence[tuple[int, int]]  # models are 0 .. k-1, the nth merge is k + n


class Telescope(NamedTuple):
    """The gaps of the pairs merged along a tree, with their weights.

    Attributes:
      weights: Total weight s_v under each merge, `(merges,)`.
      gaps: Gap of the pair at each merge, `(merges, ...)`.
    """

    weights: Float[Array, " merges"]  # s_v
    gaps: Float[Array, "merges *out"]  # of the pair merged at v

    @property
    def total(self) -> Array:
        """Computes the gap of all models, sum_v s_v gap_v."""
        return jnp.tensordot(self.weights, self.gaps, 1)


@defined
def chain(k: int) -> Merges:
    """Returns the merges that add one model at a time, as in the proof of Lemma 2.

    For uniform weights its growth is (k + 1) / 2 - 1 / k.

    Args:
      k: Number of models, at least 2.

    Returns:
      The k - 1 merges, pairs of nodes.

    Raises:
      ValueError: If k < 2.

    References:
      Zhou et al., 2024 (arXiv 2402.03660), Lemma 2.

    >>> chain(4)
    ((0, 1), (4, 2), (5, 3))
    """
    _check_count(k)
    return tuple((n + k - 2 if n > 1 else 0, n) for n in range(1, k))


@defined
def huffman(weights: Weights) -> Merges:
    """Returns the merges of Huffman's tree, which has the smallest growth of all trees.

    It merges the two lightest nodes first. For uniform weights, with q = floor(log2 k), its growth
    is q + 2 - 2^(q+1) / k, which is log2 k for powers of two.

    Args:
      weights: Weights `(k,)`, >= 0, of at least 2 models.

    Returns:
      The k - 1 merges, pairs of nodes.

    Raises:
      ValueError: If the weights are not a vector of at least 2 numbers >= 0.

    >>> huffman([0.5, 0.25, 0.125, 0.125])
    ((2, 3), (1, 4), (0, 5))
    """
    # Equal weights are merged in the order of their nodes, so the tree is unique.
    heap = [(float(w), n) for n, w in enumerate(_nonnegative(weights))]
    k = len(heap)
    heapq.heapify(heap)
    merges = []
    while len(heap) > 1:
        (first, m), (second, n) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (first + second, k + len(merges)))
        merges.append((min(m, n), max(m, n)))
    return tuple(merges)


@defined
def node_weights(weights: Weights, merges: Merges) -> np.ndarray:
    """Computes the total weight s_v under each merge.

    Args:
      weights: Weights `(k,)`, >= 0, of at least 2 models.
      merges: Merges, pairs of nodes.

    Returns:
      The totals `(k - 1,)`.

    Raises:
      ValueError: If the weights are out of range, or the merges are not a binary tree on the
        models.
    """
    totals = list(_nonnegative(weights))
    k, unused = len(totals), set(range(len(totals)))
    for m, n in merges:
        if m == n or not {m, n} <= unused:
            raise ValueError(f"merge {(m, n)} needs two nodes not merged before; left: {unused}")
        unused = (unused - {m, n}) | {len(totals)}
        totals.append(totals[m] + totals[n])
    if len(unused) != 1:
        raise ValueError(f"{len(merges)} merges do not join {k} models; left: {sorted(unused)}")
    return np.array(totals[k:])


@defined
def growth(weights: Weights, merges: Merges | None = None) -> float:
    """Computes the growth, the largest gap of k models per largest gap of a merged pair.

    It is at most k - 1. The set on which pairs are known to be linear must contain the running
    means.

    Args:
      weights: Weights `(k,)`, >= 0, of at least 2 models.
      merges: Merges, pairs of nodes; Huffman's tree if None.

    Returns:
      The growth sum_v s_v.

    Raises:
      ValueError: If the weights are out of range, or the merges are not a binary tree on the
        models.

    >>> growth([0.25] * 4), growth([0.25] * 4, chain(4))
    (2.0, 2.25)
    """
    return float(node_weights(weights, huffman(weights) if merges is None else merges).sum())


@defined
def telescope(
    f: Model, thetas: Any, weights: Weights, *args: Any, merges: Merges | None = None
) -> Telescope:
    """Measures the gaps of the pairs that are merged along a tree.

    Args:
      f: Model f(theta, *args), which returns an array.
      thetas: Pytree of k models stacked along a leading axis.
      weights: Weights `(k,)`, >= 0, of sum 1.
      *args: Further arguments of the model.
      merges: Merges, pairs of nodes; Huffman's tree if None.

    Returns:
      The gaps with their weights. `total` is the gap of all models.

    Raises:
      ValueError: If the weights do not conform, are negative or do not sum to 1, or the merges are
        not a binary tree on the models.

    >>> float(telescope(jnp.square, jnp.array([1.0, 3.0]), [0.5, 0.5]).total)
    -1.0
    """
    a = np.asarray(check_weights(thetas, weights))
    merges = huffman(a) if merges is None else merges
    totals = [*a, *node_weights(a, merges)]
    models = [jax.tree.map(lambda t, n=n: t[n], thetas) for n in range(a.size)]
    gaps = []
    for m, n in merges:
        total = totals[m] + totals[n]
        # A pair of total weight 0 may be merged with any weights, because its gap has the weight 0.
        share = jnp.array([totals[m] / total, totals[n] / total] if total else [0.5, 0.5])
        pair = jax.tree.map(lambda s, t: jnp.stack([s, t]), models[m], models[n])
        gaps.append(gap(f, pair, share, *args))
        models.append(jax.tree.map(lambda t, s=share: jnp.tensordot(s, t, 1), pair))
    return Telescope(jnp.array(totals[a.size :]), jnp.stack(gaps))


def _nonnegative(weights: Weights) -> np.ndarray:
    a = np.asarray(weights, dtype=float)
    if a.ndim != 1 or not (a >= 0).all():
        raise ValueError(f"weights must be a vector of numbers >= 0; got {a}")
    _check_count(a.size)
    return a


def _check_count(k: int) -> None:
    if k < 2:
        raise ValueError(f"at least 2 models are merged; got {k}")
