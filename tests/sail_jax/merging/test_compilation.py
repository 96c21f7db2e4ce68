"""Compilation costs of merges: programs depend on the shapes of leaves, not on their
number, on every platform; and a type checker finds the hyperparameters of every method."""

import functools
import importlib.util
import re
import subprocess
import sys

import jax
import merge_cases
import pytest
from merge_cases import compilations

from experiments.bench._compile_process import jitted, merge, tree
from sail_jax import methods

SHAPES = ((8,), (6, 8))
MERGED = list(methods.METHODS)
KINDS = (*merge_cases.KINDS, "fisher")


def case(name, leaves, shapes=SHAPES):
    """Makes a merge, models and a base with a given number of leaves."""
    base, *models = (tree(leaves, seed, shapes) for seed in range(3))
    method = merge(name, models)
    return method, models[: method.models[1]], base


@functools.cache
def lines_per_leaf(name):
    """Counts the lines of the lowered program for each additional leaf of an existing shape."""
    sizes = []
    for leaves in (4, 12):
        method, *given = case(name, leaves)
        sizes.append(jax.jit(method).lower(*given).as_text().count("\n"))
    return (sizes[1] - sizes[0]) / 8


@pytest.mark.slow
@merge_cases.each_method(MERGED, quick=("ties", "fisher"), slow=KINDS)
def test_programs_follow_the_shapes(name):
    """A leaf more is stacked with its like and taken out again, in 6 to 9 lines; merged by itself
    it would be 84 (fisher) to 422 (breadcrumbs). Task arithmetic, 29, is entry by entry: there
    loops would not pay."""
    assert 0 < lines_per_leaf(name) < 2.5 * lines_per_leaf("task_arithmetic")


@pytest.mark.slow
@merge_cases.each_method(MERGED, quick=("ties", "karcher"), slow=KINDS)
def test_lowers_for_accelerators_without_the_host(name):
    """No method uses callbacks, or counts by scatter, which is efficient only on CPUs."""
    method, *given = case(name, 2)
    program = jax.export.export(jax.jit(method), platforms=["cuda", "tpu"])(*given).mlir_module()
    called = re.findall(r"custom_call @(\w+)", program)
    assert not [target for target in called if "callback" in target]
    if method.needs != "tensor":  # factorisations are the platform's own
        assert called == []
        assert "stablehlo.scatter" not in program


@pytest.mark.slow
@merge_cases.each_method(MERGED, quick=("ties",), slow=KINDS)
def test_eager_kernels_are_compiled_once_for_each_shape(name, caplog):
    shapes = ((11,), (5, 13))
    method, *given = case(name, 4, shapes)
    jax.clear_caches()  # another test may have compiled for them
    assert compilations(caplog, lambda: method(*given))  # the log does show them
    assert not compilations(caplog, lambda: method(*given))
    other, *more = case(name, 12, shapes)
    found = compilations(caplog, lambda: other(*more))
    assert not found, [record.getMessage() for record in found]


@merge_cases.each_method(MERGED, quick=(), slow=KINDS)
def test_compiled_programs_hold_at_most_twice_their_inputs_and_outputs(name):
    method, *given = case(name, 60, ((64,), (64, 64), (64, 256)))
    del method
    assert jitted(name, *given)["held"] <= 2


USER = """
from sail_jax import Merge, methods, transforms, chain, merge_checkpoints
from sail_jax.merging.reductions import weighted_mean

merge: Merge = methods.ties(density=0.5, scope="tensor")
tree = merge([{"a": 1.0}], {"a": 0.0}, weights=[1.0])
own = Merge(chain(transforms.trim(0.2), transforms.elect()), weighted_mean)
merge_checkpoints(["a", "b"], "out", base="c", method=own)
methods.ties(densty=0.5)  # no such hyperparameter
methods.ties(scope="leaf")  # no such scope
methods.dare_ties(density=0.5)  # a key is missing
methods.linear([{"a": 1.0}])  # models are not for the factory
merge.name = "other"  # immutable
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="comes with the extra dev")
def test_a_type_checker_sees_every_hyperparameter(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(USER)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    wrong = [n for n, line in enumerate(USER.splitlines(), 1) if "  # " in line]
    assert sorted({int(n) for n in re.findall(r"user\.py:(\d+):\d+ - error", said)}) == wrong, said
