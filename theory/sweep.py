"""Compares laws with simulators at random points of the whole domain that their checks admit.

A row of the ledger checks a law at a few points. A law may implicitly assume a sign, a branch or an
order that holds at these points. Here, every law of the limit or the course of training is computed
wherever its checks admit it: layers of either imbalance, tasks at any angle, targets of either
sign, shapes of any order. The simulators integrate the weights themselves. They share no formula
with the laws, and every comparison uses a single data set, up to the error of the integrator. Means
over noise on the weights are sums over all its values on small networks. Only label noise is drawn.

Laws that are means over data sets are not included; the ledger simulates them.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import brentq, minimize_scalar

from sail_jax import methods
from theory.deep_linear import diagonal, estimators, flow, scales
from theory.two_layer import (
    adapters,
    best_time,
    fine_tuning,
    label_noise,
    layers,
    low_rank,
    matrices,
    modes,
    networks,
    perturbation,
    quantised,
    riccati,
    sharpness,
    sharpness_aware,
)

Generator = np.random.Generator
Side = Callable[..., Any]

TOLERANCE = 1e-6  # of the largest number of the simulation
SETTLED = 1e-10  # speed at an end, relative to the first speed
LONGEST = 1e6


class Law(NamedTuple):
    """A law and its simulator, with a way to draw points of its domain.

    Attributes:
      name: The public function, or several.
      domain: The domain, in words.
      draw: Draws the arguments of both sides.
      law: Computes the law.
      simulate: Integrates the weights.
      within: The largest difference allowed, relative to the simulation.
    """

    name: str
    domain: str
    draw: Callable[[Generator], tuple]
    law: Side
    simulate: Side
    within: float = TOLERANCE


class Miss(NamedTuple):
    """A point at which a law differs from its simulator.

    Attributes:
      law: Name of the law.
      point: The number of the point.
      arguments: The arguments at the point.
      gap: The largest difference, relative to the simulation.
    """

    law: str
    point: int
    arguments: tuple
    gap: float


def sweep(law: Law, seed: int, points: int) -> Iterator[Miss]:
    """Compares a law with its simulator at random points.

    Args:
      law: The law.
      seed: Seed of the points.
      points: Number of points.

    Yields:
      The points at which they differ.
    """
    rng = np.random.default_rng(seed)
    for i in range(points):
        arguments = law.draw(rng)
        with jax.enable_x64(True):
            found = np.ravel(np.asarray(law.law(*arguments), float))
        expected = np.ravel(np.asarray(law.simulate(*arguments), float))
        gap = float(abs(found - expected).max() / max(abs(expected).max(), 1e-3))
        if not gap <= law.within:
            yield Miss(law.name, i, arguments, gap)


# --- simulators -----------------------------------------------------------------------------------


def _anywhere(_: np.ndarray) -> float:
    return 1.0


def _followed(
    speed: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    time: float,
    above: Callable[[np.ndarray], float] = _anywhere,
) -> np.ndarray:
    """Integrates an autonomous equation to a time; inf means until it is first stationary, or until
    `above` is 0.

    Later, rounding may leave a saddle at which the exact flow stays.
    """
    first = np.linalg.norm(speed(start))

    def moving(_: float, at: np.ndarray) -> float:
        return float(np.linalg.norm(speed(at)) - SETTLED * first)

    def inside(_: float, at: np.ndarray) -> float:
        return above(at)

    moving.terminal = inside.terminal = True
    found = solve_ivp(
        lambda _, at: speed(at),
        (0.0, min(time, LONGEST)),
        start,
        "LSODA",
        rtol=1e-10,
        atol=1e-12,
        events=(moving, inside) if time == np.inf and first else None,
    )
    return found.y[:, -1]


def _chain(x, y, source, depth, last, time):
    """Trains beta = u w^(depth - 1), from a last weight; u is the source divided by the rest."""
    power = depth - 1

    def speed(at: np.ndarray) -> np.ndarray:
        u, w = at[:-1], at[-1]
        slope = x.T @ (x @ u * w**power - y) / len(y)
        return -np.append(w**power * slope, w ** (power - 1) * (u @ slope) if power else 0.0)

    at = _followed(speed, np.append(source / last**power, last), time)
    return at[:-1] * at[-1] ** power


def _neuron(x, y, source, imbalance):
    """Trains beta = u w with w^2 - |u|^2 = imbalance |source|."""
    size = np.linalg.norm(source)
    last = np.sqrt((imbalance + np.hypot(imbalance, 2)) * size / 2)
    return _chain(x, y, source, 2, last, np.inf)


def _balanced(x, y, source, depth, time=np.inf):
    """Trains `depth` layers of one norm. A single layer has no last weight."""
    last = np.linalg.norm(source) ** (1 / depth) if depth > 1 else 1.0
    return _chain(x, y, source, depth, last, time)


def _entries(x, y, source, scale):
    """Trains beta = u v entry by entry, with u^2 - v^2 = scale."""
    u = np.sqrt((scale + np.hypot(scale, 2 * source)) / 2)
    d = len(source)

    def speed(at: np.ndarray) -> np.ndarray:
        slope = x.T @ (x @ (at[:d] * at[d:]) - y)
        return -np.append(at[d:] * slope, at[:d] * slope)

    at = _followed(speed, np.append(u, source / u), np.inf)
    return at[:d] * at[d:]


def _pair(b, a, target, time, scale=1.0, above=_anywhere):
    """Trains B and A on |scale B A - target|^2, and returns scale B A; `above` is a function of B A
    (`_followed`)."""
    cut = b.size

    def apart(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return at[:cut].reshape(b.shape), at[cut:].reshape(a.shape)

    def speed(at: np.ndarray) -> np.ndarray:
        one, other = apart(at)
        off = 2 * scale * (scale * one @ other - target)
        return -np.append(off @ other.T, one.T @ off)

    start = np.append(b, a)
    one, other = apart(_followed(speed, start, time, lambda at: above(np.matmul(*apart(at)))))
    return scale * one @ other


def _on_layers(weights, starts, target, scale, time=np.inf):
    """Trains B and A of every layer of a mode from B = 0, and returns the layers."""
    count = len(weights)

    def speed(at: np.ndarray) -> np.ndarray:
        b, a = at[:count], at[count:]
        whole = weights + scale * b * a
        rest = np.array([np.prod(np.delete(whole, k)) for k in range(count)])
        slope = 2 * scale * rest * (np.prod(whole) - target)
        return -np.append(slope * a, slope * b)

    at = _followed(speed, np.append(0 * starts, starts), time)
    return weights + scale * at[:count] * at[count:]


def _root(time, start, target, anchor=0.0):
    """Trains modes y = x^2 on (y - target)^2 + anchor (y - start)^2, from x = sqrt(start)."""

    def speed(x: np.ndarray) -> np.ndarray:
        return -2 * x * ((x**2 - target) + anchor * (x**2 - start))

    return _followed(speed, np.sqrt(start), time) ** 2


def _stages(pre, ft, anchor):
    """Fine-tunes from n = 0, ..., d modes, and returns both losses and the rise of the first."""
    learned = [np.where(np.arange(len(pre)) < n, pre, 0.0) for n in range(len(pre) + 1)]
    ends = [_root(np.inf, start, ft, anchor) for start in learned]
    rows = [
        (sum((y - pre) ** 2), sum((y - ft) ** 2), sum((y - pre) ** 2) - sum((at - pre) ** 2))
        for y, at in zip(ends, learned, strict=True)
    ]
    return np.transpose(rows)


def _pooled(data, penalties):
    """Trains one model on all data, |y - X b|^2 + penalty |b|^2 added over the tasks."""

    def speed(at: np.ndarray) -> np.ndarray:
        return np.sum([x.T @ (y - x @ at) for x, y in data], 0) - np.sum(penalties) * at

    return _followed(speed, np.zeros(data[0][0].shape[1]), np.inf)


def _merged(data, penalties):
    """Fits an expert for each task, and merges them by RegMean with the penalties in the Grams."""
    grams, models = [], []
    for (x, y), penalty in zip(data, penalties, strict=True):
        gram = x.T @ x + penalty * np.eye(x.shape[1])
        grams.append({"w": gram})
        models.append({"w": np.linalg.solve(gram, x.T @ y)[:, None]})
    return methods.regmean(grams=grams, off_diagonal=1.0, damping=1e-12)(models)["w"]


def _noisy(pair, target, gamma):
    """The mean loss over all signs of noise on all weights; only their variance matters."""
    b, a = pair
    noise = gamma * np.array([*product((-1, 1), repeat=b.size + a.size)])
    left, right = (
        w + z.reshape(-1, *w.shape) for w, z in zip(pair, np.split(noise, [b.size], 1), strict=True)
    )
    return np.mean(np.sum((left @ right - target) ** 2, (1, 2)))


def _mirrored(w, target, gamma):
    """The mean loss of W W^T over uniform noise on W, by Gauss's rule of three nodes."""
    nodes, rule = np.polynomial.legendre.leggauss(3)
    places = np.array([*product(range(3), repeat=w.size)])
    w = w + gamma * np.sqrt(3) * nodes[places].reshape(-1, *w.shape)
    return np.prod(rule[places] / 2, -1) @ np.sum((w @ w.mT - target) ** 2, (1, 2))


