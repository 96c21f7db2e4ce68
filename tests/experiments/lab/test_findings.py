import numpy as np
import pytest
import xarray as xr
from scipy import stats

from experiments.lab.findings import (
    LEVEL,
    Finding,
    corrected,
    judged,
    mean_and_error,
    rule,
    stated,
    told,
)
from experiments.training.savings import savings


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
    assert text.splitlines() == [
        "HOLDS: it rises (a paper, Table 1). Paper: 2 of 3. Here: 1 (d = +10.0, p = 0.0033).",
        "NOT TESTED: c (b). Paper: d. Here: e.",
        rule([one]),
    ]
    assert "the number of claims, 1 (Holm), to 5% in all" in rule([one])
    assert rule([Finding("b", "c", "d", "e", "not tested")]) == ""


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
    """Null: nothing is there, 20 claims, 5 seeds, 400 studies. At most 5 % of the studies may say
    anything: a binomial of .05 has 4 standard errors at 9.4 %. Alone judged, 64 % would."""
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
