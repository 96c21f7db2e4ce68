"""Weight matching: the maps that bring one network's units nearest to another's.

Coordinate descent over spaces (Git Re-Basin, Ainsworth et al. 2023, algorithm 1): with all other
spaces fixed, the best map of one is a small problem with a known solution, whose data are one
matrix product for each tensor that touches the space.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from sail_jax.align.assignment import hungarian
from sail_jax.align.blocks import check_within
from sail_jax.align.problem import Assign, Problem, apart, recurrent
from sail_jax.align.solvers import SOLVERS
from sail_jax.basis.axes import path_pattern
from sail_jax.basis.certificate import exactness
from sail_jax.basis.change_basis import unfused
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity
from sail_jax.basis.spaces import Spec
from sail_jax.checks import nearest

__all__ = ["Families", "Matching", "families", "match_weights", "weight_matching"]

Families = Family | Mapping[str, Family] | None


class Matching(NamedTuple):
    """`maps` for `change_basis`, and how they were found.

    distance: sum_t w_t |reference_t - moved_t|^2 over the tensors t that the maps touch, at the
    start and after each sweep; it never rises. converged: the last sweep improved nothing.
    """

    maps: dict[str, SpaceMap]
    distance: tuple[float, ...]
    converged: bool


def weight_matching(
    reference: PyTree, params: PyTree, spec: Spec, **options: Any
) -> dict[str, SpaceMap]:
    """The maps of `match_weights`: `change_basis(params, spec, maps)` is near `reference`.

    >>> import jax.numpy as jnp
    >>> from sail_jax.basis.change_basis import change_basis
    >>> from sail_jax.basis.spaces import spec
    >>> a = {"in": jnp.array([[1.0, 2.0]]), "out": jnp.array([[3.0], [4.0]])}
    >>> b = {"in": jnp.array([[2.0, 1.0]]), "out": jnp.array([[4.0], [3.0]])}
    >>> s = spec(a, {"in": "x* h", "out": "h* y"}, spaces={"h": "relu", "{x,y}": "outer"})
    >>> jax.tree.map(lambda w: w.tolist(), change_basis(b, s, weight_matching(a, b, s)))
    {'in': [[1.0, 2.0]], 'out': [[3.0], [4.0]]}
    """
    return match_weights(reference, params, spec, **options).maps


def match_weights(
    reference: PyTree,
    params: PyTree,
    spec: Spec,
    *,
    family: Families = None,
    spaces: Iterable[str] | None = None,
    within: Mapping[str, str] | None = None,
    normalize: bool = True,
    weights: Mapping[str, float] | None = None,
    init: Mapping[str, SpaceMap] | None = None,
    key: PRNGKeyArray | None = None,
    assignment: Assign = hungarian,
    max_sweeps: int = 100,
    keep: int | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Matching:
    """Coordinate descent on sum_t w_t |reference_t - moved_t|^2 over the maps of inner spaces.

    `spaces`: those to match (None: all that are not "outer" or "stack"). `family`: the maps to
    choose from, one for all or by patterns of space names, PERMUTATION where not said:

    - PERMUTATION: a linear assignment, solved by `assignment` ([n, n] benefit -> index).
    - SIGNED_PERMUTATION ("odd" spaces): an assignment by |benefit|, then the signs.
    - POSITIVE_MONOMIAL ("relu"): an assignment by the distance at each pair's best scale.
    - ORTHOGONAL ("rmsnorm", "linear"): Procrustes. Gains are to be folded (`fold_scales`).
    - LINEAR ("linear"): any invertible map, by a Sylvester equation; taken where it is nearer.

    `within` gives each unit of a block (a head, a layer of a stack) its own map of an inner space,
    see `sail_jax.align.blocks`; the maps then are for `change_blocks`. `normalize` weighs each
    tensor by 1 / (|reference_t| |params_t|), so that none dominates by its norm; without, all
    weigh one, as published. `weights`, by path, override either. A fused leaf (`resid* (qk + v)`)
    counts as one tensor for each of its blocks.

    A first visit goes outward from the outer spaces: each space is matched by the tensors whose
    other spaces are settled, and where those are the lesser part, by the others through a bound
    that does not depend on what is unsettled (a nuclear norm). If this is no nearer than `params`
    as they are, these are kept. `init`, maps such as this function returned, takes the place of
    that visit. Then sweeps run, in the spec's order or, with a key, in random orders, each step
    taken only if it is nearer beyond rounding, until a sweep takes none, or `max_sweeps`. The
    same arguments give the same maps. On a host; sums in float32, comparisons in float64.

    Leaves may also be objects with a shape, a dtype and `__array__` (tensors on disk): such are
    read whenever a space needs them, and at most `keep` bytes of them kept (None: all), so that
    memory is that of one tensor of each network and of the [n, n] costs of one space.
    `progress(sweep, space)` is called before each space, the first visit being sweep 0.

    Raises ValueError, naming leaf or space, for trees that are not the spec's, values that are
    not finite or are traced, a family that the space's nonlinearity does not allow, a space
    that occurs twice in one leaf (recurrence: its map enters quadratically), unless
    `weights` give that leaf no say.
    """
    within = dict(within or {})
    weights = _by_block(spec, weights or {})
    silent = [path for path, weight in weights.items() if weight == 0]
    chosen = families(spec, family, spaces, silent)
    reference, params = apart("reference", reference, spec), apart("params", params, spec)
    spec, _ = unfused(spec)
    check_within(spec, {k: v for k, v in within.items() if k in chosen})
    for name in within:
        if name not in chosen:
            raise ValueError(f"within names {name!r}, which is not matched")
        if chosen.get(within[name], Family.PERMUTATION) != Family.PERMUTATION:
            raise ValueError(f"the block {within[name]!r} of {name!r} can only be permuted")
    if max_sweeps < 0:
        raise ValueError(f"max_sweeps must not be negative, got {max_sweeps}")
    problem = Problem(spec, chosen, within, assignment)
    problem.load(reference, params, normalize, weights, keep)
    tell = progress or (lambda sweep, name: None)
    if init is None:
        start, before = problem.snapshot(), problem.distance()
        problem.visit(tell)
        history = [problem.distance()]
        if not history[0] < before:
            problem.restore(start)
            history = [before]
    else:
        problem.start(init)
        history = [problem.distance()]
    converged = False
    order = list(chosen)
    for sweep in range(max_sweeps):
        if key is not None:
            shuffled = jax.random.permutation(jax.random.fold_in(key, sweep), len(order))
            order = [list(chosen)[k] for k in np.asarray(shuffled)]
        taken = []
        for name in order:
            tell(sweep + 1, name)
            taken.append(problem.step(name))
        if not any(taken):
            converged = True
            break
        history.append(problem.distance())
    return Matching(problem.maps, tuple(history), converged)


def _by_block(spec: Spec, weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of the blocks of fused leaves, which may be named together."""
    new, places = unfused(spec)
    out: dict[str, float] = {}
    for path, weight in weights.items():
        names = [name for name, place in places.items() if path in (name, place.path)]
        if not names:
            new.axes(path)  # which says that there is none
        out |= dict.fromkeys(names, weight)
    return out


