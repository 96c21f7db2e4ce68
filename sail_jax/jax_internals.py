"""Everything that is used of JAX beyond its public functions; no other module uses it.

The parameters of JAX's primitives, `jax.extend` and JAX's private modules may change in any version
of JAX. Each property of an `Operation` is one fact about a primitive, for JAX 0.10 to 0.12.
`LAYOUTS` lists the parameters that the properties read. A test compares it with the installed JAX.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from jax.extend import core
    from jax.extend.core import Jaxpr as Jaxpr
    from jax.extend.core import JaxprEqn as JaxprEqn
    from jax.extend.core import Literal as Literal
    from jax.extend.core import Var as Var

    ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

Shape: TypeAlias = tuple[int, ...]

_TYPES = ("ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var")


def __getattr__(name: str) -> Any:
    """Imports types of jaxprs when they are first used.

    `jax.extend` imports Pallas, which takes a tenth of a second, and commands on files do not
    require it.
    """
    if name not in _TYPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax.extend import core

    return getattr(core, name)


# The parameters that are read of each primitive, by name. A primitive whose parameters differ
# between versions of JAX has several layouts.
CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",  # JAX 0.10, and the same in later versions:
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_ONE_LAYOUT = {
    **{name: (parameter,) for name, parameter in CALLS.items()},
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
            *("reduce_xor", "argmax", "argmin"),
        ),
        ("axes",),
    ),
    **dict.fromkeys(("squeeze", "rev"), ("dimensions",)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("axis",)),
    **dict.fromkeys(("stack", "unstack", "top_k"), ("axis",)),
    **dict.fromkeys(("concatenate", "sort", "iota"), ("dimension",)),
    "split": ("axis", "sizes"),
    "broadcast_in_dim": ("shape", "broadcast_dimensions"),
    "transpose": ("permutation",),
    "reshape": ("new_sizes", "dimensions"),
    "slice": ("start_indices", "limit_indices", "strides"),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("dimension_numbers", "slice_sizes"),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"),
        ("dimension_numbers",),
    ),
    "dot_general": ("dimension_numbers",),
    "conv_general_dilated": ("dimension_numbers", "feature_group_count", "batch_group_count"),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        ("window_dimensions", "window_strides", "padding"),
    ),
    "pad": ("padding_config",),
    "tile": ("reps",),
    "integer_pow": ("y",),
    "convert_element_type": ("new_dtype",),
    "while": ("cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts"),
    "cond": ("branches",),
}
_SCAN = ("jaxpr", "length", "reverse")
LAYOUTS: dict[str, tuple[frozenset[str], ...]] = {
    **{name: (frozenset(parameters),) for name, parameters in _ONE_LAYOUT.items()},
    "scan": (
        frozenset((*_SCAN, "num_consts", "num_carry")),  # JAX 0.10
        frozenset((*_SCAN, "ft_in")),  # JAX 0.11 and 0.12
    ),
}


class UnknownLayoutError(ValueError):
    """Raised if the installed JAX describes a primitive in an unknown way."""


@runtime_checkable
class ProgramCache(Protocol):
    """A cache of compiled programs, with JAX's interface."""

    def get(self, key: str) -> bytes | None:
        """Reads a program; None if it is missing."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Stores a program."""
        ...


class Broadcast(NamedTuple):
    """A broadcast.

    Attributes:
      shape: The shape of the result.
      axes: The axis of the result for each axis of the operand.
    """

    shape: Shape
    axes: Shape


class Slice(NamedTuple):
    """A slice at constant positions; each attribute has a number for each axis.

    Attributes:
      starts: The first positions.
      limits: The positions after the last.
      strides: The steps.
    """

    starts: Shape
    limits: Shape
    strides: Shape


class Contraction(NamedTuple):
    """The paired axes of the two operands of a product.

    Attributes:
      summed: The axes of the left and of the right operand that are summed over.
      batch: The axes of the left and of the right operand that stay, as first axes of the result.
    """

    summed: tuple[Sequence[int], Sequence[int]]
    batch: tuple[Sequence[int], Sequence[int]]


class Convolution(NamedTuple):
    """A convolution.

    Attributes:
      numbers: JAX's `ConvDimensionNumbers`.
      feature_groups: The number of groups of features.
      batch_groups: The number of groups of examples.
    """

    numbers: Any
    feature_groups: int
    batch_groups: int


