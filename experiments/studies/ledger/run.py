"""Runs `ledger`: checks every selected claim and gathers the verdicts in one dataset."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.ledger import attacks
from experiments.studies.ledger.config import Config
from theory import claims


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Checks each selected claim, in its own stage.

    Args:
      config: The config.
      stage: The stage function, which runs and stores a stage. The default stores nothing.

    Returns:
      The fields of `theory.claims.Verdict` and of its power over `claim`, and `ok`, whether the
      verdict is as expected. `unnoticed` is one text. `sharpness` describes how close the last
      search came to breaking the bound, and `nearest` the problem at which it came closest. The
      attribute `quick` is 1 for smaller simulations.
    """

    def verdict(claim: claims.Claim) -> dict[str, Any]:
        checked = claims.check(claim, seed=config.seed, quick=config.quick)
        record = dataclasses.asdict(checked)
        power = record.pop("power")
        stderr = math.nan if checked.stderr is None else checked.stderr
        unnoticed = "; ".join(checked.unnoticed)
        return {**record, **power, "stderr": stderr, "ok": checked.ok, "unnoticed": unnoticed}

    rows = [stage(claim.id, partial(verdict, claim)) for claim in claims.select(config.claims)]
    # Not in a stage, so a resumed run shows this version's data.
    known = [_sharpness(row) for row in rows]
    rows = [{**row, **found} for row, found in zip(rows, known, strict=True)]
    columns = {field: np.array([row[field] for row in rows]) for field in rows[0]}
    ids = columns.pop("id")
    data = {field: ("claim", values) for field, values in columns.items()}
    return xr.Dataset(data, {"claim": ids}, {"quick": int(config.quick)})


def _sharpness(row: dict[str, Any]) -> dict[str, str]:
    """Removes the reason for a missing search from a row, in which all values are arrays."""
    name, bound = str(row["id"]), bool(row["expected"]) and str(row["relation"]) != "="
    found = attacks.read().get(name)
    return {
        "sharpness": attacks.sharpness(name, bound, str(row.pop("unsearched", ""))),
        "nearest": attacks.point(found) if found else "",
    }
