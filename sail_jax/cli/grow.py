"""`sail-jax grow`: makes a checkpoint larger, or prunes it, and says what that preserves."""

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import (
    add_certify,
    add_copying,
    add_tables,
    on_inputs,
    outcome,
    run_options,
    seed,
)
from sail_jax.cli.progress import Meter, fitted, say, show


def factor(text: str) -> float:
    """Reads --width and --depth: how many times, as 2x, 1.5x or 2.

    Args:
      text: The value of the option.

    Returns:
      The factor, between 0 and 10^6; an int if it is whole.

    Raises:
      ArgumentTypeError: If the text is no such factor.

    >>> factor("2x"), factor("1.5")
    (2, 1.5)
    """
    try:
        value = float(text.lower().removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"expected a factor such as 2x, got '{text}'")
    return int(value) if value == int(value) else value


def entry(text: str) -> tuple[str, Any]:
    """Reads KEY=VALUE with the value in YAML; "2x" stays text.

    Args:
      text: The value of the option.

    Returns:
      The key and the value.

    Raises:
      ArgumentTypeError: If there is no key, or the value is not YAML.

    >>> entry("snr_db=20"), entry("hidden_size=2x")
    (('snr_db', 20), ('hidden_size', '2x'))
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"expected KEY=VALUE, got '{text}'")
    from sail_jax.checkpoint.recipe.declared import plain
    from sail_jax.checkpoint.recipe.yaml_tree import RecipeError, compose

    try:
        return key, plain(compose(value, key))
    except RecipeError as error:
        raise ArgumentTypeError(f"{error}, in '{value}'") from error


def add_arguments(parser: Any) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CKPT",
        nargs="?",
        help="the checkpoint to grow: a folder, a file of tensors, or a name on the Hub",
    )
    add(
        "out",
        metavar="OUT",
        nargs="?",
        type=Path,
        help="where the grown checkpoint is written: a folder, or a .safetensors or .npz file",
    )
    add(
        "--to",
        metavar="WHAT",
        action="append",
        help="the sizes to grow to: another model's config.json, or one entry of it as KEY=VALUE; "
        "2x means twice the present value; smaller sizes are for --method magnitude",
    )
    add(
        "--width",
        metavar="2x",
        type=factor,
        help="factor by which the residual stream, hidden layers and number of heads grow",
    )
    add("--depth", metavar="2x", type=factor, help="factor by which the number of layers grows")
    add(
        "--method",
        metavar="NAME",
        default="lemon",
        help="how the network is grown, one of --methods; default: %(default)s",
    )
    add(
        "--depth-method",
        metavar="NAME",
        help="how layers are added, where --method is for the width alone",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        type=entry,
        help="set an option of the method",
    )
    add(
        "--lossless",
        action="store_true",
        help="refuse a growth unless a run of both networks shows that their outputs agree",
    )
    add(
        "--seed",
        metavar="N",
        type=seed,
        default=0,
        help="seed of what is drawn; default: %(default)s",
    )
    add_tables(parser, "CKPT")
    add(
        "--draft",
        action="store_true",
        help="print a draft of the file for --spec, with open questions, and stop",
    )
    add("--methods", action="store_true", help="list the growth methods, and stop")
    add("--plan", action="store_true", help="show what would be done, and stop")
    add_certify(parser)
    add_copying(parser)


def run(args: Namespace) -> int:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Returns:
      The exit code, 0.

    Raises:
      ValueError: If the checkpoint, the output or the target is not named, and as `grow_checkpoint`
        does.
    """
    if args.methods:
        return _methods()
    if args.checkpoint is None:
        raise ValueError("name the checkpoint: sail-jax grow CKPT OUT")
    if args.draft:
        return _draft(args)
    to = _target(args)
    options = _options(args)
    if args.depth_method is not None:
        options["depth_method"] = args.depth_method
    if args.lossless:
        options["require_lossless"] = True
    remember_kernels()
    from sail_jax.checkpoint.operations import growing
    from sail_jax.checkpoint.recipe import tables

    given: dict[str, Any] = {
        "seed": args.seed,
        "config": args.config,
        "rules": None if args.spec is None else tables.read_table(args.spec),
    }
    if args.plan:
        with growing.growing(
            args.checkpoint, to, args.method, run=run_options(args), **given, **options
        ) as ready:
            _show(ready)
        return 0
    if args.out is None:
        raise ValueError("name the output: sail-jax grow CKPT OUT")
    with Meter(args.quiet) as meter, compiled_for([args.checkpoint], offline=args.offline):
        done = growing.grow_checkpoint(
            args.checkpoint, args.out, to, args.method, **given, certify=args.certify,
            run=run_options(args, meter), **options,
        )  # fmt: skip
    for note in done.notes:
        say(fitted(f"note: {note}"))
    show(done.growth.report)
    for agreement in done.agreement:
        show(agreement)
    show(f"{outcome(done, len(done.growth.leaves))}; exactness: {done.verdict}")
    return 0


