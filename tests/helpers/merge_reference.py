"""Independent implementations of merging methods from the papers' formulas, in NumPy with float64.

Models are flat dictionaries path -> array. Only the deltas are rounded to float32 first, as they
are stated to be, so that ties and thresholds mean the same; everything after is float64.
"""

import hashlib

import numpy as np


def deltas(models, base):
    return [
        {p: (m[p].astype(np.float32) - base[p].astype(np.float32)).astype(float) for p in base}
        for m in models
    ]


def weighing(weights, tasks, normalize):
    w = np.ones(tasks) if weights is None else np.asarray(weights, float)
    return w / w.sum() if normalize else w


def top(delta, k):
    """True at the k largest |entries| of a flat dictionary; equals by (path, flat index)."""
    ranking = [
        (-abs(value), path, index)
        for path in delta
        for index, value in enumerate(delta[path].reshape(-1))
    ]
    keep = {path: np.zeros(delta[path].size, bool) for path in delta}
    for _, path, index in sorted(ranking)[:k]:
        keep[path][index] = True
    return {path: keep[path].reshape(delta[path].shape) for path in delta}


def how_many(density, n):
    return max(1, int(np.floor(density * n + 0.5)))


def trimmed(delta, density, scope):
    if scope == "tree":
        keep = top(delta, how_many(density, sum(x.size for x in delta.values())))
    else:
        keep = {}
        for path, x in delta.items():
            keep |= top({path: x}, how_many(density, x.size))
    return {path: np.where(keep[path], delta[path], 0.0) for path in delta}


def elected(vectors, weights, elect_by, tie):
    """The sign +1, -1 or 0 (none) per entry."""
    signs = {}
    for path in vectors[0]:
        counted = [
            {"mass": v[path], "weighted": w * v[path], "count": np.sign(v[path])}[elect_by]
            for v, w in zip(vectors, weights, strict=True)
        ]
        signs[path] = np.sign(sum(counted))
    majority = np.sign(sum(s.sum() for s in signs.values()))
    default = {"none": 0.0, "positive": 1.0, "majority": majority}[tie]
    return {path: np.where(s == 0, default, s) for path, s in signs.items()}


def agreed(vectors, weights, elect_by, tie, normalize):
    """TIES' disjoint merge, entry by entry."""
    signs = elected(vectors, weights, elect_by, tie)
    merged = {}
    for path, sign in signs.items():
        out = np.zeros(sign.shape)
        for index in np.ndindex(sign.shape):
            terms, mass = [], []
            for v, w in zip(vectors, weights, strict=True):
                side = np.sign(w) if elect_by == "weighted" else 1.0
                if v[path][index] != 0 and np.sign(side * v[path][index]) == sign[index]:
                    terms.append(w * v[path][index])
                    mass.append(w)
            if terms:
                out[index] = sum(terms) / (sum(mass) if normalize else 1.0)
        merged[path] = out
    return merged


def moved(base, update, scale):
    return {p: base[p].astype(float) + scale * update[p] for p in base}


def trajectory(models, base, weights, key, shape):
    """Each weight is what the decay loses from a checkpoint to the next, times the model's own."""
    decayed = {"1-square": lambda x: 1 - x**2}[shape]
    n, w = len(models), weighing(weights, len(models), False)
    d = [decayed(i / n) for i in range(n + 1)]
    c = [w[j] * (d[j] - d[j + 1]) for j in range(n)]
    return {
        p: sum(cj * m[p].astype(float) for cj, m in zip(c, models, strict=True)) / sum(c)
        for p in base
    }


def linear(models, base, weights, key, normalize=True):
    w = weighing(weights, len(models), normalize)
    return {p: sum(wk * m[p].astype(float) for wk, m in zip(w, models, strict=True)) for p in base}


def task_arithmetic(models, base, weights, key, scale=1.0, normalize=False):
    w = weighing(weights, len(models), normalize)
    vectors = deltas(models, base)
    update = {p: sum(wk * v[p] for wk, v in zip(w, vectors, strict=True)) for p in base}
    return moved(base, update, scale)


def ties(
    models, base, weights, key, density=0.2, scope="tree", elect_by="mass", tie="none",
    normalize=True, scale=1.0,
):  # fmt: skip
    w = weighing(weights, len(models), normalize)
    vectors = [trimmed(d, density, scope) for d in deltas(models, base)]
    return moved(base, agreed(vectors, w, elect_by, tie, normalize), scale)


def dropped(models, base, key, density):
    kept = masks(key, base, density, len(models))
    return [
        {p: np.where(mask[p], d[p] / density, 0.0) for p in base}
        for d, mask in zip(deltas(models, base), kept, strict=True)
    ]


def dare_linear(models, base, weights, key, density=0.5, normalize=False, scale=1.0):
    w = weighing(weights, len(models), normalize)
    vectors = dropped(models, base, key, density)
    update = {p: sum(wk * v[p] for wk, v in zip(w, vectors, strict=True)) for p in base}
    return moved(base, update, scale)


def dare_ties(
    models, base, weights, key, density=0.5, elect_by="mass", tie="none", normalize=True,
    scale=1.0,
):  # fmt: skip
    w = weighing(weights, len(models), normalize)
    vectors = dropped(models, base, key, density)
    return moved(base, agreed(vectors, w, elect_by, tie, normalize), scale)


def mix(x):
    """A 32-bit word scrambled, in unbounded integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def uniform(key_words, path, task, size):
    """The documented draws of a leaf, entry by entry: 24 bits of two keyed rounds."""
    low, high = 0x9E3779B9, 0x85EBCA6B
    digest = hashlib.blake2b(path.encode(), digest_size=16).digest()
    name = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    for word in (*map(int, key_words), *name, task):
        low = mix(low ^ word)
        high = mix((high + word * 0xC2B2AE35 + low) % 2**32)
    bits = [mix((mix(i ^ low) + high) % 2**32) >> 8 for i in range(size)]
    return np.array(bits) / 2**24


def masks(key_words, base, density, tasks):
    """Which entries DARE keeps: one flat dictionary for each model."""
    return [
        {p: (uniform(key_words, p, k, x.size) < density).reshape(x.shape) for p, x in base.items()}
        for k in range(tasks)
    ]
