"""Small real checkpoints and recipes, to try merging on."""

from collections.abc import Sequence
from pathlib import Path

from sail_jax import disk
from sail_jax.cli.options import Parser, seed
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Makes the examples and grades them, or grades one checkpoint.

    Args:
      parser: The parser of the command.
      argv: The arguments after "examples": a directory and options.

    Returns:
      The exit code, 0.

    Raises:
      RefusedError: If the directory is a file, or is not empty and `--force` is not given.
      StoreError: If a file cannot be written, or the checkpoint to grade is not a model of the
        examples.
      UsageError: If an argument is unknown or missing.
    """
    add = parser.add_argument
    add(
        "dir",
        metavar="DIR",
        type=Path,
        help="the folder of the examples, which is made if it is not there",
    )
    add(
        "--seed",
        metavar="N",
        type=seed,
        default=0,
        help="seed of the networks' training; default: %(default)s",
    )
    add(
        "--force",
        action="store_true",
        help="replace examples that are there already, and nothing else",
    )
    add(
        "--evaluate",
        metavar="CHECKPOINT",
        type=Path,
        help="only measure how many held-out digits this checkpoint reads",
    )
    args = parser.read(argv)
    from experiments.data import example_checkpoints as examples

    if args.evaluate is not None:
        fields = {"seed": int, "tasks": list}
        record = disk.read_record(args.dir / examples.RECORD, fields)
        grades = examples.evaluate(args.evaluate, seed=record["seed"])
        examples.print_grades({args.evaluate.name: grades})
        return 0
    grades = examples.make(args.dir, seed=args.seed, force=args.force)
    examples.print_grades(grades)
    show(
        f"\n{args.dir / 'recipes'} holds a recipe for each method. Next:\n"
        f"  sail-jax merge {args.dir / 'recipes' / 'ties.yaml'} {args.dir / 'merged'}\n"
        f"  sail-jax examples {args.dir} --evaluate {args.dir / 'merged'}"
    )
    return 0
