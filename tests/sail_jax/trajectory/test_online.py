"""Averages maintained during training, compared with averages of the same iterates in float64."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import many_devices
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from sail_jax.trajectory import average_params, averaged, weights

STEPS = 23
EPS = 2.0**-24


def start():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2)}


def gradients(t):
    """Draws random gradients, so that no two iterates are close to each other."""
    return jax.tree.map(lambda x: jnp.sin(x * 3 + t), start())


def trained(average, steps=STEPS, optimizer=None):
    """The last state, and all iterates, in float64."""
    tx = optax.chain(optax.adam(0.3) if optimizer is None else optimizer, average)

    @jax.jit
    def step(params, state, t):
        updates, state = tx.update(gradients(t), state, params)
        return optax.apply_updates(params, updates), state

    params = start()
    state, iterates = tx.init(params), []
    for t in range(steps):
        params, state = step(params, state, jnp.float32(t))
        iterates.append({k: np.asarray(x, np.float64) for k, x in params.items()})
    return state, iterates


def mean(iterates, c):
    return {k: sum(w * x[k] for w, x in zip(c, iterates, strict=True)) for k in iterates[0]}


def assert_near(got, want, steps=STEPS):
    """One rounding of values below 8 at each step."""
    for key, x in want.items():
        assert got[key].dtype == jnp.float32
        np.testing.assert_allclose(got[key], x, rtol=0, atol=8 * EPS * steps)


@pytest.mark.parametrize("steps", [3, 8, 23])
def test_uniform(steps):
    state, iterates = trained(average_params("uniform", window=8), steps)
    last = steps if steps < 8 else 8 + steps % 8
    assert_near(averaged(state), mean(iterates[-last:], np.full(last, 1 / last)))


def test_every_third_iterate():
    state, iterates = trained(average_params("uniform", window=6, every=3))
    # iterates 3, 6, ..., 21: three whole windows of two, and one iterate
    assert_near(averaged(state), mean([iterates[i] for i in (14, 17, 20)], np.full(3, 1 / 3)))


def test_exponential():
    state, iterates = trained(average_params("ema", decay=0.8))
    c = 0.8 ** np.arange(STEPS)[::-1]
    assert_near(averaged(state), mean(iterates, c / c.sum()))


@pytest.mark.parametrize("window", [None, 9])
def test_shape_with_a_known_end(window):
    average = average_params("shape", shape="1-sqrt", total_steps=20, window=window)
    state, iterates = trained(average)  # three steps more change nothing
    n = window or 20
    assert_near(averaged(state), mean(iterates[20 - n : 20], weights("1-sqrt", n)))
    state, iterates = trained(average, 14)
    c = weights("1-sqrt", n)[: 14 - (20 - n)]
    assert_near(averaged(state), mean(iterates[20 - n : 14], c / c.sum()))
    if window:
        state, iterates = trained(average, 5)
        assert_near(averaged(state), iterates[-1])


def test_before_the_first_update():
    state = average_params("uniform", window=3).init(start())
    assert_near(averaged(state), start())


@pytest.mark.parametrize(("kind", "bytes_each"), [("uniform", 8), ("ema", 4)])
def test_bytes_for_each_parameter(kind, bytes_each):
    """Beside three counts and an array of the parameters' dtype."""
    options = {"uniform": {"window": 2}, "ema": {"decay": 0.5}}[kind]
    state = average_params(kind, **options).init({"a": jnp.ones(100, jnp.bfloat16)})
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 100 * bytes_each + 3 * 4 + 2


def test_updates_pass_unchanged():
    average = average_params("uniform", window=3)
    updates = jax.tree.map(lambda x: x + 1, start())
    got, _ = average.update(updates, average.init(start()), start())
    assert all(got[k] is updates[k] for k in updates)


def test_inside_of_multi_steps():
    """Only real steps count: 8 of 24."""
    tx = optax.MultiSteps(
        optax.chain(optax.sgd(0.1), average_params("ema", decay=0.8)), every_k_schedule=3
    )
    params = start()
    state, iterates = tx.init(params), []
    step = jax.jit(tx.update)
    for t in range(24):
        updates, state = step(gradients(t), state, params)
        params = optax.apply_updates(params, updates)
        if t % 3 == 2:
            iterates.append({k: np.asarray(x, np.float64) for k, x in params.items()})
    c = 0.8 ** np.arange(8)[::-1]
    assert_near(averaged(state), mean(iterates, c / c.sum()))


