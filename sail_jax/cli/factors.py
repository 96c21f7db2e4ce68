"""Common parts of the `sail-jax lora` commands: options of the factors, and printing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sail_jax.cli.options import Parser, add_copying, add_seed, natural
from sail_jax.cli.progress import fitted, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.adapting import FactorRow

FEW = 40  # rows of a table without --full


def add_factors(parser: Parser, rank: str) -> None:
    """Adds the options of the output factors and of the run.

    Args:
      rank: The end of the help text of --rank.
    """
    add = parser.add_argument
    add("--rank", metavar="R", type=natural, help=f"the largest rank of a module{rank}")
    add(
        "--dtype",
        metavar="NAME",
        choices=("float32", "bfloat16", "float16"),
        help="the dtype of the factors: float32, bfloat16 or float16; default: float32",
    )
    add_seed(parser, "the random draws")
    add("--full", action="store_true", help="print a row for every module")
    add_copying(parser)


def table(rows: Sequence["FactorRow"], full: bool) -> None:
    """Prints the error of each module, or only of the modules with the largest errors.

    Args:
      rows: The modules.
      full: Whether to print all modules.
    """
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
