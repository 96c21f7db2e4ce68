"""A phase diagram in one call: where transfer helps, over the load and the angle."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import ArrayLike, Float

from theory.deep_linear.risks import Mode, transferability, transferability_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def phase_diagram(
    mode: Mode = "linear",
    sigma: float = 0.2,
    *,
    d: int | None = None,
    depth: float = 2,
    gammas: Float[ArrayLike, "load"] | Sequence[float] | None = None,
    thetas: Float[ArrayLike, "angle"] | Sequence[float] | None = None,
    reach: float = 1.0,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the closed-form transferability over the load n/d and the angle between the tasks.

    Orange is where transfer helps, violet where it hurts. The dashed line is where it does neither.

    Args:
      mode: "linear" (refit the last layer) or "fine_tune" (train all layers).
      sigma: Standard deviation of the label noise, >= 0.
      d: The dimension: the diagram is then of n = gamma d samples, rounded. None draws the limit of
        infinite dimension.
      depth: Number of weight matrices; mode "fine_tune" only.
      gammas: The loads, increasing; by default 100 from .01 to 2, without 1, where a mean is
        infinite.
      thetas: The angles in radians, increasing; by default 100 from 0 to pi/2.
      reach: The transferability of the strongest colours.
      ax: The axes to draw into; None makes a figure of its own, `ax.figure`.

    Returns:
      The axes.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Figures 1, 3, 6 and 7.

    >>> ax = phase_diagram("fine_tune", 0.2, gammas=[0.25, 0.5, 0.75], thetas=[0.1, 0.7, 1.3])
    >>> ax.get_xlabel()
    'load $γ = n/d$'
    """
    from sail_jax.drawing import style

    loads = np.linspace(0.01, 2, 100) if gammas is None else np.asarray(gammas, float)
    angles = np.linspace(0, np.pi / 2, 100) if thetas is None else np.asarray(thetas, float)
    theta = angles[:, None]
    if d is None:
        values = transferability_limit(mode, loads, theta, sigma, depth=depth, allow_infinite=True)
    else:
        n = np.unique(np.maximum(np.rint(loads * d), 1))
        loads = n / d
        values = transferability(mode, n, d, theta, sigma, depth=depth, allow_infinite=True)
    values = np.asarray(values)
    axes: Axes = style.figure()[1][0, 0] if ax is None else ax
    looks = {"cmap": style.DIVERGING, "vmin": -reach, "vmax": reach}
    style.heatmap(axes, values, x=loads, y=angles, label="transferability $T$", **looks)
    axes.contour(loads, angles, values, levels=[0], colors=style.INK, linestyles="--")
    name = "linear transfer" if mode == "linear" else f"fine-tuning, {depth:g} layers"
    where = "limit" if d is None else f"$d$ = {d}"
    axes.set(
        xlabel="load $γ = n/d$", ylabel="angle $θ$ (rad)",
        title=f"{name}, $σ$ = {sigma:g}: closed form ({where})",
    )  # fmt: skip
    return axes
