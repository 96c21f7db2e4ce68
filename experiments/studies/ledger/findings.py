"""The verdicts of a finished run of `ledger` as text, tables and files.

The command `sail-jax verify` shows and writes them.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from experiments.studies.ledger import attacks
from theory import claims, coverage
from theory.adversary import Attack

SCHEMA = "sail-jax ledger 1"


def wording(holds: bool, expected: bool) -> str:
    """Returns a verdict in words, in capitals if it is unexpected.

    Args:
      holds: Whether the claim holds.
      expected: Whether it should hold.

    Returns:
      The words.
    """
    if holds:
        return "holds" if expected else "HOLDS, expected to fail"
    return "FAILS" if expected else "fails, as expected"


# The columns of the ledger as text. Their names are the first row of a table.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "claim": lambda record: record["claim"],
    "status": lambda record: record["status"],
    "statement": lambda record: record["statement"],
    "where": lambda record: record["domain"],
    "source": lambda record: record["source"],
    "relation": lambda record: f"simulated {record['relation']} predicted",
    "predicted": lambda record: f"{record['predicted']:.5g}",
    "simulated": lambda record: f"{record['simulated']:.5g}{_spread(record['stderr'])}",
    "score": lambda record: f"{record['score_name']} = {record['score']:.3g}",
    "sharpness": lambda record: record["sharpness"],
    "verdict": lambda record: _verdict(record),
}


# The wrong predictions of `theory.claims.mutants` that differ by the effect.
MOVED = ("raised", "lowered", "tightened")

# The detectable difference of each comparison, in units of the prediction's own.
POWER: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: COLUMNS[name] for name in ("claim", "relation", "predicted", "simulated")},
    "made to see": lambda record: f"{record['effect']:.2g}",
    "sharpness": COLUMNS["sharpness"],
    "sees": lambda record: f"{record['sees']:.2g}",
    "false alarm": lambda record: f"{record['false_alarm']:.1g}",
    "miss": lambda record: f"{record['miss']:.1g}",
}


def _spread(stderr: float) -> str:
    """Returns a standard error as text; "" without one."""
    return "" if math.isnan(stderr) else f" ± {stderr:.2g}"


def _verdict(record: Mapping[str, Any]) -> str:
    """Returns the verdict in words, or what a search found if only that is unexpected."""
    if record["holds"] == record["expected"] and not record["ok"]:
        return record["kind"].upper()
    return wording(record["holds"], record["expected"])


def _is_bound(record: Mapping[str, Any]) -> bool:
    return record["expected"] and record["relation"] != "="


def _slack(record: Mapping[str, Any]) -> str:
    """Returns how far the simulation is within its bound, as a ratio if both have the same sign."""
    if not _is_bound(record):
        return ""
    smaller, larger = record["simulated"], record["predicted"]
    if record["relation"] == ">=":
        smaller, larger = larger, smaller
    if smaller * larger <= 0:
        return f"by {record['slack']:.2g}"
    return f"x {larger / smaller if larger > 0 else smaller / larger:.3g}"


def table(dataset: xr.Dataset, *omitted: str) -> list[tuple[str, ...]]:
    """Tabulates the verdicts as text.

    Args:
      dataset: The dataset of `run`.
      *omitted: Names in `COLUMNS` to omit.

    Returns:
      A row of column names, and a row for each claim.
    """
    return _rows(dataset, {name: text for name, text in COLUMNS.items() if name not in omitted})


def power(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """Tabulates as text the differences that each claim's comparison can detect.

    Args:
      dataset: The dataset of `run`.

    Returns:
      A row of column names, and a row for each claim.
    """
    return _rows(dataset, POWER)


def _rows(
    dataset: xr.Dataset, shown: Mapping[str, Callable[[dict[str, Any]], str]]
) -> list[tuple[str, ...]]:
    """Returns the columns' names and the rows of all claims."""
    return [
        tuple(shown),
        *(tuple(t(record) for t in shown.values()) for record in _records(dataset)),
    ]


def blind(dataset: xr.Dataset) -> str:
    """Describes which claims would overlook an error.

    Args:
      dataset: The dataset of `run`.

    Returns:
      A sentence on equalities and misprints that lists those that miss their effect with a chance
      above `claims.MISS`, and one on bounds that lists those to which no adversary came within a
      factor of 2.
    """
    records = _records(dataset)
    bounds = [r for r in records if _is_bound(r)]
    others = [r for r in records if not _is_bound(r)]
    quick = " (quick: a whole run detects more)" if dataset.attrs["quick"] else ""
    what = "equalities and misprints"
    seen = "detect the effect that they are made to see: the chance of a miss is below"
    parts = []
    missed = [r["claim"] for r in others if not r["miss"] <= claims.MISS]
    if missed:
        weak = f"{len(missed)} of {len(others)} {what} overlook their effect{quick}"
        parts.append(f"{weak}: {', '.join(missed)}.")
    elif others:
        parts.append(f"All {len(others)} {what} {seen} {claims.MISS:.0%}.")
    far = [r for r in bounds if r["kind"] not in ("attained", "within 2")]
    if bounds:
        near = f"{len(bounds) - len(far)} of {len(bounds)} bounds"
        parts.append(f"An adversary attains {near} or comes within a factor of 2.")
    parts += [f"  {r['claim']}: {r['sharpness']}" for r in far]
    return "\n".join(parts)


