"""Check the papers' claims: compare closed forms with simulations.

$ sail-jax verify --claims 'sail/*' --quick
"""

import math
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.lab.progress import reporting
from sail_jax.cli.kernels import as_here, compiled_quickly, remember_kernels
from sail_jax.cli.options import Parser, UsageError, add_on, add_seed, file, numbers
from sail_jax.cli.progress import say, show
from sail_jax.cluster import connected

if TYPE_CHECKING:
    import xarray as xr

    from theory.adversary import Attack
    from theory.claims import Claim

QUICK = partial(as_here, compiled_quickly)

# The width of a verdict.
VERDICT = 19


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Simulates the claims, prints the ledger, and writes it to files on request."""
    parser.add_argument(
        "--claims",
        metavar="GLOBS",
        default="*",
        help="check only claims with matching ids, such as 'sail/*'; separate several by commas",
    )
    parser.add_argument(
        "--from",
        dest="own",
        metavar="FILE",
        type=file,
        help="check the claims of this Python file instead of all claims; the file is run",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the ledger to this file as JSON")
    parser.add_argument(
        "--table",
        metavar="FILE",
        type=Path,
        help="also write the ledger as a table to FILE, in .csv or .tex",
    )
    add_seed(parser, "the simulations", 0)
    parser.add_argument(
        "--quick", action="store_true", help="simulate with about a tenth of the work"
    )
    parser.add_argument(
        "--power",
        action="store_true",
        help="also print the smallest error of a prediction that each claim detects, how close an "
        "adversary came to each bound, and the chances of a false alarm and of a miss",
    )
    parser.add_argument(
        "--mutate",
        action="store_true",
        help="also list the claims that would hold with a wrong prediction: one shifted by the "
        "effect that the claim should detect, or one with a missing term",
    )
    parser.add_argument(
        "--attack",
        action="store_true",
        help="search for problems that break the bounds, instead of checking each claim at one",
    )
    parser.add_argument(
        "--budget",
        metavar="S",
        type=_seconds,
        help="seconds for the whole search; without a limit it takes about 2 s for each bound, and "
        "the result depends on --seed alone",
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="search only the bounds whose code has changed since their last search, and store "
        "what is found for the ledger",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="only list the claims for each statement of the papers, and the missing ones",
    )
    add_on(parser, "check or search")
    args = parser.read(argv)
    if args.coverage and len(argv) > 1:
        raise UsageError("--coverage simulates nothing, and allows no other option")
    if args.budget and not args.attack:
        raise UsageError("--budget needs --attack")
    if args.own and args.on:
        raise UsageError("--from is for this machine: the workers of --on do not have the file")
    if args.renew and (not args.attack or args.budget or args.seed or args.json or args.own):
        raise UsageError("--renew needs --attack, and allows only --claims")
    if args.attack and (args.table or args.quick or args.power or args.mutate):
        raise UsageError(
            "--attack allows only --claims, --from, --budget, --renew, --seed and --json"
        )
    chosen = [] if args.coverage else _chosen(args.claims, args.own)
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

    config = Config(seed=args.seed, quick=args.quick)
    about = {"claims": args.claims} | ({"from": str(args.own)} if args.own else {})
    about = {**store.config_record(config), **about, **provenance()}
    if args.attack:
        return _attack(chosen, about, args)
    # The files are checked first: a simulation of minutes must not end with a file that cannot be
    # written.
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
    # Most of the hundreds of programs run only once.
    with compiled_quickly(), connected(args.on, around=QUICK) as workers:
        dataset = run(config, reporting(store.direct), workers, chosen)
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
        disk.write_atomic(args.json, findings.as_json(dataset, about))
    if args.table:
        disk.write_atomic(args.table, findings.TABLES[args.table.suffix][0](dataset))
    return 0 if dataset["ok"].values.all() else 1


def _seconds(text: str) -> float:
    values = numbers(text)
    if len(values) != 1:
        raise ArgumentTypeError(f"expected one number of seconds, got '{text}'")
    return values[0]


def _chosen(globs: str, own: Path | None) -> "list[Claim]":
    """Selects the claims, of a file of the user's if there is one."""
    from theory import claims

    try:
        return claims.select(globs, claims.in_file(own) if own else None)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def _attack(chosen: "list[Claim]", about: dict[str, Any], args: Namespace) -> int:
    """Attacks the bounds with a declared domain; an interrupt keeps the attacks made so far."""
    from experiments.studies.ledger import attacks, findings
    from sail_jax import disk
    from theory import adversary, claims

    if args.json:
        disk.admit(Path(args.json), attacks.SCHEMA, "a list of attacks")
        disk.probe(Path(args.json).parent)
    if args.renew:
        disk.probe(attacks.FILE.parent)
        ours = {c.id for c in claims.all_claims()}  # outcomes of other packages are not stored
        bounds = [c for c in chosen if isinstance(c.attack, adversary.Domain) and c.id in ours]
        chosen = [c for c in bounds if not attacks.current(c)]
        if not chosen:
            show("All stored outcomes are of this code: there is nothing to renew.")
            return 0
    domains = {c.id: c.attack for c in chosen if isinstance(c.attack, adversary.Domain)}
    each = math.inf if args.budget is None else args.budget / max(len(domains), 1)
    found: list[Attack] = []
    stopped = False
    remember_kernels()
    names = [*domains]
    try:
        with connected(args.on, around=partial(as_here, nullcontext)) as workers:
            # Two at a time have twice the seconds.
            search = partial(_one_attack, args.seed, each * workers.count)
            for _, one in workers.each(search, names):
                found.append(one)
                say(f"  {one.id}: {one.ratio:.4g}")
    except KeyboardInterrupt:
        stopped = True
    found.sort(key=lambda one: names.index(one.id))
    _print_table(*findings.attack_rows(found))
    text, sound = findings.attacked(found, chosen)
    show(text)
    if stopped:
        show(f"Interrupted after {len(found)} of {len(domains)} attacks.")
    if args.renew:
        whole = attacks.as_json(attacks.renewed(found), {**about, "claims": "*"})
        disk.write_atomic(attacks.FILE, whole)
    if args.json:
        disk.write_atomic(args.json, attacks.as_json(found, about))
    return 130 if stopped else 0 if sound else 1


def _one_attack(seed: int, seconds: float, name: str) -> "Attack":
    """Attacks a bound by its id, which is also a task of a cluster."""
    from theory import adversary, claims

    domain = claims.named(name).attack
    assert isinstance(domain, adversary.Domain)
    return adversary.attack(name, domain, seed=seed, seconds=seconds)


def _print_claims(dataset: "xr.Dataset") -> None:
    """Prints one line with its verdict for each claim, and the comparison below it.

    Lines have 80 columns. Claims with an unexpected verdict are red.
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
    """Prints a table; rows with a last cell that begins with a word in capitals are red."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")  # keeps whole names, for copying
    for row in rows:
        style = "bold red" if row[-1].split()[0].isupper() else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    # Outside a terminal, rich would assume 80 columns and wrap.
    if not console.is_terminal:
        console.width = 220
    console.print(table)
