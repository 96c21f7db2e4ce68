"""Draws a phase diagram in one call: where transfer helps, over the load and the angle."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import ArrayLike, Float

from sail_jax.deprecated import renamed
from theory.deep_linear.risks import FORMER_MODES, Mode, transferability, transferability_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@renamed("sigma", until="0.4", gammas="loads", mode=FORMER_MODES)
def phase_diagram(
    mode: Mode = "linear",
    *,
    sigma: float = 0.2,
    d: int | None = None,
    depth: float = 2,
    loads: Float[ArrayLike, "load"] | Sequence[float] | None = None,
    thetas: Float[ArrayLike, "angle"] | Sequence[float] | None = None,
    reach: float = 1.0,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the closed-form transferability over the load n/d and the angle between the tasks.

    Transfer helps where the map is orange and hurts where it is purple; on the dashed line it has
    no effect.

    Args:
      mode: "linear" (refit the last layer) or "fine_tuning" (train all layers).
      sigma: Standard deviation of the label noise, >= 0.
      d: The dimension. The numbers of samples are then n = load d, rounded. None draws the limit
        of infinite dimension.
      depth: Number of weight matrices; mode "fine_tuning" only.
      loads: The loads n/d, increasing. The default is 100 values from .01 to 2, excluding 1, where
        a mean is infinite.
      thetas: The angles in radians, increasing. The default is 100 values from 0 to pi/2.
      reach: The transferability at the ends of the colour scale.
      ax: The axes to draw into. None makes a new figure, `ax.figure`.

    Returns:
      The axes.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Figures 1, 3, 6 and 7.

    >>> ax = phase_diagram("fine_tuning", loads=[0.25, 0.5, 0.75], thetas=[0.1, 0.7, 1.3])
    >>> ax.get_xlabel()
    'load $n/d$'
    """
    from sail_jax.drawing import style

    x = np.linspace(0.01, 2, 100) if loads is None else np.asarray(loads, float)
    angles = np.linspace(0, np.pi / 2, 100) if thetas is None else np.asarray(thetas, float)
    theta = angles[:, None]
    if d is None:
        values = transferability_limit(
            mode, load=x, theta=theta, sigma=sigma, depth=depth, allow_infinite=True
        )
    else:
        n = np.unique(np.maximum(np.rint(x * d), 1))
        x = n / d
        values = transferability(
            mode, n=n, d=d, theta=theta, sigma=sigma, depth=depth, allow_infinite=True
        )
    values = np.asarray(values)
    axes: Axes = style.figure()[1][0, 0] if ax is None else ax
    looks = {"cmap": style.DIVERGING, "vmin": -reach, "vmax": reach}
    style.heatmap(axes, values, x=x, y=angles, label="transferability $T$", **looks)
    axes.contour(x, angles, values, levels=[0], colors=style.INK, linestyles="--")
    name = "linear transfer" if mode == "linear" else f"fine-tuning, {depth:g} layers"
    where = "limit" if d is None else f"$d$ = {d}"
    axes.set(
        xlabel="load $n/d$", ylabel="angle $θ$ (rad)",
        title=f"{name}, $σ$ = {sigma:g}: closed form ({where})",
    )  # fmt: skip
    return axes