def test_dtypes_and_integers():
    """Averages of bfloat16 are kept in float32; what is not floating has its newest value."""
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2), "n": jnp.arange(2)}
    tx = average_params("uniform", window=2)
    state = tx.init(params)
    assert {str(x.dtype) for x in jax.tree.leaves(state.mean)} == {"float32", "int32"}
    step = {"a": jnp.full(2, 2.0**-7, jnp.bfloat16), "b": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}
    for _ in range(3):
        updates, state = tx.update(step, state, params)
        params = optax.apply_updates(params, updates)
    got = averaged(state)
    assert {k: x.dtype for k, x in got.items()} == {k: x.dtype for k, x in params.items()}
    assert got["b"].tolist() == [3.0, 3.0]
    assert got["n"].tolist() == [3, 4]
    # of 1 + 1/128, 1 + 2/128, 1 + 3/128
    assert float(state.mean["a"][0]) == 1 + 1.5 / 128
    assert float(got["a"][0]) == 1 + 2 / 128
    half = average_params("ema", decay=0.5).init({"a": params["a"]})
    assert averaged(half)["a"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_trainers():
    """The state is found in a TrainState and an nnx.Optimizer, and optax and orbax can map it."""
    tx = optax.chain(optax.sgd(1.0), average_params("ema", decay=0.5))
    state = TrainState.create(apply_fn=None, params={"a": jnp.zeros(2)}, tx=tx)
    state = state.apply_gradients(grads={"a": jnp.ones(2)})
    assert averaged(state)["a"].tolist() == [-1.0, -1.0]
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    newest = np.asarray(model.kernel[...])
    model.kernel[...] = jnp.zeros((1, 1))
    nnx.update(model, averaged(optimizer.opt_state))
    np.testing.assert_array_equal(model.kernel[...], newest)
    doubled = optax.tree_map_params(
        tx, lambda x, p: x + p, state.opt_state, state.params, transform_non_params=lambda x: x
    )
    assert averaged(doubled)["a"].tolist() == [-2.0, -2.0]


@pytest.mark.slow
def test_donated_and_sharded_like_the_parameters():
    program = """
        import jax, jax.numpy as jnp, numpy as np, optax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from sail_jax.trajectory import average_params, averaged

        mesh = jax.make_mesh((4,), ("x",))
        place = NamedSharding(mesh, P("x"))
        params = {"a": jax.device_put(jnp.ones((8, 2)), place)}
        tx = optax.chain(optax.sgd(1.0), average_params("uniform", window=2))
        state = tx.init(params)

        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, donate_argnums=(0, 1))
        for _ in range(3):
            params, state = step(params, state)
            for tree in (state[-1].mean, state[-1].newer, averaged(state)):
                assert tree["a"].sharding.is_equivalent_to(place, 2), tree["a"].sharding
        assert np.all(averaged(state)["a"] == -1), averaged(state)
        print("done")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=many_devices.environment(4), capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == "done\n", found.stderr[-2000:]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: average_params("swa"), "kind: .* got 'swa'"),  # pyright: ignore
        (lambda: average_params("uniform"), "window: .* got None"),
        (lambda: average_params("uniform", window=10, every=3), "window: .*multiple.* 3, got 10"),
        (lambda: average_params("uniform", window=2, decay=0.5), "decay: expected none"),
        (lambda: average_params("ema"), "decay: .* got None"),
        (lambda: average_params("shape", shape="wma"), "total_steps: .* got None"),
        (lambda: average_params("shape", total_steps=4), "shape: .* got None"),
        (
            lambda: average_params("shape", shape="wma", total_steps=4, window=5),
            "window: expected at most total_steps, 4, got 5",
        ),
        (lambda: averaged(optax.adam(1.0).init({"a": jnp.ones(1)})), "one average .* got 0"),
        (
            lambda: average_params("ema", decay=0.5).update(
                {}, average_params("ema", decay=0.5).init({})
            ),
            "expected params",
        ),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
