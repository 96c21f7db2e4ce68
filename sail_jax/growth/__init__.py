"""Growth methods for whole networks, and makers: maps that permute, prune, rotate, widen and
deepen.

`grow` and `plan` grow a whole network of a known architecture by a method of `METHODS`. `upcycle`
makes a mixture of experts from dense networks. A maker returns the map of one space and never sees
a parameter. `change_basis` applies the map, and `exactness` finds from its family whether it is
lossless. Fresh units, noise, masks and the rules for norms and layers are functions of parameters,
applied after the maps. Learned maps (LiGO, SAIL) are in `sail_jax.growth.learned`, which is
imported on first use.
"""

from typing import TYPE_CHECKING

from sail_jax.growth.basic import (
    flip,
    lemon_gain,
    pad,
    permute,
    prune,
    rescale,
    rotate,
    widen,
)
from sail_jax.growth.depth import (
    ORDERS,
    deepen,
    depth_up_scale,
    inserted,
    interleave,
    mix_layers,
    order,
    overwrite,
    stack_layers,
    unstack_layers,
)
from sail_jax.growth.fresh import (
    aki,
    break_symmetry,
    fresh_units,
    grown,
    mask_units,
    masked_layernorm,
    masked_rmsnorm,
    noise_pairs,
    ramp,
    scale_norms,
)
from sail_jax.growth.named import METHODS, Method
from sail_jax.growth.networks import Growth, grow, plan
from sail_jax.growth.optimizer import change_state, learning_rates
from sail_jax.growth.pruning import magnitude, unit_scores
from sail_jax.growth.upcycling import Expert, upcycle
from sail_jax.growth.width import (
    compensate,
    each_space,
    fpi,
    hypercloning,
    interpolate,
    lemon,
    principal,
    project,
    singular,
    split_readers,
    tile,
)
from sail_jax.lazy import lazily

if TYPE_CHECKING:
    from sail_jax.growth import learned

__getattr__, __dir__ = lazily(__name__, {"learned": ""})

__all__ = [
    "METHODS",
    "ORDERS",
    "Expert",
    "Growth",
    "Method",
    "aki",
    "break_symmetry",
    "change_state",
    "compensate",
    "deepen",
    "depth_up_scale",
    "each_space",
    "flip",
    "fpi",
    "fresh_units",
    "grow",
    "grown",
    "hypercloning",
    "inserted",
    "interleave",
    "interpolate",
    "learned",
    "learning_rates",
    "lemon",
    "lemon_gain",
    "magnitude",
    "mask_units",
    "masked_layernorm",
    "masked_rmsnorm",
    "mix_layers",
    "noise_pairs",
    "order",
    "overwrite",
    "pad",
    "permute",
    "plan",
    "principal",
    "project",
    "prune",
    "ramp",
    "rescale",
    "rotate",
    "scale_norms",
    "singular",
    "split_readers",
    "stack_layers",
    "tile",
    "unit_scores",
    "unstack_layers",
    "upcycle",
    "widen",
]
