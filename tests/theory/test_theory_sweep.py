"""Every public function of `theory` over a sweep of inputs, borders included, in both precisions.

Error model: C eps |f|, plus what f changes by where each real input is off by C eps of itself. A
true value beyond the largest float may be inf; NaN is never right, and what has no value is
refused.
"""

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from cells import slow, slow_unless, soak_unless
from scipy.integrate import solve_ivp
from scipy.optimize import brentq, minimize_scalar

import theory
from sail_jax import annotations
from theory import (
    deep_linear,
    initialisation,
    linearity,
    merging,
    problems,
    student_teacher,
    two_layer,
)
from theory.deep_linear import (
    covariance,
    diagonal,
    divergences,
    overlaps,
    penalised,
    pretraining,
    ranks,
    regularised,
    risks,
    scales,
    sources,
    subspace,
    training_time,
    wishart,
)
from theory.initialisation import descent, discriminant, proximity, transfer
from theory.linearity import correlation
from theory.merging import averaging
from theory.student_teacher import arc_cosine, projection
from theory.student_teacher import networks as st_networks
from theory.student_teacher import transfer as st_transfer
from theory.two_layer import (
    adapters,
    best_time,
    fine_tuning,
    label_noise,
    low_rank,
    modes,
    perturbation,
    quantised,
    riccati,
    sharpness,
    sharpness_aware,
)
from theory.two_layer import networks as tl_networks

EPS = float(np.finfo(np.float32).eps)
SHAPE = 64
PRECISIONS = (np.float32, np.float64)
LEDGERS = (
    "adversary",
    "claims",
    "domains",
    "fingerprints",
    "followed",  # what domains alone use
    "planes",
    "certainty",  # what advice alone uses
    "coverage",
    "sweep",
    "settings",
    "testbeds",
    "regressions",
    "several",
    "linearity.tasks",
    "two_layer.tasks",
)


class RefusedError(Exception):
    """Raised by a reference where there is no value."""


# --- inputs: borders, and numbers drawn between them ---------------------------------------------


def around(low: float, high: float) -> Callable:
    return lambda rng, n: 10 ** rng.uniform(low, high, n)


