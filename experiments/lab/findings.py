"""What an experiment found, beside what a paper printed: means over seeds, or over whatever else
it repeats, and verdicts on claims."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import ArrayLike
from scipy import stats

LEVEL = 0.05
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
    """The measured ones: mean ± standard error over repetitions."""
    verdict: str
    """One of `VERDICTS`, at the scale of this run."""
    p: float = np.nan
    """Of Student's two-sided test that the margins are 0 in the mean; NaN where there is none."""
    effect: float = np.nan
    """Mean of the margins over their standard deviation (Cohen's d); NaN where there is none."""


def judged(where: str, claim: str, paper: str, here: str, margins: ArrayLike) -> Finding:
    """The claim that `margins`, one number per repetition, are positive in the mean, judged alone.

    It holds if Student's two-sided test rejects a mean of 0 at `LEVEL` and the mean is above 0, and
    fails if it is below; margins that are not finite, or fewer than two, decide nothing.

    >>> [judged("", "", "", "", m).verdict for m in ([1, 1.2, 0.9], [-1, -1.2, -1], [1, -1.5, 1])]
    ['holds', 'fails', 'undecided']
    """
    values = np.asarray(margins, float).ravel()
    if len(values) < 2 or not np.isfinite(values).all() or not values.any():
        return Finding(where, claim, paper, here, "undecided")
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    effect = mean / spread if spread else float(np.copysign(np.inf, mean))
    p = float(2 * stats.t.sf(abs(effect) * len(values) ** 0.5, len(values) - 1))
    return _decided(Finding(where, claim, paper, here, "undecided", p, effect), p < LEVEL)


def _decided(finding: Finding, rejected: bool) -> Finding:
    side = "holds" if finding.effect > 0 else "fails"
    return finding._replace(verdict=side if rejected else "undecided")


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of one study, judged together: Holm's correction of their p values, so that the
    chance of any wrong "holds" or "fails" among them is at most `LEVEL`.

    Findings without a p value stay as they are, and do not count.

    References:
      Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    tested = sorted((f.p, i) for i, f in enumerate(findings) if np.isfinite(f.p))
    out, rejecting = list(findings), True
    for rank, (p, i) in enumerate(tested):
        rejecting = rejecting and p * (len(tested) - rank) < LEVEL
        out[i] = _decided(out[i], rejecting)
    return out


def told(findings: Sequence[Finding]) -> str:
    """A line for each, verdict first; then how the verdicts were reached."""
    lines = [
        f"{f.verdict.upper()}: {f.claim} ({f.where}). Paper: {f.paper}. Here: {f.here}"
        f"{evidence(f)}."
        for f in findings
    ]
    return "\n".join(filter(None, (*lines, rule(findings))))


def evidence(finding: Finding) -> str:
    """Effect size and p value, where there are any."""
    if not np.isfinite(finding.p):
        return ""
    effect = f"d = {finding.effect:+.1f}" if np.isfinite(finding.effect) else "no spread"
    return f" ({effect}, p = {finding.p:.2g})"


def rule(findings: Sequence[Finding]) -> str:
    """By what rule the verdicts of a study were reached; empty where nothing was tested."""
    count = sum(np.isfinite(f.p) for f in findings)
    if not count:
        return ""
    return (
        f"Verdicts: Student's two-sided test over repetitions, corrected for the number of claims, "
        f"{count} (Holm), to {LEVEL:.0%} in all; d: mean over standard deviation."
    )


def mean_and_error(values: xr.DataArray, over: str = "seed") -> tuple[np.ndarray, np.ndarray]:
    """Mean over the seeds, or what else is repeated, where there is a value, and its standard error
    (NaN of fewer than 2)."""
    array = np.moveaxis(values.values, values.get_axis_num(over), 0)
    known = np.isfinite(array)
    count = known.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, array, 0).sum(0) / count
        spread = np.where(known, array - mean, 0)
        error = np.sqrt((spread**2).sum(0) / (count - 1) / count)
    return np.where(count > 0, mean, np.nan), np.where(count > 1, error, np.nan)


def stated(values: xr.DataArray, digits: int = 2, *, sign: bool = True) -> str:
    """Mean ± standard error over the one dimension there is, or that there is none.

    >>> stated(xr.DataArray([1.0, 3.0], dims="seed")), stated(xr.DataArray([np.nan], dims="seed"))
    ('+2.00 ± 1.00', 'undefined')
    """
    (over,) = map(str, values.dims)
    mean, error = (float(v) for v in mean_and_error(values, over))
    spelt = f"{mean:{'+' if sign else ''}.{digits}f}"
    if not np.isfinite(error):
        return f"{spelt} (one {over})" if np.isfinite(mean) else "undefined"
    return f"{spelt} ± {error:.{digits}f}"
