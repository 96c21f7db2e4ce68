"""What an experiment found, beside what a paper printed: means over seeds, verdicts on claims."""

from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import ArrayLike
from scipy import stats

LEVEL = 0.95
VERDICTS = ("holds", "fails", "undecided", "not tested")


class Finding(NamedTuple):
    """One claim of a paper, and what became of it here."""

    where: str
    """Paper, and section, table or figure."""
    claim: str
    """What is claimed, as a sentence."""
    paper: str
    """The printed figures, with their scale."""
    here: str
    """The measured ones: mean ± standard error over seeds."""
    verdict: str
    """One of `VERDICTS`, at the scale of this run."""


def judged(where: str, claim: str, paper: str, here: str, margins: ArrayLike) -> Finding:
    """The claim that `margins`, one number per seed, are positive in the mean.

    It holds if Student's two-sided 95 % interval of the mean lies above 0, fails if it lies below;
    margins that are not finite, or fewer than two, decide nothing.

    >>> [judged("", "", "", "", m).verdict for m in ([1, 1.2, 0.9], [-1, -1.2, -1], [1, -1.5, 1])]
    ['holds', 'fails', 'undecided']
    """
    return Finding(where, claim, paper, here, verdict(margins))


def verdict(margins: ArrayLike) -> str:
    """As `judged` has it."""
    values = np.asarray(margins, float).ravel()
    if len(values) < 2 or not np.isfinite(values).all():
        return "undecided"
    reach = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    if abs(values.mean()) <= reach:
        return "undecided"
    return "holds" if values.mean() > 0 else "fails"


def told(findings: list[Finding]) -> str:
    """A line for each, verdict first."""
    return "\n".join(
        f"{one.verdict.upper()}: {one.claim} ({one.where}). Paper: {one.paper}. Here: {one.here}."
        for one in findings
    )


def mean_and_error(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the seeds where there is a value, and its standard error (NaN of fewer than 2)."""
    array = np.moveaxis(values.values, values.get_axis_num("seed"), 0)
    known = np.isfinite(array)
    count = known.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, array, 0).sum(0) / count
        spread = np.where(known, array - mean, 0)
        error = np.sqrt((spread**2).sum(0) / (count - 1) / count)
    return np.where(count > 0, mean, np.nan), np.where(count > 1, error, np.nan)


def stated(values: xr.DataArray, digits: int = 2, *, sign: bool = True) -> str:
    """Mean ± standard error over seeds, or that there is none.

    >>> stated(xr.DataArray([1.0, 3.0], dims="seed")), stated(xr.DataArray([np.nan], dims="seed"))
    ('+2.00 ± 1.00', 'undefined')
    """
    mean, error = (float(v) for v in mean_and_error(values))
    spelt = f"{mean:{'+' if sign else ''}.{digits}f}"
    if not np.isfinite(error):
        return f"{spelt} (one seed)" if np.isfinite(mean) else "undefined"
    return f"{spelt} ± {error:.{digits}f}"
