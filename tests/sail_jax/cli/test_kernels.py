"""Commands whose programs mostly run once compile without optimisations, and undo this
afterwards."""

import contextlib
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version

import jax
import pytest
import small_checkpoints as small

from sail_jax.cli import kernels


@pytest.mark.parametrize("own", [None, "--xla_cpu_enable_fast_math=false"])
def test_what_compiles_quickly_is_undone(own, monkeypatch):
    """The option of JAX and the flags of XLA hold in the block alone; flags of the user stay."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if own is not None:
        monkeypatch.setenv("XLA_FLAGS", own)
    with contextlib.suppress(KeyError), kernels.compiled_quickly():
        assert jax.config.read(name)
        known = version("jaxlib").startswith(kernels.TRIED)
        assert os.environ["XLA_FLAGS"] == (own or (kernels.SMALL_PROGRAMS if known else ""))
        raise KeyError
    assert jax.config.read(name) == before
    assert os.environ.get("XLA_FLAGS") == own


@pytest.mark.parametrize(("larger", "quickly"), [(0, True), (1, False)])
def test_small_inputs_are_compiled_for_quickly(tmp_path, larger, quickly):
    """All files of all inputs count, at any depth; anything else is handled when it is opened."""
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "x").write_bytes(bytes(1000))
    with open(tmp_path / "b", "wb") as file:
        file.truncate(kernels.FEW - 1000 + larger)
    inputs = [tmp_path / "a", str(tmp_path / "b"), tmp_path / "missing", "a\0"]
    with kernels.compiled_for(inputs):
        assert jax.config.read("jax_disable_most_optimizations") == quickly


# Each command stops where it would begin to compile quickly.
COMMANDS = """
import jax
from sail_jax.cli import kernels

class Reached(BaseException):
    pass

def reach():
    raise Reached

kernels.compiled_quickly = reach
from sail_jax.cli.main import main

for words in (
    "run transfer_phase --preset tiny",
    "verify",
    "quickstart --out page",
    "merge recipe.yaml merged",
    "grow one grown --width 2x",
    "align one two aligned",
):
    try:
        main(words.split())
    except Reached:
        jax.config.update("jax_num_cpu_devices", 1)  # an error, once there is a device
        print(words.split()[0])
"""


@pytest.mark.soak
def test_flags_are_set_before_the_first_device_is_made(tmp_path):
    """XLA reads them then, and no more: what makes a device before has them ignored silently."""
    for name in ("one", "two"):
        small.save(tmp_path / name, small.tensors(), small.CONFIG)
    recipe = "merge_method: linear\nmodels: [{model: one}, {model: two}]\n"
    (tmp_path / "recipe.yaml").write_text(recipe + "parameters: {weight: 0.5}\n")
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    names = ("run", "verify", "quickstart", "merge", "grow", "align")
    assert done.stdout.split("\n")[:-1] == [*names], done.stderr


KEEPING = """
import os, sys
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
import jax
from sail_jax.cli import kernels

kernels.remember_kernels()
print(jax.jit(lambda x: jax.numpy.sin(x) + 1)(0.0))
"""


@pytest.mark.soak
def test_programs_that_are_cut_short_are_compiled_again_and_nothing_is_said(tmp_path):
    def run():
        command = [sys.executable, "-c", KEEPING]
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("1.0\n", "")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    folder = tmp_path / "sail-jax" / "kernels"
    whole = run()
    assert whole
    for name, data in whole.items():
        (folder / name).write_bytes(data[: len(data) // 2])
    again = run()
    assert again.keys() == whole.keys()
    for data in again.values():
        assert hashlib.sha256(data[32:]).digest() == data[:32]