COUNTS = ("n", "d", "width")
KINDS: dict[str, tuple[Sequence[float], Callable]] = {
    "theta": ((0, 1e-30, 1e-4, np.pi / 4, np.pi / 2, np.pi), lambda r, n: r.uniform(0, 3.14, n)),
    "sigma": ((0, -0.0, 1e-30, 1e-3, 1, 1e15, -1, np.inf, np.nan), around(-3, 2)),
    "load": ((0, 1e-30, 1e-6, 1, 1 + 1e-6, 2, 1e30, -1, np.inf), around(-2, 1)),
    "depth": ((1, 1.5, 2, 1e6, np.inf, 0), around(0, 2)),
    "ridge": ((0, 1e-30, 1, 1e12, 1e30), around(-3, 2)),
    "size": ((1e-15, 1, 1e15, 0), around(-2, 2)),
    "positive": ((1e-30, 1e-3, 1, 1e30, 0, -1, np.inf), around(-3, 3)),
    "nonnegative": ((0, 1e-30, 1e-3, 1, 1e30, -1), around(-3, 3)),
    "real": ((0, -0.0, 1e-30, 1, -1, 1e15, -1e15), lambda r, n: r.normal(0, 3, n)),
    "unit": ((0, 1e-30, 0.5, 1, 2, -1), lambda r, n: r.uniform(0, 1, n)),
    "mass": ((0, 1e-30, 1e-3, 1, 1e30), around(-3, 3)),
    "seen": ((0, 1e-30, 0.5, 1), lambda r, n: r.uniform(0, 1, n)),
    "probability": ((1e-30, 0.5, 0, 1), lambda r, n: r.uniform(0.01, 0.99, n)),
    "rate": ((1e-30, 1e-9, 1, 2, 0, -1), lambda r, n: r.uniform(0, 2, n)),
    "time": ((0, 1e-30, 1, 1e30, np.inf, -1), around(-3, 3)),
    "width": ((1, 2, 3, 0), lambda r, n: np.floor(10 ** r.uniform(0, 7, n))),
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
        columns.append(column.astype(np.int64 if kind in COUNTS else dtype))
    return columns


def number(kind: str, value: np.generic) -> object:
    """For the reference: exact, but that the numbers next to pi/2 and pi are those."""
    if kind in COUNTS:
        return int(value)
    if kind == "theta":
        for angle in (mp.pi / 2, mp.pi):
            if value == value.dtype.type(angle):
                return angle
    return mp.mpf(float(value))


def in_order(compute: Callable) -> Callable:
    """Gives keyword-only arguments by position, in the order of the signature."""
    parameters = inspect.signature(compute).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not names:
        return compute
    first = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    def ordered(*args):
        return compute(*args[:first], **dict(zip(names, args[first:], strict=False)))

    return ordered


@dataclass(frozen=True)
class Row:
    """A function, the kinds of its inputs, and its value by mpmath, a number or several."""

    compute: Callable
    kinds: tuple[str, ...]
    exact: Callable
    C: float = 16.0
    few: int | None = None
    """Inputs, where the reference is slow."""
    of: str = ""
    """The function's name, where `compute` calls it."""
    slow: bool = False
    """Whether its program or its reference takes seconds."""
    parts: Callable | None = None
    """Sizes of what the value is a difference of: rounding is relative to these."""


def held(row: Row, dtype: type, count: int) -> None:
    """AssertionError for an input at which the value is wrong, or not refused."""
    columns = drawn(row.kinds, count, dtype, seed=count)
    eps, big, tiny = (float(getattr(np.finfo(dtype), name)) for name in ("eps", "max", "tiny"))
    right, refused = [], []
    for i, given in enumerate(zip(*columns, strict=True)):
        at = [number(kind, x) for kind, x in zip(row.kinds, given, strict=True)]
        try:
            value = _values(row.exact(*at))
        except RefusedError:
            refused.append(i)
            continue
        right.append((i, at, value))
    with jax.enable_x64(dtype is np.float64):
        index = np.resize([i for i, *_ in right], max(count, SHAPE))  # one shape for all rows
        compute = in_order(row.compute)
        found = jax.tree.leaves(compute(*(column[index] for column in columns)))
        found = [np.broadcast_to(np.asarray(x, float), index.shape) for x in found]
        for i in refused[:12]:
            given = [column[i] for column in columns]
            with pytest.raises(ValueError, match="must"):
                pytest.fail(f"{given}: {compute(*given)} is not refused")
    for place, (i, at, value) in enumerate(right):
        sizes = [row.parts(*at)] if row.parts else [abs(v) for v in value]
        errors = [row.C * eps * v + 4 * tiny if mp.isfinite(v) else mp.mpf(0) for v in sizes]
        for again in (False, True):
            wrong = [
                (x, v, e)
                for x, v, e in zip((x[place] for x in found), value, errors, strict=True)
                if not (np.isinf(x) and x * v > 0 and abs(v) + e > big * (1 - eps))
                and not (x == v or abs(mp.mpf(x) - v) <= e)
            ]
            if wrong and not again:
                errors = [
                    e + row.C * m
                    for e, m in zip(errors, conditioning(row, at, value, eps), strict=True)
                ]
        assert not wrong, f"{[column[i] for column in columns]}: " + ", ".join(
            f"{x} for {mp.nstr(v, 17)} +- {mp.nstr(e, 3)}" for x, v, e in wrong
        )


def conditioning(row: Row, at: Sequence, value: Sequence, eps: float) -> list:
    """Computes the change of each value for relative changes of the inputs by eps."""
    total = [mp.mpf(0) for _ in value]
    for k, kind in enumerate(row.kinds):
        if kind in COUNTS or at[k] == 0 or not mp.isfinite(at[k]):
            continue
        moved = [mp.mpf(0) for _ in value]
        for sign in (1, -1):
            try:
                near = _values(row.exact(*at[:k], at[k] * (1 + sign * eps), *at[k + 1 :]))
            except RefusedError:
                continue
            moved = [
                max(m, abs(x - v)) if x != v else m
                for m, x, v in zip(moved, near, value, strict=True)
            ]
        total = [t + m for t, m in zip(total, moved, strict=True)]
    return total


def _values(found: object) -> list:
    return [mp.mpf(v) for v in (found if isinstance(found, tuple) else (found,))]


# --- values by mpmath ----------------------------------------------------------------------------


def need(*conditions: bool) -> None:
    if not all(conditions):
        raise RefusedError


def deviation(sigma: object) -> None:
    need(mp.isfinite(sigma), sigma >= 0)


def ratio(load: object) -> None:
    need(mp.isfinite(load), load >= 0)


def scratch(n, d, sigma):
    deviation(sigma)
    need(n >= 0, d >= 1, abs(n - d) > 1 or sigma == 0)
    noise = 0 if sigma == 0 else sigma**2 * mp.mpf(min(n, d)) / (abs(n - d) - 1)
    return max(1 - mp.mpf(n) / d, 0) + noise


def scratch_limit(load, sigma):
    ratio(load)
    deviation(sigma)
    need(load != 1 or sigma == 0)
    noise = 0 if sigma == 0 else sigma**2 * min(load, 1) / abs(load - 1)
    return max(1 - load, 0) + noise


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
    # t in units of 1 / (k + n), so that the integrands are of order 1: quad's error is absolute.
    k, unit = n * ridge, n * ridge + n
    end = 60 * unit / (2 * k + n)  # beyond it the integrands are below e^-30 or fall like a power
    nodes = [0, end / 30, end / 5, end, 10 * end, 100 * end, mp.inf]
    shrunk, noise = (
        mp.quad(
            lambda t, power=power: t * mp.exp(-k / unit * t) * (1 + 2 * t / unit) ** power, nodes
        )
        for power in (-mp.mpf(n) / 2, -mp.mpf(n) / 2 - 1)
    )
    shrunk, noise = (k / unit) ** 2 * shrunk, n / unit**2 * noise
    missed = mp.sin(theta) ** 2
    return missed + mp.cos(theta) ** 2 * shrunk + (sigma**2 + missed) * noise


def linear_limit(theta, ridge):
    return mp.sin(theta) ** 2 + (mp.cos(theta) * ridge / (1 + ridge)) ** 2


def best_ridge(n, theta, sigma):
    deviation(sigma)
    need(n >= 1)
    cos2 = n * (0 if theta == mp.pi / 2 else mp.cos(theta) ** 2)
    return (sigma**2 + mp.sin(theta) ** 2) / cos2 if cos2 else mp.inf


def least_penalty(n, d, distance, sigma):
    deviation(sigma)
    need(n >= 1, d >= 1, distance >= 0)
    if sigma == 0 or distance == 0:
        return mp.inf if sigma else mp.mpf(0)
    return d * sigma**2 / (n * distance**2)


def penalised_risk(n, d, distance, sigma):
    """The root of the quadratic, with digits for what cancels."""
    deviation(sigma)
    need(n >= 1, d >= 1, distance >= 0)
    with mp.workdps(400):
        b = distance**2 * (1 - mp.mpf(n) / d) - sigma**2
        return (b + mp.sqrt(b**2 + 4 * (distance * sigma) ** 2)) / 2


def distance_at(n, d, risk, sigma):
    deviation(sigma)
    need(n >= 1, d >= 1, risk >= 0, sigma > 0)
    left = risk * (1 - mp.mpf(n) / d) + sigma**2
    return risk * (risk + sigma**2) / left if left > 0 else mp.inf


def refits(n, sigma):
    deviation(sigma)
    need(n > 2)
    return mp.mpf(n)


def refitted(n, rest, sigma):
    need(rest >= 0)
    return rest + (rest + sigma**2) / (refits(n, sigma) - 2)


def allowed_rest(n, risk, sigma):
    need(risk >= 0)
    return max((risk * (refits(n, sigma) - 2) - sigma**2) / (n - 1), 0)


def transfer_load(theta, sigma):
    deviation(sigma)
    sin2 = 0 if theta == mp.pi else mp.sin(theta) ** 2
    cos2 = 0 if theta == mp.pi / 2 else mp.cos(theta) ** 2
    return cos2 * (1 + sigma**2 / sin2) if sin2 else mp.inf


def scale(p, seen, depth):
    """Bisection of p e^{-x} + q e^{-x / depth} = 1."""
    need(depth >= 1)
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


def null_scale(p, q, depth):
    return scale(p, 1 - q, depth)


def unbalanced(p, seen, r):
    """The root of x = a(p + (1 - seen) x) / a(1), x = c^2, with digits for what cancels."""
    q = 1 - seen
    with mp.workdps(200):
        start = (r + mp.sqrt(r**2 + 4)) / 2
        b = seen * r + q * start
        return mp.sqrt((b + mp.sqrt(b**2 + 4 * p)) / 2 / start)


def unbalanced_limit(load, sigma, r):
    ratio(load)
    deviation(sigma)
    need(load < 1)
    return unbalanced(load * (1 + sigma**2 / (1 - load)), load, r)


def crosses(load, theta, sigma, r):
    """Checks whether a neuron's last weight ends below 0: its flow by SciPy, for 40 kinds of
    directions.

    The kinds are Gauss-Legendre's nodes of the Marchenko-Pastur law. Time is in units in which
    every rate is at most of order 1.
    """
    start = float((r + mp.sqrt(r**2 + 4)) / 2) ** 0.5
    load, theta, sigma, r = (float(v) for v in (load, theta, sigma, r))
    if r >= 0 or np.cos(theta) >= 0.5 or start**4 >= load:
        return False
    at, weight = np.polynomial.legendre.leggauss(40)
    at = (1 + at) * np.pi / 2
    x = 1 + load + 2 * load**0.5 * np.cos(at)
    mass = (load * weight * np.sin(at) ** 2 / x) ** 0.5
    curved = np.r_[x, x]
    pull = np.r_[x * np.cos(theta) * mass, np.hypot(x * np.sin(theta), sigma * x**0.5) * mass]
    rate = 4 * load / start**2 + np.linalg.norm(pull)

    def speed(_, at):
        slope = (at[-1] * curved * at[:-1] - pull) / rate
        return np.r_[-at[-1] * slope, -at[:-1] @ slope]

    def below(_, at):  # the loss of 0
        return at[-1] * (at[-1] * (curved @ at[:-1] ** 2) / 2 - pull @ at[:-1])

    below.terminal = True
    first = np.r_[mass / start, 0 * mass, start]
    end = solve_ivp(speed, (0, 1e6), first, "LSODA", rtol=1e-9, atol=1e-9 * start, events=below)
    return pull @ end.y[:-1, -1] < 0  # there the last weight is 0, or has the sign of this


def unbalanced_risk(load, theta, sigma, r):
    c = unbalanced_limit(load, sigma, r) * (-1 if crosses(load, theta, sigma, r) else 1)
    return (1 - load) * (1 - 2 * c * mp.cos(theta) + c**2) + load * sigma**2 / (1 - load)


def unbalanced_parts(risk):
    """c is rounded by e, and (c - cos)^2 therefore by e (2 |c - cos| + e)."""
    return risk + 2 * mp.sqrt(risk) + float(np.finfo(float).eps)


def crossing_angle(load, sigma, r):
    """By bisection, in degrees."""
    ends = [60.0, 180.0]
    while ends[1] - ends[0] > 1e-4:
        middle = sum(ends) / 2
        ends[int(crosses(load, np.radians(middle), sigma, r))] = middle
    return ends[1]


def limit_scale(load, sigma, depth, size=1):
    return scale(load * (1 + sigma**2 / (1 - load)) / size**2, load, depth)


def gain(load, theta, sigma, depth, size):
    ratio(load)
    deviation(sigma)
    need(depth >= 1, size > 0, mp.isfinite(size))
    if load >= 1:
        return mp.mpf(0)
    c = size * limit_scale(load, sigma, depth, size)
    return (1 - load) * c * (2 * mp.cos(theta) - c)


def fine_tune(load, theta, sigma, depth, size):
    return scratch_limit(load, sigma) - gain(load, theta, sigma, depth, size)


def gain_at(n, d, theta, sigma, depth):
    need(d >= 1)
    return gain(mp.mpf(n) / d, theta, sigma, depth, 1)


def linear_boundary(theta, sigma):
    deviation(sigma)
    cos2, sin = mp.cos(theta) ** 2, 0 if theta == mp.pi else mp.sin(theta)
    over = 1 + (sigma / sin) ** 2 if sin else mp.inf
    if mp.sqrt(cos2) >= 1 - sigma:
        return mp.sqrt(cos2), mp.sqrt(cos2), over
    b = 1 + cos2 - sigma**2
    root = mp.sqrt(b**2 - 4 * cos2)
    return (b - root) / 2, (b + root) / 2, over


def equal_sin2(n, d, sigma):
    """sin^2 at which the mean risks are equal; each is infinite somewhere."""
    deviation(sigma)
    need(n >= 1, d >= 1)
    if n <= 2:
        return mp.mpf(0)
    if sigma and abs(n - d) <= 1:
        return mp.mpf(1)
    return min(max(((n - 2) * scratch(n, d, sigma) - sigma**2) / mp.mpf(n - 1), 0), 1)


def fine_tuning_boundary(load, sigma, depth):
    ratio(load)
    deviation(sigma)
    need(load < 1, depth >= 1)
    return mp.acos(min(limit_scale(load, sigma, depth) / 2, 1))


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


def source_limit(load, theta, sigma):
    deviation(sigma)
    need(load > 0)
    if load == 1 and sigma > 0:
        return mp.inf, mp.pi / 2
    noise = 0 if mp.isinf(load) else sigma**2 * min(load, 1) / abs(load - 1) if sigma else 0
    known = min(load, mp.mpf(1))
    across = mp.sqrt(noise + known * (1 - known) + (known * mp.sin(theta)) ** 2)
    return mp.sqrt(known + noise), mp.atan2(across, known * mp.cos(theta))


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
    need(0 < start <= level <= sigma, start < sigma < mp.inf)
    if level == sigma:
        return mp.inf
    return (mp.log(level / start) + mp.log((sigma - start) / (sigma - level))) / (4 * sigma)


def cv2(a, b, c):
    need(min(a, b, c) >= 0)
    total = (1 + a) * (1 + b) * (1 + c) - 1
    need(total > 0)
    return ((1 + a) * (1 + b) - 1) / total, b / total, a / total


def bound_of_risk(risk, complexity, n, delta, C):
    need(complexity >= 0, n >= 1, 0 < delta < 1, C > 0)
    return risk + 2 * complexity + 3 * C * mp.sqrt(mp.log(2 / delta) / (2 * n))


def bound_of_transfer(risk, tv, complexity, n, delta, C):
    need(0 <= tv <= 1)
    return bound_of_risk(risk, complexity, n, delta, C) + C * tv


def discriminant_distance(tv, constant):
    need(0 <= tv <= 1, 0 < constant < mp.inf)
    return constant * 2 * mp.sqrt(2) * mp.erfinv(tv) if tv < 1 else mp.inf


def left(mu, rate, steps):
    need(mu > 0, rate > 0, mp.isfinite(rate), rate * mu <= 1)
    return (1 - rate * mu) ** steps


def excess_bound(L, distance):
    need(0 < L < mp.inf)
    return L * distance**2 / 2


def walk(n):
    """E max_{k <= n} S_k / n of a simple random walk."""
    need(n >= 1)
    half, m = mp.mpf(1) / 2, (n + 1) // 2
    size = 2 * m * mp.gammaprod([m + half], [m + 1]) / mp.sqrt(mp.pi)
    still = 0 if n % 2 else mp.gammaprod([m + half], [m + 1]) / mp.sqrt(mp.pi)
    return (size - (1 - still) / 2) / n


def directions(h, i):
    need(h >= 1, i >= 1)
    p = h * (i + 1)
    first = 4 * mp.gammaprod([mp.mpf(h + 1) / 2], [mp.mpf(h) / 2]) / (mp.sqrt(mp.pi) * p)
    return mp.mpf(4 * h) / (p * (p + 2)) / first**2 - 1


def tail_of_two(ratio, length):
    """For dim = rank = 2 the mixture of beta functions is a geometric one."""
    need(ratio >= 0, 0 <= length <= 600)
    return ratio / (1 + ratio) * mp.exp(-length / 2 / (1 + ratio))


def cdf_of_one(y, length):
    """For dim = 1 Y is the square of a normal."""
    need(y >= 0, 0 <= length <= 600)
    with mp.workdps(400):  # the two cancel where y is small
        a, b = mp.sqrt(y), mp.sqrt(length)
        return (mp.erf((a - b) / mp.sqrt(2)) + mp.erf((a + b) / mp.sqrt(2))) / 2


def ended(h, eta, sigma, spacing, rates, weights):
    """The share of x_0, and the noise, of sum_j weights_j x_j: the coefficients of x_0 and of each
    interval's noise, from interval to interval."""
    with mp.workdps(400):  # 1 - u, and what nearly equal numbers differ by
        x, total = [mp.mpf(1)], [mp.mpf(weights[0])]
        for d, c in zip(rates, weights[1:], strict=True):
            r = 1 - eta * h * d
            steps = spacing if r**2 == 1 else (1 - r ** (2 * spacing)) / (1 - r**2)
            x = [v * r**spacing for v in x] + [eta * d * sigma * mp.sqrt(steps)]
            total = [t + c * v for t, v in zip([*total, 0], x, strict=True)]
        return total[0], sum(t * t for t in total[1:])


CHECKPOINTS = (0.25, 0.0, 0.5, 0.25, 0.0)
AVERAGE = ((1, 1, 1, 1), CHECKPOINTS)
DECAY = ((0.75, 0.75, 0.25, 0), (0, 0, 0, 0, 1))


def quadratic(h, eta, sigma, spacing, variance=0):
    need(h > 0, 0 < eta * h < 2, sigma >= 0, spacing >= 1, variance >= 0)


def ends(run, h, eta, sigma, spacing, mean, variance):
    quadratic(h, eta, sigma, spacing, variance)
    left, noise = ended(h, eta, sigma, spacing, *run)
    bias, variance = mean * left, variance * left**2 + noise
    return bias, variance, h * (bias**2 + variance) / 2


def even(h, eta, sigma, spacing):
    """Finds where mean^2 + v, with the stationary variance v, makes both losses equal."""
    quadratic(h, eta, sigma, spacing)
    with mp.workdps(400):
        (a, of_a), (b, of_b) = (ended(h, eta, sigma, spacing, *run) for run in (AVERAGE, DECAY))
        v, more, less = eta * sigma**2 / (h * (2 - eta * h)), a**2 - b**2, of_b - of_a
        if more > 0:
            return mp.sqrt(max(less / more - v, 0))
        return mp.inf if less > v * more else mp.mpf(0)


def windows(t):
    need(0 < t < mp.inf)
    with mp.workdps(400):
        lost, root = -mp.expm1(-t), mp.sqrt(t)
        average = lost / t, 2 * (t - lost) / t**2
        return *average, mp.exp(-t / 2), mp.sqrt(mp.pi) / root * mp.erf(root) / 2


def even_of_windows(t):
    with mp.workdps(400):
        bias, noise, of_decay, noise_of_decay = windows(t)
        return mp.sqrt((noise_of_decay - noise) / (bias**2 - of_decay**2))


def window(distance):
    """By bisection of the logarithm."""
    need(0 <= distance < mp.inf)
    if 5 * distance**2 <= 1:
        return mp.mpf(0)
    ends = [mp.mpf(-40), mp.mpf(120)]
    for _ in range(80):
        middle = sum(ends) / 2
        ends[even_of_windows(mp.exp(middle)) > distance] = middle
    return mp.exp(ends[0])


# of Poisson weights e^x, |x| up to 2e3
POISSON = 4096

ROWS = [
    Row(risks.scratch_risk, ("n", "d", "sigma"), scratch),
    Row(risks.scratch_limit, ("load", "sigma"), scratch_limit),
    Row(risks.linear_transfer_risk, ("n", "theta", "sigma"), linear),
    Row(
        risks.linear_transfer_risk,
        ("n", "theta", "sigma", "ridge"),
        ridge_risk,
        256,
        few=12,
        slow=True,
    ),
    Row(risks.linear_transfer_limit, ("theta", "ridge"), linear_limit),
    Row(risks.optimal_ridge, ("n", "theta", "sigma"), best_ridge),
    Row(penalised.best_penalty, ("n", "d", "nonnegative", "sigma"), least_penalty),
    Row(penalised.best_risk, ("n", "d", "nonnegative", "sigma"), penalised_risk),
    Row(penalised.distance2_of, ("n", "d", "nonnegative", "sigma"), distance_at),
    Row(risks.refitted_risk, ("n", "nonnegative", "sigma"), refitted),
    Row(risks.rest_allowed, ("n", "nonnegative", "sigma"), allowed_rest),
    Row(
        regularised.direction_risk,
        ("n", "d", "theta", "sigma"),
        lambda n, d, t, s: refitted(n, penalised_risk(refits(n, s) - 1, d - 1, mp.sin(t), s), s),
    ),
    Row(regularised.linear_transfer_load, ("theta", "sigma"), transfer_load),
    Row(
        risks.fine_tuning_risk,
        ("load", "theta", "sigma", "depth", "size"),
        fine_tune,
        128,
        few=60,
        parts=lambda *x: scratch_limit(x[0], x[2]) + abs(gain(*x)),
    ),
    Row(
        partial(risks.transferability_limit, "linear"),
        ("load", "theta", "sigma"),
        lambda load, theta, sigma: scratch_limit(load, sigma) - mp.sin(theta) ** 2,
        parts=lambda load, theta, sigma: scratch_limit(load, sigma) + mp.sin(theta) ** 2,
    ),
    Row(
        lambda g, t, s, L, r: risks.transferability_limit(
            "fine_tuning", load=g, theta=t, sigma=s, depth=L, size=r
        ),
        ("load", "theta", "sigma", "depth", "size"),
        gain,
        128,
        few=60,
        of="deep_linear.risks.transferability_limit",
    ),
    Row(
        partial(risks.transferability, "linear"),
        ("n", "d", "theta", "sigma"),
        lambda n, d, theta, sigma: scratch(n, d, sigma) - linear(n, theta, sigma),
        parts=lambda n, d, theta, sigma: scratch(n, d, sigma) + linear(n, theta, sigma),
    ),
    Row(
        lambda n, d, t, s, L: risks.transferability(
            "fine_tuning", n=n, d=d, theta=t, sigma=s, depth=L
        ),
        ("n", "d", "theta", "sigma", "depth"),
        gain_at,
        128,
        few=60,
        of="deep_linear.risks.transferability",
    ),
    Row(overlaps.scale_by_seen, ("mass", "seen", "depth"), scale, 128, few=60),
    Row(overlaps.null_scale, ("mass", "seen", "depth"), null_scale, 128, few=60),
    Row(
        scales.unbalanced_scale,
        ("mass", "seen", "real"),
        lambda p, q, r: unbalanced(p, 1 - q, r),
    ),
    Row(
        scales.unbalanced_risk,
        ("load", "theta", "sigma", "real"),
        unbalanced_risk,
        parts=lambda *at: unbalanced_parts(unbalanced_risk(*at)),
    ),
    Row(
        scales.unbalanced_boundary,
        ("load", "sigma", "real"),
        lambda load, sigma, r: mp.acos(min(unbalanced_limit(load, sigma, r) / 2, 1)),
    ),
    Row(risks.linear_transfer_boundary, ("theta", "sigma"), linear_boundary),
    Row(
        risks.linear_transfer_sin2,
        ("n", "d", "sigma"),
        equal_sin2,
        parts=lambda n, d, sigma: (
            1 + 0 * n
            if n <= 2 or abs(n - d) <= 1
            else ((n - 2) * scratch(n, d, sigma) + sigma**2) / mp.mpf(n - 1)
        ),
    ),
    Row(risks.fine_tuning_boundary, ("load", "sigma", "depth"), fine_tuning_boundary, few=60),
    Row(training_time.linear_transfer_flow_risk, ("n", "theta", "sigma", "time"), linear_flow),
    Row(pretraining.source_limit, ("load", "theta", "sigma"), source_limit),
    Row(modes.mode, ("time", "nonnegative", "real"), mode),
    Row(
        fine_tuning.mode_limit,
        ("nonnegative", "real", "nonnegative"),
        lambda *x: max(anchored(*x), mp.mpf(0)),
    ),
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
    Row(
        jax.jit(lambda x: problems.log1p(-x)),  # compiled, differences of rounded sums are lost
        ("seen",),
        lambda x: mp.log1p(-x) if x < 1 else -mp.inf,
        of="problems.log1p",
    ),
    Row(jax.jit(lambda x: problems.log1p(x)), ("mass",), mp.log1p, of="problems.log1p"),
    Row(
        np.vectorize(problems.wallis),
        ("width",),
        lambda m: mp.gammaprod([m + mp.mpf(1) / 2], [m + 1]) / mp.sqrt(mp.pi),
        of="problems.wallis",
    ),
    Row(
        np.vectorize(transfer.threshold_complexity),
        ("width",),
        walk,
        of="initialisation.transfer.threshold_complexity",
    ),
    Row(
        np.vectorize(lambda h, i: float(linearity.direction_cv2(int(h), int(i)))),
        ("width", "width"),
        directions,
        of="linearity.correlation.direction_cv2",
    ),
    Row(
        lambda u, m: proximity.tail(u, 2, m, rank=2),
        ("nonnegative", "length"),
        tail_of_two,
        POISSON,
        slow=True,
        of="initialisation.proximity.tail",
    ),
    Row(
        lambda y, m: proximity.distance_cdf(y, 1, m),
        ("nonnegative", "length"),
        cdf_of_one,
        POISSON,
        slow=True,
        of="initialisation.proximity.distance_cdf",
    ),
    Row(
        lambda *x: averaging.averaged(averaging.NoisyQuadratic(*x), CHECKPOINTS),
        ("seen", "rate", "nonnegative", "width", "real", "nonnegative"),
        partial(ends, AVERAGE),
        of="merging.averaging.averaged",
    ),
    Row(
        lambda *x: averaging.decayed(averaging.NoisyQuadratic(*x), CHECKPOINTS),
        ("seen", "rate", "nonnegative", "width", "real", "nonnegative"),
        partial(ends, DECAY),
        of="merging.averaging.decayed",
    ),
    Row(
        lambda *x: averaging.break_even(averaging.NoisyQuadratic(*x), CHECKPOINTS),
        ("seen", "rate", "nonnegative", "width"),
        even,
        64,
        of="merging.averaging.break_even",
    ),
    Row(averaging.dense, ("time",), windows),
    Row(averaging.dense_break_even, ("time",), even_of_windows, 64),
    Row(
        np.vectorize(averaging.dense_window, otypes=[float]),
        ("nonnegative",),
        window,
        64,
        few=30,
        of="merging.averaging.dense_window",
    ),
]


def name(row: Row) -> str:
    of = getattr(row.compute, "func", row.compute)
    return f"{row.of or of.__name__}-{'-'.join(row.kinds)}"


# One row of six is quick, and the others are slow. Rows that take seconds are one level higher, and
# so is float64.
LEVELS = ([], pytest.mark.slow, pytest.mark.soak)
# float32 overflows and rounds sooner: float64 waits for the slow tests.
SINGLE_FIRST = (np.float32, *slow(np.float64))


@pytest.mark.parametrize("count", [50, soak_unless(False, 10_000)])
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        pytest.param(row, dtype, marks=LEVELS[(i % 6 > 0) + (row.slow or dtype is np.float64)])
        for i, row in enumerate(ROWS)
        for dtype in PRECISIONS
    ],
    ids=[f"{name(row)}-{dtype.__name__}" for row in ROWS for dtype in PRECISIONS],
)
def test_values_are_right_or_refused(row, dtype, count):
    with mp.workdps(60):
        held(row, dtype, (row.few or 100) * count // 100)


@pytest.mark.parametrize("dtype", SINGLE_FIRST)
@pytest.mark.parametrize(
    ("compute", "value"),
    [
        (
            lambda: risks.linear_transfer_risk(n=1e8, theta=1.0, sigma=0.1, ridge=1e12),
            1 - 2e-12 * np.cos(1) ** 2,
        ),
        (lambda: risks.scratch_risk(n=2**25, d=2**25 + 2, sigma=1.0), 2**25 + 2 / (2**25 + 2)),
        (lambda: risks.scratch_risk(n=2**25, d=2**25 + 3, sigma=1.0), 2**24 + 3 / (2**25 + 3)),
        (lambda: risks.optimal_ridge(n=10, theta=np.pi / 2, sigma=0.1), np.inf),
        (lambda: modes.mode(1e4, 0.0, 1.0), 0.0),
        (lambda: modes.mode(np.inf, 0.5, 0.0), 0.0),
        (lambda: modes.mode(np.inf, 0.5, -1.0), 0.0),
        (lambda: fine_tuning.mode(np.inf, 0.0, 2.0), 0.0),
        (lambda: fine_tuning.mode(np.inf, 0.5, 2.0), 2.0),
        (lambda: fine_tuning.mode_limit(1e30, 1.0, 1e30), 1e30),
        (lambda: overlaps.null_scale(0.0, 0.5, np.inf), 0.0),
        (lambda: overlaps.null_scale(0.0, 0.0, 1), 1.0),
        (lambda: overlaps.scale_by_seen(1.0, 0.0, np.inf), np.inf),
        (lambda: overlaps.scale_by_seen(0.0, 0.41, 2), 0.59**0.5),
        (lambda: merging.exact(bed(**ONE_STEP)).update[0], 0.41**2),
        (lambda: transfer.empirical_total_variation([0.41, 0.59], [0.41, 0.59], 1, 1), 0.4838),
        (lambda: discriminant.lda_parameters([[1.0], [-1.0]], prior=0.41)[1], np.log(0.41 / 0.59)),
        (lambda: covariance.effective_ridge([1.0, 1.0, 1.0], 3, 1e-30), 1e-15),
        (
            lambda: covariance.scratch_risk(np.array([3.0, 2.0, 1.0]), np.ones(3), n=3, sigma=0.0),
            0.0,
        ),
        (
            lambda: covariance.scratch_risk(np.array([3.0, 2.0, 1.0]), np.ones(3), n=3, sigma=0.5),
            np.inf,
        ),
        (lambda: covariance.scratch_risk(np.array([1.0, 0.0]), np.ones(2), n=3, sigma=1.0), 0.5),
    ],
)
def test_borders_have_their_values(compute, value, dtype):
    """And values at which XLA's log1p is off by 100 units of rounding."""
    with jax.enable_x64(dtype is np.float64):
        assert float(compute()) == pytest.approx(value, 16 * float(np.finfo(dtype).eps), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "sigma", "r"), [(0.4, 0.3, -2.0), (0.98, 5.0, -6.0), (0.1, 1.0, -0.5)]
)
def test_a_neuron_crosses_where_its_flow_does(load, sigma, r):
    """The steps of both flows err by some thousandths of a degree."""
    found = np.degrees(scales.crossing_angle(load=load, sigma=sigma, imbalance=r))
    assert found == pytest.approx(crossing_angle(load, sigma, r), abs=0.01)


