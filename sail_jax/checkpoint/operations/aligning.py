"""Aligns checkpoints on disk: moves one network close to another, and writes it."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.executor import CONSTANT, Limits, MergeError, limits, resident
from sail_jax.checkpoint.formats import hub
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.table import needs
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    Ready,
    Request,
    RunOptions,
    carried_out,
    check_options,
    codes_of_output,
    notes_on_format,
    unselected,
)
from sail_jax.checkpoint.output.coding import HELD
from sail_jax.checkpoint.sources.agreement import (
    Agreement,
    Certify,
    certified,
    verdict,
    wanted,
)
from sail_jax.checkpoint.sources.aligned import Aligned, align_maps, aligned_view
from sail_jax.merging.work import Work


@dataclass(frozen=True, kw_only=True, repr=False)
class AlignedCheckpoint(Result):
    """The result of `align_checkpoints`.

    Attributes:
      aligned: The maps, the distance of the networks, and notes.
      agreement: The changes of the outputs; empty if the network was not run.
      verdict: Whether the function is preserved, according to the run.
      out: The path of the output; None if none was requested.
    """

    aligned: Aligned
    agreement: tuple[Agreement, ...]
    verdict: Verdict
    out: Path | None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class AlignRequest(Request[Ready[AlignedCheckpoint]]):
    """The arguments of `align_checkpoints`."""

    a: Path_
    b: Path_
    out: Path_ | None
    config: Mapping[str, Any] | None = None
    certify: Certify = None
    options: Mapping[str, Any] = field(default_factory=dict)
    found: "tuple[Aligned, tuple[Agreement, ...], tuple[str, ...]] | None" = None
    """What an earlier plan has found: the maps, whether the function is preserved, and notes."""

    def plan(self, inputs: Inputs) -> Ready[AlignedCheckpoint]:
        """Finds the maps, which requires the values of both networks, and plans the output."""
        run, out = inputs.run, None if self.out is None else Path(self.out)
        inputs.look_up([self.a, self.b], out)
        reference, other = inputs(self.a), inputs(self.b)
        found = self.found or self._found(reference, other, run)
        aligned, agreed, failed = found
        own_lines = unselected(other)
        of_a = [f"{hub.called(self.a)}: {x}" for x in reference.about() if x not in own_lines]
        notes = [*own_lines, *of_a, *aligned.notes, *failed]
        maps = jax.tree.leaves((aligned.maps, dict(aligned.orders)))
        # Tensors of the view are identified by their maps: a run with other maps makes a different
        # output and is not resumed.
        mark = hashlib.sha256(repr([np.asarray(x).tobytes() for x in maps]).encode()).hexdigest()
        view = aligned_view(other, aligned, mark=mark)
        works, codes = view.works(), None
        if out is not None:
            codes = codes_of_output(other, works, run)
            notes += [] if codes is None else [codes.note()]
            notes += notes_on_format(works, out, run)
        aligned, preserved = aligned._replace(notes=tuple(notes)), verdict(agreed)
        about = json.dumps(_about(self.a, self.b, aligned, agreed, preserved), indent=2)
        return Ready(
            out=out, run=run, works=works, fingerprint=mark, inputs=(reference, other),
            limits=_limits(() if out is None else works, run, HELD if codes else 0), view=view,
            codes=codes, notes=aligned.notes, files={"align.json": about.encode() + b"\n"},
            divisible=True, solved=replace(self, found=found, options={}), make=functools.partial(
                AlignedCheckpoint, aligned=aligned, agreement=agreed, verdict=preserved
            ),
        )  # fmt: skip

    def _found(
        self, reference: Checkpoint, other: Checkpoint, run: RunOptions
    ) -> tuple[Aligned, tuple[Agreement, ...], tuple[str, ...]]:
        """Finds the maps, and certifies them if requested."""
        aligned = align_maps(
            reference, other, self.config, max_memory=run.max_memory, **self.options
        )
        return aligned, *self._certified(aligned, other, run)

    def _certified(
        self, aligned: Aligned, other: Checkpoint, run: RunOptions
    ) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
        """Runs the network before and after the move, if requested, or if it is cheap."""
        own = self.config or config_of(other.extras) or {}
        # The process that joins the parts runs the network, and writes the result.
        certify = False if run.part is not None else self.certify

        def renew(arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            return aligned.moved(arrays), own

        # Both networks: before and after the move.
        entries = 2 * sum(math.prod(x.shape) for x in other.tensors.values())
        return wanted(
            certify, entries, self.b, lambda: certified(other.tensors, own, renew, certify),
            run.max_memory,
        )  # fmt: skip


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
    """Moves one checkpoint close to another by permuting its hidden units, or by other maps.

    A permutation of equivalent units leaves the network's function unchanged, and the two networks
    can then be merged. `b` is written in its new form, with its plain files and an align.json. This
    file records the operations on each space, and whether a run shows that the function is
    preserved.

    Args:
      a: The checkpoint that stays unchanged.
      b: The checkpoint that is moved; it has the same architecture and size.
      out: The path of the moved checkpoint. None only finds the maps.
      config: The configuration of `b`; by default its config.json.
      certify: Whether `b` is also run before and after, on probe inputs; or a function
        `outputs(tensors, config)` that runs it. By default it is run if its architecture is known
        and both networks fit in 1 GiB.
      **options: Options of `align_maps`, such as `family`, `spaces` or `spec`; except `max_memory`,
        which belongs to `run`.

    Returns:
      The result.

    Raises:
      ValueError: Errors of `align_maps`, CheckpointError and MergeError.
      TypeError: If an option of `run` is among the options.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), weight matching.

    >>> import tempfile
    >>> from sail_jax import spec
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> a = {"in": np.diag(np.float32([1, 2, 3])), "out": np.ones((1, 3), np.float32)}
    >>> b = {"in": a["in"][[2, 0, 1]], "out": a["out"]}  # the same units in another order
    >>> save_checkpoint(f"{folder}/a", a)
    >>> save_checkpoint(f"{folder}/b", b)
    >>> axes = {"in": "hidden x*", "out": "y hidden*"}
    >>> spaces = spec(a, axes, spaces={"{x,y}": "outer", "hidden": "relu"})
    >>> aligned = align_checkpoints(f"{folder}/a", f"{folder}/b", f"{folder}/out", spec=spaces)
    >>> bool((load_checkpoint(aligned.out)["in"] == a["in"]).all())
    True
    """
    check_options({k: v for k, v in options.items() if k != "progress"})
    return carried_out(AlignRequest(a, b, out, config, certify, options), run)


def _limits(works: Sequence[Work], run: RunOptions, sink: int) -> Limits:
    """The limits of the copy, within the memory that the matching has left."""
    max_memory, output = run.max_memory, needs(run.format)
    if max_memory is None:
        return limits(works, None, run.threads, output=output, sink=sink)
    try:
        # The matching's memory beyond the program is subtracted, since it is not returned to the
        # system before the copy begins.
        left = max_memory - max(0, resident() - CONSTANT)
        return limits(works, left, run.threads, output=output, sink=sink)
    # Then one tensor is copied at a time, in memory that the matching used before.
    except MergeError:
        return limits(works, max_memory, 1, output=output, sink=sink)._replace(hold=0)


def _about(
    a: Path_, b: Path_, aligned: Aligned, agreed: Sequence[Agreement], preserved: Verdict
) -> dict[str, Any]:
    """Returns the content of align.json."""
    lost = {row.space: row.lost for row in aligned.report.spaces}
    return {
        "reference": hub.called(a),
        "source": hub.called(b),
        "exact": preserved.exact,
        "exactness": str(preserved),
        "distance": dict(zip(("before", "after"), aligned.distance, strict=True)),
        "spaces": [{**m._asdict(), "lost": lost[m.space]} for m in aligned.matches],
        "within": aligned.within,
        "notes": list(aligned.notes),
        "agreement": [agreement.record() for agreement in agreed],
    }
