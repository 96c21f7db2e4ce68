"""Which leaves of a state of training are merged, in pytrees."""

import warnings
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

from sail_jax import methods
from sail_jax.merging.selection import of_optimiser, selection

RULE = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1)))
LEAF = np.zeros(2, np.float32)


def _state(seed, step) -> Any:
    params = {"w": np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float32)}
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=RULE)
    moved = jax.tree.map(
        lambda x: jnp.full_like(x, seed) if x.dtype == jnp.float32 else x, state.opt_state
    )
    return state.replace(step=step, opt_state=moved)


def test_a_train_state_is_merged_by_its_params():
    a, b = _state(1, 100), _state(2, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that integers differ
        out = methods.linear()([a, b])
        first = methods.linear()([a, b], rest="first")
    mean = np.mean([a.params["w"], b.params["w"]], 0)
    np.testing.assert_allclose(out.params["w"], mean, atol=1e-7)
    assert (out.step, first.step) == (200, 100)
    for taken, donor in ((out, b), (first, a)):
        for x, y in zip(
            jax.tree.leaves(taken.opt_state), jax.tree.leaves(donor.opt_state), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_an_optimiser_is_never_merged_as_weights():
    """Task arithmetic of second moments could make them negative."""
    a, b = _state(1, 100), _state(2, 200)
    merge = methods.task_arithmetic()
    for select in ("*", "opt_state", "*/nu/*"):
        with pytest.raises(ValueError, match=r"opt_state/.* optimiser.*select: params leaves it"):
            merge([b, b], a, select=select)
    with pytest.raises(ValueError, match=r"'opt/1/0/[mn]u/w' is the state of an optimiser"):
        merge([{"opt": b.opt_state, "w": LEAF}] * 2, {"opt": a.opt_state, "w": LEAF})
    with pytest.raises(ValueError, match="not selected, and rest is 'error'"):
        merge([b, b], a, rest="error")
    with pytest.raises(ValueError, match="selects no leaf"):
        merge([b, b], a, select="parms")
    with pytest.raises(ValueError, match="'error'; got 'drop'"):
        merge([b, b], a, rest=cast(Any, "drop"))


def test_a_path_filter():
    trees = [{"a": LEAF + k, "b": {"c": LEAF + k}} for k in (1, 3)]
    for select in ("b", "b/*", "*/c", lambda path: path.endswith("c")):
        out = methods.linear()(trees, select=select)
        assert (out["a"][0], out["b"]["c"][0]) == (3, 2)
    assert methods.linear()(trees)["a"][0] == 2
    with pytest.raises(ValueError, match="the leaf 'a' is missing in the last model"):
        methods.linear()([trees[0], {"b": trees[1]["b"]}], select="b")
    with pytest.raises(ValueError, match="'extra'"):
        methods.linear()([trees[0], {**trees[1], "extra": LEAF}], select="b")
    traced = jax.jit(lambda x, y: methods.linear()([x, y], select="b"))(*trees)
    assert (traced["a"][0], traced["b"]["c"][0]) == (3, 2)


def test_floats_are_known_by_their_type():
    """Floats are recognised in any byte order, and not by the names of keys or types."""
    kinds = {"a": np.dtype(">f4"), "b": np.dtype("c8"), "c": np.dtype(ml_dtypes.float8_e4m3fn)}
    others = {"d": np.dtype(ml_dtypes.int4), "e": jax.random.key(0).dtype, "rngs/f": np.dtype("f4")}
    leaves = {k: SimpleNamespace(dtype=x) for k, x in {**kinds, **others}.items()}
    assert selection(leaves | {"g": 1.0, "h": floats()}).chosen == ("a", "b", "c", "g")


class floats:  # noqa: N801 - not floating, in spite of its name
    pass


@pytest.mark.slow
def test_nnx_with_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    a, b = (cast(Any, nnx.state(Net(nnx.Rngs(seed)))) for seed in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = methods.linear()([a, b])
    assert type(out) is type(a)
    expected = (a["layer"]["kernel"][...] + b["layer"]["kernel"][...]) / 2
    np.testing.assert_allclose(out["layer"]["kernel"][...], expected, atol=1e-7)
    assert out["dropout"]["rngs"]["key"][...] == b["dropout"]["rngs"]["key"][...]
    nnx.update(Net(nnx.Rngs(2)), out)  # of the same structure


@pytest.mark.parametrize(
    ("paths", "kind", "chosen"),
    [
        ("params/w step opt_state/0/count", "TrainState", "params/w"),
        ("params/w batch_stats/m step", "TrainState", "params/w batch_stats/m"),
        ("params/w batch_stats/m", "", "params/w batch_stats/m"),
        ("params/params/w params/aqt/s step opt_state/m", "state of MaxText", "params/params/w"),
        ("model_params/w optimizer_state/mu", "state of Tunix", "model_params/w"),
        ("model/w optimizer/mu training_key", "state of training", "model/w"),
        ("model/w model/rngs/key optimizer/mu", "state of training", "model/w"),
        ("w rngs/default/key/value opt_state/m", "state of NNX", "w"),
        ("model.layers.0.weight step.weight", "", "model.layers.0.weight step.weight"),
    ],
)
def test_what_trees_are_known(paths, kind, chosen):
    found = selection(dict.fromkeys(paths.split(), LEAF))
    assert (found.kind, " ".join(found.chosen)) == (kind, chosen)
    assert set(found.chosen) | set(found.rest) == set(paths.split())


def test_moments_are_known_by_their_pair():
    both = {"x/mu/w", "x/nu/w", "x/mu/b"}
    assert of_optimiser(both | {"mu/w", "w"}) == both - {"x/mu/b"}
