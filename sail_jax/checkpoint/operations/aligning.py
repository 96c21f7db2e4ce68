"""Checkpoints aligned: one re-expressed in the frame of another, and written."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from sail_jax.align.blocks import change_blocks
from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.engine.executor import (
    CONSTANT,
    Limits,
    MergeError,
    limits,
    resident,
)
from sail_jax.checkpoint.formats.extras import carried, config_of
from sail_jax.checkpoint.formats.folders import admit
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
from sail_jax.checkpoint.sources.alignment import Aligned, align_maps, aligned_view
from sail_jax.merging.streaming import Work

__all__ = ["AlignedCheckpoint", "align_checkpoints"]

Path_ = str | PathLike[str]


class AlignedCheckpoint(NamedTuple):
    """What was done: the alignment, how far the outputs moved (none if not asked, or not known
    how), whether the function is preserved and how that is known, the output, how long it took (in
    seconds) and whether an earlier call had finished it."""

    aligned: Aligned
    agreement: tuple[Agreement, ...]
    verdict: Verdict
    out: Path | None
    seconds: float
    unchanged: bool


def align_checkpoints(
    a: Path_,
    b: Path_,
    out: Path_ | None,
    config: Mapping[str, Any] | None = None,
    *,
    certify: Certify = None,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> AlignedCheckpoint:
    """Writes `b`, re-expressed in the frame of `a`, to `out` (None: matches only).

    options: of `align_maps`, whose `max_memory` is that of `run`. The output has what lay beside
    the tensors of `b`, and align.json: what was done to which space. certify: also run `b` before
    and after on probe inputs; by default if the architecture is known and both fit in 1 GB. Or a
    function `outputs(tensors, config)` to run it by.

    Raises ValueErrors: those of `align_maps`, CheckpointError and MergeError.
    """
    began, unchanged = time.monotonic(), False
    check_options({k: v for k, v in options.items() if k != "progress"})
    if out is not None:
        admit(Path(out), [a, b], run.resume)
    with (
        opened(a, run) as reference,
        opened(b, run) as other,
    ):
        aligned = align_maps(reference, other, config, max_memory=run.max_memory, **options)
        own = config or config_of(other.extras) or {}

        def renew(arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            return change_blocks(dict(arrays), aligned.spec, aligned.maps, aligned.within), own

        entries = 2 * sum(math.prod(x.shape) for x in other.tensors.values())
        agreed, failed = wanted(
            certify,
            entries,
            b,
            lambda: certified(other.tensors, own, renew, certify),
            run.max_memory,
        )
        preserved = verdict(aligned.report, agreed)
        aligned = aligned._replace(notes=(*aligned.notes, *failed))
        if out is not None:
            maps = [np.asarray(x).tobytes() for x in jax.tree.leaves(aligned.maps)]
            mark = hashlib.sha256(repr(maps).encode()).hexdigest()
            view = aligned_view(other, aligned, mark=mark)
            works = view.works()
            about = _about(a, b, aligned, agreed, preserved)
            bounds = _limits(works, run.max_memory, run.threads)
            _, unchanged = carried_out(
                works, Path(out), bounds, mark, [reference, other],
                lambda: _extras(view.extras, about), run,
            )  # fmt: skip
    where = None if out is None else Path(out)
    seconds = time.monotonic() - began
    return AlignedCheckpoint(aligned, agreed, preserved, where, seconds, unchanged)


def _limits(works: Sequence[Work], max_memory: int | None, threads: int | None) -> Limits:
    """Those of the copy, within what the matching before it has left of the memory."""
    if max_memory is None:
        return limits(works, None, threads)
    try:
        return limits(works, max_memory - max(0, resident() - CONSTANT), threads)
    except MergeError:  # one tensor at a time, in memory that was used before
        return limits(works, max_memory, 1)._replace(hold=0)


def _about(
    a: Path_, b: Path_, aligned: Aligned, agreed: Sequence[Agreement], preserved: Verdict
) -> dict[str, Any]:
    reasons = {row.space: row.reason for row in aligned.report.spaces}
    return {
        "reference": str(a),
        "source": str(b),
        "exact": preserved.exact,
        "exactness": str(preserved),
        "distance": dict(zip(("before", "after"), aligned.distance, strict=True)),
        "spaces": [{**m._asdict(), "lost": reasons[m.space]} for m in aligned.matches],
        "within": aligned.within,
        "notes": list(aligned.notes),
        "agreement": [agreement._asdict() for agreement in agreed],
    }


def _extras(
    extras: Mapping[str, bytes | Path], about: Mapping[str, Any]
) -> dict[str, bytes | Path]:
    out = {name: data for name, data in extras.items() if carried(name)}
    out["align.json"] = json.dumps(about, indent=2).encode() + b"\n"
    return out
