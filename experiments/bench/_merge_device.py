"""Compares merges of arrays in device memory with copying the same number of bytes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench._llama import DELTA, SPREAD, Llama
from experiments.bench._measuring import device, in_turns, print_table, spread
from sail_jax import Merge, methods

Trees = list[dict[str, jax.Array]]
MERGES: dict[str, Callable[[], Merge]] = {
    "linear": methods.linear,
    "task_arithmetic": methods.task_arithmetic,
    "ties": partial(methods.ties, scope="tensor"),
    "ties_tree": partial(methods.ties, scope="tree"),
    "dare_ties": lambda: methods.dare_ties(key=jax.random.key(1)),
    "della": lambda: methods.della(key=jax.random.key(1)),
    "breadcrumbs": methods.breadcrumbs,
    "model_stock": methods.model_stock,
}
"""The measured methods, by name."""


def _models(llama: Llama) -> Trees:
    """Draws a base and three models fine-tuned from it on the device, in bfloat16."""

    @jax.jit
    def draw(key: jax.Array) -> Trees:
        trees: Trees = [{} for _ in range(4)]
        for i, (name, shape) in enumerate(llama.shapes().items()):
            keys = jax.random.split(jax.random.fold_in(key, i), 4)
            base = SPREAD * jax.random.normal(keys[0], shape, jnp.bfloat16)
            trees[0][name] = base
            for tree, own in zip(trees[1:], keys[1:], strict=True):
                tree[name] = base + DELTA * jax.random.normal(own, shape, jnp.bfloat16)
        return trees

    return jax.block_until_ready(draw(jax.random.key(0)))


@jax.jit
def _inverted(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Inverts all bits of a tree, which reads and writes each of them once, like a copy."""
    return {name: ~lax.bitcast_convert_type(x, jnp.uint16) for name, x in tree.items()}


def run(size: str, llama: Llama, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    """Measures methods on a model of one size, and prints a table.

    Bandwidth assumes that a method reads each input once and writes its output once. A copy of the
    base, leaf by leaf on the same device, takes turns with the methods.

    Args:
      size: The name of the size, for the table.
      llama: The sizes of the model.
      repeats: The number of timed calls of each method.
      names: The methods to measure, of `MERGES`.

    Returns:
      A record: the copy bandwidth, and for each method its seconds, its bandwidth, and the ratio of
      its bandwidth to copying.
    """
    base, *models = _models(llama)
    held = sum(leaf.nbytes for leaf in base.values())
    merges = [partial(jax.jit(MERGES[name]()), models, base) for name in names]
    copying, *each = in_turns([partial(_inverted, base), *merges], repeats)
    copy = 2 * held / copying.median  # bytes/s
    print(
        f"\n{size}: {llama.parameters:,} parameters, base + {len(models)} in bfloat16; "
        f"{device()}; copying {copy / 1e9:.1f} GB/s"
    )
    rows, measured = [("method", "seconds", "compiling", "GB/s", "of copying")], {}
    for name, took in zip(names, each, strict=True):
        rate = held * (len(models) + 2) / took.median
        speed = f"{rate / 1e9:.1f}", f"{rate / copy:.0%}"
        rows.append((name, spread(took.later), f"{took.first:.1f}", *speed))
        measured[name] = {**took.record(), "bytes_per_second": rate, "of_copy": rate / copy}
    print_table(rows)
    sizes = {"size": size, "parameters": llama.parameters}
    return {**sizes, "copy_bytes_per_second": copy, "methods": measured}
