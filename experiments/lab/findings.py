"""Findings of a study, next to the figures that a paper printed.

This module computes means with standard errors over repetitions (usually seeds), and decides claims
by statistical tests.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike
from scipy import special

LEVEL = 0.05
"""The probability of a wrong verdict that the tests allow."""
MARGIN = 0.1
"""The relative difference between a measured mean and theory that still counts as agreement."""
VERDICTS = ("holds", "fails", "undecided", "not tested")
"""The possible verdicts on a claim."""

_AGREES = "(agreement)"  # the end of a claim that `agrees` tests


class Finding(NamedTuple):
    """One tested claim of a paper, and the verdict on it.

    Attributes:
      where: The paper, and its section, table or figure.
      claim: The claim, as a sentence.
      paper: The figures that the paper prints, and the scale of its experiment.
      here: The measured figures: mean ± standard error over repetitions.
      verdict: One of `VERDICTS`, for the scale of this run.
      p: The p value of Student's two-sided t test that the mean margin is 0; NaN if there was no
        test.
      effect: The mean of the margins over their standard deviation (Cohen's d). It is NaN if there
        was no test, and infinite if the margins are all equal.
    """

    where: str
    claim: str
    paper: str
    here: str
    verdict: str
    p: float = np.nan
    effect: float = np.nan


def judged(where: str, claim: str, paper: str, here: str, margins: ArrayLike) -> Finding:
    """Tests the claim that margins are positive on average, independently of other claims.

    The claim holds if Student's two-sided t test rejects a mean of 0 at `LEVEL` and the mean is
    positive. It fails if the test rejects and the mean is negative. Otherwise it is undecided. It
    is also undecided with fewer than two margins, a margin that is not finite, or margins that are
    all 0. `corrected` then accounts for the other claims of a study.

    Args:
      where: The paper, and its section, table or figure.
      claim: The claim, as a sentence.
      paper: The figures that the paper prints.
      here: The measured figures, as text.
      margins: One number for each repetition, in an array of any shape. A positive margin supports
        the claim.

    Returns:
      The finding, with its p value and effect size if there was a test.

    >>> [judged("", "", "", "", m).verdict for m in ([1, 1.2, 0.9], [-1, -1.2, -1], [1, -1.5, 1])]
    ['holds', 'fails', 'undecided']
    """
    values = np.asarray(margins, float).ravel()
    # Without variance, t is infinite, which is decisive; margins that are all 0 decide nothing (0 /
    # 0).
    if len(values) < 2 or not np.isfinite(values).all() or not values.any():
        return Finding(where, claim, paper, here, "undecided")
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    # Equal margins may differ by rounding.
    some = spread > len(values) * np.finfo(float).eps * abs(mean)
    effect = mean / spread if some else float(np.copysign(np.inf, mean))
    # Only Student's distribution function is required, and importing scipy.stats takes a second.
    p = float(2 * special.stdtr(len(values) - 1, -abs(effect) * len(values) ** 0.5))
    return _decided(Finding(where, claim, paper, here, "undecided", p, effect), p < LEVEL)


def agrees(
    where: str,
    claim: str,
    paper: str,
    values: ArrayLike,
    theory: float,
    *,
    margin: float = MARGIN,
    digits: int = 3,
) -> Finding:
    """Tests the claim that the mean of repeated measurements equals theory to within a margin.

    This is a test of equivalence. Let D be the mean of `values` minus `theory`, and m = margin
    |theory|. The claim holds if Student's 95 % interval of D is within [-m, m]. It fails if the
    interval is outside [-m, m]. Otherwise it is undecided, so that too few repetitions never show
    agreement. If theory is 0, the margin is 0 and the claim cannot hold. If |D| equals m, a verdict
    is wrong with a probability of at most `LEVEL`, half of it on each side.

    Args:
      where: The paper, and its section, table or figure.
      claim: The claim, as a sentence. The margin is added to it.
      paper: The figures that the paper prints.
      values: One measurement for each repetition, in an array of any shape.
      theory: The predicted value.
      margin: The allowed difference of the means, as a fraction of |theory|, chosen before the
        measurement.
      digits: The number of decimals of the figures.

    Returns:
      The finding. Its text contains both numbers, their difference with its interval, and the
      margin.

    Raises:
      ValueError: If `margin` is not a positive number.

    References:
      Schuirmann, A comparison of the two one-sided tests procedure, 1987.

    >>> [agrees("", "", "", v, 1.0).verdict for v in ([1, 1.01], [2, 2.01], [1, 1.2])]
    ['holds', 'fails', 'undecided']
    """
    if not (margin > 0 and np.isfinite(margin)):
        raise ValueError(f"margin must be a positive share of theory; got {margin}")
    apart = np.asarray(values, float).ravel() - theory
    reach = margin * abs(theory)
    half = _half_interval(apart)
    mean = float(apart.mean()) if len(apart) else np.nan
    here = (
        f"{mean + theory:+.{digits}f} against {theory:+.{digits}f}, difference {mean:+.{digits}f} "
        f"in [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}], margin ± {reach:.{digits}f}"
    )
    # The mean of these margins is m - |D|, so `judged` tests the nearer side. The two halves of
    # LEVEL are the chances of a false "within m" and of a false "outside m".
    return judged(
        where,
        f"{claim} to within {margin:.0%} of its size {_AGREES}",
        paper,
        here,
        reach - np.copysign(1.0, mean) * apart,
    )


def _half_interval(values: np.ndarray) -> float:
    """Returns half the length of Student's interval of the mean; NaN for fewer than two values."""
    count = len(values)
    if count < 2:
        return np.nan
    t = float(special.stdtrit(count - 1, 1 - LEVEL / 2))
    return t * float(values.std(ddof=1)) / count**0.5


def _decided(finding: Finding, rejected: bool) -> Finding:
    """Sets the verdict of a tested finding from the test's result and the sign of the effect."""
    side = "holds" if finding.effect > 0 else "fails"
    return finding._replace(verdict=side if rejected else "undecided")


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Judges the findings of one study together, with Holm's correction of their p values.

    The correction limits the probability of one or more wrong verdicts "holds" or "fails" in the
    study to `LEVEL`. It compares the k-th smallest of m p values, counted from 0, with `LEVEL` / (m
    - k). The first p value that is not below its bound makes its finding and all later ones
    undecided.

    Args:
      findings: The findings that `judged` returned. Findings without a p value are not counted.

    Returns:
      The findings in the same order, with the corrected verdicts. Findings without a p value do not
      change.

    References:
      Holm, A simple sequentially rejective multiple test procedure, 1979.

    >>> alone = [judged("", "", "", "", m) for m in ([1, 2, 3], [4, 5, 6])]
    >>> [round(f.p, 3) for f in alone], [f.verdict for f in corrected(alone)]
    ([0.074, 0.013], ['undecided', 'holds'])
    """
    # Findings that no test could decide do not count in the correction.
    tested = sorted((f.p, i) for i, f in enumerate(findings) if np.isfinite(f.p))
    out, rejecting = list(findings), True
    for rank, (p, i) in enumerate(tested):
        # A step-down procedure: after one p value is not rejected, no larger one is.
        rejecting = rejecting and p * (len(tested) - rank) < LEVEL
        out[i] = _decided(out[i], rejecting)
    return out


def told(findings: Sequence[Finding]) -> str:
    """Formats findings as text, one line each, with the verdict first.

    Args:
      findings: The findings of one study, already `corrected`.

    Returns:
      The lines. If anything was tested, the last line describes the test (`rule`).
    """
    lines = [
        f"{f.verdict.upper()}: {f.claim} ({f.where}). Paper: {f.paper}. Here: {f.here}"
        f"{evidence(f)}."
        for f in findings
    ]
    return "\n".join(filter(None, (*lines, rule(findings))))


_FORMS = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
}
"""Verdicts on tested claims as verbs, for one claim and for several."""


def headline(findings: Sequence[Finding], summary: str) -> str:
    """States what a study found, in one or two sentences.

    Args:
      findings: The findings of the study, already `corrected`.
      summary: The description of its dataset.

    Returns:
      The tested claim with the largest effect size, its verdict and its figures, and the number of
      claims of each verdict. Agreement with theory is no effect, and is stated if nothing else was
      tested. Without a test, it is the first sentence of the summary.

    >>> headline([judged("", "a rises", "", "by 2 ± 1", [1, 2, 3])], "")
    'A rises: this is undecided (by 2 ± 1). Of 1 tested claim, 1 is undecided.'
    >>> headline([], "Risks differ by 0.1 % at most. The rest is below 0.1 %.")
    'Risks differ by 0.1 % at most.'
    """
    tested = [f for f in findings if np.isfinite(f.p)]
    if tested:
        most = max(tested, key=lambda f: (not f.claim.endswith(_AGREES), abs(f.effect)))
        claim = f"{most.claim[:1].upper()}{most.claim[1:]}"
        first = f"{claim}: this {_FORMS[most.verdict][0]} ({most.here})."
    else:
        first = re.split(r"(?<=\.)\s+(?=[A-Z])", summary)[0]
    return " ".join(filter(None, (first, counted(findings))))


def counted(findings: Sequence[Finding]) -> str:
    """Counts the findings of each verdict.

    Args:
      findings: The findings of a study.

    Returns:
      A sentence; empty without findings.

    >>> counted([Finding("", "", "", "", v) for v in ("holds", "undecided", "holds")])
    'Of 3 tested claims, 2 hold and 1 is undecided.'
    >>> counted([Finding("", "", "", "", "holds")] * 2)
    'All 2 tested claims hold.'
    """
    tested = [f.verdict for f in findings if f.verdict != VERDICTS[-1]]
    if not tested:
        return ""
    counts = [(tested.count(verdict), form) for verdict, form in _FORMS.items()]
    parts = [f"{n} {form[n != 1]}" for n, form in counts if n]
    if len(parts) == 1 and len(tested) > 1:
        return f"All {len(tested)} tested claims {parts[0].partition(' ')[2]}."
    text = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"Of {len(tested)} tested claim{'s' * (len(tested) > 1)}, {text}."


def evidence(finding: Finding) -> str:
    """Formats the effect size and the p value of a finding.

    Args:
      finding: The finding.

    Returns:
      Text such as " (Cohen's d = +1.3, p = 0.02)", with the space. It is empty if there was no
      test.
    """
    if not np.isfinite(finding.p):
        return ""
    effect = f"Cohen's d = {finding.effect:+.1f}" if np.isfinite(finding.effect) else "no spread"
    return f" ({effect}, p = {finding.p:.2g})"


def rule(findings: Sequence[Finding]) -> str:
    """Describes how the verdicts of a study were reached.

    Args:
      findings: The findings of one study.

    Returns:
      Sentences on the test and the number of tested claims; empty if nothing was tested.
    """
    count = sum(np.isfinite(f.p) for f in findings)
    if not count:
        return ""
    return (
        f"Verdicts use two-sided t tests over repetitions at {100 * LEVEL:g} %, Holm-corrected for "
        f"{count} claim{'s' if count > 1 else ''}. Cohen's d is the mean over the standard "
        "deviation."
        f"{_AGREEMENT if any(f.claim.endswith(_AGREES) for f in findings) else ''}"
    )


_AGREEMENT = (
    " Agreement means that the 95 % interval of the difference lies within the margin, before that "
    "correction. Cohen's d is then the margin minus the difference, over the standard deviation."
)


def mean_and_error(values: xr.DataArray, over: str = "seed") -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean over repetitions and its standard error, from the finite values.

    The standard error is sqrt(sum (x - mean)^2 / (n - 1) / n), n being the number of finite values.

    Args:
      values: The measurements, with the dimension `over`.
      over: The dimension of the repetitions.

    Returns:
      The mean and the standard error, two arrays with the shape of `values` without `over`. The
      mean is NaN if no value is finite, and the error is NaN if fewer than two are.

    >>> [x.tolist() for x in mean_and_error(xr.DataArray([[1.0, 3.0, np.nan]], dims=("n", "seed")))]
    [[2.0], [1.0]]
    """
    # A repetition may be missing at some points. Each point is averaged over its finite values.
    array = np.moveaxis(values.values, values.get_axis_num(over), 0)
    known = np.isfinite(array)
    count = known.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, array, 0).sum(0) / count
        spread = np.where(known, array - mean, 0)
        error = np.sqrt((spread**2).sum(0) / (count - 1) / count)
    return np.where(count > 0, mean, np.nan), np.where(count > 1, error, np.nan)


