"""Redraw a finished run from its stored result.

$ sail-jax plot results/transfer_phase
"""

from collections.abc import Sequence

from experiments.commands.run import show_run
from experiments.lab import registry
from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Draws a finished run again and prints its findings."""
    parser.add_argument("dir", metavar="DIR", help="the folder of a finished run")
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
