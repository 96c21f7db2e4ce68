"""Which of the papers' claims hold? Each closed form beside a simulation of the same quantity."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.lab.progress import Stage
from experiments.lab.store import direct
from sail_jax.drawing import style
from theory import claims, coverage

SCHEMA = "sail-jax ledger 1"

# For each kind of score: its name on an axis, and how far from 0 it may lie.
SCORES = {
    "z": ("z = (simulated - predicted) / s.e.", claims.Z_MAX),
    "err/tol": ("(simulated - predicted) / tolerance", 1.0),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Which claims are checked, and how hard."""

    claims: str = "*"
    """Glob over claim names; `*` is all of them."""
    seed: int = 0
    """Seed of every simulation."""
    quick: bool = False
    """Smaller simulations, larger standard errors."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        try:
            claims.select(self.claims)
        except ValueError as exc:
            raise ValueError(f"claims: {exc}") from exc

    @classmethod
    def tiny(cls) -> "Config":
        return cls(claims="features-are-fate/eq13-interval/*", quick=True)


PRESETS: dict[str, Callable[[], Config]] = {
    "default": Config,
    "quick": partial(Config, quick=True),
    "theorems": partial(Config, claims="*/T*"),
    "theorems_quick": partial(Config, claims="*/T*", quick=True),
    "tiny": Config.tiny,
}


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


def wording(holds: bool, expected: bool) -> str:
    """The verdict in words; capitals where the ledger and the theory disagree."""
    if holds:
        return "holds" if expected else "HOLDS, expected to fail"
    return "FAILS" if expected else "fails as printed (expected)"


# The columns of the ledger as text; the first row of a table is these names.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "claim": lambda one: one["claim"],
    "statement": lambda one: one["statement"],
    "where": lambda one: one["domain"],
    "source": lambda one: one["source"],
    "relation": lambda one: f"simulated {one['relation']} predicted",
    "predicted": lambda one: f"{one['predicted']:.5g}",
    "simulated": lambda one: f"{one['simulated']:.5g}{_spread(one['stderr'])}",
    "score": lambda one: f"{one['score_name']} = {one['score']:.3g}",
    "verdict": lambda one: wording(one["holds"], one["expected"]),
}


def _spread(stderr: float) -> str:
    return "" if math.isnan(stderr) else f" ± {stderr:.2g}"


def table(dataset: xr.Dataset, *omitted: str) -> list[tuple[str, ...]]:
    """The ledger as text: the names of the columns, then one row per claim."""
    shown = {name: text for name, text in COLUMNS.items() if name not in omitted}
    return [tuple(shown), *(tuple(t(one) for t in shown.values()) for one in _records(dataset))]


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
        {"id": one.pop("claim"), **{k: plain(k, v) for k, v in one.items()}}
        for one in _records(dataset)
    ]
    ledger = {"schema": SCHEMA, **about, "verdicts": verdicts}
    return (json.dumps(ledger, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


def plot(dataset: xr.Dataset) -> dict[str, Figure]:
    """Every score against the band it has to lie in, one panel per kind of score."""
    names = dataset["score_name"].values.astype(str)
    kinds = [kind for kind in SCORES if (names == kind).any()]
    counts = [int((names == kind).sum()) for kind in kinds]
    fig, axes = style.figure(
        len(kinds), 1, width=7.2, height=1.1 + 0.21 * max(counts), height_ratios=counts
    )
    fig.set_figheight(1.2 + 0.8 * len(kinds) + 0.21 * sum(counts))
    for ax, kind in zip(axes.flat, kinds, strict=True):
        _dots(ax, dataset.isel(claim=np.flatnonzero(names == kind)), *SCORES[kind])
    dot = partial(Line2D, [], [], marker="o", ls="")
    handles = [
        Patch(color=style.PALETTE[2], alpha=0.15, label="allowed"),
        dot(color=style.PALETTE[0], label="expected to hold"),
        dot(color=style.PALETTE[1], label="expected to fail"),
    ]
    if (dataset["relation"] != "=").any():
        bound = "bound: allowed further on this side"
        handles.append(dot(color=style.FAINT, marker="<", label=bound))
    fig.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return {"ledger": fig}


def _dots(ax: Axes, dataset: xr.Dataset, label: str, limit: float) -> None:
    """One row per claim, linear inside twice the band and logarithmic outside it."""
    score = np.clip(dataset["score"].values, -1e6 * limit, 1e6 * limit)
    ax.axvspan(-limit, limit, color=style.PALETTE[2], alpha=0.15, lw=0)
    for y, (x, relation, expected) in enumerate(
        zip(score, dataset["relation"].values, dataset["expected"].values, strict=True)
    ):
        marker = {"=": "o", "<=": "<", ">=": ">"}[str(relation)]
        ax.plot(x, y, marker, color=style.PALETTE[0 if expected else 1], ms=5)
    ax.set_xscale("symlog", linthresh=2 * limit, linscale=2)
    reach = max(2 * limit, 2 * np.abs(score).max())
    ax.set_xlim(-reach, reach)
    powers = np.arange(1, math.ceil(math.log10(reach / limit)))
    outer = 10.0 ** np.unique(powers[[(len(powers) - 1) // 2, -1]] if len(powers) else powers)
    ticks = limit * np.concatenate([-outer[::-1], [-1, 0, 1], outer])
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    names = [str(name) for name in dataset["claim"].values]
    ax.set_yticks(np.arange(len(names)), names, fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(label)


def _records(dataset: xr.Dataset) -> list[dict[str, Any]]:
    names = ["claim", *map(str, dataset.data_vars)]
    columns = [dataset[name].values.tolist() for name in names]
    flags = ("holds", "expected", "ok")
    return [
        {k: bool(v) if k in flags else v for k, v in zip(names, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]