def families(
    spec: Spec, family: Families, spaces: Iterable[str] | None, silent: Iterable[str] = ()
) -> dict[str, Family]:
    """The family to match each space by, in the spec's order; ValueError where it is not exact.

    Leaves in `silent`, of the unfused spec, have no say in the matching.
    """
    inner = [s.name for s in spec.spaces if not {"outer", "stack"} & set(s.nonlinearity.split())]
    if spaces is not None:
        wanted = [spec.space(name).name for name in spaces]
        inner = [s.name for s in spec.spaces if s.name in wanted]
    for path, name in recurrent(unfused(spec)[0]).items():
        if name in inner and path not in silent:
            raise ValueError(
                f"space {name!r} occurs twice in leaf {path!r} (recurrence): its map enters "
                "quadratically, so that no assignment finds it; leave the space out by "
                f"spaces=[...], or let the leaf have no say by weights={{{path!r}: 0}}"
            )
    out = dict.fromkeys(inner, Family.PERMUTATION)
    if isinstance(family, Family):
        out = dict.fromkeys(inner, family)
    elif family is not None:
        for pattern, kind in family.items():
            hits = [name for name in inner if path_pattern(pattern, stars=False).fullmatch(name)]
            if not hits:
                raise ValueError(f"family[{pattern!r}] names no space{nearest(pattern, inner)}")
            out |= dict.fromkeys(hits, kind)
    for name, kind in out.items():
        if kind not in SOLVERS:
            kinds = ", ".join(str(f) for f in SOLVERS)
            raise ValueError(f"no matching over {kind!s} maps of {name!r}; choose from {kinds}")
        n = spec.space(name).size
        same = identity(n)
        stand_in = SpaceMap(same.write, same.read, kind | Family.INVERTIBLE)
        (report,) = exactness(spec, {name: stand_in}).spaces
        if not report.exact:
            raise ValueError(f"space {name!r} cannot be matched by {kind!s} maps: {report.reason}")
    return out
