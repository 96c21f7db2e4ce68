"""Which leaves of a state of training are weights: known from the tree, or given by a pattern.

A state holds more than a network: steps, random keys, and what an optimiser keeps. Only weights are
merged. An optimiser's second moments have to stay positive, and no merge of weights sees to that.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jaxtyping import PyTree

from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths, some_paths

__all__ = [
    "Parted",
    "Rest",
    "Select",
    "Selection",
    "check_weights",
    "of_optimiser",
    "part",
    "selection",
]

Select = str | Callable[[str], bool] | None
"""Patterns with "," between them, a function of a leaf's path, or None for what the tree shows."""

Rest = Literal["last", "first", "error"]
"""Whose leaves are taken that are not selected: those of the last model, or those of the base or
else the first model. "error" makes it an error that there are any."""

_OPTIMISERS = {"opt_state", "optimizer_state", "optimizer", "opt_states"}
_STATES = {*_OPTIMISERS, "step", "tx", "training_key", "dynamic_scale", "ema_params"}


class Selection(NamedTuple):
    """The leaves that are selected, and the others.

    Attributes:
      kind: What the tree was known as, such as "TrainState"; "" if it was not, or need not be.
      pattern: What was selected, as patterns that `selection` reads; "*" for all leaves.
      chosen: The paths of the selected leaves, in the order of the tree.
      rest: The paths of the others.
    """

    kind: str
    pattern: str
    chosen: tuple[str, ...]
    rest: tuple[str, ...]

    def __str__(self) -> str:
        of = f" of a {self.kind}" if self.kind else ""
        everything = len(self.chosen) + len(self.rest)
        return f"selected: {self.pattern}{of}, {len(self.chosen)} of {everything} leaves"


def selection(leaves: Mapping[str, Any], select: Select = None) -> Selection:
    """Selects leaves of a tree.

    Known are a Flax `TrainState` (params, batch_stats), MaxText's state (params/params), Tunix's
    (model_params), Levanter's (model), and states of NNX modules with random streams (floating
    leaves outside of `rngs`). Of any other tree all leaves are selected.

    Args:
      leaves: The leaves by path, with "/" between keys. Each has a `dtype`.
      select: Patterns, such as "params" or "params/*,batch_stats/*". A pattern also selects what
        lies below the paths that it fits, and "*" fits "/" too. Or a function of a path. By default
        what the tree is known as decides.

    Returns:
      The selected leaves, and the others.

    Raises:
      ValueError: If nothing is selected.

    >>> import numpy as np
    >>> state = {"params/w": np.ones(2), "opt_state/0/nu/w": np.ones(2), "step": np.int32(7)}
    >>> print(selection(state))
    selected: params of a TrainState, 1 of 3 leaves
    >>> selection(state, "*/w").rest
    ('step',)
    """
    if select is None:
        kind, pattern, is_chosen = _known(leaves)
    elif isinstance(select, str):
        kind, pattern, is_chosen = "", select, _fits(select)
    else:
        kind, pattern, is_chosen = "", getattr(select, "__name__", "a function"), select
    chosen = tuple(path for path in leaves if is_chosen(path))
    if leaves and not chosen:
        tops = sorted({path.split("/")[0] for path in leaves})
        hint = nearest(pattern, tops) or f"; at the top there are {some_paths(tops)}"
        raise ValueError(f"select: {pattern!r} selects no leaf{hint}")
    taken = set(chosen)
    return Selection(kind, pattern, chosen, tuple(path for path in leaves if path not in taken))


def _fits(patterns: str) -> Callable[[str], bool]:
    """A function that says whether one of some patterns fits a path, or a part above it."""
    parts = [part.strip() for part in patterns.split(",") if part.strip()]
    ways = [way for part in parts for way in (part, f"{part.rstrip('/')}/*")]
    return lambda path: any(fnmatch.fnmatchcase(path, way) for way in ways)


