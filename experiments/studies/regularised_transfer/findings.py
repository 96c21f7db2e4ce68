"""The findings of `regularised_transfer`, computed from the stored dataset alone."""

import numpy as np
import xarray as xr

from experiments.lab.findings import Finding, agrees, judged, mean_and_error

PAPER = "features are fate, eq. (13), beyond"
PRINTED = "at n = d it helps at all angles, compared with training without a penalty"
OURS = "not printed; it compares with training without a penalty"


def findings(dataset: xr.Dataset) -> list[Finding]:
    """Judges at which angles each strategy is better than ridge regression, and where L2-SP stops
    helping.

    Returns the findings. Linear transfer is judged next to n = d, where training without a penalty
    has an infinite risk. The other strategies are judged at the last load below.
    """
    peak = dataset.sel(load=1.0, method="nearest")
    below = dataset.isel(load=np.flatnonzero(dataset["load"].values < 1)[-1])
    found = [
        _beats(
            peak, "linear transfer", 75, "at n = d helps at all angles, compared with no penalty"
        ),
        _beats(below, "L2-SP", 45, OURS),
        _beats(below, "L2-SP", 75, OURS),
        _beats(below, "direction", 45, OURS),
    ]
    ends = dataset.boundary.sel(fit="best ridge")
    return [
        *found,
        agrees(
            PAPER,
            "L2-SP helps up to 60° for a source fitted with its own best ridge",
            "60° for an infinite source and fine-tuning without noise",
            np.degrees(ends.mean("source_load").values),
            60.0,
            digits=1,
        ),
    ]


def _beats(at: xr.Dataset, way: str, degrees: float, paper: str) -> Finding:
    """Judges whether a strategy is better than ridge regression at an angle of the grid."""
    near = at.sel(way=way).sel(theta=np.radians(degrees), method="nearest")
    mean, error = mean_and_error(near.gain, "draw")
    return judged(
        PAPER,
        f"{way} beats ridge regression at {np.degrees(float(near.theta)):.0f}°, "
        f"n/d = {float(at['load']):.3g}",
        paper,
        f"by {mean:+.3f} ± {error:.1g} (theory: {float(near.gain_theory):+.3f})",
        near.gain.values,
    )


def summary(dataset: xr.Dataset) -> str:
    """Summarises the dataset in a few sentences.

    Returns where in the diagram each strategy helps, and how well theory and random data agree.
    """
    helps = (dataset.theory > 0).mean(("n", "fine_theta"))
    printed = (dataset.fine_theta < dataset.line_printed).mean()
    shares = ", ".join(f"{way} in {float(helps.sel(way=way)):.0%}" for way in dataset.way.values)
    mean, error = mean_and_error(dataset.gain, "draw")
    z = np.abs((mean - dataset.gain_theory.values) / error)
    worst = np.degrees(np.abs(dataset.boundary.sel(fit="best ridge").mean("group") - np.pi / 3))
    return (
        f"Over loads up to 2 and angles up to 90° (σ = {dataset.attrs['sigma']:g}, d = "
        f"{dataset.attrs['d']}), linear transfer beats training without a penalty in "
        f"{float(printed):.0%} of the diagram. The shares that beat ridge regression at its best "
        f"penalty: {shares}. "
        f"Measured and exact gains differ by at most {float(z.max()):.1f} standard errors in "
        f"{z.size} comparisons. For a source with its own best ridge, L2-SP stops helping within "
        f"{float(worst.max()):.1f}° of 60°."
    )
