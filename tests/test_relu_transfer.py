"""The ReLU transfer experiment beyond the common protocol: its problems, and its named refusals."""

import math

import jax
import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.relu_transfer import run
from theory import student_teacher as st

relu_transfer = registry.load("relu_transfer")
TINY = relu_transfer.presets["tiny"]


@pytest.fixture(scope="module")
def dataset():
    return tiny_run("relu_transfer").dataset


@pytest.mark.slow
def test_chunks_change_nothing_and_batches_only_rounding(dataset):
    """Error model of the batch: descent of 200 steps amplifies rounding a thousandfold at most."""
    chunked = relu_transfer.run(varied(TINY, chunk=3))
    batched = relu_transfer.run(varied(TINY, side_by_side=2))
    assert chunked.identical(dataset)
    np.testing.assert_allclose(batched.scratch_risk, dataset.scratch_risk, rtol=1e-4)
    np.testing.assert_allclose(batched.pretrain_loss, dataset.pretrain_loss, rtol=1e-9)


def test_sources_are_nested_and_their_features_lose_the_target(dataset):
    assert (np.diff(dataset.outside_ideal, axis=0) > 0).all()
    assert (dataset.outside_span <= dataset.outside * (1 + 1e-9)).all()  # a smaller space


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": {"d": 1}}, "sizes.d must be at least 2; got 1"),
        ({"sizes": {"m_star": 1}}, "sizes.m_star must be at least 2"),
        ({"teachers": 1}, "teachers must be at least 2"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"descent": {"rate": 0.0}}, "descent.rate must be greater than 0"),
        ({"descent": {"tolerance": math.nan}}, "descent.tolerance must be"),
        ({"cutoff": 1.0}, "cutoff must be less than 1"),
        ({"ns": (10, 10, 20)}, "ns must be one or more increasing values"),
        ({"ns": (10, 20)}, "ns must be 3 or more values"),
        ({"ns": (0, 10, 20)}, r"ns\[0\] must be at least 1"),
        ({"mus": (0.5,)}, "mus must be none or 2 and more increasing"),
        ({"mus": (0.5, 1.0)}, r"mus\[1\] must be less than 1"),
        ({"mus": (0.5, 0.55)}, "mus must .* whole numbers of the sizes.m_star = 30 neurons"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        varied(relu_transfer.presets["default"], **change)


@pytest.mark.slow
def test_without_sources_only_the_scratch_law_is_measured(dataset):
    """The same samples and students: bit for bit the risks of the whole experiment."""
    config = varied(TINY, mus=())
    alone = relu_transfer.run(config)
    np.testing.assert_array_equal(alone.scratch_risk, dataset.scratch_risk)
    np.testing.assert_array_equal(alone.exponent, dataset.exponent)
    assert list(relu_transfer.plot(alone)) == ["law"]
    assert relu_transfer.summary(alone).startswith("The scratch risk falls as")
