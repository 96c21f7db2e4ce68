"""Merging methods by name: one expression each, one signature for all.

    method(models, base=None, *, weights=None, key=None, **knobs) -> merged

models: sequence of M pytrees; base: the pytree they were tuned from, of the same leaf paths and
shapes; weights: [M], finite; key: a PRNG key, ignored by methods that draw nothing. Floating leaves
are merged in float32 (float64 where a model has it) and cast once to the dtype of the base's leaf
(of the first model's, without a base); integer and bool leaves have to agree and are copied.

Below, delta_k = theta_k - base and w_k are the weights. All methods are pure, can be transformed by
`jit`, `vmap` and `grad` over arrays (not over strings, bools and the density of `ties`), and raise
as `task_vectors`, `apply` and their rules do. Under a transformation, values that are traced cannot
be checked and are taken on trust. Called eagerly, a method compiles once per shape of leaf; under
`jit`, which fuses its passes, once per leaf.

A dictionary of arrays, the variables of a Flax Linen module, the state of an NNX one:

>>> import flax.linen, flax.nnx, jax
>>> from sail_jax import methods
>>> base = {"kernel": jax.numpy.zeros(2)}
>>> tuned = [{"kernel": jax.numpy.array([1.0, 0.5])}, {"kernel": jax.numpy.array([-3.0, 0.5])}]
>>> methods.ties(tuned, base, density=1.0)["kernel"].tolist()
[-3.0, 0.5]
>>> dense, x = flax.linen.Dense(3), jax.numpy.ones((1, 2))
>>> variables = [dense.init(jax.random.key(seed), x) for seed in range(2)]
>>> dense.apply(methods.slerp(variables, t=0.5), x).shape
(1, 3)
>>> nets = [flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(seed)) for seed in range(2)]
>>> soup = methods.linear([flax.nnx.state(net) for net in nets])
>>> flax.nnx.update(nets[0], soup)
>>> nets[0](x).shape
(1, 3)

compat: programs that share a name differ. "paper", the default, is what the method's authors wrote;
"mergekit" is what that program computes, its defaults included (where it does not crash); a knob
that is None takes the default of either.
"""

from sail_jax.merging.merge import METHODS, Expression, expression, get, knobs, method
from sail_jax.methods.elementwise import (
    arcee_fusion,
    expo,
    magmax,
    nearswap,
    passthrough,
    pcb,
    ram,
    ramplus_tl,
    sce,
)
from sail_jax.methods.geometric import karcher, model_stock, multislerp, nuslerp, slerp
from sail_jax.methods.localize import (
    Localized,
    best_thresholds,
    consensus,
    emr,
    tall_masks,
)
from sail_jax.methods.sparse import (
    breadcrumbs,
    breadcrumbs_ties,
    dare_linear,
    dare_ties,
    della,
    della_linear,
    linear,
    merge,
    task_arithmetic,
    ties,
)
from sail_jax.methods.spectral import iso_c, iso_cts, opcm, tsv_m, wudi

__all__ = [
    "METHODS",
    "Expression",
    "Localized",
    "arcee_fusion",
    "best_thresholds",
    "breadcrumbs",
    "breadcrumbs_ties",
    "consensus",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "emr",
    "expo",
    "expression",
    "get",
    "iso_c",
    "iso_cts",
    "karcher",
    "knobs",
    "linear",
    "magmax",
    "merge",
    "method",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "opcm",
    "passthrough",
    "pcb",
    "ram",
    "ramplus_tl",
    "sce",
    "slerp",
    "tall_masks",
    "task_arithmetic",
    "ties",
    "tsv_m",
    "wudi",
]
