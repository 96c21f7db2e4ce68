"""Regions where theory predicts that transfer helps or hurts, and findings on them.

`transfer_phase` and `transfer_factors` share these functions.
"""

from collections.abc import Iterator

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from experiments.lab.findings import Finding, agrees, judged, stated

REGIONS = ("hurts", "helps", "disputed")
POINTS = 1000  # loads of a line, about
# The largest effect of rounding on a transferability.
ROUNDING = 1e-9
# The least distance of n from d. Closer to d the variance of risks is infinite, and one data set
# may dominate.
FAR = 4


def split(
    theory: Float[np.ndarray, "*grid"],
    far: Bool[np.ndarray, "*#grid"],
    printed: Float[np.ndarray, "*#grid"] | float = np.nan,
) -> Bool[np.ndarray, "region *grid"]:
    """Finds the points of a grid in each of `REGIONS`.

    Transfer "hurts" if transferability is below 0, and "helps" if it is above. "disputed" are
    points where it hurts although the paper's formula predicts that it helps. NaN values are in no
    region.

    Args:
      theory: Transferability at each point of the grid.
      far: Whether the point is far enough from n = d to be counted; broadcast to the grid.
      printed: Transferability by the paper's formula; NaN if it is not disputed.

    Returns:
      Masks of the regions `(region, *grid)`.
    """
    hurts, helps = theory < -ROUNDING, theory > ROUNDING
    return np.stack([hurts, helps, hurts & (printed > ROUNDING)]) & far


def zero(
    mode: str,
    d: int,
    sigma: Float[np.ndarray, "*sigma"] | float,
    depth: Float[np.ndarray, "*depth"] | float = 2.0,
    *,
    most: float = 2.0,
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, "k *broadcast"]]:
    """Computes the theoretical line of no gain and no loss, at finite d.

    The line of linear transfer is exact for n samples in d dimensions, here also between integers
    n. The line of fine-tuning is only known in the limit n, d -> inf, and ends at n = d.

    Args:
      mode: "linear" or "fine_tuning".
      d: Input dimension.
      sigma: Standard deviations of the label noise.
      depth: Numbers of layers, for fine-tuning.
      most: The largest load n/d.

    Returns:
      Loads, ascending, and angles up to pi/2 for each load and the broadcast of `sigma` and
      `depth`; the angle is NaN if transfer helps at every angle, or hurts at every one.
    """
    # Findings and pages use this module without JAX.
    from theory import deep_linear as dl

    rest = np.broadcast_shapes(np.shape(sigma), np.shape(depth) if mode == "fine_tuning" else ())
    if mode == "linear":
        load = np.linspace(2 / d, most, POINTS)
    else:
        # The line may change rapidly within a thousandth of n = d, where points are dense.
        near = 1 - np.geomspace(1e-2, 1e-7, POINTS // 4)
        load = np.concatenate([np.linspace(0.0, 0.99, POINTS, endpoint=False), near])
        load = load[load <= most]
    column = load.reshape(-1, *[1] * len(rest))
    if mode == "linear":
        sin2 = np.asarray(dl.linear_transfer_sin2(n=column * d, d=d, sigma=sigma), float)
        angle = np.arcsin(np.sqrt(sin2))
    else:
        angle = np.asarray(dl.fine_tuning_boundary(load=column, sigma=sigma, depth=depth), float)
    ends = np.isclose(angle, 0, atol=1e-9) | np.isclose(angle, np.pi / 2, atol=1e-9)
    # The first point at an end is kept, so that the line reaches the end.
    inner = np.pad(~ends, [(1, 1)] + [(0, 0)] * len(rest))
    return load, np.where(ends & ~inner[:-2] & ~inner[2:], np.nan, angle)


def means(
    gain: Float[np.ndarray, "draw row column *rest"],
    regions: Bool[np.ndarray, "region row column *rest"],
) -> Float[np.ndarray, "region draw *rest"]:
    """Averages transferability over each region, draw by draw.

    Args:
      gain: Transferability of each draw `(draw, row, column, ...)`.
      regions: Masks of the regions `(region, row, column, ...)`.

    Returns:
      Means over rows and columns `(region, draw, ...)`; NaN for an empty region.
    """
    inside = regions[:, None]
    with np.errstate(invalid="ignore"):
        return np.where(inside, gain, 0).sum((2, 3)) / inside.sum((2, 3))


def judged_regions(
    name: str, where: str, paper: str, gain: xr.DataArray, theory: xr.DataArray
) -> Iterator[Finding]:
    """Judges, region by region, whether transfer hurts or helps where and as much as predicted.

    The sign alone is judged as "same sign". Agreement of the size with theory is judged by a test
    of equivalence (`experiments.lab.findings.agrees`).

    Args:
      name: The judged quantity, such as "linear transfer at σ = 0.2".
      where: The paper, and the section, table or figure.
      paper: The paper's figures.
      gain: Transferability by region and draw.
      theory: Transferability in theory, by region.

    Yields:
      The findings. An empty region is "not tested", or omitted if it is "disputed".
    """
    claims = {
        "hurts": f"{name} hurts on average over the points where theory predicts it (same sign)",
        "helps": f"{name} helps on average over the points where theory predicts it (same sign)",
        "disputed": f"{name} helps on average over the points where the paper's formula predicts "
        "it and the corrected one does not",
    }
    for region, claim in claims.items():
        by_draw = gain.sel(region=region)
        if not np.isfinite(by_draw).all():
            if region != "disputed":
                yield Finding(where, claim, paper, "no points in this region", "not tested")
            continue
        expected = float(theory.sel(region=region))
        ours = f"T = {stated(by_draw, 3)}, in theory {expected:+.3f}"
        yield judged(
            where, claim, paper, ours, -by_draw.values if region == "hurts" else by_draw.values
        )
        if region != "disputed":
            same = f"{name}: T, averaged over the points where it {region}, equals theory's"
            yield agrees(where, same, paper, by_draw.values, expected)
