"""The state of weight matching: one network is moved toward another, space by space.

`match_weights` chooses the next space. `Problem` keeps the leaves of both networks and the maps
found so far. It sums the terms of all tensors for a space (`Cost`), calls a solver for the best
map, and moves the second network.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from sail_jax.align.assignment import Assign
from sail_jax.align.blocks import Values, along_all, along_block, check_blocks, factors
from sail_jax.align.nuclear import nuclear_norms
from sail_jax.align.solvers import GENERAL, Cost, solver
from sail_jax.basis.axes import Axis, Factor, Role
from sail_jax.basis.change_basis import unfuse
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, compose, identity
from sail_jax.basis.spaces import Spec, Use
from sail_jax.checks import as_array, concrete, nearest
from sail_jax.merging.arithmetic import in_64_bits, unit_of
from sail_jax.trees import leaf_paths

EPS = float(jnp.finfo(jnp.float32).eps)
PIECE = 1 << 20  # entries of a large tensor that are read at once
SMALL = 1 << 16  # entries of a leaf that NumPy sums before XLA has compiled a program for it
ONE_THREAD = 1 << 18  # multiplications of a matrix product that OpenBLAS leaves to one thread
Scalar: TypeAlias = np.generic | Float[Array, ""]
ASIDE = 1 << 8  # units of a space that is solved in another thread
Unit: TypeAlias = float | Float[Array, ""]
Snapshot: TypeAlias = tuple[dict[str, SpaceMap], dict[str, list[Values]]]


class Touch(NamedTuple):
    """A tensor that contains a space, and the position of the space in it.

    Attributes:
      path: The path of the leaf.
      axis: The axis of the space, counting one axis per factor.
      role: The leaf's role for the space.
      block: The axis that numbers the blocks of the space; None for a single map.
    """

    path: str
    axis: int
    role: Role
    block: int | None


class Problem:
    """Two networks with an axis per factor. The second one is moved as maps are found.

    A leaf is an array, or any object with a shape, a dtype and `__array__`. Such an object is read
    when it is needed. Small leaves are NumPy arrays, for which no program is compiled.

    Attributes:
      spec: The unfused spec of both.
      chosen: The family of each space to match.
      within: The block of each space that has one map per unit of the block.
      assign: The solver of the assignment problem, from benefits `(n, n)` to an index `(n,)`.
      flat: The factors of each leaf in order; None for an axis without a space.
      touches: The tensors of each space.
      leaves: The given leaves of the reference and of the second network, by path.
      sizes: The number of entries of each leaf.
      kept: The leaves in memory: the reference's, and the moved ones of the second network.
      weight: The weight w_t of each leaf.
      norms: |reference_t| |params_t| of each leaf.
      maps: The current map of each space.
      best: The spaces whose map is optimal while no other space moves.
      recurrent: The spaces that occur twice in a leaf with a weight.
      taken: The number of steps that reduced the distance.
      pending: What remains to be done for each space that another thread is solving.
    """

    def __init__(
        self, spec: Spec, chosen: Mapping[str, Family], within: Mapping[str, str], assign: Assign
    ) -> None:
        self.spec, self.chosen, self.within, self.assign = spec, chosen, within, assign
        self.flat: dict[str, list[Factor | None]] = {
            path: [f for axis in axes for f in axis or (None,)] for path, axes in spec.leaves
        }
        self.taken = 0
        self.pending: dict[str, Callable[[], None]] = {}
        self._pool = ThreadPoolExecutor(2, "align")
        self.touches: dict[str, list[Touch]] = {}
        for name in chosen:
            block = within.get(name)
            self.touches[name] = [
                Touch(use.path, self._axis(use), use.role, self._position(use.path, block))
                for use in spec.uses(name)
            ]

    def _axis(self, use: Use) -> int:
        """Returns the index of a use among the factor axes of its leaf."""
        before = self.spec.axes(use.path)[: use.axis]
        return sum(max(len(axis), 1) for axis in before) + use.factor

    def _position(self, path: str, name: str | None) -> int | None:
        """Returns the index of a leaf's factor axis with this space; None if there is none."""
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
        """Loads and checks both networks, with identity maps.

        Args:
          reference: The leaves of the network that stays, by path.
          params: The leaves of the network to move, by path, with the same shapes.
          normalize: Whether the weight of tensor t is 1 / (|reference_t| |params_t|); else 1.
          weights: Weights by path, which override these.
          keep: The number of bytes of non-array leaves that are kept in memory. None: all.

        Raises:
          ValueError: For a space without a weighted leaf; leaves that are missing, of different
            shapes, traced, not finite or not real floats; and weights that are negative, not finite
            or for an unknown leaf.
        """
        for path in recurrent(self.spec):
            # With weight 0 such a leaf does not count, and the map of its space is found exactly.
            if (weights or {}).get(path) == 0:
                for name, touches in self.touches.items():
                    self.touches[name] = [touch for touch in touches if touch.path != path]
        self.recurrent = {
            name
            for name, touches in self.touches.items()
            if len({touch.path for touch in touches}) < len(touches)
        }
        for name, touches in self.touches.items():
            if not touches:
                raise ValueError(f"all leaves with the space {name!r} have weight 0: leave it out")
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
        self.kept: dict[str, list[Values]] = {}
        self.weight, self.norms = {}, {}
        self.maps = self.identities()
        # Spaces whose map is optimal while no other space moves. They require no step until a
        # neighbour has moved.
        self.best: set[str] = set()
        for path in paths:
            # The second network counts twice: as moved, and as given, for undoing the visit.
            need = sum(
                self.sizes[path] * side[path].dtype.itemsize * times
                for times, side in enumerate(self.leaves, 1)
                if not isinstance(side[path], jax.Array | np.ndarray)
            )
            if keep is None or need <= keep:
                self.kept[path] = [self._read(side, path) for side in range(2)]
                keep = None if keep is None else keep - need
            # Computed once from the given networks: weights must not change as maps are found.
            lengths = np.zeros(2)
            for piece in self.pieces(path):
                for argument, x in zip(("reference", "params"), piece, strict=True):
                    check_finite(argument, path, x)
                lengths += [square(x) for x in piece]
            self.norms[path] = float(np.sqrt(lengths).prod())
            scale = 1 / self.norms[path] if self.norms[path] else 0.0
            self.weight[path] = scale if normalize else 1.0
        for path, weight in (weights or {}).items():
            self.spec.axes(path)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weights[{path!r}] must be finite and not negative: {weight}")
            if path in self.weight:
                self.weight[path] = float(weight)

    def _read(self, side: int, path: str, cut: slice | None = None) -> Values:
        """Reads a given leaf or a part of it with an axis per factor, and checks its dtype."""
        leaf = self.leaves[side][path]
        x = leaf if cut is None else leaf[cut]
        return factored(("reference", "params")[side], path, x, self.spec)

    def reference(self, path: str, cut: slice | None = None) -> Values:
        """Returns a leaf of the reference or a part of it."""
        return _part(self.kept[path][0], cut) if path in self.kept else self._read(0, path, cut)

    def moved(self, path: str, cut: slice | None = None) -> Values:
        """Returns a leaf of the second network, moved by the current maps.

        Args:
          path: The path of the leaf.
          cut: The part of the first axis, which no map moves. None: all of it.

        Returns:
          The moved leaf with an axis per factor, in its own dtype if units are only permuted.
        """
        if path in self.kept:
            return _part(self.kept[path][1], cut)
        return along_all(self._read(1, path, cut), self.flat[path], self.maps, self.within)

    def pieces(self, path: str) -> Iterator[tuple[Values, Values]]:
        """Reads a leaf of both networks (the second as moved) in pieces with terms that add up."""
        parts = cuts(self.leaves[0][path].shape, self.spec.axes(path), self.chosen)
        if path not in self.kept and not all(hasattr(x[path], "__getitem__") for x in self.leaves):
            parts = [None]
        for cut in parts:
            yield self.reference(path, cut), self.moved(path, cut)

    def _near(self, name: str, others: Iterable[str]) -> set[str]:
        """Returns the spaces among others that share a tensor with this space."""
        paths = {touch.path for touch in self.touches[name]}
        return {
            other
            for other in others
            if not paths.isdisjoint(touch.path for touch in self.touches[other])
        }

    def identities(self) -> dict[str, SpaceMap]:
        """Returns an identity map for each space.

        Maps of spaces in `within` are stacked on a leading axis.
        """
        out = {name: identity(self.spec.space(name).size) for name in self.chosen}
        for name in self.within:
            count = self.spec.space(self.within[name]).size
            out[name] = jax.tree.map(lambda x, count=count: np.stack([x] * count), out[name])
        return out

    def snapshot(self) -> Snapshot:
        """Copies the state of the second network."""
        return dict(self.maps), {path: list(sides) for path, sides in self.kept.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Restores an earlier state of the second network."""
        self.maps, self.kept = snapshot
        self.best = set()

    def start(self, init: Mapping[str, SpaceMap]) -> None:
        """Moves the second network by given maps.

        `init` contains maps by space, such as the result of `match_weights`. Raises a ValueError if
        a space is not matched, or a map does not match its size or block.
        """
        for name in init:
            if name not in self.chosen:
                raise ValueError(f"init has a map of {name!r}, which is not matched")
        self.spec.check({name: m for name, m in init.items() if name not in self.within})
        inner = {name: m for name, m in init.items() if name in self.within}
        check_blocks(self.spec, inner, self.within)
        # Blocks come first, since inner maps are numbered by the final positions of the blocks.
        for name in sorted(init, key=lambda name: name in self.within):  # blocks first
            self.take(name, init[name])

    def distance(self, paths: Iterable[str] | None = None) -> float:
        """Computes the distance of the networks: sum_t w_t |reference_t - moved_t|^2.

        Args:
          paths: The leaves t to sum over. None: all with a matched space.

        Returns:
          The weighted squared distance.
        """
        paths = self.weight if paths is None else paths
        return sum(
            self.weight[p] * square(a, b)
            for p in paths
            if self.weight[p]
            for a, b in self.pieces(p)
        )

    def take(self, name: str, m: SpaceMap) -> None:
        """Moves the second network by one more map of a space, and records it.

        `m` is applied after the current map.
        """
        for path, axis, role, block in self.touches[name]:
            if path in self.kept:
                sides = self.kept[path]
                sides[1] = along_block(m, sides[1], axis, block, role)
        # Maps of spaces that share a tensor with this one are no longer optimal.
        self.best -= self._near(name, self.best - {name})
        together = jax.vmap(compose) if name in self.within else compose
        self.maps[name] = together(m, self.maps[name])
        # Maps of spaces inside this one are numbered by its units, which have moved.
        for inner, block in self.within.items():
            if block == name and m.index is not None:
                index = m.index
                self.maps[inner] = jax.tree.map(
                    partial(jnp.take, indices=index, axis=0), self.maps[inner]
                )

    def cost(self, name: str, settled: set[str] | None = None) -> Cost:
        """Sums the terms of all tensors for a space, with one matrix product each.

        During the first visit `settled` contains the spaces matched so far. Tensors with other
        unmatched spaces are left out or enter through a bound. With None all tensors enter
        directly. Returns the sums, for a solver.
        """
        family, out = self.chosen[name], Cost({}, {}, {})
        touches = self.touches[name]
        loose = {touch: self._loose(touch, name, settled) for touch in touches}
        # A tensor is loose while another of its spaces is still unmatched. Its plain product would
        # compare units in two different orders.
        settled_size = sum(self.sizes[touch.path] for touch in touches if not loose[touch])
        # A bound is weaker than a product. It is used only where products would cover the smaller
        # part of the entries.
        bounds = 2 * settled_size < sum(self.sizes[touch.path] for touch in touches)
        for touch in touches:
            weight = self.weight[touch.path]
            if loose[touch] and not bounds:
                continue
            into = partial(out.add, weight=weight)
            role, where = touch.role, (touch.axis, touch.block)
            if loose[touch]:
                # A norm of all entries, which is not a sum over pieces.
                a, b = self.reference(touch.path), self.moved(touch.path)
                total = "all" if family == Family.PERMUTATION else "bound"
                into("products", total, _bound(a, b, *where, loose[touch]))
                continue
            total = "all" if family == Family.PERMUTATION else role
            for a, b in self.pieces(touch.path):
                into("products", total, _product(a, b, *where))
                if family == Family.POSITIVE_MONOMIAL and role != "gain":
                    into("squares", role, _squares(b, b, *where))
                if family in GENERAL and role != "gain":
                    # The Gram matrices on both sides of the Sylvester equation in
                    # `solvers._general`.
                    x = b if role == "write" else a
                    into("grams", role, _product(x, x, *where))
        return out

    def _loose(self, touch: Touch, name: str, settled: set[str] | None) -> tuple[int, ...]:
        """Returns the axes of a tensor with unmatched spaces, without this space's axis."""
        if settled is None:
            return ()
        return tuple(
            k
            for k, f in enumerate(self.flat[touch.path])
            if k != touch.axis and f is not None and f.space in self.chosen.keys() - settled
        )

    def _single(self, name: str) -> bool:
        """Checks whether only the identity is possible: a single unit that is permuted."""
        return self.spec.space(name).size == 1 and self.chosen[name] == Family.PERMUTATION

    def _solve(
        self,
        name: str,
        settled: set[str] | None,
        use: Callable[[str, Cost, SpaceMap], None],
    ) -> None:
        """Finds the best map of a space, and calls `use` with its name, its terms and the map.

        Another thread solves a large space, because SciPy and LAPACK release the interpreter lock.
        Meanwhile this thread sums the terms of a space that shares no tensor with it. `use` is
        called in this thread by `finish`, in the order of the spaces, so the results do not depend
        on the threads.
        """
        # Costs are as large as the largest tensors: while one is summed, a single other one exists.
        while len(self.pending) > 1:
            self.pending.pop(next(iter(self.pending)))()
        cost = self.cost(name, settled)
        solve = partial(solver(self.chosen[name]), cost, self.assign, name in self.within)
        # A step of any space lets recurrent spaces move again, so each step waits for the last.
        if self.recurrent or self.spec.space(name).size < ASIDE:
            use(name, cost, solve())
            return
        wide = jnp.result_type(float) == jnp.float64

        def in_same_width() -> SpaceMap:
            with in_64_bits(wide):
                return solve()

        found = self._pool.submit(in_same_width)
        self.pending[name] = lambda: use(name, cost, found.result())

    def finish(self, name: str | None = None) -> None:
        """Waits for the pending spaces that share a tensor with this space, or for all of them."""
        for other in [*self.pending]:
            if name is None or self._near(name, [other]):
                self.pending.pop(other)()

    def visit(self, tell: Callable[[int, str], None]) -> None:
        """Matches every space once, always the one with the largest settled share of its tensors.

        `tell` is called with 0 and the name of each space before it is matched.
        """
        settled: set[str] = set()
        while rest := [name for name in self.chosen if name not in settled]:
            # A space inside a block waits for the block. The block's map shows which copies of the
            # space belong together.
            ready = [name for name in rest if self.within.get(name) not in rest]

            def settled_part(name: str) -> tuple[float, int]:
                sizes = [
                    (self.sizes[t.path], not self._loose(t, name, settled))
                    for t in self.touches[name]
                ]
                part = sum(n for n, fixed in sizes if fixed) / max(1, sum(n for n, _ in sizes))
                return part, len(sizes)

            # Invariant: `settled` holds the spaces with maps. A tensor is compared exactly only if
            # its other spaces are all settled, or never matched. Of equal spaces, `max` takes the
            # first.
            name = max(ready, key=settled_part)
            tell(0, name)
            if self._single(name):
                # A solver would find the identity.
                self.maps[name] = replace(self.maps[name], family=Family.PERMUTATION)
                settled.add(name)
                continue
            self.finish(name)
            self._solve(name, settled, partial(self._visited, {*settled, name}))
            settled.add(name)
        self.finish()

    def _visited(self, settled: set[str], name: str, _: Cost, m: SpaceMap) -> None:
        """Applies the map of a visited space, which may be optimal already."""
        self.take(name, m)
        loose = any(self._loose(touch, name, settled) for touch in self.touches[name])
        if not loose and name not in self.recurrent:
            self.best.add(name)

    def step(self, name: str) -> None:
        """Computes the best map of a space, and applies it (`finish`) if that pays."""
        self.finish(name)
        if name not in self.best and not self._single(name):
            self._solve(name, None, self._take_if_nearer)

    def _take_if_nearer(self, name: str, cost: Cost, m: SpaceMap) -> None:
        """Applies the map of a space if it reduces the distance."""
        if Family.ISOMETRIC in self.chosen[name] and name not in self.recurrent:
            # |a - m b|^2 = |a|^2 + |b|^2 - 2 <a, m b>
            gained = 2 * _gained(m, cost)
        else:
            paths = {touch.path for touch in self.touches[name]}
            before, as_it_was = self.distance(paths), self.snapshot()
            self.take(name, m)
            # A scaling map also changes |b|, and a recurrent leaf changes along both axes. The gain
            # is therefore measured by trying the map.
            gained = before - self.distance(paths)
            best = self.best
            self.restore(as_it_was)
            self.best = best
        # The products are float32 sums, rounded relative to |reference_t| |params_t|. A smaller
        # gain may be rounding, and steps that follow it may never end.
        scale = sum(self.weight[t.path] * self.norms[t.path] for t in self.touches[name])
        self.best.add(name)
        if not gained > 8 * EPS * scale:  # a NaN does not count as a gain
            return
        self.taken += 1
        self.take(name, m)
        # The other axis of a recurrent leaf has moved.
        self.best -= self.recurrent


def recurrent(spec: Spec) -> dict[str, str]:
    """Finds the leaves with one space on more than one axis (recurrence).

    Args:
      spec: An unfused spec.

    Returns:
      The space for each such leaf; the first if there are several.
    """
    repeated = {}
    for path, axes in spec.leaves:
        names = [f.space for axis in axes for f in axis]
        if again := [name for name in names if names.count(name) > 1]:
            repeated[path] = again[0]
    return repeated


def apart(argument: str, tree: PyTree, spec: Spec) -> dict[str, Any]:
    """Splits a tree into leaves by path, and fused leaves into one leaf per block."""
    return unfuse(checked_leaves(argument, tree, spec, leaf_paths(tree)), spec)[0]


def arrays(argument: str, tree: PyTree, spec: Spec, paths: Iterable[str]) -> dict[str, Values]:
    """Returns the given leaves of a tree as checked arrays with one axis per factor."""
    leaves = checked_leaves(argument, tree, spec, paths)
    out = {path: factored(argument, path, x, spec) for path, x in leaves.items()}
    for path, x in out.items():
        check_finite(argument, path, x)
    return out


def check_finite(argument: str, path: str, x: Values) -> None:
    """Raises a ValueError if a leaf is traced or has non-finite values."""
    largest = concrete(_largest(x))
    if largest is None:
        raise ValueError(f"{argument} leaf {path!r} is traced: match weights outside jit")
    if not np.isfinite(largest):
        raise ValueError(f"{argument} leaf {path!r} has values that are not finite")


def checked_leaves(argument: str, tree: PyTree, spec: Spec, paths: Iterable[str]) -> dict[str, Any]:
    """Checks the shapes of a tree's leaves against the spec, and returns the leaves by path.

    Raises a ValueError for a leaf that is missing, unknown to the spec, or of another shape.
    """
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
                f"{argument} leaf {path!r} has shape {list(shape)}, but the spec requires "
                f"[{said}]: only networks of the same shape can be matched"
            )
    return {path: leaves[path] for path in paths}


