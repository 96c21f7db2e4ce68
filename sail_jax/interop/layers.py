"""Checks whether layers compute the same functions in a new order, by the class in transformers.

The class is built without weights in a separate process: importing torch and transformers takes
seconds and half a gigabyte, which should not count toward the memory of a merge.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sail_jax.configurations import LAYER_KEYS, Config, look_up

SECONDS = 120
"""How long a comparison may take."""


def available() -> bool:
    """Checks whether torch and transformers are installed.

    Returns:
      Whether they are, without importing them.
    """
    return all(map(importlib.util.find_spec, ("torch", "transformers")))


def changed_kind(old: Config, new: Config, layers: Sequence[int]) -> str:
    """Finds a layer that computes another kind of function at its new position.

    Args:
      old: The content of config.json.
      new: The same for the new order.
      layers: The number of the old layer, for each of the new ones.

    Returns:
      The difference, its layer, and the entries of `old` that determine it; "" if every layer
      computes the same function as before, or if transformers cannot build the network of `old`.
    """
    asked = {"old": old, "new": new, "layers": list(layers)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=json.dumps(asked), text=True,
            capture_output=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        return str(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ""


def _computed(layer: Any) -> dict[str, Any]:
    """Returns the classes of a layer's modules, its tensors' shapes, and its plain attributes."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        found[name] = type(module).__name__
        for key, value in vars(module).items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if plain and not key.startswith("_"):
                found[f"{name}.{key}".lstrip(".")] = value
    return found | {name: list(x.shape) for name, x in layer.named_parameters()}


def _built(config: Config, count: int) -> list[dict[str, Any]]:
    """Describes the computation of each of the `count` layers; empty for other layers."""
    from sail_jax.interop.transformers import module_of

    module = module_of(config, sys.maxsize, "meta")
    lists = [m for m in module.modules() if type(m).__name__ == "ModuleList" and len(m) == count]
    longest = max(lists, key=lambda m: sum(1 for _ in m.modules()), default=())
    return [_computed(layer) for layer in longest]


def compared(old: Config, new: Config, layers: Sequence[int]) -> str:
    """Computes `changed_kind` in this process.

    Args:
      old: The content of config.json.
      new: The same for the new order.
      layers: The number of the old layer, for each of the new ones.

    Returns:
      As `changed_kind`.

    Raises:
      ValueError: If transformers cannot build the network of `old`.
    """
    before = _built(old, next(filter(None, (look_up(old, key) for key in LAYER_KEYS)), 0))
    try:
        after = _built(new, len(layers))
    except ValueError as error:
        return str(error)
    if not before or not after:
        return ""
    for key in sorted({key for layer in (*before, *after) for key in layer}):
        own, moved = ([layer.get(key) for layer in all_] for all_ in (before, after))
        wrong = [j for j, i in enumerate(layers) if own[i] != moved[j]]
        if wrong and not _is_number(own, moved, layers):
            j, i = wrong[0], layers[wrong[0]]
            entries = ", ".join(f"{k!r} {v!r}" for k, v in _that_state(old, key, own))
            what = f"{key!r} of layer {j}, made of layer {i}, would be {moved[j]!r} for {own[i]!r}"
            return what + (f"; it follows from {entries}" if entries else "")
    return ""


def _is_number(own: Sequence[Any], moved: Sequence[Any], layers: Sequence[int]) -> bool:
    """Checks whether values are only layer numbers, in some form, or the number of layers.

    Some kinds of layers may be without a number.
    """
    if {type(x) for x in (*own, *moved)} - {int, type(None)}:
        return False
    if any((own[i] is None) != (x is None) for i, x in zip(layers, moved, strict=True)):
        return False
    if {*own} == {len(own)} and {*moved} == {len(moved)}:
        return True
    numbers = ([x for x in values if x is not None] for values in (own, moved))
    return all(x < y for values in numbers for x, y in itertools.pairwise(values))


def _that_state(config: Config, key: str, own: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns the entries that determine a property of layers, those of only some layers first."""
    inner = config.get("text_config")
    part = inner if isinstance(inner, Mapping) else config
    found = []
    for name, value in part.items():
        for other in _others(value) if name not in LAYER_KEYS else ():
            tried = {**part, name: other}
            try:
                made = _built(
                    {**config, "text_config": tried} if part is inner else tried, len(own)
                )
            except ValueError:
                continue
            differ = [layer.get(key) != x for layer, x in zip(made, own, strict=False)]
            if any(differ):
                found.append((all(differ), name, value))
                break
    return [(name, value) for _, name, value in sorted(found, key=lambda x: x[:2])][:2]


def _others(value: Any) -> Iterator[Any]:
    """Returns other values of an entry."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1)
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[1:])


if __name__ == "__main__":
    question = json.load(sys.stdin)
    try:
        answer = compared(question["old"], question["new"], question["layers"])
    except ValueError:
        answer = ""
    print(json.dumps(answer))
