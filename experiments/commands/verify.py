"""`sail-jax verify`: checks the papers' claims, each closed form beside a simulation."""

from collections.abc import Sequence
from pathlib import Path

from experiments.lab.progress import reporting
from sail_jax.cli.kernels import compiled_quickly, remember_kernels
from sail_jax.cli.options import Parser, UsageError, seed
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Simulates the claims, prints the ledger, and writes it to files if asked.

    Args:
      parser: The parser of the command.
      argv: The arguments after "verify", all of them options.

    Returns:
      The exit code: 0 if every claim fares as the ledger says, else 1. With `--coverage`, 0 if
      every statement of the papers is accounted for, else 1.

    Raises:
      UsageError: If an option is unknown, its value does not fit, or `--coverage` stands beside
        others.
      RefusedError: If a file to be written exists and is not a ledger.
      StoreError: If a file cannot be read or written.
    """
    parser.add_argument(
        "--claims",
        metavar="GLOBS",
        default="*",
        help="check only the claims whose ids match, such as 'sail/*'; separate several by commas",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the ledger to this file as JSON")
    parser.add_argument(
        "--table",
        metavar="FILE",
        type=Path,
        help="also write it as a table, to a name in .csv or .tex",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=seed,
        default=0,
        help="seed of the simulations; default: %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="simulate with about a tenth of the work"
    )
    parser.add_argument(
        "--power",
        action="store_true",
        help="also print the smallest error of a prediction that each claim sees, and the chances "
        "of a false alarm and of a miss",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="only list which claims answer to which statement of the papers, and what is missing",
    )
    args = parser.read(argv)
    if args.coverage and len(argv) > 1:
        raise UsageError("--coverage simulates nothing, and takes no other option")
    from experiments.lab import store
    from experiments.studies.ledger import findings
    from experiments.studies.ledger.config import Config
    from experiments.studies.ledger.run import run
    from sail_jax import disk
    from sail_jax.provenance import provenance

    if args.coverage:
        text, complete = findings.accounted()
        show(text)
        return 0 if complete else 1

    try:
        config = Config(claims=args.claims, seed=args.seed, quick=args.quick)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    # Files are looked at now: a simulation of minutes must not end in one that cannot be written.
    if args.table and args.table.suffix not in findings.TABLES:
        raise UsageError(f"--table: expected a name in .csv or .tex, got {args.table}")
    if args.table:
        _, mark = findings.TABLES[args.table.suffix]
        if args.table.exists() and not disk.read_bytes(args.table, 1 << 26).startswith(mark):
            raise disk.RefusedError(f"{args.table} exists and is not a ledger; choose another file")
        disk.probe(args.table.parent)
    if args.json:
        disk.admit(Path(args.json), findings.SCHEMA, "a ledger")
        disk.probe(Path(args.json).parent)
    remember_kernels()
    with compiled_quickly():  # hundreds of programs, most of which run once
        dataset = run(config, reporting(store.direct))
    _print_table(*findings.table(dataset, "statement", "where"))
    show(findings.summary(dataset))
    show(findings.statuses(dataset))
    if args.power:
        _print_table(*findings.power(dataset))
        show(findings.blind(dataset))
    if args.json:
        about = {**store.config_record(config), **provenance()}
        disk.write_atomic(args.json, findings.as_json(dataset, about))
    if args.table:
        disk.write_atomic(args.table, findings.TABLES[args.table.suffix][0](dataset))
    return 0 if dataset["ok"].values.all() else 1


def _print_table(header: Sequence[str], *rows: Sequence[str]) -> None:
    """Prints a table; rows whose last cell begins with a word in capitals are red."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, show_lines=False, pad_edge=False)
    for row in rows:
        style = "bold red" if row[-1].split()[0].isupper() else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    # rich would take what is no terminal for 80 columns, and wrap.
    if not console.is_terminal:
        console.width = 200
    console.print(table)
