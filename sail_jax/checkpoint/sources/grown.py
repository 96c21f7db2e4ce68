"""Makes a larger network from a checkpoint, whose tensors are computed as they are read."""

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
from sail_jax.checkpoint.sources.programs import Programs, in_own_width
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
"""The target of a growth: a configuration or its path, changed entries, or factors."""


def read_target(to: ConfigOrPath) -> Config:
    """Reads the configuration of a network.

    Args:
      to: The configuration itself, or the path of a config.json or of its folder.

    Returns:
      The configuration; a mapping is returned as it is.

    Raises:
      CheckpointError: If the file does not exist, is larger than 4 MiB, or is not a JSON object.
    """
    if isinstance(to, Mapping):
        return to
    if not isinstance(to, str | PathLike):
        raise CheckpointError(
            f"expected a configuration, or the path of one (config.json), got {type(to).__name__}"
        )
    path = Path(to)
    path = path / "config.json" if os.path.isdir(path) else path
    # pathlib would raise an error for a text that is too long for a path.
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: expected a config.json, or a folder with one")
    if path.stat().st_size > _MAX_CONFIG:
        raise CheckpointError(f"{path} is too large for a configuration")
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
      to: The target, as `sail_jax.growth.plan` takes it, or the path of a config.json.
      method: The name of a growth method, of `sail_jax.growth.METHODS`.
      seed: The seed of the method's random draws.
      config: The configuration of the checkpoint; by default its config.json.
      rules: The spaces of the tensors, for unknown architectures.
      allow_nonfinite: Whether NaN and infinities enter the computation.
      **options: As `sail_jax.growth.plan` takes them.

    Returns:
      The larger network as a checkpoint, and its plan.

    Raises:
      ValueError: If neither a configuration nor rules are known, or as `sail_jax.growth.plan`.
    """
    own = config_of(checkpoint.extras) if config is None else config
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.tensors.items()
    }
    if not own and rules is None:
        own = architectures.of_tree(shapes) or {}
    if not own and rules is None:
        raise CheckpointError(
            f"{checkpoint.path}: config.json is missing: give its path with "
            f"{argument('config', '...')}, or the spaces of the tensors with "
            f"{argument('rules', '...')}"
        )
    key = random_bits.key(seed)
    with in_own_width(checkpoint.tensors.values()):
        known = _found(own, len(shapes)) if rules is None else rules
        prunes = isinstance(method, str) and method in METHODS and METHODS[method].prunes
        leaves = {n: Unread(x) for n, x in checkpoint.tensors.items()} if prunes else shapes
        made = networks.plan(leaves, own, read_target(to), method, key=key, rules=known, **options)
    # The mark covers everything that affects the values, and a resumed run must have the same mark.
    text = json.dumps(
        [method, seed, own, made.config, repr(rules), sorted(options.items())], default=repr
    )
    mark = hashlib.sha256(text.encode())
    if prunes:
        # The chosen units depend on the values, and on scores whose `repr` is incomplete.
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
      growth: The plan of `sail_jax.growth.plan` for the checkpoint's shapes. Entries equal
        `growth.leaf` under jit.
      how: A text added to the sources of tensors, in messages.
      mark: Identifies this growth in fingerprints; see `Computed`.
      allow_nonfinite: Whether NaN and infinities enter the computation.

    Returns:
      The view: every leaf of the growth, computed as it is read.

    Raises:
      CheckpointError: If a tensor that the growth requires is missing in the checkpoint.
    """
    programs, tensors = Programs(), {}
    for path, like in growth.leaves.items():
        missing = [name for name in growth.needs(path) if name not in checkpoint.tensors]
        if missing:
            raise CheckpointError(
                f"{checkpoint.path}: '{path}' needs '{missing[0]}', which is missing"
            )
        tensors[path] = Computed(
            path, like, [checkpoint.tensors[name] for name in growth.needs(path)],
            *growth.computation(path), programs,
            how=how, mark=mark, allow_nonfinite=allow_nonfinite,
        )  # fmt: skip
    return View([checkpoint], tensors, growth.config)


def _found(config: Config, tensors: int) -> Callable[[Config], Rules] | None:
    """Derives rules from an architecture's class in transformers; None if there are none."""
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
    """Runs a network before and after its growth, if the caller requests it or it is cheap.

    Args:
      view: The larger network, from `growth_view`.
      growth: Its plan.
      config: The configuration of the smaller network, as given to `growth_view`.
      certify: Whether to run the networks, or the function that runs them.
      max_memory: Bytes that the process may use; None for no limit.

    Returns:
      The agreements, and the reason if a run failed; either may be empty.

    Raises:
      CheckpointError: If a requested run failed, or no forward pass is known.
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
    """Refuses a growth with `require_lossless`, unless a run shows that it is lossless.

    The plan has already refused losses that follow from the axes. A run finds the others.

    Args:
      path: The checkpoint, for messages.
      agreed: The runs of both networks, from `measured`.
      failed: The reason why a run failed, from `measured`.
      remedy: The advice if nothing was run.

    Raises:
      CheckpointError: If outputs differ, or nothing was run.
    """
    said = verdict(agreed)
    if said.exact:
        return
    why = "".join(f" ({sentence})" for sentence in failed)
    found = said if said.exact is not None else f"the networks were not run{why}: {remedy}"
    raise CheckpointError(f"{path}: lossless growth is required, but {found}")
