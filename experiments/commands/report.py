"""One page of all finished runs, beside the papers' figures."""

from collections.abc import Sequence

from sail_jax.cli.options import Parser


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Writes the page (`experiments.pages.gallery`).

    Args:
      parser: The parser of the command.
      argv: The arguments after "report": a directory and options.

    Returns:
      The exit code: 0, or 1 if a run could not be read.

    Raises:
      RefusedError: If there is no finished run, there are too many folders to look into, or the
        page would replace another file.
      StoreError: If the page cannot be written.
      UsageError: If an argument is unknown or missing.
    """
    parser.add_argument("dir", metavar="DIR", help="a folder with finished runs, at any depth")
    parser.add_argument(
        "--out", metavar="FILE", help="where the page is written; default: DIR/report.html"
    )
    args = parser.read(argv)
    from experiments.pages import gallery

    return gallery.main(args.dir, args.out)
