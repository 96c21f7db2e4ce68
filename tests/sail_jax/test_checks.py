"""Conversion of arguments."""

import jax
import numpy as np
import pytest

from sail_jax.checks import as_array, nearest


@pytest.mark.parametrize("shift", [0, 16])
def test_arrays_of_numpy_are_copied(shift):
    """Also if XLA could use their memory directly: at a multiple of 64 bytes."""
    memory = np.zeros(4096 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    view = memory[start : start + 4096].view(np.float32)
    array = as_array(view)
    assert isinstance(array, jax.Array)
    view[:] = 1
    np.testing.assert_array_equal(array, 0)


def test_arrays_are_what_jax_makes_of_them():
    for x in (1.5, [1, 2], np.float64(3), np.arange(3), np.ones(2), np.zeros((0, 2), np.float16)):
        jax.tree.map(np.testing.assert_array_equal, as_array(x), jax.numpy.asarray(x))
        assert as_array(x).dtype == jax.numpy.asarray(x).dtype


@pytest.mark.parametrize(
    ("word", "options", "suggested"),
    [
        ("tise", ["dare", "ties"], ["ties"]),  # two letters swapped
        ("--foldr", ["--format", "--folder"], ["--folder"]),
        ("hiden.1", ["head", "hidden.0", "hidden.1"], ["hidden.1", "hidden.0"]),
        ("cifar", ["digits", "cifar-10", "cifar-100"], ["cifar-10", "cifar-100"]),
        ("head", ["ahead", "lm_head"], ["ahead", "lm_head"]),
        ("--steps", ["--see", "--data.steps", "--max-steps"], ["--data.steps", "--max-steps"]),
        # `difflib` considers each of these close.
        ("dense", ["ties", "dare"], []),
        ("sharpness", ["sparseness", "happiness"], []),
        ("--rank", ["--random-seed", "--plan", "--threads"], []),
        ("at", ["data", "format"], []),
        ("w", ["v"], []),
        ("a" * 10**6, ["a" * 10**6], ["a" * 10**6]),
    ],
)
def test_only_a_typo_away_is_near(word, options, suggested):
    listed = f"nearest: {', '.join(map(repr, suggested))}"
    assert nearest(word, options) == f" ({listed if suggested else 'known: ' + ', '.join(options)})"


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ([f"{k:02}" for k in range(30)], 24),
        (["x" * 38] * 9, 5),
        (["x" * 300] * 2, 1),
    ],
)
def test_a_list_of_options_ends_after_a_whole_one(options, listed):
    assert nearest("else", options) == f" (known: {', '.join(options[:listed])}, ...)"