@pytest.mark.parametrize("dtype", SINGLE_FIRST)
@pytest.mark.parametrize("far", [{"start": 1e6}, {"start": -1e15}])
def test_dispersion_is_that_near_zero_wherever_equally_trained_experts_start(far, dtype):
    with jax.enable_x64(dtype is np.float64):
        near, distant = (merging.exact(bed(**c)).dispersion for c in ({}, far))
        # w_i (1 - w_i) of each variance and of the centres' squared distance: sums of positives
        assert float(distant) == pytest.approx(float(near), 32 * float(np.finfo(dtype).eps), 0)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        # squares that are 0 or infinite in float64: the risk of n near d was NaN, not infinite
        (
            lambda: deep_linear.scratch_risk(n=3, d=4, sigma=1e-170, allow_infinite=True),
            "sigma must be",
        ),
        (lambda: deep_linear.linear_transfer_sin2(n=9, d=4, sigma=1e170), "sigma must be"),
        (lambda: deep_linear.null_scale(np.inf, 0.5, 2), "p must be"),
        (lambda: linearity.r_squared(1.0, np.inf, 0.3), "distance must be"),
        (lambda: initialisation.lda_total_variation(np.eye(2), np.eye(2), 1.0, 2.0), "prior must"),
        (lambda: initialisation.threshold_risk(0.0, np.zeros((0, 3))), "means must be two"),
        (lambda: initialisation.empirical_risks(np.zeros(0)), "y must be labels of"),
        (lambda: merging.chi_square([]), "weights must be those of"),
        (lambda: merging.chi_square([np.inf, 0.5]), "weights must be in"),
        (lambda: merging.chi_square([0.5, 0.2]), "sum of weights must be 1"),
        (lambda: student_teacher.crossing(np.ones(1), np.ones(3)), "expected a gain for each"),
        # squares beyond the largest float, and products of 0 and infinity
        (lambda: deep_linear.scratch_fit(jnp.full((2, 2), 1e30), jnp.ones(2)), "x must be from -2"),
        (lambda: deep_linear.linear_transfer_fit(jnp.eye(2), jnp.full(2, 1e30), ONE), "y must be"),
        (lambda: deep_linear.fine_tuning_limit(jnp.eye(2), jnp.full(2, -1e30), ONE), "y must be"),
        (
            lambda: student_teacher.mercer(jnp.full((2, 2), 1e30)),
            r"mercer must be a number; got NaN where .w. is up to 1e.30",
        ),
        (
            lambda: initialisation.lda_parameters([[2e30, 1e30], [1e30, 2e30]]),
            "lda_parameters must be a number; got NaN where .means. is up to 2e.30",
        ),
        (lambda: two_layer.ideal(jnp.full((2, 2), jnp.inf), 1), "target. is up to inf"),
        (lambda: initialisation.excess_bound(np.inf, 0.0), "L must be a curvature > 0 and finite"),
        (lambda: initialisation.lda_distance(0.0, np.inf), "constant must be > 0 and finite"),
        (
            lambda: deep_linear.advise(n=9, d=5, theta=1.0, sigma=0.1, size=1e-200),
            "advise .*size. is up to 1e-200",
        ),
        (
            lambda: linearity.gap(jnp.log, jnp.array([[1.0], [-3.0]]), [0.5, 0.5]),
            "of gap .*thetas. is up to 3",
        ),
        (
            lambda: modes.crossing(0.0, 1.0, 0.0, 1.0),
            "crossing must be a number; got (float )?division by zero",
        ),
    ],
)
def test_what_has_no_value_is_refused(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "noise", "stderr"),
    [
        (1, 2.0, np.inf),  # without one block no noise shows, and the risk is finite
        (3, 0.5, 0.0),  # infinite without any block
    ],
)
def test_standard_errors_of_infinite_risks_are_numbers(seed, noise, stderr):
    x, y, source = normal(seed, 5, 4), normal(seed + 10, 5), normal(seed + 20, 4)
    found = deep_linear.advise_sample(x, x @ source + noise * y, source, blocks=2)
    assert (found.advice.risks["scratch"], found.stderr["scratch"]) == (np.inf, stderr)
    assert ("scratch" in found.undecided) == (stderr > 0)
    assert not np.isnan([*found.stderr.values()]).any()


def test_noise_without_bound_makes_the_loss_rise_at_once():
    assert two_layer.inflection_index([2.0, 1.0, 0.5], 3, 1e200) == 1


def test_a_difference_of_infinite_means_is_refused():
    with pytest.raises(
        ValueError, match=r"n must be .* \(their difference is not defined\); got 1"
    ):
        risks.transferability("linear", n=1, d=1, theta=1.0, sigma=0.1, allow_infinite=True)


# --- functions of arrays: a few inputs, float32 beside float64 ------------------------------------


def normal(seed: int, *shape: int) -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(drawn.astype(np.float32), float)  # the same in both precisions


def basis(d: int, k: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, k)))[0], float)


def learned(size2: float) -> wishart.Learned:
    return wishart.Learned(jnp.asarray(0.5, float), jnp.asarray(size2, float))


def key() -> jax.Array:
    return jax.random.key(0)


def layers(scale: float = 1.0) -> two_layer.Layers:
    return two_layer.Layers(scale * normal(1, 3, 3), scale * normal(2, 3, 3))


def aligned(scale: float = 1.0) -> two_layer.Layers:
    return two_layer.Layers(scale * jnp.eye(3), scale * jnp.eye(3))


def neurons(seed: int = 0, scale: float = 1.0) -> st_networks.Network:
    return st_networks.Network(normal(seed, 4), scale * normal(seed + 9, 4, 3))


ONE_STEP = {"curvature": [1.0], "centres": [[1.0]], "noise": 0.0, "steps": 1, "rate": 0.41}


def bed(**changes: object) -> merging.QuadraticTasks:
    given = {"curvature": [1.0, 0.2], "centres": [[1.0, 0.0], [0.0, 1.0]], "noise": 0.5,
             "samples": 40, "steps": 20, "batch": 4, "rate": 0.1}  # fmt: skip
    return merging.QuadraticTasks(**(given | changes))


def bounds_of(tasks: merging.QuadraticTasks) -> tuple:
    return merging.constants(tasks), tasks.training


def cubic(theta: jax.Array) -> jax.Array:
    return jnp.sum(theta**3)


def weighted(of: Callable, models: jax.Array) -> object:
    return of(models, WEIGHTS)


def of_cubic(of: Callable, models: jax.Array) -> object:
    return of(cubic, models, WEIGHTS)


def points() -> jax.Array:
    return normal(3, 3, 4)


def fits(n: int = 9, sigma: float = 0.5) -> list[sources.Fit]:
    return [sources.wishart_fit(normal(k, 4), n=n, sigma=sigma) for k in (1, 2)]


