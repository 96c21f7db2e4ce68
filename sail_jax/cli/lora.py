"""`sail-jax lora`: extracts adapters from tuned models, merges them, and adds one to its base."""

from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sail_jax.checks import nearest
from sail_jax.cli.average import fractions
from sail_jax.cli.grow import entry
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import (
    Parser,
    UsageError,
    add_copying,
    natural,
    on_inputs,
    outcome,
    run_options,
    seed,
)
from sail_jax.cli.progress import Meter, fitted, say, show
from sail_jax.cli.table import LORA

FEW = 40  # rows of a table that are printed without --full


def energy(text: str) -> float:
    """Reads --energy: a fraction above 0, up to 1.

    Args:
      text: The value of the option.

    Returns:
      The fraction.

    Raises:
      ArgumentTypeError: If the text is no such number.

    >>> energy("0.9")
    0.9
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"expected a number above 0, up to 1, got '{text}'")
    return value


def _add_factors(add: Any) -> None:
    """Adds the options of the factors that are written."""
    add(
        "--dtype",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="the dtype of the factors: float32, bfloat16 or float16; default: %(default)s",
    )
    add(
        "--seed",
        metavar="N",
        type=seed,
        default=0,
        help="seed of what is drawn; default: %(default)s",
    )
    add("--full", action="store_true", help="print a row for every module, however many there are")


def _extract_arguments(parser: Any) -> None:
    add = parser.add_argument
    add("base", metavar="BASE", help="the model before training: a path, or a name on the Hub")
    add("tuned", metavar="TUNED", help="the model after training")
    add("out", metavar="OUT", type=Path, help="where the adapter is written, a folder")
    add("--rank", metavar="R", type=natural, help="the largest rank of a module")
    add(
        "--energy",
        metavar="E",
        type=energy,
        help="the fraction of each change's squared singular values that is kept, such as 0.9; "
        "with --rank, the smaller rank counts",
    )
    add(
        "--modules-to-save",
        metavar="NAMES",
        help="store these modules whole where they changed, such as 'lm_head,*norm'; the word rest "
        "takes all that has no factors, such as norms and biases",
    )
    _add_factors(add)
    add_copying(parser)


def _extract(args: Namespace) -> int:
    remember_kernels()
    from sail_jax.checkpoint import extract_adapter

    patterns = [p for p in (args.modules_to_save or "").split(",") if p]
    with Meter(args.quiet) as meter:
        done = extract_adapter(
            args.base, args.tuned, args.out, rank=args.rank, energy=args.energy,
            modules_to_save=patterns, dtype=args.dtype, seed=args.seed,
            run=run_options(args, meter),
        )  # fmt: skip
    _table(done.rows, args.full)
    if done.saved:
        show(f"stored whole: {len(done.saved)} tensors")
    for name, reason in done.lost.items():
        say(fitted(f"lost: {name} ({reason})"))
    if done.lost:
        say(f"note: {len(done.lost)} changed tensors are lost; --modules-to-save rest stores them")
    _end(done)
    return 0


def _merge_arguments(parser: Any) -> None:
    add = parser.add_argument
    add(
        "paths",
        metavar="ADAPTER ... OUT",
        nargs="+",
        help="the adapters, folders in PEFT's layout; then where the merged one is written",
    )
    add(
        "--weights",
        metavar="W,W,...",
        type=fractions,
        help="a weight for each adapter; default: 1 each",
    )
    add(
        "--rank",
        metavar="R",
        type=natural,
        help="the largest rank of a module; default: nothing is cut off, and ranks add up",
    )
    add(
        "--method",
        metavar="NAME",
        help="merge core matrices by a method of `sail-jax merge --methods`, such as ties; "
        "default: add up the changes",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        type=entry,
        help="set an option of the method",
    )
    _add_factors(add)
    add_copying(parser)


def _merge(args: Namespace) -> int:
    remember_kernels()
    from sail_jax.checkpoint import merge_adapters

    *adapters, out = args.paths
    if not adapters:
        raise ValueError("name the adapters and the output: sail-jax lora merge A B OUT")
    given = dict(args.set or [])
    if given and args.method is None:
        raise ValueError(f"--set {min(given)}: an option of --method, which is not given")
    with Meter(args.quiet) as meter:
        done = merge_adapters(
            adapters, out, weights=args.weights, rank=args.rank, method=args.method,
            dtype=args.dtype, seed=args.seed, run=run_options(args, meter), **given,
        )  # fmt: skip
    _table(done.rows, args.full)
    _end(done)
    return 0


def _apply_arguments(parser: Any) -> None:
    add = parser.add_argument
    add("base", metavar="BASE", help="the model that the adapter was trained on")
    add("adapter", metavar="ADAPTER", help="the adapter, a folder in PEFT's layout")
    add("out", metavar="OUT", type=Path, help="where the adapted model is written")
    add_copying(parser)


def _apply(args: Namespace) -> int:
    from sail_jax.checkpoint import apply_adapter

    with Meter(args.quiet) as meter:
        done = apply_adapter(args.base, args.adapter, args.out, run=run_options(args, meter))
    show(f"{done.changed} of {done.tensors} tensors changed")
    _end(done)
    return 0


def _table(rows: Sequence[Any], full: bool) -> None:
    """Prints the error of each module, or of those with the largest errors."""
    shown = list(rows)
    if not full and len(shown) > FEW:
        shown = sorted(shown, key=lambda row: -row.error)[:FEW]
        show(f"the {FEW} modules of {len(rows)} with the largest errors; --full prints all")
    width = max((len(fitted(row.name, 60)) for row in shown), default=0)
    show(
        f"{'module':{width}}  {'shape':>15}  {'rank':>4}  {'norm':>9}  {'error':>9}  {'energy':>7}"
    )
    for row in shown:
        shape = "x".join(map(str, row.shape))
        show(
            f"{fitted(row.name, 60):{width}}  {shape:>15}  {row.rank:4}  {row.norm:9.3g}  "
            f"{row.error:9.3g}  {row.energy:7.2%}"
        )
    norm = sum(row.norm**2 for row in rows)
    error = sum((row.error * row.norm) ** 2 for row in rows)
    whole = (error / norm) ** 0.5 if norm else 0.0
    show(f"all {len(rows)} modules: error {whole:.3g}, energy {1 - whole**2:.2%}")


def _end(done: Any) -> None:
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(outcome(done, done.tensors))


_COMMANDS = {
    "extract": on_inputs(_extract_arguments, _extract),
    "merge": on_inputs(_merge_arguments, _merge),
    "apply": on_inputs(_apply_arguments, _apply),
}


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs the command that the first argument names.

    Args:
      parser: The parser of `sail-jax lora`.
      argv: The arguments after "lora".

    Returns:
      The exit code, 0.

    Raises:
      UsageError: If there is no such command, and as the commands do.
    """
    if argv and argv[0] in LORA:
        name, *rest = argv
        return _COMMANDS[name](Parser(f"lora {name}", LORA[name]), rest)
    lines = "\n".join(f"  {name:9}{about}" for name, about in LORA.items())
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = f"commands:\n{lines}"
    parser.usage = f"{parser.prog} {{{','.join(LORA)}}} ..."
    parser.read([a for a in argv if a in ("-h", "--help")])
    if not argv:
        raise UsageError(f"name a command: {', '.join(LORA)}; see {parser.prog} --help")
    raise UsageError(f"unknown command 'lora {argv[0]}'{nearest(argv[0], LORA)}")