def factored(argument: str, path: str, x: Any, spec: Spec) -> Values:
    """Reads a leaf or a part of it with one axis per factor, in its own dtype.

    A part has fewer entries along the first axis. The result is a NumPy array if it is small.
    Raises a ValueError for an unsupported dtype.
    """
    values = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(values.dtype, jnp.floating) or values.dtype.itemsize == 1:
        raise ValueError(
            f"{argument} leaf {path!r} is {values.dtype}: only real floats of 16 bits or more can "
            "be matched, cast it first"
        )
    host = concrete(values) if values.size <= SMALL else None
    if host is None:
        return factors(spec, path, as_array(values))
    return factors(spec, path, host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False))


def _part(x: Values, cut: slice | None) -> Values:
    """Returns a part of the first axis of an array in memory."""
    if isinstance(x, np.ndarray):
        return x if cut is None else x[cut]
    # One program serves all parts of a size. A Python index would be compiled into the program.
    return x if cut is None else jax.lax.dynamic_slice_in_dim(x, cut.start, cut.stop - cut.start)


def cuts(
    shape: tuple[int, ...], axes: tuple[Axis, ...], matched: Container[str]
) -> list[slice | None]:
    """Lists the parts in which a leaf is read; [None] if it is read at once.

    A large leaf is cut along its first axis if this axis is in no matched space. Products over all
    axes except one are then sums over parts.

    Args:
      shape: The shape of the leaf.
      axes: Its axes.
      matched: The matched spaces.

    Returns:
      Slices of the first axis.
    """
    size = math.prod(shape)
    if size <= PIECE or len(axes[0]) > 1 or any(f.space in matched for f in axes[0]):
        return [None]
    rows = max(1, PIECE * shape[0] // size)
    return [slice(k, min(k + rows, shape[0])) for k in range(0, shape[0], rows)]


def _gained(m: SpaceMap, cost: Cost) -> float:
    """Computes sum_t w_t (<a, m b> - <a, b>) for an isometric map, in float64."""
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


def _by_size(compute: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Makes a function that NumPy computes for small leaves, and a compiled program for others.

    `static` has the numbers of the arguments that are not arrays. Small leaves are NumPy arrays
    (`factored`).
    """
    program = jax.jit(compute, static_argnums=static)

    @functools.wraps(compute)
    def computed(x: Values, *rest: Any) -> Any:
        return compute(x, *rest) if isinstance(x, np.ndarray) else program(x, *rest)

    return computed


def _wide(x: Values) -> Values:
    """Widens an array for sums, to float32 or wider in XLA and to float64 in NumPy."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@_by_size
def _largest(x: Values) -> Scalar:
    """Returns the largest magnitude, or NaN if there is one."""
    return abs(x).max(initial=0)


def _over_unit(x: Values) -> tuple[Values, Unit]:
    """Widens an array, divides it by a unit of the size of its largest entry, and returns both."""
    wide = _wide(x)
    largest = _largest(wide)
    # In float64 the rounding of a quotient does not matter, and a unit need not be a power of two.
    unit = largest or 1.0 if isinstance(x, np.ndarray) else unit_of(largest)
    return wide * (1 / unit), unit


def _at_unit_scale(compute: Callable[..., Values]) -> Callable[..., np.ndarray]:
    """Makes a bilinear function of two arrays compute at their scales, with a result in float64.

    Products of float32 numbers may not fit float32. In float64 they fit at any scale.
    """

    def in_units(a: Values, b: Values, *options: Any) -> tuple[Values, Unit, Unit]:
        (a, first), (b, second) = _over_unit(a), _over_unit(b)
        return compute(a, b, *options), first, second

    in_units = _by_size(in_units, (2, 3))

    @functools.wraps(compute)
    def scaled(a: Values, b: Values, *options: Any) -> np.ndarray:
        value, *units = in_units(a, b, *options)
        wide = np.array(value, np.float64)
        wide *= float(units[0]) * float(units[1])
        return wide

    return scaled


def _rows(
    x: Values, axis: int, block: int | None, loose: tuple[int, ...] = ()
) -> Float[Values, "... n rest free"]:
    """Puts an axis behind its block axis in front; merges the loose axes, and the other axes."""
    front = (axis,) if block is None else (block, axis)
    rest = tuple(k for k in range(x.ndim) if k not in front + loose)
    sizes = [math.prod(x.shape[k] for k in merged) for merged in (rest, loose)]
    return x.transpose(front + rest + loose).reshape(*(x.shape[k] for k in front), *sizes)


@_at_unit_scale
def _product(a: Values, b: Values, axis: int, block: int | None) -> Float[Values, "... n n"]:
    """Computes the products a_i . b_j over all axes but one, for each index of a block axis."""
    left, right = (_rows(x, axis, block)[..., 0] for x in (a, b))
    *_, n, rest = left.shape
    # In products that are small for several threads, these mostly wait for each other.
    if isinstance(left, np.ndarray) and n * n * rest <= ONE_THREAD:
        return left @ right.swapaxes(-1, -2)
    return _multiplied(left, right)


@jax.jit
def _multiplied(left: ArrayLike, right: ArrayLike) -> Float[Array, "... n n"]:
    return jnp.einsum("...ik,...jk->...ij", left, right, precision=jax.lax.Precision.HIGHEST)


@_at_unit_scale
def _squares(a: Values, b: Values, axis: int, block: int | None) -> Float[Values, "... n"]:
    """Computes the products a_j . b_j over all axes but one, and the block axis if there is one."""
    return _rows(a * b, axis, block).sum((-1, -2))


def _bound(
    a: Values, b: Values, axis: int, block: int | None, loose: tuple[int, ...]
) -> Float[np.ndarray, "... n n"]:
    """Computes an upper bound on a_i . b_j for any isometric map of the loose axes.

    max over isometries U of <a_i, U b_j> is the nuclear norm of a_i^T b_j. If these matrices would
    be too many, the looser bound |a_i| |b_j| is used.
    """
    (left, first), (right, second) = (_split(x, axis, block, loose) for x in (a, b))
    *lead, n, rest, free = left.shape
    # 2^24 float32 entries of all pairs are 64 MiB
    if rest == 1 or n * n * free * free > 2**24:
        lengths = [np.asarray(_lengths(x), np.float64) for x in (left, right)]
        value = lengths[0][..., :, None] * lengths[1][..., None, :]
    else:
        blocks = [np.asarray(x, np.float32).reshape(-1, n, rest, free) for x in (left, right)]
        value = np.stack([nuclear_norms(*pair) for pair in zip(*blocks, strict=True)])
        value = value.astype(np.float64).reshape(*lead, n, n)
    return value * (float(first) * float(second))


def _split_at_unit_scale(
    x: Values, axis: int, block: int | None, loose: tuple[int, ...]
) -> tuple[Float[Values, "... n rest free"], Unit]:
    """Divides an array by its unit, and merges its axes as `_rows` does; returns both."""
    x, unit = _over_unit(x)
    return _rows(x, axis, block, loose), unit


_split = _by_size(_split_at_unit_scale, (1, 2, 3))


@_by_size
def _lengths(x: Float[Values, "... n rest free"]) -> Float[Values, "... n"]:
    return (x**2).sum((-1, -2)) ** 0.5


@_by_size
def _square_of(a: Values, b: ArrayLike) -> tuple[Scalar, Unit]:
    scaled, unit = _over_unit(_wide(a) - b)
    return (scaled**2).sum(), unit


def square(a: Values, b: ArrayLike = 0.0) -> float:
    """Computes |a - b|^2, which may exceed the range of float32.

    >>> square(jnp.full(4, 2.0**-80)) == 4 * 2.0**-160
    True
    """
    value, unit = map(float, _square_of(a, b))
    return value * unit**2