def regressions(
    n: int = 9, sigma: float = 0.5, turns: tuple[float, float] = (0.0, 1.0)
) -> merging.RegressionTasks:
    turn = jnp.array([[0.6, 0.8, 0.0], [-0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    inputs = jnp.diag(jnp.array([4.0, 1.0, 0.1]))
    both = [turn @ inputs @ turn.T if rotated else inputs for rotated in turns]
    return merging.RegressionTasks(both, normal(5, 2, 3), n, sigma)


WEIGHTS = (0.5, 0.25, 0.25)
ONE = jnp.array([1.0, 0.0])
SPECTRUM = ((3.0, 2.0, 1.0), (1.0, 1.0, 1.0), (1e15, 1.0, 1e-15), (1.0, 0.0, 0.0))
PLACES = (0.0, 1e-15, 0.3, np.pi / 2, np.pi)


def pairs() -> tuple[jax.Array, ...]:
    """Tasks: equal, opposite, zero, near, far, long, short and drawn ones."""
    source = np.random.default_rng(1).normal(size=(40, 3))
    target = np.random.default_rng(2).normal(size=(40, 3))
    target[0], target[1], target[2], source[3] = source[0], -source[1], 0, 0
    source[4], target[4] = 0, 0
    target[5] = source[5] * (1 + 2.0**-10)
    source[6:8] *= 1e6
    target[7:9] *= 1e6
    source[9:11] *= 1e-6
    target[10:12] *= 1e-6
    single = (x.astype(np.float32) for x in (source, target))
    return tuple(jnp.asarray(x, float) for x in single)


def over(compute: Callable, *columns: Sequence) -> list[Callable]:
    """A call for each row of the columns' product."""
    compute = in_order(compute)
    return [partial(compute, *row) for row in itertools.product(*columns)]


def each(compute: Callable, *given: Callable) -> list[Callable]:
    """A call whose arrays are made in the precision that is asked for."""
    return [lambda: compute(*(make() for make in given))]


SIGMAS = (0.0, 1e-15, 0.5, 1e15)
DATA = (lambda: normal(1, 4, 3), lambda: normal(2, 4))
WIDE = (lambda: normal(1, 3, 5), lambda: normal(2, 3))


# Calls by the functions' names: every result is finite, or inf where `INFINITE` says so, or
# refused; and float32 agrees with float64 to 1e4 eps of the largest
# entry, or of 1e-3.
FEW: dict[str, list[Callable]] = {
    "deep_linear.advice.advise": over(
        lambda n, theta, sigma: deep_linear.advise(n=n, d=5, theta=theta, sigma=sigma).risks,
        (1, 3, 4, 5, 2**25),
        PLACES,
        SIGMAS[:3],
    ),
    "deep_linear.advice.transfer_risks": over(
        lambda n, theta, sigma: deep_linear.transfer_risks(n=n, d=2**25, theta=theta, sigma=sigma),
        (1, 2, 3, 2**25 - 2, 2**25 + 2, 2**25 + 3),
        PLACES,
        SIGMAS,
    ),
    "deep_linear.advice.advise_tasks": [
        lambda n=n, s=s, d=d: (
            deep_linear.advise_tasks(normal(1, 4), s * normal(2, 4), n=n, sigma=0.1, inputs=d).risks
        )
        for n, s in ((9, 1e-9), (9, 1.0), (9, 1e9), (1, 1.0), (2, 1.0))
        for d in (None, np.diag([4.0, 2.0, 1.0, 0.5]))
    ],
    "deep_linear.advice.advise_features": [
        lambda n=n: (
            deep_linear.advise_features(normal(1, 5, 2), normal(2, 5, 1), n=n, sigma=0.1).risks
        )
        for n in (1, 2, 9, 99)
    ],
    "deep_linear.advice.advise_sample": each(
        lambda x, y, b: deep_linear.advise_sample(x, x @ b + 0.1 * y, b, blocks=4).advice.risks,
        lambda: normal(1, 60, 3),
        lambda: normal(2, 60),
        lambda: normal(3, 3),
    ),
    "deep_linear.advice.angle": [
        lambda s=s, k=k: deep_linear.angle(normal(1, 3), s * normal(k, 3))
        for s in (1e-15, 1, -1, 1e15)
        for k in (1, 2)
    ],
    "deep_linear.covariance.power_law": over(
        covariance.power_law, (1, 2, 500), (0.0, 1.0, 3.0, 30.0)
    ),
    "deep_linear.covariance.diagonalise": each(
        lambda: covariance.diagonalise(jnp.diag(jnp.array([3.0, 0.0, 1.0])), jnp.ones(3))
    ),
    "deep_linear.covariance.eigenbasis": over(
        # Signs, and directions of one eigenvalue, are any.
        lambda s: (lambda values, basis: (basis * values) @ basis.T)(
            *covariance.eigenbasis(jnp.diag(jnp.array(s)))
        ),
        SPECTRUM,
    ),
    "deep_linear.covariance.effective_ridge": over(
        lambda s, n, r: covariance.effective_ridge(jnp.array(s), n, r),
        SPECTRUM,
        (1, 2, 3, 4, 10**6),
        (0.0, 1e-30, 1e-9, 1.0, 1e15),
    ),
    "deep_linear.covariance.equivalent": over(
        lambda s, n: covariance.equivalent(jnp.array(s), n).kappa, SPECTRUM, (1, 2, 3, 9)
    ),
    "deep_linear.covariance.scratch_risk": over(
        lambda s, n, sigma, r: covariance.scratch_risk(
            jnp.array(s), jnp.ones(3), n=n, sigma=sigma, ridge=r
        ),
        SPECTRUM,
        (1, 2, 3, 9, 10**6),
        SIGMAS,
        (0.0, 1.0, 1e15),
    ),
    "deep_linear.covariance.fine_tuning_risk": over(
        lambda s, n, sigma, L: covariance.fine_tuning_risk(
            jnp.array(s), jnp.ones(3), jnp.array([1.0, 0.0, 1.0]), n=n, sigma=sigma, depth=L
        ),
        SPECTRUM,
        (1, 2, 3, 9, 10**6),
        SIGMAS,
        (1, 2, np.inf),
    ),
    "deep_linear.covariance.linear_transfer_risk": over(
        lambda s, n, sigma: covariance.linear_transfer_risk(
            jnp.array(s), jnp.ones(3), jnp.array([1.0, 0.0, 1.0]), n=n, sigma=sigma
        ),
        SPECTRUM,
        (3, 9, 10**6),
        SIGMAS,
    ),
    "deep_linear.covariance.sigma_angle": over(
        lambda s, u: covariance.sigma_angle(jnp.array(s), jnp.ones(3), jnp.array(u)),
        SPECTRUM,
        ((1.0, 1.0, 1.0), (-1.0, -1.0, -1.0), (1.0, -1.0, 1.0), (0.0, 1.0, 0.0)),
    ),
    "deep_linear.penalised.best_risk_of": over(
        # At the minimum the risk has no slope, so the penalty has half of its digits.
        lambda s, n, sigma: penalised.best_risk_of(jnp.array(s), jnp.ones(3), n=n, sigma=sigma)[1],
        SPECTRUM,
        (1, 2, 3, 9, 10**6),
        SIGMAS,
    ),
    "deep_linear.penalised.best_scaled_risk_of": over(
        lambda s, n, sigma: penalised.best_scaled_risk_of(
            jnp.array(s), jnp.array([1.0, 0.0, 1.0]), -jnp.ones(3), n=n, sigma=sigma
        )[2],
        SPECTRUM,
        (1, 2, 3, 9, 10**6),
        SIGMAS,
    ),
    "deep_linear.penalised.best_fixed_risk_of": over(
        lambda s, n, sigma: penalised.best_fixed_risk_of(
            jnp.array(s), jnp.array([1.0, 0.0, 1.0]), -jnp.ones(3), n=n, sigma=sigma
        )[2],
        SPECTRUM,
        (1, 2, 3, 9, 10**6),
        SIGMAS,
    ),
    "deep_linear.wishart.spectrum": over(wishart.spectrum, (1, 2, 9), (1, 3)),
    "deep_linear.wishart.ridge_risk": over(
        lambda n, d, sigma, penalty: wishart.ridge_risk(
            n=n, d=d, distance=1.0, sigma=sigma, penalty=penalty
        ),
        (1, 9),
        (2, 9),
        SIGMAS,
        (0.0, 1e-9, 1.0, 1e15, np.inf),
    ),
    "deep_linear.wishart.learned": over(wishart.learned, (1, 9), (2, 9), SIGMAS, (0.0, 1.0)),
    "deep_linear.regularised.distance2": over(
        lambda theta, size, scale: regularised.distance2(theta, learned(size), scale),
        PLACES,
        (1e-9, 1.0, 3.0),
        (-1.0, 0.0, 1.0),
    ),
    "deep_linear.regularised.best_scale": over(
        lambda theta, size: regularised.best_scale(theta, learned(size)), PLACES, (1e-9, 1.0)
    ),
    "deep_linear.regularised.l2sp_boundary": over(
        lambda size: regularised.l2sp_boundary(learned(size)), (1e-9, 1.0, 2.0, 3.0)
    ),
    "deep_linear.regularised.direction_sin2": over(
        regularised.direction_sin2, (2, 3, 9, 10**6), (1, 2, 9, 10**6), (0.0, 1e-3, 1.0, 1e9)
    ),
    "deep_linear.regularised.offset_from_source": over(
        lambda s, n, sigma, ridge: regularised.offset_from_source(
            jnp.array(s), jnp.ones(3), jnp.array([1.0, 0.0, 1.0]), n=n, sigma=sigma, ridge=ridge
        ),
        SPECTRUM,
        (1, 3, 9),
        SIGMAS,
        (0.0, 1.0),
    ),
    "deep_linear.regularised.across": over(
        lambda s, w: regularised.across(jnp.array(s), jnp.array(w), jnp.ones(3))[0],
        SPECTRUM,
        ((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)),
    ),
    **{
        f"deep_linear.scales.{of.__name__}": over(
            lambda load, sigma, r, of=of: of(load=load, sigma=sigma, imbalance=r),
            (0.0, 1e-6, 0.4, 0.9, 1.0),
            SIGMAS,
            (-1e15, -30.0, -1.0, 0.0, 1e15),
        )
        for of in (scales.crossing_angle, scales.opposite_boundary)
    },
    "deep_linear.scales.unbalanced_limit": [
        lambda r=r, data=data: scales.unbalanced_limit(
            *(make() for make in data), normal(3, data[0]().shape[1]), r
        )
        for r in (-30.0, 0.0, 1.0, 1e15)
        for data in (WIDE, DATA)
    ],
    "deep_linear.diagonal.diagonal_limit": [
        lambda s=s, data=data: diagonal.diagonal_limit(
            *(make() for make in data), normal(3, data[0]().shape[1]), s
        )
        for s in (1e-30, 1e-3, 1.0, 1e15)
        for data in (WIDE, DATA)
    ],
    "deep_linear.diagonal.diagonal_risk": over(
        lambda load, sigma, s: diagonal.diagonal_risk(
            [0.5, 0.25, 0.25], [1.0, 0.0, -2.0], [1.0, 1.0, 0.0], load=load, sigma=sigma, scale=s
        ),
        (0.5, 1e-3, 1.0),
        (0.5, 0.0, 1e15),
        (1e-3, 1e-20, 1e15),
    ),
    "deep_linear.diagonal.recovery_load": over(
        diagonal.recovery_load, (0.0, 0.25), (0.0, 0.25), (0.0, 0.25), (0.0, 1e-6, 0.25, 1.0)
    ),
    "deep_linear.distributions.fine_tuning_law": over(
        lambda n, theta, sigma: (
            deep_linear.fine_tuning_law(key(), n=n, d=4, theta=theta, sigma=sigma, draws=50).draws
        ),
        (1, 3, 4, 9),
        PLACES,
        (0.0, 0.5),
    ),
    "deep_linear.distributions.linear_transfer_law": over(
        lambda n, theta, sigma, of: of(
            deep_linear.linear_transfer_law(n=n, theta=theta, sigma=sigma)
        ),
        (1, 3, 9, 10**6),
        PLACES,
        (0.0, 0.5, 1e9),
        (
            lambda x: x.mean(),
            lambda x: x.variance(),
            lambda x: x.cdf(1.0),
            lambda x: x.quantile(0.5),
        ),
    ),
    "deep_linear.distributions.scratch_law": over(
        lambda n, d, sigma, of: of(deep_linear.scratch_law(n=n, d=d, sigma=sigma)),
        (1, 3, 4, 9),
        (1, 4, 5, 10**5),
        (0.0, 0.5, 1e9),
        (
            lambda x: x.mean(),
            lambda x: x.variance(),
            lambda x: x.cdf(1.0),
            lambda x: x.quantile(0.5),
        ),
    ),
    **{
        f"deep_linear.divergences.{of.__name__}": [
            lambda of=of, sigma=sigma: of(*pairs(), sigma) for sigma in (0.0, 1e-9, 1.0, 1e9)
        ]
        for of in (
            divergences.cosine_gap,
            divergences.dudley_bounds,
            divergences.kl,
            divergences.total_variation,
            divergences.wasserstein1_bounds,
            divergences.wasserstein2,
        )
    },
    "deep_linear.divergences.coupled_samples": over(
        lambda sigma: divergences.coupled_samples(key(), 9, jnp.ones(2), jnp.ones(2), sigma), SIGMAS
    ),
    "deep_linear.estimators.scratch_fit": [
        *each(deep_linear.scratch_fit, *DATA),
        *each(deep_linear.scratch_fit, *WIDE),
        *each(lambda: deep_linear.scratch_fit(jnp.zeros((2, 3)), jnp.ones(2))),
    ],
    "deep_linear.estimators.linear_transfer_fit": [
        *each(deep_linear.linear_transfer_fit, *DATA, lambda: normal(3, 3)),
        *each(lambda: deep_linear.linear_transfer_fit(jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3))),
        *each(
            lambda: deep_linear.linear_transfer_fit(
                jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3), 1.0
            )
        ),
    ],
    "deep_linear.estimators.fine_tuning_limit": [
        lambda L=L, x=x, d=d: deep_linear.fine_tuning_limit(x[0](), x[1](), normal(3, d), L)
        for L in (1, 2, np.inf)
        for x, d in ((DATA, 3), (WIDE, 5))
    ]
    + [
        lambda: deep_linear.fine_tuning_limit(jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3)),
        lambda: deep_linear.fine_tuning_limit(jnp.eye(3), jnp.zeros(3), jnp.ones(3), jnp.inf),
    ],
    "deep_linear.flow.fine_tuning_flow": [
        lambda: deep_linear.fine_tuning_flow(*(f() for f in DATA), normal(3, 3), [0.0, 1.0]),
        lambda: deep_linear.fine_tuning_flow(
            jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3), [0.0, 1.0]
        ),
    ],
    "deep_linear.flow.linear_flow": [
        lambda: deep_linear.linear_flow(*(f() for f in DATA), jnp.zeros(3), [0.0, 1.0, jnp.inf]),
        lambda: deep_linear.linear_flow(
            jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3), [0.0, jnp.inf]
        ),
    ],
    "deep_linear.networks.narrow_weights": [
        lambda L=L: deep_linear.networks.narrow_weights(normal(3, 3), L)[0] for L in (1, 2, 3)
    ]
    + [lambda: deep_linear.networks.narrow_weights(jnp.zeros(3), 2)[0]],
    "deep_linear.networks.start_of_growth": [
        lambda: deep_linear.networks.start_of_growth(
            (normal(3, 3, 3), normal(4, 3)), *(f() for f in DATA)
        ),
        lambda: deep_linear.networks.start_of_growth((normal(3, 3),), *(f() for f in DATA)),
    ],
    "deep_linear.grid.simulate_overlaps": each(
        lambda: deep_linear.simulate_overlaps(jax.random.split(key(), 2), [1, 3, 4, 6], 4).gram
    ),
    "deep_linear.grid.nested_overlaps": each(
        lambda: deep_linear.nested_overlaps(normal(1, 5, 3), normal(2, 5), jnp.eye(3, 2), [1, 2, 5])
    ),
    "deep_linear.laws.overlaps_law": over(
        lambda n, d: tuple(deep_linear.overlaps_law(key(), n=n, d=d, draws=9)[:2]),
        (1, 2, 3, 9),
        (2, 3, 9),
    ),
    "deep_linear.overlaps.bordered": each(
        lambda: overlaps.bordered(jnp.eye(2), jnp.zeros(2), jnp.ones(()))
    ),
    "deep_linear.pretraining.source_from": over(
        lambda n, theta, sigma: (
            deep_linear.source_from(
                deep_linear.overlaps_law(key(), n=n, d=3, draws=9), theta, sigma
            ).theta
        ),
        (1, 3, 9),
        PLACES,
        (0.0, 0.5),
    ),
    "deep_linear.pretraining.source_law": over(
        lambda n, theta: (
            deep_linear.source_law(key(), n=n, d=3, theta=theta, sigma=0.5, draws=9).theta
        ),
        (1, 3, 9),
        PLACES,
    ),
    "deep_linear.ranks.random_rank_risk": over(
        lambda n, distance, sigma, k: ranks.random_rank_risk(
            n=n, d=9, distance=distance, sigma=sigma, rank=k
        ),
        (0, 1, 4, 12, 10**6),
        (0.0, 1e-15, 1.0),
        SIGMAS,
        (0, 1, 6, 9),
    ),
    "deep_linear.ranks.recovered_share": over(
        ranks.recovered_share, (0.0, 1e-15, 1.0, 2.0, 1e15), (1e-15, 1.0, 4.0, 1e15)
    ),
    "deep_linear.ranks.source_rank_risks": over(
        lambda x, n, sigma: ranks.source_rank_risks(
            jnp.array([1.0, -0.5]), 0.25, jnp.array([x, 1.0]), d_over_m=2.0, n=n, sigma=sigma
        ),
        (0.0, 1.0, 2.0, 1e15),
        (2, 4, 10**6),
        SIGMAS[:3],
    ),
    "deep_linear.ranks.best_random_rank": over(
        lambda n, distance, sigma: tuple(
            ranks.best_random_rank(n=n, d=9, distance=distance, sigma=sigma)
        ),
        (0, 1, 8, 9, 12, 10**6),
        (0.0, 1e-15, 1.0),
        SIGMAS,
    ),
    "deep_linear.ranks.rank_threshold": over(
        ranks.rank_threshold, (0.0, 1e-15, 1.0), (3, 10**6), SIGMAS, (0, 1, 9)
    ),
    "deep_linear.ranks.rank_risks": over(
        lambda s, n, sigma: ranks.rank_risks(jnp.array(s), jnp.ones(3), n=n, sigma=sigma),
        SPECTRUM,
        (1, 2, 5, 10**6),
        SIGMAS[:3],
    ),
    "deep_linear.ranks.best_rank": over(
        lambda s, n, sigma: tuple(ranks.best_rank(jnp.array(s), jnp.ones(3), n=n, sigma=sigma)),
        SPECTRUM[:2],
        (1, 5, 10**6),
        SIGMAS[:3],
    ),
    "deep_linear.sources.wishart_fit": over(
        lambda n, sigma, inputs: sources.wishart_fit(
            normal(1, 4),
            n=n,
            sigma=sigma,
            inputs=None if inputs is None else jnp.diag(jnp.array(inputs)),
        ),
        (1, 2, 4, 9, 10**6),
        SIGMAS,
        (None, (4.0, 2.0, 1.0, 1e-6)),
    ),
    "deep_linear.sources.ridge_fit": over(
        lambda s, n, sigma, ridge: sources.ridge_fit(
            jnp.diag(jnp.array(s)), normal(1, 3), n=n, sigma=sigma, ridge=ridge
        ),
        SPECTRUM,
        (1, 3, 9),
        SIGMAS[:3],
        (0.0, 1.0),
    ),
    "deep_linear.sources.best_weights": over(
        lambda n, sigma: sources.best_weights(fits(n, sigma), normal(3, 4)),
        (2, 9, 10**6),
        SIGMAS[:3],
    ),
    "deep_linear.sources.expected_distances": over(
        lambda n: sources.expected_distances(fits(n), normal(3, 4), jnp.diag(jnp.arange(4.0))),
        (2, 9),
    ),
    "deep_linear.sources.start_moments": over(
        lambda a: sources.start_moments(fits(), a, normal(3, 4)), ((0.0, 0.0), (0.5, -1e3))
    ),
    "deep_linear.sources.tuned_metric": over(
        lambda s, n: sources.tuned_metric(jnp.diag(jnp.array(s)), n), SPECTRUM, (1, 2, 3, 9)
    ),
    "deep_linear.sources.tuned_risk": over(
        lambda s, n, sigma: sources.tuned_risk(
            jnp.diag(jnp.array(s)), jnp.eye(3), n=n, sigma=sigma
        ),
        SPECTRUM,
        (1, 2, 9),
        SIGMAS[:3],
    ),
    "deep_linear.subspace.overlap": over(
        lambda k: tuple(subspace.overlap(basis(5, k), normal(1, 5, 2))[:2]), (1, 2, 5)
    ),
    "deep_linear.subspace.overlap_from_angles": over(
        lambda t: tuple(subspace.overlap_from_angles(jnp.array([t]), 1, 2)[:2]),
        (0.0, 1.0, np.pi / 2),
    ),
    "deep_linear.subspace.principal_angles": [
        lambda: subspace.principal_angles(basis(5, 2), basis(5, 2)),
        lambda: subspace.principal_angles(jnp.eye(4, 2), jnp.eye(4)[:, 2:]),
        lambda: subspace.principal_angles(basis(5, 1), basis(5, 3, 1)),
    ],
    "deep_linear.subspace.linear_transfer_risk": over(
        lambda n, e, m, sigma: subspace.linear_transfer_risk(
            n=n, of=subspace.Overlap(jnp.array(e), jnp.array(m), 4, 1), sigma=sigma
        ),
        (0, 1, 2, 6, 10**6),
        (0.0, 1e-30, 1.0),
        (0.0, 0.5),
        SIGMAS[:3],
    ),
    "deep_linear.training_time.flow_risk": over(
        lambda s, n, sigma: deep_linear.flow_risk(
            jnp.array(s), jnp.ones(3), n=n, sigma=sigma, times=jnp.array([0.0, 1e-9, 1.0, 1e3])
        ),
        SPECTRUM[:2],
        (1, 3, 9, 10**6),
        (0.0, 0.5),
    ),
    "initialisation.descent.excess": over(
        lambda T, rate: initialisation.excess([1.0, 2.0], [0.5, 0.0], rate, T),
        (0, 1, 10**6),
        (1e-9, 0.5, 1.0, 0.75),
    ),
    "initialisation.descent.excess_ratio": over(
        lambda T, rate: initialisation.excess_ratio([1.0, 2.0], [0.5, 0.1], [0.1, 0.5], rate, T),
        (0, 1, 100, 10**6),
        (1e-3, 0.5, 0.75),
    ),
    "initialisation.discriminant.lda_parameters": over(
        lambda s, p: initialisation.lda_parameters(normal(1, 2, 3), s, p),
        (1e-15, 1.0, 1e15),
        (1e-15, 0.5, 1 - 2.0**-20),
    ),
    "initialisation.discriminant.lda_total_variation": over(
        lambda k, s: initialisation.lda_total_variation(normal(1, 2, 3), normal(k, 2, 3), s),
        (1, 2),
        (1e-15, 1.0, 1e15),
    ),
    "initialisation.discriminant.lda_constant": over(
        lambda g, s: initialisation.lda_constant(g * jnp.ones(3), s),
        (0.0, 1e-15, 1.0, 1e15),
        (1e-9, 1.0),
    ),
    "initialisation.discriminant.symmetric": each(initialisation.symmetric, lambda: normal(1, 3)),
    "initialisation.proximity.mean_distance": over(
        initialisation.mean_distance, (1, 9), (0.0, 600.0)
    ),
    "initialisation.proximity.mean_inverse_distance": over(
        initialisation.mean_inverse_distance, (3, 4, 9, 10**4), (0.0, 1.0, 600.0)
    ),
    "initialisation.proximity.distance_cdf": over(
        initialisation.distance_cdf, (0.0, 1.0, 1e3, np.inf), (1, 9, 10**4), (0.0, 600.0)
    ),
    "initialisation.proximity.tail": over(
        lambda u, d, m, rank: initialisation.tail(u, d, m, rank=rank),
        (0.0, 1e-15, 1.0, 1e15, np.inf),
        (1, 9, 10**4),
        (0.0, 600.0),
        (1, 9),
    ),
    "initialisation.proximity.tail_bound": over(
        initialisation.tail_bound, (0.0, 1.0, 1e15), (1, 2, 3, 9), (0.0, 600.0)
    ),
    "initialisation.transfer.empirical_risks": each(
        lambda: initialisation.empirical_risks(jnp.array([1.0, -1.0, 1.0]))
    ),
    "initialisation.transfer.empirical_total_variation": over(
        lambda p, n, m: initialisation.empirical_total_variation([p, 1 - p], [0.5, 0.5], n, m),
        (0.0, 0.5, 1.0),
        (1, 9, 2000),
        (1, 9),
    ),
    "initialisation.transfer.threshold_complexity": over(
        initialisation.threshold_complexity, (1, 2, 3, 10**3, 10**9)
    ),
    "initialisation.transfer.threshold_risk": over(
        lambda t: initialisation.threshold_risk(t, [1.0, -1.0]), (-np.inf, -1e9, 0.0, 1e9, np.inf)
    ),
    "initialisation.transfer.worst_gap": each(
        lambda: initialisation.worst_gap(jnp.array([-1.0, 1.0]), jnp.array([-1, 1]), [1.0, -1.0])
    ),
    "linearity.correlation.direction_cv2": over(
        lambda h, i: linearity.direction_cv2(h, i), (1, 2, 10, 10**3, 10**6), (1, 10, 10**3)
    ),
    "linearity.identities.squared_loss": each(
        lambda: linearity.squared_loss(points(), jnp.ones(4), WEIGHTS, 0.5)
    ),
    **{
        f"linearity.identities.{of.__name__}": each(partial(weighted, of), points)
        for of in (linearity.mean, linearity.deviations, linearity.ambiguity)
    },
    "linearity.identities.quadratic_gap": each(
        lambda: linearity.quadratic_gap(jnp.eye(4), points(), WEIGHTS)
    ),
    "linearity.identities.product_gap": each(
        lambda: linearity.product_gap([normal(1, 3, 2, 2), normal(2, 3, 2, 2)], WEIGHTS)
    ),
    **{
        f"linearity.bounds.{of.__name__}": each(partial(of_cubic, of), points)
        for of in (linearity.second_order_gap, linearity.integral_gap, linearity.supremum_bound)
    },
    "linearity.networks.gap": each(lambda: linearity.gap(cubic, points(), WEIGHTS)),
    "linearity.trees.telescope": each(lambda: linearity.telescope(cubic, points(), WEIGHTS).gaps),
    "linearity.trees.growth": over(linearity.growth, ((0.5, 0.5), (1.0, 0.0), WEIGHTS)),
    "linearity.trees.chain": over(lambda k: np.array(linearity.chain(k)), (1, 2, 9)),
    "linearity.trees.huffman": over(
        lambda w: np.array(linearity.huffman(w)), ((1.0, 0.0), WEIGHTS, (1.0,))
    ),
    "linearity.bounds.second_derivative": each(
        lambda: linearity.second_derivative(cubic, jnp.zeros(3), jnp.ones(3))
    ),
    "linearity.bounds.curvature": each(lambda: linearity.curvature(cubic, jnp.zeros(3))),
    "linearity.bounds.spread": each(lambda: linearity.spread(points(), WEIGHTS)),
    "linearity.bounds.main_term": over(
        lambda x: linearity.main_term(x, points(), WEIGHTS), (0.0, 1.0, 1e15, np.inf, np.nan, -1.0)
    ),
    "linearity.bounds.remainder": over(
        lambda x: linearity.remainder(x, points(), WEIGHTS), (0.0, 1.0, 1e15, np.inf, np.nan, -1.0)
    ),
    "linearity.bounds.loss_bound": over(
        lambda g, L: linearity.loss_bound(jnp.ones(3), WEIGHTS, g, L),
        (0.0, -1.0, np.inf),
        (0.0, 1.0, np.inf),
    ),
    **{
        f"linearity.bounds.{of.__name__}": each(
            lambda of=of, n=n: of(*(normal(k, 3) for k in range(n)), 0.5)
        )
        for of, n in ((linearity.addition, 3), (linearity.negation, 2), (linearity.forgetting, 2))
    },
    "linearity.bounds.superposition": each(
        lambda: linearity.superposition(normal(1, 3), normal(2, 2, 3), 0.5)
    ),
    "merging.bounds.excess_risk_bound": [
        lambda form=form, c=c: merging.excess_risk_bound(*bounds_of(bed(**c)), form=form)
        for form in ("printed", "corrected")
        for c in (
            {},
            {"noise": 0.0},
            {"batch": np.inf},
            {"weights": [1.0, 0.0]},
            {"steps": 10**6},
            {"samples": 1},
            {"centres": [[1.0, 0.0], [1.0, 0.0]], "noise": 0.0},
        )
    ],
    "merging.bounds.local_stability": [
        lambda form=form, c=c: merging.local_stability(*bounds_of(bed(**c)), form=form)
        for form in ("printed", "corrected")
        for c in ({}, {"noise": 0.0}, {"batch": np.inf})
    ],
    "merging.bounds.surrogate_gradient": [
        lambda form=form, c=c: merging.surrogate_gradient(*bounds_of(bed(**c)), form=form)
        for form in ("printed", "corrected")
        for c in ({}, {"noise": 0.0}, {"batch": np.inf})
    ],
    "merging.bounds.chi_square": [
        lambda w=w, form=form: merging.chi_square(w, form=form)
        for w in ([0.5, 0.5], [1.0], [1e-3, 0.999], [0.0, 1.0])
        for form in ("printed", "corrected")
    ],
    "merging.heterogeneity.heterogeneity": over(
        lambda w: merging.heterogeneity(normal(1, 2, 3), w), ([0.5, 0.5], [1.0, 0.0])
    ),
    "merging.heterogeneity.dare_heterogeneity": over(
        lambda p: merging.dare_heterogeneity(normal(1, 2, 3), [0.5, 0.5], p),
        (0.0, 0.5, 1 - 2.0**-20, 1.0),
    ),
    "merging.quadratic.exact": [
        lambda c=c: merging.exact(bed(**c))
        for c in (
            {},
            {"noise": 0.0},
            {"batch": np.inf},
            {"steps": 10**6},
            {"samples": 1},
            {"rate": 1.0},
            {"rate": 1.99},
            {"rate": 1e-15},
            {"start": 10.0},
            {"start": 1e6},
            {"centres": [[1e6, 0.0], [1e6, 1.0]]},
        )
    ],
    "merging.quadratic.constants": each(lambda: merging.constants(bed())),
    "merging.quadratic.dare": over(lambda p: merging.dare(bed(), p), (0.0, 0.5, 1 - 2.0**-20, 1.0)),
    "merging.gaussian.trim_threshold": over(
        lambda *x: merging.trim_threshold(merging.GaussianTasks(2, *x[:-1]), x[-1]),
        (0.0, 1e-100, 0.5),
        (0.0, 1e-9),
        (0.0, 1e100),
        (1e-30, 1.0),
        (1e-30, 0.2, 1.0, 0.0),
    ),
    "merging.gaussian.dense_moments": over(
        merging.dense_moments,
        (1, 3, 1e9),
        (0.0, 1.0, 1e15),
        (0.0, 1e-9, 1.0),
        (0.0, 1.0),
        (1e-9, 1.0),
    ),
    "merging.gaussian.merge_moments": over(
        lambda method, density, *x: merging.merge_moments(
            merging.GaussianTasks(2, *x), method, density
        ),
        ("average", "dare", "trim", "ties"),
        (1e-9, 1.0),
        (0.0, 1.0),
        (0.0, 1e-9, 1.0),
        (0.0, 1e15),
        (1e-9, 1.0),
        (0.0, 1.0),
    ),
    "merging.gaussian.best_merge": over(
        lambda method, noise: merging.best_merge(
            merging.GaussianTasks(2, 1.0, 0.5, noise, 0.3), method, cells=2
        ),
        ("average", "ties"),
        (0.0, 1.0, 1e9),
    ),
    "merging.experts.expert_fits": over(
        lambda n, sigma, ridge: merging.expert_fits(regressions(n, sigma), ridge),
        (1, 9, 10**6),
        SIGMAS[:3],
        (None, 0.0, 1.0),
    ),
    "merging.experts.curvature_weights": each(lambda: merging.curvature_weights(regressions())),
    "merging.experts.merge_excess": over(
        lambda sigma, weights: merging.merge_excess(
            regressions(9, sigma), merging.expert_fits(regressions(9, sigma)), weights
        ),
        SIGMAS[:3],
        ((0.5, 0.5), (0.0, -1e3), [np.eye(3), np.ones((3, 3))]),
    ),
    "merging.experts.pooled_excess": over(
        lambda n, sigma, ridge: merging.pooled_excess(regressions(n, sigma), ridge),
        (1, 2, 9, 10**6),
        SIGMAS[:3],
        (0.0, 1e-6, 1.0, 1e9),
    ),
    "merging.experts.pooled_least_squares": over(
        lambda n, sigma: merging.pooled_least_squares(regressions(n, sigma, (1.0, 1.0))),
        (1, 3, 10**6),
        SIGMAS[:3],
    ),
    "merging.experts.spread_boundary": over(
        lambda n, d, tasks, sigma: merging.spread_boundary(n=n, d=d, tasks=tasks, sigma=sigma),
        (3, 9, 1e9),
        (1, 7, 100),
        (2, 1e6),
        SIGMAS[:3],
    ),
    "merging.experts.compared": over(
        lambda s, n, sigma, kappa: merging.compared(
            s, (1.0, 0.0, 2.0), (0.0, 1.0, 0.5), n=n, tasks=3, sigma=sigma, kappa=kappa
        ),
        SPECTRUM,
        (2, 9, 10**6),
        SIGMAS[:3],
        (0.0, 1e-3, 1e9),
    ),
    "problems.angle": each(problems.angle, lambda: normal(1, 9, 3), lambda: normal(2, 9, 3)),
    "problems.cos_sin": over(problems.cos_sin, PLACES),
    "problems.draw": over(lambda theta: tuple(problems.draw(key(), 3, 2, theta, 0.5)), PLACES),
    "problems.risk": each(problems.risk, lambda: normal(1, 9, 3), lambda: normal(2, 9, 3)),
    "problems.tasks": over(lambda theta: problems.tasks(3, theta), PLACES),
    "student_teacher.arc_cosine.coactivation": [
        *each(arc_cosine.coactivation, lambda: normal(1, 4, 3), lambda: normal(2, 5, 3)),
        *each(lambda: arc_cosine.coactivation(jnp.zeros((1, 3)), normal(2, 5, 3))),
    ],
    "student_teacher.arc_cosine.gram": over(
        lambda s: arc_cosine.gram(
            s * normal(1, 4, 3), jnp.concatenate([normal(1, 4, 3), -normal(1, 4, 3)])
        ),
        (0.0, 1e-15, 1.0, 1e15),
    ),
    "student_teacher.arc_cosine.relu_mean": over(
        lambda s: arc_cosine.relu_mean(s * normal(1, 4, 3)), (0.0, 1e-15, 1.0, 1e15)
    ),
    "student_teacher.networks.inner": each(st_networks.inner, neurons, partial(neurons, 1)),
    "student_teacher.networks.risk": each(st_networks.risk, neurons, partial(neurons, 1)),
    "student_teacher.networks.variance": over(
        lambda s: st_networks.variance(neurons(0, s)), (0.0, 1.0)
    ),
    "student_teacher.networks.kernel": over(
        lambda s: st_networks.kernel(s * normal(1, 4, 3), normal(2, 5, 3)), (0.0, 1.0)
    ),
    "student_teacher.networks.ablate": over(
        lambda mu: st_networks.ablate(key(), neurons(), mu), (0.0, 0.5, 0.75, 1.0)
    ),
    "student_teacher.projection.mercer": over(
        lambda s: projection.mercer(s * normal(1, 2, 3)).eigenvalues, (0.0, 1.0)
    ),
    "student_teacher.projection.project": over(
        lambda s: tuple(projection.project(s * normal(1, 2, 3), neurons())[:2]), (0.0, 1.0)
    ),
    "student_teacher.transfer.linear_transfer": over(
        lambda s: st_transfer.linear_transfer(s * normal(1, 2, 3), normal(2, 5, 3), normal(3, 5)),
        (0.0, 1.0),
    ),
    "student_teacher.transfer.descended_transfer": over(
        lambda s, rate, steps: (
            st_transfer.descended_transfer(
                s * normal(1, 2, 3), normal(2, 5, 3), normal(3, 5), rate, steps, 0.0
            )[0].c
        ),
        (0.0, 1.0),
        (1e-15, 0.1),
        (0, 1, 2**25),
    ),
    "student_teacher.transfer.fit_power_law": [
        lambda: tuple(
            student_teacher.fit_power_law([1, 2, 4], [[4.0, 2.0, 1.0], [4.0, 1.9, 1.0]])[:2]
        ),
        lambda: tuple(
            student_teacher.fit_power_law([1, 2, 4], [[4.0, 0.0, 1.0], [4.0, 1.9, 1.0]])[:2]
        ),
    ],
    "student_teacher.transfer.interval": over(
        lambda v, level: tuple(student_teacher.interval(np.array(v), level)),
        ([1.0, 2.0], [1.0], [1.0, np.nan]),
        (0.5, 0.95, 0.0, 1.0, 2.0),
    ),
    "student_teacher.transfer.boundary": over(
        lambda outside: student_teacher.boundary(
            student_teacher.fit_power_law([1, 2, 4], [[4.0, 2.0, 1.0], [4.0, 1.9, 1.0]]), outside
        ),
        ([0.5, 0.5], [0.0, 0.5], [-1.0, 0.5]),
    ),
    "two_layer.fine_tuning.step": over(
        fine_tuning.step, (0.0, 0.5), (0.1,), (0.0, 1.0), (2.0,), (0.5,)
    ),
    "two_layer.fine_tuning.fine_tuned_spectrum": over(
        lambda n, a: two_layer.fine_tuned_spectrum([2.0, 1.0], [3.0, 0.0], n, a),
        (0, 1, 2, 3),
        (0.0, 1.0, 1e15, np.inf),
    ),
    **{
        f"two_layer.fine_tuning.{of.__name__}": over(
            lambda a, of=of: of(jnp.array([2.0, 1.0]), jnp.array([3.0, 0.0]), a),
            (0.0, 1.0, 1e15, np.inf),
        )
        for of in (
            fine_tuning.pretraining_losses,
            fine_tuning.degradations,
            fine_tuning.fine_tuning_losses,
        )
    },
    "two_layer.fine_tuning.unaligned_losses": over(
        lambda a: fine_tuning.unaligned_losses(normal(1, 2, 2), normal(2, 2, 2), a), (0.0, 1.0, 1e9)
    ),
    "two_layer.adapters.equivalent": each(
        adapters.equivalent, lambda: normal(1, 2, 3, 4), lambda: normal(2, 4)
    ),
    "two_layer.adapters.layer_weights": over(
        lambda y, w, s: adapters.layer_weights(y, [1.0, w], [0.5, 0.125], s),
        (0.0, 1e-9, 0.5, 2.0, 1e9),
        (1e-3, 1.0, 30.0),
        (1e-6, 1.0, 1e6),
    ),
    "two_layer.adapters.layer_time": over(
        lambda f, a, s: adapters.layer_time(0.25 + f / 2, f, [1.0, 0.5], [0.5, a], s),
        (0.0, 1e-9, 0.25, 0.75, 1e6),
        (0.0, 1e-6, 1.0),
        (0.25, 8.0),
    ),
    "two_layer.low_rank.degradation": over(
        lambda t, a: low_rank.degradation(
            t, jnp.array([1.5, 0.0]), [2.0, 1.0], [3.0, 0.5], 1.0, b=0.0, a=a
        ),
        (0.0, 1.0, 1e9, np.inf),
        (0.0, 1e-9, 1.0, 100.0),
    ),
    "two_layer.low_rank.flow": over(
        lambda t, s: two_layer.theta(
            low_rank.flow(aligned(0.1), jnp.diag(jnp.array([2.0, 1.0, 0.0])), [0.0, t], scale=s)
        ),
        (0.0, 1.0, 20.0),
        (0.0, 0.5, 2.0),
    ),
    "two_layer.low_rank.update": over(
        lambda r: low_rank.update(layers(), normal(3, 3, 3), r), (-1, 0, 2, 5)
    ),
    "two_layer.modes.crossing": over(
        lambda lacking: modes.crossing(jnp.array(1.0), lacking, jnp.array(0.5), jnp.array(1.0)),
        (1e-30, 1e-9, 0.1),
    ),
    "two_layer.modes.plateau_times": over(
        lambda s, tau: two_layer.plateau_times(jnp.array(s), tau), SPECTRUM, (0.0, 1.0, 1e9)
    ),
    "two_layer.modes.plateau_rates": over(
        lambda s: two_layer.plateau_rates(jnp.array(s)), SPECTRUM
    ),
    "two_layer.modes.learned_modes": over(
        lambda s: two_layer.learned_modes(jnp.diag(jnp.array(s))), SPECTRUM
    ),
    "two_layer.perturbation.perturbed_loss": over(
        lambda g: two_layer.perturbed_loss(*layers(), jnp.eye(3), g), (0.0, 1e-9, 1.0, 1e4, np.inf)
    ),
    "two_layer.perturbation.perturbed_mode_loss": over(
        lambda g: perturbation.perturbed_mode_loss(jnp.ones(3), jnp.ones(3), g),
        (0.0, 1.0, 1e4, -1.0),
    ),
    "two_layer.perturbation.plateau_losses": over(
        lambda s, g: perturbation.plateau_losses(jnp.array(s), g), SPECTRUM[:2], (0.0, 1.0, 1e4)
    ),
    "two_layer.perturbation.inflection_index": over(
        lambda g: np.array(two_layer.inflection_index([2.0, 1.0], 3, g) or 0),
        (0.0, 1.0, -1.0, np.nan),
    ),
    "two_layer.perturbation.turning_times": over(
        lambda s, g, y: perturbation.turning_times(jnp.array(s), g, y),
        SPECTRUM,
        (1e-3, 0.5, 1e3),
        (1e-30, 1e-3, 0.5, 9.0),
    ),
    "two_layer.best_time.power_law_index": over(
        lambda a, g: np.array(best_time.power_law_index(9, scale=2.0, decay=a, gamma=g)),
        (1e-9, 0.5, 1.0, 1e9, 0.0),
        (0.0, 1e-9, 0.3, 1e9, np.nan),
    ),
    "two_layer.best_time.best_time": over(
        lambda s, g, tau: best_time.best_time(s, 3, g, tau),
        SPECTRUM[:2],
        (1e-9, 0.3, 1.0, 1e9, -1.0),
        (0.0, 6.0, 1e3, np.nan),
    ),
    "two_layer.best_time.noise_time": over(
        lambda g, tau: best_time.noise_time(3, g, tau),
        (0.0, 1e-3, 0.3, 1e9, -1.0),
        (0.0, 6.0, 1e3, np.nan),
    ),
    "two_layer.quantised.rounding_noise": over(
        quantised.rounding_noise, (0.0, 1.0, 8.5, 1e9, -1.0), (1e-9, 1.0, 1e9, 0.0, np.inf)
    ),
    "two_layer.quantised.worthwhile_bits": over(
        quantised.worthwhile_bits,
        (1e-30, 1.0, 1e30, 0.0),
        (1, 64, 2**25, 0),
        (1e-30, 1.0, 1e30, -1.0),
    ),
    "two_layer.quantised.mirrored_loss": over(
        lambda g: quantised.mirrored_loss(normal(1, 3, 2), jnp.eye(3), g),
        (0.0, 1e-9, 1.0, 1e4, -1.0, np.inf),
    ),
    "two_layer.sharpness_aware.flow": over(
        lambda rho, t: sharpness_aware.flow([0.5, 0.1], [0.1, 0.1], [2.0, 1.0], rho, [0.0, t]),
        (0.0, 1e-9, 0.1, 1.0, -1.0),
        (0.0, 1.0, 30.0, -1.0),
    ),
    "two_layer.sharpness_aware.bouncing_drift": over(
        lambda rho, t: sharpness_aware.bouncing_drift([1.0, -2.0], [1.0, 0.5], rho, t),
        (0.0, 1e-9, 0.1, -1.0),
        (0.0, 1.0, -1.0),
    ),
    "two_layer.sharpness_aware.learning_time": over(
        lambda y, rho: sharpness_aware.learning_time(0.5, y, 1.0, rho),
        (1e-30, 1e-3, 0.5, 0.0, 0.6),
        (0.0, 1e-9, 0.1, 0.4999, 1.0, -1.0),
    ),
    "two_layer.sharpness_aware.imbalance_loss": over(
        lambda y, x, s: sharpness_aware.imbalance_loss(y, x, s),
        (0.0, 1e-9, 0.5, 2.0),
        (0.0, 1e-9, -1.0, 1e9),
        (1e-9, 1.0, 1e9),
    ),
    "two_layer.sharpness_aware.sharpest_decay": over(
        sharpness_aware.sharpest_decay, (0.0, 1e-9, 0.1, 1e9, -1.0), (0.0, 0.1), (0.0, 4.0, -1.0)
    ),
    "two_layer.best_time.mode_taus": over(
        lambda s, tau: best_time.mode_taus(np.diag(s), tau), SPECTRUM[:2], (0.0, 6.0, 1e9)
    ),
    "two_layer.label_noise.drift": over(
        lambda d, nu, eta: label_noise.drift([d, -0.5], [2.0, 1.0], nu, [eta] * 3),
        (0.0, 1e-9, 1.0, -1.0),
        (0.0, 1e-9, 0.5, -1.0),
        (0.0, 1e-9, 0.01, 0.5, -1.0),
    ),
    "two_layer.label_noise.annealing_rise": over(
        label_noise.annealing_rise,
        (0.0, 1e-9, 0.01, 0.5, -1.0),
        (0.0, 1e-9, 1.0),
        (0.0, 1.0, -3.0),
        (1e-9, 1.0, 0.0),
    ),
    "two_layer.sharpness.hessian": each(lambda: sharpness.hessian(layers(), jnp.eye(3))),
    "two_layer.sharpness.trace": each(lambda: sharpness.trace(layers())),
    "two_layer.sharpness.sharpness": each(lambda: sharpness.sharpness(layers(), jnp.eye(3))),
    "two_layer.sharpness.mode_sharpness": over(
        lambda y: sharpness.mode_sharpness(jnp.array([y, 1.0]), jnp.array([2.0, 1.0])),
        (0.0, 1.0, 2.0, 9.0),
    ),
    "two_layer.sharpness.sensitivity": over(
        lambda g: sharpness.sensitivity(layers(), g), (0.0, 1e-9, 1.0, 1e4, np.inf)
    ),
    "two_layer.layers.identity_start": over(
        lambda tau: two_layer.identity_start(2, tau), (0.0, 1.0, 80.0, np.inf, -np.inf, np.nan)
    ),
    "two_layer.layers.ideal": over(lambda n: two_layer.ideal(normal(1, 3, 2), n), (0, 1, 2, 3)),
    "two_layer.layers.thin": over(
        lambda n: two_layer.theta(two_layer.thin(layers(), n)), (0, 2, 3)
    ),
    **{
        f"two_layer.layers.{of.__name__}": each(of, layers)
        for of in (two_layer.theta, two_layer.size, two_layer.grams, two_layer.imbalance)
    },
    "two_layer.layers.loss": each(lambda: two_layer.loss(layers(), jnp.eye(3))),
    "two_layer.layers.tangent_kernel": each(
        lambda: two_layer.tangent_kernel(layers(), normal(1, 2, 3), normal(2, 2, 3))
    ),
    "two_layer.riccati.flow": over(
        lambda t, s, a: two_layer.theta(
            two_layer.flow(aligned(0.1), jnp.diag(jnp.array(s)), [0.0, t], anchor=a)
        ),
        (0.0, 1e-15, 1.0, 20.0),
        (*SPECTRUM[:2], (0.0, 0.0, 0.0)),
        (0.0, 1.0),
    ),
    "two_layer.riccati.trajectory": each(
        lambda: two_layer.trajectory(*aligned(0.1), jnp.eye(3), [0.0, 1.0]).loss
    ),
}

