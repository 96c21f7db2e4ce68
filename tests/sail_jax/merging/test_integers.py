"""Integers, bools and keys in pytrees: one rule, whose choice is said where models differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import methods


def state(step, seed):
    return {
        "w": jnp.full(3, float(step)),
        "step": jnp.array([step, 7 - step]),
        "key": jax.random.key(seed),
    }


A, B, BASE = state(1, 10), state(2, 20), state(0, 30)


def steps(**options):
    return methods.linear()([A, B], **options)["step"].tolist()


@pytest.mark.parametrize(
    ("integers", "expected"), [("first", [1, 6]), ("last", [2, 5]), ("max", [2, 6])]
)
def test_the_rule_decides(integers, expected):
    models = [{k: m[k] for k in ("w", "step")} for m in (A, B)]
    merged = methods.linear()(models, integers=integers)
    assert merged["step"].tolist() == expected
    assert merged["w"].tolist() == [1.5] * 3
    traced = jax.jit(lambda x: methods.linear()(x, integers=integers))(models)
    assert traced["step"].tolist() == expected


def test_by_default_the_first_is_taken_and_a_warning_names_the_leaf():
    a, b, base = ({k: m[k] for k in ("w", "step")} for m in (A, B, BASE))
    told = r"leaf 'step': int\d+ values differ.*the values of model 0"
    with pytest.warns(UserWarning, match=told):
        merged = methods.linear()([a, b])
    assert merged["step"].tolist() == [1, 6]
    with pytest.warns(UserWarning, match="the values of the base"):
        merged = methods.task_arithmetic()([a, b], base)
    assert merged["step"].tolist() == [0, 7]


def test_keys_follow_the_rule_too():
    merged = methods.linear()([A, B], integers="last")
    same = np.array_equal(*(jax.random.key_data(x["key"]) for x in (merged, B)))
    assert same
    with pytest.raises(ValueError, match="'key' holds random keys, which cannot be ordered"):
        methods.linear()([A, B], integers="max")
    text = [{"w": A["w"], "text": np.array([x])} for x in "ab"]
    with pytest.raises(ValueError, match="'text' holds text or objects, which cannot be ordered"):
        methods.linear()(text, integers="max")


def test_equal_integers_cause_no_warning(recwarn):
    methods.linear()([A, A])
    assert not recwarn.list


def test_refusals_name_the_leaf():
    with pytest.raises(ValueError, match="leaf 'key': key<fry> values differ"):
        steps(integers="refuse")
    with pytest.raises(
        ValueError, match="integers: expected one of 'first', 'last', 'max', 'refuse'; got"
    ):
        steps(integers="largest")


@jax.tree_util.register_pytree_node_class
class Layer:
    def __init__(self, w, act, mask=None):
        self.w, self.act, self.mask = w, act, mask

    def tree_flatten(self):
        return (self.w,), (self.act, self.mask)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return cls(*leaves, *static)


def test_static_data_of_custom_nodes_that_differ_are_named():
    def net(first, second):
        return {"a": jnp.ones(2), "b": [Layer(jnp.ones(2), first), Layer(jnp.ones(2), second)]}

    nets = net("tanh", jax.nn.relu), net("tanh", jax.nn.gelu)
    told = r"model 0 and model 1 differ in static data of Layer with the leaf 'b/1/.*relu'.*gelu'"
    with pytest.warns(UserWarning, match=told):
        merged = methods.linear()(nets)
    assert merged["b"][1].act is jax.nn.relu
    with pytest.raises(ValueError, match=r"differ in static data of Layer.*integers='first'"):
        methods.linear()(nets, integers="refuse")


@pytest.mark.filterwarnings("error")
def test_static_data_that_only_look_different_are_no_difference():
    """Two training states contain different functions with the same names."""

    def made():
        def act(x):
            return x

        return {"a": Layer(jnp.ones(2), act, {"rate": (0.1, np.dtype("f4"))})}

    methods.linear()([made(), made()])
