"""Adds up the measurements of tensors: over the model, by kind of tensor, by depth.

Task vectors are the models' differences from the base. For methods without a base they are the
models themselves. Sums over several tensors are exact: squares of norms, inner products and counts
of entries add.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike

from sail_jax.checkpoint.contents.layers import is_early, position, role
from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.planning.plan import Plan, Treatment

_NORM = re.compile(r"norm|(?:^|[._/])(?:ln|bn)(?:_|\d|[._/]|$)", re.IGNORECASE)
_ROUTER = re.compile(r"router|(?:moe|mlp|ffn|feed_?forward)[._/]gate[./]", re.IGNORECASE)
_ATTENTION = re.compile(
    r"att|(?:^|[._/])(?:[qkvo]_proj|qkv|query|key|value|wq|wk|wv|wo)(?:[._/]|$)", re.IGNORECASE
)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|experts?|intermediate|dense|(?:gate|up|down)_proj"
    r"|(?:^|[._/])(?:fc|w|linear)_?\d*(?:[._/]|$)|output[._/]",
    re.IGNORECASE,
)
_RECURRENT = re.compile(
    r"mixer|mamba|ssm|rwkv|time_mix|channel_mix|rg_lru|A_log|dt_(?:proj|bias)"
    r"|(?:^|[._/])(?:lstm|gru|rnn)(?:[._/\d]|$)"
)
_CONVOLUTION = re.compile(r"conv|downsample|patch_embed", re.IGNORECASE)
_LAST = re.compile(r"(?:^|[./])(?:out|head|classifier|score|logits|unembed)[./]")
# A layer of a plain network, which contains only an array and its bias.
_PLAIN = re.compile(r"[./](?:weight|kernel|bias|w|b)")
KINDS = ("embedding", "attention", "MLP", "router", "recurrent", "convolution", "norm", "head",
         "other")  # fmt: skip


def kind(name: str) -> str:
    """Determines the kind of a tensor from its name.

    Args:
      name: The name of the tensor.

    Returns:
      One of `KINDS`; "other" if no rule matches the name.

    >>> [kind(f"model.layers.3.{x}.weight") for x in ("self_attn.q_proj", "input_layernorm")]
    ['attention', 'norm']
    >>> kind("model.embed_tokens.weight"), kind("h.0.mlp.c_fc.bias"), kind("conv.kernel")
    ('embedding', 'MLP', 'convolution')
    """
    place = position(name)
    if role(name) == "head" or (place is None and _LAST.search(name)):
        return "head"
    if _NORM.search(name if place is None else place.rest):
        return "norm"
    if role(name) or (place is None and is_early(name)):
        return "embedding"
    rest = name if place is None else place.rest
    if place is not None and _PLAIN.fullmatch(rest):
        return "convolution" if _CONVOLUTION.search(name) else "MLP"
    rules = {"router": _ROUTER, "recurrent": _RECURRENT, "attention": _ATTENTION, "MLP": _MLP,
             "convolution": _CONVOLUTION}  # fmt: skip
    return next((own for own, rule in rules.items() if rule.search(rest)), "other")


class Total(NamedTuple):
    """The measurements of some tensors together; undefined values are NaN.

    Attributes:
      norms: The norm of each task vector, `[model]`.
      rms: The root mean square of a task vector's entries, `[model]`.
      cosines: The cosine between task vectors, `[model, model]`.
      update: The norm of the update.
      alignment: The cosine between each task vector and the update, `[model]`.
      conflicts: The fraction of entries that task vectors move in both directions.
      chance: The same fraction by chance: if every model moved the same number of entries of each
        tensor, but at random positions and with random signs.
      changed: The fraction of entries that the merge changed.
      moved: The number of entries that each model moved, `[model]`.
      kept: The fraction of these entries that the merge kept, `[model]`.
    """

    norms: np.ndarray
    rms: np.ndarray
    cosines: np.ndarray
    update: float
    alignment: np.ndarray
    conflicts: float
    chance: float
    changed: float
    moved: np.ndarray
    kept: np.ndarray


class Measured(NamedTuple):
    """The finite records of a merge, with a column for every model.

    A model that does not contribute to a tensor counts as unmoved there.

    Attributes:
      models: The merged models.
      deltas: Whether task vectors are differences from a base; otherwise they are the models.
      names: The tensors.
      size: The number of entries of a tensor, `[tensor]`.
      sizes: The same for each model, 0 for tensors to which it does not contribute, `[tensor,
        model]`.
      gram: The inner products of task vectors, `[tensor, model, model]`.
      cross: The inner products of task vectors with the update, `[tensor, model]`.
      moved: The number of entries that a model moved, `[tensor, model]`.
      kept: The number of these entries that the merge kept, `[tensor, model]`.
      square: The square of the update's norm, `[tensor]`.
      conflicts: The number of entries that task vectors move in both directions, `[tensor]`.
      changed: The number of entries that the merge changed, `[tensor]`.
    """

    models: tuple[str, ...]
    deltas: bool
    names: tuple[str, ...]
    size: np.ndarray
    sizes: np.ndarray
    gram: np.ndarray
    cross: np.ndarray
    moved: np.ndarray
    kept: np.ndarray
    square: np.ndarray
    conflicts: np.ndarray
    changed: np.ndarray

    def total(self, members: Sequence[int] | None = None) -> Total:
        """Adds up the measurements of some tensors.

        Args:
          members: The numbers of the tensors; None for all.

        Returns:
          The measurements of all their entries together, as if of one tensor.
        """
        at = slice(None) if members is None else np.asarray(members, int)
        size, sizes, gram = self.size[at].sum(), self.sizes[at].sum(0), self.gram[at].sum(0)
        norms, update = np.sqrt(np.diag(gram)), float(np.sqrt(self.square[at].sum()))
        moved = self.moved[at].sum(0)
        return Total(
            np.where(sizes > 0, norms, np.nan),
            _ratio(norms, np.sqrt(sizes)),
            # Rounding may make a cosine slightly larger than 1.
            np.clip(_ratio(gram, np.outer(norms, norms)), -1, 1),
            update,
            np.clip(_ratio(self.cross[at].sum(0), norms * update), -1, 1),
            float(_ratio(self.conflicts[at].sum(), size)),
            float(_ratio((self._chance()[at] * self.size[at]).sum(), size)),
            float(_ratio(self.changed[at].sum(), size)),
            moved,
            _ratio(self.kept[at].sum(0), moved),
        )

    def _chance(self) -> np.ndarray:
        """Returns the fraction of entries that would conflict by chance, `[tensor]`.

        A model moves an entry up or down, each with a probability of half its moved fraction. An
        entry conflicts unless no model moves it up or no model moves it down. If k models move
        everything, 1 - 2^(1-k) of the entries conflict.
        """
        moved = np.clip(_ratio(self.moved, self.size[:, None]), 0, 1)
        one_way, still = np.prod(1 - moved / 2, axis=1), np.prod(1 - moved, axis=1)
        return np.nan_to_num(1 - 2 * one_way + still)


def _ratio(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """Divides, and returns NaN if the divisor is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, float), np.asarray(b, float))
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)


