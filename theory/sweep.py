"""Compares laws with simulators at random points of the whole domain that their checks admit.

A row of the ledger checks a law at a few points. A law may implicitly assume a sign, a branch or an
order that holds at these points. Here, every law of the limit or the course of training is computed
wherever its checks admit it: layers of either imbalance, tasks at any angle, targets of either
sign, shapes of any order. The simulators integrate the weights themselves. They share no formula
with the laws, and every comparison uses a single data set, up to the error of the integrator.

Laws that are means over data sets are not included; the ledger simulates them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

from sail_jax import methods
from theory.deep_linear import diagonal, estimators, flow, scales
from theory.two_layer import (
    adapters,
    fine_tuning,
    layers,
    low_rank,
    modes,
    networks,
    riccati,
    sharpness,
    sharpness_aware,
)

Generator = np.random.Generator
Side = Callable[..., Any]

TOLERANCE = 3e-4  # of the largest number of the simulation
SETTLED = 1e-10  # speed at an end, relative to the first speed
NEAR = 2e-5  # the same where the end may be a saddle, from which rounding of 1e-10 drives the flow
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


def _followed(
    speed: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    time: float,
    settled: float = SETTLED,
) -> np.ndarray:
    """Integrates an autonomous equation to a time; inf means until it is first stationary.

    Later, rounding may leave a saddle at which the exact flow stays.
    """
    first = np.linalg.norm(speed(start))

    def moving(_: float, at: np.ndarray) -> float:
        return float(np.linalg.norm(speed(at)) - settled * first)

    moving.terminal = True
    found = solve_ivp(
        lambda _, at: speed(at),
        (0.0, min(time, LONGEST)),
        start,
        "LSODA",
        rtol=1e-10,
        atol=1e-12,
        events=moving if time == np.inf and first else None,
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


def _pair(b, a, target, time, scale=1.0, settled=SETTLED):
    """Trains B and A on |scale B A - target|^2, and returns scale B A."""
    shape, cut = (b.shape, a.shape), b.size

    def speed(at: np.ndarray) -> np.ndarray:
        one, other = at[:cut].reshape(shape[0]), at[cut:].reshape(shape[1])
        off = 2 * scale * (scale * one @ other - target)
        return -np.append(off @ other.T, one.T @ off)

    at = _followed(speed, np.append(b, a), time, settled)
    return scale * at[:cut].reshape(shape[0]) @ at[cut:].reshape(shape[1])


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


def _whole(pre, ft, anchor):
    """Fine-tunes both layers from the first n modes of A_pre, in balanced layers of width n."""
    u, s, vt = np.linalg.svd(pre, full_matrices=False)
    rows = []
    for n in range(s.size + 1):
        b, a = u[:, :n] * np.sqrt(s[:n]), np.sqrt(s[:n])[:, None] * vt[:n]
        # The anchor's term only moves the target.
        target = (ft + anchor * b @ a) / (1 + anchor)
        end = _pair(b, a, target, np.inf, settled=NEAR) if n else 0 * pre
        rows.append((np.sum((end - pre) ** 2), np.sum((end - ft) ** 2)))
    return np.transpose(rows)


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
)
