import numpy as np
import pytest
import xarray as xr
from scipy import stats

from experiments.lab.findings import (
    LEVEL,
    MARGIN,
    Finding,
    agrees,
    corrected,
    headline,
    judged,
    mean_and_error,
    rule,
    stated,
    told,
)
from experiments.measures.savings import savings


def test_mean_and_error_leave_out_what_is_undefined():
    values = xr.DataArray([[1.0, 2.0, 6.0, np.nan], [np.nan] * 4], dims=("way", "seed"))
    mean, error = mean_and_error(values)
    assert mean[0] == 3
    assert error[0] == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)
    assert np.isnan(mean[1])
    assert np.isnan(error[1])


def test_a_verdict_is_a_t_test_at_5_percent():
    rng = np.random.default_rng(0)
    seen = set()
    for shift in (-1.5, -0.5, 0.0, 0.5, 1.5):
        for _ in range(40):
            margins = rng.normal(shift, 1, 5)
            clear = stats.ttest_1samp(margins, 0).pvalue < 0.05
            wanted = ("holds" if margins.mean() > 0 else "fails") if clear else "undecided"
            assert judged(*[""] * 4, margins).verdict == wanted
            seen.add(wanted)
    assert seen == {"holds", "fails", "undecided"}


@pytest.mark.parametrize("margins", [[], [1.0], [1.0, np.nan], [np.inf, 1.0], [0.0, 0.0]])
def test_what_says_nothing_decides_nothing(margins):
    assert judged(*[""] * 4, margins).verdict == "undecided"


def test_a_margin_without_spread_decides():
    one = judged(*[""] * 4, [1.0, 1.0])
    assert judged(*[""] * 4, [0.3, 0.1 + 0.2]) == one  # but for rounding
    assert (one.verdict, one.p) == ("holds", 0)
    assert "no spread" in told([one])


def test_findings_are_told_one_a_line():
    one = judged("a paper, Table 1", "it rises", "2 of 3", "1", [1.0, 1.1, 0.9])
    text = told([one, Finding("b", "c", "d", "e", "not tested")])
    found = "Paper: 2 of 3. Here: 1 (Cohen's d = +10.0, p = 0.0033)."
    assert text.splitlines() == [
        f"HOLDS: it rises (a paper, Table 1). {found}",
        "NOT TESTED: c (b). Paper: d. Here: e.",
        rule([one]),
    ]
    assert "two-sided t tests over repetitions at 5 %, Holm-corrected for 1 claim." in rule([one])
    assert rule([Finding("b", "c", "d", "e", "not tested")]) == ""


def test_the_headline_is_the_largest_effect_and_no_agreement():
    found = [
        judged("a", "it rises", "", "by 1", [1.0, 2.0, 1.5]),
        judged("a", "it falls", "", "by -9", [-9.0, -9.1, -9.2]),
        agrees("a", "it is 1", "", [1.0, 1.0001], 1.0),
        Finding("b", "c", "d", "e", "not tested"),
    ]
    told = headline(found, "A summary.")
    assert told == "It falls: this fails (by -9). Of 3 tested claims, 2 hold and 1 fails."
    agreement = headline(found[2:], "A summary.")
    assert agreement.startswith("It is 1 to within 10% of its size (agreement): this holds (+1.000")
    assert headline(found[3:], "It is 0.1, i.e. low.\nMore.") == "It is 0.1, i.e. low."


def test_holm_is_that_of_its_definition():
    """Against the definition: the k-th smallest of m is compared with LEVEL / (m - k), k from 0."""
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(50):
        found = [judged("", "", "", "", rng.normal(s, 1, 5)) for s in (0, 0.5, 1, 2, 4)]
        found.insert(2, Finding("", "", "", "", "not tested"))
        p = [f.p for f in found if f.verdict != "not tested"]
        order = np.argsort(p)
        bounds = LEVEL / (len(p) - np.arange(len(p)))
        below = np.asarray(p)[order] < bounds
        rejected = set(order[: int(np.argmin([*below, False]))].tolist())
        told_apart = [f.verdict for f in corrected(found) if f.verdict != "not tested"]
        for k, word in enumerate(told_apart):
            assert (word != "undecided") == (k in rejected)
        seen.add(len(rejected))
        assert corrected(found)[2] == found[2]
    assert len(seen) > 2


def test_wrong_verdicts_among_many_claims_are_rare():
    """Null: no effects, 20 claims, 5 seeds, 400 studies. At most 5 % of the studies may have a
    verdict: 4 standard errors of a binomial of .05 are at 9.4 %. Without correction, 64 % would.
    """
    rng = np.random.default_rng(0)
    wrong = alone = 0
    for _ in range(400):
        found = [judged("", "", "", "", rng.normal(0, 1, 5)) for _ in range(20)]
        alone += any(f.verdict != "undecided" for f in found)
        wrong += any(f.verdict != "undecided" for f in corrected(found))
    assert wrong / 400 < 0.094
    assert alone / 400 > 0.5


def test_one_seed_is_said():
    assert stated(xr.DataArray([2.0], dims="seed"), 1, sign=False) == "2.0 (one seed)"
    assert stated(xr.DataArray([2.0], dims="draw"), 0) == "+2 (one draw)"


