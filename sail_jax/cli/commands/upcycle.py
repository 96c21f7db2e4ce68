"""Make a mixture of experts of dense checkpoints.

$ sail-jax upcycle dense experts --experts 4 --router random
"""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.cli.kernels import compiled_for, remember_kernels
from sail_jax.cli.options import (
    Parser,
    add_certify,
    add_copying,
    add_output,
    add_seed,
    arguments,
    natural,
    on_inputs,
    outcome,
    reader,
    run_options,
)
from sail_jax.cli.progress import Meter, fitted, say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.upcycling import Upcycling
    from sail_jax.checkpoint.recipe.mixtures import Mixture

_fraction = reader(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_scale = reader(float, lambda x: 0 <= x < 1e6, "a number from 0")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command.

    Args:
      parser: The parser of the command.
    """
    add = parser.add_argument
    add(
        "path",
        metavar="CKPT|FILE",
        help="a dense checkpoint, whose copies become the experts; or a YAML file as mergekit-moe "
        "reads it, for experts of several checkpoints and routers made of prompts",
    )
    add_output(parser, "the mixture", nargs="?")
    add("--experts", metavar="N", type=natural, help="how many copies; default: 8")
    add(
        "--experts-per-token",
        metavar="N",
        type=natural,
        help="how many experts each token uses; default: 2",
    )
    add(
        "--router",
        dest="gate_mode",
        metavar="KIND",
        help="random, uniform_random or zero; default: uniform_random",
    )
    add(
        "--drop",
        metavar="SHARE",
        type=_fraction,
        help="draw this share of the hidden units of each expert anew; default: 0",
    )
    add(
        "--noise",
        dest="noise_scale",
        metavar="SCALE",
        type=_scale,
        help="add normal noise of this size to the weights of experts; default: 0",
    )
    add(
        "--architecture",
        metavar="NAME",
        help="what mixture it becomes, such as granitemoeshared; default: the first that fits CKPT",
    )
    add("--dtype", metavar="NAME", help="the dtype that is written; default: that of each tensor")
    add_seed(parser, "what is drawn")
    add("--plan", action="store_true", help="show what would be done, and stop")
    add_certify(parser)
    add_copying(parser)


def run(args: Namespace) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line.

    Raises:
      ValueError: If the output is not named, or an option stands beside a file that has it; and as
        `upcycle_checkpoint` does.
    """
    remember_kernels()
    from sail_jax.checkpoint.operations import upcycling

    mixture = _mixture(args)
    if args.plan:
        with upcycling.planned(mixture, run_options(args)) as ready:
            _show(ready)
        return
    if args.out is None:
        raise ValueError(f"name the output: sail-jax upcycle {args.path} OUT")
    bases = [str(mixture.base_model.checkpoint)]
    with Meter(args.quiet) as meter, compiled_for(bases, offline=args.offline):
        done = upcycling.upcycle_checkpoint(
            mixture, args.out, certify=args.certify, run=run_options(args, meter)
        )
    for note in done.notes:
        say(fitted(f"note: {note}"))
    for agreement in done.agreement:
        show(agreement)
    show(f"{outcome(done)}; exactness: {done.verdict}")


def _mixture(args: Namespace) -> "Mixture":
    """Reads what is asked for: a file, or copies of a checkpoint."""
    from sail_jax import disk
    from sail_jax.checkpoint.recipe import mixtures
    from sail_jax.checkpoint.recipe.yaml_tree import LIMIT

    given = arguments(args, "path", "out", "plan", "certify")
    if Path(args.path).suffix not in (".yaml", ".yml"):
        return mixtures.copies(args.path, given.pop("experts", 8), **given)
    if given:
        key = next(iter(given))
        raise ValueError(f"{args.path} says what is made, so that {key} has no place here")
    return mixtures.parse(disk.read_bytes(Path(args.path), LIMIT), args.path)


def _show(ready: "Upcycling") -> None:
    """Prints what would be done."""
    config, mixture = ready.plan.config, ready.mixture
    show(
        f"{config['model_type']}: {len(mixture.experts)} experts, {mixture.experts_per_token} for "
        f"each token; routers: {mixture.gate_mode}"
    )
    for e, expert in enumerate(mixture.experts):
        show(f"  expert {e}: {expert.source_model}")
    for expert in mixture.shared_experts:
        show(f"  shared expert: {expert.source_model}")
    size = sum(work.size * work.dtype.itemsize for work in ready.works)
    show(f"writes {size / 1e9:.3f} GB in {len(ready.works)} tensors")
    for note in ready.about["notes"]:
        show(f"note: {note}")
    show(ready.summary())


main = on_inputs(add_arguments, run)
