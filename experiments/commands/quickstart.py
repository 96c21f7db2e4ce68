"""`sail-jax quickstart`: four results and a page."""

from collections.abc import Sequence

from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, seed


def main(parser: Parser, argv: Sequence[str]) -> int:
    parser.add_argument("--out", metavar="DIR", default="quickstart", help="default: %(default)s")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smaller grids, fewer draws")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted quickstart")
    args = parser.read(argv)
    from experiments.pages import quickstart

    remember_kernels()
    return quickstart.main(args.out, seed=args.seed, quick=args.quick, resume=args.resume)
