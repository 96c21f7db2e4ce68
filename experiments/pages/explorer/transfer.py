"""The numbers of the explorer's first tab: transfer between linear tasks, over load and angle.

Closed forms on a fine grid of loads and angles, simulated data sets on a coarse one inside of it,
both at every position of the controls. The axis "course" joins the depths, trained to the end, and
the times at which a linear model (depth 1) is stopped: deeper networks have no such closed form.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from experiments.lab.progress import Stage
from experiments.pages.explorer.tables import Table, table
from theory import deep_linear as dl

__all__ = ["PENALISED", "ROWS", "WAYS", "Grid", "compute"]

WAYS = ("scratch", "linear transfer", "ridge transfer", "fine-tuning")
# Beside the ways that the paper compares, as numbers only: what a penalty leaves at its best.
PENALISED = ("ridge from scratch", "L2-SP")

# The rows of the ledger that the numbers rest on: of a way, where they matter ("", or below or
# beyond n = d, with a source of finitely many samples, stopped early).
ROWS: tuple[tuple[str, str, str], ...] = (
    ("scratch", "below", "features-are-fate/T3.6-under/ours"),
    ("scratch", "beyond", "features-are-fate/T3.6-over/ours"),
    ("scratch", "stopped", "features-are-fate/covariance-time/ours"),
    ("linear transfer", "", "features-are-fate/T3.7/exact"),
    ("linear transfer", "", "features-are-fate/eq13/ours"),
    ("linear transfer", "source", "features-are-fate/finite-source-linear/ours"),
    ("ridge transfer", "", "features-are-fate/T3.8/exact"),
    ("ridge transfer", "", "features-are-fate/T3.8-monotone/ours"),
    ("fine-tuning", "", "features-are-fate/T3.9-estimator-L2/corrected"),
    ("fine-tuning", "below", "features-are-fate/eq17-L2/corrected"),
    ("fine-tuning", "below", "features-are-fate/eq17-boundary/corrected"),
    ("fine-tuning", "beyond", "features-are-fate/T3.9-over/exact"),
    ("fine-tuning", "source", "features-are-fate/finite-source-fine-tune/ours"),
    ("fine-tuning", "stopped", "features-are-fate/covariance-time/ours"),
)

EDGE = 90  # points of a boundary, on either side of its tip
EVERY = 5  # of the loads and of the angles, the one in the middle is simulated


class Grid(NamedTuple):
    """What the first tab is computed at.

    Attributes:
      d: Dimension of the inputs.
      loads: Number of loads n/d, evenly spaced midpoints of (0, 2); an odd multiple of `EVERY` has
        no load near n = d among those that are simulated.
      angles: Number of angles from 0 to 90 degrees.
      draws: Simulated data sets per load.
      sigmas: Standard deviations of the label noise.
      depths: Numbers of layers of the network that is fine-tuned; 1 comes first.
      ridges: Penalties of ridge transfer, after the best one at each point.
      sources: Samples of pre-training over d; inf is the population.
      times: Times at which a linear model is stopped.
    """

    d: int = 200
    loads: int = 40
    angles: int = 31
    draws: int = 32
    sigmas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
    depths: tuple[float, ...] = (1, 2, 3, 4, np.inf)
    ridges: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    sources: tuple[float, ...] = (np.inf, 2.0, 0.5)
    times: tuple[float, ...] = (1.0, 3.0, 10.0, 100.0)

    def load(self) -> np.ndarray:
        """Computes the loads.

        Returns:
          Values of n/d, `(loads,)`.
        """
        return (np.arange(self.loads) + 0.5) / self.loads * 2

    def theta(self) -> np.ndarray:
        """Computes the angles between the tasks.

        Returns:
          The angles in radians, `(angles,)`.
        """
        return np.linspace(0, np.pi / 2, self.angles)

    def samples(self) -> np.ndarray:
        """Computes the numbers of samples.

        Returns:
          n for each load, `(loads,)`.
        """
        return np.round(self.load() * self.d).astype(int)

    def simulated(self) -> tuple[slice, slice]:
        """Says which points are simulated.

        Returns:
          Slices of the loads and of the angles.
        """
        return slice(EVERY // 2, None, EVERY), slice(0, None, EVERY)


TINY = Grid(
    d=40, loads=10, angles=11, draws=4, sigmas=(0.0, 0.5), depths=(1, 2), ridges=(0.1,),
    sources=(np.inf, 2.0), times=(3.0,),
)  # fmt: skip


def compute(grid: Grid, key: Array, stage: Stage) -> dict[str, Table]:
    """Computes all tables of the first tab.

    Args:
      grid: What to compute.
      key: Random key of the simulated data sets.
      stage: Where the parts are computed.

    Returns:
      Risks of every way, and under "simulated ...", "error of ..." and "error of gain, ..." their
      simulated means and standard errors; the lines on which a gain is 0, "boundary ...".
    """
    with jax.enable_x64(True):
        theory = stage("closed forms of transfer", partial(closed_forms, grid))
        best = theory.pop("best ridge")[..., *grid.simulated()[::-1]]
        draws = stage("simulated data sets", partial(simulate, grid, key, best))
    named = {name: table(AXES[name.split(",")[0]], theory[name]) for name in theory}
    for way, values in draws.items():
        named[f"simulated {way}"] = table(SIMULATED[way], values.mean(0))
        named[f"error of {way}"] = table(SIMULATED[way], _error(values))
    scratch, last = draws["scratch"], len(grid.times)
    # Paired with scratch training that is stopped when the way is.
    courses = [last] * len(grid.depths) + [*range(last)]
    peers = {"ridge transfer": scratch[:, :, -1:], "fine-tuning": scratch[:, :, courses]}
    for way in WAYS[1:]:
        error = _error(peers.get(way, scratch) - draws[way])
        named[f"error of gain, {way}"] = table(SIMULATED[way], error)
    return named


AXES = {
    "scratch": "time sigma load",
    "linear transfer": "source time sigma theta load",
    "ridge transfer": "source ridge sigma theta load",
    "fine-tuning": "source course sigma theta load",
    "ridge from scratch": "sigma load",
    "L2-SP": "source sigma theta load",
    "boundary load": "sigma point",
    "boundary theta": "sigma point",
    "tuned load": "point",
    "tuned theta": "sigma depth point",
}
SIMULATED = AXES | {"scratch": "source time sigma theta load"}


def closed_forms(grid: Grid) -> dict[str, np.ndarray]:
    """Computes what the theory says on the fine grid, and where gains are 0.

    Args:
      grid: What to compute.

    Returns:
      Risks by way, over the axes `AXES`; the best ridge over source, sigma, theta and load;
      boundaries in degrees.
    """
    load, theta, sigma = grid.load(), grid.theta(), np.array(grid.sigmas)
    times = np.array(grid.times)
    # With equal eigenvalues the flow depends on n/d alone.
    bias, variance = (
        np.asarray(dl.flow_risk(np.ones(1), np.full(1, offset), load, noise, times))
        for offset, noise in ((1.0, 0.0), (0.0, 1.0))
    )  # [load, time]
    # From the angle below which linear transfer always helps, if n < d, and densest there.
    tip = np.arccos(np.maximum(1 - sigma, 0))[:, None]
    edges = tip + (np.pi / 2 - tip) * np.linspace(0, 1, EDGE) ** 2
    below = np.linspace(load[0], 1, EDGE, endpoint=False)
    found = _closed_forms(
        grid.samples().astype(float), grid.d, load, theta, sigma, np.array(grid.depths, float),
        np.array(grid.ridges), np.array(grid.sources), times, bias, variance, edges, below,
    )  # fmt: skip
    return {name: np.asarray(values) for name, values in found.items()}


# Everything is an argument: XLA would spend long on folding constants.
@jax.jit
def _closed_forms(
    n, d, load, theta, sigma, depths, ridges, sources, times, bias, variance, edges, below
) -> dict[str, Array]:
    noise, angle = sigma[:, None, None], theta[:, None]
    # [source, sigma, theta, load]; the first axis below is what each way has of its own
    source = dl.source_limit(sources[:, None, None, None], angle, noise)
    ended = dl.transfer_risks(
        n, d, source.theta, noise, depth=depths[:, None, None, None, None], size=source.size
    )
    early = times[:, None, None, None, None]
    linear = dl.linear_transfer_flow_risk(n, source.theta, noise, early)
    fixed = dl.linear_transfer_risk(n, source.theta, noise, ridges[:, None, None, None, None])
    # Depth 1 is a linear model: its risk is linear in the squared distance from where it starts.
    start2 = 1 + source.size**2 - 2 * source.size * jnp.cos(source.theta)
    bias, variance = (moment.T[:, None, None, None] for moment in (bias, variance))
    stopped = start2 * bias + noise**2 * variance
    scratch = (bias + noise**2 * variance)[:, 0, :, 0]
    plain = jnp.broadcast_to(dl.scratch_risk(n, d, sigma[:, None]), scratch.shape[1:])

    def own(early: Array, late: Array) -> Array:
        return jnp.moveaxis(jnp.concatenate([early, late]), 0, 1)

    sides = dl.linear_transfer_boundary(edges, sigma[:, None])
    lower, upper = (jnp.where(sigma[:, None] < 1, x, jnp.nan) for x in sides[:2])
    beyond = jnp.broadcast_to(jnp.linspace(0, jnp.pi / 2, EDGE), edges.shape)
    over = dl.linear_transfer_boundary(beyond, sigma[:, None]).over
    gap = jnp.full((sigma.size, 1), jnp.nan)
    tuned = dl.fine_tune_boundary(below, sigma[:, None, None], depths[:, None])
    return {
        "scratch": jnp.concatenate([scratch, plain[None]]),
        "linear transfer": own(linear, ended["linear transfer"][:1]),
        "ridge transfer": own(ended["ridge transfer"][:1], fixed),
        "fine-tuning": own(ended["fine-tuning"], stopped),
        "ridge from scratch": ended["ridge from scratch"][0, 0, :, 0],
        "L2-SP": ended["L2-SP"][0],
        "best ridge": dl.optimal_ridge(n, source.theta, noise),
        # Down the one side of the region that hurts, up the other; then the line beyond n = d.
        "boundary load": jnp.concatenate([lower[:, ::-1], upper, gap, over], 1),
        "boundary theta": jnp.degrees(jnp.concatenate([edges[:, ::-1], edges, gap, beyond], 1)),
        "tuned load": below,
        "tuned theta": jnp.degrees(tuned),
    }


def simulate(
    grid: Grid, key: Array, best: Float[np.ndarray, "source sigma theta load"]
) -> dict[str, np.ndarray]:
    """Simulates every way on the same data sets, and the source on data sets of its own.

    Args:
      grid: What to compute.
      key: Random key.
      best: The ridge that is best in theory, at the simulated points.

    Returns:
      Risks by way, over draws and the axes `SIMULATED`.
    """
    loads, angles = grid.simulated()
    n, theta = grid.samples()[loads], grid.theta()[angles]
    sigma, times = np.array(grid.sigmas), np.array(grid.times)
    key_target, key_source, key_early = jax.random.split(key, 3)
    finite = [round(s * grid.d) for s in grid.sources if np.isfinite(s)]
    overlaps = dl.simulate_overlaps(jax.random.split(key_target, grid.draws), n.tolist(), grid.d)
    seen = dl.simulate_overlaps(jax.random.split(key_source, grid.draws), finite, grid.d)
    keys = jax.random.split(key_early, (grid.draws, n.size))
    paths = _early(keys, jnp.asarray(n), grid.d, int(n.max()), times)
    found = _simulated(
        overlaps, seen, *paths, theta, sigma, np.array(grid.depths, float), np.array(grid.ridges),
        best,
    )  # fmt: skip
    return {name: np.asarray(values) for name, values in found.items()}


@partial(jax.jit, static_argnums=(2, 3))
def _early(keys: Array, n: Array, d: int, most: int, times: Array) -> tuple[Array, Array]:
    """What is left of both tasks, and what is learned of the noise, when a linear model and the
    refitted scale are stopped: Gram matrices and scales, [draw, load, time, ...]."""
    plane = jnp.eye(d, 2)

    def one(key: Array, n: Array) -> tuple[Array, Array]:
        key_x, key_noise = jax.random.split(key)
        # As many rows at every load, those beyond n empty: time then counts n / most as fast.
        rows = (jnp.arange(most) < n)[:, None]
        x = jnp.where(rows, jax.random.normal(key_x, (most, d)), 0.0)
        noise = jnp.where(rows[:, 0], jax.random.normal(key_noise, (most,)), 0.0)
        labels = jnp.concatenate([x @ plane, noise[:, None]], -1).T
        flow = jax.vmap(dl.linear_flow, (None, 0, None, None))
        learned = flow(x, labels, jnp.zeros(d), times * most / n)  # [label, time, d]
        left = jnp.concatenate([plane.T[:, None] - learned[:2], learned[2:]])
        scale = flow(x[:, :1], labels, jnp.zeros(1), times * most / n)
        return jnp.einsum("atd,btd->tab", left, left), scale[..., 0].T

    return jax.lax.map(lambda draw: jax.vmap(one)(draw, n), keys)


@jax.jit
def _simulated(
    overlaps: dl.Overlaps, seen: dl.Overlaps, left: Array, scale: Array, theta: Array, sigma: Array,
    depths: Array, ridges: Array, best: Array,
) -> dict[str, Array]:  # fmt: skip
    noise, angle = sigma[:, None, None], theta[:, None]
    # [draw, source, sigma, theta, load] throughout
    wide = (slice(None), slice(None), None, None, None)
    drawn = dl.source_from(dl.Overlaps(seen.gram[wide], seen.source[wide], seen.n), angle, noise)
    first = jnp.zeros_like(drawn.theta[:, :1])  # the population's
    source_theta = jnp.concatenate([first + angle, drawn.theta], 1)
    source_size = jnp.concatenate([first + 1, jnp.broadcast_to(drawn.size, drawn.theta.shape)], 1)
    wide = (slice(None), None, None, None)
    at = dl.Overlaps(overlaps.gram[wide], overlaps.source[wide], overlaps.n)
    shape = jnp.broadcast_shapes(source_theta.shape, at.gram.shape[:-2], noise.shape)

    def over(axis: ArrayLike, way: Any) -> Array:
        return jax.vmap(lambda value: jnp.broadcast_to(way(value), shape), out_axes=2)(axis)

    tuned = over(depths, lambda L: at.fine_tune(source_theta, noise, L, source_size))
    linear = over(jnp.zeros(1), lambda ridge: at.linear_transfer(source_theta, noise, ridge))
    shrunk = over(ridges, lambda ridge: at.linear_transfer(source_theta, noise, ridge))
    best = jnp.broadcast_to(at.linear_transfer(source_theta, noise, best), shape)[:, :, None]
    scratch = over(jnp.zeros(1), lambda _: at.scratch(source_theta, noise))
    cos, sin = jnp.cos(source_theta), jnp.sin(source_theta)
    left = left[:, None, None, None]  # [draw, 1, 1, 1, load, time, 3, 3]

    def stopped(time: Array, start: ArrayLike) -> Array:
        y = jnp.stack(jnp.broadcast_arrays(cos - start, sin, -noise), -1)
        return jnp.einsum("...i,...ij,...j->...", y, left[..., time, :, :], y)

    def refitted(time: Array) -> Array:
        one, other, rest = jnp.moveaxis(scale[:, None, None, None, :, time], -1, 0)
        return (one * cos + other * sin + rest * noise - cos) ** 2 + sin**2

    early = jnp.arange(scale.shape[2])
    return {
        "scratch": jnp.concatenate([over(early, lambda t: stopped(t, 0.0)), scratch], 2),
        "linear transfer": jnp.concatenate([over(early, refitted), linear], 2),
        "ridge transfer": jnp.concatenate([best, shrunk], 2),
        "fine-tuning": jnp.concatenate([tuned, over(early, lambda t: stopped(t, source_size))], 2),
    }


def _error(values: np.ndarray) -> np.ndarray:
    """The standard error of the mean over the first axis."""
    return values.std(0, ddof=1) / np.sqrt(len(values))
