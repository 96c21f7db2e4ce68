"""Where theory says that transfer helps or hurts, and what data sets say there: for
`transfer_phase` and `transfer_factors`."""

from collections.abc import Iterator

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from experiments.lab.findings import Finding, judged, stated

REGIONS = ("hurts", "helps", "disputed")
ROUNDING = 1e-9  # of a transferability
FAR = 4  # of n from d: nearer, risks have no finite variance, and one data set may say it all


def split(
    theory: Float[np.ndarray, "*grid"],
    far: Bool[np.ndarray, "*#grid"],
    printed: Float[np.ndarray, "*#grid"] | float = np.nan,
) -> Bool[np.ndarray, "region *grid"]:
    """Which points of a grid lie in each of `REGIONS`: transferability is below 0, above it, or
    below it where the paper's formula is above. NaN lies nowhere."""
    hurts, helps = theory < -ROUNDING, theory > ROUNDING
    return np.stack([hurts, helps, hurts & (printed > ROUNDING)]) & far


def means(
    gain: Float[np.ndarray, "draw row column *rest"],
    regions: Bool[np.ndarray, "region row column *rest"],
) -> Float[np.ndarray, "region draw *rest"]:
    """Of each region over its rows and columns, draw by draw; NaN where it is empty."""
    inside = regions[:, None]
    with np.errstate(invalid="ignore"):
        return np.where(inside, gain, 0).sum((2, 3)) / inside.sum((2, 3))


def judged_regions(
    name: str, where: str, paper: str, gain: xr.DataArray, theory: xr.DataArray
) -> Iterator[Finding]:
    """The claims that transfer of this name fares in each region as is said of it. gain: by region
    and draw; theory: by region."""
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