def _after(pair, target, gamma, end, time):
    """The mean loss under noise at a time of training."""
    return _noisy(matrices.pre_train(pair[0], pair[1], target, end).at(time), target, gamma)


def _least_after(pair, target, gamma, end):
    """The smallest of these losses."""
    run = matrices.pre_train(pair[0], pair[1], target, end)
    times = np.linspace(0, end, 200)
    losses = [_noisy(run.at(time), target, gamma) for time in times]
    k = int(np.argmin(losses))
    found: Any = minimize_scalar(
        lambda time: _noisy(run.at(time), target, gamma),
        bounds=(times[max(k - 1, 0)], times[min(k + 1, 199)]),
    )
    return min(losses[k], found.fun)


def _reached(level, start, target):
    """The time at which a mode reaches a level."""
    rate = 4 * target  # of the end; the start is the slower the smaller it is
    end = (30 + np.log(target / start)) / rate
    one = np.array([start])
    return brentq(lambda time: _root(time, one, target)[0] - level, 0, end, xtol=1e-9)


def _halves(target, tau):
    """The times at which u_i^T W v_i reaches half of its singular value, from e^-tau I."""
    u, s, vt = np.linalg.svd(target)
    one, end = np.exp(-tau) * np.eye(len(s)), 3 * tau / s[-1]
    run = matrices.pre_train(one, one, target, end)

    def lacking(time, i):
        b, a = run.at(time)
        return u[:, i] @ b @ a @ vt[i] - s[i] / 2

    return [brentq(lacking, 0, end, (i,)) for i in range(len(s))]


