"""The registry of methods and their hyperparameters.

`@method` registers a function, and no further step is required. `sail_jax.methods` then exports the
function. Recipes, `sail-jax merge --methods`, reports and the site read its hyperparameters from
here. The sources are the function's signature, its docstring, and the merge that it makes.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import (
    Annotated,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jaxtyping import ArrayLike, Float

from sail_jax import extensions
from sail_jax.checks import nearest, one_of
from sail_jax.merging import random_bits
from sail_jax.merging.merge import Merge, named

Compat = Literal["paper", "mergekit"]
"""The defaults and conventions that a method follows: the paper's or mergekit's."""
Plain = bool | int | float | str
"""A value that a recipe can hold."""
P = ParamSpec("P")
T = TypeVar("T")


class Range(NamedTuple):
    """The range of a hyperparameter that is worth searching, as metadata of its annotation.

    Attributes:
      low: The least value.
      high: The largest value.
    """

    low: float
    high: float


DENSITY = Range(0.05, 1.0)
"""The range of densities, from few entries to all."""
Scale = Annotated[Float[ArrayLike, ""], Range(0.1, 2.0)]
"""The factor on the merged task vector."""

METHODS: dict[str, Callable[..., Merge]] = {}
"""The functions that make the merges of all published methods, by name.

`known` adds the methods of other packages.
"""


def method(factory: Callable[P, Merge]) -> Callable[P, Merge]:
    """Registers a function that makes a merge as a method, under the name of the function.

    All parameters of the function are keyword-only.

    Args:
      factory: The function; each of its parameters is a hyperparameter.

    Returns:
      A function that makes the same merge, with `name` and `options` set. It raises a TypeError for
      positional, unknown and missing hyperparameters. Errors of the factory start with the method's
      name.

    Raises:
      ValueError: If another module has registered a method of this name.
      TypeError: When the returned function is called with invalid hyperparameters.
    """
    name = factory.__name__
    if name in METHODS and METHODS[name].__module__ != factory.__module__:
        raise ValueError(f"{METHODS[name].__module__} has a method called {name}; choose another")
    options = inspect.signature(factory).parameters

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Merge:
        if args:
            raise TypeError(
                f"{name}: expected hyperparameters by name. Make the merge first, then apply it:"
                f" {name}(...)(models, base)"
            )
        for option in kwargs:
            if option not in options:
                raise TypeError(_unknown(name, option, options))
        for option in options.values():
            if option.default is option.empty and option.name not in kwargs:
                raise TypeError(f"{name}: missing hyperparameter {option.name!r}")
        try:
            merge = factory(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise named(name, error) from error
        return replace(merge, name=name, options=kwargs)

    METHODS[name] = make
    return make


_FACTORS = ("lam", "lambda", "lambda_", "coefficient", "scaling", "scaling_factor")
"""Names of the factor on the merged task vector in other packages, where ours is `scale`."""


def _unknown(name: str, option: str, options: Collection[str]) -> str:
    """Explains an unknown hyperparameter, which may belong to the merge or to other methods."""
    call = f"{name}(...)(models, base, weights=...)"
    scale = "scale is the factor on the merged task vector" if "scale" in options else ""
    if option in ("models", "base", "weights", "weight"):
        why = f"{name}: {option} is an argument of the merge, not a hyperparameter: {call}"
        return f"{why}; {scale}" if scale and option.startswith("weight") else why
    unknown = f"{name} has no hyperparameter {option!r}"
    if option in _FACTORS:
        weights = f"the models' weights are given to the merge, {call}"
        return f"{unknown}: {scale}, and {weights}" if scale else f"{unknown}: {weights}"
    others = [other for other in METHODS if option in options_of(other)][:3]
    known = f", a hyperparameter of {', '.join(others)}" if others else ""
    return f"{unknown}{known}{nearest(option, options)}"


def choose(compat: Compat) -> Callable[[T | None, T, T], T]:
    """Makes a function that fills in the defaults of a paper or of mergekit.

    Args:
      compat: The convention, "paper" or "mergekit".

    Returns:
      `(value, paper, mergekit) -> value`. If the value is None, the function returns the default of
      `compat`.

    Raises:
      ValueError: If `compat` is neither "paper" nor "mergekit".

    >>> default = choose("mergekit")
    >>> default(None, 0.2, 1.0), default(0.5, 0.2, 1.0)
    (1.0, 0.5)
    """
    one_of("compat", compat, Compat)

    def chosen(value: T | None, paper: T, mergekit: T) -> T:
        return value if value is not None else paper if compat == "paper" else mergekit

    return chosen


# --- look-ups by name


@functools.cache
def known() -> Mapping[str, Callable[..., Merge]]:
    """Imports the methods of other packages, and returns all methods.

    Returns:
      The functions by name, published methods first; see `METHODS`.

    Raises:
      ValueError: If a method of another package cannot be imported, or has the name of another
        method.
    """
    for entry in extensions.declared("methods").values():
        extensions.loaded(entry)
    return METHODS


def exists(name: str) -> bool:
    """Checks whether there is a method of this name. Other packages are searched last.

    Args:
      name: The name.

    Returns:
      Whether it is registered.
    """
    return name in METHODS or name in known()


def get(name: str) -> Callable[..., Merge]:
    """Looks up a method by its name.

    Args:
      name: The name of the method; see `METHODS`.

    Returns:
      The function that makes its merge, of `sail_jax.methods` or of another package.

    Raises:
      ValueError: For an unknown method. The message suggests similar names.

    >>> from sail_jax import methods
    >>> get("ties") is methods.ties
    True
    """
    if not exists(name):
        raise ValueError(f"no merging method {name!r}{nearest(str(name), METHODS)}")
    return METHODS[name]


def options_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Lists the hyperparameters of a method.

    Args:
      name: The name of the method; see `METHODS`.

    Returns:
      The parameters by name, with their defaults and annotations.

    Raises:
      ValueError: For an unknown method.

    >>> list(options_of("task_arithmetic"))
    ['normalize', 'scale']
    """
    return inspect.signature(get(name)).parameters


