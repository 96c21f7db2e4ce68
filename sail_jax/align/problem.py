"""One network moved toward another, space by space: the state of a descent, and its products."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from sail_jax.align.blocks import along_block, check_blocks, factors
from sail_jax.align.solvers import solver
from sail_jax.axes import Factor, Role
from sail_jax.checks import concrete, nearest
from sail_jax.families import Family
from sail_jax.maps import SpaceMap, compose, identity
from sail_jax.spaces import Spec
from sail_jax.trees import leaf_paths

__all__ = ["EPS", "Assign", "Problem", "arrays"]

Assign = Callable[[Float[ArrayLike, "n n"]], Int[ArrayLike, "n"]]

EPS = float(jnp.finfo(jnp.float32).eps)


class Touch(NamedTuple):
    """A tensor that touches a space: at which factor axis, as what, and where its block is."""

    path: str
    axis: int
    role: Role
    block: int | None


class Term(NamedTuple):
    """What one tensor says about a space; `product` is weight * reference @ params.T over it."""

    touch: Touch
    weight: float
    a: Array
    b: Array
    product: Float[np.ndarray, "... n n"]
    signed: bool = True


class Problem:
    """Both networks with an axis per factor, the second moved along as maps are found."""

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
        found = [k for k, f in enumerate(self.flat[path]) if f is not None and f.space == name]
        return found[0] if found else None

    def load(
        self,
        reference: PyTree,
        params: PyTree,
        normalize: bool,
        weights: Mapping[str, float] | None,
    ) -> None:
        paths = sorted({touch.path for touches in self.touches.values() for touch in touches})
        self.reference = arrays("reference", reference, self.spec, paths)
        self.moved = arrays("params", params, self.spec, paths)
        self.weight, self.norms = {}, {}
        for path in paths:
            if self.reference[path].shape != self.moved[path].shape:
                raise ValueError(
                    f"leaf {path!r} has shape {list(self.reference[path].shape)} in the reference "
                    f"and {list(self.moved[path].shape)} in params (an axis per factor)"
                )
            self.norms[path] = math.prod(
                float(np.linalg.norm(np.asarray(side[path], np.float64)))
                for side in (self.reference, self.moved)
            )
            one = 1 / self.norms[path] if self.norms[path] else 0.0
            self.weight[path] = one if normalize else 1.0
        for path, weight in (weights or {}).items():
            self.spec.axes(path)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weights[{path!r}] must be finite and not negative: {weight}")
            if path in self.weight:
                self.weight[path] = float(weight)
        self.maps = self.identities()

    def identities(self) -> dict[str, SpaceMap]:
        out = {name: identity(self.spec.space(name).size) for name in self.chosen}
        for name in self.within:
            count = self.spec.space(self.within[name]).size
            out[name] = jax.tree.map(lambda x, count=count: jnp.stack([x] * count), out[name])
        return out

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
        return sum(self.weight[p] * _distance(self.reference[p], self.moved[p]) for p in paths)

    def take(self, name: str, m: SpaceMap) -> None:
        """Move the second network by m, and remember it."""
        for path, axis, role, block in self.touches[name]:
            self.moved[path] = along_block(m, self.moved[path], axis, block, role)
        together = jax.vmap(compose) if name in self.within else compose
        self.maps[name] = together(m, self.maps[name])
        for inner, block in self.within.items():
            if block == name and m.index is not None:
                index = m.index
                self.maps[inner] = jax.tree.map(lambda x, i=index: x[i], self.maps[inner])

    def terms(self, name: str, settled: set[str] | None = None) -> list[Term]:
        """What each tensor says about a space, or all that is settled, by one product each."""
        found = []
        loose, known, total = [], 0.0, 0.0
        for touch in self.touches[name]:
            weight = self.weight[touch.path]
            a, b = self.reference[touch.path], self.moved[touch.path]
            others = self._loose(touch, name, settled)
            total += a.size
            if others:
                loose.append((touch, weight, a, b, others))
                continue
            known += a.size
            product = weight * _host(_product(a, b, touch.axis, touch.block))
            found.append(Term(touch, weight, a, b, product, touch.role != "gain"))
        if 2 * known < total:
            for touch, weight, a, b, others in loose:
                bound = weight * _host(_bound(a, b, touch.axis, touch.block, others))
                found.append(Term(touch, weight, a, b, bound, False))
        return found

    def _loose(self, touch: Touch, name: str, settled: set[str] | None) -> tuple[int, ...]:
        if settled is None:
            return ()
        return tuple(
            k
            for k, f in enumerate(self.flat[touch.path])
            if f is not None and f.space in self.chosen and f.space not in settled | {name}
        )

    def visit(self) -> None:
        """The first visit, outward from the outer spaces."""
        settled: set[str] = set()
        while rest := [name for name in self.chosen if name not in settled]:
            ready = [name for name in rest if self.within.get(name) not in rest]

            def settled_part(name: str) -> tuple[float, int]:
                sizes = [
                    (self.moved[t.path].size, not self._loose(t, name, settled))
                    for t in self.touches[name]
                ]
                part = sum(n for n, known in sizes if known) / sum(n for n, _ in sizes)
                return part, len(sizes)

            name = max(ready, key=settled_part)  # the first of equals
            terms = self.terms(name, settled)
            self.take(name, solver(self.chosen[name])(terms, self.assign, name in self.within))
            settled.add(name)

    def step(self, name: str) -> bool:
        """The best map of one space, all others fixed, if it is nearer; whether it was."""
        terms = self.terms(name)
        blocked = name in self.within
        m = solver(self.chosen[name])(terms, self.assign, blocked)
        if Family.ISOMETRIC in self.chosen[name]:
            # |a - m b|^2 = |a|^2 + |b|^2 - 2 <a, m b>
            gained = 2 * _gained(m, terms, blocked)
        else:
            paths = {touch.path for touch in self.touches[name]}
            before, moved, maps = self.distance(paths), dict(self.moved), dict(self.maps)
            self.take(name, m)
            gained = before - self.distance(paths)
            self.moved, self.maps = moved, maps
        # sums of products in float32, each relative to |reference_t| |params_t|
        scale = sum(t.weight * self.norms[t.touch.path] for t in terms)
        if not gained > 8 * EPS * scale:  # a NaN is no gain
            return False
        self.take(name, m)
        return True


def arrays(argument: str, tree: PyTree, spec: Spec, paths: Iterable[str]) -> dict[str, Array]:
    """The named leaves of a tree, one axis per factor, in float32 at least; checked."""
    found = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    for path in found:
        spec.axes(path)
    out = {}
    for path in paths:
        if path not in found:
            raise ValueError(f"{argument} has no leaf {path!r}{nearest(path, found)}")
        x = found[path]
        sizes = [
            math.prod(spec.space(f.space).size for f in a) if a else "_" for a in spec.axes(path)
        ]
        fits = len(sizes) == x.ndim and all(
            n in (m, "_") for n, m in zip(sizes, x.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{argument} leaf {path!r} has shape {list(x.shape)}, but the spec says "
                f"[{', '.join(map(str, sizes))}]: only networks of one shape can be matched"
            )
        values = concrete(x)
        if values is None:
            raise ValueError(f"{argument} leaf {path!r} is traced: weights are matched outside jit")
        if not np.isfinite(values.astype(np.float32)).all():
            raise ValueError(f"{argument} leaf {path!r} has values that are not finite")
        out[path] = factors(spec, path, jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)))
    return out


def _gained(m: SpaceMap, terms: list[Term], blocked: bool) -> float:
    """sum_t w_t (<a, m b> - <a, b>) for an isometric map, in float64."""
    total = 0.0
    for touch, product in ((t.touch, t.product) for t in terms):
        old = np.trace(product, axis1=-2, axis2=-1).sum()
        if m.index is None:
            new = (np.asarray(m.write, np.float64) * product).sum()
        else:
            index = np.asarray(m.index)[..., None]
            new = np.take_along_axis(product, index, -1)[..., 0]
            scale = m.entries[0]
            signs = 1 if scale is None or touch.role == "gain" else np.asarray(scale, np.float64)
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


def _host(x: Array) -> np.ndarray:
    return np.asarray(x, np.float64)