class Window(NamedTuple):
    """The window of a reduction; each attribute has an entry for each axis.

    Attributes:
      sizes: Its sizes.
      strides: Its steps.
      padding: The padding before and after.
    """

    sizes: Shape
    strides: Shape
    padding: Sequence[tuple[int, int]]


class Scan(NamedTuple):
    """A scan.

    Attributes:
      constants: The number of operands that every step reads.
      carries: The number of operands that each step replaces.
      length: The number of steps.
      reverse: Whether the last step is computed first.
      body: The closed jaxpr of a step.
    """

    constants: int
    carries: int
    length: int
    reverse: bool
    body: Any

    def parted(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits the operands into constants, carries, and inputs with a row for each step."""
        first, second = self.constants, self.constants + self.carries
        return list(operands[:first]), list(operands[first:second]), list(operands[second:])


class While(NamedTuple):
    """A loop with a condition.

    Attributes:
      condition: The closed jaxpr of the condition.
      condition_constants: The number of operands that only the condition reads.
      body: The closed jaxpr of a step.
      body_constants: The number of operands that only the steps read.
    """

    condition: Any
    condition_constants: int
    body: Any
    body_constants: int

    def parted(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits the operands into constants of the condition, constants of steps, and carries."""
        first = self.condition_constants
        second = first + self.body_constants
        return list(operands[:first]), list(operands[first:second]), list(operands[second:])


class Operation(NamedTuple):
    """A primitive with its parameters. Each property is a fact about the primitives that have it.

    Attributes:
      primitive: The primitive.
      params: Its parameters.
    """

    primitive: Any
    params: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.primitive.name

    def _unknown(self, why: str) -> UnknownLayoutError:
        import jax

        return UnknownLayoutError(
            f"JAX {jax.__version__} describes the primitive {self.name!r} in an unknown way: {why} "
            "(sail-jax knows JAX 0.10 to 0.12)"
        )

    def _layout(self) -> frozenset[str]:
        """Returns the names that are read, in the layout of this version of JAX."""
        layouts = LAYOUTS[self.name]
        for layout in layouts:
            if layout <= self.params.keys():
                return layout
        missing = min((layout - self.params.keys() for layout in layouts), key=len)
        verb = "are" if len(missing) > 1 else "is"
        raise self._unknown(f"{' and '.join(map(repr, sorted(missing)))} {verb} missing")

    def _read(self, *names: str) -> Any:
        """Returns the parameter under one of these names, one of which the layout must contain."""
        (name,) = self._layout() & {*names}
        return self.params[name]

    def _with(self, **params: Any) -> "Operation":
        assert params.keys() <= self._layout()
        return self._replace(params=self.params | params)

    # Facts about one or several primitives.

    @property
    def axis(self) -> int:
        """The axis along which it acts: of concatenated, stacked, split or sorted entries."""
        return self._read("axis", "dimension")

    @property
    def removed_axes(self) -> Shape:
        """The axes that a reduction or `squeeze` removes."""
        return tuple(self._read("axes", "dimensions"))

    @property
    def reversed_axes(self) -> Shape:
        """The axes that `rev` reverses."""
        return tuple(self._read("dimensions"))

    @property
    def permutation(self) -> Shape:
        """For each axis of a transposed array, the axis of the operand."""
        return tuple(self._read("permutation"))

    @property
    def sizes(self) -> Shape:
        """The shape of a reshaped array, the lengths of split parts, or the sizes of a look-up."""
        return tuple(self._read("new_sizes", "slice_sizes", "sizes"))

    @property
    def reorders(self) -> bool:
        """Whether `reshape` reads its operand in another order of axes."""
        return self._read("dimensions") is not None

    @property
    def broadcast(self) -> Broadcast:
        """The new shape, and the positions of the operand's axes."""
        return Broadcast(self._read("shape"), self._read("broadcast_dimensions"))

    @property
    def slice(self) -> Slice:
        """The positions of a slice."""
        starts = tuple(self._read("start_indices"))
        strides = self._read("strides") or (1,) * len(starts)
        return Slice(starts, tuple(self._read("limit_indices")), tuple(strides))

    @property
    def index_axes(self) -> Any:
        """The axes that `gather` or `scatter` indexes: JAX's `GatherDimensionNumbers`, or those of
        a scatter.
        """
        return self._read("dimension_numbers")

    @property
    def contraction(self) -> Contraction:
        """The paired axes of a product."""
        return Contraction(*self._read("dimension_numbers"))

    @property
    def convolution(self) -> Convolution:
        """The axes and groups of a convolution."""
        groups = self._read("feature_group_count"), self._read("batch_group_count")
        return Convolution(self._read("dimension_numbers"), *groups)

    @property
    def window(self) -> Window:
        """The window that a reduction slides along the axes."""
        sizes, strides = self._read("window_dimensions"), self._read("window_strides")
        return Window(sizes, strides, self._read("padding"))

    @property
    def padding(self) -> Sequence[tuple[int, int, int]]:
        """For each axis, the padding before, after and between entries."""
        return self._read("padding_config")

    @property
    def repeats(self) -> Shape:
        """For each axis, the number of times that `tile` repeats it."""
        return tuple(self._read("reps"))

    @property
    def exponent(self) -> int:
        """The exponent of `integer_pow`."""
        return self._read("y")

    @property
    def new_dtype(self) -> np.dtype:
        """The dtype to which entries are converted."""
        return np.dtype(self._read("new_dtype"))

    @property
    def scan(self) -> Scan:
        """The operands and the body of a scan."""
        if "ft_in" in self._layout():
            # A private class of JAX, with parts for constants, carries and inputs.
            tree = self._read("ft_in")
            try:
                constants, carries, _ = map(len, tree.unpack())
            except (AttributeError, TypeError, ValueError) as exc:
                raise self._unknown("'ft_in' has no three parts") from exc
        else:
            constants, carries = self._read("num_consts"), self._read("num_carry")
        steps = self._read("length"), self._read("reverse")
        return Scan(constants, carries, *steps, self._read("jaxpr"))

    @property
    def loop(self) -> While:
        """The operands, the condition and the body of a `while`."""
        condition = self._read("cond_jaxpr"), self._read("cond_nconsts")
        return While(*condition, self._read("body_jaxpr"), self._read("body_nconsts"))

    @property
    def branches(self) -> Sequence[Any]:
        """The closed jaxprs from which `cond` selects."""
        return self._read("branches")

    @property
    def called(self) -> Any:
        """The jaxpr that one of `CALLS` runs on its operands."""
        return self._read("jaxpr", "call_jaxpr")

    def key(self, function: Callable[[Any], Hashable]) -> Hashable:
        """The name and all parameters; `function` gives the key of a jaxpr among them."""

        def of(value: Any) -> Hashable:
            if hasattr(value, "eqns"):
                return function(value)
            if isinstance(value, dict):
                return tuple((name, of(inner)) for name, inner in sorted(value.items()))
            if isinstance(value, list | tuple):
                return (type(value).__name__, *map(of, value))
            try:
                hash(value)
            except TypeError:
                # Arrays, for example. Another operation then counts as another value.
                return id(value)
            return value

        # The layout of a scan may hold objects that are equal to no others.
        return self.name, of(self.scan if self.name == "scan" else self.params)

    @property
    def inner_jaxprs(self) -> Iterator[Any]:
        """Every jaxpr among the parameters of any primitive, closed or not."""
        for value in self.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    yield part

    # Operations are made, changed and run.

    @classmethod
    def _made(cls, name: str, **params: Any) -> "Operation":
        from jax.extend.core import primitives

        return cls(getattr(primitives, f"{name}_p"), params)

    @classmethod
    def concatenating(cls, axis: int) -> "Operation":
        """Makes a concatenation."""
        return cls._made("concatenate", dimension=axis)

    @classmethod
    def squeezing(cls, axis: int) -> "Operation":
        """Makes an operation that removes an axis of length 1."""
        return cls._made("squeeze", dimensions=(axis,))

    @classmethod
    def broadcasting(cls, shape: Shape, axes: Shape) -> "Operation":
        """Makes a broadcast; its arguments are the attributes of `Broadcast`."""
        return cls._made("broadcast_in_dim", shape=shape, broadcast_dimensions=axes, sharding=None)

    @classmethod
    def slicing(cls, starts: Shape, limits: Shape) -> "Operation":
        """Makes a slice of steps 1."""
        return cls._made("slice", start_indices=starts, limit_indices=limits, strides=None)

    @classmethod
    def converting(cls, dtype: np.dtype) -> "Operation":
        """Makes a conversion to a dtype."""
        return cls._made("convert_element_type", new_dtype=dtype, weak_type=False, sharding=None)

    @classmethod
    def adding(cls) -> "Operation":
        """Makes a sum of two arrays."""
        return cls._made("add")

    @classmethod
    def clamping(cls) -> "Operation":
        """Makes a `clamp`, whose operands are the least value, the array, and the largest value."""
        return cls._made("clamp")

    def resized(self, sizes: Shape) -> "Operation":
        """Returns a broadcast, a reshape or a look-up with other sizes."""
        (name,) = self._layout() & {"shape", "new_sizes", "slice_sizes"}
        return self._with(**{name: sizes})

    def moved(self, starts: Shape, limits: Shape) -> "Operation":
        """Returns a slice at other positions."""
        return self._with(start_indices=starts, limit_indices=limits)

    def bind(self, *operands: Any) -> list[Any]:
        """Runs or traces it, and returns the list of its results."""
        outs = self.primitive.bind(*operands, **self.primitive.get_bind_params(self.params))
        return list(outs) if self.primitive.multiple_results else [outs]

    def __str__(self) -> str:
        return f"{self.name} {sorted(self.params.items())}"


def operation(equation: Any) -> Operation:
    """Reads the primitive of an equation of a jaxpr.

    Args:
      equation: The equation, a `JaxprEqn`.

    Returns:
      The primitive with its parameters.
    """
    return Operation(equation.primitive, equation.params)


class Rules(NamedTuple):
    """The rules of a primitive with several results, which also receive its parameters.

    Attributes:
      computed: The results from arrays, by JAX's functions.
      types: The types of the results from those of the arrays.
      batched: The results, batched along axis 0, from arrays with batches along axis 0, and whether
        each array has a batch.
      tangents: The derivatives of the results, from the arrays, the positions of those that move,
        and their tangents.
      transposed: For each position in which the primitive is linear, a cotangent: from these
        positions, the types of all arrays, the arrays at the other positions, and the results'
        cotangents.
    """

    computed: Callable[..., list[Any]]
    types: Callable[..., list[Any]]
    batched: Callable[..., list[Any]]
    tangents: Callable[..., list[Any]]
    transposed: Callable[..., list[Any]]


def primitive(name: str, rules: Rules, parameters: Sequence[str]) -> Any:
    """Makes a primitive, for JAX 0.10 and 0.11.

    Args:
      name: Its name.
      rules: Its rules.
      parameters: The names of its parameters, which are hashable.

    Returns:
      The primitive.
    """
    import jax
    from jax._src.core import Primitive  # the same in `jax.extend.core`, which imports Pallas
    from jax.interpreters import ad, batching, mlir

    made = Primitive(name)
    made.multiple_results = True

    def batched(arrays: Any, axes: Any, **params: Any) -> tuple[list[Any], list[int]]:
        mapped = tuple(axis is not None for axis in axes)
        first = [
            jax.numpy.moveaxis(x, axis, 0) if m else x
            for x, axis, m in zip(arrays, axes, mapped, strict=True)
        ]
        results = rules.batched(first, mapped, **params)
        return results, [0] * len(results)

    def differentiated(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
        along = [tangents[i] for i in moving]
        return made.bind(*primals, **params), rules.tangents(primals, moving, along, **params)

    def transposed(cotangents: Any, *arrays: Any, **params: Any) -> list[Any]:
        linear = tuple(i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
        types = [x.aval if i in linear else jax.typeof(x) for i, x in enumerate(arrays)]
        fixed = [x for i, x in enumerate(arrays) if i not in linear]
        given = [*map(ad.instantiate_zeros, cotangents)]
        back = rules.transposed(linear, types, fixed, given, **params)
        found = dict(zip(linear, back, strict=True))
        return [found.get(i) for i in range(len(arrays))]

    made.def_impl(jax.jit(rules.computed, static_argnames=parameters))
    made.def_abstract_eval(rules.types)
    mlir.register_lowering(made, mlir.lower_fun(rules.computed, multiple_results=True))
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = differentiated
    ad.primitive_transposes[made] = transposed
    return made


def recorded_at(traceback: Any) -> AbstractContextManager[None]:
    """Makes JAX record another source for the operations in the block.

    Args:
      traceback: The traceback of the source, such as that of an equation. None for the current one.

    Returns:
      The context manager.
    """
    from jax.extend import source_info_util

    own = traceback or source_info_util.current().traceback
    names = source_info_util.current_name_stack()
    return source_info_util.user_context(own, name_stack=names)


def keep_programs(cache: ProgramCache) -> bool:
    """Replaces the cache of compiled programs that JAX would create.

    Args:
      cache: The cache.

    Returns:
      Whether this version of JAX can use it.
    """
    from jax._src import compilation_cache

    if not hasattr(compilation_cache, "get_file_cache"):
        return False
    compilation_cache.get_file_cache = lambda path: (cache, path)  # pyright: ignore
    return True
