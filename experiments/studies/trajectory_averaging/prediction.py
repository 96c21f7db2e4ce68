"""Predictions of decayed runs by noisy quadratics, fitted to a constant run and its averages.

The loss is a sum over directions. A direction of curvature h contributes h (bias^2 + variance) / 2,
which is linear in its squared distance at the start of the longest window and in its stationary
variance. On a grid of curvatures the fit is therefore non-negative least squares.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from experiments.studies.trajectory_averaging.config import Config
from sail_jax.trajectory import weights
from theory.merging.averaging import Moments, NoisyQuadratic, averaged, decayed

# The curvatures times the rate: from those too small for any window to those that forget
# immediately.
PACES = np.logspace(-4, -0.5, 15)


class Known(NamedTuple):
    """Coefficients of the unknowns: rows of a design matrix.

    Its columns are the level, the squared distance of each curvature, and its variance.

    Attributes:
      curve: For the checkpoints of the longest window, `(checkpoint, 1 + 2 curvatures)`.
      averaged: For the averages, `(shape, window, 1 + 2 curvatures)`.
      decayed: For the decayed runs, `(decay, window, 1 + 2 curvatures)`.
    """

    curve: Float[np.ndarray, "checkpoint column"]
    averaged: Float[np.ndarray, "shape window column"]
    decayed: Float[np.ndarray, "decay window column"]


def design(config: Config) -> Known:
    """Computes the expected losses of every run and average, per unit of each unknown."""
    longest, every = config.windows[-1], config.spacing

    def row(moments: Moments, before: int) -> np.ndarray:
        """Computes a row; `before` is the number of steps before this window in the longest one."""
        left = np.asarray(moments.bias) * (1 - PACES) ** before
        return np.concatenate([[1.0], left**2, np.asarray(moments.variance)])

    def quadratic(spacing: int) -> NoisyQuadratic:
        # For distance 1, and for stationary variance 1.
        return NoisyQuadratic(PACES, 1.0, np.sqrt(PACES * (2 - PACES)), spacing, 1.0)

    with jax.enable_x64(True):
        coarse, fine = quadratic(every), quadratic(1)
        curve = [row(averaged(coarse, [1.0]), at) for at in range(0, longest + 1, every)]
        means = [
            [row(averaged(coarse, weights(shape, w // every + 1)), longest - w)
             for w in config.windows]
            for shape in config.shapes
        ]  # fmt: skip
        decays = [
            [row(decayed(fine, weights(decay, w + 1)), longest - w) for w in config.windows]
            for decay in config.decays
        ]
    return Known(np.stack(curve), np.array(means), np.array(decays))


def predict(
    known: Known,
    curve: Float[np.ndarray, " checkpoint"],
    averaged: Float[np.ndarray, "shape window"],
    decayed: Float[np.ndarray, "decay window"] | None = None,
) -> dict[str, np.ndarray]:
    """Fits the unknowns to measured losses, and computes the losses that they predict.

    Args:
      known: The rows of `design`.
      curve: Losses of the checkpoints of the constant run.
      averaged: Losses of the averages.
      decayed: Losses of the decayed runs, to fit them as well; None to predict them.

    Returns:
      The losses `averaged` and `decayed`; `level`, the loss at the minimum; and each curvature's
      contribution to the last checkpoint, `bias` and `noise`.
    """
    # The curve has the weight of one window, because its many checkpoints share their noise.
    shares = [(known.averaged.shape[1] / curve.size) ** 0.5, 1.0, 1.0]
    pairs = [(known.curve, curve), (known.averaged, averaged)]
    if decayed is not None:
        pairs.append((known.decayed, decayed))
    weighted = list(zip(pairs, shares, strict=False))
    rows = [share * rows.reshape(-1, rows.shape[-1]) for (rows, _), share in weighted]
    losses = [share * losses.ravel() for (_, losses), share in weighted]
    found = nnls(np.concatenate(rows), np.concatenate(losses))[0]
    bias, noise = np.split(found[1:] * known.curve[-1, 1:], 2)
    return {
        "averaged": known.averaged @ found,
        "decayed": known.decayed @ found,
        "level": found[:1].squeeze(),
        "bias": bias,
        "noise": noise,
    }
