"""The ReLU transfer experiment beyond the common protocol: its problems and its errors."""

import jax
import numpy as np
import pytest
import xarray as xr
from pictures import flaws
from tiny_runs import tiny_run

from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.relu_transfer import run
from experiments.studies.relu_transfer.findings import boundary_error
from theory import student_teacher as st

relu_transfer = registry.load("relu_transfer")
TINY = relu_transfer.presets["tiny"]


@pytest.fixture(scope="module")
def dataset():
    return tiny_run("relu_transfer").dataset


@pytest.mark.soak
def test_chunks_change_nothing_and_batches_only_rounding(dataset):
    """Error model of the batch: descent of 200 steps amplifies rounding a thousandfold at most."""
    chunked = relu_transfer.run(varied(TINY, chunk=3))
    batched = relu_transfer.run(varied(TINY, side_by_side=2))
    assert chunked.identical(dataset)
    np.testing.assert_allclose(batched.scratch_risk, dataset.scratch_risk, rtol=1e-4)
    np.testing.assert_allclose(batched.pretrain_loss, dataset.pretrain_loss, rtol=1e-9)


@pytest.mark.slow
def test_sources_are_nested_and_their_features_lose_the_target(dataset):
    assert (np.diff(dataset.outside_ideal, axis=0) > 0).all()
    assert (dataset.outside_span <= dataset.outside * (1 + 1e-9)).all()  # a smaller space


@pytest.mark.slow
def test_recorded_numbers_are_those_of_the_networks(dataset):
    """Rebuilds one target set; the risks are exact up to float64 rounding."""
    config = TINY
    with jax.enable_x64(True):
        target = run._target(config, 1)
        trained = run._pretrain(config, np.array([(1, 1)]))
        x, y = run._sample(config, 1, 0, 2)
        fit = st.linear_transfer(trained["w"][0], x, y, config.cutoff)
        expected = float(st.risk(fit, target))
    assert x.shape == (config.ns[2], config.sizes.d)
    assert float(dataset.linear_risk[1, 1, 0, 2]) == pytest.approx(expected, rel=1e-9)
    gain = (dataset.scratch_risk - dataset.linear_risk) / dataset.variance
    np.testing.assert_allclose(
        dataset.gain, gain.mean(("teacher", "draw")).transpose("mu", "n"), rtol=1e-12
    )


@pytest.mark.parametrize(("n", "tolerance"), [(4, 0.0), (30, 0.0), (4, 1e-2), (30, 10.0)])
def test_transfer_by_descent_is_descent_step_by_step(n, tolerance):
    """Null of the closed form: 300 steps, one after the other, in float64."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(n)
        w, x, y = rng.normal(size=(9, 3)), rng.normal(size=(n, 3)), rng.normal(size=n)
        phi, c, taken = np.maximum(x @ w.T, 0) / 9, np.zeros(9), 0
        while taken < 300 and ((y - phi @ c) ** 2).mean() / 2 > tolerance:
            c, taken = c + 1.5 * 9 / n * phi.T @ (y - phi @ c), taken + 1
        fit, steps = st.descended_transfer(w, x, y, 1.5, 300, tolerance)
        assert int(steps) == taken
        np.testing.assert_allclose(fit.c, c, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="rate"):
        st.descended_transfer(w, x, y, 0.0, 300, tolerance)


@pytest.mark.slow
def test_transfer_by_descent_is_set_beside_the_solution(dataset):
    found = relu_transfer.run(varied(TINY, descend_transfer=True))
    assert found.drop_vars(["descended_risk", "descended_gain"]).identical(dataset)
    assert np.isfinite(found.descended_risk).all()
    assert "If descent fits" in relu_transfer.summary(found)
    figures = relu_transfer.plot(found)
    assert flaws(figures["phase_descent"]) == []


@pytest.mark.slow
def test_without_sources_only_the_scratch_law_is_measured(dataset):
    """The same samples and students: bit for bit the risks of the whole experiment."""
    config = varied(TINY, mus=())
    alone = relu_transfer.run(config)
    np.testing.assert_array_equal(alone.scratch_risk, dataset.scratch_risk)
    np.testing.assert_array_equal(alone.exponent, dataset.exponent)
    assert list(relu_transfer.plot(alone)) == ["law"]
    assert relu_transfer.summary(alone).startswith("The scratch risk falls as")


def test_the_error_of_the_measured_boundary_is_that_of_the_jackknife():
    """Gains that are linear in log n for each teacher, so that the zero of each mean without one
    teacher is known.
    """
    logs = np.log([1.0, 100.0])
    zeros = np.array([1.0, 2.0, 3.0, 4.0])  # in log n, at equal slopes: means have mean zeros
    gain = zeros[:, None] - logs
    dataset = xr.Dataset(
        {
            "scratch_risk": (("teacher", "draw", "n"), gain[:, None]),
            "linear_risk": (("mu", "teacher", "draw", "n"), np.zeros((1, 4, 1, 2))),
            "variance": ("teacher", np.ones(4)),
        },
        {"n": [1.0, 100.0]},
    )
    # For a mean the jackknife's error is the standard error.
    np.testing.assert_allclose(boundary_error(dataset), zeros.std(ddof=1) / 2)
