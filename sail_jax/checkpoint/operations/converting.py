"""Converts checkpoints between MaxText, Tunix and Hugging Face, tensor by tensor."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.formats.table import of_file
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
    notes_on_format,
    unselected,
)
from sail_jax.checkpoint.sources.converted import as_hugging_face, as_tree, without_factors
from sail_jax.checkpoint.sources.grown import read_target
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument, nearest, one_of
from sail_jax.interop import layouts
from sail_jax.trees import some_paths

TARGETS = ("hugging-face", "maxtext", "tunix")


@dataclass(frozen=True, kw_only=True, repr=False)
class Converted(Result):
    """The result of `convert_checkpoint`.

    Attributes:
      source: The kind of the input: "hugging-face", "maxtext" or "tunix".
    """

    source: str


@dataclass(frozen=True)
class ConvertRequest(Request[Ready[Converted]]):
    """The arguments of `convert_checkpoint`."""

    path: Path_
    out: Path_
    to: str
    config: Any = None
    dtype: str | None = None
    lora_alpha: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, inputs: Inputs) -> Ready[Converted]:
        """Plans the conversion from the shapes of the tensors."""
        out, to, dtype, run = Path(self.out), self.to, self.dtype, inputs.run
        one_of(argument("to"), to, TARGETS)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(
                f"{argument('dtype')}: expected the name of a dtype, got {dtype!r}"
                f"{nearest(dtype, DTYPES)}"
            )
        wanted = None if dtype is None else DTYPES[dtype]
        inputs.admit(out, [self.path])
        view = checkpoint = inputs(self.path, adapters=True)
        known = config_of(checkpoint.extras) if self.config is None else read_target(self.config)
        # The configuration of a tree that was written by this function contains Hugging Face's
        # configuration.
        inner = known.get("hugging_face")
        known = inner if isinstance(inner, Mapping) else known
        if self.lora_alpha is not None:
            view = without_factors(checkpoint, self.lora_alpha)
        source, view, notes = _converted(view, to, known, wanted, self.options)
        works = view.works()
        # The name of a file determines its format; the default format of folders is not suitable
        # for trees.
        if to != "hugging-face" and run.format is None and of_file(out) is None:
            run = replace(run, format="orbax")
        return Ready(
            out=out, run=run, works=works, limits=bounds(works, run), view=view,
            fingerprint=repr([to, sorted({getattr(x, "mark", "") for x in view.tensors.values()})]),
            inputs=(checkpoint,), divisible=True, make=functools.partial(Converted, source=source),
            notes=(*unselected(checkpoint), *notes, *notes_on_format(works, out, run)),
        )  # fmt: skip


def convert_checkpoint(
    path: Path_,
    out: Path_,
    to: str,
    *,
    config: Any = None,
    dtype: str | None = None,
    lora_alpha: float | None = None,
    run: RunOptions = DEFAULTS,
    **options: Any,
) -> Converted:
    """Converts a checkpoint between MaxText, Tunix and Hugging Face.

    Trees are written in orbax's format, Hugging Face tensors as safetensors. The network's
    config.json is required, and is written with both. A tree is recognised by its paths and shapes,
    also inside a training state; other leaves are omitted.

    Args:
      path: The checkpoint.
      out: The path of the output.
      to: "hugging-face", "maxtext" or "tunix".
      config: The Hugging Face configuration of the network, or its path; by default the
        config.json next to the input.
      dtype: The dtype of the output, such as "float32"; by default the input's.
      lora_alpha: First adds the factors that qwix stores next to weights to these weights, with
        this alpha in qwix's rule.
      **options: To write a MaxText tree, options of `sail_jax.interop.layouts.links`:
        `scan_layers`, `param_scan_axis`, `vocab_size`. To read or write one, `rope`.

    Returns:
      The result.

    Raises:
      ValueError: If the input is not recognised, does not match the configuration, or an argument
        is invalid; CheckpointError and MergeError.
    """
    request = ConvertRequest(path, out, to, config, dtype, lora_alpha, options)
    return carried_out(request, run)


def _converted(
    checkpoint: Checkpoint,
    to: str,
    config: Mapping[str, Any],
    dtype: np.dtype | None,
    options: Mapping[str, Any],
) -> tuple[str, View, list[str]]:
    """Returns the kind of a checkpoint, its converted view, and notes for the user."""
    shapes = {name: x.shape for name, x in checkpoint.tensors.items()}
    notes: list[str] = []

    def widths(own: np.dtype) -> np.dtype:
        return dtype or own

    def widest(own: np.dtype) -> np.dtype:
        return own if dtype is None else np.promote_types(own, dtype)

    reading = {"rope": options["rope"]} if "rope" in options else {}
    try:
        if not config:
            raise ValueError(
                "the Hugging Face config.json of the network is needed; give its path with "
                f"{argument('config', '...')}"
            )
        source, view = "hugging-face", checkpoint
        if any(name.startswith("model.layers.") for name in shapes):
            if to == source:
                raise ValueError("these are Hugging Face tensors already")
            made = ()
        else:
            source, made, left = layouts.links_of(shapes, config, **reading)
            if left:
                notes.append(f"left out: {some_paths(left)}")
            # From tree to tree, only the last step rounds to a narrower dtype.
            between = widths if to == "hugging-face" else widest
            view = as_hugging_face(checkpoint, made, config, between)
        if to != "hugging-face":
            other = layouts.links(to, config, **options)
            made = (*made, *other)
            stacking = {k: options[k] for k in ("scan_layers", "param_scan_axis") if k in options}
            view = as_tree(view, other, layouts.tree_config(to, config, **stacking), widths)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    if rounded := [link for link in made if not link.exact]:
        kinds = sorted({link.leaf.rsplit("/", 2)[-2] for link in rounded})
        notes.append(
            f"scaled or shifted, and rounded once: {', '.join(kinds)}. Converted back through "
            "float32, tensors in bfloat16 are equal bit for bit"
        )
    if padding := max((link.padding for link in made), default=0):
        notes.append(f"{padding} rows of padding in the vocabulary of the tree")
    assert isinstance(view, View)
    return source, view, notes
