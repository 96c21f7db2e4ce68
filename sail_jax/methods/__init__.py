"""Merging methods by name. Most of them make a merge, a value that is then applied to models:

    method(**hyperparameters)(models, base=None, *, weights=None) -> merged

`models` is a sequence of M pytrees. `base` is the pytree that they were fine-tuned from, with the
same leaf paths and shapes. `weights` has shape `[M]` and finite values. Floating leaves are merged
in float32 (float64 where a model has it) and cast once, to the dtype of the base's leaf (of the
first model's, without a base). Integers, bools and keys are copied; where models differ,
`integers=` chooses whose. A method that draws at random takes a PRNG key as a hyperparameter.

In the docstrings of the methods, theta_k is the k-th model, delta_k = theta_k - base is its task
vector, and w_k is its weight, 1 by default. All methods are pure functions. They can be transformed
by `jit`, `vmap` and `grad` over arrays, but not over strings, bools and hyperparameters that are
called static. They raise as `Merge` does. Under a transformation, values that are traced cannot be
checked and are taken on trust. Called eagerly on a CPU, a method compiles once for each shape of
leaf. When it is traced, its program grows with the number of shapes.

What learns from data, searches, or gives each task a model of its own is not a merge and takes the
models itself: `adamerging`, `concrete_subspace`, `learned_soup`, `greedy_soup`,
`regmean_plus_plus`, `search`, `representation_surgery`, `emr` and `tall_masks`.

Models may be a dictionary of arrays, the variables of a Flax Linen module, or the state of an NNX
one:

>>> import flax.linen, flax.nnx, jax
>>> from sail_jax import methods
>>> base = {"kernel": jax.numpy.zeros(2)}
>>> tuned = [{"kernel": jax.numpy.array([1.0, 0.5])}, {"kernel": jax.numpy.array([-3.0, 0.5])}]
>>> methods.ties(density=1.0)(tuned, base)["kernel"].tolist()
[-3.0, 0.5]
>>> dense, x = flax.linen.Dense(3), jax.numpy.ones((1, 2))
>>> variables = [dense.init(jax.random.key(seed), x) for seed in range(2)]
>>> dense.apply(methods.slerp(t=0.5)(variables), x).shape
(1, 3)
>>> nets = [flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(seed)) for seed in range(2)]
>>> soup = methods.linear()([flax.nnx.state(net, flax.nnx.Param) for net in nets])
>>> flax.nnx.update(nets[0], soup)
>>> nets[0](x).shape
(1, 3)

Programs implement different algorithms under the same name. `compat="paper"`, the default, follows
the method's authors. `compat="mergekit"` computes what the program mergekit computes, with its
defaults (where mergekit does not crash). A hyperparameter that is None takes the default of the
`compat` that was chosen.
"""

from typing import TYPE_CHECKING

from sail_jax.lazy import lazily
from sail_jax.merging.merge import METHODS, Merge, example, get, method, options_of
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
from sail_jax.methods.fisher import fisher, fisher_diagonal
from sail_jax.methods.geometric import karcher, model_stock, multislerp, nuslerp, slerp
from sail_jax.methods.localize import (
    Localized,
    best_thresholds,
    consensus,
    emr,
    tall_masks,
)
from sail_jax.methods.regmean import grams, regmean, regmean_plus_plus
from sail_jax.methods.runs import trajectory
from sail_jax.methods.soups import greedy_soup
from sail_jax.methods.sparse import (
    breadcrumbs,
    breadcrumbs_ties,
    dare_linear,
    dare_ties,
    della,
    della_linear,
    linear,
    task_arithmetic,
    ties,
)
from sail_jax.methods.spectral import iso_c, iso_cts, opcm, tsv_m, wudi

if TYPE_CHECKING:
    from sail_jax.methods.evolution import search
    from sail_jax.methods.learned import adamerging, concrete_subspace, learned_soup
    from sail_jax.methods.surgery import representation_surgery

# Those that bring optax or cmaes with them, when they are first asked for.
__getattr__, __dir__ = lazily(
    __name__,
    {
        **dict.fromkeys(("adamerging", "concrete_subspace", "learned_soup"), "learned"),
        "representation_surgery": "surgery",
        "search": "evolution",
    },
)

__all__ = [
    "METHODS",
    "Localized",
    "Merge",
    "adamerging",
    "arcee_fusion",
    "best_thresholds",
    "breadcrumbs",
    "breadcrumbs_ties",
    "concrete_subspace",
    "consensus",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "emr",
    "example",
    "expo",
    "fisher",
    "fisher_diagonal",
    "get",
    "grams",
    "greedy_soup",
    "iso_c",
    "iso_cts",
    "karcher",
    "learned_soup",
    "linear",
    "magmax",
    "method",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "opcm",
    "options_of",
    "passthrough",
    "pcb",
    "ram",
    "ramplus_tl",
    "regmean",
    "regmean_plus_plus",
    "representation_surgery",
    "sce",
    "search",
    "slerp",
    "tall_masks",
    "task_arithmetic",
    "ties",
    "trajectory",
    "tsv_m",
    "wudi",
]