def _known(leaves: Mapping[str, Any]) -> tuple[str, str, Callable[[str], bool]]:
    """What a tree is known as, what is selected of it, and whether a path is."""
    tops = dict.fromkeys(path.split("/")[0] for path in leaves)
    if "model_params" in tops and len(tops) > 1:
        return "state of Tunix", "model_params", _fits("model_params")
    if "params" in tops and _STATES & {*tops}:
        below = {path.split("/")[1] for path in leaves if path.startswith("params/")}
        if "params" in below:
            return "state of MaxText", "params/params", _fits("params/params")
        pattern = "params,batch_stats" if "batch_stats" in tops else "params"
        return "TrainState", pattern, _fits(pattern)
    if "model" in tops and _STATES & {*tops}:
        return "state of Levanter", "model", _fits("model")
    parts = {path: path.split("/") for path in leaves}
    if any("rngs" in keys for keys in parts.values()):
        optimiser = of_optimiser(leaves)

        def is_weight(path: str) -> bool:
            outside = "rngs" not in parts[path] and path not in optimiser
            return outside and _is_floating(leaves[path])

        return "state of NNX", "floating leaves outside of rngs", is_weight
    return "", "*", lambda path: True


def _is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of floating numbers."""
    name = str(getattr(leaf, "dtype", type(leaf).__name__))
    return name.startswith(("float", "bfloat", "complex"))


def of_optimiser(paths: Iterable[str]) -> frozenset[str]:
    """Finds the leaves that an optimiser keeps.

    Args:
      paths: The paths of all leaves of a tree, with "/" between keys.

    Returns:
      The paths below a key such as "opt_state", and those below "mu" or "nu" where there are both
      for the same weights.

    >>> sorted(of_optimiser(["w", "0/mu/w", "0/nu/w", "opt_state/1/trace/w"]))
    ['0/mu/w', '0/nu/w', 'opt_state/1/trace/w']
    """
    every = set(paths)
    found = set()
    for path in every:
        keys = path.split("/")
        if _OPTIMISERS & {*keys[:-1]} or keys[-1] == "opt_state":
            found.add(path)
            continue
        for i, key in enumerate(keys):
            other = {"mu": "nu", "nu": "mu"}.get(key)
            if other and "/".join((*keys[:i], other, *keys[i + 1 :])) in every:
                found.add(path)
    return frozenset(found)


def check_weights(selected: Selection) -> None:
    """Checks that only weights are selected.

    Args:
      selected: The selection.

    Raises:
      ValueError: If a leaf belongs to an optimiser. The message names it, and what to select.
    """
    kept = of_optimiser((*selected.chosen, *selected.rest))
    wrong = [path for path in selected.chosen if path in kept]
    if not wrong:
        return
    tops = dict.fromkeys(path.split("/")[0] for path in (*selected.chosen, *selected.rest))
    without = _STATES | {path.split("/")[0] for path in kept}
    other = ",".join(top for top in tops if top not in without)
    remedy = f"; select: {other} leaves it out" if other else ""
    raise ValueError(
        f"{wrong[0]!r} is the state of an optimiser, which is never merged as weights{remedy}"
    )


class Parted(NamedTuple):
    """Several trees of which some leaves are selected.

    Attributes:
      trees: The selected leaves of each tree, by path.
      whole: Makes a tree of all leaves from the selected ones.
    """

    trees: list[dict[str, Any]]
    whole: Callable[[Mapping[str, Any]], PyTree]


def part(models: Sequence[PyTree], like: PyTree, select: Select, rest: Rest) -> Parted | None:
    """Parts trees into the leaves that are merged and the others.

    Args:
      models: The trees that are merged.
      like: The tree whose structure the outcome has.
      select: Which leaves are merged; see `selection`.
      rest: Whose other leaves the outcome has.

    Returns:
      The selected leaves of the models, and of `like`; None if all leaves are selected.

    Raises:
      ValueError: If the state of an optimiser is selected, nothing is, there are others under
        "error", or the last model lacks one of them.
    """
    if rest not in get_args(Rest):
        raise ValueError(f"rest: expected one of {', '.join(get_args(Rest))}; got {rest!r}")
    leaves = _by_path(like)
    selected = selection(leaves, select)
    check_weights(selected)
    if not selected.rest:
        return None
    if rest == "error":
        raise ValueError(f"{some_paths(selected.rest)} are not selected, and rest is 'error'")
    left_out = set(selected.rest)
    each = [_by_path(tree) for tree in (*models, like)]
    donor = each[-2] if rest == "last" else leaves
    for path in selected.rest:
        if path not in donor:
            raise ValueError(f"rest: the last model lacks the leaf {path!r}")

    def whole(merged: Mapping[str, Any]) -> PyTree:
        out = [donor[path] if path in left_out else merged[path] for path in leaves]
        return jax.tree.structure(like).unflatten(out)

    # What no other tree has is kept here, for the merge to refuse it.
    chosen = [{p: x for p, x in tree.items() if p not in left_out} for tree in each]
    return Parted(chosen, whole)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
