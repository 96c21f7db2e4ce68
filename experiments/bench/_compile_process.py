"""One method, called in one way, in a separate process: CPU-seconds to its first two results.

`compile` starts such processes. Usage: python -m experiments.bench._compile_process METHOD WAY
LEAVES... prints a line of JSON for each number of leaves.
"""

import gc
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sail_jax import Merge, merge_checkpoints, methods

SHAPES = ((64,), (64, 64), (64, 256), (256, 64), (256,), (128, 64))
MODELS = 2
REQUIRED: dict[str, dict[str, Any]] = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.5}}

Tree = dict[str, np.ndarray]


def tree(leaves: int, seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Tree:
    """Makes a tree of normal random numbers.

    Sorting the leaves by name does not put equal shapes next to each other.

    Args:
      leaves: The number of leaves.
      seed: Seed of the numbers.
      shapes: The shapes of the leaves, which are used in turn.

    Returns:
      The leaves by name, in float32.
    """
    random = np.random.default_rng(seed)
    of = {f"layer{i}": shapes[i % len(shapes)] for i in range(leaves)}
    return {name: random.standard_normal(s, np.float32) for name, s in of.items()}


def merge(name: str, models: Sequence[Tree]) -> Merge:
    """Builds the merge of a method with its default options.

    Methods that require statistics of data receive placeholders: squared parameters instead of
    Fisher information, and identity matrices instead of Gram matrices.
    """
    options = dict(REQUIRED.get(name, {}))
    if "key" in methods.options_of(name):
        options["key"] = jax.random.key(0)
    if name == "fisher":
        options["fishers"] = [{k: x * x for k, x in model.items()} for model in models]
    if name == "regmean":
        options["grams"] = [
            {k: np.eye(len(x), dtype=x.dtype) for k, x in model.items() if x.ndim > 1}
            for model in models
        ]
    return methods.get(name)(**options)


def cpu_seconds() -> float:
    """Returns the CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """Returns the largest resident memory of this process so far."""
    # ru_maxrss counts bytes on macOS, and KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def timed(call: Callable[[], Any]) -> float:
    """Measures the CPU time of a call, until its result is computed."""
    start = cpu_seconds()
    jax.block_until_ready(call())
    return cpu_seconds() - start


def jitted(name: str, models: list[Tree], base: Tree) -> dict[str, float]:
    """Measures a merge under the caller's `jit`.

    Returns CPU-seconds: `first`, including compilation, and `second`. `held` is the compiled
    program's memory besides its inputs and outputs, as a ratio to them.
    """
    start = cpu_seconds()
    program = jax.jit(merge(name, models)).lower(models, base).compile()
    compiling = cpu_seconds() - start
    first, second = (timed(lambda: program(models, base)) for _ in WHEN)
    memory: Any = program.memory_analysis()
    held = memory.temp_size_in_bytes / (memory.argument_size_in_bytes + memory.output_size_in_bytes)
    return {"first": compiling + first, "second": second, "held": held}


def eager(name: str, models: list[Tree], base: Tree) -> dict[str, float]:
    """Measures a merge that is called outside of `jit`, on arrays of JAX.

    Returns CPU-seconds of the `first` and of the `second` call.
    """
    trees: Any = jax.tree.map(jax.numpy.asarray, (models, base))
    merged: Callable[[], Any] = lambda: merge(name, models)(*trees)  # noqa: E731
    return {"first": timed(merged), "second": timed(merged)}


def on_disk(name: str, models: list[Tree], base: Tree) -> dict[str, float]:
    """Measures a merge of safetensors files into a safetensors file.

    Args:
      name: The name of the method.
      models: The models. They are written to files first, which is not timed.
      base: The base.

    Returns:
      CPU-seconds of the `first` and of the `second` merge.
    """
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{k}.safetensors") for k in range(len(models) + 1)]
        for file, leaves in zip(files, [base, *models], strict=True):
            save_file(leaves, file)

        def merged(out: str) -> Any:
            method = merge(name, models)
            return merge_checkpoints(files[1:], Path(folder, out), base=files[0], method=method)

        return {k: timed(lambda k=k: merged(f"{k}.safetensors").seconds) for k in WHEN}


WHEN = ("first", "second")
WAYS = {"jit": jitted, "eager": eager, "disk": on_disk}


def main(name: str, way: str, *counts: str) -> None:
    """Prints the measurements, a line of JSON for each number of leaves.

    Args:
      name: The name of the method.
      way: The kind of call, a key of `WAYS`.
      *counts: Numbers of leaves.
    """
    for leaves in map(int, counts):
        base, *models = (tree(leaves, seed) for seed in range(1 + MODELS))
        models = models[: merge(name, models).models[1]]
        jax.clear_caches()  # every number of leaves requires a new compilation
        gc.collect()
        measured = WAYS[way](name, models, base)
        print(json.dumps({"leaves": leaves, **measured, "peak": peak_bytes()}), flush=True)


if __name__ == "__main__":
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # starts the backend, which is not timed
    main(*sys.argv[1:])