def _bits(sigma, d, span):
    """The bits at which rounding a learned mode costs what learning it gains."""

    def loss(bits, learned):
        root = np.diag(np.sqrt(learned * sigma) * (np.arange(d) == 0))
        gamma = span * 2.0**-bits / np.sqrt(12)
        return _noisy((root, root), sigma * np.diag(np.arange(d) == 0), gamma)

    return brentq(lambda bits: loss(bits, 1) - loss(bits, 0), -20, 40)


def _rounding(bits, span):
    """The error of weights in the inner half of the range."""
    weights = (np.arange(2**16) + 0.5) * 2.0**-17 * span - span / 4
    return np.std(matrices.rounded(weights, bits, span) - weights)


def _worth(d, scale, decay, gamma):
    """The number of learned modes with the smallest loss under noise."""
    sigma = scale * np.arange(1.0, d + 1) ** -decay
    roots = [np.diag(np.sqrt(sigma * (np.arange(d) < n))) for n in range(d + 1)]
    return np.argmin([_noisy((root, root), np.diag(sigma), gamma) for root in roots])


def _pushed(imbalance, sigma, noise, rates, draws=2000):
    """Descends with label noise from a minimum; the mean changes of the imbalances."""
    size = np.hypot(imbalance, 2 * sigma)
    pair: Any = (
        np.tile(np.diag(np.sqrt((size + sign * imbalance) / 2)), (draws, 1, 1)) for sign in (1, -1)
    )
    b, a = matrices.label_noise(
        np.random.default_rng(0), (next(pair), next(pair)), np.diag(sigma), noise, np.array(rates)
    )
    both = np.mean(b.mT @ b - a @ a.mT, 0)
    return np.diag(both) - imbalance


