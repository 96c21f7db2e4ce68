"""Where theory says that transfer helps or hurts, and what simulated data sets say there.

`transfer_phase` and `transfer_factors` share these functions.
"""

from collections.abc import Iterator

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from experiments.lab.findings import Finding, judged, stated

REGIONS = ("hurts", "helps", "disputed")
# What rounding may do to a transferability.
ROUNDING = 1e-9
# How far n has to be from d. Nearer, risks have no finite variance, and one data set may say it
# all.
FAR = 4


def split(
    theory: Float[np.ndarray, "*grid"],
    far: Bool[np.ndarray, "*#grid"],
    printed: Float[np.ndarray, "*#grid"] | float = np.nan,
) -> Bool[np.ndarray, "region *grid"]:
    """Finds the points of a grid that lie in each of `REGIONS`.

    Transfer "hurts" where transferability is below 0, and "helps" where it is above. "disputed" are
    points where it hurts, and the paper's formula says that it helps. Points of value NaN lie in no
    region.

    Args:
      theory: Transferability at each point of the grid.
      far: Whether the point is far enough from n = d to be counted; broadcast to the grid.
      printed: Transferability by the paper's formula; NaN where none is disputed.

    Returns:
      Masks of the regions `(region, *grid)`.
    """
    hurts, helps = theory < -ROUNDING, theory > ROUNDING
    return np.stack([hurts, helps, hurts & (printed > ROUNDING)]) & far


def means(
    gain: Float[np.ndarray, "draw row column *rest"],
    regions: Bool[np.ndarray, "region row column *rest"],
) -> Float[np.ndarray, "region draw *rest"]:
    """Averages transferability over each region, draw by draw.

    Args:
      gain: Transferability of each draw `(draw, row, column, ...)`.
      regions: Masks of the regions `(region, row, column, ...)`.

    Returns:
      Means over rows and columns `(region, draw, ...)`; NaN where a region is empty.
    """
    inside = regions[:, None]
    with np.errstate(invalid="ignore"):
        return np.where(inside, gain, 0).sum((2, 3)) / inside.sum((2, 3))


def judged_regions(
    name: str, where: str, paper: str, gain: xr.DataArray, theory: xr.DataArray
) -> Iterator[Finding]:
    """Judges, region by region, whether transfer hurts or helps as theory says.

    Args:
      name: What is judged, such as "linear transfer at σ = 0.2".
      where: The paper, and the section, table or figure.
      paper: What is printed there.
      gain: Transferability by region and draw.
      theory: Transferability in theory, by region.

    Yields:
      The findings. An empty region is "not tested", or left out if it is "disputed".
    """
    claims = {
        "hurts": f"{name} hurts where theory says so, in the mean over those points",
        "helps": f"{name} helps where theory says so, in the mean over those points",
        "disputed": f"{name} helps where the paper's formula says so and the corrected one does "
        "not, in the mean over those points",
    }
    for region, claim in claims.items():
        by_draw = gain.sel(region=region)
        if not np.isfinite(by_draw).all():
            if region != "disputed":
                yield Finding(where, claim, paper, "there is no such point", "not tested")
            continue
        ours = f"T = {stated(by_draw, 3)}, in theory {float(theory.sel(region=region)):+.3f}"
        yield judged(
            where, claim, paper, ours, -by_draw.values if region == "hurts" else by_draw.values
        )
