"""Redraw a finished run from its stored result."""

from collections.abc import Sequence

from experiments.commands.run import show_run
from experiments.lab import registry
from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Draws a finished run again and prints its findings.

    Args:
      parser: The parser of the command.
      argv: The arguments after "plot": the directory of the run.

    Returns:
      The exit code, 0.

    Raises:
      RefusedError: If the directory holds no run, or one that is not finished.
      StoreError: If the run is damaged, or of a study that does not exist (any more).
      UsageError: If an argument is unknown or missing.
    """
    parser.add_argument("dir", metavar="DIR", help="the output directory of a finished run")
    args = parser.read(argv)
    from experiments.lab import store
    from sail_jax import disk

    run = store.reopen(args.dir)
    try:
        study = registry.load(run.record["experiment"])
    except ValueError as exc:
        raise disk.StoreError(f"{run.path}: {exc}") from exc
    with store.showing(run.path):
        dataset, figures = store.redraw(run, study)
        show_run(study, dataset, figures, run.path)
    return 0
