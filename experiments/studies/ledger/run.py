"""Runs `ledger`: checks every selected claim and gathers the verdicts in one dataset."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.ledger import attacks
from experiments.studies.ledger.config import Config
from sail_jax.cluster import HERE, Workers
from theory import claims


def run(
    config: Config,
    stage: Stage = direct,
    workers: Workers = HERE,
    chosen: Sequence[claims.Claim] | None = None,
) -> xr.Dataset:
    """Checks each selected claim, in its own stage.

    Args:
      config: The config.
      stage: The stage function, which runs and stores a stage. The default stores nothing.
      workers: What checks the claims of each statement, which share their draws.
      chosen: The claims; None selects them by `config.claims`.

    Returns:
      The claims with the fields of `theory.claims.Verdict` and of its power, over `claim`. `ok` is
      whether the verdict is as expected and no search found a contradiction. `unnoticed` is one
      text. `sharpness` and `kind` describe how close the last search came to violating the bound,
      and `nearest` the problem at which it came closest. The attribute `quick` is 1 for smaller
      simulations.
    """
    chosen = claims.select(config.claims) if chosen is None else chosen
    check = partial(_checked, config.seed, config.quick)
    if workers is HERE:
        rows = [stage(claim.id, partial(check, claim)) for claim in chosen]
    else:
        ids = [claim.id for claim in chosen]
        statements = [[*same] for _, same in itertools.groupby(ids, _statement)]
        found: dict[str, dict[str, Any]] = {}
        for place, made in workers.each(partial(_each, check), statements):
            for name, row in zip(statements[place], made, strict=True):
                found[name] = stage(name, partial(dict, row))
        rows = [found[name] for name in ids]
    # Not in a stage, so a resumed run shows this version's data.
    rows = [{**row, **_sharpness(claim, row)} for claim, row in zip(chosen, rows, strict=True)]
    columns = {field: np.array([row[field] for row in rows]) for field in rows[0]}
    ids = columns.pop("id")
    data = {field: ("claim", values) for field, values in columns.items()}
    return xr.Dataset(data, {"claim": ids}, {"quick": int(config.quick)})


def _statement(name: str) -> str:
    return name.rpartition("/")[0]


def _each(
    check: Callable[[claims.Claim], dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Checks claims by their ids, as a task of a cluster."""
    return [check(claims.named(name)) for name in names]


def _checked(seed: int, quick: bool, claim: claims.Claim) -> dict[str, Any]:
    return _record(claims.check(claim, seed=seed, quick=quick))


def _record(verdict: claims.Verdict) -> dict[str, Any]:
    """Lists a verdict as a row of plain values."""
    claim, found = verdict.claim, dataclasses.asdict(verdict)
    about = ("id", "status", "statement", "source", "domain", "relation", "expected", "note")
    compared = ("predicted", "simulated", "score", "score_name", "holds", "seconds")
    return {
        **{name: getattr(claim, name) for name in about},
        **{name: found[name] for name in compared},
        **found["power"],
        "stderr": math.nan if verdict.stderr is None else verdict.stderr,
        "unnoticed": "; ".join(verdict.unnoticed),
        "ok": verdict.ok,
    }


def _sharpness(claim: claims.Claim, row: dict[str, Any]) -> dict[str, Any]:
    """Returns what is known about a bound, and whether the claim is still as expected."""
    found = attacks.known(claim)
    return {
        "kind": attacks.kind(claim),
        "sharpness": attacks.sharpness(claim),
        "nearest": attacks.point(found) if found else "",
        "ok": bool(row["ok"]) and attacks.sound(claim, found),
    }