def _options(args: Namespace) -> dict[str, Any]:
    """Returns what --set says, after checking that some method has each of these options."""
    from sail_jax.checks import nearest
    from sail_jax.growth.named import METHODS

    options = dict(args.set or [])
    names = {"untie", *(name for method in METHODS.values() for name in method.options)}
    for name in options:
        if name not in names:
            raise ValueError(f"--set {name}: no such option{nearest(name, names)}")
    return options


def _target(args: Namespace) -> Any:
    """Returns the target that --to, --width and --depth ask for."""
    factors = {"width": args.width, "depth": args.depth}
    factors = {key: value for key, value in factors.items() if value is not None}
    given = args.to or []
    if bool(given) == bool(factors):
        raise ValueError(
            "say what to grow to: either --to (a config.json, or entries of it as KEY=VALUE), or "
            "factors, --width 2x, --depth 2x or both"
        )
    if factors:
        return factors
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    if files := [text for text in given if "=" not in text]:
        raise ValueError(f"--to {files[0]}: a config.json stands alone, not beside other --to")
    try:
        entries = [entry(text) for text in given]
    except ArgumentTypeError as error:
        raise ValueError(f"--to: {error}") from error
    keys = [key for key, _ in entries]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--to states {twice[0]!r} more than once")
    return dict(entries)


def _methods() -> int:
    """Prints the growth methods."""
    from sail_jax.growth.named import METHODS

    width = max(map(len, METHODS))
    for name, method in METHODS.items():
        show(f"{name:{width}}  {method.about} ({method.source})")
    return 0


def _draft(args: Namespace) -> int:
    """Prints a table of spaces to start from."""
    from sail_jax.checkpoint.formats.open import open_values
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target

    config = None if args.config is None else read_target(args.config)
    with open_values(
        args.checkpoint, allow_pickle=args.allow_pickle, offline=args.offline, select=args.select
    ) as checkpoint:
        show(tables.draft_table(checkpoint, config), end="")
    return 0


def _show(ready: Any) -> None:
    """Prints what a growth would do."""
    about = ready.about
    show(f"{about['method']}, seed {about['seed']}: {about['source']}")
    for key, (old, new) in about["changes"].items():
        show(f"  {key}: {old} to {new}")
    base = ready.view.base.tensors.values()
    before, after = (
        sum(_bytes(x) for x in tensors) for tensors in (base, ready.view.tensors.values())
    )
    show(f"reads {before / 1e9:.3f} GB, writes {after / 1e9:.3f} GB in {len(ready.works)} tensors")
    show(ready.growth.report)
    for note in ready.growth.notes:
        show(f"note: {note}")
    show(ready.summary())
    show(f"exactness: {about['exactness']}")


def _bytes(tensor: Any) -> int:
    import math

    return math.prod(tensor.shape) * tensor.dtype.itemsize


main = on_inputs(add_arguments, run)