# --- functions of arrays beside NumPy in float64 --------------------------------------------------


def rooted(s: np.ndarray, n: float, ridge: complex) -> complex:
    """The one root kappa in the upper half plane, where ridge is, of the polynomial that
    ridge = kappa (1 - sum s/(s + kappa)/n) is times prod (s + kappa)."""
    whole = np.poly(-s)
    rest = sum(v * np.poly(-np.delete(s, i)) for i, v in enumerate(s)) / n
    roots = np.roots(np.polysub(np.append(np.polysub(whole, rest), 0), ridge * whole))
    (root,) = roots[roots.imag > 0]
    return root


def descended(curvature, error, rate, steps) -> float:
    """Step by step, from the definition."""
    error = np.array(error)
    for _ in range(steps):
        error = error - rate * np.array(curvature) * error
    return float(np.sum(np.array(curvature) * error**2) / 2)


def operator(matrix: np.ndarray) -> float:
    return float(np.linalg.svd(np.asarray(matrix, float))[1][0])


def edge(start: two_layer.Layers, target: np.ndarray, anchor: float) -> float:
    sizes = (operator(start.w1) ** 2 + operator(start.w2) ** 2) / 2
    return 1 / (2 * (1 + anchor) * max(operator(target), sizes))


def rise(losses: Sequence[float], first: int = 1) -> float:
    rises = enumerate(itertools.pairwise(losses))
    return next((r for r, (a, b) in rises if r >= first and a < b), np.nan)


