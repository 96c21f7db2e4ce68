import numpy as np
import pytest
import xarray as xr
from scipy import stats

from experiments.lab.findings import Finding, judged, mean_and_error, stated, told, verdict
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
            assert verdict(margins) == wanted
            seen.add(wanted)
    assert seen == {"holds", "fails", "undecided"}


@pytest.mark.parametrize("margins", [[], [1.0], [1.0, np.nan], [np.inf, 1.0], [0.0, 0.0]])
def test_what_says_nothing_decides_nothing(margins):
    assert verdict(margins) == "undecided"


def test_a_margin_without_spread_decides():
    assert verdict([1.0, 1.0]) == "holds"


def test_findings_are_told_one_a_line():
    one = judged("a paper, Table 1", "it rises", "2 of 3", "1.0 ± 0.1", [1.0, 1.1, 0.9])
    text = told([one, Finding("b", "c", "d", "e", "not tested")])
    assert text.splitlines() == [
        "HOLDS: it rises (a paper, Table 1). Paper: 2 of 3. Here: 1.0 ± 0.1.",
        "NOT TESTED: c (b). Paper: d. Here: e.",
    ]


def test_one_seed_is_said():
    assert stated(xr.DataArray([2.0], dims="seed"), 1, sign=False) == "2.0 (one seed)"


def test_savings_count_what_came_before():
    loss = np.array([[4, 3, 2], [3, 2.5, 2.5], [2, 1, 1]], float)[:, None]
    found = savings(loss, 10, ahead=[0, 0, 5])
    assert found.level[:, 0].tolist() == [2, 2.5, 2]
    assert found.reached[:, 0].tolist() == [True, False, True]
    assert found.saved[:, 0].tolist() == [0, 5, 15]
