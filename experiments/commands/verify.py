"""Check the papers' claims: closed form beside simulation.

$ sail-jax verify --claims 'sail/*' --quick
"""

import math
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.lab.progress import reporting
from sail_jax.cli.kernels import compiled_quickly, remember_kernels
from sail_jax.cli.options import Parser, UsageError, add_seed, numbers
from sail_jax.cli.progress import show

if TYPE_CHECKING:
    import xarray as xr

    from experiments.studies.ledger.config import Config
    from theory.adversary import Attack, Domain

# The width of a verdict.
VERDICT = 19


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Simulates the claims, prints the ledger, and writes it to files if asked."""
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
    add_seed(parser, "the simulations", 0)
    parser.add_argument(
        "--quick", action="store_true", help="simulate with about a tenth of the work"
    )
    parser.add_argument(
        "--power",
        action="store_true",
        help="also print the smallest error of a prediction that each claim sees, the slack of "
        "each bound, and the chances of a false alarm and of a miss",
    )
    parser.add_argument(
        "--mutate",
        action="store_true",
        help="also list the claims that would hold with a wrong prediction: moved by the effect "
        "that the claim is made to see, or without one of its terms",
    )
    parser.add_argument(
        "--attack",
        action="store_true",
        help="search for problems that break the bounds, in place of checking each claim at one",
    )
    parser.add_argument(
        "--budget",
        metavar="S",
        type=_seconds,
        help="seconds of the whole search; default: as long as it takes, some 2 for each bound: "
        "what is found then depends on --seed alone",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="only list which claims answer to which statement of the papers, and what is missing",
    )
    args = parser.read(argv)
    if args.coverage and len(argv) > 1:
        raise UsageError("--coverage simulates nothing, and takes no other option")
    if args.budget and not args.attack:
        raise UsageError("--budget is for --attack")
    if args.attack and (args.table or args.quick or args.power or args.mutate):
        raise UsageError("--attack takes --claims, --budget, --seed and --json")
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
    if args.attack:
        return _attack(config, args.budget, args.json)
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
    _print_claims(dataset)
    show(findings.summary(dataset))
    show(findings.statuses(dataset))
    if sharp := findings.sharpness(dataset):
        show(sharp)
    if args.power:
        _print_table(*findings.power(dataset))
        show(findings.blind(dataset))
    if args.mutate:
        show(findings.mutations(dataset))
    if args.json:
        about = {**store.config_record(config), **provenance()}
        disk.write_atomic(args.json, findings.as_json(dataset, about))
    if args.table:
        disk.write_atomic(args.table, findings.TABLES[args.table.suffix][0](dataset))
    return 0 if dataset["ok"].values.all() else 1


def _seconds(text: str) -> float:
    values = numbers(text)
    if len(values) != 1:
        raise ArgumentTypeError(f"expected one number of seconds, got '{text}'")
    return values[0]


def _attack(config: "Config", budget: float | None, file: str | None) -> int:
    """Attacks the bounds that name a domain; an interrupt ends the search, not what it found."""
    from experiments.lab import store
    from experiments.studies.ledger import attacks, findings
    from sail_jax import disk
    from sail_jax.provenance import provenance
    from theory import adversary, claims

    if file:
        disk.admit(Path(file), attacks.SCHEMA, "a list of attacks")
        disk.probe(Path(file).parent)
    chosen = claims.select(config.claims)
    domains = {c.id: c.attack for c in chosen if isinstance(c.attack, adversary.Domain)}
    each = math.inf if budget is None else budget / max(len(domains), 1)
    stage, found, stopped = reporting(store.direct), [], False
    remember_kernels()
    try:
        for name, domain in domains.items():
            kept: list[adversary.Attack] = []
            stage(name, partial(_one_attack, name, domain, config.seed, each, kept))
            found += kept
    except KeyboardInterrupt:
        stopped = True
    _print_table(*findings.attack_rows(found))
    text, sound = findings.attacked(found, chosen)
    show(text)
    if stopped:
        show(f"Interrupted after {len(found)} of {len(domains)} attacks.")
    if file:
        about = {**store.config_record(config), **provenance()}
        disk.write_atomic(file, attacks.as_json(found, about))
    return 130 if stopped else 0 if sound else 1


def _one_attack(
    name: str, domain: "Domain", seed: int, seconds: float, kept: "list[Attack]"
) -> dict[str, float]:
    from theory import adversary

    kept.append(adversary.attack(name, domain, seed=seed, seconds=seconds))
    return {"ratio": kept[-1].ratio}


def _print_claims(dataset: "xr.Dataset") -> None:
    """Prints a line for each claim with its verdict, and below it what was compared.

    Lines have 80 columns. Claims that do not fare as expected are red.
    """
    from rich.console import Console
    from rich.text import Text

    from experiments.studies.ledger import findings

    console = Console(width=None, soft_wrap=True)
    header, *rows = findings.table(dataset)
    for row in rows:
        cell = dict(zip(header, row, strict=True))
        bad = cell["verdict"].split()[0].isupper()
        first = f"{cell['verdict']:{VERDICT}}  {cell['claim']}"
        console.print(Text(first, style="bold red" if bad else ""))
        relation = cell["relation"].split()[1]
        numbers = f"simulated {cell['simulated']} {relation} predicted {cell['predicted']}"
        parts = [cell["status"], numbers, cell["score"], cell["sharpness"], cell["source"]]
        text = "; ".join(filter(None, parts))
        for line in textwrap.wrap(text, 78 - VERDICT, break_on_hyphens=False):
            console.print(Text(" " * (VERDICT + 2) + line))


def _print_table(header: Sequence[str], *rows: Sequence[str]) -> None:
    """Prints a table; rows whose last cell begins with a word in capitals are red."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")  # the whole of a name, to be copied
    for row in rows:
        style = "bold red" if row[-1].split()[0].isupper() else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    # rich would take what is no terminal for 80 columns, and wrap.
    if not console.is_terminal:
        console.width = 220
    console.print(table)
