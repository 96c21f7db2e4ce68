"""User functions of `sail_diffusion`: calls with their names in errors, and checks of results.

They come from a config's `functions`, never from a file. `encode` and `features` are called while a
step is compiled. `decode`, and `measure` (see `quality.measured`), get NumPy arrays between steps.
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
    """The user's functions: channels come last, pixels are in [0, 1], latents are not scaled.

    On the command line each is MODULE:FUNCTION, and the module's code runs; a file that is read
    cannot give one. Unscaled latents are those of the autoencoder. `encode` and `features` are
    called while a step is compiled, so they must be JAX functions. Weights that a
    `functools.partial` binds, as partial(model.apply, variables), are passed to the step. The other
    functions receive NumPy arrays. No function receives a random key: an autoencoder with random
    latents must return their means.
    """

    encode: Function | None = None
    """Converts images [n, height, width, 3] to latents [n, side, side, channel], for data.name
    image-folders."""
    features: Function | None = None
    """Computes an encoder's features [n, patch, d] of latents, instead of a file's or of a ViT's
    that is trained here."""
    decode: Function | None = None
    """Converts latents to images [n, height, width, channel], for functions.measure."""
    measure: Function | None = None
    """Computes for images (or latents without `decode`) a tuple (features [n, d], spatial features
    [n, s], logits or log-probabilities [n, class]), such as Inception's, instead of a ResNet that
    is trained here."""

    def __post_init__(self) -> None:
        if self.decode is not None and self.measure is None:
            raise ValueError(
                "measure must be given with decode: the ResNet that is trained here measures "
                "latents, not images"
            )


def called(name: str, function: Callable[..., Any], x: Any) -> Any:
    """Calls a function of the user; errors contain the function's name."""
    try:
        return function(x)
    except Exception as error:  # the user's function may raise anything
        raise ValueError(f"functions.{name} raised {type(error).__name__}: {error}") from error


def shaped(name: str, value: Any, expected: Sequence[int | str]) -> tuple[int, ...]:
    """Checks the shape of a user function's result."""
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
    """Checks that a function of the user returns finite numbers for finite ones."""
    if np.isfinite(x).all() and not all(np.isfinite(value).all() for value in values):
        raise ValueError(f"functions.{name} returned numbers that are not finite")


class Traced:
    """The functions that a compiled step calls, separated from the arrays that they bind.

    Arrays that a `functools.partial` binds, at any depth of its arguments, become arguments of the
    step. Arrays of other functions are constants of its program.

    Args:
      given: The functions of a config.

    Attributes:
      arrays: The bound arrays.
      names: The given functions among `TRACED`.
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

        - `arrays`: as many arrays as `self.arrays`, which may be traced.
        """
        bound, others = iter(arrays), iter(self._others)
        leaves = [next(bound if is_bound else others) for is_bound in self._bound]
        functions = jax.tree.unflatten(self._structure, leaves)
        return {
            name: functools.partial(called, name, function) for name, function in functions.items()
        }

    def shape(self, name: str, like: tuple[int, ...]) -> Any:
        """Traces one of the functions, without computing anything."""
        x = jax.ShapeDtypeStruct(like, jnp.float32)
        return jax.eval_shape(lambda arrays, x: self.bind(arrays)[name](x), self.arrays, x)


def _partial(function: Callable[..., Any]) -> PyTree:
    """Returns the function as a pytree; its leaves are the arrays that a `functools.partial`
    binds."""
    if isinstance(function, functools.partial):
        return jax.tree_util.Partial(function.func, *function.args, **function.keywords)
    return jax.tree_util.Partial(function)


NOTHING = Traced(Functions())


def decoded(given: Functions, latents: np.ndarray) -> np.ndarray:
    """Decodes latents into images, if there is a function for it.

    - `latents`: latents that are not scaled, `(n, side, side, channel)`.

    It returns the images `(n, height, width, channel)`, or the latents themselves without a
    decoder.

    It raises `ValueError` if the function raises anything, or does not return finite images.
    """
    if given.decode is None:
        return latents
    images = np.asarray(called("decode", given.decode, latents))
    shaped("decode", images, (len(latents), "height", "width", "channel"))
    finite("decode", latents, images)
    return images
