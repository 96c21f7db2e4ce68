"""Independent implementations of Breadcrumbs, DELLA, SCE, RAM and others, in NumPy with float64.

Signatures: `method(models, base, weights, key_words, **options)`, of dictionaries path -> array.
"""

import math

import merge_reference as merge
import numpy as np


def ones(weights, models):
    return np.ones(len(models)) if weights is None else np.asarray(weights, float)


def weighted_sum(vectors, weights):
    return {p: sum(w * v[p] for w, v in zip(weights, vectors, strict=True)) for p in vectors[0]}


def per_model(value, k):
    return value if np.ndim(value) == 0 else value[k]


# --- breadcrumbs


def crumbs(delta, density, gamma, scope, floor):
    """Zero but for the entries of rank top + 1 .. top + keep, by sorting all of them."""
    groups = [delta] if scope == "tree" else [{p: x} for p, x in delta.items()]
    out = {}
    for group in groups:
        n = sum(x.size for x in group.values())
        half = 0.0 if floor else 0.5
        keep = min(max(math.floor(density * n + half), min(1, n)), n)
        top = min(math.floor(gamma * n + half), n - keep)
        outer, inner = merge.top(group, top + keep), merge.top(group, top)
        out |= {p: np.where(outer[p] & ~inner[p], group[p], 0.0) for p in group}
    return out


def _crumbs(models, base, density, gamma, scope, compat):
    mergekit = compat == "mergekit"
    density = (1.0 if mergekit else 0.15) if density is None else density
    gamma = (0.01 if mergekit else 0.006) if gamma is None else gamma
    return [
        crumbs(d, per_model(density, k), per_model(gamma, k), scope, mergekit)
        for k, d in enumerate(merge.deltas(models, base))
    ]


def breadcrumbs(
    models, base, weights, key, density=None, gamma=None, scope="tensor", normalize=False,
    scale=1.0, compat="paper",
):  # fmt: skip
    vectors = _crumbs(models, base, density, gamma, scope, compat)
    weights = merge.weighing(weights, len(models), normalize)
    return merge.moved(base, weighted_sum(vectors, weights), scale)


def fused(vectors, base, weights, normalize, scale, compat, elect_by=None, tie=None):
    mergekit = compat == "mergekit"
    elect_by = elect_by or ("weighted" if mergekit else "mass")
    tie = tie or ("positive" if mergekit else "none")
    return merge.moved(base, merge.agreed(vectors, weights, elect_by, tie, normalize), scale)


def breadcrumbs_ties(
    models, base, weights, key, density=None, gamma=None, scope="tensor", elect_by=None, tie=None,
    normalize=None, scale=1.0, compat="paper",
):  # fmt: skip
    normalize = compat == "paper" if normalize is None else normalize
    vectors = _crumbs(models, base, density, gamma, scope, compat)
    weights = merge.weighing(weights, len(models), normalize)
    return fused(vectors, base, weights, normalize, scale, compat, elect_by, tie)


# --- DELLA


def keep_probability(row, density, epsilon, rank_by):
    """MAGPRUNE's p for one row, entry by entry."""
    epsilon = min(epsilon, density, 1 - density)
    size, n = np.abs(row), len(row)
    if rank_by == "rank":
        order = sorted(range(n), key=lambda i: (size[i], i))
        ranks = {i: r for r, i in enumerate(order)}
        x = [ranks[i] / (n - 1) if n > 1 else 0.5 for i in range(n)]
    else:
        spread = size.max() - size.min() if n else 0
        x = [(s - size.min()) / spread if spread > 0 else 0.5 for s in size]
    return np.array([density - epsilon + 2 * epsilon * v for v in x])


def probabilities(x, density, epsilon, rank_by):
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    found = [keep_probability(row, density, epsilon, rank_by) for row in rows]
    return np.array(found).reshape(x.shape)


def _della(models, base, key, density, epsilon, rank_by, compat):
    mergekit = compat == "mergekit"
    density = (1.0 if mergekit else 0.7) if density is None else density
    epsilon = (0.15 if mergekit else 0.07) if epsilon is None else epsilon
    vectors = []
    for k, delta in enumerate(merge.deltas(models, base)):
        vector = {}
        for path, x in delta.items():
            p = probabilities(x, per_model(density, k), per_model(epsilon, k), rank_by)
            kept = merge.uniform(key, path, k, x.size).reshape(x.shape) < p
            vector[path] = np.where(kept, x, 0.0)
            if not mergekit:
                vector[path] = vector[path] / p
            elif kept.any() and np.abs(vector[path]).sum() > 0:
                vector[path] = vector[path] * np.abs(x).sum() / np.abs(vector[path]).sum()
        vectors.append(vector)
    return vectors


