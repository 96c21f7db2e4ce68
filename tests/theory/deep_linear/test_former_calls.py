"""Former names, keywords and positional calls of `theory.deep_linear` work for one release."""

import numpy as np
import pytest

import sail_jax
from sail_jax.deprecated import UNTIL
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import covariance, subspace

CALLS = {
    "a name": lambda: dl.fine_tune_risk(load=0.5, theta=0.3, sigma=0.2),  # pyright: ignore
    "a keyword": lambda: dl.fine_tuning_risk(gamma=0.5, theta=0.3, sigma=0.2),  # pyright: ignore
    "positions": lambda: dl.fine_tuning_risk(0.5, 0.3, 0.2),  # pyright: ignore
}
NEW = {"load": 0.5, "theta": 0.3, "sigma": 0.2}


@pytest.mark.parametrize("of", CALLS)
def test_a_former_call_has_the_same_value_and_warns_here(of):
    with pytest.warns(DeprecationWarning, match="fine_tun") as seen:
        found = CALLS[of]()
    assert float(found) == float(dl.fine_tuning_risk(**NEW))
    assert {warning.filename for warning in seen} == {__file__}


def test_a_former_mode_is_the_present_one():
    with pytest.warns(DeprecationWarning, match="is now mode='fine_tuning'"):
        found = dl.transferability("fine_tune", n=30, d=60, theta=0.3, sigma=0.2)  # pyright: ignore
    now = dl.transferability("fine_tuning", n=30, d=60, theta=0.3, sigma=0.2)
    assert float(found) == float(now)


@pytest.mark.slow
def test_siblings_take_former_positions_too():
    s, source, target = np.ones(3), np.eye(3)[0], np.eye(3)[1]
    with pytest.warns(DeprecationWarning, match="n, sigma of .* is now keyword-only"):
        found = covariance.linear_transfer_risk(s, source, target, 9, 0.1)  # pyright: ignore
    now = covariance.linear_transfer_risk(s, source, target, n=9, sigma=0.1)
    assert float(found) == float(now)
    of = subspace.overlap(np.eye(3, 1), np.eye(3, 1))
    with pytest.warns(DeprecationWarning, match="n, of, sigma of .* is now keyword-only"):
        found = subspace.linear_transfer_risk(9, of, 0.1)  # pyright: ignore
    assert float(found) == float(subspace.linear_transfer_risk(n=9, of=of, sigma=0.1))
    with pytest.warns(DeprecationWarning, match=r"theory.problems.check_gamma is now"):
        assert problems.check_gamma is problems.check_load  # pyright: ignore


def test_no_former_call_outlives_its_release():
    """If this test fails, remove the former call from the code."""
    until = {of: end for of, end in UNTIL.items() if of.startswith("theory.")}
    assert "theory.deep_linear.fine_tune_risk" in until
    release = tuple(map(int, sail_jax.__version__.split(".")[:2]))
    assert not [of for of, end in until.items() if tuple(map(int, end.split("."))) <= release]
