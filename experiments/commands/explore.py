"""A page with sliders: when does transfer help, and when does pre-training hurt?

$ sail-jax explore --out explorer.html
"""

from collections.abc import Sequence

from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, add_seed


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Writes the page."""
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="explorer.html",
        help="the file of the page; default: %(default)s",
    )
    add_seed(parser, "the simulations", 0)
    parser.add_argument("--quick", action="store_true", help="use coarse grids and few data sets")
    args = parser.read(argv)
    from experiments.pages import explorer

    remember_kernels()
    return explorer.main(args.out, seed=args.seed, quick=args.quick)
