"""Merges are distinguished by everything that they do, including what their functions call and
refer to.
"""

import sys
from types import ModuleType

import jax
import merge_cases
import pytest

from sail_jax import Merge, methods
from sail_jax.checks import spelled
from sail_jax.cli.options import flag
from sail_jax.merging import identity as module
from sail_jax.merging import random_bits
from sail_jax.merging.combining import from_function

MINE = """
from dataclasses import dataclass
import jax
from jax import numpy as jnp
HALF = 0.5
SIZES = (1, 2)
class Scale:
    def __call__(self, x):
        return x * HALF
def outer(x):
    return jnp.abs(inner(x)) + SIZES[0]
@jax.jit
def inner(x):
    return x + 1
def unused(x):
    return x
def own(delta, weight):
    return outer(Scale()(delta)), weight
"""


def mine(text, monkeypatch):
    """The identity of a merge by a function of a user's module."""
    monkeypatch.setattr(module, "_FOUND", {})
    made = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", made)
    exec(text, made.__dict__)
    return Merge(from_function(made.own)).identity


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("HALF = 0.5", "HALF = 0.25"),
        ("(1, 2)", "(2, 2)"),
        ("x * HALF", "x - HALF"),
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("jnp.abs", "jnp.square"),
        ("Scale()", "(lambda x: x)"),
    ],
)
def test_what_a_function_reaches_counts(monkeypatch, old, new):
    assert old in MINE
    assert mine(MINE, monkeypatch) != mine(MINE.replace(old, new), monkeypatch)


def test_what_a_function_does_not_reach_does_not_count(monkeypatch):
    same = MINE.replace("    return x\n", "    return -x  # another\n\n")
    assert mine(MINE, monkeypatch) == mine(same, monkeypatch)


def test_other_random_bits_are_another_merge(monkeypatch):
    def identities():
        merges = [methods.dare_linear(key=jax.random.key(0)), methods.linear()]
        return [merge.identity for merge in merges]

    before = identities()
    monkeypatch.setattr(module, "_FOUND", {})
    monkeypatch.setattr(random_bits, "mix", lambda x: x * 0x7FEB352D)
    after = identities()
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize("name", merge_cases.NAMES)
def test_the_notation_of_messages_does_not_count(monkeypatch, name):
    """A merge that a command began is continued in Python, and by the workers of a cluster."""
    known = merge_cases.make(name).identity
    monkeypatch.setattr(module, "_FOUND", {})
    with spelled(flag):
        assert merge_cases.make(name).identity == known
