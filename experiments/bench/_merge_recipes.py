"""Recipes of the speed benchmark: one for each method, which both programs can read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Job(NamedTuple):
    """A method's recipe, and its target speed.

    Attributes:
      method: The name of the method.
      parameters: Parameters of the merge.
      each: Parameters of each model.
      files: The number of models read, of the base and the three fine-tuned models.
      base: The role of the base: the "base", one of the "models", "both", or not used ("").
      ours: Keys of the recipe that only sail-jax supports.
      alone: Whether only sail-jax has the method.
      beside: The job that gives the peer's time, if the peer does not have the method.
      limit: The largest acceptable ratio of the job's time to reading the inputs and writing the
        output, flushed to disk; infinity without a target.
      floor: The largest acceptable ratio of the job's CPU time to that of reading and writing (not
        flushed) and of importing JAX; infinity without a target.
      peer: The smallest acceptable ratio of the peer's time to the job's; 0 without a target.
      peak: The upper limit on resident memory, in GB; infinity without a target.
    """

    method: str
    parameters: Mapping[str, Any] = {}
    each: Mapping[str, Any] = {}
    files: int = 4
    base: str = "base"  # "base", "models", "both", or not used ("")
    ours: Mapping[str, Any] = {}  # keys of the recipe that only sail-jax has
    alone: bool = False
    beside: str = ""  # the job that gives the peer's time instead of this one
    limit: float = np.inf
    floor: float = np.inf
    peer: float = 0.0
    peak: float = np.inf

    def recipe(self, models: Sequence[Path], *, ours: bool) -> dict[str, Any]:
        """Builds the recipe for some models.

        Args:
          models: The folders of the models, the base first.
          ours: Whether it contains keys that only sail-jax supports.

        Returns:
          The recipe.
        """
        files = [str(model) for model in models[: self.files]]
        listed = files if self.base in ("both", "models") else files[1:]
        entries = [{"model": m, **({"parameters": self.each} if self.each else {})} for m in listed]
        base = {"base_model": files[0]} if self.base in ("base", "both") else {}
        return {
            "merge_method": self.method,
            **base,
            "models": entries,
            **({"parameters": self.parameters} if self.parameters else {}),
            "dtype": "bfloat16",
            **(self.ours if ours else {}),
        }


_weight = {"weight": 0.4}
_LEAF = 0.5  # GB, for methods that process one entry at a time
JOBS: dict[str, Job] = {
    "linear": Job(
        "linear", {}, {"weight": 0.25}, base="models", limit=2, floor=1.6, peer=6, peak=_LEAF
    ),
    "task_arithmetic": Job("task_arithmetic", {}, _weight, limit=2, peer=6, peak=_LEAF),
    "slerp": Job("slerp", {"t": 0.4}, files=2, base="both", peer=5),
    "model_stock": Job("model_stock", peer=5),
    "ties": Job("ties", {}, {**_weight, "density": 0.2}, peer=20),
    "ties_tree": Job(
        "ties", {}, {**_weight, "density": 0.2}, ours={"scope": "tree"}, beside="ties", peer=20
    ),
    "dare_ties": Job("dare_ties", {}, {**_weight, "density": 0.3}, peer=20, peak=_LEAF),
    "della": Job("della", {}, {**_weight, "density": 0.5, "epsilon": 0.1}, peer=20),
    "karcher": Job("karcher", files=3, base="models"),
    "breadcrumbs": Job("breadcrumbs", {}, {**_weight, "density": 0.5, "gamma": 0.01}),
    "dare_linear": Job("dare_linear", {}, {**_weight, "density": 0.3}, peak=_LEAF),
    "della_linear": Job("della_linear", {}, {**_weight, "density": 0.5, "epsilon": 0.1}),
    "breadcrumbs_ties": Job("breadcrumbs_ties", {}, {**_weight, "density": 0.5, "gamma": 0.01}),
    "sce": Job("sce", {"select_topk": 0.2}),
    "nuslerp": Job("nuslerp", {}, {"weight": 0.5}, files=2, base="models"),
    "multislerp": Job("multislerp", {}, {"weight": 0.5}, files=3, base="models"),
    "nearswap": Job("nearswap", {"t": 1e-4}, files=2, peak=_LEAF),
    "arcee_fusion": Job("arcee_fusion", files=2),
    "ram": Job("ram", peak=_LEAF),
    "ramplus_tl": Job("ramplus_tl"),
    "passthrough": Job("passthrough", {"scale": 0.5}, files=1, base="models", peak=_LEAF),
    "consensus": Job("consensus", alone=True),
    "expo": Job("expo", files=2, alone=True),
    "iso_c": Job("iso_c", alone=True),
    "iso_cts": Job("iso_cts", alone=True),
    "magmax": Job("magmax", alone=True),
    "opcm": Job("opcm", alone=True),
    "pcb": Job("pcb", alone=True),
    "trajectory": Job("trajectory", base="models", alone=True),
    "tsv_m": Job("tsv_m", alone=True),
    "wudi": Job("wudi", {"steps": 3}, alone=True),  # of 300: memory is the same for one step
}
DEFAULT = tuple(JOBS)[:10]
