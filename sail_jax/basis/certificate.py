"""Checks whether a network's function is preserved: by running it, or from axes and maps.

`certificate` runs the network; `exactness` analyses axes and maps. They answer different questions.
A map may be lossless for linear readers, with a defect of the size of rounding errors, and still
change the network, because a ReLU does not commute with a rotation. And if axes and maps show no
loss, the network may still compute something that they do not describe.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves
from jax.typing import DTypeLike

from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.basis.maps import SpaceMap, classify, measure
from sail_jax.basis.spaces import Spec, table
from sail_jax.checks import as_array, callable_with, concrete
from sail_jax.trees import leaf_paths
from sail_jax.views import view


class SpaceReport(NamedTuple):
    """The result of `exactness` for one mapped space.

    Attributes:
      space: The name of the space.
      family: The family that its map claims.
      defect: max |read @ write - I| of its map (`measure`), or None if the map is traced.
      lost: The reason why the function may change, according to the axes; "" if there is none.
    """

    space: str
    family: Family
    defect: float | None
    lost: str


class Report(NamedTuple):
    """The losses of a change of a network according to its axes; `print` shows a table.

    Axes describe tensors, not the computation of a network. A report without a loss therefore does
    not prove that the function is preserved. A run does; see `certificate` and `Verdict`.

    Attributes:
      spaces: One entry per mapped space; in a report on growth, also one per number of layers.
    """

    spaces: tuple[SpaceReport, ...]

    @property
    def lost(self) -> str:
        """Lists the losses of all spaces in one sentence; "" if there are none."""
        return "; ".join(f"{row.space!r}: {row.lost}" for row in self.spaces if row.lost)

    def __str__(self) -> str:
        return table(self._rows())

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return view(self.lost or "no loss according to the axes", rows, header)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("space", "family", "defect", "known loss")]
        for name, family, loss, reason in self.spaces:
            shown = "traced" if loss is None else f"{loss:.1e}"
            rows.append((name, str(family), shown, reason or "none"))
        return rows


class Verdict(NamedTuple):
    """Whether a change preserves the function of a network, according to a run of both networks.

    It does not depend on the axes: a network may, for example, multiply its embeddings by the root
    of their width, which no axis shows.

    Attributes:
      by: The forward pass that ran both networks on probe inputs, "" without a run.
      agrees: Whether their outputs agree within rounding.
      largest: The largest difference of an output; None if it is unknown.

    >>> print(Verdict())
    not run
    >>> print(Verdict("net:logits", agrees=True, largest=3.8e-6))
    the function is preserved. Both networks were run on probe inputs by net:logits; the largest
    difference is 3.8e-06, within rounding
    """

    by: str = ""
    agrees: bool = False
    largest: float | None = None

    @property
    def exact(self) -> bool | None:
        """Whether the function is preserved; None without a run."""
        return self.agrees if self.by else None

    def __str__(self) -> str:
        if not self.by:
            return "not run"
        kept, margin = ("is", "within") if self.agrees else ("is not", "more than")
        found = "their outputs are not finite, or differ in shape"
        if self.largest is None:
            found = f"their outputs differ by {'at most' if self.agrees else margin} rounding"
        elif math.isfinite(self.largest):
            found = f"the largest difference is {self.largest:.2g}, {margin} rounding"
        run = f"Both networks were run on probe inputs by {self.by}"
        return f"the function {kept} preserved. {run}; {found}"


def exactness(spec: Spec, maps: Mapping[str, SpaceMap]) -> Report:
    """Reports for each mapped space the loss according to its axes.

    A map is lossless according to the axes if:

    - `read @ write == I`, up to rounding (`measure`);
    - its family lies within the family that the space's nonlinearity commutes with
      (`NONLINEARITIES`; if the spec states several, within each of them);
    - it is MONOMIAL, if a gain multiplies the space;
    - it is ORTHOGONAL, if a tied leaf both writes and reads the space, or its `read` is the
      transpose of its `write` (zero padding).

    A map under these conditions preserves the function of a network that does exactly what its spec
    states: each space is written and read as the axes show, and not used otherwise. Only a run
    shows whether this holds (`certificate`). A network that computes with a size (1/sqrt(head
    width), a mean over a linear space) must keep the original number. The conditions are not always
    necessary. For traced maps the claimed family is used. For concrete maps the claim is also
    checked.

    Args:
      spec: The spaces of the parameters before the change of basis.
      maps: A map for each space that changes, by name.

    Returns:
      A report with one entry per map, in their order.

    Raises:
      TypeError: If an entry of `maps` is not a `SpaceMap`.
      ValueError: If the space of a map is unknown to the spec, or a map has another size or is
        batched.

    >>> from sail_jax import growth
    >>> from sail_jax.basis.spaces import spec
    >>> net = {"in": jnp.zeros((3, 2)), "out": jnp.zeros((2, 1))}
    >>> s = spec(net, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> exactness(s, {"h": growth.permute(jnp.array([1, 0]))}).lost
    ''
    >>> turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])  # a ReLU does not commute with it
    >>> print(exactness(s, {"h": growth.rotate(turn)}).lost)
    'h': its nonlinearity (relu) commutes with positive monomial maps, not with an orthogonal one
    """
    spec.check(maps)
    rows = []
    for name, m in maps.items():
        measured = measure(m)
        reason = _reason(spec, name, m, measured)
        rows.append(SpaceReport(name, m.family, measured and measured[0], reason))
    return Report(tuple(rows))


def _reason(spec: Spec, name: str, m: SpaceMap, measured: tuple[float, float] | None) -> str:
    """Returns why a map may change the function, or ""; `measured` is the result of `measure`."""
    if measured is not None:
        lost, rounding = measured
        # `lost > rounding` would accept a NaN as lossless.
        if not lost <= rounding:
            return f"read @ write differs from the identity by {lost:.2g}: something is lost"
        if m.family and m.family not in classify(m):
            return f"it claims to be {_a(m.family)} map, but its entries are {classify(m)}"
    if Family.IDENTITY in m.family:
        return ""
    words = spec.space(name).nonlinearity.split()
    if "outer" in words:
        return (
            "the network's input or output itself is re-expressed, or units that it distinguishes "
            "(rotary pairs)"
        )
    if "stack" in words:
        return "layers are duplicated, mixed or moved, which does not preserve functions in general"
    commutes = reduce(or_, (NONLINEARITIES[word] for word in words or ["softmax"]))
    if commutes not in m.family:
        said = " and ".join(words) or "not stated, so treated as softmax"
        return (
            f"its nonlinearity ({said}) commutes with {commutes} maps, not with {_a(m.family)} one"
        )
    for use in spec.uses(name):
        if use.role == "gain" and Family.MONOMIAL not in m.family:
            return (
                f"the gain {use.path!r} multiplies it unit by unit, and {_a(m.family)} map mixes "
                "units: fold the gain into the leaves that read the space"
            )
        if use.tied and Family.ORTHOGONAL not in m.family and not _symmetric(m):
            return (
                f"the tied leaf {use.path!r} both writes and reads it, which requires an "
                f"orthogonal map, not {_a(m.family)} one: untie the leaf"
            )
    return ""


def _symmetric(m: SpaceMap) -> bool:
    """Checks whether `read` is the transpose of `write`; False for a traced map."""
    write, read = (np.ones(()) if x is None else concrete(x) for x in m.entries)
    return write is not None and read is not None and bool(np.all(write == read))


def _a(family: Family) -> str:
    """Returns the name of a family with its article."""
    return f"{'an' if str(family)[0] in 'aeiou' else 'a'} {family}"


class Certificate(NamedTuple):
    """The measurements of `certificate` on the outputs of two networks.

    All fields except `preserved` describe one leaf of the output: the one with the largest change
    relative to its tolerance.

    Attributes:
      preserved: Whether every output leaf is finite and changed by no more than its tolerance.
      absolute: max |new - old|, infinite if an entry is not finite or the shapes differ.
      relative: `absolute / scale`; infinite if only the scale is 0.
      scale: max |old|.
      tolerance: The largest `absolute` that rounding can explain.
      leaf: The path of the leaf in the output.
    """

    preserved: bool
    absolute: float
    relative: float
    scale: float
    tolerance: float
    leaf: str

    def _repr_html_(self) -> str:
        title = f"the function is {'' if self.preserved else 'not '}preserved"
        return view(title, zip(self._fields[1:], self[1:], strict=True))


def certificate(
    f: Callable[[Any, Any], Any],
    params: Any,
    new_params: Any,
    inputs: Any,
    *,
    dtype: DTypeLike | None = None,
) -> Certificate:
    """Measures whether two sets of parameters give the same outputs on the same inputs.

    It compares `f(params, inputs)` with `f(new_params, inputs)`, leaf by leaf, on the host. The
    tolerance follows from rounding. Re-expressing a network rounds each parameter and each sum once
    more, which is equivalent to a relative perturbation of eps in every parameter. The tolerance of
    an output leaf is therefore ten times its change when every parameter moves by +-eps (of its own
    dtype), with signs from a fixed seed. It is at least ten eps of the output's dtype times the
    largest output.

    Args:
      f: The network, called as `f(params, inputs)`; it may return any pytree of arrays.
      params: The parameters before.
      new_params: The parameters after; their shapes and structure may differ.
      inputs: Probe inputs for both networks.
      dtype: The lowest precision inside `f`, if it is lower than the precision of the parameters
        and the outputs.

    Returns:
      The verdict, and the measurements of the leaf that changed most. Outputs that are not finite
      or have another shape count as not preserved.

    Raises:
      ValueError: If the outputs differ in structure or have no leaves.
      TypeError: If `f` is not a function of two arguments.

    >>> f = lambda params, x: jnp.maximum(x @ params["in"], 0) @ params["out"]
    >>> old = {"in": jnp.array([[1.0, -2.0]]), "out": jnp.array([[3.0], [4.0]])}
    >>> new = {"in": old["in"][:, ::-1], "out": old["out"][::-1]}
    >>> certificate(f, old, new, jnp.array([[0.5], [-1.5]])).preserved
    True
    """
    callable_with("f", f, "params", "inputs")
    old, new = (f(_kept(tree), inputs) for tree in (params, new_params))
    paths = leaf_paths(old)
    if jax.tree.structure(old) != jax.tree.structure(new):
        odd = sorted(set(paths) ^ set(leaf_paths(new)))
        raise ValueError(
            "the outputs of params and new_params differ in structure"
            + (f": only one has {odd}" if odd else "")
        )
    noisy = f(_jitter(params, dtype), inputs)
    worst: tuple[float, Certificate] | None = None
    preserved = True
    leaves = zip(paths, *map(jax.tree.leaves, (old, new, noisy)), strict=True)
    for path, a, b, c in leaves:
        eps = 10 * max(_eps(a), _eps(dtype))
        a, b, c = (
            np.asarray(x).astype(complex if np.iscomplexobj(x) else float) for x in (a, b, c)
        )
        alike = a.shape == b.shape
        finite = bool(alike and np.isfinite(a).all() and np.isfinite(b).all())
        # Both outputs may be infinite, and inf - inf is NaN.
        with np.errstate(invalid="ignore"):
            absolute = _norm(b - a) if alike else np.inf
            scale, noise = _norm(a), _norm(c - a)
        tolerance = max(10 * noise if np.isfinite(noise) else 0.0, eps * scale)
        fits = finite and absolute <= tolerance
        preserved &= fits
        relative = absolute / scale if scale else np.inf if absolute else 0.0
        excess = absolute / tolerance if tolerance else np.inf if absolute else 0.0
        rank = excess if finite else np.inf
        if worst is None or rank > worst[0]:
            worst = rank, Certificate(False, absolute, relative, scale, tolerance, path)
    if worst is None:
        raise ValueError("f returned no outputs to compare")
    return worst[1]._replace(preserved=preserved)


def _kept(tree: Any) -> Any:
    """Returns a tree that a network may modify: the tree itself if its containers are plain,
    otherwise a copy.

    A Flax module in training mode updates statistics in the state that it is given. A function may
    also distinguish plain trees by their identity.
    """
    return tree if _is_plain(tree) else jax.tree.map(lambda x: x, tree)


def _is_plain(tree: Any) -> bool:
    """Checks whether all nodes of a tree are dictionaries, lists and tuples."""
    if isinstance(tree, dict | list | tuple):
        return all(map(_is_plain, tree.values() if isinstance(tree, dict) else tree))
    return tree is None or all_leaves([tree])


def _jitter(params: Any, dtype: DTypeLike | None) -> Any:
    """Multiplies every float by 1 + eps or 1 - eps, with signs from a fixed seed."""
    # Signs are drawn on the host, without compiling a program for every shape.
    rng = np.random.default_rng(0)

    def noisy(x: Any) -> Any:
        if not _eps(x):
            return x
        host = np.asarray(x)

        wide = np.promote_types(np.float32, host.dtype) if host.dtype.itemsize > 2 else np.float32
        sign = 2.0 * rng.integers(0, 2, host.shape) - 1
        moved = host.astype(wide) * (1 + max(_eps(x), _eps(dtype)) * sign)
        return as_array(moved.astype(host.dtype))

    return jax.tree.map(noisy, params)


def _eps(x: Any) -> float:
    """Returns the machine epsilon of an array or dtype; 0 if it is None or not floating."""
    if x is None:
        return 0.0
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _norm(x: np.ndarray) -> float:
    """Returns max |x|, infinite if x is not finite; 0 for an empty array."""
    x = np.abs(x)
    return float(np.max(np.where(np.isfinite(x), x, np.inf), initial=0.0))