class Takes(NamedTuple):
    """The values that a hyperparameter accepts, by its annotation.

    Attributes:
      plain: The accepted types among bool, int, float and str.
      choices: The values of a `Literal`.
      per_model: Whether a sequence with one value per model is accepted.
    """

    plain: frozenset[type]
    choices: tuple[Plain, ...]
    per_model: bool

    @property
    def any_value(self) -> Plain | None:
        """An accepted value; None if a recipe cannot contain one, as for arrays."""
        stand_ins = {float: 0.5, int: 1, str: "", bool: False}
        fitting = (value for kind, value in stand_ins.items() if kind in self.plain)
        return next(iter(self.choices), None) if self.choices else next(fitting, None)


def takes(name: str) -> Mapping[str, Takes]:
    """Reads the annotations of the hyperparameters of a method.

    Args:
      name: The name of the method; see `METHODS`.

    Returns:
      The accepted values of each hyperparameter, by name.

    Raises:
      ValueError: For an unknown method.

    >>> sorted(kind.__name__ for kind in takes("consensus")["agree"].plain)
    ['int']
    >>> takes("sce")["tie"].choices, takes("ties")["density"].per_model
    (('none', 'positive', 'majority'), True)
    """
    return _takes(get(name))


def ranges(name: str) -> Mapping[str, Range]:
    """Reads the ranges of hyperparameters that a method states in its annotations.

    Args:
      name: The name of the method; see `METHODS`.

    Returns:
      The range of each hyperparameter that has one.

    Raises:
      ValueError: For an unknown method.

    >>> from sail_jax import methods  # registers them
    >>> dict(ranges("task_arithmetic"))
    {'scale': Range(low=0.1, high=2.0)}
    """
    hints = get_type_hints(get(name), include_extras=True)
    return {
        option: found
        for option, hint in hints.items()
        for found in getattr(hint, "__metadata__", ())
        if isinstance(found, Range)
    }


@functools.cache
def _takes(factory: Callable[..., Merge]) -> Mapping[str, Takes]:
    hints = get_type_hints(factory)
    return {option: _read(hints.get(option)) for option in inspect.signature(factory).parameters}


def _read(annotation: object) -> Takes:
    """Reads an annotation: a type, a `Literal`, a sequence, or a union of these."""
    parts, plain, choices, per_model = [annotation], set[type](), (), False
    while parts:
        part = parts.pop()
        origin, arguments = get_origin(part), get_args(part)
        if origin in (Union, UnionType):
            parts += arguments
        elif origin is Literal:
            choices += arguments
        elif origin is Sequence and {float, int} & set(arguments):
            per_model = True
        elif isinstance(part, type) and part in (bool, int, float, str):
            plain.add(part)
    return Takes(frozenset(plain), choices, per_model)


def example(name: str) -> Merge | None:
    """Makes a merge by a method, from which properties that do not depend on hyperparameters are
    read.

    These are the number of models, the role of the base, and the parts of tensors it reads.
    Hyperparameters have their defaults. A key without a default is the key of seed 0. Other
    hyperparameters without a default have a value that their annotation allows: the first of a
    `Literal`, 0.5, 1, "" or False. A method that accepts only a few words must therefore list them
    in a `Literal`.

    Args:
      name: The name of the method; see `METHODS`.

    Returns:
      The merge, or None for a method that requires arrays.

    Raises:
      ValueError: For an unknown method, or if the method rejects a value that its annotation
        allows.

    >>> example("arcee_fusion").models, example("fisher")
    ((1, 1), None)
    """
    return _example(get(name))


@functools.cache
def _example(factory: Callable[..., Merge]) -> Merge | None:
    options = {}
    for option in inspect.signature(factory).parameters.values():
        if option.default is not option.empty:
            continue
        key = option.name == "key"
        value = random_bits.key(0) if key else _takes(factory)[option.name].any_value
        if value is None:
            return None
        options[option.name] = value
    return factory(**options)
