"""Arguments of a wrong type raise a one-line error with their name, close to the caller."""

import traceback

import jax.numpy as jnp
import pytest

from sail_jax import certificate, methods, probe
from sail_jax.checkpoint import (
    load_checkpoint,
    merge_checkpoints,
    merge_recipe,
    open_checkpoint,
    save_checkpoint,
)

A, B = {"w": jnp.ones((3, 4))}, {"w": jnp.zeros((3, 4))}
X = jnp.ones((5, 2))
PATHS = ["a.npz", "b.npz"]
WRONG = {
    "recipe: expected the path of a YAML file.*got dict": lambda: merge_recipe({}, "out"),
    "recipe: .*got None": lambda: merge_recipe(None, "out"),
    "out: expected a path, got None": lambda: merge_checkpoints(PATHS, None),
    "models.0.: expected a path, got dict of 1; pytrees are merged by": lambda: merge_checkpoints(
        [A, B], "out"
    ),
    "base: expected a path, got dict": lambda: merge_checkpoints(PATHS, "out", base=A),
    "got a function; call it: methods.ties": lambda: merge_checkpoints(
        PATHS, "out", method=methods.ties
    ),
    "out: expected a path, got dict": lambda: save_checkpoint(A, "x.npz"),
    "tensors: expected arrays by name, got .*list": lambda: save_checkpoint("x.npz", [1, 2]),
    "path: expected a path, got None": lambda: open_checkpoint(None),
    "path: expected a path, got dict": lambda: load_checkpoint(A),
    r"loss: .*loss\(params, batch\); too many": lambda: probe.barrier(lambda p: 0.0, A, B, X),
    "loss: expected one number.*shape .3, 4.": lambda: probe.barrier(lambda p, x: p["w"], A, B, X),
    "loss: expected one number.*None": lambda: probe.barrier(lambda p, x: None, A, B, X),
    r"f: expected a function, called as f\(params, inputs\); got 1": lambda: certificate(
        1, A, B, X
    ),
    "score: expected a function.*got 1": lambda: methods.greedy_soup([A, B], score=1),
    "score: expected one number, got .*3, 4": lambda: methods.greedy_soup([A, B], lambda p: p["w"]),
    r"key: .*such as jax.random.key\(0\); got 0": lambda: methods.dare_ties(density=0.5, key=0)(
        [A, B], A
    ),
    r"key: .*key\(0\); got 1": lambda: probe.gaussian_sensitivity(
        lambda p, x: jnp.sum(p["w"]), A, X, 1, [0.5]
    ),
    "models: expected a sequence.*give axis=0": lambda: methods.linear()(A),
    "models: expected pytrees, got a path; merge_checkpoints": lambda: methods.linear()(PATHS),
    "weights: no entry for the leaf 'w'": lambda: methods.linear()([A, B], weights={}),
    "weights: no merged leaf lies at 'v'": lambda: methods.linear()(
        [A, B], weights={"w": [1, 1], "v": [1, 1]}
    ),
    "models: expected leaves of equal length on axis 0": lambda: methods.linear()(
        {"a": jnp.ones(3), "b": jnp.ones((2, 2))}, axis=0
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_refused_in_a_line_near_the_caller(text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        WRONG[text]()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    frames = [x.name for x in traceback.extract_tb(caught.tb) if "/tests/" not in x.filename]
    assert len(frames) <= 3, frames