def from_base(t: Treatment, record: Record) -> bool:
    """Checks whether the task vectors of a tensor are differences from a base.

    Args:
      t: The treatment of the tensor.
      record: The measurements of the tensor.

    Returns:
      Whether there is a base that is not itself one of the measured models.
    """
    return t.base is not None and len(record.norms) == len(t.models)


def owners_of(plan: Plan, t: Treatment, models: int) -> tuple[str, ...]:
    """Lists the models of a tensor in the order of its record.

    If a model is merged several times, such as with other layers of itself, its name is repeated
    with "(2)".

    Args:
      plan: The plan of the merge.
      t: The treatment of the tensor.
      models: The number of models in the record: one more than were merged if the base is first.

    Returns:
      A name for each model of the record.
    """
    base = next((model.name for model in plan.inputs if model.role == "base"), "the base")
    seen: Counter[str] = Counter()
    names = []
    for name in (base, *t.owners) if models == len(t.owners) + 1 else t.owners:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(names)


def finite(record: Record) -> bool:
    """Checks whether all measurements of a tensor are finite.

    Args:
      record: The measurements.

    Returns:
      False if there is a NaN or an infinity.
    """
    numbers = [record.norms, record.cosines, record.alignment, record.kept, record.update]
    return all(np.isfinite(np.asarray(x, float)).all() for x in numbers)


