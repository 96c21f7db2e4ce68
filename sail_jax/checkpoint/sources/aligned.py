"""Aligns checkpoints: finds maps, space by space, that move one network close to another.

`align_maps` reads the tensors of both, a few at a time, and returns maps. `aligned_view` is the
second checkpoint with these maps applied as it is read. The matching itself is in `sail_jax.align`.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from sail_jax import architectures
from sail_jax.align.blocks import block_exactness, change_blocks, nested
from sail_jax.align.experts import (
    Experts,
    Order,
    Ordered,
    experts_of,
    match_experts,
    permute_experts,
)
from sail_jax.align.matching import Matching, families, match_weights
from sail_jax.align.problem import PIECE, cuts, recurrent
from sail_jax.architectures import Rules
from sail_jax.basis.certificate import Report, SpaceReport
from sail_jax.basis.change_basis import unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.checkpoint.executor import CONSTANT, mib
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.sources.computed import Computed, rebased
from sail_jax.checkpoint.sources.nearness import Match, Unread, compared
from sail_jax.checkpoint.sources.programs import Programs, in_own_width
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import argument, nearest
from sail_jax.configurations import Config, differences
from sail_jax.growth.targets import check_stated, layer_count
from sail_jax.interop import transformers
from sail_jax.merging import random_bits
from sail_jax.merging.tensors import Tensor

FAMILIES = {
    "permutation": Family.PERMUTATION,
    "signed": Family.SIGNED_PERMUTATION,
    "monomial": Family.POSITIVE_MONOMIAL,
    "orthogonal": Family.ORTHOGONAL,
    "linear": Family.LINEAR,
}


class Aligned(NamedTuple):
    """The maps that move one network close to another, and their effects.

    Attributes:
      spec: The spaces of the network's tensors.
      maps: A map for each matched space, for `change_blocks(params, spec, maps, within)`.
      report: The losses of each map according to the axes, if any.
      history: The weighted distances between the networks that `match_weights` reports.
      within: The spaces with a separate map for each unit of a block, and the block of each.
      matches: For each matched space, the number of moved units and the similarity of its tensors.
      distance: |a - b| / |a| over all floating tensors, before and after.
      notes: Notes for the user, a sentence each.
      experts: The experts of each layer of a mixture.
      orders: The order of a layer's experts, by the name of their space. The experts are reordered
        first, and the maps are for the network in this order.
    """

    spec: Spec
    maps: dict[str, SpaceMap]
    report: Report
    history: tuple[float, ...]
    within: dict[str, str]
    matches: tuple[Match, ...]
    distance: tuple[float, float]
    notes: tuple[str, ...]
    experts: tuple[Experts, ...] = ()
    orders: Mapping[str, Order] = MappingProxyType({})

    def moved(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Applies the maps to the parameters of the second network, arrays by name."""
        return change_blocks(
            permute_experts(params, self.experts, self.orders), self.spec, self.maps, self.within
        )


def spec_of(
    checkpoint: Checkpoint,
    config: Config | None = None,
    spec: Spec | Rules | None = None,
) -> Spec:
    """Finds the spaces of a checkpoint's tensors.

    Args:
      checkpoint: The checkpoint; only shapes and dtypes are used.
      config: The configuration of the network; by default its config.json.
      spec: The spec itself, or rules that give it. The default is the table of the configuration's
        architecture. Without such a table, the spec is derived from the forward pass of its class
        in transformers, if transformers, torch and torchax are installed.

    Returns:
      The spec.

    Raises:
      ValueError: If neither a configuration nor a spec is known, the architecture is unknown, or
        rules or configuration do not match the tensors.
    """
    if isinstance(spec, Spec):
        return spec
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in checkpoint.tensors.items()}
    if spec is not None:
        return spec.spec(shapes)
    config = config or config_of(checkpoint.extras) or architectures.of_tree(shapes)
    if not config:
        raise CheckpointError(
            f"{checkpoint.path}: config.json is missing: give its path with "
            f"{argument('config', '...')}, or the spaces of the tensors with "
            f"{argument('spec', '...')}"
        )
    try:
        family = architectures.of(config)
    except ValueError:
        if not transformers.available():
            raise
        return transformers.spec_of_config(config, shapes).spec
    rules = family.rules(config)
    counts = layer_count(rules, shapes)
    resolved = rules.spec(shapes)
    check_stated(config, rules, resolved, counts)
    return resolved


