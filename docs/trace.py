"""Counts the functions that one merge calls, as a measure of how much code a reader must follow.

    python docs/trace.py [--json | --check | --release]

Each row is one call on tiny arrays. "functions" counts the distinct functions of our packages that
are called, with comprehensions and lambdas (for optax, optax's functions). "files" counts the files
of these functions, and "calls" counts the calls. "changes" counts how often the next call is in
another file. "first" also builds programs, and "again" finds them in the cache. A cached jitted
function calls nothing. Programs are small, and compiled with little optimisation.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpy as np
import optax

import sail_jax
from sail_jax import checkpoint, methods
from sail_jax.cli.main import main as cli

HERE = Path(sail_jax.__file__).parents[1]
OURS = tuple(f"{HERE / package}{os.sep}" for package in ("sail_jax", "theory", "experiments"))
OPTAX = (f"{Path(optax.__file__).parent}{os.sep}",)
RELEASED = Path(__file__).with_name("trace.json")
KEY = jax.random.key(0)
METHODS: dict[str, Callable[[], Any]] = {
    "ties": lambda: methods.ties(density=0.2),
    "dare": lambda: methods.dare_linear(density=0.5, key=KEY),
    "slerp": lambda: methods.slerp(t=0.5),
    "tsv_m": lambda: methods.tsv_m(),
}

RECIPE = """models:
{models}base_model: {base}
merge_method: ties
parameters:
  density: 0.2
  weight: 1.0
dtype: float32
"""


class Count(NamedTuple):
    """The counts of one call."""

    call: str
    functions: int
    files: int
    calls: int
    changes: int


def counted(name: str, call: Callable[[], Any], roots: tuple[str, ...] = OURS) -> Count:
    """Calls a function, and counts the calls of functions below some folders."""
    entered: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(roots):
            entered.append(frame.f_code)

    sys.setprofile(note)
    try:
        jax.block_until_ready(call())
    finally:
        sys.setprofile(None)
    names = {(code.co_filename, code.co_qualname) for code in entered}
    files = [code.co_filename for code in entered]
    changes = sum(a != b for a, b in itertools.pairwise(files))
    return Count(name, len(names), len(set(files)), len(entered), changes)


def tree(seed: int) -> dict[str, jax.Array]:
    """A model of two small leaves."""
    random = np.random.default_rng(seed)
    shapes = {"kernel": (4, 8), "bias": (8,)}
    return {name: jax.numpy.asarray(random.normal(size=s), "float32") for name, s in shapes.items()}


def rows(folder: Path) -> Iterator[Count]:
    """Merges with each method (eager and jitted), merges files, and updates with optax."""
    base, *models = map(tree, range(4))
    for name, make in METHODS.items():
        merge = make()
        mine = models[: merge.models[1]]
        for time in ("first", "again"):
            yield counted(f"{name}, eager, {time}", lambda m=merge, x=mine: m(x, base))
        jitted = jax.jit(lambda x, b, m=merge: m(x, b))
        for time in ("first", "again"):
            yield counted(f"{name}, jitted, {time}", lambda f=jitted, x=mine: f(x, base))
    for name, each in {"base": base, **{f"model{k}": x for k, x in enumerate(models)}}.items():
        checkpoint.save_checkpoint(folder / f"{name}.safetensors", each)
    paths = [str(folder / f"model{k}.safetensors") for k in range(3)]
    options: dict[str, Any] = {"base": str(folder / "base.safetensors"), "method": "ties"}
    # Calls in other threads are not counted.
    options |= {"density": 0.2, "run": checkpoint.RunOptions(threads=1)}
    for time in ("first", "again"):
        call = functools.partial(checkpoint.merge_checkpoints, paths, folder / time, **options)
        yield counted(f"ties, files, {time}", call)
    listed = "".join(f"  - model: {path}\n" for path in paths)
    recipe = folder / "recipe.yml"
    recipe.write_text(RECIPE.format(models=listed, base=options["base"]))
    words = ["merge", str(recipe), str(folder / "out"), "--threads", "1", "--quiet"]
    with contextlib.redirect_stdout(None):
        yield counted("ties, recipe", lambda: cli(words))
    adam = optax.adamw(1e-3)
    state = adam.init(base)
    update = jax.jit(adam.update)
    for time in ("first", "again"):
        call = lambda: update(base, state, base)  # noqa: E731
        yield counted(f"optax.adamw's update, jitted, {time}", call, OPTAX)


def rises(counts: list[Count]) -> list[str]:
    """The counts that exceed those of the last release by more than a tenth."""
    released = {row["call"]: row for row in json.loads(RELEASED.read_text())}
    return [
        f"{count.call}: {key} {released[count.call][key]} -> {value}"
        for count in counts
        for key, value in count._asdict().items()
        if key != "call" and "optax" not in count.call and count.call in released
        if value > 1.1 * released[count.call][key]
    ]


def main() -> None:
    """Prints the counts as a table, or as JSON with `--json`."""
    with tempfile.TemporaryDirectory() as folder:
        counts = list(rows(Path(folder)))
    written = json.dumps([count._asdict() for count in counts], indent=1)
    if "--release" in sys.argv[1:]:
        RELEASED.write_text(written + "\n")
    if "--json" in sys.argv[1:]:
        print(written)
        return
    print("".join(f"{title:>{34 if not i else 10}}" for i, title in enumerate(Count._fields)))
    for call, *numbers in counts:
        print(f"{call:>34}" + "".join(f"{n:10,}" for n in numbers))
    if "--check" in sys.argv[1:] and (risen := rises(counts)):
        sys.exit("more to read than in the last release:\n" + "\n".join(risen))


if __name__ == "__main__":
    main()
