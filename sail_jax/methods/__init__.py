r"""Merging methods by name. Most of them make a merge, a value that is then applied to models:

    method(**hyperparameters)(models, base=None, *, weights=None) -> merged

`models` is a sequence of M pytrees. `base` is the pytree that they were fine-tuned from, with the
same leaf paths and shapes. `weights` has shape `[M]` and finite values. Floating leaves are merged
in float32 (float64 if a model is float64) and cast once, to the dtype of the base's leaf. Without a
base, this is the dtype of the first model's leaf. Integers, bools and keys are copied. If they
differ between models, `integers=` selects the model to copy from. Methods that draw random numbers
take a PRNG key as a hyperparameter.

In formulas, :math:`\theta_0` is the base and :math:`\theta_k` is the k-th of M models.
:math:`\delta_k = \theta_k - \theta_0` is its task vector and :math:`w_k` its weight, 1 by default.
:math:`\lambda` is the hyperparameter `scale`.

All methods are pure functions. `jit`, `vmap` and `grad` work over arrays. Strings, bools and
hyperparameters described as static cannot be traced. Methods raise the errors of `Merge`. Traced
values cannot be checked and are assumed to be valid. Called eagerly on a CPU, a method compiles
once for each shape of leaf. When a method is traced, the size of its program grows with the number
of shapes.

The following functions learn from data, search, or give each task its own model. They are not
merges and take the models directly: `adamerging`, `concrete_subspace`, `learned_soup`,
`greedy_soup`, `regmean_plus_plus`, `search`, `representation_surgery`, `emr` and `tall_masks`.

A model may be a dictionary of arrays, the variables of a Flax Linen module, or the state of an NNX
module:

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
the method's authors. `compat="mergekit"` computes what the program mergekit computes, with
mergekit's defaults, and returns a well-defined result where mergekit crashes. A hyperparameter that
is None takes the default of the chosen `compat`.
"""

# ruff: noqa: F403, F405 - the starred imports are methods, listed in the modules that define them
import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING

from sail_jax.merging.merge import Merge as Merge
from sail_jax.methods.registry import METHODS as METHODS

_LATE = ("evolution", "learned", "surgery")
"""Modules that import optax or cmaes. They are imported when one of their names is used."""


def _offered(module: str) -> dict[str, object]:
    """Returns the public functions and classes that a module of this package defines, by name."""
    found = importlib.import_module(f"{__name__}.{module}")
    return {
        name: value
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == found.__name__
    }


# Each method is listed only in the module that defines it. Type checkers do not run this loop, and
# read the functions and their parameters from the imports below.
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
        """Lists the public names of this package."""
        parts = (_offered(module.name) for module in pkgutil.iter_modules(__path__))
        return sorted({"METHODS", "Merge"}.union(*parts))
