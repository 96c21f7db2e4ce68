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

# ruff: noqa: F403, F405 - stars stand for methods that are named where they are defined
import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING

from sail_jax.merging.merge import Merge as Merge
from sail_jax.methods.registry import METHODS as METHODS

_LATE = ("evolution", "learned", "surgery")
"""Modules that bring optax or cmaes with them. They are imported when a name of theirs is used."""


def _offered(module: str) -> dict[str, object]:
    """The public functions and classes that a module of this room defines, by name."""
    found = importlib.import_module(f"{__name__}.{module}")
    return {
        name: value
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == found.__name__
    }


# A method is written once, where it is defined. Type checkers do not run this: they read the
# functions of every module, with their parameters, from below.
for _module in pkgutil.iter_modules(__path__):
    if _module.name not in _LATE:
        globals().update(_offered(_module.name))

if TYPE_CHECKING:
    from sail_jax.methods.elementwise import *
    from sail_jax.methods.evolution import *
    from sail_jax.methods.fisher import *
    from sail_jax.methods.geometric import *
    from sail_jax.methods.learned import *
    from sail_jax.methods.localize import *
    from sail_jax.methods.registry import *
    from sail_jax.methods.regmean import *
    from sail_jax.methods.runs import *
    from sail_jax.methods.soups import *
    from sail_jax.methods.sparse import *
    from sail_jax.methods.spectral import *
    from sail_jax.methods.surgery import *
else:

    def __getattr__(name: str) -> object:
        """Finds a name in the modules that are imported late."""
        if name == "__all__":
            return __dir__()
        for module in () if name.startswith("_") else _LATE:
            if name in (offered := _offered(module)):
                return offered[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Lists what this room offers."""
        parts = (_offered(module.name) for module in pkgutil.iter_modules(__path__))
        return sorted({"METHODS", "Merge"}.union(*parts))
