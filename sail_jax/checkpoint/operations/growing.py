"""Checkpoints grown into checkpoints: planned from shapes, certified, computed while written."""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax.architectures import Rules
from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.engine.executor import Limits, limits, peak, summary
from sail_jax.checkpoint.formats.extras import carried, config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.folders import admit
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.operations.agreement import (
    Agreement,
    Certify,
    certified,
    verdict,
    wanted,
)
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    RunOptions,
    carried_out,
    check_options,
    opened,
)
from sail_jax.checkpoint.planning import cards
from sail_jax.checkpoint.sources.growth import growth_view, read_target
from sail_jax.checkpoint.sources.views import View
from sail_jax.growth import networks
from sail_jax.merging import random_bits
from sail_jax.merging.streaming import Work

__all__ = [
    "Growing",
    "Grown",
    "grow_checkpoint",
    "growing",
]

Path_ = str | PathLike[str]


class Growing(NamedTuple):
    """A growth of which everything is known but the values. The input is open until it is left."""

    view: View
    growth: networks.Growth
    works: tuple[Work, ...]
    limits: Limits
    fingerprint: str
    about: Mapping[str, Any]
    checkpoint: Checkpoint

    def memory(self) -> int:
        """Bytes that the process takes at most, as far as it is planned."""
        return peak(self.works, self.limits)

    def summary(self) -> str:
        """One line on memory and threads."""
        return summary(self.works, self.limits)


class Grown(NamedTuple):
    """What was done: the growth, how well the networks agree (none if not asked, or not known how),
    whether the function is preserved and how that is known, the output, how long it took (in
    seconds), what is to be said of it, a sentence each, and whether an earlier call had finished
    it."""

    growth: networks.Growth
    agreement: tuple[Agreement, ...]
    verdict: Verdict
    out: Path
    seconds: float
    notes: tuple[str, ...]
    unchanged: bool


@contextlib.contextmanager
def growing(
    path: Path_,
    to: Any,
    method: str = "lemon",
    *,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> Iterator[Growing]:
    """Opens a checkpoint and plans its growth; no tensor is read. options: of `growth_view`."""
    with opened(path, run) as checkpoint:
        view, made = growth_view(
            checkpoint, to, method, allow_nonfinite=run.allow_nonfinite, **options
        )
        works = view.works()
        config = options.get("config")
        before = config_of(checkpoint.extras) if config is None else read_target(config)
        about = {
            "source": str(path),
            "method": method,
            "seed": options.get("seed", 0),
            "options": {k: v for k, v in options.items() if k not in _OPTIONS},
            "changes": {
                key: [before.get(key), value]
                for key, value in made.config.items()
                if before.get(key) != value
            },
            **_exactness(Verdict(made.report.exact)),
            "spaces": [
                {"space": s.space, "family": str(s.family), "defect": s.defect, "lost": s.reason}
                for s in made.report.spaces
            ],
            "notes": list(made.notes),
        }
        marks = sorted({getattr(x, "mark", "") for x in view.tensors.values()})
        shapes = [(w.name, str(w.dtype), w.shape) for w in works]
        mark = hashlib.sha256(repr([marks, shapes]).encode()).hexdigest()
        bounds = limits(works, run.max_memory, run.threads)
        yield Growing(view, made, works, bounds, mark, about, checkpoint)


_OPTIONS = {"seed", "config", "rules"}


def grow_checkpoint(
    path: Path_,
    out: Path_,
    to: Any,
    method: str = "lemon",
    *,
    seed: int = 0,
    config: Any = None,
    rules: Rules | None = None,
    certify: Certify = None,
    run: RunOptions = DEFAULTS,
    before: Callable[[Growing], None] | None = None,
    **options: Any,
) -> Grown:
    """Grows a checkpoint on disk into `out`, tensor by tensor, by a method of `growth.METHODS`.

    to: the target configuration (a mapping or its path), factors such as {"width": 2, "depth": 4},
    or entries that change. The output has the new config.json, what else lay beside the tensors, a
    model card and growth.json: what was done, the exactness of every space, and how that is known.
    certify: also run both networks on probe inputs, in float32 and in the dtype of the checkpoint;
    by default if the architecture is known and both fit in 1 GB. Or a function
    `outputs(tensors, config)` to run them by. The rest as in `growth_view`.

    Raises ValueErrors: what `growth.plan` raises, CheckpointError and MergeError.
    """
    began = time.monotonic()
    check_options(options)
    admit(Path(out), [path], run.resume)
    with growing(
        path, to, method, seed=seed, config=config, rules=rules, run=run, **options
    ) as ready:
        if before is not None:
            before(ready)
        view, own = ready.view, _own(ready.view, config)

        def renew(arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            key, goal = random_bits.key(seed), read_target(to)
            new, made = networks.grow(arrays, own, goal, method, key=key, rules=rules, **options)
            return new, made.config

        tensors = (*view.base.tensors.values(), *view.tensors.values())
        entries = sum(math.prod(x.shape) for x in tensors)
        agreed, failed = wanted(
            certify,
            entries,
            path,
            lambda: certified(view.base.tensors, own, renew, certify),
            run.max_memory,
        )
        preserved = verdict(ready.growth.report, agreed)
        if options.get("require_lossless") and preserved.exact is False:
            raise CheckpointError(f"{path}: lossless growth was asked for, but is {preserved}")
        notes = [*ready.growth.notes, *failed]
        about = {**ready.about, **_exactness(preserved)}
        about |= {"agreement": [run._asdict() for run in agreed], "notes": notes}
        _, unchanged = carried_out(
            ready.works, Path(out), ready.limits, ready.fingerprint, [ready.checkpoint],
            lambda: _extras(ready.view, about, Path(out).name), run,
        )  # fmt: skip
    seconds = time.monotonic() - began
    return Grown(ready.growth, agreed, preserved, Path(out), seconds, tuple(notes), unchanged)


def _exactness(preserved: Verdict) -> dict[str, Any]:
    return {"exact": preserved.exact, "exactness": str(preserved)}


def _extras(view: View, about: Mapping[str, Any], name: str) -> dict[str, bytes | Path]:
    extras = {n: data for n, data in view.extras.items() if carried(n)}
    extras["README.md"] = cards.growth_card(about, name, "config.json" in extras).encode()
    extras["growth.json"] = json.dumps(about, indent=2, default=str).encode() + b"\n"
    return extras


def _own(view: View, config: Any) -> Mapping[str, Any]:
    return config_of(view.base.extras) if config is None else read_target(config)
