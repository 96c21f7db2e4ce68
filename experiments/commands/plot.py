"""Redraw a finished run, or a finished sweep, from its stored result.

$ sail-jax plot results/transfer_phase
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.commands.run import add_looks, looks_of, show_grid, show_run
from experiments.lab import registry
from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Draws a finished run or sweep again, and prints its findings or its summary."""
    parser.add_argument("dir", metavar="DIR", help="the folder of a finished run or sweep")
    add_looks(parser)
    args = parser.read(argv)
    looks = looks_of(args)
    from experiments.lab import grid, store
    from sail_jax import disk

    if (Path(args.dir) / grid.RECORD).exists():
        result = grid.reopen(Path(args.dir))
        with store.showing(result.path):
            show_grid(result, looks)
        return 0
    run = store.reopen(args.dir)
    try:
        study = registry.load(run.record["experiment"])
    except ValueError as exc:
        raise disk.StoreError(f"{run.path}: {exc}") from exc
    with store.showing(run.path):
        dataset, figures = store.redraw(run, study, looks=looks)
        show_run(study, dataset, figures, run.path, looks.formats)
    return 0
