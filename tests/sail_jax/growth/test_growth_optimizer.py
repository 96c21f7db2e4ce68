"""Transformed optimiser states: training after a change of basis follows the same
trajectory as before, if the law of the state is exact."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sail_jax import growth
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import spec
from sail_jax.growth import change_state, learning_rates
from sail_jax.trajectory import average_params, averaged

KEY = jax.random.key(19)
EPS = float(np.finfo(np.float32).eps)
D, H = 4, 6
STEPS = 5
# relative to parameters of order one: STEPS updates, each a chain of about a hundred roundings
CLOSE = 1000 * EPS


def draw(*shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5
    return x.astype(np.float32)


def network(gain):
    params = {
        "embed": draw(3, D, seed=1),
        "in": draw(D, H, seed=2),
        "bias": 0.1 * draw(H, seed=3),
        "out": draw(H, D, seed=4),
        "head": draw(D, 2, seed=5),
    }
    rules = {"embed": "x* resid", "in": "resid* hidden", "bias": "hidden", "out": "hidden* resid"}
    rules |= {"head": "resid* y"}
    if gain:
        params["scale"] = 1 + 0.2 * draw(D, seed=6)
        rules["scale"] = "diag(resid)"
    spaces = {"resid": "rmsnorm", "hidden": "elementwise", "{x,y}": "outer"}
    return params, spec(params, rules, spaces=spaces)


PARAMS, SPEC = network(gain=True)
FOLDED, FOLDED_SPEC = network(gain=False)


def forward(params, x):
    norm = lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)  # noqa: E731
    x = x @ params["embed"]
    h = norm(x) * params.get("scale", 1)
    return norm(x + jnp.tanh(h @ params["in"] + params["bias"]) @ params["out"]) @ params["head"]


BATCHES = (draw(2 * STEPS, 8, 3, seed=7), draw(2 * STEPS, 8, 2, seed=8))


@jax.jit
def gradient(params, batch):
    x, y = batch
    return jax.grad(lambda p: jnp.mean((forward(p, x) - y) ** 2))(params)


@partial(jax.jit, static_argnums=0)
def train(optimizer, params, state, batches, rates=None):
    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(gradient(params, batch), state, params)
        if rates is not None:
            updates = jax.tree.map(jnp.multiply, updates, rates)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), batches)[0]


grow = jax.jit(change_basis, static_argnums=1, static_argnames="kind")
FIRST, SECOND = (jax.tree.map(lambda x, k=k: x[k : k + STEPS], BATCHES) for k in (0, STEPS))
SCHEDULE = optax.linear_schedule(0.05, 0.01, 2 * STEPS)
OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adam(SCHEDULE),
    "adamw": optax.adamw(0.02, weight_decay=0.1),
    "amsgrad": optax.amsgrad(0.02),
    "rmsprop": optax.rmsprop(0.02, centered=True, momentum=0.9),
    "adagrad": optax.adagrad(0.05),
    "lion": optax.lion(0.01),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02)),
    "accumulated": optax.MultiSteps(optax.adam(0.02), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "masked": optax.masked(optax.adam(0.02), lambda p: {k: k != "bias" for k in p}),
    "averaged": optax.chain(optax.ema(0.9), optax.scale(-0.05)),
}
PERMUTED = {
    "resid": growth.permute([2, 0, 3, 1]),
    "hidden": growth.permute([5, 3, 1, 0, 2, 4]),
}


def carried(optimizer, params, s, maps):
    """Returns parameters and state before and after the change of basis, and the report."""
    before = train(optimizer, params, optimizer.init(params), FIRST)
    reports = []

    @jax.jit
    def moved(params, state):
        new = change_basis(params, s, maps)
        state, report = change_state(state, optimizer.init(new), s, maps)
        reports.append(report)
        return new, state

    return before, *moved(*before), reports[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_under_permutation(name):
    optimizer = OPTIMIZERS[name]
    before, new, state, report = carried(optimizer, PARAMS, SPEC, PERMUTED)
    assert report.exact
    assert jax.tree.structure(state) == jax.tree.structure(before[1])
    after, _ = train(optimizer, *before, SECOND)
    got, _ = train(optimizer, new, state, SECOND)
    want = grow(after, SPEC, PERMUTED)
    chex.assert_trees_all_close(got, want, atol=CLOSE)
    if name not in ("sgd",):  # where the state matters, dropping it changes the trajectory
        stale, _ = train(optimizer, new, before[1], SECOND)
        gap = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), stale, want)
        assert max(jax.tree.leaves(gap)) > 10 * CLOSE


@pytest.mark.slow
def test_an_average_of_parameters_moves_as_they_do():
    optimizer = optax.chain(optax.sgd(0.05), average_params("uniform", window=3))
    maps = DUPLICATIONS["uneven"]
    before, _, state, report = carried(optimizer, PARAMS, SPEC, maps)
    assert report.exact
    chex.assert_trees_all_close(averaged(state), grow(averaged(before[1]), SPEC, maps), atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_trajectory_under_rotation(name):
    """First moments move exactly under any map, and SGD commutes with an orthogonal one."""
    optimizer = OPTIMIZERS[name]
    maps = {"resid": growth.rotate(np.linalg.qr(draw(D, D, seed=9))[0])}
    before, new, state, report = carried(optimizer, FOLDED, FOLDED_SPEC, maps)
    assert report.exact
    after, _ = train(optimizer, *before, SECOND)
    got, _ = train(optimizer, new, state, SECOND)
    chex.assert_trees_all_close(got, grow(after, FOLDED_SPEC, maps), atol=CLOSE)


DUPLICATIONS = {
    "even": {"resid": growth.widen(D, 2 * D), "hidden": growth.widen(H, 2 * H)},
    "uneven": {"hidden": growth.widen(H, H + 4, key=KEY)},
    "uneven shares": {"hidden": growth.tile(H, 2 * H, weights=np.linspace(0.5, 1.5, 2 * H))},
    "pad": {"hidden": growth.pad(H, H + 3)},
    "isometric": {"resid": growth.tile(D, D + 3, "zero", isometric=True)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(optimizer, name) for optimizer in ("sgd", "adam") for name in DUPLICATIONS],
)
def test_trajectory_under_duplication(name, optimizer):
    """The state of the grown network is that which its own gradients would have left, and with
    `learning_rates` it trains as the old one would have; without them, elsewhere."""
    transform = optax.sgd(0.05, momentum=0.9) if optimizer == "sgd" else optax.adam(0.02, eps=1e-12)
    maps = DUPLICATIONS[name]
    before, new, state, report = carried(transform, PARAMS, SPEC, maps)
    assert report.exact
    after, _ = train(transform, *before, SECOND)
    want = grow(after, SPEC, maps)
    rates = jax.jit(lambda p: learning_rates(p, SPEC, maps, optimizer))(new)
    got, _ = train(transform, new, state, SECOND, rates)
    chex.assert_trees_all_close(got, want, atol=CLOSE)
    if name != "pad":
        plain, _ = train(transform, new, state, SECOND, jax.tree.map(np.ones_like, rates))
        gap = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), plain, want)
        assert max(jax.tree.leaves(gap)) > 10 * CLOSE


def test_state_is_what_the_gradients_of_the_grown_network_would_have_left():
    maps = DUPLICATIONS["uneven"]
    transform = optax.scale_by_adam()

    @jax.jit
    def both():
        params, wide = PARAMS, change_basis(PARAMS, SPEC, maps)
        old, new = transform.init(params), transform.init(wide)
        for k in range(3):
            batch = jax.tree.map(lambda x, k=k: x[k], BATCHES)
            wide = change_basis(params, SPEC, maps)
            _, new = transform.update(gradient(wide, batch), new, wide)
            updates, old = transform.update(gradient(params, batch), old, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: -0.01 * u, updates))
        return change_state(old, transform.init(wide), SPEC, maps)[0], new

    state, new = both()
    chex.assert_trees_all_close(state, new, rtol=1e-4, atol=50 * EPS)


def test_rates_are_those_of_width():
    """c copies: c on writers and 1/c on readers for SGD; 1 and 1/c for Adam."""
    maps = {"hidden": growth.widen(H, 3 * H)}
    new = grow(PARAMS, SPEC, maps)
    for optimizer, writers in (("sgd", 3.0), ("adam", 1.0)):
        rates = jax.jit(lambda p, how=optimizer: learning_rates(p, SPEC, maps, how))(new)
        ones = jax.tree.map(lambda r, x: np.unique(np.broadcast_to(r, x.shape)), rates, new)
        got = {k: [pytest.approx(float(v)) for v in x] for k, x in ones.items()}
        assert got["in"] == got["bias"] == [writers]
        assert got["out"] == [1 / 3]
        assert got["embed"] == got["head"] == got["scale"] == [1]
    permuted = jax.jit(lambda p: learning_rates(p, SPEC, PERMUTED, "sgd"))(PARAMS)
    assert all((np.asarray(r) == 1).all() for r in jax.tree.leaves(permuted))


def test_rates_of_grouped_axes():
    params = {"v": draw(3, 6), "o": draw(6, 3)}
    s = spec(
        params,
        {"v": "x* (head v)", "o": "(head v)* y"},
        spaces={"head": "odd", "v": "linear", "{x,y}": "outer"},
        sizes={"head": 2},
    )
    maps = {"v": growth.widen(3, 4)}
    rates = jax.jit(lambda p: learning_rates(change_basis(p, s, maps), s, maps, "sgd"))(params)
    rates = jax.tree.map(np.asarray, rates)
    assert rates["v"].tolist() == [[2, 1, 1, 2] * 2]
    assert rates["o"][:, 0].tolist() == [0.5, 1, 1, 0.5] * 2


def test_rates_of_fused_axes():
    """The rates are those of the blocks, concatenated."""
    params = {"qkv": draw(3, 9), "o": draw(3, 3)}
    s = spec(
        params,
        {"qkv": "x* (a + b + v)", "o": "v* y"},
        spaces={"v": "linear", "{a,b,x,y}": "outer"},
        sizes={"a": 2, "b": 4},
    )
    maps = {"v": growth.widen(3, 4)}
    rates = jax.jit(lambda p: learning_rates(change_basis(p, s, maps), s, maps, "sgd"))(params)
    rates = jax.tree.map(np.asarray, rates)
    assert rates["qkv"].tolist() == [[1] * 6 + [2, 1, 1, 2]]


@pytest.mark.slow
def test_dense_maps_restart_second_moments_and_say_so():
    """Adam's state is reset as a whole, since its count is wrong without its moments; schedules and
    states without second moments are kept."""
    optimizer = optax.chain(optax.trace(0.9), optax.adam(SCHEDULE))
    maps = {"resid": growth.rotate(np.linalg.qr(draw(D, D, seed=9))[0])}
    before, new, state, report = carried(optimizer, FOLDED, FOLDED_SPEC, maps)
    assert not report.exact
    how = {field.path: field.how for field in report.fields}
    assert how == {"0/trace": "moved", "1/0/nu": "restarted", "1/1/count": "kept"}
    chex.assert_trees_all_equal(state[1][0], optimizer.init(new)[1][0])
    assert int(state[1][1].count) == STEPS
    chex.assert_trees_all_close(
        state[0].trace, grow(before[1][0].trace, FOLDED_SPEC, maps, kind="gradients")
    )
    assert "the map of 'resid' is dense" in str(report)


@pytest.mark.slow
def test_laws_can_be_said():
    optimizer = optax.adam(0.02)
    _, new, state, _ = carried(optimizer, PARAMS, SPEC, PERMUTED)
    fresh = optimizer.init(new)
    got, report = change_state(state, fresh, SPEC, PERMUTED, laws={"mu": "restart"})
    chex.assert_trees_all_equal(got[0], fresh[0])
    assert [f.how for f in report.fields] == ["restarted"]


def test_averages_of_parameters_are_parameters():
    """An EMA along training, moved at the end, is that of the moved training."""

    @jax.jit
    def both():
        params, average = PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)
        moved = change_basis(average, SPEC, PERMUTED)
        for k in range(3):
            g = gradient(params, jax.tree.map(lambda x, k=k: x[k], BATCHES))
            params = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, g))
            average = optax.incremental_update(params, average, 0.1)
            moved = optax.incremental_update(change_basis(params, SPEC, PERMUTED), moved, 0.1)
        return change_basis(average, SPEC, PERMUTED), moved

    chex.assert_trees_all_close(*both(), atol=10 * EPS)


@pytest.mark.slow
def test_dtypes_of_moments_are_kept():
    optimizer = optax.adam(0.02, mu_dtype=jnp.bfloat16)
    _, _, state, _ = carried(optimizer, PARAMS, SPEC, PERMUTED)
    assert {x.dtype for x in jax.tree.leaves(state[0].mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state[0].nu)} == {jnp.dtype(jnp.float32)}


ADAM = optax.adam(0.02)
DENSE = {"resid": growth.rotate(jnp.eye(D))}
ERRORS = [
    (
        lambda: change_state(
            optax.adafactor(0.1, min_dim_size_to_factor=99).init(PARAMS),
            optax.adafactor(0.1, min_dim_size_to_factor=99).init(PARAMS),
            SPEC,
            PERMUTED,
        ),
        "has a value for each parameter, but its law is unknown: give laws={'v_row'",
    ),
    (
        lambda: change_state(ADAM.init(PARAMS), optax.sgd(0.1).init(PARAMS), SPEC, PERMUTED),
        "must be optimizer.init",
    ),
    (
        lambda: change_state(
            ADAM.init(PARAMS), ADAM.init(PARAMS), SPEC, PERMUTED, laws={"mu": "dual"}
        ),
        "expected one of 'params', 'gradients', 'second_moments', 'restart'; got 'dual'",
    ),
    (
        lambda: change_state(*2 * [ADAM.init(PARAMS)], SPEC, {"rsid": PERMUTED["resid"]}),
        "no space 'rsid'",
    ),
    (lambda: learning_rates(PARAMS, SPEC, DENSE, "adam"), "no learning rate per entry makes adam"),
    (
        lambda: learning_rates(PARAMS, SPEC, PERMUTED, "lion"),
        "expected one of 'sgd', 'adam'; got 'lion'",
    ),
    (
        lambda: learning_rates(PARAMS, SPEC, {"resid": growth.interpolate(D, 6)}, "sgd"),
        "no learning rate per entry makes sgd",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