def della_linear(
    models, base, weights, key, density=None, epsilon=None, rank_by="rank", normalize=False,
    scale=1.0, compat="paper",
):  # fmt: skip
    vectors = _della(models, base, key, density, epsilon, rank_by, compat)
    weights = merge.weighing(weights, len(models), normalize)
    return merge.moved(base, weighted_sum(vectors, weights), scale)


def della(
    models, base, weights, key, density=None, epsilon=None, rank_by="rank", elect_by=None, tie=None,
    normalize=True, scale=1.0, compat="paper",
):  # fmt: skip
    vectors = _della(models, base, key, density, epsilon, rank_by, compat)
    weights = merge.weighing(weights, len(models), normalize)
    return fused(vectors, base, weights, normalize, scale, compat, elect_by, tie)


# --- one model


def passthrough(models, base, weights, key, scale=1.0):
    return {p: scale * models[0][p].astype(float) for p in base}


def expo(models, base, weights, key, alpha=0.1):
    tuned, start = models[0], base
    return {
        p: tuned[p].astype(float) + alpha * (tuned[p].astype(float) - start[p].astype(float))
        for p in base
    }


def nearswap(models, base, weights, key, t):
    """As published: a weight t / |difference| between the two."""
    out = {}
    for p in base:
        a, b = base[p].astype(float), models[0][p].astype(float)
        with np.errstate(divide="ignore"):
            weight = np.clip(t / np.abs(a - b), 0, 1)
        out[p] = weight * b + (1 - weight) * a
    return out


def arcee_fusion(models, base, weights, key):
    out = {}
    for path in base:
        a, b = base[path].astype(float), models[0][path].astype(float)
        rows = [x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1) for x in (a, b)]
        importance = []
        for q, p in zip(*rows, strict=True):
            p, q = (np.exp(x) / np.exp(x).sum() + 1e-8 for x in (p, q))
            importance.append(max((p * np.log(p / q)).sum(), 0.0))
        gaps = np.abs(rows[1] - rows[0])
        importance = (gaps * np.array(importance).reshape(-1, 1)).reshape(a.shape)
        ascending = np.sort(importance.reshape(-1))
        if not ascending.size:
            out[path] = a
            continue
        low, middle, high = (ascending[int(q * (ascending.size - 1))] for q in (0.25, 0.5, 0.75))
        out[path] = np.where(importance >= middle + 1.5 * (high - low), b, a)
    return out


# --- several


def magmax(models, base, weights, key, scale=1.0):
    vectors, update = merge.deltas(models, base), {}
    for path in base:
        best = np.zeros(base[path].shape)
        for w, vector in zip(ones(weights, models), vectors, strict=True):
            for index in np.ndindex(best.shape):
                if abs(w * vector[path][index]) >= abs(best[index]):
                    best[index] = w * vector[path][index]
        update[path] = best
    return merge.moved(base, update, scale)


def ram(models, base, weights, key, epsilon=1e-5, gain=lambda shared, alone: 1.0):
    vectors, weights, update = merge.deltas(models, base), ones(weights, models), {}
    for path in base:
        active = [np.abs(v[path]) > np.float32(epsilon) for v in vectors]
        many = sum(a.astype(int) for a in active) if active else 0
        gains = [gain((a & (many > 1)).sum(), (a & (many == 1)).sum()) for a in active]
        out = np.zeros(base[path].shape)
        for index in np.ndindex(out.shape):
            who = [k for k in range(len(vectors)) if active[k][index]]
            if len(who) == 1:
                out[index] = gains[who[0]] * vectors[who[0]][path][index]
            elif who:
                terms = sum(weights[k] * vectors[k][path][index] for k in who)
                out[index] = terms / sum(weights[k] for k in who)
        update[path] = out
    return merge.moved(base, update, 1.0)


def ramplus_tl(models, base, weights, key, epsilon=1e-5, r=0.1, alpha=0.2):
    def gain(shared, alone):
        return 1 + r * (min(max(shared / alone, 0), alpha) if alone else alpha)

    return ram(models, base, weights, key, epsilon, gain)