def test_savings_count_what_came_before():
    loss = np.array([[4, 3, 2], [3, 2.5, 2.5], [2, 1, 1]], float)[:, None]
    found = savings(loss, 10, ahead=[0, 0, 5])
    assert found.level[:, 0].tolist() == [2, 2.5, 2]
    assert found.reached[:, 0].tolist() == [True, False, True]
    assert found.saved[:, 0].tolist() == [0, 5, 15]


def _agreement(values, theory=1.0):
    return agrees("", "T agrees with theory", "", values, theory)


def _share(mean, spread, count, verdict, trials=2000):
    """Computes the fraction of measurements with this mean and spread that get the verdict."""
    draws = np.random.default_rng(3).normal(mean, spread, (trials, count))
    return np.mean([_agreement(one).verdict == verdict for one in draws])


def _power(off, spread, count):
    """Computes the probability that Student's interval is within the margin, by quadrature.

    Given the standard deviation s of the sample, the mean must be within m - t s / sqrt(n)."""
    t = stats.t.ppf(1 - LEVEL / 2, count - 1)
    grid = (np.arange(4000) + 0.5) / 4000
    s = spread * np.sqrt(stats.chi2.ppf(grid, count - 1) / (count - 1))
    room = np.maximum(MARGIN - t * s / count**0.5, 0)
    error = spread / count**0.5
    within = stats.norm.cdf((room - off) / error) - stats.norm.cdf((-room - off) / error)
    return float(np.where(room > 0, within, 0).mean())


@pytest.mark.parametrize(("off", "verdict"), [(1.0, "holds"), (1.0, "fails"), (-1.0, "fails")])
def test_agreement_is_wrong_in_a_fortieth_of_the_cases_at_the_margin(off, verdict):
    """Null: the mean differs by the margin, where neither verdict is correct. The fraction is LEVEL
    / 2; z = 4 on 2000 trials is 1.4 %, so that a test at 5 % on each side (z = 7) is detected.
    """
    share = _share(1 + off * MARGIN, 0.2, 20, verdict)
    assert share == pytest.approx(LEVEL / 2, abs=4 * np.sqrt(0.025 * 0.975 / 2000))


@pytest.mark.slow
@pytest.mark.parametrize(("off", "spread"), [(0.0, 0.1), (0.0, 0.15), (0.05, 0.1)])
def test_agreement_has_the_power_that_theory_says(off, spread):
    """z = 4 on 2000 trials: at most 4.5 %, so that an interval longer or shorter by a tenth is
    detected.
    """
    expected = _power(off, spread, 20)
    assert 0.2 < expected < 0.99
    share = _share(1 + off, spread, 20, "holds")
    assert share == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 2000))


def test_a_mean_within_the_margin_is_no_agreement_without_its_interval():
    """The mean equals theory exactly, but its interval is five times the margin, so nothing is
    shown.
    """
    wide = [0.4, 1.6, 0.8, 1.2]
    assert np.mean(wide) == 1
    assert _agreement(wide).verdict == "undecided"
    assert _agreement([2 * (w - 1) * MARGIN / 5 + 1 for w in wide]).verdict == "holds"


@pytest.mark.parametrize(
    ("mean", "theory", "error"), [(-0.513, -0.478, 0.012), (0.278, 0.317, 0.014)]
)
def test_the_right_sign_is_no_agreement(mean, theory, error):
    """Two means with the same sign as theory, which was once called agreement, but 2.9 standard
    errors off.
    """
    values = np.array([-1.0, 1.0] * 10)
    values = mean + error * 20**0.5 * values / values.std(ddof=1)
    assert judged(*[""] * 4, np.sign(theory) * values).verdict == "holds"
    assert _agreement(values, theory).verdict == "undecided"


def test_agreement_prints_both_numbers_their_difference_and_the_margin():
    found = _agreement([0.9, 1.0, 1.1, 1.2], 2.0)
    half = stats.t.ppf(0.975, 3) * np.std([0.9, 1.0, 1.1, 1.2], ddof=1) / 2
    assert found.here == (
        f"+1.050 against +2.000, difference -0.950 in [{-0.95 - half:+.3f}, {-0.95 + half:+.3f}], "
        "margin ± 0.200"
    )
    assert found.claim == "T agrees with theory to within 10% of its size (agreement)"
    assert "within the margin" in rule([found])
    assert "within the margin" not in rule([judged(*[""] * 4, [1.0, 2.0])])


@pytest.mark.parametrize("values", [[], [1.0], [1.0, np.nan]])
def test_what_says_nothing_agrees_with_nothing(values):
    assert _agreement(values).verdict == "undecided"


def test_with_a_theory_of_0_agreement_can_only_be_missed():
    assert _agreement([1e-9, -1e-9, 2e-9], 0.0).verdict == "undecided"
    assert _agreement([1.0, 1.1, 0.9], 0.0).verdict == "fails"


@pytest.mark.parametrize("margin", [0.0, -0.1, np.nan, np.inf])
def test_agreement_takes_a_margin(margin):
    with pytest.raises(ValueError, match="margin must be a positive share"):
        agrees("", "", "", [1.0, 2.0], 1.0, margin=margin)
