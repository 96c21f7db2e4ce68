"""`sail-jax bench`: runs one of the benchmarks in `experiments.bench`."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from sail_jax.checks import nearest
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show


def benchmarks() -> list[str]:
    """Lists the names of the benchmarks, without importing them.

    Returns:
      The names of the modules in `experiments.bench`, in alphabetical order.
    """
    folder = Path(__file__).parents[1] / "bench"
    return sorted(f.stem for f in folder.glob("*.py") if not f.stem.startswith("_"))


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
        show("\n".join(names))
        return 0
    name = argv[0]
    if name not in names:
        raise UsageError(f"unknown benchmark '{name}'{nearest(name, names)}")
    module = importlib.import_module(f"experiments.bench.{name}")
    return int(module.main(Parser(f"bench {name}", module.__doc__), list(argv[1:])) or 0)
