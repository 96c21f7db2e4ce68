"""A checkpoint as that of a larger network, whose tensors are computed as they are read."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sail_jax import architectures
from sail_jax.architectures import Rules
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError, strict_json
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.sources.agreement import (
    Agreement,
    Arrays,
    Certify,
    certified,
    verdict,
    wanted,
)
from sail_jax.checkpoint.sources.computed import Computed
from sail_jax.checkpoint.sources.nearness import Unread
from sail_jax.checkpoint.sources.programs import Programs
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument
from sail_jax.configurations import Config
from sail_jax.growth import networks
from sail_jax.growth.named import METHODS
from sail_jax.interop import transformers
from sail_jax.merging import random_bits

_MAX_CONFIG = 4 << 20


ConfigOrPath = Config | str | PathLike[str]
"""A configuration, or the path of a config.json or of its folder."""
Target = ConfigOrPath
"""What a network grows to: a configuration or its path, entries that change, or factors."""


def read_target(to: ConfigOrPath) -> Config:
    """Reads the configuration of a network.

    Args:
      to: The configuration itself, or the path of a config.json or of its folder.

    Returns:
      The configuration; a mapping is returned as it is.

    Raises:
      CheckpointError: If there is no such file, it is larger than 4 MiB, or it is no JSON object.
    """
    if isinstance(to, Mapping):
        return to
    if not isinstance(to, str | PathLike):
        raise CheckpointError(
            f"expected a configuration, or the path of one (config.json), got {type(to).__name__}"
        )
    path = Path(to)
    path = path / "config.json" if os.path.isdir(path) else path
    # pathlib would raise an error for what is too long to be a path.
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no configuration is there (a config.json, or its folder)")
    if path.stat().st_size > _MAX_CONFIG:
        raise CheckpointError(f"{path}: too long for a configuration")
    return strict_json(path.read_bytes(), str(path))


def growth_view(
    checkpoint: Checkpoint,
    to: Target,
    method: str = "lemon",
    *,
    seed: int = 0,
    config: Config | None = None,
    rules: Rules | None = None,
    allow_nonfinite: bool = True,
    **options: Any,
) -> tuple[View, networks.Growth]:
    """Plans the growth of an open checkpoint; only methods that prune read tensors.

    Args:
      checkpoint: The checkpoint of the smaller network.
      to: What it grows to, as `sail_jax.growth.plan` takes it, or the path of a config.json.
      method: The name of a growth method, of `sail_jax.growth.METHODS`.
      seed: The seed of what the method draws.
      config: The configuration of the checkpoint; by default its config.json.
      rules: Which spaces the tensors live in, for architectures that are not known.
      allow_nonfinite: Whether NaN and infinities are computed with.
      **options: As `sail_jax.growth.plan` takes them.

    Returns:
      The larger network as a checkpoint, and the plan it comes from.

    Raises:
      ValueError: If no configuration and no rules are known, or as `sail_jax.growth.plan` does.
    """
    own = config_of(checkpoint.extras) if config is None else config
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.tensors.items()
    }
    if not own and rules is None:
        own = architectures.of_tree(shapes) or {}
    if not own and rules is None:
        raise CheckpointError(
            f"{checkpoint.path} has no config.json: say where it is "
            f"({argument('config', '...')}), or which spaces the tensors live in "
            f"({argument('rules', '...')})"
        )
    key = random_bits.key(seed)
    wide = any(x.dtype == np.float64 for x in checkpoint.tensors.values())
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        known = _found(own, len(shapes)) if rules is None else rules
        prunes = isinstance(method, str) and method in METHODS and METHODS[method].prunes
        leaves = {n: Unread(x) for n, x in checkpoint.tensors.items()} if prunes else shapes
        made = networks.plan(leaves, own, read_target(to), method, key=key, rules=known, **options)
    # Everything that the numbers depend on: a resumed run must find the same mark.
    text = json.dumps(
        [method, seed, own, made.config, repr(rules), sorted(options.items())], default=repr
    )
    mark = hashlib.sha256(text.encode())
    if prunes:
        # Which units stay depends on the values, and on scores, of which `repr` is not all.
        for x in jax.tree.leaves(dict(made.maps)):
            mark.update(np.ascontiguousarray(x).tobytes())
    view = grown(
        checkpoint, made, how=f"grown ({method}, seed {seed})",
        mark=mark.hexdigest(), allow_nonfinite=allow_nonfinite,
    )  # fmt: skip
    return view, made


def grown(
    checkpoint: Checkpoint,
    growth: networks.Growth,
    *,
    how: str = "grown",
    mark: str = "",
    allow_nonfinite: bool = True,
) -> View:
    """Makes a checkpoint of the larger network that a growth describes.

    Args:
      checkpoint: The checkpoint of the smaller network.
      growth: What `sail_jax.growth.plan` makes of the checkpoint's shapes. Entries are those of
        `growth.leaf` under jit.
      how: What is added to the sources of tensors, in messages.
      mark: What tells this growth from others in fingerprints; see `Computed`.
      allow_nonfinite: Whether NaN and infinities are computed with.

    Returns:
      The view: every leaf of the growth, computed as it is read.

    Raises:
      CheckpointError: If the checkpoint lacks a tensor that the growth needs.
    """
    programs, tensors = Programs(), {}
    for path, like in growth.leaves.items():
        missing = [name for name in growth.needs(path) if name not in checkpoint.tensors]
        if missing:
            raise CheckpointError(
                f"{checkpoint.path}: '{path}' grows from '{missing[0]}', which is missing"
            )
        tensors[path] = Computed(
            path, like, [checkpoint.tensors[name] for name in growth.needs(path)],
            *growth.computation(path), programs,
            how=how, mark=mark, allow_nonfinite=allow_nonfinite,
        )  # fmt: skip
    return View([checkpoint], tensors, growth.config)


def _found(config: Config, tensors: int) -> Callable[[Config], Rules] | None:
    """Rules of an architecture without a table, where its class can be asked; None for others."""
    try:
        architectures.of(config)
    except ValueError:
        if transformers.name_of(config):
            return transformers.rules_of_config(config, tensors)
    return None


def measured(
    view: View,
    growth: networks.Growth,
    config: Config | None = None,
    *,
    certify: Certify = None,
    max_memory: int | None = None,
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Runs a network before and after its growth, if that is asked for or cheap.

    Args:
      view: The larger network, as `growth_view` returns it.
      growth: The plan that it comes from.
      config: The configuration of the smaller network, as `growth_view` was given it.
      certify: Whether the networks are to be run, or what runs them.
      max_memory: Bytes that the process may use; None for no limit.

    Returns:
      The agreements, and the reason if a run failed; either may be empty.

    Raises:
      CheckpointError: If a run was asked for and failed, or no forward pass is known.
    """
    base = view.base
    own = config_of(base.extras) if config is None else config

    def renew(arrays: Arrays) -> tuple[Arrays, Config]:
        return {path: growth.leaf(path, arrays) for path in growth.leaves}, growth.config

    entries = sum(math.prod(x.shape) for x in (*base.tensors.values(), *view.tensors.values()))
    return wanted(
        certify, entries, base.path, lambda: certified(base.tensors, own, renew, certify),
        max_memory,
    )  # fmt: skip


def require_exact(
    path: str | PathLike[str], agreed: Sequence[Agreement], failed: Sequence[str], remedy: str
) -> None:
    """Refuses a growth that was to be lossless, unless a run shows that it is.

    The plan has refused what the axes show to be lost. This is for what they do not show.

    Args:
      path: The checkpoint that messages name.
      agreed: The runs of both networks, as `measured` returns them.
      failed: Why a run failed, as `measured` returns it.
      remedy: What to do if nothing was run.

    Raises:
      CheckpointError: If outputs differ, or nothing was run.
    """
    said = verdict(agreed)
    if said.exact:
        return
    why = "".join(f" ({sentence})" for sentence in failed)
    found = f"the networks were not run{why}: {remedy}" if said.exact is None else f"it is {said}"
    raise CheckpointError(f"{path}: lossless growth was asked for, but {found}")
