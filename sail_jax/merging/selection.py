"""Selects the weights in a training state, which is recognised from the tree or given by a pattern.

A state contains more than a network: steps, random keys, and the state of an optimiser. Only
weights are merged. An optimiser's second moments must stay positive, and merges of weights do not
ensure this.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes

from sail_jax.checks import nearest

Select = str | Callable[[str], bool] | None
"""Patterns separated by ",", a function of a leaf's path, or None to recognise the tree."""

_OPTIMISERS = {"opt_state", "optimizer_state", "optimizer", "opt_states"}
_STATES = {*_OPTIMISERS, "step", "tx", "training_key", "dynamic_scale", "ema_params"}


class Selection(NamedTuple):
    """The selected leaves, and the other leaves.

    Attributes:
      kind: The recognised kind of tree, such as "TrainState"; "" if unknown, or if `select` was
        given.
      pattern: The selection, as patterns for `selection`; "*" for all leaves.
      chosen: The paths of the selected leaves, in the order of the tree.
      rest: The paths of the other leaves.
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

    It recognises the states of Flax (`TrainState`: params, batch_stats), MaxText (params/params)
    and Tunix (model_params). It also recognises a `model` next to its optimiser (such as Levanter),
    and NNX states with random streams (floating leaves outside `rngs`). In any other tree all
    leaves are selected.

    Args:
      leaves: The leaves by path, with "/" between keys. Each has a `dtype`.
      select: Patterns, such as "params" or "params/*,batch_stats/*". A pattern also selects all
        leaves below a matching path, and "*" matches "/" too. Or a function of a path. By default
        the recognised kind determines them.

    Returns:
      The selected leaves, and the other leaves.

    Raises:
      ValueError: If no leaf is selected.

    >>> import numpy as np
    >>> state = {"params/w": np.ones(2), "opt_state/0/nu/w": np.ones(2), "step": np.int32(7)}
    >>> print(selection(state))
    selected: params of a TrainState, 1 of 3 leaves
    >>> selection(state, "*/w").rest
    ('step',)
    """
    if select is None:
        kind, pattern, chosen = _known(leaves)
    elif isinstance(select, str):
        kind, pattern, chosen = "", select, _matching(leaves, select)
    else:
        kind, pattern = "", getattr(select, "__name__", "a function")
        chosen = tuple(filter(select, leaves))
    if leaves and not chosen:
        tops = sorted({path.split("/")[0] for path in leaves})
        hint = nearest(pattern, tops) or f"; at the top there are {', '.join(tops[:5])}"
        raise ValueError(f"select: {pattern!r} selects no leaf{hint}")
    taken = set(chosen)
    return Selection(kind, pattern, chosen, tuple(path for path in leaves if path not in taken))


def _matching(paths: Iterable[str], patterns: str) -> tuple[str, ...]:
    """Returns the paths that a pattern matches, and those below a node that it matches."""
    if patterns == "*":
        return tuple(paths)
    parts = [part.strip() for part in patterns.split(",") if part.strip()]
    ways = [way for part in parts for way in (part, f"{part.rstrip('/')}/*")]
    return tuple(path for path in paths if any(fnmatch.fnmatchcase(path, way) for way in ways))


def _known(leaves: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """Returns the recognised kind of a tree, its patterns, and the paths of its weights."""
    kind, pattern = _state(leaves)
    weights = _matching(leaves, pattern)
    streams = {path for path in leaves if "rngs" in path.split("/")}
    if not streams:
        return kind, pattern, weights
    # NNX keeps random streams, counters and keys between the weights of a module.
    other = streams | of_optimiser(leaves)
    weights = tuple(path for path in weights if path not in other and _is_floating(leaves[path]))
    of = f" of {pattern}" if kind else ""
    return kind or "state of NNX", f"floating leaves{of} outside of rngs", weights


def _state(leaves: Iterable[str]) -> tuple[str, str]:
    """Returns the kind of state, from the top-level keys, and the patterns of its weights."""
    tops = {path.split("/")[0] for path in leaves}
    if "model_params" in tops and len(tops) > 1:
        return "state of Tunix", "model_params"
    if "params" in tops and _STATES & tops:
        below = {path.split("/")[1] for path in leaves if path.startswith("params/")}
        if "params" in below:
            return "state of MaxText", "params/params"
        return "TrainState", "params,batch_stats" if "batch_stats" in tops else "params"
    if "model" in tops and _STATES & tops:
        return "state of training", "model"
    return "", "*"


def _is_floating(leaf: object) -> bool:
    """Checks whether a leaf is a floating number, or an array of them."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    try:  # for NumPy's types and ml_dtypes, without importing JAX
        ml_dtypes.finfo(dtype)
    except (TypeError, ValueError):  # a random key, or not floating
        return False
    return True


# Names in torch's modules, and in Flax's collection.
_STATISTICS = re.compile(r"(^|.*[./])running_(mean|var)|batch_stats[./].*(mean|var)")


def averaged_statistics(paths: Iterable[str]) -> list[str]:
    """Returns a note if running statistics of batch norms are averaged.

    They are not the statistics of the merged network, whose activations differ from those of each
    network.

    Args:
      paths: The paths of the averaged leaves.

    Returns:
      A sentence if there are such leaves, else nothing.

    >>> averaged_statistics(["n.running_var", "n.weight"])
    ["running statistics of batch norms are averaged, such as 'n.running_var': compute them again"]
    """
    found = next((path for path in paths if _STATISTICS.fullmatch(path)), None)
    said = f"running statistics of batch norms are averaged, such as {found!r}: compute them again"
    return [] if found is None else [said]


def of_optimiser(paths: Iterable[str]) -> frozenset[str]:
    """Finds the leaves of an optimiser state.

    Args:
      paths: The paths of all leaves of a tree, with "/" between keys.

    Returns:
      The paths below a key such as "opt_state", and the paths below "mu" and "nu" if both exist for
      the same weights.

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
      ValueError: If a leaf belongs to an optimiser. The message contains the leaf and a better
        selection.
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