def matchable(spec: Spec, patterns: Sequence[str] | str | None = None) -> list[str]:
    """Lists the spaces that can be matched: inner spaces with interchangeable units.

    Args:
      spec: The spaces of a network.
      patterns: Shell patterns of space names, one or several. None for all.

    Returns:
      The names that match, in the order of the spec.

    Raises:
      ValueError: If a pattern matches no such space; the message suggests similar names.
    """
    inner = [s.name for s in spec.spaces if not {"outer", "stack"} & set(s.nonlinearity.split())]
    if patterns is None:
        return inner
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"spaces must be patterns of names, got {patterns!r}")
    for pattern in patterns:
        if not fnmatch.filter(inner, pattern):
            outer = fnmatch.filter((s.name for s in spec.spaces), pattern)
            why = (
                f"only {outer[0]!r}, which cannot be matched: it is the network's input or output, "
                "or its units are not interchangeable (rotary pairs, layers)"
                if outer
                else f"no space{nearest(pattern, inner)}"
            )
            raise ValueError(f"spaces {pattern!r} matches {why}")
    return [name for name in inner if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def align_maps(
    reference: Checkpoint,
    other: Checkpoint,
    config: Config | None = None,
    *,
    spec: Spec | Rules | None = None,
    method: str = "weights",
    family: str | Family | Mapping[str, str | Family] = "permutation",
    spaces: Sequence[str] | str | None = None,
    within: Mapping[str, str] | None = None,
    normalize: bool = True,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    max_sweeps: int = 100,
    max_memory: int | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Aligned:
    """Finds the maps that move a checkpoint close to another one of the same architecture.

    Both networks are compared weight by weight, as `sail_jax.align.match_weights` does. Tensors are
    read on demand, so a whole network need not fit into memory.

    Args:
      reference: The checkpoint that stays unchanged.
      other: The checkpoint that is moved.
      config: The configuration of `other`; see `spec_of`.
      spec: The spec or its rules; see `spec_of`.
      method: "weights", the only method without data.
      family: One of `FAMILIES`, or a `Family`. A single family is used in every space that allows
        it. The other spaces are permuted, and `notes` list them. In a mapping from patterns of
        space names, each space must allow its family.
      spaces: Shell patterns of the spaces to match. None for all that can be matched.
      within: Spaces that are matched block by block, such as the units of each head, and the block
        of each. None for all that allow it (`sail_jax.align.nested`).
      normalize: Whether the weight of tensor t is 1 / (|reference_t| |other_t|) unless `weights`
        has it. If not, it is 1, as published.
      weights: The weights of single tensors in the objective, by path. If `spec` is not given, a
        tensor that reads and writes one space (such as in the head of BERT) has the weight 0.
      seed: The seed of the order in which spaces are visited.
      max_sweeps: The largest number of visits of all spaces.
      max_memory: Bytes that the process may use. The remainder caches tensors between visits; by
        default tensors are read again.
      progress: Called as `progress(sweep, space)` before a space is visited.

    Returns:
      The maps, and their effects.

    Raises:
      ValueError: If the checkpoints differ in tensors, shapes or sizes in their configurations, a
        name is unknown, a space does not allow its family, or `max_memory` is too small.
    """
    if method != "weights":
        raise ValueError(
            f"unknown method {method!r}: checkpoints are matched by 'weights'; matching by "
            "activations needs data, see sail_jax.align.activation_matching"
        )
    for name, value in {"seed": seed, "max_sweeps": max_sweeps}.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{name} must be a whole number, not negative, got {value!r}")
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize must be True or False, got {normalize!r}")
    _check_alike(reference, other)
    resolved = spec_of(other, config, spec)
    flat, _ = unfused(resolved)
    layers, chosen = to_match(resolved, other, spaces)
    notes = _differing(reference, config or config_of(other.extras), spec)
    weights = dict(weights or {})
    # A map acts on such a tensor twice, so its term of the distance is not linear in the map.
    for path, name in recurrent(flat).items():
        if spec is None and name in chosen and path not in weights:
            weights[path] = 0.0
            notes.append(f"{path} reads and writes {name}: it is moved, but has weight 0")
    kinds, more = _families(resolved, family, chosen)
    notes += more
    inside = nested(resolved) if within is None else dict(within)
    inside = {
        name: block
        for name, block in inside.items()
        if name in kinds and kinds.get(block, Family.PERMUTATION) == Family.PERMUTATION
    }
    # Leaves are read again for each array, so `keep` determines how much stays in memory.
    first, second = (
        {name: Unread(x) for name, x in checkpoint.tensors.items()}
        for checkpoint in (reference, other)
    )
    with in_own_width((*reference.tensors.values(), *other.tensors.values())):
        ordered = match_experts(first, second, resolved, layers)
        orders = {name: found.order for name, found in ordered.items()}
        _, (apart, _) = compared(first, second, resolved, {}, {}) if orders else ((), (0.0, 0.0))
        second = permute_experts(second, layers, orders)
        match = Matching({}, (0.0,), True) if not kinds else match_weights(
            first, second, resolved, family=kinds, spaces=list(kinds), within=inside,
            normalize=normalize, weights=weights, key=random_bits.key(seed), max_sweeps=max_sweeps,
            keep=_kept(resolved, inside, kinds, max_memory), progress=progress,
        )  # fmt: skip
        matches, distance = compared(first, second, resolved, match.maps, inside)
        report = block_exactness(resolved, match.maps, inside)
    if orders:
        distance = apart, distance[1]
        matches = (*(_match(name, found) for name, found in ordered.items()), *matches)
        # Tensors are reordered; no entry changes.
        own = (SpaceReport(name, Family.PERMUTATION, 0.0, "") for name in orders)
        report = Report((*own, *report.spaces))
    if not match.converged:
        notes.append(f"stopped after {max_sweeps} sweeps, while still improving")
    return Aligned(
        resolved, match.maps, report, match.distance, inside, matches, distance, tuple(notes),
        layers, orders,
    )  # fmt: skip


def to_match(
    spec: Spec, checkpoint: Checkpoint, patterns: Sequence[str] | str | None = None
) -> tuple[tuple[Experts, ...], list[str]]:
    """Lists the layers with experts to reorder, and the other spaces to match.

    Args:
      spec: The spaces of a network.
      checkpoint: Its checkpoint; only shapes are used.
      patterns: Shell patterns of names, including experts such as "expert.*". None for all.

    Returns:
      The layers, and the names of the spaces.

    Raises:
      ValueError: As `matchable` does.
    """
    layers = experts_of(spec, checkpoint.tensors)
    patterns = [patterns] if isinstance(patterns, str) else patterns
    # Stacked experts are a space of the spec, which is reordered before others are matched.
    stacks = {layer.stack for layer in layers}
    # That function rejects an argument that is not a list of patterns.
    if not layers or not isinstance(patterns, Sequence):
        return layers, [name for name in matchable(spec, patterns) if name not in stacks]
    names = [name for layer in layers for name in (layer.space, layer.stack)]
    own = [p for p in patterns if isinstance(p, str) and fnmatch.filter(names, p)]
    inner = [s.name for s in spec.spaces if s.name not in stacks]
    rest = [p for p in patterns if p not in own or fnmatch.filter(inner, p)]
    named = tuple(
        layer for layer in layers if any(fnmatch.filter((layer.space, layer.stack), p) for p in own)
    )
    chosen = matchable(spec, rest) if rest or not own else []
    return named, [name for name in chosen if name not in stacks]


def _match(space: str, found: Ordered) -> Match:
    """Makes the row of a layer's experts."""
    moved = int(np.sum(found.order != np.arange(len(found.order))))
    return Match(space, "permutation", len(found.order), moved, found.before, found.after)


def _check_alike(reference: Checkpoint, other: Checkpoint) -> None:
    """Raises a CheckpointError unless both have the same tensors, with the same shapes."""
    for a, b in ((reference, other), (other, reference)):
        for name in a.tensors:
            if name not in b.tensors:
                raise CheckpointError(
                    f"'{name}' of {a.path} is missing in {b.path}: only networks of one "
                    "architecture can be aligned"
                )
    for name, tensor in reference.tensors.items():
        if tensor.shape != (shape := other.tensors[name].shape):
            raise CheckpointError(
                f"'{name}' has shape {list(tensor.shape)} in {reference.path} and {list(shape)} in "
                f"{other.path}: only networks of one size can be aligned; grow the smaller first"
            )


def _differing(
    reference: Checkpoint, config: Config | None, spec: Spec | Rules | None
) -> list[str]:
    """Describes the entries in which the two configurations differ.

    Raises a ValueError if such an entry is a size: networks with equal tensors may have different
    heads.
    """
    own = config_of(reference.extras)
    if spec is not None or not own or not config:
        return []
    try:
        family = architectures.of(config)
        sizes = set(dict(family.rules(config).settings))
    except ValueError:
        # For an unknown architecture, any number may be a size.
        sizes = {key for key, value in own.items() if isinstance(value, int | float)}
        sizes = {key for key in sizes if not key.endswith("_token_id")}
    notes = []
    for key, (mine, theirs) in differences(own, config).items():
        if key in sizes:
            raise CheckpointError(
                f"{key!r} is {mine!r} in {reference.path} and {theirs!r} in the other: only "
                "networks of one architecture can be aligned"
            )
        notes.append(f"{key!r} differs between the two configurations: {mine!r} and {theirs!r}")
    return notes


def _families(
    spec: Spec, family: str | Family | Mapping[str, str | Family], chosen: Sequence[str]
) -> tuple[dict[str, Family], list[str]]:
    """Returns each space's family, and sentences about spaces that do not allow it."""
    if isinstance(family, Mapping):
        named = {pattern: _family(kind) for pattern, kind in family.items()}
        return families(spec, named, chosen), []
    kind, out, notes = _family(family), {}, []
    for name in chosen:
        try:
            out |= families(spec, kind, [name])
        except ValueError as error:
            if kind == Family.PERMUTATION:
                raise
            out[name] = Family.PERMUTATION
            notes.append(f"permuted only: {error}")
    return out, notes


def _family(name: str | Family) -> Family:
    """Looks up a family by name."""
    if isinstance(name, Family):
        return name
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}{nearest(name, FAMILIES)}")
    return FAMILIES[name]


def _kept(
    spec: Spec, within: Mapping[str, str], chosen: Mapping[str, Family], max_memory: int | None
) -> int:
    """Returns the bytes of tensors to cache between visits: the remainder of `max_memory`, or 0.

    The system has its own cache of the files that were read, and frees it when necessary.
    """
    flat, _ = unfused(spec)
    largest = 0
    for leaf in flat.leaves:
        shape = tuple(n or 1 for n in flat.shape(leaf.path))
        whole = cuts(shape, leaf.axes, chosen) == [None]
        largest = max(largest, math.prod(shape) if whole else PIECE)
    costs = [
        spec.space(name).size ** 2 * (spec.space(within[name]).size if name in within else 1)
        for name in chosen
    ]
    # For the largest tensor or piece: each network as read, in float32, moved, and laid out for the
    # product. For the largest space: the sum of products, a term of it, this term in float32, and
    # the solver's memory. Half as much is added for memory that the allocator keeps, and for
    # kernels of every shape.
    least = CONSTANT + 3 * (8 * 4 * largest + 5 * 8 * max(costs, default=0)) // 2
    if max_memory is None:
        return 0
    if max_memory < least:
        raise ValueError(
            f"{argument('max_memory')}: matching these spaces takes at least "
            f"{mib(least)}, got {max_memory >> 20} MiB"
        )
    return max_memory - least


def aligned_view(
    other: Checkpoint, aligned: Aligned, *, how: str = "aligned", mark: str = ""
) -> View:
    """Makes a checkpoint of the moved network, whose tensors are computed as they are read.

    Args:
      other: The checkpoint that `align_maps` moved.
      aligned: The result of `align_maps`.
      how: A text added to the sources of tensors, in messages.
      mark: Identifies these maps in fingerprints; see `Computed`.

    Returns:
      The view. Closing it closes `other`.
    """
    if aligned.orders:
        programs = Programs()

        def take(tensor: Tensor, order: Order) -> Computed:
            like = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            return Computed(tensor.name, like, [tensor], _rows, order, programs, how=how, mark=mark)

        ordered = permute_experts(other.tensors, aligned.experts, aligned.orders, take)
        other = View([other], ordered)
    return rebased(other, aligned.spec, aligned.maps, within=aligned.within, how=how, mark=mark)


def _rows(order: jax.Array, x: jax.Array) -> jax.Array:
    """Reorders rows of a router."""
    return x[order]
