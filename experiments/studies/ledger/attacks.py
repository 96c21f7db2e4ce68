"""Results of the last search for problems that break the bounds: the file `attacks.json`.

`sail-jax verify --attack --json experiments/studies/ledger/attacks.json` writes it. A test
evaluates each of its problems again. If a bound or a domain changes, a new search is needed.
"""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from theory.adversary import ROUNDING, Attack

SCHEMA = "sail-jax attacks 1"
FILE = Path(__file__).with_name("attacks.json")
KINDS = ("attained", "within 2", "not sharp", "not confirmed", "broken")
SHOWN = 4  # the largest number of a problem's numbers in a text


def as_json(found: Sequence[Attack], about: Mapping[str, Any]) -> bytes:
    """Writes attacks as JSON.

    Args:
      found: The attacks.
      about: Fields to put before them, such as versions; values that JSON can hold.

    Returns:
      The bytes of the file, in UTF-8. Numbers that are not finite become text.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    records = [
        plain(dataclasses.asdict(attack)) | {"kind": attack.kind, "finding": attack.finding}
        for attack in found
    ]
    whole = {"schema": SCHEMA, **about, "attacks": records}
    return (json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


@functools.cache
def read(file: Path = FILE) -> Mapping[str, Attack]:
    """Reads the results of a search.

    Args:
      file: A file of `as_json`; by default the one that belongs to this version.

    Returns:
      The attacks by the ids of their claims.
    """
    records = json.loads(file.read_text(encoding="utf-8"))["attacks"]
    fields = [field.name for field in dataclasses.fields(Attack)]
    found = [Attack(**{name: record[name] for name in fields}) for record in records]
    return {
        attack.id: dataclasses.replace(
            attack,
            ratio=float(attack.ratio),
            again=float(attack.again),
            terms={term: float(ratio) for term, ratio in attack.terms.items()},
        )
        for attack in found
    }


def sharpness(name: str, bound: bool, reason: str = "") -> str:
    """Describes how near the last search came to breaking a claim.

    Args:
      name: The claim's id.
      bound: Whether it is an inequality that should hold.
      reason: The reason for a missing search, if there is one.

    Returns:
      The result of the search, such as "attained (0.998)", with the terms that the bound does not
      need; or a note that there was no search. It is empty for equalities, and for misprints that
      were not attacked, because the check itself breaks them.
    """
    if name in read():
        found = read()[name]
        idle = [term for term, ratio in found.terms.items() if not ratio > 1 + ROUNDING]
        return found.finding + (f"; holds without {', '.join(idle)}" if idle else "")
    if not bound:
        return ""
    return f"not attacked: {reason}" if reason else "not attacked"


def tally(bounds: Iterable[str]) -> str:
    """Counts bounds by their sharpness in the last search.

    Args:
      bounds: The ids of their claims.

    Returns:
      The counts with their kinds.
    """
    none, found = "not attacked", read()
    counts = Counter(found[name].kind if name in found else none for name in bounds)
    return ", ".join(f"{counts[kind]} {kind}" for kind in (*KINDS, none) if counts[kind])


def point(attack: Attack) -> str:
    """Describes the problem at which a bound was closest to being broken.

    Args:
      attack: The attack.

    Returns:
      Its parts by name. For larger arrays, only the shape.
    """

    def spelt(value: Any) -> str:
        array = np.array(value)
        if array.size > SHOWN:
            return f"({' x '.join(map(str, array.shape))} numbers)"
        return " ".join(np.array2string(array, precision=3, separator=" ").split())

    return ", ".join(f"{name}={spelt(value)}" for name, value in attack.at.items())
