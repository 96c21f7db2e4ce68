"""Descent in few hidden directions against the plain loop of the whole network, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from theory import claims, problems
from theory.deep_linear import directions, flow_claims, networks, regressions

D, RATE, STEPS = 12, 0.05, 800


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def _plain(weights, x, y, frozen=False):
    """Gradient descent of both layers on |y - X W w|^2 / (2n), from its definition."""
    first, last = (np.array(w) for w in weights)
    x, y = np.asarray(x), np.asarray(y)
    for _ in range(STEPS):
        gradient = x.T @ (x @ (first @ last) - y) / len(x)
        pulled = first.T @ gradient
        if not frozen:
            first = first - RATE * np.outer(gradient, last)
        last = last - RATE * pulled
    return first, last


def _sample(n, seed=9):
    return problems.draw(jax.random.key(seed), n, D, 0.8, 0.3)


def _small(alpha, seed=3):
    return networks.gaussian_weights(jax.random.key(seed), D, 2, alpha)


@jax.jit
def _in(hidden, weights, problem):
    start = directions.reduced(weights, problem, hidden)
    return directions.descend(*start, problem, RATE, STEPS)


def _gap(hidden, weights, x, y):
    """Computes the distance of the predictor from that of the plain loop, and the size of
    the latter."""
    problem = directions.of_samples(x, y)
    hidden = directions.moving(weights, problem) if hidden is None else hidden
    beta = directions.predictor(problem, _in(hidden, weights, problem))
    expected = np.matmul(*_plain(weights, x, y))
    assert 0.5 < np.linalg.norm(expected) < 3  # it has left 0
    return np.linalg.norm(beta - expected)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, D, 30])
def test_two_directions_take_the_steps_of_the_whole_network(n):
    """Both from scratch and after pretraining, whose weights are put back in their place."""
    s, source = _sample(n), directions.of_task(_sample(n).beta_s)
    assert _gap(None, _small(1e-5), s.x, s.y) < 1e-8
    start = _small(1e-5, 4)
    hidden = directions.moving(start, source)
    ended = _in(hidden, start, source)
    pretrained = directions.restored(start, source, hidden, ended)
    # |beta - beta_s|^2 / 2, as rows sqrt(d) e_i have it
    whole = _plain(start, np.sqrt(D) * np.eye(D), np.sqrt(D) * s.beta_s)
    for one, other in zip(pretrained, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)
    assert _gap(None, pretrained, s.x, s.y) < 1e-8


@pytest.mark.slow
def test_other_directions_do_not():
    """Without the gradient's direction, or with any other, weights from scratch grow elsewhere."""
    s, weights = _sample(D), _small(1e-5)
    alone = weights[1] / jnp.linalg.norm(weights[1])
    other = jnp.linalg.qr(jnp.stack([alone, jnp.ones(D)], 1))[0].T
    for hidden in (alone[None], other):
        assert _gap(hidden, weights, s.x, s.y) > 1e-5  # a thousand times the error allowed for two


@pytest.mark.slow
def test_what_two_directions_lose_is_of_second_order_in_the_weights():
    s = _sample(8)
    gaps = [_gap(None, _small(alpha), s.x, s.y) for alpha in (1e-2, 1e-3)]
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.3)


@pytest.mark.slow
def test_the_span_of_the_row_space_loses_nothing():
    """However large the weights are: n + 1 directions where there are n < d samples, or all."""
    n, weights = 5, _small(0.3)
    s = _sample(n)
    spanning = jnp.column_stack([weights[1], weights[0].T @ s.x.T])
    hidden = jnp.linalg.qr(spanning)[0].T
    assert hidden.shape == (n + 1, D)
    assert _gap(hidden, weights, s.x, s.y) < 1e-12
    assert _gap(hidden[:-1], weights, s.x, s.y) > 1e-4
    assert _gap(jnp.eye(D), weights, s.x, s.y) < 1e-12


@pytest.mark.slow
def test_each_network_of_a_loop_stops_by_itself():
    s, weights = _sample(8), _small(1e-2)
    problem = directions.of_samples(s.x, s.y)
    start = directions.reduced(weights, problem, jnp.eye(D))
    untils = jnp.array([1e-1, 1e-2, 1e-3])
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), problem)
    together = directions.descend(*start, many, RATE, STEPS, untils)
    for i, until in enumerate(untils):
        alone = networks.fine_tune(weights, s.x, s.y, RATE, STEPS, until)
        assert 0 < int(alone.steps) < STEPS
        assert int(together.steps[i]) == int(alone.steps)
        assert float(together.loss[i]) == pytest.approx(float(alone.loss), abs=1e-12)
        beta = directions.predictor(many, together)[i]
        np.testing.assert_allclose(beta, networks.predictor(alone.weights), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_last_layer_alone_is_one_layer_on_the_features():
    s, weights = _sample(8), _small(0.3)
    features, last = weights
    problem = directions.of_samples(s.x @ features, s.y)
    start = (problem.basis @ last)[None]
    ended = directions.descend(start, jnp.ones(1), problem, RATE, STEPS, freeze_last=True)
    beta = features @ directions.predictor(problem, ended)
    np.testing.assert_allclose(
        beta, np.matmul(*_plain(weights, s.x, s.y, frozen=True)), rtol=0, atol=1e-12
    )


def _ode(weights, x, y, time):
    """Gradient flow of both layers from its definition, by another solver."""
    first, last = map(np.asarray, weights)
    x, y = np.asarray(x), np.asarray(y)

    def speed(_, z):
        w, v = z[:-D].reshape(D, D), z[-D:]
        gradient = x.T @ (x @ (w @ v) - y) / len(x)
        return -np.concatenate([np.outer(gradient, v).ravel(), w.T @ gradient])

    start = np.concatenate([first.ravel(), last])
    z = integrate.solve_ivp(speed, (0, time), start, "DOP853", rtol=1e-11, atol=1e-13).y[:, -1]
    return z[:-D].reshape(D, D) @ z[-D:]


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, D, 20])
def test_the_flow_is_the_one_of_the_whole_network_to_fourth_order(n):
    """Directions outside the row space of the data require no coordinates."""
    s, weights, time = _sample(n), _small(0.3), 4.0
    problem = directions.of_samples(s.x, s.y, unseen=False)
    assert problem.scale.shape == (min(n, D),)
    start = directions.reduced(weights, problem, jnp.eye(D))
    expected, gaps = _ode(weights, s.x, s.y, time), []
    for steps in (200, 400):
        ended = directions.flow(*start, problem, time, steps)
        whole = directions.restored(weights, problem, jnp.eye(D), ended)
        gaps.append(np.linalg.norm(networks.predictor(whole) - expected))
    assert np.linalg.norm(expected - networks.predictor(weights)) > 0.3
    assert gaps[1] < 1e-6
    assert gaps[0] / gaps[1] == pytest.approx(16, rel=0.2)


@pytest.mark.slow
def test_rows_of_trained_networks_see_the_scale_that_was_printed():
    """Fine-tuning keeps c (I - P) beta_s. The paper has c = 1, unlike the networks."""
    rng, at = np.random.default_rng(5), flow_claims.AT
    (claim,) = claims.select("features-are-fate/T3.9-networks-L2/ours")
    found = claims.check(claim)
    printed = regressions.risks(regressions.fine_tuned(1), at, rng, 20_000)
    assert found.holds
    assert found.simulated - printed.mean() > 10 * found.stderr
