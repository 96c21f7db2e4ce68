"""The user's functions of `sail_diffusion`: called under their names, and what they return checked.

They come from a config's `functions`, never from a file. `encode` and `features` are called while a
step is compiled; `decode`, and `measure` (see `quality.measured`), get arrays of NumPy between
steps.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from experiments.lab.config import Function, config

TRACED = ("encode", "features")


@config
class Functions:
    """Functions of yours: channels come last, images have pixels in [0, 1], latents are not scaled.

    On the command line each is MODULE:FUNCTION, and the module is run: no file that is read can
    name one. Not scaled are latents as the autoencoder has them. `encode` and `features` are called
    while a step is compiled, so that they have to be JAX's; weights that a `functools.partial`
    binds, as partial(model.apply, variables), are handed to the step. The others get arrays of
    NumPy. None is given a random key: an autoencoder that draws latents is to return their means.
    """

    encode: Function | None = None
    """Makes latents [n, side, side, channel] of images [n, height, width, 3], for data.name
    image-folders."""
    features: Function | None = None
    """Makes an encoder's features [n, patch, d] of latents, in place of those of a file, or of a
    ViT that is trained here."""
    decode: Function | None = None
    """Makes images [n, height, width, channel] of latents, for functions.measure to measure."""
    measure: Function | None = None
    """Makes of images, or of latents that nothing decodes, a tuple (features [n, d], spatial
    features [n, s], logits or log-probabilities [n, class]), such as Inception's, in place of a
    ResNet that is trained here."""

    def __post_init__(self) -> None:
        if self.decode is not None and self.measure is None:
            raise ValueError(
                "measure must be given where decode is: the ResNet that is trained here measures "
                "latents, not images"
            )


def called(name: str, function: Callable[..., Any], x: Any) -> Any:
    """Calls a function of the user, whose errors then say which one it was."""
    try:
        return function(x)
    except Exception as error:  # the function is the user's, and may raise whatever it likes
        raise ValueError(f"functions.{name} raised {type(error).__name__}: {error}") from error


def shaped(name: str, value: Any, expected: Sequence[int | str]) -> tuple[int, ...]:
    """Checks the shape of what a function of the user returned."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    got = type(value).__name__
    if shape is not None and dtype is not None:
        fits = len(shape) == len(expected) and jnp.issubdtype(dtype, jnp.floating)
        if fits and all(isinstance(n, str) or n == m for n, m in zip(expected, shape, strict=True)):
            return tuple(shape)
        got = f"{dtype}{list(shape)}"
    wanted = ", ".join(map(str, expected))
    raise ValueError(f"functions.{name} must return floating-point numbers [{wanted}]; got {got}")


def finite(name: str, x: np.ndarray, *values: Any) -> None:
    """Checks that a function of the user makes finite numbers of finite ones."""
    if np.isfinite(x).all() and not all(np.isfinite(value).all() for value in values):
        raise ValueError(f"functions.{name} returned numbers that are not finite")


class Traced:
    """The functions that a compiled step calls, apart from the arrays that they bind.

    Arrays that a `functools.partial` binds, at any depth of its arguments, become arguments of the
    step; those of other functions are constants of its program.

    Args:
      given: The functions of a config.

    Attributes:
      arrays: The bound arrays.
      names: Which functions are given, of `TRACED`.
    """

    def __init__(self, given: Functions) -> None:
        functions = {
            name: _partial(function)
            for name in TRACED
            if (function := getattr(given, name)) is not None
        }
        self.names = tuple(functions)
        leaves, self._structure = jax.tree.flatten(functions)
        self._bound = [isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves]
        self._others = [leaf for leaf, bound in zip(leaves, self._bound, strict=True) if not bound]
        self.arrays = [leaf for leaf, bound in zip(leaves, self._bound, strict=True) if bound]

    def bind(self, arrays: Sequence[Array]) -> Mapping[str, Callable[[Array], Array]]:
        """Puts arrays back in their places.

        - `arrays`: the arrays, as many as `self.arrays`, which may be traced.
        """
        bound, others = iter(arrays), iter(self._others)
        leaves = [next(bound if is_bound else others) for is_bound in self._bound]
        functions = jax.tree.unflatten(self._structure, leaves)
        return {
            name: functools.partial(called, name, function) for name, function in functions.items()
        }

    def shape(self, name: str, like: tuple[int, ...]) -> Any:
        """Traces one of the functions, and computes nothing."""
        x = jax.ShapeDtypeStruct(like, jnp.float32)
        return jax.eval_shape(lambda arrays, x: self.bind(arrays)[name](x), self.arrays, x)


def _partial(function: Callable[..., Any]) -> PyTree:
    """The function as a pytree, whose leaves are what it binds if it is a `functools.partial`."""
    if isinstance(function, functools.partial):
        return jax.tree_util.Partial(function.func, *function.args, **function.keywords)
    return jax.tree_util.Partial(function)


NOTHING = Traced(Functions())


def decoded(given: Functions, latents: np.ndarray) -> np.ndarray:
    """Decodes latents into images, if there is a function for it.

    - `latents`: latents that are not scaled, `(n, side, side, channel)`.

    It returns the images `(n, height, width, channel)`; the latents themselves where nothing
    decodes them.

    It raises `ValueError` if the function raises anything, or returns no images of finite numbers.
    """
    if given.decode is None:
        return latents
    images = np.asarray(called("decode", given.decode, latents))
    shaped("decode", images, (len(latents), "height", "width", "channel"))
    finite("decode", latents, images)
    return images
