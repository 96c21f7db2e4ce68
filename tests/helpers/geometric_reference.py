"""Independent implementations of interpolation and means on spheres, in NumPy with float64.

Independent of the package's form: no Gram matrices and no coefficients but the vectors themselves.
"""

import numpy as np


def angle(a, b):
    """Kahan's formula, accurate near 0 and pi."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return 2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b))


def arc(a, b, t):
    theta = angle(a, b)
    if theta == 0:
        return (1 - t) * a + t * b
    return (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)


def slerp(vectors, t):
    a, b = vectors
    na, nb = np.linalg.norm(a), np.linalg.norm(b)
    if na == 0 or nb == 0 or angle(a, b) > np.pi - 4e-3:
        return (1 - t) * a + t * b
    return ((1 - t) * na + t * nb) * arc(a / na, b / nb, t)


def nuslerp(vectors, weights):
    a, b = vectors
    t = weights[1] / (weights[0] + weights[1])
    if not a.any() or not b.any() or angle(a, b) > np.pi - 4e-3:
        return (1 - t) * a + t * b
    return arc(a, b, t)


def nlerp(vectors, weights):
    w = np.asarray(weights) / np.sum(weights)
    norms = [np.linalg.norm(v) for v in vectors]
    mean = sum(x * v / n for x, v, n in zip(w, vectors, norms, strict=True))
    return w @ norms * mean / np.linalg.norm(mean)


def karcher(vectors, weights):
    """By minimisation on the sphere of sum w angle^2, with a backtracking gradient descent."""
    w = np.asarray(weights, float) / np.sum(weights)
    norms = np.array([np.linalg.norm(v) for v in vectors])
    units = [(x, v / n) for x, v, n in zip(w, vectors, norms, strict=True) if n > 0]
    loss = lambda u: sum(x * angle(u, v) ** 2 for x, v in units)  # noqa: E731
    u = units[0][1] + 0.3 * units[-1][1]
    u /= np.linalg.norm(u)
    for _ in range(400):
        slope = np.zeros_like(u)
        for x, v in units:
            across = v - (v @ u) * u
            size = np.linalg.norm(across)
            if size > 0:
                slope += x * angle(u, v) * across / size
        step = 1.0
        while step > 1e-6:
            new = u + step * slope
            new /= np.linalg.norm(new)
            if loss(new) <= loss(u):
                break
            step /= 2
        u = new
    return w @ norms * u


def model_stock(vectors, weights, average="cosine", clamp=None, signed=False):
    """The deltas' combination; `clamp` and `signed` are mergekit's."""
    w = np.asarray(weights, float) / np.sum(weights)
    n, values = len(vectors), []
    for j in range(n):
        for k in range(j + 1, n):
            size = np.linalg.norm(vectors[j]) * np.linalg.norm(vectors[k])
            size = size if clamp is None else max(size, clamp)
            c = np.clip(vectors[j] @ vectors[k] / size if size else 0.0, -1, 1)
            values.append(np.arccos(c) if average == "angle" else c)
    c = np.cos(np.mean(values)) if average == "angle" else np.mean(values)
    c = c if signed else max(c, 0)
    t = n * c / (1 + (n - 1) * c)
    return t * sum(x * v for x, v in zip(w, vectors, strict=True))


def split(x, vectors):
    """A tensor as [how many, length] and how to put such an array together again."""
    if vectors == "tensor" or x.ndim < 2:
        return x.reshape(1, -1), lambda y: y.reshape(x.shape)
    if vectors == "row":
        return x.reshape(-1, x.shape[-1]), lambda y: y.reshape(x.shape)
    return x.reshape(-1, x.shape[-1]).T, lambda y: y.T.reshape(x.shape)


def merged(function, models, base, vectors="tensor", **options):
    """`function` applied to each vector of each leaf of flat dictionaries; float64."""
    out = {}
    for path, like in models[0].items():
        start = np.zeros(like.shape) if base is None else base[path].astype(float)
        parts = [split(m[path].astype(float) - start, vectors)[0] for m in models]
        join = split(start, vectors)[1]
        rows = [function(list(row), **options) for row in zip(*parts, strict=True)]
        out[path] = start + join(np.stack(rows))
    return out