def mutations(dataset: xr.Dataset) -> str:
    """Lists the claims that would also hold with a wrong prediction.

    Args:
      dataset: The dataset of `run`.

    Returns:
      A line for each such claim, with the error and the slack of a bound, and a line of counts for
      each paper.
    """
    records = [r for r in _records(dataset) if r["expected"]]
    lines = [
        f"  {r['claim']}: {r['unnoticed']}" + (f" (slack {_slack(r)})" if _slack(r) else "")
        for r in records
        if r["unnoticed"]
    ]
    text = ["No claim holds with a wrong prediction."]
    if lines:
        text = ["These claims hold with a wrong prediction, too:", *lines]
    for paper in dict.fromkeys(r["claim"].split("/")[0] for r in records):
        counts = []
        own = [r for r in records if r["claim"].split("/")[0] == paper]
        for what, of in (
            ("equalities", [r for r in own if not _is_bound(r)]),
            ("bounds", [r for r in own if _is_bound(r)]),
        ):
            moved = sum(not set(r["unnoticed"].split("; ")).isdisjoint(MOVED) for r in of)
            counts.append(f"{moved} of {len(of)} {what}")
        text.append(f"{paper}: {' and '.join(counts)} hold when moved by their effect.")
    return "\n".join(text)


def attack_rows(found: Sequence[Attack]) -> list[tuple[str, ...]]:
    """Tabulates as text how close each attacked bound came to being violated.

    Args:
      found: The attacks.

    Returns:
      A row of column names, and a row for each attack.
    """
    rows = [("claim", "problems", "tried", "without a term", "at", "sharpness")]
    for attack in found:
        terms = ", ".join(
            f"{term}: {'breaks' if ratio > 1 else f'holds ({ratio:.3g})'}"
            for term, ratio in attack.terms.items()
        )
        tried, at = f"{attack.evaluations}", attacks.point(attack)
        rows.append((attack.id, attack.problems, tried, terms, at, attack.finding))
    return rows


def attacked(found: Sequence[Attack], chosen: Sequence[claims.Claim]) -> tuple[str, bool]:
    """Counts the results of attacks, paper by paper, and lists the bounds that were not attacked.

    Args:
      found: The attacks.
      chosen: The claims among which those with a domain were attacked.

    Returns:
      The text, and whether every attacked bound that should hold did hold, and all outcomes were
      confirmed.
    """
    expected = {claim.id: claim.expected for claim in chosen}
    bounds = [claim.id for claim in chosen if claim.bound]
    lines = []
    for paper in dict.fromkeys(name.split("/")[0] for name in bounds):
        own = [a for a in found if a.id.split("/")[0] == paper and expected[a.id]]
        counts = Counter(attack.kind for attack in own)
        said = (
            ", ".join(f"{counts[kind]} {kind}" for kind in attacks.KINDS if counts[kind]) or "none"
        )
        of = sum(name.split("/")[0] == paper for name in bounds)
        lines.append(f"{paper}: {len(own)} of {of} bounds attacked: {said}.")
    names = {attack.id for attack in found}
    reasons = {claim.id: claim.attack for claim in chosen if isinstance(claim.attack, str)}
    left = [name for name in bounds if name not in names]
    if unexplained := [name for name in left if name not in reasons]:
        lines.append(f"Not attacked: {', '.join(unexplained)}.")
    lines += [f"Not attacked: {name}: {reasons[name]}." for name in left if name in reasons]
    prints = [a for a in found if not expected[a.id]]
    if prints:
        broken = sum(attack.kind == "broken" for attack in prints)
        lines.append(f"{broken} of {len(prints)} attacked misprints are broken.")
    wrong = [a.id for a in found if expected[a.id] and a.kind == "broken"]
    if wrong:
        lines.append(f"BROKEN, expected to hold: {', '.join(wrong)}.")
    denied = [
        f"{a.id} (ratio {a.ratio:.5g}, again {a.again:.5g})" for a in found if not a.confirmed
    ]
    if denied:
        lines.append(f"NOT CONFIRMED, two evaluations differ: {', '.join(denied)}.")
    return "\n".join(lines), not wrong and not denied


