"""Growth of checkpoints on disk: planned from shapes, certified, computed while written."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from sail_jax.architectures import Rules
from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.formats import hub
from sail_jax.checkpoint.formats.extras import carried, config_of
from sail_jax.checkpoint.formats.folders import admit
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Ready,
    RunOptions,
    bounds,
    carried_out,
    check_options,
    codes_of_output,
    notes_on_format,
    opened,
    unselected,
)
from sail_jax.checkpoint.planning import cards
from sail_jax.checkpoint.sources.agreement import Agreement, Certify, verdict
from sail_jax.checkpoint.sources.grown import (
    ConfigOrPath,
    Target,
    growth_view,
    measured,
    read_target,
    require_exact,
)
from sail_jax.checkpoint.sources.requantised import Requantisation
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument
from sail_jax.growth import networks
from sail_jax.growth.named import METHODS

Path_ = str | PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Growing(Ready):
    """A growth before its execution: everything is known except the values.

    Its input is open until the context of `growing` is left.

    Attributes:
      view: The larger network as a checkpoint, computed as it is read.
      growth: The plan.
      about: The content of growth.json.
      stated: The configuration of the input; empty if none is known.
      checkpoint: The input.
      codes: The weights to write in codes; None for none.
    """

    view: View
    growth: networks.Growth
    about: Mapping[str, Any]
    stated: Mapping[str, Any]
    checkpoint: Checkpoint
    codes: Requantisation | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Grown(Result):
    """The result of `grow_checkpoint`.

    Attributes:
      growth: The plan that was executed.
      agreement: How much the outputs of the two networks differ; empty if they were not run.
      verdict: Whether the function is preserved, according to the run.
    """

    growth: networks.Growth
    agreement: tuple[Agreement, ...]
    verdict: Verdict


@contextlib.contextmanager
def growing(
    path: Path_,
    to: Target,
    method: str = "lemon",
    *,
    seed: int = 0,
    config: ConfigOrPath | None = None,
    rules: Rules | None = None,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> Iterator[Growing]:
    """Opens a checkpoint and plans its growth, as a context manager.

    Only pruning methods read tensors, to choose the units that stay.

    Args:
      path: The checkpoint of the smaller network.
      to: The target of the growth; see `grow_checkpoint`.
      method: The name of a growth method.
      seed: The seed of the method's random draws.
      config: The configuration of the input, or its path; by default its config.json.
      rules: The spaces of the tensors, for unknown architectures.
      run: Options of the run.
      **options: Options of `sail_jax.growth.plan` and of the method.

    Yields:
      The growth, ready to be executed.

    Raises:
      ValueError: If the checkpoint cannot be opened, the growth cannot be planned, or `run` does
        not give enough memory.
    """
    with opened(path, run) as checkpoint:
        stated = config_of(checkpoint.extras) if config is None else read_target(config)
        view, made = growth_view(
            checkpoint, to, method, seed=seed, config=stated, rules=rules,
            allow_nonfinite=run.allow_nonfinite, **options,
        )  # fmt: skip
        made = dataclasses.replace(made, notes=(*unselected(checkpoint), *made.notes))
        works = view.works()
        if (codes := codes_of_output(checkpoint, works, run)) is not None:
            made = dataclasses.replace(made, notes=(*made.notes, codes.note()))
        about = {
            "source": hub.called(path),
            "method": method,
            "seed": seed,
            "options": {name: value for name, value in options.items() if name != "scores"},
            "changes": {
                key: [stated.get(key), value]
                for key, value in made.config.items()
                if stated.get(key) != value
            },
            **_exactness(Verdict()),
            "spaces": [
                {"space": s.space, "family": str(s.family), "defect": s.defect, "lost": s.lost}
                for s in made.report.spaces
            ],
            "notes": list(made.notes),
        }
        # The `mark` of a computed tensor identifies its computation. With shapes and dtypes alone,
        # another method or seed with the same target could resume this output.
        marks = sorted({getattr(x, "mark", "") for x in view.tensors.values()})
        shapes = [(w.name, str(w.dtype), w.shape) for w in works]
        mark = hashlib.sha256(repr([marks, shapes]).encode()).hexdigest()
        yield Growing(
            view=view, growth=made, works=works, fingerprint=mark, about=about, stated=stated,
            limits=bounds(works, run, coded=codes is not None), checkpoint=checkpoint, codes=codes,
        )  # fmt: skip


def grow_checkpoint(
    path: Path_,
    out: Path_,
    to: Target,
    method: str = "lemon",
    *,
    seed: int = 0,
    config: ConfigOrPath | None = None,
    rules: Rules | None = None,
    certify: Certify = None,
    run: RunOptions = DEFAULTS,
    before: Callable[[Growing], None] | None = None,
    **options: Any,
) -> Grown:
    """Grows a checkpoint into one of a larger network, or prunes it, tensor by tensor.

    The output has the new config.json, the input's plain files, a model card, and a growth.json.
    This file records the operations, the losses that the axes show, and whether a run of both
    networks shows that the function is preserved.

    Args:
      path: The checkpoint of the smaller network.
      out: The path of the larger one.
      to: The configuration of the larger network (a mapping, or the path of a config.json), its
        entries that change, or factors such as `{"width": 2, "depth": 4}`.
      method: The name of a growth method, a key of `sail_jax.growth.METHODS`.
      seed: The seed of the method's random draws.
      config: The configuration of the input, or its path; by default its config.json.
      rules: The spaces of the tensors, for unknown architectures.
      certify: Whether both networks are also run on probe inputs, in float32 and in the dtype of
        the checkpoint; or a function `outputs(tensors, config)` that runs them. By default they are
        run if the architecture is known and both fit in 1 GiB.
      run: Options of the run, and of the output's files.
      before: Called when everything except the values is known, before any tensor is read.
      **options: Options of `sail_jax.growth.plan` and of the method. With `require_lossless`,
        growth is also refused unless both networks were run and agree.

    Returns:
      The result.

    Raises:
      ValueError: Errors of `sail_jax.growth.plan`, CheckpointError and MergeError.
      TypeError: If an option of `run` is among the options.
      CheckpointError: If growth must be lossless (`require_lossless`) and outputs differ, or the
        networks were not run.

    >>> import tempfile
    >>> import numpy as np
    >>> from sail_jax.checkpoint import load_checkpoint, save_checkpoint
    >>> folder = tempfile.mkdtemp()
    >>> small = {"in": np.ones((4, 3), np.float32), "out": np.ones((2, 4), np.float32)}
    >>> save_checkpoint(f"{folder}/small", small)
    >>> axes = (("in", "hidden x*"), ("out", "y hidden*"))
    >>> rules = Rules(axes, {"x": "outer", "y": "outer", "hidden": "relu"})
    >>> grown = grow_checkpoint(f"{folder}/small", f"{folder}/large", {"hidden": 6}, rules=rules)
    >>> {name: x.shape for name, x in load_checkpoint(grown.out).items()}
    {'in': (6, 3), 'out': (2, 6)}
    """
    began = time.monotonic()
    check_options(options)
    admit(Path(out), [path], run.resume, run.force)
    with growing(
        path, to, method, seed=seed, config=config, rules=rules, run=run, **options
    ) as ready:
        if before is not None:
            before(ready)
        if run.part is not None and not options.get("require_lossless"):
            # The process that joins the parts runs the networks, and writes the result.
            certify = False
        agreed, failed = measured(
            ready.view, ready.growth, ready.stated, certify=certify, max_memory=run.max_memory
        )
        if options.get("require_lossless"):
            require_exact(
                path, agreed, failed,
                f"{argument('certify', 'True')} runs them at any size, and "
                f"{argument('certify', '...')} (MODULE:FUNCTION) runs your forward pass",
            )  # fmt: skip
        preserved = verdict(agreed)
        notes = [*ready.growth.notes, *failed, *notes_on_format(ready.works, Path(out), run)]
        about = {**ready.about, **_exactness(preserved)}
        about |= {"agreement": [run.record() for run in agreed], "notes": notes}
        _, unchanged = carried_out(
            ready.works, Path(out), ready.limits, ready.fingerprint, [ready.checkpoint],
            lambda: _extras(ready.view, about, Path(out).name), run, codes=ready.codes,
            divisible=True,
        )  # fmt: skip
    return Grown(
        growth=ready.growth, agreement=agreed, verdict=preserved, out=Path(out),
        tensors=len(ready.growth.leaves), notes=tuple(notes), seconds=time.monotonic() - began,
        unchanged=unchanged, requantized=ready.codes.errors if ready.codes else {},
    )  # fmt: skip


def _exactness(preserved: Verdict) -> dict[str, Any]:
    """Whether the function is preserved, for growth.json."""
    return {"exact": preserved.exact, "exactness": str(preserved)}


def _extras(view: View, about: Mapping[str, Any], name: str) -> dict[str, bytes | Path]:
    """The plain files of the output."""
    extras = {n: data for n, data in view.extras.items() if carried(n)}
    prunes = METHODS[about["method"]].prunes
    card = cards.growth_card(about, name, "config.json" in extras, prunes=prunes)
    extras["README.md"] = card.encode()
    extras["growth.json"] = json.dumps(about, indent=2, default=str).encode() + b"\n"
    return extras