def mean_and_interval(values: xr.DataArray, over: str = "seed") -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean over repetitions and Student's interval of it, from the finite values.

    The interval contains the expectation with a probability of 1 - `LEVEL`, if the repetitions are
    independent and normal.

    Args:
      values: The measurements, with the dimension `over`.
      over: The dimension of the repetitions.

    Returns:
      The mean and half the length of the interval, two arrays with the shape of `values` without
      `over`. They are NaN where `mean_and_error` is.

    >>> values = xr.DataArray([1.0, 3.0, np.nan], dims="seed")
    >>> [float(x.round(2)) for x in mean_and_interval(values)]
    [2.0, 12.71]
    """
    mean, error = mean_and_error(values, over)
    count = np.isfinite(values.values).sum(values.get_axis_num(over))
    return mean, special.stdtrit(np.maximum(count - 1, 1), 1 - LEVEL / 2) * error


def stated(values: xr.DataArray, digits: int = 2, *, sign: bool = True) -> str:
    """Formats the mean ± standard error of repeated measurements.

    Args:
      values: The measurements, with one dimension, which numbers the repetitions.
      digits: The number of decimals.
      sign: Whether a positive mean has a plus sign.

    Returns:
      Text such as "+2.00 ± 1.00"; "+2.00 (one seed)" with one finite value; "undefined" with none.

    >>> stated(xr.DataArray([1.0, 3.0], dims="seed")), stated(xr.DataArray([np.nan], dims="seed"))
    ('+2.00 ± 1.00', 'undefined')
    """
    (over,) = map(str, values.dims)
    mean, error = (float(v) for v in mean_and_error(values, over))
    spelt = f"{mean:{'+' if sign else ''}.{digits}f}"
    if not np.isfinite(error):
        return f"{spelt} (one {over})" if np.isfinite(mean) else "undefined"
    return f"{spelt} ± {error:.{digits}f}"
