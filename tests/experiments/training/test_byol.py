"""BYOL: its loss and target compared with NumPy, and the parameters that gradients reach."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import byol
from experiments.training.byol import Byol, Head

EPS = float(jnp.finfo(jnp.float32).eps)
N, FEATURES = 6, 5


def encode(params, stats, images, train):
    """A linear encoder that counts how often it ran."""
    assert train
    return images @ params["w"], {"runs": stats["runs"] + 1}


def networks(steps=10, base=0.9):
    return Byol(encode, Head(7, 4), Head(7, 4), steps, base)


@pytest.fixture(scope="module")
def case():
    """The networks, their jitted loss, and what it is of."""
    net, rng = networks(), np.random.default_rng(0)
    drawn = partial(rng.standard_normal, dtype=np.float32)
    init = jax.jit(net.init, static_argnums=2)
    start = init({"w": drawn((3, FEATURES))}, {"runs": np.zeros(())}, FEATURES, jax.random.key(0))
    params, carried = jax.device_get(start)
    # no leaf at its initial zeros and ones
    params = jax.tree.map(lambda x: x + 0.3 * drawn(x.shape), params)
    return net, jax.jit(net.loss), params, carried, [drawn((N, 3)) for _ in range(2)]


def head(params, x):
    """Batch-normalised ReLU layer and a linear one, in float64 (flax's epsilon is 1e-5)."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = x @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * p["bn"]["scale"] + p["bn"]["bias"]
    return np.maximum(x, 0) @ p["out"]["kernel"] + p["out"]["bias"]


def expected(params, target, views):
    def projected(p, v):
        return head(p["projector"], np.asarray(v, np.float64) @ np.asarray(p["encoder"]["w"]))

    total = 0.0
    for view, other in (views, views[::-1]):
        q, z = head(params["predictor"], projected(params, view)), projected(target, other)
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, z)]
        total += ((unit[0] - unit[1]) ** 2).sum(1).mean()
    return total


@pytest.mark.slow
def test_the_loss_is_the_symmetrised_distance_of_unit_vectors(case):
    _, loss, params, carried, views = case
    target = {k: params[k] for k in ("encoder", "projector")}
    value, metrics, after = loss(params, {**carried, "target": target}, *views)
    # float32 sums of a few dozen terms of order one
    np.testing.assert_allclose(value, expected(params, target, views), atol=100 * EPS)
    assert 0 < float(metrics["spread"]) <= 1
    assert int(after["step"]) == 1
    assert float(after["stats"]["encoder"]["runs"]) == 2  # once per view, by the online network


@pytest.mark.slow
def test_the_target_is_the_average_of_the_online_network(case):
    net, loss, params, carried, views = case
    rng = np.random.default_rng(1)
    wanted = jax.tree.map(np.asarray, carried["target"])
    for step in range(3):
        _, _, carried = loss(params, carried, *views)
        tau = 1 - (1 - net.base) * (np.cos(np.pi * step / net.steps) + 1) / 2
        online = {k: params[k] for k in wanted}
        wanted = jax.tree.map(lambda t, o, tau=tau: tau * t + (1 - tau) * o, wanted, online)
        # a few rounded products and sums of order one
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=10 * EPS), carried["target"], wanted
        )
        params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)


@pytest.mark.slow
def test_gradients_reach_the_online_network_alone(case):
    _, loss, params, carried, views = case

    @jax.jit
    def gradients(params, target):
        value = lambda p, t: loss(p, {**carried, "target": t}, *views)[0]  # noqa: E731
        return jax.grad(value, argnums=(0, 1))(params, target)

    online, target = gradients(params, carried["target"])
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(target))
    assert all(np.any(online[name]["out"]["kernel"] != 0) for name in ("projector", "predictor"))
    assert np.any(online["encoder"]["w"] != 0)


@pytest.mark.slow
def test_a_collapsed_target_has_no_spread(case):
    _, loss, params, carried, views = case
    out = params["projector"]["out"]
    same = {"kernel": np.zeros_like(out["kernel"]), "bias": np.ones_like(out["bias"])}
    params = {**params, "projector": {**params["projector"], "out": same}}
    target = {k: params[k] for k in ("encoder", "projector")}
    _, metrics, _ = loss(params, {**carried, "target": target}, *views)
    assert float(metrics["spread"]) < EPS**0.5  # the variance of equal numbers, rounded


@pytest.mark.slow
def test_a_vector_of_zeros_has_a_finite_gradient():
    gradient = jax.grad(lambda p: byol.regression(p, jnp.ones((1, 3))).sum())(jnp.zeros((1, 3)))
    assert np.isfinite(gradient).all()
    assert float(byol.regression(jnp.zeros((1, 3)), jnp.ones((1, 3)))[0]) == 2
