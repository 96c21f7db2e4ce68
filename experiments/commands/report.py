"""One page of all finished runs, next to the papers' figures.

$ sail-jax report results
"""

from collections.abc import Sequence

from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Writes the page (`experiments.pages.gallery`)."""
    parser.add_argument("dir", metavar="DIR", help="a folder with finished runs, at any depth")
    parser.add_argument(
        "--out", metavar="FILE", help="the file of the page; default: DIR/report.html"
    )
    args = parser.read(argv)
    from experiments.pages import gallery

    return gallery.main(args.dir, args.out)