def risen(losses: Sequence[float]) -> float:
    rises = [a < b for a, b in itertools.pairwise(losses)]
    return next((r for r in range(len(rises)) if all(rises[r:])), np.nan)


def retrained(pre: Sequence[float], ft: Sequence[float], anchor: float) -> list[float]:
    moved = [((b + anchor * a) / (1 + anchor) - a) ** 2 for a, b in zip(pre, ft, strict=True)]
    return [sum(moved[:n]) + sum(a * a for a in pre[n:]) for n in range(len(pre) + 1)]


def moved_by_adapter(time: float, rho: float, gain: float, b: float, a: float) -> float:
    """By the roots of its equation, with digits for what cancels."""
    with mp.workdps(400):
        plus, minus = (mp.mpf(gain) * (mp.mpf(b) + sign * mp.mpf(a)) ** 2 / 4 for sign in (1, -1))
        if rho == 0 and plus * minus == 0:
            return float((plus - minus) / (1 + 4 * gain * (plus + minus) * time))
        root = mp.sqrt(mp.mpf(rho) ** 2 + 4 * plus * minus)
        parts = []
        for start, pull in ((plus, rho), (minus, -rho)):
            high, low = (pull + root) / 2, (pull - root) / 2
            odds = (start - high) / (start - low) if start != low else mp.inf
            left = odds * mp.exp(-4 * gain * root * time) if start != low else None
            parts.append(low if left is None else (high - low * left) / (1 - left))
        return float(parts[0] - parts[1])


