"""`check_spec`: does a network compute the same in every basis that its spec allows?

This needs no second opinion: the network itself is run on re-expressed parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import PyTree

from sail_jax.basis.certificate import Certificate, certificate, exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, identity, select
from sail_jax.basis.spaces import Leaf, Spec, table

# Scales within a factor of four: no exponential overflows by them.
_SCALES = (0.5, 2.0)


class Trial(NamedTuple):
    """One change of basis that should not matter.

    Attributes:
      space: The space; all of them where "" stands.
      change: What was done: "permutation", "signs", "scales", "rotation", "linear", "copies".
      measured: What the outputs did.
      leaves: Axes of leaves that explain the difference, for people; "" where there is none.
    """

    space: str
    change: str
    measured: Certificate
    leaves: str = ""


class Checked(NamedTuple):
    """What `check_spec` found; `print` shows a table.

    Attributes:
      trials: The changes that were tried.
      skipped: Copies of units that the network's own code refused, and the line that it raised.
    """

    trials: tuple[Trial, ...]
    skipped: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Trial, ...]:
        """Those after which the network computed something else."""
        return tuple(trial for trial in self.trials if not trial.measured.preserved)

    def __str__(self) -> str:
        rows = [("space", "change", "difference", "allowed", "")]
        for trial in self.trials:
            measured = trial.measured
            wrong = "" if measured.preserved else f"WRONG {trial.leaves}"
            name = trial.space or "all at once"
            numbers = f"{measured.absolute:.1e}", f"{measured.tolerance:.1e}"
            rows.append((name, trial.change, *numbers, wrong))
        return table(rows)


def check_spec(
    spec: Spec,
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: PyTree,
    resized: Callable[[Spec], Callable[..., Any]] | None = None,
    seed: int = 0,
) -> Checked:
    """Checks a spec by running the network: every change of basis that it allows must not matter.

    All inner spaces are permuted at once, then each space alone. Then each space is changed by a
    random member of every kind of map that its nonlinearity, its gains and its ties allow: signs,
    scales, rotations, any invertible map, and copies of units. The inputs should not be those from
    which a spec was inferred: another batch, and another length, show what held by chance.

    Args:
      spec: The spec, however it was made.
      apply: The network, called as `apply(params, *inputs)`.
      params: Its parameters. Zeros and ones hide mistakes: draw them.
      *inputs: Inputs to run it on.
      resized: Builds the network of other sizes. It takes a spec and returns a function like
        `apply`; what it or the network raises is recorded in `skipped`. Without it no units are
        copied, as the code of networks states sizes.
      seed: Seed of the random maps.

    Returns:
      The trials with the difference of outputs. `failed` lists those that went wrong, and the leaf
      and axis that explains each.

    >>> def net(p, x):
    ...     return jnp.tanh(x @ p["in"]) @ p["out"]
    >>> p = {"in": jnp.array([[1.0, -2.0, 0.5]]), "out": jnp.array([[3.0], [4.0], [1.0]])}
    >>> from sail_jax.basis.spaces import spec
    >>> rules = {"in": "x* h", "out": "h* y"}
    >>> s = spec(p, rules, spaces={"h": "relu", "{x,y}": "outer"})
    >>> [trial.change for trial in check_spec(s, net, p, jnp.ones((2, 1))).failed]
    ['scales']
    """
    rng = np.random.default_rng(seed)
    run = jax.jit(lambda p, x: apply(p, *x))
    inner = [
        space.name
        for space in spec.spaces
        if space.size > 1 and not {"outer", "stack"} & set(space.nonlinearity.split())
    ]
    trials: list[Trial] = []
    skipped: list[str] = []

    # Every space has a dense map in every trial: one program does them all.
    still = {name: identity(spec.space(name).size) for name in inner}
    move = jax.jit(lambda p, maps: change_basis(p, spec, maps))

    def tried(name: str, change: str, maps: dict[str, SpaceMap]) -> None:
        grows = any(m.new != m.old for m in maps.values())
        if grows and resized is None:
            return
        moved = move(params, {n: _plain(m) for n, m in (still | maps).items()})
        other = None
        if grows and resized is not None:
            try:
                other = resized(spec.resized(maps))
                jax.eval_shape(lambda p: other(p, *inputs), moved)
            except Exception as error:  # whatever the network's own code raises
                skipped.append(f"{name}: {change}: {str(error).splitlines()[0]}")
                return
        measured = _compared(run, params, moved, inputs, other)
        leaves = "" if measured.preserved else _culprits(run, spec, params, inputs, maps)
        trials.append(Trial(name, change, measured, leaves))

    everything = {name: _permutation(rng, spec.space(name).size) for name in inner}
    if everything:
        tried("", "permutation", everything)
    for name in inner:
        tried(name, "permutation", {name: everything[name]})
        for change, m in _members(rng, spec.space(name).size):
            if not exactness(spec, {name: m}).lost:
                tried(name, change, {name: m})
    return Checked(tuple(trials), tuple(skipped))


def _plain(m: SpaceMap) -> SpaceMap:
    """A map in dense form that claims nothing."""
    return replace(m.dense(), family=Family.LINEAR)


def _compared(
    run: Callable[[Any, Any], Any],
    params: PyTree,
    moved: PyTree,
    inputs: PyTree,
    other: Callable[..., Any] | None,
) -> Certificate:
    """The outputs before and after; the network after may be another one."""

    def either(pair: tuple[bool, PyTree], x: PyTree) -> PyTree:
        new, p = pair
        return other(p, *x) if new and other is not None else run(p, x)

    return certificate(either, (False, params), (True, moved), inputs)


def _permutation(rng: np.random.Generator, n: int) -> SpaceMap:
    """A permutation that is not the identity, which half of all permutations of two units are."""
    while True:
        index = rng.permutation(n)
        if (index != np.arange(n)).any():
            return select(index, n, family=Family.PERMUTATION)


def _members(rng: np.random.Generator, n: int) -> Iterator[tuple[str, SpaceMap]]:
    """A random member of each kind of map."""
    signs = np.where(np.arange(n) % 2 == 1, -1.0, 1.0)[rng.permutation(n)]
    yield (
        "signs",
        select(np.arange(n), n, write=signs, read=signs, family=Family.SIGNED_PERMUTATION),
    )
    scales = np.exp(rng.uniform(*np.log(_SCALES), size=n))
    family = Family.POSITIVE_MONOMIAL | Family.INVERTIBLE
    yield "scales", select(np.arange(n), n, write=scales, read=1 / scales, family=family)
    turn = scipy.stats.ortho_group.rvs(n, random_state=rng)
    yield "rotation", SpaceMap(jnp.asarray(turn), jnp.asarray(turn.T), Family.ORTHOGONAL)
    other = scipy.stats.ortho_group.rvs(n, random_state=rng)
    linear = turn @ np.diag(scales) @ other
    inverse = other.T @ np.diag(1 / scales) @ turn.T
    yield "linear", SpaceMap(jnp.asarray(linear), jnp.asarray(inverse), Family.INVERTIBLE)
    twice = np.arange(2 * n) % n
    half = np.full(2 * n, 0.5)
    yield "even copies", select(twice, n, read=half, family=Family.EVEN_DUPLICATION)
    more = np.arange(n + 1) % n
    share = np.where((more == 0), 0.5, 1.0)
    yield "copies", select(more, n, read=share, family=Family.SELECTION)


def _culprits(
    run: Callable[[Any, Any], Any],
    spec: Spec,
    params: PyTree,
    inputs: Any,
    maps: dict[str, SpaceMap],
) -> str:
    """The axes without whose change the outputs stay: named wrongly, or to be left alone."""
    if any(m.new != m.old for m in maps.values()):
        return "(as many units have to stay)"
    found = []
    for name in maps:
        for use in spec.uses(name):
            leaves = tuple(
                leaf if leaf.path != use.path else _without(leaf, use.axis, use.factor, spec)
                for leaf in spec.leaves
            )
            other = Spec(leaves, (*spec.spaces, *_stays(spec, name)))
            moved = change_basis(params, other, maps)
            if certificate(run, params, moved, inputs).preserved:
                found.append(f"{use.path!r} axis {use.axis} ({name})")
    if found:
        return "only with " + " or ".join(found)
    users = (f"{use.path!r} axis {use.axis}" for name in maps for use in spec.uses(name))
    return "uses: " + ", ".join(list(users)[:8])


_ASIDE = "{}.as-it-is"


def _stays(spec: Spec, name: str) -> tuple[Any, ...]:
    space = spec.space(name)
    return (space._replace(name=_ASIDE.format(name), nonlinearity="outer"),)


def _without(leaf: Leaf, axis: int, factor: int, spec: Spec) -> Leaf:
    """A leaf of which one factor lies in a space of its own."""
    axes = [list(factors) for factors in leaf.axes]
    old = axes[axis][factor]
    axes[axis][factor] = old._replace(space=_ASIDE.format(old.space))
    return Leaf(leaf.path, tuple(map(tuple, axes)))
