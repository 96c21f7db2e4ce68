"""Run one benchmark."""

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

from sail_jax.checks import nearest
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show

FOLDER = Path(__file__).parents[1] / "bench"


def benchmarks() -> list[str]:
    """Lists the names of the benchmarks, without importing them."""
    return sorted(f.stem for f in FOLDER.glob("*.py") if not f.stem.startswith("_"))


def _about(name: str) -> str:
    """The first line of a benchmark's docstring, read without importing the module."""
    module = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(module) or "").partition("\n")[0]


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the benchmark that is named first, or lists the benchmarks if none is.

    Args:
      parser: The parser of the command, which is not used: the benchmark gets one of its own.
      argv: The arguments after "bench": the name of a benchmark, then its options.

    Returns:
      The exit code: what the benchmark returns, or 0.

    Raises:
      UsageError: If there is no such benchmark.
    """
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
    return int(module.main(Parser(f"bench {name}", module.__doc__), list(argv[1:])) or 0)
