"""Run one benchmark.

$ sail-jax bench merge
"""

import ast
import contextlib
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sail_jax import disk
from sail_jax.checks import nearest
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show
from sail_jax.provenance import provenance

FOLDER = Path(__file__).parents[1] / "bench"


def benchmarks() -> list[str]:
    """Lists the names of the benchmarks, without importing them."""
    return sorted(f.stem for f in FOLDER.glob("*.py") if not f.stem.startswith("_"))


def _about(name: str) -> str:
    """Returns the first line of a benchmark's docstring, without importing the module."""
    module = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(module) or "").partition("\n")[0]


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the benchmark given first, or lists the benchmarks if none is given."""
    names = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        show("usage: sail-jax bench NAME [options of that benchmark]\n")
        for name in names:
            show(f"{name:<{max(map(len, names))}}  {_about(name)}")
        return 0
    name = argv[0]
    if name not in names:
        raise UsageError(f"unknown benchmark '{name}'{nearest(name, names)}")
    module = importlib.import_module(f"experiments.bench.{name}")
    parser = Parser(f"bench {name}", module.__doc__, f"sail-jax bench {name} --json {name}.json")
    module.options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a record to FILE")
    args = parser.read(argv[1:])
    at, busy = commit(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record = module.measure(args)
    if args.json:
        about = {"schema": f"sail-jax bench {name} 1", "argv": list(argv[1:]), "commit": at}
        about |= {"load": busy, "machine": machine()}
        text = json.dumps({**about, **provenance(), **record}, indent=2)
        disk.write_atomic(args.json, text.encode() + b"\n")
    return 0 if record.get("good", True) else 1


def commit() -> str | None:
    """Finds the commit of the running checkout.

    Returns:
      The commit, with "-dirty" if files were changed; None if there is no checkout or no git.
    """
    words = [
        "git",
        "-C",
        str(FOLDER),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    with contextlib.suppress(OSError):  # without git
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        return said.stdout.strip() or None
    return None


def machine() -> dict[str, str | int]:
    """Describes the machine.

    Returns:
      The "processor", the "cores" that this process may use, and the operating "system".
    """
    from experiments.lab.sweep import cores  # imports jax, which some benchmarks do without

    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return {"processor": name, "cores": cores(), "system": platform.platform()}
