"""Every law of the limit or the course of training, at random points of its domain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import slow_unless, soak

from theory import deep_linear as dl
from theory import sweep
from theory.deep_linear import scales
from theory.two_layer import best_time, layers

NAMES = [law.name for law in sweep.LAWS]


# Their simulations take more than a third of a CPU-second for three points.
DEAR = {
    "low_rank.flow", "riccati.flow", "flow.fine_tuning_flow", "best_time.best_time_of",
    "scales.unbalanced_limit", "diagonal.diagonal_limit", "fine_tuning.unaligned_losses",
    "adapters.layer_time", "adapters.layer_weights", "label_noise.drift",
}  # fmt: skip
assert set(NAMES) >= DEAR


@pytest.mark.parametrize("points", [3, *soak(100)])
@pytest.mark.parametrize(
    "law", [slow_unless(law.name not in DEAR, law) for law in sweep.LAWS], ids=NAMES
)
def test_a_law_is_its_simulation_wherever_its_checks_admit_it(law, points):
    misses = [f"{miss.gap:.1e} at {miss.arguments}" for miss in sweep.sweep(law, points, points)]
    assert not misses


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "time"), [(2, 20.0), (2, 1e3), (3, 3e3)])
def test_on_a_line_the_wrong_sign_ends_at_the_saddle(depth, time):
    with jax.enable_x64(True):
        x, y = jnp.array([[1.0], [2.0]]), jnp.array([3.0, 5.0])
        for source, end in ((-0.5, 0.0), (0.5, 2.6)):
            beta = jnp.array([source])
            assert float(dl.fine_tuning_limit(x, y, beta, depth)[0]) == pytest.approx(end)
            path = dl.fine_tuning_flow(x, y, beta, [time], depth)
            assert float(path[-1, 0]) == pytest.approx(end, abs=1e-3)
        assert float(scales.unbalanced_limit(x, y, jnp.array([-0.5]), 0.0)[0]) == 0


def test_on_a_line_squares_that_underflow_in_float32_do_not_cross_the_saddle():
    path = dl.fine_tuning_flow(jnp.ones((1, 1)), jnp.ones(1), -jnp.ones(1), [1e3], 2)
    assert abs(float(path[0, 0])) < 1e-30


def test_the_best_time_is_within_its_search():
    """Without noise the loss falls to the end."""
    with jax.enable_x64(True):
        one = jnp.full((1, 1), 0.5)
        found = best_time.best_time_of(layers.Layers(one, one), jnp.array([[2.0]]), 0.0, 0.5)
    assert 0.5 - 1e-4 < found <= 0.5


@pytest.mark.slow
def test_a_law_of_one_branch_fails_beyond_it():
    """The limit whose sign does not change is right up to 90 degrees, and for r > 0."""

    def one_branch(x, y, source, imbalance):
        fit, seen = np.linalg.pinv(x) @ y, np.linalg.pinv(x) @ x @ source
        size2, left = source @ source, source - seen
        return (
            fit + scales.unbalanced_scale(fit @ fit / size2, left @ left / size2, imbalance) * left
        )

    law = sweep.LAWS[NAMES.index("scales.unbalanced_limit")]._replace(law=one_branch)
    misses = [*sweep.sweep(law, 0, 60)]
    assert misses
    for miss in misses:
        x, y, source, imbalance = miss.arguments
        assert imbalance < 0
        assert 2 * y @ x @ source < np.sum((x @ source) ** 2)  # the loss is above that of 0
