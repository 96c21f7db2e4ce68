"""`sail-jax merge`: a recipe carried out, with progress, a plan beforehand and a report after."""

import hashlib
import os
import platform
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from experiments.arguments import add_copying, run_options
from experiments.progress import say

LARGEST_RECIPE = 1 << 20  # bytes


def add_arguments(parser: Any) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", nargs="?", type=Path, help="mergekit's YAML, or with our keys")
    add("out", metavar="OUT", nargs="?", type=Path, help="a folder, or a .safetensors, .npz file")
    add("--methods", action="store_true", help="the methods that a recipe may name, and stop")
    add("--plan", action="store_true", help="what would be done to every tensor, and stop")
    add("--full", action="store_true", help="with --plan: a line for every tensor")
    add("--resume", action="store_true", help="continue an interrupted merge")
    add("--report", metavar="DIR", type=Path, help="measure, and write report.json, report.html")
    add_copying(parser)


def read_recipe(path: Path) -> Any:
    from sail_jax import disk
    from sail_jax.checkpoint.recipe.recipes import parse

    return parse(disk.read_bytes(path, LARGEST_RECIPE), str(path))


def remember_kernels() -> None:
    """Lets JAX keep what it compiles, for the next merge: most of a small one is compilation.

    In the user's cache folder, apart for every version and processor. A folder that JAX was told to
    use stays; one that cannot be written is done without.
    """
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    about = Path("/proc/cpuinfo").read_bytes() if Path("/proc/cpuinfo").exists() else b""
    lines = {line for line in about.splitlines() if line.startswith((b"flags", b"Features"))}
    kind = repr([jax.__version__, platform.machine(), sorted(lines)])
    name = hashlib.sha256(kind.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "sail-jax" / "kernels" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return
    if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run(args: Namespace) -> int:
    """Raises ValueErrors with one line each for what the user can put right."""
    remember_kernels()
    from sail_jax.checkpoint.operations import merging
    from sail_jax.checkpoint.planning import cards

    if args.methods:
        print(cards.methods(), end="")
        return 0
    if args.recipe is None:
        raise ValueError("name a recipe: sail-jax merge RECIPE OUT")
    began = time.monotonic()
    recipe = read_recipe(args.recipe)
    if args.plan:
        with merging.prepared(recipe, run_options(args)) as ready:
            print(cards.render(ready.plan, args.full, merging.visits(ready.works)), end="")
            print(ready.summary())
        return 0
    if args.out is None:
        raise ValueError("name the output: sail-jax merge RECIPE OUT")
    meter = None if args.quiet else Meter()
    merged = merging.merge_recipe(
        recipe, args.out, measure=args.report is not None, run=run_options(args, meter),
        before=lambda ready: _admit(args.report),
    )  # fmt: skip
    if meter is not None:
        meter.close()
    if args.report is not None:
        _report(args, recipe, merged)
    for note in merged.plan.notes:
        say(f"note: {note}")
    tensors = len(merged.plan.treatments)
    print(f"{merged.out}: {tensors} tensors in {time.monotonic() - began:.1f} s")
    return 0


def _admit(report: Path | None) -> None:
    if report is not None:
        from experiments import merge_report

        merge_report.admit(report)


def _report(args: Namespace, recipe: Any, merged: Any) -> None:
    from experiments import merge_report, store

    about = {"recipe": recipe.text, "seconds": merged.seconds, **store.provenance()}
    for path in merge_report.write(args.report, merged.plan, merged.records, about):
        print(path)


class Meter:
    """Progress on stderr: how much is read, how fast, how long it will take."""

    def __init__(self) -> None:
        self.began = self.shown = time.monotonic()
        self.first: int | None = None
        self.live = sys.stderr.isatty()
        self.width = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done  # what an earlier run had done is not this one's speed
        last = done >= total
        if now - self.shown < (0.1 if self.live else 10) and not (last and self.live):
            return
        self.shown = now
        rate = (done - self.first) / max(1e-9, now - self.began)
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 and not last else ""
        line = f"  {done / total:4.0%} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s{left}  {name}"
        line = line[:100]
        if self.live:
            print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(line)
        else:
            say(line)

    def close(self) -> None:
        if self.live and self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
