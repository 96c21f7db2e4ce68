"""One network moved toward another, space by space: the state of a descent, and its products."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax.align.blocks import along_block, check_blocks, factors
from sail_jax.align.solvers import GENERAL, solver
from sail_jax.basis.axes import Factor, Role
from sail_jax.basis.change_basis import unfuse
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, identity
from sail_jax.basis.spaces import Spec
from sail_jax.checks import as_array, concrete, nearest
from sail_jax.trees import leaf_paths

__all__ = ["EPS", "Assign", "Problem", "apart", "arrays", "recurrent"]

Assign = Callable[[Float[ArrayLike, "n n"]], Int[ArrayLike, "n"]]

EPS = float(jnp.finfo(jnp.float32).eps)


class Touch(NamedTuple):
    """A tensor that touches a space: at which factor axis, as what, and where its block is."""

    path: str
    axis: int
    role: Role
    block: int | None


class Cost(NamedTuple):
    """What all tensors together say about a space, summed as they are read, in float64.

    products: sum_t w_t a_i . b_j [.., n, n] by what t does with the space: "write", "read",
    "gain", or "bound" (an upper bound, where t has axes that are not settled); one sum, "all",
    for permutations, which do not tell them apart. squares: sum_t w_t |b_j|^2 by role, for
    scales; grams: w b b.T of writers, w a a.T of readers, for general maps.
    """

    products: dict[str, Float[np.ndarray, "... n n"]]
    squares: dict[str, Float[np.ndarray, "... n"]]
    grams: dict[str, Float[np.ndarray, "... n n"]]

    def add(self, kind: str, part: str, value: Array, weight: float) -> None:
        into = getattr(self, kind)
        term = np.multiply(np.asarray(value), weight, dtype=np.float64)
        if part in into:
            into[part] += term
        else:
            into[part] = term


class Problem:
    """Both networks with an axis per factor, the second moved along as maps are found.

    A leaf is an array, or anything with a shape, a dtype and `__array__`, which is read when it
    is needed: of those at most `keep` bytes are kept (None: all).
    """

    def __init__(
        self, spec: Spec, chosen: Mapping[str, Family], within: Mapping[str, str], assign: Assign
    ) -> None:
        self.spec, self.chosen, self.within, self.assign = spec, chosen, within, assign
        self.flat: dict[str, list[Factor | None]] = {
            path: [f for axis in axes for f in axis or (None,)] for path, axes in spec.leaves
        }
        self.touches: dict[str, list[Touch]] = {}
        for name in chosen:
            block = within.get(name)
            self.touches[name] = [
                Touch(use.path, k, use.role, self._position(use.path, block))
                for use in spec.uses(name)
                for k in [self._position(use.path, name)]
                if k is not None
            ]

    def _position(self, path: str, name: str | None) -> int | None:
        axes = [k for k, f in enumerate(self.flat[path]) if f is not None and f.space == name]
        return axes[0] if axes else None

    def load(
        self,
        reference: PyTree,
        params: PyTree,
        normalize: bool,
        weights: Mapping[str, float] | None,
        keep: int | None = None,
    ) -> None:
        for path in recurrent(self.spec):
            if (weights or {}).get(path) == 0:  # it has no say, and cannot be moved by one axis
                for name, touches in self.touches.items():
                    self.touches[name] = [touch for touch in touches if touch.path != path]
        for name, touches in self.touches.items():
            if not touches:
                raise ValueError(f"no leaf with a weight has the space {name!r}: leave it out")
        order = dict.fromkeys(touch.path for touches in self.touches.values() for touch in touches)
        paths = sorted(order)
        self.leaves = [
            checked_leaves(argument, tree, self.spec, paths)
            for argument, tree in (("reference", reference), ("params", params))
        ]
        self.sizes = {path: math.prod(x.shape) for path, x in self.leaves[0].items()}
        for path in paths:
            a, b = (list(side[path].shape) for side in self.leaves)
            if a != b:
                raise ValueError(f"leaf {path!r} has shape {a} in the reference and {b} in params")
        self.kept: dict[str, list[Array]] = {}
        self.weight, self.norms = {}, {}
        self.maps = self.identities()
        self.best: set[str] = set()  # spaces whose map is the best, as all others are
        for path in paths:
            sides = [self._read(side, path) for side in range(2)]
            self.norms[path] = math.prod(_norm(x) for x in sides)
            scale = 1 / self.norms[path] if self.norms[path] else 0.0
            self.weight[path] = scale if normalize else 1.0
            lazy = [not isinstance(side[path], jax.Array | np.ndarray) for side in self.leaves]
            # the second as it was before the first visit is kept as well
            need = sides[0].nbytes * lazy[0] + 2 * sides[1].nbytes * lazy[1]
            if keep is None or need <= keep:
                self.kept[path] = sides
                keep = None if keep is None else keep - need
        for path, weight in (weights or {}).items():
            self.spec.axes(path)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weights[{path!r}] must be finite and not negative: {weight}")
            if path in self.weight:
                self.weight[path] = float(weight)

    def _read(self, side: int, path: str) -> Array:
        """A leaf as it is given, an axis per factor; checked."""
        argument = ("reference", "params")[side]
        return _factored(argument, path, self.leaves[side][path], self.spec)

    def reference(self, path: str) -> Array:
        return self.kept[path][0] if path in self.kept else self._read(0, path)

    def moved(self, path: str) -> Array:
        """A leaf of the second network, as the maps so far move it."""
        if path in self.kept:
            return self.kept[path][1]
        x = self._read(1, path)
        spaces = [f.space for f in self.flat[path] if f is not None and f.space in self.chosen]
        for name in sorted(spaces, key=lambda name: name in self.within):  # blocks first
            if Family.IDENTITY not in self.maps[name].family:
                (touch,) = (t for t in self.touches[name] if t.path == path)
                x = along_block(self.maps[name], x, touch.axis, touch.block, touch.role)
        return x

    def _unsettle(self, name: str) -> None:
        """The best maps of the spaces beside one that moves are to be found again."""
        paths = {touch.path for touch in self.touches[name]}
        self.best -= {
            other
            for other, touches in self.touches.items()
            if other != name and not paths.isdisjoint(touch.path for touch in touches)
        }

    def identities(self) -> dict[str, SpaceMap]:
        out = {name: identity(self.spec.space(name).size) for name in self.chosen}
        for name in self.within:
            count = self.spec.space(self.within[name]).size
            out[name] = jax.tree.map(lambda x, count=count: np.stack([x] * count), out[name])
        return out

    def snapshot(self) -> Any:
        return dict(self.maps), {path: list(sides) for path, sides in self.kept.items()}

    def restore(self, snapshot: Any) -> None:
        self.maps, self.kept = snapshot
        self.best = set()

    def start(self, init: Mapping[str, SpaceMap]) -> None:
        for name in init:
            if name not in self.chosen:
                raise ValueError(f"init has a map of {name!r}, which is not matched")
        self.spec.check({name: m for name, m in init.items() if name not in self.within})
        inner = {name: m for name, m in init.items() if name in self.within}
        check_blocks(self.spec, inner, self.within)
        for name in sorted(init, key=lambda name: name in self.within):  # blocks first
            self.take(name, init[name])

    def distance(self, paths: Iterable[str] | None = None) -> float:
        paths = self.weight if paths is None else paths
        return sum(
            self.weight[p] * _distance(self.reference(p), self.moved(p))
            for p in paths
            if self.weight[p]
        )

    def take(self, name: str, m: SpaceMap) -> None:
        """Move the second network by m, and remember it."""
        for path, axis, role, block in self.touches[name]:
            if path in self.kept:
                sides = self.kept[path]
                sides[1] = along_block(m, sides[1], axis, block, role)
        self._unsettle(name)
        together = jax.vmap(compose) if name in self.within else compose
        self.maps[name] = together(m, self.maps[name])
        for inner, block in self.within.items():
            if block == name and m.index is not None:
                index = m.index
                self.maps[inner] = jax.tree.map(
                    partial(jnp.take, indices=index, axis=0), self.maps[inner]
                )

    def cost(self, name: str, settled: set[str] | None = None) -> Cost:
        """What each tensor says about a space, or all that is settled, by one product each."""
        family, out = self.chosen[name], Cost({}, {}, {})
        touches = self.touches[name]
        loose = {touch: self._loose(touch, name, settled) for touch in touches}
        settled_size = sum(self.sizes[touch.path] for touch in touches if not loose[touch])
        bounds = 2 * settled_size < sum(self.sizes[touch.path] for touch in touches)
        for touch in touches:
            weight = self.weight[touch.path]
            if loose[touch] and not bounds:
                continue
            a, b = self.reference(touch.path), self.moved(touch.path)
            if loose[touch]:
                part, value = "bound", _bound(a, b, touch.axis, touch.block, loose[touch])
            else:
                part, value = touch.role, _product(a, b, touch.axis, touch.block)
                if family == Family.POSITIVE_MONOMIAL and part != "gain":
                    out.add("squares", part, _squares(b, touch.axis, touch.block), weight)
                if family in GENERAL and part != "gain":
                    x = b if part == "write" else a
                    out.add("grams", part, _product(x, x, touch.axis, touch.block), weight)
            out.add("products", "all" if family == Family.PERMUTATION else part, value, weight)
        return out

    def _loose(self, touch: Touch, name: str, settled: set[str] | None) -> tuple[int, ...]:
        if settled is None:
            return ()
        return tuple(
            k
            for k, f in enumerate(self.flat[touch.path])
            if f is not None and f.space in self.chosen and f.space not in settled | {name}
        )

    def visit(self, tell: Callable[[int, str], None]) -> None:
        """The first visit, outward from the outer spaces."""
        settled: set[str] = set()
        while rest := [name for name in self.chosen if name not in settled]:
            ready = [name for name in rest if self.within.get(name) not in rest]

            def settled_part(name: str) -> tuple[float, int]:
                sizes = [
                    (self.sizes[t.path], not self._loose(t, name, settled))
                    for t in self.touches[name]
                ]
                part = sum(n for n, fixed in sizes if fixed) / max(1, sum(n for n, _ in sizes))
                return part, len(sizes)

            name = max(ready, key=settled_part)  # the first of equals
            tell(0, name)
            cost = self.cost(name, settled)
            self.take(name, solver(self.chosen[name])(cost, self.assign, name in self.within))
            settled.add(name)
            if not any(self._loose(touch, name, settled) for touch in self.touches[name]):
                self.best.add(name)

    def step(self, name: str) -> bool:
        """The best map of one space, all others fixed, if it is nearer; whether it was."""
        if name in self.best:
            return False
        cost = self.cost(name)
        m = solver(self.chosen[name])(cost, self.assign, name in self.within)
        if Family.ISOMETRIC in self.chosen[name]:
            # |a - m b|^2 = |a|^2 + |b|^2 - 2 <a, m b>
            gained = 2 * _gained(m, cost)
        else:
            paths = {touch.path for touch in self.touches[name]}
            before, as_it_was = self.distance(paths), self.snapshot()
            self.take(name, m)
            gained = before - self.distance(paths)
            best = self.best
            self.restore(as_it_was)
            self.best = best
        # sums of products in float32, each relative to |reference_t| |params_t|
        scale = sum(self.weight[t.path] * self.norms[t.path] for t in self.touches[name])
        self.best.add(name)
        if not gained > 8 * EPS * scale:  # a NaN is no gain
            return False
        self.take(name, m)
        return True


def recurrent(spec: Spec) -> dict[str, str]:
    """The leaves of an unfused spec with a space on more than one of their axes, and which."""
    repeated = {}
    for path, axes in spec.leaves:
        names = [f.space for axis in axes for f in axis]
        if again := [name for name in names if names.count(name) > 1]:
            repeated[path] = again[0]
    return repeated


def apart(argument: str, tree: PyTree, spec: Spec) -> dict[str, Any]:
    """The leaves of a tree by path, fused ones block by block; their shapes checked."""
    return unfuse(checked_leaves(argument, tree, spec, leaf_paths(tree)), spec)[0]


def arrays(argument: str, tree: PyTree, spec: Spec, paths: Iterable[str]) -> dict[str, Array]:
    """The named leaves of a tree, one axis per factor, in float32 at least; checked."""
    leaves = checked_leaves(argument, tree, spec, paths)
    return {path: _factored(argument, path, x, spec) for path, x in leaves.items()}


def checked_leaves(argument: str, tree: PyTree, spec: Spec, paths: Iterable[str]) -> dict[str, Any]:
    """The named leaves of a tree, their shapes checked."""
    leaves = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    for path in leaves:
        spec.axes(path)
    for path in paths:
        if path not in leaves:
            raise ValueError(f"{argument} has no leaf {path!r}{nearest(path, leaves)}")
        x, sizes = leaves[path], spec.shape(path)
        shape = np.shape(x) if not hasattr(x, "shape") else tuple(x.shape)
        fits = len(sizes) == len(shape) and all(
            n in (m, None) for n, m in zip(sizes, shape, strict=True)
        )
        if not fits:
            said = ", ".join("_" if n is None else str(n) for n in sizes)
            raise ValueError(
                f"{argument} leaf {path!r} has shape {list(shape)}, but the spec says "
                f"[{said}]: only networks of one shape can be matched"
            )
    return {path: leaves[path] for path in paths}


def _factored(argument: str, path: str, x: Any, spec: Spec) -> Array:
    values = x if isinstance(x, jax.Array) else np.asarray(x)
    host = concrete(values)
    if host is None:
        raise ValueError(f"{argument} leaf {path!r} is traced: weights are matched outside jit")
    if not jnp.issubdtype(values.dtype, jnp.floating) or values.dtype.itemsize == 1:
        raise ValueError(
            f"{argument} leaf {path!r} is {values.dtype}: only real numbers of 16 bits or more are "
            "matched, cast it first"
        )
    # extremes, as a NaN is both: no copy of the leaf is made
    if not np.isfinite([host.min(initial=0), host.max(initial=0)]).all():
        raise ValueError(f"{argument} leaf {path!r} has values that are not finite")
    wide = jnp.asarray(as_array(values), jnp.promote_types(values.dtype, jnp.float32))
    return factors(spec, path, wide)


def _gained(m: SpaceMap, cost: Cost) -> float:
    """sum_t w_t (<a, m b> - <a, b>) for an isometric map, in float64."""
    total = 0.0
    for part, product in cost.products.items():
        old = np.trace(product, axis1=-2, axis2=-1).sum()
        if m.index is None:
            new = (np.asarray(m.write, np.float64) * product).sum()
        else:
            index = np.asarray(m.index)[..., None]
            new = np.take_along_axis(product, index, -1)[..., 0]
            scale = m.entries[0]
            signs = 1 if scale is None or part == "gain" else np.asarray(scale, np.float64)
            new = (new * signs).sum()
        total += float(new - old)
    return total


@partial(jax.jit, static_argnums=(2, 3))
def _product(a: Array, b: Array, axis: int, block: int | None) -> Float[Array, "... n n"]:
    """a @ b.T along one axis, for each index of the block axis if there is one."""
    if block is None:
        a, b = (jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
        return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)
    count, n = a.shape[block], a.shape[axis]
    a, b = (jnp.moveaxis(x, (block, axis), (0, 1)).reshape(count, n, -1) for x in (a, b))
    return jnp.einsum("hik,hjk->hij", a, b, precision=jax.lax.Precision.HIGHEST)


@partial(jax.jit, static_argnums=(1, 2))
def _squares(b: Array, axis: int, block: int | None) -> Float[Array, "... n"]:
    keep = (axis,) if block is None else (block, axis)
    total = jnp.sum(b**2, axis=tuple(k for k in range(b.ndim) if k not in keep))
    return total if block is None or block < axis else total.T


@partial(jax.jit, static_argnums=(2, 3, 4))
def _bound(
    a: Array, b: Array, axis: int, block: int | None, loose: tuple[int, ...]
) -> Float[Array, "... n n"]:
    """max over isometries U of the loose axes of <a_i, U b_j>: the nuclear norm of a_i.T b_j.

    |a_i| |b_j|, which is no less, where the matrices would be too many to be worth it.
    """
    front = (axis,) if block is None else (block, axis)
    back = tuple(range(-len(loose), 0))
    lead = len(front)

    def split(x: Array) -> Array:
        x = jnp.moveaxis(jnp.moveaxis(x, loose, back), _after(front, loose), tuple(range(lead)))
        return x.reshape(*x.shape[:lead], -1, math.prod(x.shape[back[0] :]))

    a, b = split(a), split(b)
    n, rest, free = a.shape[-3:]
    if rest == 1 or n * n * free * free > 2**24:
        a, b = (jnp.sqrt(jnp.sum(x**2, axis=(-1, -2))) for x in (a, b))
        return a[..., :, None] * b[..., None, :]
    pairs = jnp.einsum("...iru,...jrv->...ijuv", a, b, precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.svd(pairs, compute_uv=False).sum(-1)


def _after(front: tuple[int, ...], loose: tuple[int, ...]) -> tuple[int, ...]:
    """Where axes are once the loose ones have moved to the back."""
    return tuple(k - sum(other < k for other in loose) for k in front)


@jax.jit
def _distance_of(a: Array, b: Array) -> Array:
    return jnp.sum((a - b) ** 2)


def _distance(a: Array, b: Array) -> float:
    return float(_distance_of(a, b))


def _norm(x: Array) -> float:
    return float(np.linalg.norm(np.ravel(x)))