def sce(models, base, weights, key, select_topk=1.0, tie=None, compat="paper"):
    vectors, weights, update = merge.deltas(models, base), ones(weights, models), {}
    mergekit = compat == "mergekit"
    for path in base:
        delta = np.stack([v[path] for v in vectors])
        if select_topk < 1:
            # M times the sum of squares less the square of the sum: exact for few binary digits
            spread = len(delta) * (delta**2).sum(0) - delta.sum(0) ** 2
            spread = np.where((delta == delta[0]).all(0), 0, spread)
            k = math.floor(select_topk * np.count_nonzero(spread) + 1e-9)
            order = np.argsort(-spread.reshape(-1), kind="stable")[:k]
            keep = np.zeros(spread.size, bool)
            keep[order] = True
            delta = np.where(keep.reshape(spread.shape), delta, 0.0)
        energy = (delta**2).reshape(len(delta), -1).sum(1)
        small = mergekit and energy.sum() / max(delta[0].size, 1) < 1e-6
        uniform = small or energy.sum() == 0
        c = np.full(len(delta), 1 / len(delta)) if uniform else energy / energy.sum()
        default = 1 if (tie or ("positive" if mergekit else "none")) == "positive" else 0
        sign = np.sign(delta.sum(0))
        sign = np.where(sign == 0, default, sign)
        out = np.zeros(base[path].shape)
        for index in np.ndindex(out.shape):
            at = (slice(None), *index)
            who = (np.sign(delta[at]) == sign[index]) & (delta[at] != 0)
            mass = (weights * c)[who].sum()
            if who.any():
                mass = max(mass, 1e-6) if mergekit else mass
                out[index] = (weights * c * delta[at])[who].sum() / mass
        update[path] = out
    return merge.moved(base, update, 1.0)


def flattened(tree):
    return np.concatenate([tree[p].reshape(-1) for p in sorted(tree)])


def minmax(x):
    span = x.max() - x.min()
    return (x - x.min()) / span if span > 0 else np.ones_like(x)


def pcb(models, base, weights, key, ratio=0.1, scale=1.0):
    vectors = np.stack([flattened(d) for d in merge.deltas(models, base)])
    tasks, n = vectors.shape
    size, balance = [], []
    for vector in vectors:
        ascending = np.sort(np.abs(vector))
        clamped = np.clip(np.abs(vector), ascending[n // 10000], ascending[n - 1 - n // 10000])
        size.append(clamped)
        score = np.exp(tasks * minmax(clamped) ** 2) * np.tanh(vector * vectors.sum(0))
        threshold = np.sort(score)[min(int(n * (1 - ratio)), n - 1)]
        among = score >= threshold
        balance.append(minmax(np.maximum(score, threshold)) if score.max() > threshold else among)
    size, balance = np.stack(size), np.stack(balance)
    mass = balance.sum(0)
    merged = (ones(weights, models)[:, None] * balance * np.sign(vectors) * size).sum(0)
    merged = np.where(mass > 0, merged / np.where(mass > 0, mass, 1), 0)
    update, start = {}, 0
    for path in sorted(base):
        end = start + base[path].size
        update[path] = merged[start:end].reshape(base[path].shape)
        start = end
    return merge.moved(base, update, scale)


# --- one vector, several masks


def multitask(vectors, weights, kind, density):
    if kind == "sum":
        return weighted_sum(vectors, weights)
    trimmed = [merge.trimmed(v, density, "tree") for v in vectors]
    return merge.agreed(trimmed, weights, "mass", "none", False)


def task_masks(vectors, shared, threshold):
    return [
        {p: np.abs(v[p]) > per_model(threshold, k) * np.abs(shared[p] - v[p]) for p in v}
        for k, v in enumerate(vectors)
    ]


def consensus(
    models, base, weights, key, threshold=0.4, agree=2, multitask="sum", density=0.2, scale=1.0
):
    vectors = merge.deltas(models, base)
    shared = globals()["multitask"](vectors, ones(weights, models), multitask, density)
    masks = task_masks(vectors, shared, threshold)
    update = {
        p: np.where(sum(m[p].astype(int) for m in masks) >= agree, shared[p], 0) for p in base
    }
    return merge.moved(base, update, scale)


def emr(models, base):
    """Per task: base + (|delta_k|_1 / |mask_k shared|_1) mask_k shared."""
    vectors = merge.deltas(models, base)
    shared = {}
    for p in base:
        sign = np.sign(sum(v[p] for v in vectors))
        agreeing = [np.where(np.sign(v[p]) == sign, np.abs(v[p]), 0) for v in vectors]
        shared[p] = sign * np.max(agreeing, 0)
    out = []
    for vector in vectors:
        used = {p: np.where(vector[p] * shared[p] > 0, shared[p], 0) for p in base}
        after = sum(np.abs(x).sum() for x in used.values())
        scale = sum(np.abs(x).sum() for x in vector.values()) / after if after else 1.0
        out.append(merge.moved(base, used, scale))
    return out