def rotated(time: float, rho: float, scale: float, row: float, q: float) -> float:
    """The direction that an adapter learns from orthogonal rows, with digits for what cancels."""
    with mp.workdps(400):
        c, t, rho = mp.mpf(scale * row), mp.mpf(scale * time), mp.mpf(rho)
        root = mp.sqrt(c**2 + 4 * rho**2)
        sinh, cosh = mp.sinh(root * t) / root, mp.cosh(root * t)
        norm = q * ((cosh + c * sinh) ** 2 - 4 * (rho * sinh) ** 2) + (1 - q) * mp.exp(2 * c * t)
        return float(2 * c * q * rho * sinh * (cosh + c * sinh) / norm)


def kept_by_adapter(pre: Sequence[float], ft: Sequence[float], rank: int) -> list[list[float]]:
    """The squares of what an adapter moves and what it leaves, for n learned modes."""
    squares = [(b - a) ** 2 for a, b in zip(pre, ft, strict=True)]
    split = [sorted(squares[:n], reverse=True) for n in range(len(pre) + 1)]
    return [[sum(s[:rank]), sum(s[rank:])] for s in split]


def no_harm(pre: Sequence[float], ft: Sequence[float], rank: int, n: int) -> float:
    """The ratio at which mode n leaves the loss as it is, by search."""
    before = kept_by_adapter(pre, ft, rank)[n - 1][0] + pre[n - 1] ** 2

    def rise(ratio: float) -> float:
        target = (*ft[: n - 1], ratio * pre[n - 1])
        return kept_by_adapter(pre[:n], target, rank)[n][0] - before

    return float(brentq(rise, 1.0, 99.0, xtol=1e-15))


def stepped(g: np.ndarray, b1: float, b2: float, eps: float) -> np.ndarray:
    """Adam's effective steps: each gradient's share of every later update, added up."""
    sizes = np.zeros_like(g)
    for s in range(len(g)):
        ages = s - np.arange(s + 1)
        v = np.tensordot((1 - b2) * b2**ages, g[: s + 1] ** 2, 1) / (1 - b2 ** (s + 1))
        sizes[: s + 1] += np.outer((1 - b1) * b1**ages / (1 - b1 ** (s + 1)), 1 / (v**0.5 + eps))
    return sizes


def or_nan(found: int | None) -> float:
    return np.nan if found is None else found


def both(z: jax.Array | np.ndarray) -> np.ndarray:
    return np.stack([np.real(z), np.imag(z)])


COMPLEX_RIDGE = jax.jit(training_time.complex_ridge)
RIDGES = np.array([1e-3j, 0.1 + 0.1j, -0.5 + 0.2j, 1 + 2j, -3 + 1e-2j])
LOSSES = ((3.0, 2.0, 1.0), (3.0, 1.0, 2.0), (1.0, 2.0, 1.0, 3.0), (1.0, 1.0), (1.0, 2.0))
SPECTRA = ((3.0, 2.0, 1.0), (9.0, 7.0, 4.5)), ((3.0, 2.0, 1.0), (1.0, 1.0, 1.0))

OVERLAPS = np.array([0.0, 2.0**-20, 0.25, 1.0])
STARTS = ((0.0, 0.5), (0.5, 0.5), (-0.5, 0.5), (0.25, -1.0), (0.0, 0.0), (2.0**-20, 2.0**-20))