def summary(dataset: xr.Dataset) -> str:
    """Describes how many claims hold, and which verdicts are not as expected.

    Args:
      dataset: The dataset of `run`.

    Returns:
      Sentences on the claims that hold, on known misprints, and on unexpected verdicts.
    """
    held, expected, ok = (dataset[k].values.astype(bool) for k in ("holds", "expected", "ok"))
    count = int(held.sum())
    text = f"{count} {'claim holds' if count == 1 else 'claims hold'}."
    printed = int((~held & ~expected).sum())
    if printed == 1:
        text += " 1 claim fails as printed, as expected (a known misprint)."
    elif printed:
        text += f" {printed} claims fail as printed, as expected (known misprints)."
    if ok.all():
        return f"{text} Every verdict is as expected."
    wrong = ", ".join(map(str, dataset["claim"].values[~ok]))
    return f"{text} Verdicts that are NOT as expected: {wrong}."


def statuses(dataset: xr.Dataset) -> str:
    """Counts the claims of each status.

    Args:
      dataset: The ledger.

    Returns:
      The counts as a sentence.
    """
    counts = Counter(dataset["status"].values.astype(str).tolist())
    named = (f"{name} {counts[name]}" for name in claims.STATUSES.values() if counts[name])
    return "Claims by status: " + ", ".join(named) + "."


def sharpness(dataset: xr.Dataset) -> str:
    """Counts the bounds by how close the last search came to violating them.

    Args:
      dataset: The ledger.

    Returns:
      The counts as a sentence; empty without bounds.
    """
    bounds = [record["kind"] for record in _records(dataset) if _is_bound(record)]
    return f"Bounds: {attacks.tally(bounds)}." if bounds else ""


def accounted() -> tuple[str, bool]:
    """Reports which claims cover which statements of the papers, without simulating anything.

    Returns:
      The report as text, and whether it is complete: every statement is covered, and every claim on
      the papers belongs to one.
    """
    known = claims.all_claims()
    complete = not coverage.gaps(known) and not coverage.orphans(known)
    return coverage.report(known), complete


def as_json(dataset: xr.Dataset, about: Mapping[str, Any]) -> bytes:
    """Writes the verdicts as JSON for other programs.

    Numbers that are not finite become text, except a standard error that does not exist, which
    becomes null.

    Args:
      dataset: The dataset of `run`.
      about: Fields that precede the verdicts, such as versions, with values that JSON can
        represent.

    Returns:
      The bytes of the file, in UTF-8.
    """

    def plain(field: str, value: Any) -> Any:
        if field == "unnoticed":
            return value.split("; ") if value else []
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return None if field == "stderr" else str(value)

    verdicts = [
        {"id": record.pop("claim"), **{k: plain(k, v) for k, v in record.items()}}
        for record in _records(dataset)
    ]
    ledger = {"schema": SCHEMA, **about, "verdicts": verdicts}
    return (json.dumps(ledger, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


def as_csv(dataset: xr.Dataset) -> bytes:
    """Writes the verdicts as CSV, with all digits of every number.

    Args:
      dataset: The dataset of `run`.

    Returns:
      The bytes of the file, in UTF-8, with a header line.
    """
    records, file = _records(dataset), io.StringIO()
    rows = csv.DictWriter(file, records[0])
    rows.writeheader()
    rows.writerows(records)
    return file.getvalue().encode()


LATEX = r"""% Needs longtable, and lualatex or xelatex with a font of mathematical letters.
\begin{longtable}{p{.12\linewidth}p{.3\linewidth}lllp{.12\linewidth}l}
status & statement & source & predicted & simulated & sharpness & verdict \\ \hline \endhead
"""
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {letter: "\\" + letter for letter in "&%$#_{}"}


def as_latex(dataset: xr.Dataset) -> bytes:
    """Writes the verdicts as a LaTeX table.

    Its citations are keys of docs/papers.bib.

    Args:
      dataset: The dataset of `run`.

    Returns:
      The bytes of the file, in UTF-8.
    """
    lines = []
    for record in _records(dataset):
        paper = record["claim"].split("/")[0]
        shown = ["status", "statement", "source", "predicted", "simulated", "sharpness", "verdict"]
        # The citation already contains the paper.
        record["source"] = record["source"].removeprefix(paper).lstrip()
        cells = [COLUMNS[name](record).translate(str.maketrans(SPECIAL)) for name in shown]
        cells[2] = rf"\cite[{{{cells[2]}}}]{{{paper}}}"
        lines.append(" & ".join(cells) + r" \\")
    return (LATEX + "\n".join(lines) + "\n\\end{longtable}\n").encode()


# The formats of the ledger, by the ending of the file's name, and the beginning of such files.
TABLES = {".csv": (as_csv, b"claim,"), ".tex": (as_latex, LATEX[:60].encode())}


def _records(dataset: xr.Dataset) -> list[dict[str, Any]]:
    """Returns each claim's values by name, with flags as booleans."""
    names = ["claim", *map(str, dataset.data_vars)]
    columns = [dataset[name].values.tolist() for name in names]
    flags = ("holds", "expected", "ok")
    return [
        {k: bool(v) if k in flags else v for k, v in zip(names, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]
