"""The run of `ledger`: its stages, and the dataset that they make."""

import dataclasses
import json
import math

import numpy as np
import xarray as xr

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.studies.ledger.config import Config
from theory import claims


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Checks each selected claim in a stage of its own; one entry per claim."""

    def verdict(claim: claims.Claim) -> dict[str, np.ndarray]:
        found = claims.check(claim, seed=config.seed, quick=config.quick)
        # A stage keeps numbers; a verdict has words too.
        fields = {**dataclasses.asdict(found), "ok": found.ok}
        text = json.dumps(fields, default=lambda scalar: scalar.item())
        return {"verdict": np.frombuffer(text.encode(), np.uint8)}

    found = [
        json.loads(stage(claim.id, lambda c=claim: verdict(c))["verdict"].tobytes())
        for claim in claims.select(config.claims)
    ]
    for one in found:
        one["stderr"] = math.nan if one["stderr"] is None else one["stderr"]
    columns = {field: np.array([one[field] for one in found]) for field in found[0]}
    ids = columns.pop("id")
    data = {field: ("claim", values) for field, values in columns.items()}
    return xr.Dataset(data, {"claim": ids}, {"quick": int(config.quick)})
