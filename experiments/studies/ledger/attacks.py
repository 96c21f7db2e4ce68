"""Results of the last search for problems that violate the bounds: the file `attacks.json`.

`sail-jax verify --attack --renew` searches the bounds whose code has changed since, and writes it.
Until then, `known` computes the ratios of this version at the problem of the former search.
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

from theory import claims
from theory.adversary import ROUNDING, Attack, Domain, evaluated
from theory.fingerprints import fingerprint

SCHEMA = "sail-jax attacks 1"
FILE = Path(__file__).with_name("attacks.json")
KINDS = ("attained", "within 2", "not sharp", "not confirmed", "broken", "not searched")
FIELDS = tuple(field.name for field in dataclasses.fields(Attack) if field.name != "searched")
SHOWN = 4  # the largest number of a problem's numbers in a text


def as_json(found: Sequence[Attack], about: Mapping[str, Any]) -> bytes:
    """Writes attacks as JSON.

    Args:
      found: The attacks.
      about: Fields that precede them, such as versions, with values that JSON can represent.

    Returns:
      The bytes of the file, in UTF-8. Numbers that are not finite become text.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    records = [
        plain({name: getattr(attack, name) for name in FIELDS})
        | {"kind": attack.kind, "finding": attack.finding}
        for attack in found
    ]
    whole = {"schema": SCHEMA, **about, "attacks": records}
    return (json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


@functools.cache
def read(file: Path = FILE) -> Mapping[str, Attack]:
    """Reads the results of a search.

    Args:
      file: A file of `as_json`; by default the one of this version.

    Returns:
      The attacks by the ids of their claims.
    """
    records = json.loads(file.read_text(encoding="utf-8"))["attacks"]
    found = [Attack(**{name: record[name] for name in FIELDS}) for record in records]
    return {
        attack.id: dataclasses.replace(
            attack,
            ratio=float(attack.ratio),
            again=float(attack.again),
            terms={term: float(ratio) for term, ratio in attack.terms.items()},
        )
        for attack in found
    }


def renewed(found: Iterable[Attack]) -> list[Attack]:
    """Replaces outcomes of the last search by new ones.

    Args:
      found: The new outcomes.

    Returns:
      The outcomes of all bounds that have problems to search, in the order of the ledger.
    """
    latest = {**read(), **{attack.id: attack for attack in found}}
    attacked = (c.id for c in claims.all_claims() if isinstance(c.attack, Domain))
    return [latest[name] for name in attacked if name in latest]


def current(claim: claims.Claim) -> bool:
    """Returns whether the last search of a bound was a search of the code of this version.

    Args:
      claim: A claim with a domain.

    Returns:
      Whether it was.
    """
    found = read().get(claim.id)
    return found is not None and found.code == fingerprint(claim.attack)


@functools.cache
def known(claim: claims.Claim) -> Attack | None:
    """Returns what is known about a bound, computed with the code of this version.

    Args:
      claim: The claim.

    Returns:
      The outcome of the last search if the code is the same. Otherwise the ratios of this version
      at its problem. None if the bound was never searched, or if the problem no longer belongs to
      the domain.
    """
    found = read().get(claim.id)
    if found is None or not isinstance(claim.attack, Domain):
        return None
    if current(claim):
        return found
    try:
        return evaluated(found, claim.attack)
    except ValueError:
        return None


def sound(claim: claims.Claim, found: Attack | None) -> bool:
    """Returns whether an outcome agrees with a claim: its ratios agree and violate no bound."""
    return found is None or (found.confirmed and not (claim.expected and found.broken))


def sharpness(claim: claims.Claim) -> str:
    """Describes how close a search came to violating a claim.

    Args:
      claim: The claim.

    Returns:
      The result of the search, such as "attained (0.998)", with the terms that the bound does not
      require, and a sharper bound or the reason why none is known; or a note that this version was
      not searched. It is empty for equalities, and for
      misprints that were not attacked, because the check itself violates them.
    """
    if found := known(claim):
        idle = [term for term, ratio in found.terms.items() if not ratio > 1 + ROUNDING]
        terms = f"; holds without {', '.join(idle)}" if idle else ""
        named = "none sharper" if " " in claim.sharper else "sharper"
        return found.finding + terms + (f"; {named}: {claim.sharper}" if claim.sharper else "")
    if not claim.bound:
        return ""
    if isinstance(claim.attack, str):
        return f"not attacked: {claim.attack}"
    return "not searched" if claim.attack else "not attacked"


def kind(claim: claims.Claim) -> str:
    """Returns the sharpness of a claim as one word.

    Args:
      claim: The claim.

    Returns:
      One of `KINDS`, or "not attacked", or "" for a claim that is not a bound.
    """
    if found := known(claim):
        return found.kind
    if not claim.bound:
        return ""
    return "not searched" if isinstance(claim.attack, Domain) else "not attacked"


def tally(kinds: Iterable[str]) -> str:
    """Counts bounds by the `kind` of each."""
    counts = Counter(kinds)
    return ", ".join(f"{counts[k]} {k}" for k in (*KINDS, "not attacked") if counts[k])


def point(attack: Attack) -> str:
    """Describes the problem at which a bound was closest to being violated.

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
