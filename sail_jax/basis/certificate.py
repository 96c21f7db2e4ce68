"""Is a network preserved? `exactness` answers from the algebra, `certificate` by running it.

They answer different questions. A map may be lossless to a linear reader, its defect at rounding
error, and still change the network, because a ReLU does not commute with a rotation.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sail_jax.basis.families import NONLINEARITIES, Family
from sail_jax.basis.maps import SpaceMap, classify, measure
from sail_jax.basis.spaces import Spec, table
from sail_jax.checks import as_array
from sail_jax.trees import leaf_paths

__all__ = ["Certificate", "Report", "SpaceReport", "Verdict", "certificate", "exactness"]


class SpaceReport(NamedTuple):
    """One space: its map's family and defect (None if traced), and why it is not exact, or ""."""

    space: str
    family: Family
    defect: float | None
    reason: str

    @property
    def exact(self) -> bool:
        return not self.reason


class Report(NamedTuple):
    """What `exactness` found, one entry per mapped space; `print` shows a table."""

    spaces: tuple[SpaceReport, ...]

    @property
    def exact(self) -> bool:
        """Whether the change of basis preserves the network's function, as far as axes say."""
        return all(space.exact for space in self.spaces)

    def __str__(self) -> str:
        rows = [("space", "family", "defect", "exact by its axes")]
        for name, family, loss, reason in self.spaces:
            shown = "traced" if loss is None else f"{loss:.1e}"
            rows.append((name, str(family), shown, f"no: {reason}" if reason else "yes"))
        return table(rows)


class Verdict(NamedTuple):
    """Whether a change preserves what a network computes, and how that is known.

    Axes speak of tensors, not of what a network makes of them (one may multiply its embeddings by
    the root of their width), so without a run nothing is said to be exact.

    Attributes:
      axes: Whether it is exact as far as the axes say, as `Report.exact`.
      by: Which forward pass ran both networks on probe inputs, "" if none did.
      agrees: Whether their outputs agreed to rounding.
    """

    axes: bool
    by: str = ""
    agrees: bool = False

    @property
    def exact(self) -> bool | None:
        """None where the axes say so and nothing was run."""
        return None if self.axes and not self.by else self.axes and self.agrees

    def __str__(self) -> str:
        axes = f"{'exact' if self.axes else 'not exact'} as far as the axes say"
        if not self.by:
            return f"{axes}; not run"
        end = "agree to rounding" if self.agrees else "differ by more than rounding"
        ran = f"outputs on probe inputs {end} (run by {self.by})"
        return f"{axes}, and {ran}" if self.agrees or not self.axes else f"not exact: {ran}"


def exactness(spec: Spec, maps: Mapping[str, SpaceMap]) -> Report:
    """Whether each map preserves the network's function, by its family and its defect.

    Exact if `read @ write == I` (to rounding), the map's family lies within the one that the
    space's nonlinearity commutes with, MONOMIAL where gains multiply the space, ORTHOGONAL where
    a tied leaf both writes and reads it. This suffices; it is not always necessary. A network
    that computes with a size (1/sqrt(head width), a mean over a linear space) must keep the
    number it used. Traced maps are judged by their family alone; concrete ones are also checked
    to be of it. Raises as `Spec.check` does.
    """
    spec.check(maps)
    rows = []
    for name, m in maps.items():
        measured = measure(m)
        reason = _reason(spec, name, m, measured)
        rows.append(SpaceReport(name, m.family, measured and measured[0], reason))
    return Report(tuple(rows))


