"""Four real results in a minute or two, and a page."""

from collections.abc import Sequence

from sail_jax.cli.kernels import compiled_quickly, remember_kernels
from sail_jax.cli.options import Parser, seed


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Computes the results and writes the page (`experiments.pages.quickstart`).

    Args:
      parser: The parser of the command.
      argv: The arguments after "quickstart", all of them options.

    Returns:
      The exit code: 0, or 1 if a claim of the ledger did not fare as expected.

    Raises:
      RefusedError: If the directory holds anything else, or a quickstart and `--resume` is not
        given.
      StoreError: If something stored is damaged or cannot be written.
      UsageError: If an option is unknown or its value does not fit.
    """
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="quickstart",
        help="folder of the results; default: %(default)s",
    )
    parser.add_argument(
        "--seed", metavar="N", type=seed, default=0, help="seed of all parts; default: %(default)s"
    )
    parser.add_argument("--quick", action="store_true", help="use smaller grids and fewer draws")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted quickstart")
    args = parser.read(argv)
    from experiments.pages import quickstart

    remember_kernels()
    with compiled_quickly():
        return quickstart.main(args.out, seed=args.seed, quick=args.quick, resume=args.resume)
