"""Every public function of `theory` over a sweep of inputs, borders included, in both precisions.

Error model: C eps |f|, plus what f changes by where each real input is off by C eps of itself. A
true value beyond the largest float may be inf; NaN is never right, and what has no value is
refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import mpmath as mp
import numpy as np
import pytest

from theory.deep_linear import pretraining, risks, training_time
from theory.initialisation import descent, discriminant, transfer
from theory.linearity import correlation
from theory.two_layer import fine_tuning, modes

PRECISIONS = (np.float32, np.float64)
LEDGERS = ("claims", "coverage", "settings", "testbeds", "linearity.tasks", "two_layer.tasks")


class Refused(Exception):
    """Raised by a reference where there is no value."""


# --- inputs: borders, and numbers drawn between them ---------------------------------------------


def around(low: float, high: float) -> Callable:
    return lambda rng, n: 10 ** rng.uniform(low, high, n)


KINDS: dict[str, tuple[Sequence[float], Callable]] = {
    "theta": ((0, 1e-30, 1e-4, np.pi / 4, np.pi / 2, np.pi), lambda r, n: r.uniform(0, 3.14, n)),
    "sigma": ((0, -0.0, 1e-30, 1e-3, 1, 1e15, -1, np.inf, np.nan), around(-3, 2)),
    "gamma": ((0, 1e-30, 1e-6, 1, 1 + 1e-6, 2, 1e30, -1, np.inf), around(-2, 1)),
    "depth": ((1, 1.5, 2, 1e6, np.inf, 0), around(0, 2)),
    "ridge": ((0, 1e-30, 1, 1e12, 1e30), around(-3, 2)),
    "size": ((1e-15, 1, 1e15, 0), around(-2, 2)),
    "positive": ((1e-30, 1e-3, 1, 1e30, 0, -1), around(-3, 3)),
    "nonnegative": ((0, 1e-30, 1e-3, 1, 1e30, -1), around(-3, 3)),
    "real": ((0, -0.0, 1e-30, 1, -1, 1e15, -1e15), lambda r, n: r.normal(0, 3, n)),
    "unit": ((0, 1e-30, 0.5, 1, 2, -1), lambda r, n: r.uniform(0, 1, n)),
    "probability": ((1e-30, 0.5, 0, 1), lambda r, n: r.uniform(0.01, 0.99, n)),
    "time": ((0, 1e-30, 1, 1e30, np.inf, -1), around(-3, 3)),
    "length": ((0, 1e-30, 1, 600, 601), lambda r, n: r.uniform(0, 600, n)),
    "n": ((0, 1, 2, 3, 4, 2**25), lambda r, n: np.floor(10 ** r.uniform(0, 8, n))),
}
NEAR = (-2, -1, 0, 1, 2, 3)


def drawn(kinds: Sequence[str], count: int, dtype: type, seed: int) -> list[np.ndarray]:
    """Columns of inputs as numbers of this precision; counts are whole."""
    rng, columns = np.random.default_rng(seed), []
    for kind in kinds:
        if kind == "d":  # often next to n
            close = np.maximum(columns[0] + rng.choice(NEAR, count), 0)
            column = np.where(
                rng.random(count) < 0.5, close, np.floor(10 ** rng.uniform(0, 8, count))
            )
        else:
            borders, between = KINDS[kind]
            border = rng.choice(np.asarray(borders, float), count)
            column = np.where(rng.random(count) < 0.4, border, between(rng, count))
        columns.append(column.astype(np.int64 if kind in ("n", "d") else dtype))
    return columns


def number(kind: str, value: np.generic) -> object:
    """For the reference: exact, but that the numbers next to pi/2 and pi are those."""
    if kind in ("n", "d"):
        return int(value)
    if kind == "theta":
        for angle in (mp.pi / 2, mp.pi):
            if value == value.dtype.type(angle):
                return angle
    return mp.mpf(float(value))


@dataclass(frozen=True)
class Row:
    """A function, the kinds of its inputs, and its value by mpmath, a number or several."""

    compute: Callable
    kinds: tuple[str, ...]
    exact: Callable
    C: float = 16.0
    few: int | None = None
    """Inputs, where the reference is slow."""
    borders: dict = field(default_factory=dict)


def held(row: Row, dtype: type, count: int) -> None:
    """AssertionError for an input at which the value is wrong, or not refused."""
    columns = drawn(row.kinds, count, dtype, seed=count)
    eps, big, tiny = (float(getattr(np.finfo(dtype), name)) for name in ("eps", "max", "tiny"))
    right, allowed, refused = [], [], []
    for i, given in enumerate(zip(*columns, strict=True)):
        at = [number(kind, x) for kind, x in zip(row.kinds, given, strict=True)]
        try:
            value = _values(row.exact(*at))
        except Refused:
            refused.append(i)
            continue
        right.append((i, at, value))
    with jax.enable_x64(dtype is np.float64):
        index = np.array([i for i, *_ in right])
        found = jax.tree.leaves(row.compute(*(column[index] for column in columns)))
        found = [np.broadcast_to(np.asarray(x, float), index.shape) for x in found]
        for i in refused[:12]:
            given = [column[i] for column in columns]
            with pytest.raises(ValueError, match="must"):
                pytest.fail(f"{given}: {row.compute(*given)} is not refused")
    for place, (i, at, value) in enumerate(right):
        errors = [row.C * eps * abs(v) + 4 * tiny if mp.isfinite(v) else mp.mpf(0) for v in value]
        for again in (False, True):
            wrong = [
                (x, v, e)
                for x, v, e in zip((x[place] for x in found), value, errors, strict=True)
                if not (np.isinf(x) and x * v > 0 and abs(v) + e > big * (1 - eps))
                and not (x == v or abs(mp.mpf(x) - v) <= e)
            ]
            if wrong and not again:
                errors = [e + row.C * m for e, m in zip(errors, conditioning(row, at, value, eps))]
        assert not wrong, f"{[column[i] for column in columns]}: " + ", ".join(
            f"{x} for {mp.nstr(v, 17)} +- {mp.nstr(e, 3)}" for x, v, e in wrong
        )


def conditioning(row: Row, at: Sequence, value: Sequence, eps: float) -> list:
    """What each value changes by as the real inputs move by eps of themselves."""
    total = [mp.mpf(0) for _ in value]
    for k, kind in enumerate(row.kinds):
        if kind in ("n", "d") or at[k] == 0 or not mp.isfinite(at[k]):
            continue
        moved = [mp.mpf(0) for _ in value]
        for sign in (1, -1):
            try:
                near = _values(row.exact(*at[:k], at[k] * (1 + sign * eps), *at[k + 1 :]))
            except Refused:
                continue
            moved = [max(m, abs(x - v)) if x != v else m for m, x, v in zip(moved, near, value)]
        total = [t + m for t, m in zip(total, moved)]
    return total


def _values(found: object) -> list:
    return [mp.mpf(v) for v in (found if isinstance(found, tuple) else (found,))]


# --- values by mpmath ----------------------------------------------------------------------------


def need(*conditions: bool) -> None:
    if not all(conditions):
        raise Refused


def deviation(sigma: object) -> None:
    need(mp.isfinite(sigma), sigma >= 0)


def load(gamma: object) -> None:
    need(mp.isfinite(gamma), gamma >= 0)


def scratch(n, d, sigma):
    deviation(sigma)
    need(n >= 0, d >= 1, abs(n - d) > 1 or sigma == 0)
    noise = 0 if sigma == 0 else sigma**2 * mp.mpf(min(n, d)) / (abs(n - d) - 1)
    return max(1 - mp.mpf(n) / d, 0) + noise


def scratch_limit(gamma, sigma):
    load(gamma)
    deviation(sigma)
    need(gamma != 1 or sigma == 0)
    noise = 0 if sigma == 0 else sigma**2 * min(gamma, 1) / abs(gamma - 1)
    return max(1 - gamma, 0) + noise


def linear(n, theta, sigma):
    deviation(sigma)
    need(n > 2)
    return mp.sin(theta) ** 2 + (sigma**2 + mp.sin(theta) ** 2) / (n - 2)


def ridge_risk(n, theta, sigma, ridge):
    """By Laplace transforms: 1 / (u + k)^2 is that of t e^{-kt}."""
    deviation(sigma)
    if ridge == 0:
        return linear(n, theta, sigma)
    need(n >= 1)
    k = n * ridge
    end = 60 / (2 * k + n)  # beyond it the integrands are below e^-30 or fall like a power
    nodes = [0, end / 30, end / 5, end, 10 * end, 100 * end, mp.inf]
    shrunk = mp.quad(lambda t: k * k * t * mp.exp(-k * t) * (1 + 2 * t) ** (-mp.mpf(n) / 2), nodes)
    noise = mp.quad(lambda t: n * t * mp.exp(-k * t) * (1 + 2 * t) ** (-mp.mpf(n) / 2 - 1), nodes)
    missed = mp.sin(theta) ** 2
    return missed + mp.cos(theta) ** 2 * shrunk + (sigma**2 + missed) * noise


def linear_limit(theta, ridge):
    return mp.sin(theta) ** 2 + (mp.cos(theta) * ridge / (1 + ridge)) ** 2


def best_ridge(n, theta, sigma):
    deviation(sigma)
    need(n >= 1)
    cos2 = n * (0 if theta == mp.pi / 2 else mp.cos(theta) ** 2)
    return (sigma**2 + mp.sin(theta) ** 2) / cos2 if cos2 else mp.inf


def scale(p, seen, depth):
    """Bisection of p e^{-x} + q e^{-x / depth} = 1."""
    b = 0 if mp.isinf(depth) else 1 / depth
    if p == 0 and seen == 0:
        return mp.mpf(1)
    if b == 1:
        return mp.mpf(1)
    if b == 0:
        return mp.sqrt(p / seen) if seen else mp.inf
    q = 1 - seen
    if p == 0:
        return mp.mpf(0) if q <= 0 else mp.exp((1 / b - 1) / 2 * mp.log(q))
    ends = sorted([mp.mpf(0), mp.log(p / seen)]) if seen else [mp.mpf(0), mp.log1p(p) / b]
    for _ in range(100):
        middle = sum(ends) / 2
        ends[p * mp.exp(-middle) - seen + q * mp.expm1(-b * middle) <= 0] = middle
    return mp.exp((1 - b) / 2 * ends[0])


def limit_scale(gamma, sigma, depth, size=1):
    return scale(gamma * (1 + sigma**2 / (1 - gamma)) / size**2, gamma, depth)


def gain(gamma, theta, sigma, depth, size):
    load(gamma)
    deviation(sigma)
    need(depth >= 1, size > 0, mp.isfinite(size))
    if gamma >= 1:
        return mp.mpf(0)
    c = size * limit_scale(gamma, sigma, depth, size)
    return (1 - gamma) * c * (2 * mp.cos(theta) - c)


def fine_tune(gamma, theta, sigma, depth, size):
    return scratch_limit(gamma, sigma) - gain(gamma, theta, sigma, depth, size)


def gain_at(n, d, theta, sigma, depth):
    need(d >= 1)
    return gain(mp.mpf(n) / d, theta, sigma, depth, 1)


def linear_boundary(theta, sigma):
    deviation(sigma)
    cos2, sin = mp.cos(theta) ** 2, 0 if theta == mp.pi else mp.sin(theta)
    b = 1 + cos2 - sigma**2
    root = mp.sqrt(b**2 - 4 * cos2) if mp.sqrt(cos2) < 1 - sigma else 0
    return (b - root) / 2, (b + root) / 2, 1 + (sigma / sin) ** 2 if sin else mp.inf


def fine_tune_boundary(gamma, sigma, depth):
    load(gamma)
    deviation(sigma)
    need(gamma < 1, depth >= 1)
    return mp.acos(min(limit_scale(gamma, sigma, depth) / 2, 1))


def linear_flow(n, theta, sigma, t):
    deviation(sigma)
    need(n >= 1, t >= 0, mp.isfinite(t))

    def integral(a):  # int_0^a E e^{-su} ds
        return (
            mp.log(1 + 2 * a) / 2 if n == 2 else (1 - (1 + 2 * a) ** (1 - mp.mpf(n) / 2)) / (n - 2)
        )

    missed = mp.sin(theta) ** 2
    overfit = 2 * integral(t / n) - integral(2 * t / n)
    kept = (1 + 4 * t / n) ** (-mp.mpf(n) / 2)
    return missed + mp.cos(theta) ** 2 * kept + (sigma**2 + missed) * overfit


def source_limit(gamma, theta, sigma):
    deviation(sigma)
    need(gamma > 0)
    if gamma == 1 and sigma > 0:
        return mp.inf, mp.pi / 2
    noise = 0 if mp.isinf(gamma) else sigma**2 * min(gamma, 1) / abs(gamma - 1) if sigma else 0
    size = mp.sqrt(min(gamma, 1) + noise)
    return size, mp.acos(mp.cos(theta) * min(gamma, 1) / size)


def mode(time, start, sigma):
    need(time >= 0, start >= 0, mp.isfinite(start), mp.isfinite(sigma))
    if start == 0:
        return mp.mpf(0)
    if mp.isinf(time):
        return max(sigma, mp.mpf(0))
    z = 4 * sigma * time
    grown = -mp.expm1(-z) / sigma if sigma else 4 * time
    return start / (mp.exp(-z) + start * grown)


def anchored(start, ft, anchor):
    need(anchor >= 0, mp.isfinite(anchor))
    return (ft + anchor * start) / (1 + anchor)


def crossing(level, start, sigma):
    need(0 < start <= level <= sigma, start < sigma)
    if level == sigma:
        return mp.inf
    return (mp.log(level / start) + mp.log((sigma - start) / (sigma - level))) / (4 * sigma)


def cv2(a, b, c):
    need(min(a, b, c) >= 0)
    total = (1 + a) * (1 + b) * (1 + c) - 1
    need(total > 0)
    return ((1 + a) * (1 + b) - 1) / total, b / total, a / total


def direction(h, i):
    need(h >= 1, i >= 1)
    p = h * (i + 1)
    first = 4 * mp.gamma(mp.mpf(h + 1) / 2) / (mp.sqrt(mp.pi) * mp.gamma(mp.mpf(h) / 2) * p)
    return mp.mpf(4 * h) / (p * (p + 2)) / first**2 - 1


def bound_of_risk(risk, complexity, n, delta, C):
    need(complexity >= 0, n >= 1, 0 < delta < 1, C > 0)
    return risk + 2 * complexity + 3 * C * mp.sqrt(mp.log(2 / delta) / (2 * n))


def bound_of_transfer(risk, tv, complexity, n, delta, C):
    need(0 <= tv <= 1)
    return bound_of_risk(risk, complexity, n, delta, C) + C * tv


def threshold(t, first, second):
    return (mp.ncdf(t - first) + mp.ncdf(second - t)) / 2


def discriminant_distance(tv, constant):
    need(0 <= tv <= 1, constant > 0)
    return constant * 2 * mp.sqrt(2) * mp.erfinv(tv) if tv < 1 else mp.inf


def left(mu, rate, steps):
    need(mu > 0, rate > 0, rate * mu <= 1)
    return (1 - rate * mu) ** steps


def excess(curvature, error, rate, steps):
    need(curvature > 0, rate > 0)
    return curvature * (1 - rate * curvature) ** (2 * steps) * error**2 / 2


def excess_bound(L, distance):
    need(L > 0)
    return L * distance**2 / 2


def mean_inverse(dim, m):
    if dim < 3:
        return mp.inf
    return mp.quad(lambda v: v ** (dim - 3) * mp.exp(-m * (1 - v * v) / 2), [0, 0.5, 0.9, 0.99, 1])


def noncentral(dim, m, of):
    """A Poisson mixture over j of `of(dim / 2 + j)`."""
    total, weight, j = mp.mpf(0), mp.exp(-m / 2), 0
    while weight > mp.mpf(10) ** -24 or j < m / 2:
        total += weight * of(mp.mpf(dim) / 2 + j)
        j += 1
        weight *= m / 2 / j
    return total


def cdf(y, m, dim):
    need(y >= 0, 0 <= m <= 600)
    return noncentral(dim, m, lambda a: mp.gammainc(a, 0, y / 2, regularized=True))


def tail(u, m, dim, rank):
    need(u >= 0, 0 <= m <= 600)
    if mp.isinf(u):
        return mp.mpf(1)
    x = u / (1 + u)
    return noncentral(dim, m, lambda a: mp.betainc(a, mp.mpf(rank) / 2, 0, x, regularized=True))


def law(of, columns: int):
    """Functions of vectors of a fixed length, entry by entry."""
    return lambda *x: of(*x[:columns])


ROWS = [
    Row(risks.scratch_risk, ("n", "d", "sigma"), scratch),
    Row(risks.scratch_limit, ("gamma", "sigma"), scratch_limit),
    Row(risks.linear_transfer_risk, ("n", "theta", "sigma"), linear),
    Row(risks.linear_transfer_risk, ("n", "theta", "sigma", "ridge"), ridge_risk, 256, few=12),
    Row(risks.linear_transfer_limit, ("theta", "ridge"), linear_limit),
    Row(risks.optimal_ridge, ("n", "theta", "sigma"), best_ridge),
    Row(risks.fine_tune_risk, ("gamma", "theta", "sigma", "depth", "size"), fine_tune, 128, few=60),
    Row(
        partial(risks.transferability_limit, "linear"),
        ("gamma", "theta", "sigma"),
        lambda gamma, theta, sigma: scratch_limit(gamma, sigma) - mp.sin(theta) ** 2,
    ),
    Row(
        lambda g, t, s, L, r: risks.transferability_limit("fine_tune", g, t, s, depth=L, size=r),
        ("gamma", "theta", "sigma", "depth", "size"),
        gain,
        128,
        few=60,
    ),
    Row(
        partial(risks.transferability, "linear"),
        ("n", "d", "theta", "sigma"),
        lambda n, d, theta, sigma: scratch(n, d, sigma) - linear(n, theta, sigma),
    ),
    Row(
        lambda n, d, t, s, L: risks.transferability("fine_tune", n, d, t, s, depth=L),
        ("n", "d", "theta", "sigma", "depth"),
        gain_at,
        128,
        few=60,
    ),
    Row(risks.linear_transfer_boundary, ("theta", "sigma"), linear_boundary),
    Row(risks.fine_tune_boundary, ("gamma", "sigma", "depth"), fine_tune_boundary, few=60),
    Row(training_time.linear_transfer_flow_risk, ("n", "theta", "sigma", "time"), linear_flow),
    Row(pretraining.source_limit, ("gamma", "theta", "sigma"), source_limit),
    Row(modes.mode, ("time", "nonnegative", "real"), mode),
    Row(fine_tuning.mode_limit, ("nonnegative", "nonnegative", "nonnegative"), anchored),
    Row(
        fine_tuning.mode,
        ("time", "nonnegative", "real", "nonnegative"),
        lambda t, start, ft, anchor: mode(t * (1 + anchor), start, anchored(start, ft, anchor)),
    ),
    Row(modes.crossing_time, ("positive", "positive", "positive"), crossing),
    Row(fine_tuning.misalignment_threshold, ("nonnegative",), lambda x: anchored(0, 0, x) + 2 + x),
    Row(correlation.r_squared, ("nonnegative", "nonnegative", "nonnegative"), cv2),
    Row(
        transfer.rademacher_bound,
        ("unit", "nonnegative", "n", "probability"),
        lambda *x: bound_of_risk(*x, 1),
    ),
    Row(
        transfer.transfer_bound,
        ("unit", "unit", "nonnegative", "n", "probability"),
        lambda *x: bound_of_transfer(*x, 1),
    ),
    Row(discriminant.lda_distance, ("unit", "positive"), discriminant_distance, few=60),
    Row(descent.contraction, ("positive", "positive", "n"), left),
    Row(descent.excess_bound, ("positive", "real"), excess_bound),
]


def name(row: Row) -> str:
    of = getattr(row.compute, "func", row.compute)
    return f"{of.__name__}-{'-'.join(row.kinds)}"


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_values_are_right_or_refused(row, dtype):
    with mp.workdps(60):
        held(row, dtype, row.few or 150)