def _reason(spec: Spec, name: str, m: SpaceMap, measured: tuple[float, float] | None) -> str:
    if measured is not None:
        lost, rounding = measured
        if not lost <= rounding:  # a NaN is lossy
            return f"read @ write differs from the identity by {lost:.2g}: something is lost"
        if m.family and m.family not in classify(m):
            return f"it claims to be {_a(m.family)} map, but its entries are {classify(m)}"
    if Family.IDENTITY in m.family:
        return ""
    words = spec.space(name).nonlinearity.split()
    if "outer" in words:
        return (
            "the network's input or output itself is re-expressed, or units that it tells apart "
            "(rotary pairs)"
        )
    if "stack" in words:
        return "layers are duplicated, mixed or moved, which preserves no function in general"
    commutes = reduce(or_, (NONLINEARITIES[word] for word in words or ["softmax"]))
    if commutes not in m.family:
        said = " and ".join(words) or "not stated, so taken as softmax"
        return (
            f"its nonlinearity ({said}) commutes with {commutes} maps, not with {_a(m.family)} one"
        )
    for use in spec.uses(name):
        if use.role == "gain" and Family.MONOMIAL not in m.family:
            return (
                f"the gain {use.path!r} multiplies it unit by unit, and {_a(m.family)} map mixes "
                "units: fold the gain into the leaves that read the space"
            )
        if use.tied and Family.ORTHOGONAL not in m.family:
            return (
                f"the tied leaf {use.path!r} both writes and reads it, which only an orthogonal "
                f"map allows, not {_a(m.family)} one: untie the leaf"
            )
    return ""


def _a(family: Family) -> str:
    return f"{'an' if str(family)[0] in 'aeiou' else 'a'} {family}"


class Certificate(NamedTuple):
    """What `certificate` measured: `preserved` says that every output leaf is finite and within
    its tolerance; the rest describes the `leaf` whose change exceeds its tolerance by most.

    `absolute` is max |new - old|, `scale` max |old|, `relative` their ratio.
    """

    preserved: bool
    absolute: float
    relative: float
    scale: float
    tolerance: float
    leaf: str


def certificate(
    f: Callable[[Any, Any], Any],
    params: Any,
    new_params: Any,
    inputs: Any,
    *,
    dtype: DTypeLike | None = None,
) -> Certificate:
    """Compare `f(params, inputs)` with `f(new_params, inputs)`, leaf by leaf, on the host.

    Error model: re-expressing a network rounds each parameter and each sum once more, which is
    as much as a relative perturbation of eps in every parameter. So the tolerance is ten times
    what `f` makes of a random perturbation of that size (of each leaf's own dtype), but at least
    ten eps of the output's dtype times its scale. `dtype` names the lowest precision inside `f`
    where it is lower than that of both parameters and outputs.

    Raises ValueError, naming the leaf, if the outputs differ in structure or shape. Outputs
    that are not finite are not preserved.
    """
    old, new = f(params, inputs), f(new_params, inputs)
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
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"output leaf {path!r} has shape {jnp.shape(a)} with params and "
                f"{jnp.shape(b)} with new_params"
            )
        eps = 10 * max(_eps(a), _eps(dtype))
        a, b, c = (
            np.asarray(x).astype(complex if np.iscomplexobj(x) else float) for x in (a, b, c)
        )
        finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
        with np.errstate(invalid="ignore"):  # inf - inf
            absolute, scale, noise = _norm(b - a), _norm(a), _norm(c - a)
        tolerance = max(10 * noise if np.isfinite(noise) else 0.0, eps * scale)
        fits = finite and absolute <= tolerance
        preserved &= fits
        relative = absolute / scale if scale else np.inf if absolute else 0.0
        excess = absolute / tolerance if tolerance else np.inf if absolute else 0.0
        rank = excess if finite else np.inf
        if worst is None or rank > worst[0]:
            worst = rank, Certificate(False, absolute, relative, scale, tolerance, path)
    if worst is None:
        raise ValueError("f has no outputs to compare")
    return worst[1]._replace(preserved=preserved)


def _jitter(params: Any, dtype: DTypeLike | None) -> Any:
    """Every floating entry times 1 +- eps, the signs drawn from a fixed seed; on the host, where
    nothing has to be compiled for every shape."""
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
    """Machine epsilon of an array or dtype; zero if it is none, or not floating."""
    if x is None:
        return 0.0
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _norm(x: np.ndarray) -> float:
    """max |x|, infinite where x is not finite."""
    x = np.abs(x)
    return float(np.max(np.where(np.isfinite(x), x, np.inf), initial=0.0))
