"""Independent implementations of merging by singular vectors, in NumPy with float64 and full
decompositions.

Each takes the list of deltas of one matrix [out, in], which may have low rank: projectors onto what
is there, instead of singular vectors that are not.
"""

import math
from fractions import Fraction

import numpy as np

TOLERANCE = 1e-5  # of the largest singular value: what float32 inputs leave of a 0


def svd(x, size=None):
    """Triplets (u, s, v) of singular values that are not 0."""
    U, S, Vt = np.linalg.svd(x)
    limit = TOLERANCE * (S[0] if size is None else size)
    return [(U[:, i], s, Vt[i]) for i, s in enumerate(S) if s > limit]


def polar(columns):
    """(X X^T)^(-1/2) X by an eigendecomposition."""
    X = np.stack(columns, 1)
    values, Q = np.linalg.eigh(X.T @ X)
    keep = values > TOLERANCE * values.max()
    return X @ (Q[:, keep] / np.sqrt(values[keep])) @ Q[:, keep].T


def orthogonalised(triplets, shape, singular=None):
    if not triplets:
        return np.zeros(shape)
    U, V = polar([u for u, _, _ in triplets]), polar([v for _, _, v in triplets])
    s = [s if singular is None else singular for _, s, _ in triplets]
    return sum(x * np.outer(U[:, i], V[:, i]) for i, x in enumerate(s))


def tsv_m(deltas, ratio=None):
    shape = deltas[0].shape
    ratio = Fraction(1, len(deltas)) if ratio is None else Fraction(str(ratio))
    k = max(1, math.floor(ratio * min(shape)))
    return orthogonalised([t for d in deltas for t in svd(d)[:k]], shape)


def iso_c(deltas):
    x = sum(deltas)
    triplets = svd(x)
    mean = sum(s for _, s, _ in triplets) / min(x.shape)
    return mean * sum((np.outer(u, v) for u, _, v in triplets), np.zeros(x.shape))


def iso_cts(deltas, common_fraction=0.8):
    x, tasks = sum(deltas), len(deltas)
    r = min(x.shape)
    n = min(round((r - math.floor(Fraction(str(common_fraction)) * r)) / tasks), r // tasks)
    common = svd(x)[: r - n * tasks]
    triplets = list(common)
    for d in deltas:
        rest = d - sum((np.outer(u, u) @ d for u, _, _ in common), np.zeros(x.shape))
        triplets += svd(rest, np.linalg.norm(d))[:n]
    return orthogonalised(triplets, x.shape, sum(s for _, s, _ in triplets) / r)


def wudi_loss(x, deltas):
    return sum(np.sum(((x - d) @ d.T) ** 2) / np.sum(d**2) for d in deltas if np.any(d))


def wudi_gradient(x, deltas):
    return sum(2 * (x - d) @ d.T @ d / np.sum(d**2) for d in deltas if np.any(d))


def wudi(deltas, steps=300, rate=1e-5):
    x = sum(deltas)
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, steps + 1):
        g = wudi_gradient(x, deltas)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        x = x - rate * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
    return x


def opcm(leaves, alpha=0.5):
    """Merges as published, model after model with factors lambda; leaves: lists of deltas
    by path."""
    tasks = len(next(iter(leaves.values())))
    norm = lambda tree: math.sqrt(sum(np.sum(x**2) for x in tree.values()))  # noqa: E731
    norms = [norm({p: d[k] for p, d in leaves.items()}) for k in range(tasks)]
    merged, factor = {p: d[0] for p, d in leaves.items()}, 1.0
    for k in range(1, tasks):
        new = {}
        for path, deltas in leaves.items():
            x, old = deltas[k], merged[path]
            if old.ndim == 2 and min(old.shape) > 1:
                triplets, share = svd(old), 0.0
                total = sum(s for _, s, _ in triplets)
                leading = []
                for _, s, _ in triplets:
                    share += s
                    leading.append(share <= alpha * total)
                y = x.copy()
                for i, (u, _, _) in enumerate(triplets):
                    for j, (_, _, v) in enumerate(triplets):
                        if i == j or (leading[i] and leading[j]):
                            y -= (u @ x @ v) * np.outer(u, v)
                x = y
            new[path] = factor * old + x
        mean = np.mean(norms[: k + 1])
        factor = norm(new) / mean
        merged = {p: x / factor for p, x in new.items()}
    return merged
