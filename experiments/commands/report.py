"""One page of all finished runs, beside the papers' figures.

$ sail-jax report results
"""

from collections.abc import Sequence

from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Writes the page (`experiments.pages.gallery`)."""
    parser.add_argument("dir", metavar="DIR", help="a folder with finished runs, at any depth")
    parser.add_argument(
        "--out", metavar="FILE", help="where the page is written; default: DIR/report.html"
    )
    args = parser.read(argv)
    from experiments.pages import gallery

    return gallery.main(args.dir, args.out)
