"""Make a mixture of experts from dense checkpoints.

$ sail-jax upcycle dense experts --experts 4 --router random
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sail_jax.checks import storage
from sail_jax.cli.carrying import carry_out, outcome, tell_notes
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import (
    MODULES,
    Parser,
    add_certify,
    add_copying,
    add_output,
    add_parts,
    add_seed,
    add_strict,
    arguments,
    natural,
    on_inputs,
    reader,
    run_options,
)
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.upcycling import Upcycled, Upcycling
    from sail_jax.checkpoint.recipe.mixtures import Mixture

_fraction = reader(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_scale = reader(float, lambda x: 0 <= x < 1e6, "a number >= 0")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add(
        "path",
        metavar="CKPT|FILE",
        help="a dense checkpoint, to be copied into the experts; or a YAML file in mergekit-moe's "
        "format, for experts from several checkpoints and routers from prompts",
    )
    add_output(parser, "the mixture", nargs="?")
    add("--experts", metavar="N", type=natural, help="the number of experts; default: 8")
    add(
        "--experts-per-token",
        metavar="N",
        type=natural,
        help="the number of experts that each token uses; default: 2",
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
        help="draw this share of each expert's hidden units anew; default: 0",
    )
    add(
        "--noise",
        dest="noise_scale",
        metavar="SCALE",
        type=_scale,
        help="add normal noise of this scale to the experts' weights; default: 0",
    )
    add(
        "--architecture",
        metavar="NAME",
        help="the output's model type, such as granitemoeshared; default: the first that fits CKPT",
    )
    add("--dtype", metavar="NAME", help="the dtype of the output; default: each tensor's own")
    add_seed(parser, "the random draws")
    add("--plan", action="store_true", help="show what would be done, and stop")
    add_certify(parser)
    add_strict(parser)
    add_copying(parser)
    add_parts(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    remember_kernels()
    from sail_jax.checkpoint.operations.running import carried_out, planned
    from sail_jax.checkpoint.operations.upcycling import UpcycleRequest

    mixture = _mixture(args)
    request = UpcycleRequest(mixture, args.out, args.certify)
    if args.plan:
        with planned(request, run_options(args)) as ready:
            _show(ready)
        return
    if args.out is None:
        raise ValueError(f"OUT is missing: sail-jax upcycle {args.path} OUT")
    bases = [str(mixture.base_model.checkpoint)]
    carry_out(args, partial(carried_out, request), _tell, bases)


def _tell(done: "Upcycled") -> None:
    """Prints the notes, and whether the function is preserved."""
    tell_notes(done)
    for agreement in done.agreement:
        show(agreement)
    show(f"{outcome(done)}; exactness: {done.verdict}")


def _mixture(args: Namespace) -> "Mixture":
    """Reads the mixture from a file, or makes copies of a checkpoint."""
    from sail_jax import disk
    from sail_jax.checkpoint.recipe import mixtures
    from sail_jax.checkpoint.recipe.yaml_tree import LIMIT

    given = arguments(args, "path", "out", "plan", "certify")
    if Path(args.path).suffix not in (".yaml", ".yml"):
        return mixtures.copies(args.path, given.pop("experts", 8), **given)
    if given:
        key = next(iter(given))
        raise ValueError(f"{key} cannot be given with a file: {args.path} defines the mixture")
    return mixtures.parse(disk.read_bytes(Path(args.path), LIMIT), args.path)


def _show(ready: "Upcycling") -> None:
    """Prints the plan."""
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
    show(f"writes {storage(size)} in {len(ready.works)} tensors")
    for note in ready.about["notes"]:
        show(f"note: {note}")
    show(ready.summary())


main = on_inputs(add_arguments, run, MODULES)
