"""Alignment: the maps that bring one network's units into the order, or frame, of another's.

The functions look at two networks (or at their activations) and return maps for `change_basis`,
under which the second computes what it did. Merging then averages units that do the same.
"""

from sail_jax.align.activations import Moments, activation_matching, moments, pool, stream
from sail_jax.align.assignment import auction, auction_gap, hungarian
from sail_jax.align.blocks import block_exactness, change_blocks, invert_blocks, nested
from sail_jax.align.folding import fold_scales
from sail_jax.align.many import Common, match_many, merge_many
from sail_jax.align.matching import Matching, match_weights, weight_matching
from sail_jax.align.statistics import repair, reset_statistics
from sail_jax.align.straight_through import StraightThrough, straight_through

__all__ = [
    "Common",
    "Matching",
    "Moments",
    "StraightThrough",
    "activation_matching",
    "auction",
    "auction_gap",
    "block_exactness",
    "change_blocks",
    "fold_scales",
    "hungarian",
    "invert_blocks",
    "match_many",
    "match_weights",
    "merge_many",
    "moments",
    "nested",
    "pool",
    "repair",
    "reset_statistics",
    "straight_through",
    "stream",
    "weight_matching",
]
