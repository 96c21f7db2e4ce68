"""Grows checkpoints on disk: plans from shapes, certifies, and streams tensors."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sail_jax.architectures import Rules
from sail_jax.basis.certificate import Verdict
from sail_jax.checkpoint.formats import hub
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.operations.results import Result
from sail_jax.checkpoint.operations.running import (
    DEFAULTS,
    Inputs,
    Path_,
    Ready,
    Request,
    RunOptions,
    bounds,
    carried_out,
    check_options,
    codes_of_output,
    notes_on_format,
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
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument
from sail_jax.growth import networks
from sail_jax.growth.named import METHODS


@dataclass(frozen=True, kw_only=True, repr=False)
class Grown(Result):
    """The result of `grow_checkpoint`.

    Attributes:
      growth: The plan that was executed.
      agreement: The differences between the outputs of the two networks; empty if they were not
        run.
      verdict: Whether the function is preserved, according to the run.
    """

    growth: networks.Growth
    agreement: tuple[Agreement, ...]
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Growing(Ready[Grown]):
    """A growth before its execution.

    Attributes:
      larger: The larger network as a checkpoint, computed as it is read.
      growth: The plan.
      about: The content of growth.json.
      stated: The configuration of the input; empty if none is known.
      request: The request.
    """

    larger: View
    growth: networks.Growth
    about: Mapping[str, Any]
    stated: Mapping[str, Any]
    request: "GrowRequest"

    def completed(self) -> "Growing":
        assert self.out is not None
        run, certify = self.run, self.request.certify
        lossless = self.request.options.get("require_lossless")
        if run.part is not None and not lossless:
            # The process that joins the parts runs the networks, and writes the result.
            certify = False
        agreed, failed = measured(
            self.larger, self.growth, self.stated, certify=certify, max_memory=run.max_memory
        )
        if lossless:
            require_exact(
                self.request.path, agreed, failed,
                f"{argument('certify', 'True')} runs them at any size, and "
                f"{argument('certify', '...')} (MODULE:FUNCTION) runs your forward pass",
            )  # fmt: skip
        preserved = verdict(agreed)
        notes = [*self.notes, *failed, *notes_on_format(self.works, self.out, run)]
        about = {**self.about, **_exactness(preserved)}
        about |= {"agreement": [one.record() for one in agreed], "notes": notes}
        return replace(
            self, notes=tuple(notes), files=_files(about, self.out.name, self.larger),
            make=functools.partial(
                Grown, growth=self.growth, agreement=agreed, verdict=preserved
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class GrowRequest(Request[Growing]):
    """The arguments of `grow_checkpoint`; `out` is None for a plan alone."""

    path: Path_
    out: Path_ | None
    to: Target
    method: str = "lemon"
    seed: int = 0
    config: ConfigOrPath | None = None
    rules: Rules | None = None
    certify: Certify = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, inputs: Inputs) -> Growing:
        """Plans the growth from shapes. Only pruning methods read tensors."""
        run, config = inputs.run, self.config
        inputs.admit(self.out, [self.path])
        checkpoint = inputs(self.path)
        stated = config_of(checkpoint.extras) if config is None else read_target(config)
        view, made = growth_view(
            checkpoint, self.to, self.method, seed=self.seed, config=stated, rules=self.rules,
            allow_nonfinite=run.allow_nonfinite, **self.options,
        )  # fmt: skip
        made = replace(made, notes=(*unselected(checkpoint), *made.notes))
        works = view.works()
        if (codes := codes_of_output(checkpoint, works, run)) is not None:
            made = replace(made, notes=(*made.notes, codes.note()))
        about = {
            "source": hub.called(self.path),
            "method": self.method,
            "seed": self.seed,
            "options": {name: value for name, value in self.options.items() if name != "scores"},
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
        # a run with another method or seed but the same target could resume this output.
        marks = sorted({getattr(x, "mark", "") for x in view.tensors.values()})
        shapes = [(w.name, str(w.dtype), w.shape) for w in works]
        mark = hashlib.sha256(repr([marks, shapes]).encode()).hexdigest()
        return Growing(
            out=None if self.out is None else Path(self.out), run=run, request=self, larger=view,
            view=view, growth=made, works=works, fingerprint=mark, about=about, stated=stated,
            limits=bounds(works, run, coded=codes is not None), inputs=(checkpoint,), codes=codes,
            notes=made.notes, make=Grown, divisible=True,
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
    """Grows a checkpoint to a larger network, or prunes it, tensor by tensor.

    The output has the new config.json, the input's plain files, a model card, and a growth.json.
    This file records the operations, the losses according to the axes, and whether a run of both
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
    check_options(options)
    request = GrowRequest(path, out, to, method, seed, config, rules, certify, options)
    return carried_out(request, run, before)


def _exactness(preserved: Verdict) -> dict[str, Any]:
    """Checks whether the function is preserved, for growth.json."""
    return {"exact": preserved.exact, "exactness": str(preserved)}


def _files(about: Mapping[str, Any], name: str, view: View) -> dict[str, bytes]:
    """Returns the files that a growth adds: a model card, and growth.json."""
    prunes = METHODS[about["method"]].prunes
    card = cards.growth_card(about, name, "config.json" in view.extras, prunes=prunes)
    about_text = json.dumps(about, indent=2, default=str)
    return {"README.md": card.encode(), "growth.json": about_text.encode() + b"\n"}
