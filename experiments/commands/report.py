"""One page of all finished runs, next to the papers' figures.

$ sail-jax report results
"""

from collections.abc import Sequence

from experiments.commands.run import add_looks, looks_of
from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Writes the page (`experiments.pages.gallery`)."""
    parser.add_argument("dir", metavar="DIR", help="a folder with finished runs, at any depth")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="the page (NAME.html), or a folder for report.html; default: DIR/report.html",
    )
    add_looks(parser)
    args = parser.read(argv)
    from experiments.pages import gallery

    return gallery.main(args.dir, args.out, looks_of(args))
