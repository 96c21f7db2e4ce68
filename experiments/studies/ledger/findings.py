"""What `ledger` found: from the stored dataset alone."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import xarray as xr

from theory import claims, coverage

SCHEMA = "sail-jax ledger 1"


def wording(holds: bool, expected: bool) -> str:
    """The verdict in words; capitals where the ledger and the theory disagree."""
    if holds:
        return "holds" if expected else "HOLDS, expected to fail"
    return "FAILS" if expected else "fails, as expected"


# The columns of the ledger as text; the first row of a table is these names.
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
    "verdict": lambda record: wording(record["holds"], record["expected"]),
}


# What each comparison can see, in units of the prediction's own.
POWER: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: COLUMNS[name] for name in ("claim", "relation", "predicted", "simulated")},
    "made to see": lambda record: f"{record['effect']:.2g}",
    "sees": lambda record: f"{record['sees']:.2g}",
    "false alarm": lambda record: f"{record['false_alarm']:.1g}",
    "miss": lambda record: f"{record['miss']:.1g}",
}


def _spread(stderr: float) -> str:
    return "" if math.isnan(stderr) else f" ± {stderr:.2g}"


def table(dataset: xr.Dataset, *omitted: str) -> list[tuple[str, ...]]:
    """The ledger as text: the names of the columns, then one row per claim."""
    return _rows(dataset, {name: text for name, text in COLUMNS.items() if name not in omitted})


def power(dataset: xr.Dataset) -> list[tuple[str, ...]]:
    """The power of every claim as text: the names of the columns, then one row per claim."""
    return _rows(dataset, POWER)


def _rows(
    dataset: xr.Dataset, shown: Mapping[str, Callable[[dict[str, Any]], str]]
) -> list[tuple[str, ...]]:
    return [
        tuple(shown),
        *(tuple(t(record) for t in shown.values()) for record in _records(dataset)),
    ]


def blind(dataset: xr.Dataset) -> str:
    """Which claims overlook what they are made to see with a chance above `claims.MISS`."""
    missed = dataset["claim"].values[~(dataset["miss"].values <= claims.MISS)]
    if not len(missed):
        return f"Every claim sees its effect: it is missed with a chance below {claims.MISS:.0%}."
    quick = " (quick: a whole run sees more)" if dataset.attrs["quick"] else ""
    too_weak = f"{len(missed)} of {dataset.sizes['claim']} claims are too weak{quick}"
    return f"{too_weak}: {', '.join(missed)}."


def summary(dataset: xr.Dataset) -> str:
    """How many claims hold, and which verdicts are not the expected ones."""
    held, expected, ok = (dataset[k].values.astype(bool) for k in ("holds", "expected", "ok"))
    text = f"{held.sum()} of {held.size} claims hold"
    printed = (~held & ~expected).sum()
    if printed:
        text += f", {printed} fail as printed, as expected"
    if ok.all():
        return f"{text}. Every verdict is the expected one."
    return f"{text}. NOT as expected: {', '.join(map(str, dataset['claim'].values[~ok]))}."


def statuses(dataset: xr.Dataset) -> str:
    """How many of the claims have which status."""
    counts = Counter(dataset["status"].values.astype(str).tolist())
    named = (f"{name} {counts[name]}" for name in claims.STATUSES.values() if counts[name])
    return ", ".join(named) + "."


def accounted() -> tuple[str, bool]:
    """Which claims answer to which statement of which paper, as text, and whether none is missing.

    Nothing is simulated.
    """
    ids = [claim.id for claim in claims.all_claims()]
    complete = not coverage.gaps(ids) and not coverage.orphans(ids)
    return coverage.report(ids), complete


def as_json(dataset: xr.Dataset, about: Mapping[str, Any]) -> bytes:
    """The ledger for other programs, headed by `about`; non-finite numbers are text."""

    def plain(field: str, value: Any) -> Any:
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
    """The ledger as a spreadsheet reads it, every number to its last digit."""
    records, file = _records(dataset), io.StringIO()
    rows = csv.DictWriter(file, records[0])
    rows.writeheader()
    rows.writerows(records)
    return file.getvalue().encode()


LATEX = r"""% Needs longtable, and lualatex or xelatex with a font of mathematical letters.
\begin{longtable}{p{.12\linewidth}p{.36\linewidth}llll}
status & statement & source & predicted & simulated & verdict \\ \hline \endhead
"""
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {letter: "\\" + letter for letter in "&%$#_{}"}


def as_latex(dataset: xr.Dataset) -> bytes:
    """The ledger as a table to paste; what it cites is in docs/papers.bib."""
    lines = []
    for record in _records(dataset):
        paper = record["claim"].split("/")[0]
        shown = ("status", "statement", "source", "predicted", "simulated", "verdict")
        record["source"] = record["source"].removeprefix(paper).lstrip()
        cells = [COLUMNS[name](record).translate(str.maketrans(SPECIAL)) for name in shown]
        cells[2] = rf"\cite[{{{cells[2]}}}]{{{paper}}}"
        lines.append(" & ".join(cells) + r" \\")
    return (LATEX + "\n".join(lines) + "\n\\end{longtable}\n").encode()


# What the ledger can be written as, by the ending of the file's name, and how such files begin.
TABLES = {".csv": (as_csv, b"claim,"), ".tex": (as_latex, LATEX[:60].encode())}


def _records(dataset: xr.Dataset) -> list[dict[str, Any]]:
    names = ["claim", *map(str, dataset.data_vars)]
    columns = [dataset[name].values.tolist() for name in names]
    flags = ("holds", "expected", "ok")
    return [
        {k: bool(v) if k in flags else v for k, v in zip(names, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]
