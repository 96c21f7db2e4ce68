"""List the studies and their questions.

$ sail-jax list
"""

from collections.abc import Sequence

from experiments.lab.registry import studies
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Lists the studies."""
    parser.read(argv)
    try:
        show(experiments())
    except ValueError as exc:  # a study of another package
        raise UsageError(str(exc)) from exc
    return 0


def experiments() -> str:
    """Lists all studies with their questions, as text."""
    width = max(map(len, studies()))
    return "\n".join(f"{name:{width}}  {study.question}" for name, study in studies().items())
