"""`check_spec` checks that a network computes the same function in every basis that its spec
allows.

The check runs the network on transformed parameters and requires no other reference.
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

# Scales lie within a factor of four, to prevent overflow in exponentials.
_SCALES = (0.5, 2.0)


class Trial(NamedTuple):
    """One change of basis that should not change the outputs.

    Attributes:
      space: The space; "" for all spaces.
      change: The change: "permutation", "signs", "scales", "rotation", "linear", "copies".
      measured: The comparison of outputs.
      leaves: Text with the axes of leaves that explain the difference; "" without a difference.
    """

    space: str
    change: str
    measured: Certificate
    leaves: str = ""


class Checked(NamedTuple):
    """The result of `check_spec`; `print` shows a table.

    Attributes:
      trials: All trials.
      skipped: Copies of units that the network's own code rejected, with the error message.
    """

    trials: tuple[Trial, ...]
    skipped: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Trial, ...]:
        """Returns the trials that changed the network's outputs."""
        return tuple(trial for trial in self.trials if not trial.measured.preserved)

    def __str__(self) -> str:
        if not self.trials:
            return "nothing was checked: the spec has no inner space of several units"
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
    """Checks a spec by running the network under the changes of basis that the spec allows.

    No allowed change may affect the outputs. First all inner spaces are permuted together, then
    each space separately. Then each space gets a random map of every kind that its nonlinearity,
    gains and ties allow. The kinds are signs, scales, rotations, invertible maps, and copies of
    units. The inputs should differ from the inputs that the spec was inferred from. A different
    batch size and length reveal accidental agreement.

    Args:
      spec: The spec, inferred or from a table.
      apply: The network, called as `apply(params, *inputs)`.
      params: Its parameters, preferably random, because zeros and ones hide mistakes.
      *inputs: Inputs of the network.
      resized: A function that builds the network with other sizes. It takes a spec and returns a
        function like `apply`. Exceptions are recorded in `skipped`. Without it, units are not
        copied, because the code of a network contains its sizes.
      seed: The seed of the random maps.

    Returns:
      The trials with the differences of outputs. `failed` lists the failed trials, with the leaf
      and axis that explain each.

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

    # Every space has a dense map in every trial, so one program runs all trials.
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
            except Exception as error:  # any exception of the network's own code
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
    """Makes a dense map without a claimed family."""
    return replace(m.dense(), family=Family.LINEAR)


def _compared(
    run: Callable[[Any, Any], Any],
    params: PyTree,
    moved: PyTree,
    inputs: PyTree,
    other: Callable[..., Any] | None,
) -> Certificate:
    """Compares the outputs before and after the change, possibly of a resized network."""

    def either(pair: tuple[bool, PyTree], x: PyTree) -> PyTree:
        new, p = pair
        return other(p, *x) if new and other is not None else run(p, x)

    return certificate(either, (False, params), (True, moved), inputs)


def _permutation(rng: np.random.Generator, n: int) -> SpaceMap:
    """Draws a permutation other than the identity (one of two for two units)."""
    while True:
        index = rng.permutation(n)
        if (index != np.arange(n)).any():
            return select(index, n, family=Family.PERMUTATION)


def _members(rng: np.random.Generator, n: int) -> Iterator[tuple[str, SpaceMap]]:
    """Draws a random map of each kind."""
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
    """Finds the axes that cause a difference: without their change, the outputs stay the same."""
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
    """Moves one factor of a leaf to a separate space."""
    axes = [list(factors) for factors in leaf.axes]
    old = axes[axis][factor]
    axes[axis][factor] = old._replace(space=_ASIDE.format(old.space))
    return Leaf(leaf.path, tuple(map(tuple, axes)))
