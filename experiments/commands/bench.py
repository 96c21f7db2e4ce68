"""`sail-jax bench NAME`: one module of `experiments.bench`, each `main(parser, argv)`."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from sail_jax.checks import nearest
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show


def benchmarks() -> list[str]:
    """The modules of `experiments.bench`, not imported."""
    folder = Path(__file__).parents[1] / "bench"
    return sorted(f.stem for f in folder.glob("*.py") if not f.stem.startswith("_"))


def main(parser: Parser, argv: Sequence[str]) -> int:
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
