"""Alignment: maps that move the units of one network into the coordinates of another network.

Two networks may compute the same function although their hidden units differ in order, sign, scale
or rotation. The functions here compare the parameters or the activations of two networks, and
return one `SpaceMap` per feature space. `change_basis` applies these maps. The moved network
computes the same function as before. Merging it with the first one averages corresponding units.
"""

from sail_jax.align.activations import Moments, activation_matching, moments, pool, stream
from sail_jax.align.assignment import auction, auction_gap, hungarian
from sail_jax.align.blocks import block_exactness, change_blocks, nested
from sail_jax.align.folding import fold_scales
from sail_jax.align.many import Common, match_many, merge_many
from sail_jax.align.matching import Matching, match_weights, weight_matching
from sail_jax.align.statistics import repair, reset_statistics
from sail_jax.align.straight_through import StraightThrough, straight_through
from sail_jax.align.transport import (
    LayerTransport,
    barycentric,
    sinkhorn,
    transport_layers,
    transport_units,
)
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = [
    "Common",
    "LayerTransport",
    "Matching",
    "Moments",
    "StraightThrough",
    "activation_matching",
    "auction",
    "auction_gap",
    "barycentric",
    "block_exactness",
    "change_blocks",
    "fold_scales",
    "hungarian",
    "match_many",
    "match_weights",
    "merge_many",
    "moments",
    "nested",
    "pool",
    "repair",
    "reset_statistics",
    "sinkhorn",
    "straight_through",
    "stream",
    "transport_layers",
    "transport_units",
    "weight_matching",
]