def measured(plan: Plan, records: Mapping[str, Record]) -> Measured:
    """Collects the finite records of a merge as arrays.

    If task vectors are differences from a base in some tensors, only these tensors are kept. A
    total cannot mix them with tensors in which the task vectors are the models themselves.

    Args:
      plan: The plan of the merge.
      records: The measurements, by tensor name.

    Returns:
      The records, in the order of the output's tensors.
    """
    pairs = [(t, records[t.name]) for t in plan.treatments if t.name in records]
    pairs = [(t, record) for t, record in pairs if finite(record)]
    deltas = any(from_base(t, record) for t, record in pairs)
    pairs = [(t, record) for t, record in pairs if from_base(t, record) == deltas]
    owners = [owners_of(plan, t, len(record.norms)) for t, record in pairs]
    order = [model.name for model in plan.inputs]
    distinct = dict.fromkeys(name for names in owners for name in names)
    models = tuple(sorted(distinct, key=lambda n: order.index(n) if n in order else len(order)))
    n, m = len(pairs), len(models)
    sizes, cross, moved, kept = np.zeros((4, n, m))
    gram = np.zeros((n, m, m))
    for k, ((_, record), names) in enumerate(zip(pairs, owners, strict=True)):
        at, norms = [models.index(name) for name in names], np.asarray(record.norms)
        sizes[k, at] = record.size
        cosines = np.array(record.cosines, float).reshape(len(at), len(at))
        np.fill_diagonal(cosines, 1)
        gram[k][np.ix_(at, at)] = cosines * np.outer(norms, norms)
        cross[k, at] = np.asarray(record.alignment) * norms * record.update
        moved[k, at] = record.moved
        kept[k, at] = np.multiply(record.kept, record.moved)
    size = np.array([record.size for _, record in pairs], float)
    square, conflicts, changed = (
        np.array([getattr(record, field) for _, record in pairs], float)
        for field in ("update", "conflicts", "changed")
    )
    names = tuple(t.name for t, _ in pairs)
    return Measured(
        models, deltas, names, size, sizes, gram, cross, moved, kept, square**2,
        conflicts * size, changed * size,
    )  # fmt: skip


class Bin(NamedTuple):
    """Tensors that a plot by depth shows as one point.

    Attributes:
      label: The label on the axis.
      run: The stack of the layer; "modules" for a network without layers; "" for tensors before or
        after the layers.
      members: The numbers of the tensors.
    """

    label: str
    run: str
    members: list[int]


def by_depth(names: Sequence[str], most: int = 48) -> list[Bin]:
    """Groups tensors by their depth in the network.

    Args:
      names: The names of the tensors, in the order of the output.
      most: The largest number of groups for a network without layers.

    Returns:
      A group for each layer in order, one for all tensors before the layers, and one for all after
      them. Without layers: groups of consecutive modules.
    """
    places = [position(name) for name in names]
    layers: dict[tuple[str, int], list[int]] = {}
    early, late = [], []
    for i, (name, place) in enumerate(zip(names, places, strict=True)):
        if place is None:
            (early if is_early(name) else late).append(i)
        else:
            layers.setdefault((place.stack, place.index), []).append(i)
    if layers:
        stacks = list(dict.fromkeys(stack for stack, _ in layers))
        order = sorted(layers, key=lambda key: (stacks.index(key[0]), key[1]))
        inner = [Bin(str(key[1]), key[0] or "layers", layers[key]) for key in order]
        ends = [Bin("in", "", early)] * bool(early), [Bin("out", "", late)] * bool(late)
        return [*ends[0], *inner, *ends[1]]
    parents = [re.sub(r"[./][^./]*$", "", name) for name in names]
    runs = [list(g) for _, g in groupby(range(len(names)), lambda i: parents[i])]
    step = -(-len(runs) // most) or 1
    merged = [list(chain(*runs[i : i + step])) for i in range(0, len(runs), step)]
    return [Bin(parents[run[0]] + " and on" * (step > 1), "modules", run) for run in merged]
