"""Options that several commands on studies have."""

from sail_jax.cli.options import Parser, seed


def add_seed(parser: Parser, of: str) -> None:
    """Adds --seed, whose help says what it is the seed of."""
    about = f"seed of {of}; default: %(default)s"
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help=about)
