"""The run of `ledger`: its stages, and the dataset that they make."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.ledger.config import Config
from theory import claims


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Checks each selected claim in a stage of its own; one entry per claim."""

    def verdict(claim: claims.Claim) -> dict[str, Any]:
        checked = claims.check(claim, seed=config.seed, quick=config.quick)
        record = dataclasses.asdict(checked)
        power = record.pop("power")
        stderr = math.nan if checked.stderr is None else checked.stderr
        return {**record, **power, "stderr": stderr, "ok": checked.ok}

    rows = [stage(claim.id, partial(verdict, claim)) for claim in claims.select(config.claims)]
    columns = {field: np.array([row[field] for row in rows]) for field in rows[0]}
    ids = columns.pop("id")
    data = {field: ("claim", values) for field, values in columns.items()}
    return xr.Dataset(data, {"claim": ids}, {"quick": int(config.quick)})
