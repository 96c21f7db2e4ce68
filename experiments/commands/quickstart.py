"""Four real results in a minute or two, and a page.

$ sail-jax quickstart --quick
"""

from collections.abc import Sequence

from sail_jax.cli.kernels import compiled_quickly, remember_kernels
from sail_jax.cli.options import Parser, add_seed


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Computes the results and writes the page (`experiments.pages.quickstart`)."""
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="quickstart",
        help="the folder for the results; default: %(default)s",
    )
    add_seed(parser, "all parts", 0)
    parser.add_argument("--quick", action="store_true", help="use small grids and few data sets")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted quickstart")
    args = parser.read(argv)
    from experiments.pages import quickstart

    remember_kernels()
    with compiled_quickly():
        return quickstart.main(args.out, seed=args.seed, quick=args.quick, resume=args.resume)