# Pairs of what is computed and what it should be, relative to the largest entry.
REFERENCES: dict[str, list[tuple[Callable, Callable]]] = {
    "deep_linear.training_time.complex_ridge": [
        (
            lambda n=n: both(COMPLEX_RIDGE(jnp.array(SPECTRUM[0]), n, jnp.array(RIDGES))),
            lambda n=n: both(np.array([rooted(np.array(SPECTRUM[0]), n, z) for z in RIDGES])),
        )
        for n in (2.0, 3.0, 7.0)
    ],
    "initialisation.descent.excess": [
        (
            lambda rate=rate, T=T: descent.excess([1.0, 2.0], [0.5, -0.25], rate, T),
            lambda rate=rate, T=T: descended([1.0, 2.0], [0.5, -0.25], rate, T),
        )
        for rate in (1e-3, 0.5, 0.75, 0.96875)
        for T in (0, 1, 7)
    ],
    "merging.effective_steps.adam_steps": [
        (
            lambda g=g, b=b: merging.adam_steps(g, b1=b[0], b2=b[1], eps=0.125),
            lambda g=g, b=b: stepped(g, *b, 0.125),
        )
        for g in (np.array([[1.0, -2.0], [0.0, 3.0], [4.0, 0.5]]), np.zeros((2, 1)))
        for b in ((0.5, 0.875), (0.0, 0.0))
    ],
    "merging.effective_steps.effective_steps": [
        (
            lambda: merging.effective_steps([np.ones((2, 1)), np.ones((6, 1))]).weights,
            lambda: np.array([[0.25], [0.75]]),
        ),
        (lambda: merging.effective_steps([np.ones(2), np.ones(6)]).steps, lambda: 4.0),
    ],
    "two_layer.fine_tuning.inflection": [
        (
            lambda pair=pair, a=a: or_nan(fine_tuning.inflection(*map(jnp.array, pair), a)),
            lambda pair=pair, a=a: rise(retrained(*pair, a)),
        )
        for pair in SPECTRA
        for a in (0.0, 0.75, 1.25, 2.0, 3.0)
    ],
    "two_layer.fine_tuning.misaligned": [
        (
            lambda pair=pair, r=r: fine_tuning.misaligned(*pair, 3.25, r),
            lambda pair=pair, r=r: all(b > 3.25 * a for a, b in list(zip(*pair, strict=True))[r:]),
        )
        for pair in SPECTRA
        for r in range(4)
    ],
    "two_layer.adapters.learned": [
        (
            lambda rho=rho, c=c, t=t: adapters.learned(t, rho, 0.5, row=c, overlap=OVERLAPS),
            lambda rho=rho, c=c, t=t: np.array([rotated(t, rho, 0.5, c, q) for q in OVERLAPS]),
        )
        for rho in (-2.0, 0.0, 2.0**-20, 1.5)
        for c in (2.0**-20, 0.5, 4096.0)
        for t in (0.0, 2.0**-30, 0.25, 2.0, 1024.0)
    ],
    "two_layer.low_rank.displacement": [
        (
            lambda rho=rho, g=g, t=t: low_rank.displacement(
                t, rho, g, b=np.array([b for b, _ in STARTS]), a=np.array([a for _, a in STARTS])
            ),
            lambda rho=rho, g=g, t=t: np.array([moved_by_adapter(t, rho, g, *s) for s in STARTS]),
        )
        for rho in (-2.0, 0.0, 2.0**-40, 1.5)
        for g in (0.0, 0.5, 4.0)
        for t in (0.0, 2.0**-30, 0.25, 2.0, 1024.0)
    ],
    "two_layer.low_rank.fastest_rate": [
        (
            lambda f=f, s=s: low_rank.fastest_rate(f, s),
            lambda f=f, s=s: (
                -minimize_scalar(
                    lambda y: -4 * s * np.sqrt(y) * (f - y), bounds=(0, f), options={"xatol": 1e-12}
                ).fun
            ),
        )
        for f in (0.5, 3.0, 100.0)
        for s in (0.25, 2.0)
    ],
    "two_layer.low_rank.losses": [
        (
            lambda pair=pair, r=r: low_rank.losses(*pair, r),
            lambda pair=pair, r=r: np.transpose(
                [
                    (
                        moved,
                        moved + sum(a * a for a in pair[0][n:]),
                        left + sum(b * b for b in pair[1][n:]),
                    )
                    for n, (moved, left) in enumerate(kept_by_adapter(*pair, r))
                ]
            ),
        )
        for pair in SPECTRA
        for r in range(5)
    ],
    "two_layer.low_rank.harm_thresholds": [
        (
            lambda pair=pair, r=r: low_rank.harm_thresholds(*pair, r),
            lambda pair=pair, r=r: [no_harm(*pair, r, n) for n in range(1, len(pair[0]) + 1)],
        )
        for pair in SPECTRA
        for r in range(1, 5)
    ],
    "two_layer.modes.inflection": [
        (
            lambda x=x, r=r: or_nan(modes.inflection(np.array(x), first=r)),
            partial(rise, x, r),
        )
        for x in LOSSES
        for r in (0, 1)
    ],
    "two_layer.modes.monotone_from": [
        (lambda x=x: or_nan(modes.monotone_from(np.array(x))), partial(risen, x)) for x in LOSSES
    ],
    "two_layer.networks.stable_rate": [
        (
            lambda scale=scale, a=a: tl_networks.stable_rate(layers(scale), normal(3, 3, 3), a),
            lambda scale=scale, a=a: edge(layers(scale), normal(3, 3, 3), a),
        )
        for scale in (0.01, 1.0, 30.0)
        for a in (0.0, 2.0)
    ],
    "two_layer.riccati.substeps": [  # of a balanced start, whose |F| is 2 |A|
        (
            lambda t=t, a=a: riccati.substeps(aligned(), 3 * jnp.eye(3), [0.0, t], anchor=a),
            lambda t=t, a=a: 2 ** max(0, int(np.ceil(np.log2(2 * (3 + a) * t)))),
        )
        for t in (0.01, 1.0, 20.0)
        for a in (0.0, 1.0)
    ],
}


@pytest.mark.parametrize("dtype", SINGLE_FIRST)
@pytest.mark.parametrize("of", REFERENCES)
def test_values_are_those_of_numpy(of, dtype):
    with jax.enable_x64(dtype is np.float64):
        for i, (compute, reference) in enumerate(REFERENCES[of]):
            given, expected = np.asarray(compute(), float), np.asarray(reference(), float)
            error = 64 * float(np.finfo(dtype).eps) * np.max(np.abs(expected))
            np.testing.assert_allclose(given, expected, rtol=0, atol=error, err_msg=f"call {i}")


# Values by chance, by training, or of networks that are given: their own files hold them.
SIMULATED = [
    "deep_linear.directions.descend",
    "deep_linear.directions.flow",
    "deep_linear.directions.moving",
    "deep_linear.directions.of_samples",
    "deep_linear.directions.of_task",
    "deep_linear.directions.predictor",
    "deep_linear.directions.reduced",
    "deep_linear.directions.restored",
    "deep_linear.networks.fine_tune",
    "deep_linear.networks.gaussian_weights",
    "deep_linear.networks.least_invariant",
    "deep_linear.networks.linear_transfer",
    "deep_linear.networks.predictor",
    "deep_linear.networks.pretrain",
    "deep_linear.networks.small_weights",
    "deep_linear.subspace.simulate_fine_tuning",
    "initialisation.descent.descend",
    "linearity.bounds.sizes",
    "linearity.correlation.random_differences",
    "linearity.correlation.regression",
    "linearity.networks.cross_entropy",
    "linearity.networks.experts",
    "linearity.networks.features",
    "linearity.networks.hessian",
    "linearity.networks.init",
    "linearity.networks.mean_squared_error",
    "linearity.networks.network",
    "linearity.networks.stack",
    "linearity.networks.train",
    "linearity.trees.node_weights",
    "merging.heterogeneity.effect",
    "merging.heterogeneity.updates",
    "merging.measure.measure_constants",
    "merging.scaling.scaling",
    "merging.averaging.simulate_average",
    "merging.effective_steps.simulate_movement",
    "merging.simulation.simulate",
    "merging.experts_simulation.fit_experts",
    "merging.experts_simulation.least_risk",
    "merging.experts_simulation.mean_risks",
    "merging.gaussian_simulation.draw_tasks",
    "merging.gaussian_simulation.merge_drawn",
    "problems.in_float64",
    "problems.unchecked_in_float64",
    "student_teacher.networks.features",
    "student_teacher.networks.predict",
    "student_teacher.networks.pretrain",
    "student_teacher.networks.scratch",
    "student_teacher.networks.sphere",
    "student_teacher.networks.student",
    "student_teacher.networks.teacher",
    "student_teacher.projection.floor",
    "student_teacher.projection.operator",
    "student_teacher.transfer.crossing",
    "two_layer.adapters.reduced",
    "two_layer.layers.balanced_start",
    "two_layer.networks.adapted",
    "two_layer.networks.adapter_flow",
    "two_layer.networks.adapter_sgd",
    "two_layer.best_time.best_time_of",
    "two_layer.matrices.add_noise",
    "two_layer.matrices.gradients",
    "two_layer.matrices.label_noise",
    "two_layer.matrices.least",
    "two_layer.matrices.noisy_losses",
    "two_layer.matrices.paired",
    "two_layer.matrices.pre_train",
    "two_layer.matrices.rotations",
    "two_layer.matrices.round_off",
    "two_layer.matrices.rounded",
    "two_layer.matrices.sharpness_aware",
    "two_layer.networks.batch_objective",
    "two_layer.networks.descend",
    "two_layer.networks.gradient_flow",
    "two_layer.networks.hessian",
    "two_layer.networks.layers_flow",
    "two_layer.networks.objective",
    "two_layer.networks.perturbed_losses",
    "two_layer.networks.sgd",
]

SAMPLERS = ("_law", "samples", "draw", "simulate_overlaps", "ablate", "source_from")

INFINITE = {  # means and times that the documentation says are infinite
    "deep_linear.advice.advise", "deep_linear.advice.transfer_risks",
    "deep_linear.advice.advise_features", "deep_linear.advice.advise_tasks",
    "deep_linear.covariance.scratch_risk",
    "deep_linear.covariance.fine_tuning_risk", "deep_linear.distributions.linear_transfer_law",
    "deep_linear.distributions.scratch_law", "deep_linear.ranks.rank_risks",
    "deep_linear.sources.tuned_risk", "initialisation.proximity.tail_bound",
    "deep_linear.wishart.ridge_risk",
    "deep_linear.wishart.learned", "merging.bounds.chi_square", "merging.bounds.excess_risk_bound",
    "merging.bounds.local_stability", "merging.experts.compared",
    "student_teacher.transfer.boundary", "two_layer.best_time.best_time",
    "two_layer.sharpness_aware.learning_time",
}  # fmt: skip


def public() -> set[str]:
    """The public functions of `theory` but its ledgers and its checks of arguments."""
    names = set()
    for module in pkgutil.walk_packages(theory.__path__, "theory."):
        short = module.name.removeprefix("theory.")
        if short.endswith(LEDGERS):
            continue
        for of, value in vars(importlib.import_module(module.name)).items():
            own = callable(value) and getattr(value, "__module__", "") == module.name
            if own and not inspect.isclass(value) and not of.startswith(("_", "check")):
                names.add(f"{short}.{of}")
    # Random functions have no law of their own.
    return (
        names
        - {f"problems.{of}" for of in ("Given", "Result", "defined", "typed")}
        - {"deep_linear.drawing.phase_diagram"}
    )


def test_every_public_function_is_swept():
    rows = {row.of or _where(row.compute) for row in ROWS}
    swept = rows | FEW.keys() | REFERENCES.keys() | set(SIMULATED)
    assert public() == swept, sorted(public() ^ swept)


def test_every_public_function_refuses_what_is_not_a_number():
    undefined = {"problems.in_float64", "problems.unchecked_in_float64"}
    undefined |= {"student_teacher.transfer.crossing"}
    undefined |= {"merging.scaling.scaling"}  # NaN where a bound claims nothing
    for of in public() - undefined:
        module, name = of.rsplit(".", 1)
        function = getattr(importlib.import_module(f"theory.{module}"), name)
        layers = [function]  # former calls may be translated first
        while hasattr(layers[-1], "__wrapped__"):
            layers.append(layers[-1].__wrapped__)
        held = [cell.cell_contents for layer in layers for cell in closure(layer)]
        assert any(x is problems._checked for x in held), of


def closure(function):
    return getattr(function, "__closure__", None) or ()


class Wrong:
    """Neither a number, nor a function, nor of a class of the annotations."""


@cache
def stand_in(annotation):
    """Something that an annotation accepts, for calls that are refused before they compute."""
    accepted = annotations.read(annotation)
    if accepted is None or type(None) in accepted.classes:
        return None
    if accepted.words:
        return accepted.words[0]
    if accepted.numbers or accepted.functions:
        return jnp.ones(()) if accepted.numbers else abs
    return Mock(spec=accepted.classes[0])


def typed_arguments():
    """Each function of `public`, its arguments but one, and the name and annotation of that one."""
    decorators = {"problems.in_float64", "problems.unchecked_in_float64"}
    for of in sorted(public() - decorators | {"deep_linear.drawing.phase_diagram"}):
        module, name = of.rsplit(".", 1)
        function = getattr(importlib.import_module(f"theory.{module}"), name)
        parameters = inspect.signature(function).parameters.values()
        given = [(p, stand_in(p.annotation)) for p in parameters]
        for wrong in parameters:

            def call(value, function=function, given=given, wrong=wrong):
                given = [(p, value if p is wrong else x) for p, x in given]
                named = {p.name: x for p, x in given if p.kind is p.KEYWORD_ONLY}
                return function(*(x for p, x in given if p.kind is not p.KEYWORD_ONLY), **named)

            yield of, wrong, call


def test_every_public_function_refuses_a_wrong_type_for_each_argument():
    tried, untyped = 0, set()
    for of, parameter, call in typed_arguments():
        if (accepted := annotations.read(parameter.annotation)) is None:
            untyped.add(str(parameter.annotation))
            continue
        several = [[0.5, 0.5]] if accepted.numbers and not accepted.arrays else []
        for wrong in [Wrong(), *["5"] * (str not in accepted.classes), *several]:
            with pytest.raises((TypeError, ValueError)) as found:
                call(wrong)
            message = str(found.value)
            assert re.match(rf"{parameter.name}(:| must be) ", message), (of, message)
            got = r"got (Wrong|<.*Wrong.*>|'5'|'5' \(str\)|\[0.5, 0.5\] \(list\))$"
            assert re.search(got, message), (of, message)
            assert "\n" not in message, (of, message)
            tried += 1
    assert tried > 1000
    trees = {"typing.Any", "<class 'jaxtyping.PyTree'>"}
    assert untyped == trees | {"Axes | None", "optax.GradientTransformation"}


def _where(of: Callable) -> str:
    of = getattr(of, "func", of)
    return f"{of.__module__.removeprefix('theory.')}.{of.__name__}"


# Those that compile quickly; the others only in slow tests.
SHORT = (
    "deep_linear.covariance.effective_ridge", "initialisation.discriminant", "linearity.trees",
    "student_teacher.transfer.interval", "two_layer.modes",
)  # fmt: skip


@pytest.mark.parametrize(
    ("of", "most"),
    [
        slow_unless(of.startswith(SHORT), of, 2)
        if of.startswith(SHORT) or i % 3 == 0
        else soak_unless(False, of, 2)
        for i, of in enumerate(FEW)
    ]
    + [soak_unless(False, of, 10_000) for of in FEW],
)
def test_arrays_are_finite_or_refused_and_float32_agrees(of, most):
    calls = FEW[of]
    for i, call in enumerate(calls[:: -(-len(calls) // most)]):
        found = []
        for dtype in PRECISIONS:
            with jax.enable_x64(dtype is np.float64):
                try:
                    leaves = jax.tree.leaves(call())
                    found.append([np.asarray(x, float) for x in leaves])
                except ValueError as error:
                    found.append(str(error))
        at = f"call {i}: {getattr(call, 'args', '')}"
        if any(isinstance(x, str) for x in found):
            assert all(isinstance(x, str) for x in found), (at, found)
            continue
        for single, double in zip(*found, strict=True):
            allowed = ~np.isnan(double) if of in INFINITE else np.isfinite(double)
            assert allowed.all(), (at, double)
            finite = np.abs(double) <= float(np.finfo(np.float32).max)
            assert np.array_equal(np.isfinite(single), finite), (at, single, double)
            if of.endswith(SAMPLERS) or not finite.any():
                continue  # other precisions draw other numbers
            gap, size = np.abs(single - double)[finite].max(), np.abs(double[finite]).max()
            assert gap <= 1e4 * EPS * max(size, 1e-3), (at, single, double)
