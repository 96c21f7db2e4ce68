"""`sail-jax report DIR`: one page of all finished runs there."""

from collections.abc import Sequence

from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    parser.add_argument("dir", metavar="DIR", help="where finished runs are, at any depth")
    parser.add_argument("--out", metavar="FILE", help="the page; default: DIR/report.html")
    args = parser.read(argv)
    from experiments.pages import gallery

    return gallery.main(args.dir, args.out)
