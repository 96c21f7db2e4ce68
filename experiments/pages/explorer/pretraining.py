"""The numbers of the explorer's second tab: two-layer networks, pre-trained, then perturbed or
fine-tuned, in closed form over the pre-training time."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.lab.progress import Stage
from experiments.pages.explorer.tables import Table, table
from theory.two_layer import fine_tuning, inflection_index, modes, perturbation

__all__ = ["ROWS", "Grid", "compute"]

# The rows of the ledger that each of the two curves rests on.
ROWS = (
    ("perturbation", "overtrained/A.1-sigmoid/ours"),
    ("perturbation", "overtrained/P4.3-anytime/ours"),
    ("perturbation", "overtrained/T4.4-continuous/ours"),
    ("perturbation", "overtrained/D4.2/corrected"),
    ("fine-tuning", "overtrained/A.7-flow/ours"),
    ("fine-tuning", "overtrained/T4.6/exact"),
    ("fine-tuning", "overtrained/T4.7-threshold/ours"),
    ("fine-tuning", "overtrained/T4.7-inflection/ours"),
)

FINER = 40  # of the points at which the least loss is sought, to one that is drawn


class Grid(NamedTuple):
    """What the second tab is computed at.

    Attributes:
      d: Width of all layers.
      scale: Largest singular value of the pre-training task.
      points: Pre-training times of a curve.
      decays: Exponents by which the singular values of that task fall.
      taus: The initial weights are e^-tau I.
      gammas: Standard deviations of the noise on the weights.
      ratios: Singular values of the fine-tuning task, as multiples of those of pre-training.
      anchors: Strengths lambda of the anchor.
      durations: Times of fine-tuning.
    """

    d: int = 12
    scale: float = 2.0
    points: int = 60
    decays: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    taus: tuple[float, ...] = (4.0, 6.0, 8.0)
    gammas: tuple[float, ...] = tuple(round(0.025 * k, 3) for k in range(15))
    ratios: tuple[float, ...] = (1.5, 2.5, 3.0, 4.0)
    anchors: tuple[float, ...] = (0.0, 0.5, 1.0, 3.0)
    durations: tuple[float, ...] = (0.2, 0.6, 2.0)

    def spectrum(self, decay: float) -> np.ndarray:
        """Returns the singular values of the pre-training task.

        Args:
          decay: Exponent by which they fall.

        Returns:
          The values, `(d,)`, the largest first.
        """
        return self.scale * np.arange(1, self.d + 1) ** -decay

    def times(self, decay: float, tau: float) -> np.ndarray:
        """Returns pre-training times, from before the first mode is learned to after the last.

        Args:
          decay: Exponent by which the singular values of the task fall.
          tau: Size of the initial weights, e^-tau I.

        Returns:
          The times, evenly spaced in their logarithm, and `FINER` times as dense as they are drawn.
        """
        sigma = self.spectrum(decay)
        count = (self.points - 1) * FINER + 1
        return np.geomspace(0.25 * tau / sigma[0], 1.5 * tau / sigma[-1], count)


TINY = Grid(
    d=3, points=12, decays=(1.0,), taus=(4.0,), gammas=(0.0, 0.3), ratios=(3.0,),
    anchors=(0.0, 1.0), durations=(0.6,),
)  # fmt: skip


def compute(grid: Grid, stage: Stage) -> dict[str, Table]:
    """Computes all tables of the second tab.

    Args:
      grid: What to compute.
      stage: Where the parts are computed.

    Returns:
      The pre-training times; losses after perturbation and after fine-tuning, and "turn of ...":
      the time and the loss where they are least, NaN where they never rise again; the number of
      modes that are learned by then, "inflection".
    """
    with jax.enable_x64(True):
        found = stage("closed forms of pre-training", partial(closed_forms, grid))
    return {name: table(AXES[name], values) for name, values in found.items()}


TUNING = "decay tau ratio anchor duration"
AXES = {
    "time": "decay tau time",
    "inflection": "decay gamma",
    "perturbed": "decay tau gamma time",
    "turn of perturbed": "decay tau gamma turn",
    "tuned old task": f"{TUNING} time",
    "tuned new task": f"{TUNING} time",
    "turn of tuned": f"{TUNING} turn",
}


def closed_forms(grid: Grid) -> dict[str, np.ndarray]:
    """Computes the curves, and where each is least.

    Args:
      grid: What to compute.

    Returns:
      Values over the axes `AXES`.
    """
    curves = jax.jit(partial(_curves, grid))
    rows = [
        [curves(grid.times(decay, tau), grid.spectrum(decay), tau) for tau in grid.taus]
        for decay in grid.decays
    ]
    found = jax.tree.map(lambda *x: np.stack(x), *[jax.tree.map(_stack, *row) for row in rows])
    found["time"] = np.stack(
        [[grid.times(decay, tau)[::FINER] for tau in grid.taus] for decay in grid.decays]
    )
    spectra = [grid.spectrum(decay) for decay in grid.decays]
    last = [[inflection_index(s, grid.d, gamma, first=0) for gamma in grid.gammas] for s in spectra]
    found["inflection"] = np.array(last, float)  # None becomes NaN: no rise
    return found


def _stack(*x: Array) -> np.ndarray:
    return np.stack([np.asarray(v) for v in x])


def _curves(grid: Grid, times: Array, sigma: Float[Array, " d"], tau: float) -> dict[str, Array]:
    y = modes.mode(times[:, None], jnp.exp(-2 * tau), sigma)
    gamma = jnp.array(grid.gammas)[:, None]
    ratio, anchor, duration = jnp.meshgrid(
        *(jnp.array(v) for v in (grid.ratios, grid.anchors, grid.durations)), indexing="ij"
    )
    new = ratio[..., None, None] * sigma
    after = fine_tuning.mode(duration[..., None, None], y, new, anchor[..., None, None])
    perturbed = perturbation.perturbed_mode_loss(y, sigma, gamma)
    old, tuned = (jnp.sum((after - task) ** 2, -1) for task in (sigma, new))
    return {
        "perturbed": perturbed[..., ::FINER],
        "turn of perturbed": _turn(times, perturbed),
        "tuned old task": old[..., ::FINER],
        "tuned new task": tuned[..., ::FINER],
        "turn of tuned": _turn(times, old),
    }


def _turn(times: Array, loss: Float[Array, "*b time"]) -> Float[Array, "*b two"]:
    """The time and the loss where a curve is least; NaN where it does not visibly rise again."""
    least = loss.min(-1)
    rises = loss[..., -1] - least > 1e-6 * loss[..., 0]
    found = jnp.stack([times[loss.argmin(-1)], least], -1)
    return jnp.where(rises[..., None], found, jnp.nan)