def _calmed(rate, noise, imbalance, sigma):
    """The mean of sqrt(D^2 + 4 sigma^2) - a^2 - b^2 at a constant rate, before D drifts."""
    size, sums, steps, skipped = np.hypot(imbalance, 2 * sigma), [], 200, 60
    pair: Any = (np.full((2000, 1, 1), np.sqrt((size + sign * imbalance) / 2)) for sign in (1, -1))

    def watch(step: int, pair: matrices.Pair) -> None:
        a2, b2 = (np.ravel(w) ** 2 for w in pair)
        if step > skipped:
            sums.append(np.mean(np.hypot(a2 - b2, 2 * sigma) - a2 - b2))

    rng = np.random.default_rng(0)
    matrices.label_noise(
        rng, (next(pair), next(pair)), np.eye(1) * sigma, noise, np.full(steps, rate), watch
    )
    return np.mean(sums)


# --- points ---------------------------------------------------------------------------------------


def _data(rng: Generator, least: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws inputs of condition up to 3, labels of a task at any angle to the source, and it."""
    d, n = int(rng.integers(least, 5)), int(rng.integers(1, 5))
    u, s, vt = np.linalg.svd(rng.standard_normal((n, d)), full_matrices=False)
    x = u * (0.6 + rng.random(s.size)) @ vt * np.sqrt(n)
    source = rng.standard_normal(d)
    task = rng.choice([-1, 1]) * source + rng.choice([0.1, 1, 3]) * rng.standard_normal(d)
    return x, x @ task + rng.choice([0, 0.3, 2]) * rng.standard_normal(n), source


def _signed(rng: Generator, low: float, high: float) -> float:
    return float(rng.choice([-1, 1]) * np.exp(rng.uniform(np.log(low), np.log(high))))


def _experts(rng: Generator) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Draws data of 1 to 4 tasks, each with its own inputs, and penalties of their experts."""
    d, tasks = (int(k) for k in rng.integers(1, 5, 2))
    data = []
    for _ in range(tasks):
        x = rng.standard_normal((int(rng.integers(1, 7)), d)) @ rng.standard_normal((d, d))
        data.append((x, x @ rng.standard_normal(d) + rng.standard_normal(len(x))))
    return data, np.exp(rng.uniform(-2, 2, tasks))


def _spectra(rng: Generator) -> tuple[np.ndarray, np.ndarray, float]:
    d = int(rng.integers(1, 5))
    pre, ft = np.sort(rng.uniform(0.2, 3, d))[::-1], rng.uniform(-2, 3, d)
    return pre, ft, float(rng.choice([0, 0.5, 3]))


def _network(rng: Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Draws B and A with B^T B - A A^T = c I for c of either sign, a target, and a time."""
    o, h, i = (int(k) for k in rng.integers(1, 4, 3))
    # The larger of B and A has full rank h.
    signs = [0] + [1] * (h <= o) + [-1] * (h <= i)
    c = float(rng.choice(signs) * rng.uniform(0, 2))
    key = jax.random.key(int(rng.integers(2**31)))
    with jax.enable_x64(True):
        start = layers.balanced_start(key, (o, h, i), c, 0.7)
    b, a = (np.asarray(w) for w in start)
    return b, a, rng.standard_normal((o, i)), float(rng.uniform(0, 2))


def _direction(rng: Generator) -> tuple:
    """Draws orthogonal rows of A, the residual rho u v^T, a time and a scale."""
    o, i = (int(k) for k in rng.integers(1, 6, 2))
    rows = np.linalg.qr(rng.standard_normal((i, int(rng.integers(1, i + 1)))))[0].T
    u, v = (x / np.linalg.norm(x) for x in (rng.standard_normal(k) for k in (o, i)))
    a = rows * np.exp(rng.uniform(-2, 1.5))
    return a, u, v, _signed(rng, 0.2, 3), float(rng.uniform(0, 3)), float(rng.uniform(0.3, 2))


def _stack(rng: Generator) -> tuple:
    """Draws weights of a mode, entries of A with and without adapters, a target and a scale."""
    count = int(rng.integers(1, 5))
    weights, starts = np.exp(rng.uniform(-1, 1, (2, count)))
    starts[rng.integers(count)] *= rng.choice([0, 0.1]) if count > 1 else 1
    return weights, starts / 3, float(np.exp(rng.uniform(-2, 1.5))), float(rng.uniform(0.3, 2))


def _adapter(rng: Generator) -> tuple:
    """Draws a start that is balanced, zero in B, or neither."""
    b, a, target, time = _network(rng)
    kind = rng.integers(3)
    b, a = (0 * b, rng.standard_normal(a.shape)) if kind == 1 else (b, a)
    b, a = (b + 0.3, a - 0.2) if kind == 2 else (b, a)
    return b, a, target, time, float(rng.uniform(0.3, 2))


def _when(weights, starts, target, scale):
    with jax.enable_x64(True):
        level = np.prod(weights) * 0.4 + 0.6 * target
        return float(adapters.layer_time(level, target, weights, starts, scale))


def _matrices(rng: Generator) -> tuple[np.ndarray, np.ndarray, float]:
    o, i = (int(k) for k in rng.integers(1, 4, 2))
    return rng.standard_normal((o, i)), rng.standard_normal((o, i)), float(rng.choice([0, 0.7]))


def _small_network(rng: Generator, c: float | None = None) -> tuple:
    """Draws a network of at most 8 weights, its target and the noise on the weights."""
    while True:
        b, a, target, _ = _network(rng)
        size = np.sum(b**2) + np.sum(a**2)
        balanced = abs(b.T @ b - a @ a.T).max() <= 1e-13 * size
        if b.size + a.size <= 8 and (c is None or balanced):
            return (b, a), target, float(rng.uniform(0.02, 0.5))


def _aligned(rng: Generator) -> tuple:
    """Draws spectra of one or two modes, noise on their weights, and the start."""
    sigma = np.sort(rng.uniform(0.4, 3, rng.integers(1, 3)))[::-1]
    return sigma, 2, float(rng.uniform(0.05, 0.7)), float(rng.uniform(1, 4))


def _of_aligned(sigma, d, gamma, tau):
    """The start e^-tau I, the target, the noise and a late time."""
    target = np.zeros((d, d))
    target[range(len(sigma)), range(len(sigma))] = sigma
    one = np.exp(-tau) * np.diag(np.arange(d) < len(sigma))
    return (one, one), target, gamma, 2 * (tau + 2) / min(sigma)


def _apart(rng: Generator) -> tuple[np.ndarray, float]:
    """Draws a target with U != V and distinct singular values, all of which are learned."""
    left, right = rng.uniform(-1, 1, 2)
    turns = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in (left, right)]
    return turns[0] * [rng.uniform(2, 4), rng.uniform(0.4, 0.7)] @ turns[1], 8.0


def _noise_on_labels(rng: Generator) -> tuple:
    """Draws imbalances of either sign, and rates that are constant or decay."""
    d = int(rng.integers(1, 4))
    sigma, steps = np.sort(rng.uniform(0.5, 2, d))[::-1], np.arange(300)
    rates = 0.01 * (1 - rng.integers(2) * steps / steps.size)
    return rng.choice([-1, 1], d) * rng.uniform(0.3, 2, d), sigma, rng.uniform(0.3, 1), rates


def _one_noisy_mode(rng: Generator) -> tuple[float, float, float, float]:
    """Draws a mode that is nearly balanced, or nowhere near."""
    sigma, far = rng.uniform(0.5, 2), rng.integers(2)
    imbalance = rng.choice([-1, 1]) * sigma * (rng.uniform(3.5, 5) if far else rng.uniform(0, 1))
    return 0.1 / np.hypot(imbalance, 2 * sigma), rng.uniform(0.01, 0.05), imbalance, sigma


def _whole(pre, ft, anchor):
    """Fine-tunes both layers from the first n modes of A_pre, in balanced layers of width n."""
    rows = []
    for n in range(min(pre.shape) + 1):
        b, a = _layers_of(pre, n)
        # The anchor's term only moves the target.
        end = _end(b, a, (ft + anchor * b @ a) / (1 + anchor))
        rows.append((np.sum((end - pre) ** 2), np.sum((end - ft) ** 2)))
    return np.transpose(rows)


def _layers_of(theta, n):
    """Makes balanced layers of width n whose product is the best approximation of a matrix."""
    u, s, vt = np.linalg.svd(theta, full_matrices=False)
    return u[:, :n] * np.sqrt(s[:n]), np.sqrt(s[:n])[:, None] * vt[:n]


def _end(b, a, target):
    """Trains balanced layers until they are stationary, and returns their product.

    The flow conserves the sign of a determinant. If the target has the other sign, a singular value
    of the product vanishes, but rounding of 1e-10 carries it across 0 before the others have
    settled. Where it reaches 0, the layers therefore go on without it.
    """
    n = len(a)
    if n == 0:
        return 0 * target
    if target.shape != (n, n):
        return _pair(b, a, target, np.inf)
    sign = np.sign(np.linalg.det(b @ a))
    theta = _pair(b, a, target, np.inf, above=lambda theta: sign * np.linalg.det(theta))
    if n == 1 or sign * np.linalg.det(theta) > 1e-12:
        return theta
    b, a = _layers_of(theta, n - 1)
    # A time, because the others may have settled already: then the first speed is rounding.
    return _pair(b, a, target, LONGEST)


def _hessian_top(y, sigma):
    root = jnp.diag(jnp.sqrt(jnp.asarray(y)))
    with jax.enable_x64(True):
        found = networks.hessian(layers.Layers(root, root), jnp.diag(jnp.asarray(sigma)))
        return np.linalg.eigvalsh(np.asarray(found, float))[-1]


def _sam(a, b, sigma, rho, time):
    """Follows SAM's gradient of the whole diagonal matrices, by automatic differentiation."""

    def loss(pair):
        return jnp.sum((pair[0] * pair[1] - sigma) ** 2)

    slope = jax.jit(jax.grad(loss))

    def speed(at: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            pair = jnp.asarray(at.reshape(2, -1))
            return -np.asarray(slope(pair + rho * slope(pair))).ravel()

    return _followed(speed, np.append(a, b), time)


def _sam_reaches(level, start, sigma, rho):
    """The time at which a balanced mode reaches a level under SAM."""
    root = np.sqrt([[start]])
    run = matrices.pre_train(root, root, np.array([[sigma]]), 40 / sigma, rho=rho)
    return brentq(lambda time: np.prod(run.at(time)) - level, 0, 40 / sigma)


LAWS = (
    Law(
        "scales.unbalanced_limit",
        "imbalance from -10 to 10, any angle, n and d from 1 to 4",
        lambda rng: (*_data(rng), _signed(rng, 0.1, 10)),
        scales.unbalanced_limit,
        _neuron,
    ),
    Law(
        "estimators.fine_tuning_limit",
        "depth 1 to 4, any angle, d from 2 (on a line, rounding leaves the saddle at 0)",
        lambda rng: (*_data(rng, 2), int(rng.integers(1, 5))),
        estimators.fine_tuning_limit,
        _balanced,
    ),
    Law(
        "flow.fine_tuning_flow",
        "depth 1 to 4, any angle and time",
        lambda rng: (*_data(rng), int(rng.integers(1, 5)), rng.uniform(0, 3)),
        lambda x, y, source, depth, time: flow.fine_tuning_flow(x, y, source, [time], depth)[0],
        _balanced,
        3e-3,  # its steps err by up to 8e-4 at depth 4
    ),
    Law(
        "diagonal.diagonal_limit",
        "any signs of the source, scales from .03 to 10",
        lambda rng: (*_data(rng), abs(_signed(rng, 0.03, 10))),
        diagonal.diagonal_limit,
        _entries,
    ),
    Law(
        "modes.mode",
        "targets of either sign, starts on either side of them",
        lambda rng: (rng.uniform(0, 3), rng.uniform(0.01, 3, 3), rng.uniform(-2, 3, 3)),
        modes.mode,
        _root,
    ),
    Law(
        "fine_tuning.mode",
        "targets of either sign, any anchor",
        lambda rng: (rng.uniform(0, 3), rng.uniform(0.01, 3, 3), rng.uniform(-2, 3, 3), 0.7),
        fine_tuning.mode,
        _root,
    ),
    Law(
        "fine_tuning.mode_limit",
        "targets of either sign, any anchor",
        lambda rng: (rng.uniform(0.01, 3, 3), rng.uniform(-2, 3, 3), rng.choice([0, 0.7, 5])),
        fine_tuning.mode_limit,
        lambda start, target, anchor: _root(np.inf, start, target, anchor),
    ),
    Law(
        "fine_tuning.pretraining_losses, fine_tuning_losses, degradations",
        "targets of either sign, any anchor",
        _spectra,
        lambda *given: [
            of(*given)
            for of in (
                fine_tuning.pretraining_losses,
                fine_tuning.fine_tuning_losses,
                fine_tuning.degradations,
            )
        ],
        _stages,
    ),
    Law(
        "fine_tuning.unaligned_losses",
        "targets of any shape up to 3 x 3 and of either determinant, any anchor",
        _matrices,
        lambda *given: jnp.stack(fine_tuning.unaligned_losses(*given)),
        _whole,
    ),
    Law(
        "low_rank.displacement",
        "residuals and entries of either sign",
        lambda rng: (rng.uniform(0, 2), *(_signed(rng, 0.1, 3) for _ in range(3)), 0.8),
        lambda time, rho, b, a, gain: low_rank.displacement(time, rho, gain, b=b, a=a),
        lambda time, rho, b, a, gain: _pair(
            np.full((1, 1), b), np.full((1, 1), a), np.full((1, 1), rho), time, gain
        ),
    ),
    Law(
        "low_rank.flow",
        "any start, rank 1 to 3",
        _adapter,
        lambda b, a, target, time, scale: (
            scale
            * layers.theta(
                low_rank.flow(
                    layers.Layers(jnp.asarray(b), jnp.asarray(a)), target, [time], scale=scale
                )
            )[0]
        ),
        _pair,
    ),
    Law(
        "adapters.learned",
        "B = 0, orthogonal rows of A, any rank and overlap, residuals of either sign",
        _direction,
        lambda a, u, v, rho, time, scale: adapters.learned(
            time,
            rho,
            scale,
            **dict(zip(("row", "overlap"), adapters.equivalent(a, v), strict=True)),
        ),
        lambda a, u, v, rho, time, scale: (
            u @ _pair(np.zeros((len(u), len(a))), a, rho * np.outer(u, v), time, scale) @ v
        ),
    ),
    Law(
        "adapters.layer_weights",
        "adapters on any of 1 to 4 layers, targets on either side of the start",
        _stack,
        lambda weights, starts, target, scale: adapters.layer_weights(
            target, weights, starts, scale
        ),
        _on_layers,
    ),
    Law(
        "adapters.layer_time",
        "the product at the time of 60 % of the way",
        _stack,
        lambda weights, starts, target, scale: np.prod(weights) * 0.4 + 0.6 * target,
        lambda weights, starts, target, scale: np.prod(
            _on_layers(weights, starts, target, scale, _when(weights, starts, target, scale))
        ),
    ),
    Law(
        "riccati.flow",
        "imbalance of either sign, shapes up to 3 x 3, the hidden layer of any width",
        _network,
        lambda b, a, target, time: layers.theta(
            riccati.flow(layers.Layers(jnp.asarray(b), jnp.asarray(a)), target, [time])
        )[0],
        _pair,
    ),
    Law(
        "sharpness.mode_sharpness",
        "modes below and above targets of either sign",
        lambda rng: (rng.uniform(0, 3, 3), rng.uniform(-2, 3, 3)),
        sharpness.mode_sharpness,
        _hessian_top,
    ),
    Law(
        "sharpness_aware.flow",
        "weights and targets of either sign, rho up to .2",
        lambda rng: (
            *rng.uniform(-1.5, 1.5, (3, 2)),
            float(rng.uniform(0, 0.2)),
            float(rng.uniform(0, 2)),
        ),
        lambda a, b, sigma, rho, time: jnp.concatenate(
            [jnp.asarray(w[0]) for w in sharpness_aware.flow(a, b, sigma, rho, [time])]
        ),
        _sam,
    ),
    Law(
        "methods.regmean of ridge experts",
        "1 to 4 tasks of 1 to 6 samples in 1 to 4 dimensions, any inputs, teachers and penalties",
        _experts,
        _merged,
        _pooled,
    ),
    Law(
        "modes.crossing_time",
        "any level between the start and the end",
        lambda rng: (0.1 + 1.8 * rng.random(), 0.1 * rng.random() + 1e-3, 2.0),
        modes.crossing_time,
        _reached,
    ),
    Law(
        "best_time.noise_time",
        "noise thresholds above the start",
        lambda rng: (int(rng.integers(1, 9)), rng.uniform(0.2, 1), rng.uniform(2, 5)),
        best_time.noise_time,
        lambda d, gamma, tau: _reached(d * gamma**2, np.exp(-2 * tau), 2 * d * gamma**2),
    ),
    Law(
        "best_time.best_time",
        "one or two modes of width 2, noise below and above them",
        _aligned,
        lambda *given: _after(*_of_aligned(*given), best_time.best_time(*given)),
        lambda *given: _least_after(*_of_aligned(*given)),
        1e-7,
    ),
    Law(
        "best_time.best_time_of",
        "balanced starts, targets of any shape up to 8 weights",
        lambda rng: (*_small_network(rng, 0.0), 4.0),
        lambda pair, target, gamma, end: _after(
            pair,
            target,
            gamma,
            end,
            best_time.best_time_of(layers.Layers(*map(jnp.asarray, pair)), target, gamma, end),
        ),
        _least_after,
        1e-5,
    ),
    Law(
        "best_time.mode_taus",
        "targets with U != V whose modes are all learned, in the limit of small starts",
        _apart,
        lambda target, tau: modes.crossing_time(
            np.linalg.svd(target)[1] / 2,
            np.exp(-2 * best_time.mode_taus(target, tau)),
            np.linalg.svd(target)[1],
        ),
        _halves,
        1e-2,
    ),
    Law(
        "best_time.power_law_index",
        "width 1 and 2, decays from 0.1 to 3",
        lambda rng: (int(rng.integers(1, 3)), *rng.uniform(0.1, 3, 2), rng.uniform(0.02, 1)),
        lambda d, scale, decay, gamma: best_time.power_law_index(
            d, scale=scale, decay=decay, gamma=gamma
        ),
        _worth,
    ),
    Law(
        "perturbation.perturbed_loss",
        "any shapes up to 8 weights",
        _small_network,
        lambda pair, target, gamma: perturbation.perturbed_loss(pair[0], pair[1], target, gamma),
        _noisy,
        1e-9,
    ),
    Law(
        "perturbation.perturbed_mode_loss",
        "modes below and above targets of either sign",
        lambda rng: (rng.uniform(0, 3, 2), rng.uniform(-2, 3, 2), rng.uniform(0, 1)),
        perturbation.perturbed_mode_loss,
        lambda y, sigma, gamma: _noisy((np.diag(np.sqrt(y)),) * 2, np.diag(sigma), gamma),
        1e-9,
    ),
    Law(
        "quantised.mirrored_loss",
        "any shapes up to 2 x 2, targets that are not symmetric",
        lambda rng: (
            rng.standard_normal((o := int(rng.integers(1, 3)), int(rng.integers(1, 3)))),
            rng.standard_normal((o, o)),
            rng.uniform(0, 1),
        ),
        lambda w, target, gamma: quantised.mirrored_loss(jnp.asarray(w), target, gamma),
        _mirrored,
        1e-9,
    ),
    Law(
        "quantised.rounding_noise",
        "2 to 8 bits, any range",
        lambda rng: (int(rng.integers(2, 9)), _signed(rng, 0.1, 10) ** 2),
        quantised.rounding_noise,
        _rounding,
        1e-5,  # the spread of 2^16 weights
    ),
    Law(
        "quantised.worthwhile_bits",
        "width 1 and 2",
        lambda rng: (rng.uniform(0.1, 3), int(rng.integers(1, 3)), rng.uniform(0.1, 9)),
        quantised.worthwhile_bits,
        _bits,
        1e-9,
    ),
    Law(
        "label_noise.drift",
        "one to three modes of either imbalance, to the second order in the rate",
        _noise_on_labels,
        lambda imbalance, *given: label_noise.drift(imbalance, *given)[-1] - imbalance,
        _pushed,
        0.03,
    ),
    Law(
        "label_noise.annealing_rise",
        "modes of either imbalance, for small noise",
        _one_noisy_mode,
        label_noise.annealing_rise,
        _calmed,
        0.03,
    ),
    Law(
        "sharpness_aware.learning_time",
        "any ascent at which the mode is learned",
        lambda rng: (
            (sigma := rng.uniform(0.5, 2),)
            and (sigma * rng.uniform(0.3, 0.95), 0.05 * sigma, sigma, rng.uniform(0, 0.4) / sigma)
        ),
        sharpness_aware.learning_time,
        lambda level, start, sigma, rho: _sam_reaches(level, start, sigma, rho),
    ),
)
