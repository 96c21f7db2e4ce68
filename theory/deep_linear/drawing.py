"""Draws a phase diagram in one call: where transfer helps, over the load and the angle."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sail_jax.deprecated import renamed
from theory.deep_linear import covariance as equivalents
from theory.deep_linear.risks import FORMER_MODES, Mode, transferability, transferability_limit
from theory.problems import typed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@renamed("sigma", until="0.4", gammas="loads", mode=FORMER_MODES)
@typed
def phase_diagram(
    mode: Mode = "linear",
    *,
    sigma: float = 0.2,
    d: int | None = None,
    depth: float = 2,
    loads: Float[ArrayLike, "load"] | Sequence[float] | None = None,
    thetas: Float[ArrayLike, "angle"] | Sequence[float] | None = None,
    n: Float[ArrayLike, "samples"] | Sequence[int] | None = None,
    covariance: Float[ArrayLike, "d"] | Float[ArrayLike, "d d"] | Sequence[float] | None = None,
    reach: float = 1.0,
    cmap: str | None = None,
    width: Literal["single", "double"] | None = None,
    style: str | Mapping[str, Any] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the closed-form transferability over the load n/d and the angle between the tasks.

    A notebook shows the figure of the axes, and `ax.figure.savefig("phase.pdf")` writes it.

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
      n: The numbers of samples, increasing, in place of `loads`; it requires `d` or `covariance`.
      covariance: The inputs' covariance `(d, d)`, or its eigenvalues `(d,)`, in place of `d`. The
        source and the direction orthogonal to it then have components of equal size along all
        eigenvectors. Linear transfer requires more than 2 samples. The risks of training are
        deterministic equivalents. None for isotropic inputs.
      reach: The transferability at the ends of the colour scale.
      cmap: A diverging colour map of Matplotlib.
      width: The width of a new figure: "single" or "double" for the columns of a journal.
      style: The style of a new figure: a style of Matplotlib, or a mapping of `rcParams`.
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
    from sail_jax.drawing import printing
    from sail_jax.drawing import style as common

    angles = np.linspace(0, np.pi / 2, 100) if thetas is None else np.asarray(thetas, float)
    spectrum = None if covariance is None else np.asarray(covariance, float)
    if spectrum is not None and spectrum.ndim == 2:
        spectrum = np.asarray(equivalents.eigenbasis(spectrum)[0])
    if spectrum is not None:
        if d not in (None, len(spectrum)):
            raise ValueError(f"d: expected the size of covariance, {len(spectrum)}; got {d}")
        d = len(spectrum)
    x, samples = _columns(d, loads, n)
    for name, values in {"thetas": angles, "loads" if n is None else "n": x}.items():
        if values.ndim != 1 or len(values) < 2 or not (np.diff(values) > 0).all():
            raise ValueError(f"{name}: expected two or more increasing numbers; got {values}")
    theta, shared = angles[:, None], {"sigma": sigma, "depth": depth}
    if spectrum is not None:
        values = _anisotropic(mode, spectrum, samples, angles, **shared)
    elif d is None:
        values = transferability_limit(mode, load=x, theta=theta, allow_infinite=True, **shared)
    else:
        values = transferability(mode, n=samples, d=d, theta=theta, allow_infinite=True, **shared)
    values = np.asarray(values)
    name = "linear transfer" if mode == "linear" else f"fine-tuning, {depth:g} layers"
    where = "limit" if d is None else f"$d$ = {d}"
    if spectrum is not None:
        where += ", anisotropic"
    # The usual title fills the usual width.
    apart = ": " if spectrum is None and width is None and style is None else "\n"

    def draw(axes: "Axes") -> "Axes":
        looks = {"cmap": cmap or common.DIVERGING, "vmin": -reach, "vmax": reach}
        common.heatmap(axes, values, x=x, y=angles, label="transferability $T$", **looks)
        axes.contour(x, angles, values, levels=[0], colors=common.INK, linestyles="--")
        axes.set(
            xlabel="load $n/d$" if n is None else "samples $n$", ylabel="angle $θ$ (rad)",
            title=f"{name}, $σ$ = {sigma:g}{apart}closed form ({where})",
        )  # fmt: skip
        return axes

    if ax is not None:
        return draw(ax)

    def alone() -> "dict[str, Figure]":
        figure, ((axes,),) = common.figure()
        draw(axes)
        return {"phase": figure}

    return printing.Looks(width=width, style=style).checked().draw(alone)["phase"].axes[0]


def _columns(d: int | None, loads: Any, n: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the horizontal coordinates of a diagram, and its numbers of samples."""
    if n is not None:
        if loads is not None:
            raise ValueError("loads and n: expected only one")
        if d is None:
            raise ValueError("n requires d or covariance")
        return np.asarray(n, float), np.asarray(n, float)
    x = np.linspace(0.01, 2, 100) if loads is None else np.asarray(loads, float)
    if d is None:
        return x, x
    samples = np.unique(np.maximum(np.rint(x * d), 1))
    return samples / d, samples


def _anisotropic(
    mode: Mode,
    spectrum: Float[np.ndarray, " d"],
    n: Float[np.ndarray, " samples"],
    angles: Float[np.ndarray, " angle"],
    *,
    sigma: float,
    depth: float,
) -> Float[Array, "angle samples"]:
    """Computes the transferability for inputs of this covariance; nan where n is too small."""
    d = len(spectrum)
    eigenvalues, source = jnp.asarray(spectrum), jnp.full(d, d**-0.5)
    # Orthogonal to the source for odd dimensions, too.
    other = source * (-1.0) ** jnp.arange(d)
    other -= source * (source @ other)
    other /= jnp.sqrt(other @ other)

    def gain(theta: ArrayLike) -> Array:
        target = jnp.cos(theta) * source + jnp.sin(theta) * other
        scratch = equivalents.scratch_risk(eigenvalues, target, n=n, sigma=sigma)
        if mode == "linear":
            enough = np.where(n > 2, n, 3)
            risk = equivalents.linear_transfer_risk(
                eigenvalues, source, target, n=enough, sigma=sigma
            )
            return jnp.where(n > 2, scratch - risk, jnp.nan)
        return scratch - equivalents.fine_tuning_risk(
            eigenvalues, source, target, n=n, sigma=sigma, depth=depth
        )

    return jax.vmap(gain)(jnp.asarray(angles))
