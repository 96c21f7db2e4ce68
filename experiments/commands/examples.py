"""Small real checkpoints and recipes, to try merging with.

$ sail-jax examples ex
"""

from collections.abc import Sequence
from pathlib import Path

from sail_jax import disk
from sail_jax.cli.options import Parser, UsageError, add_seed
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Creates the examples and scores them, or scores one checkpoint."""
    add = parser.add_argument
    add(
        "dir",
        metavar="DIR",
        type=Path,
        help="the folder for the examples; it is created if it is missing",
    )
    add_seed(parser, "the networks' training", 0)
    add(
        "--force",
        action="store_true",
        help="replace existing examples, but no other files",
    )
    add(
        "--texts",
        action="store_true",
        help="create only two networks that read text, with different tokenizers",
    )
    add(
        "--llama",
        action="store_true",
        help="create only three small Llamas with random weights, and a file that describes a "
        "mixture of experts of them",
    )
    add(
        "--evaluate",
        metavar="CHECKPOINT",
        type=Path,
        help="only score this checkpoint: the share of held-out digits that it classifies "
        "correctly, or its bits per byte of held-out text",
    )
    args = parser.read(argv)
    from experiments.data import example_checkpoints as examples
    from experiments.data import example_texts as texts

    if args.texts and args.evaluate is None:
        with examples.filled(args.dir, args.force) as part:
            texts.save(part)
        for name in texts.MODELS:
            show(f"{args.dir / name}: {texts.bits_per_byte(args.dir / name):.3f} bits per byte")
        return 0
    if args.evaluate is not None and texts.is_one(args.evaluate):
        show(f"{args.evaluate}: {texts.bits_per_byte(args.evaluate):.3f} bits per byte")
        return 0
    if args.evaluate is not None:
        path = args.dir / examples.RECORD
        if not path.exists():
            raise UsageError(f"{args.dir} holds no examples; make some: sail-jax examples DIR")
        record = disk.read_record(path, {"seed": int, "tasks": list})
        grades = examples.evaluate(args.evaluate, seed=record["seed"])
        examples.print_grades({args.evaluate.name: grades})
        return 0
    if args.llama:
        examples.make_llamas(args.dir, seed=args.seed, force=args.force)
        show(f"Next:\n  sail-jax upcycle {args.dir / 'mixture.yaml'} {args.dir / 'mixture'}")
        return 0
    grades = examples.make(args.dir, seed=args.seed, force=args.force)
    examples.print_grades(grades)
    show(
        f"\n{args.dir / 'recipes'} holds one recipe for each method. Next:\n"
        f"  sail-jax merge {args.dir / 'recipes' / 'ties.yaml'} {args.dir / 'merged'}\n"
        f"  sail-jax examples {args.dir} --evaluate {args.dir / 'merged'}"
    )
    return 0
