"""Coupled axes of torch-pruning.

DepGraph of torch-pruning traces autograd, and lists groups of output and input channels of layers
that must be pruned together. Feature spaces inferred from the forward pass
(`sail_jax.interop.torch`) are also such groups. Each case is a small model of transformers with
random weights. The groups of both programs are compared as sets of parameter axes with their number
of units.

The model decides which program is right. The units of a group are permuted at random in all its
axes, and torch's logits must stay the same, at another batch and length. The difference counts
correct groups that sail-jax lacks, and wrong spaces of sail-jax. The last column has:

- the number of equal groups;
- the number of further correct spaces of sail-jax;
- the number of wrong groups of torch-pruning, and how many of them are correct for whole heads:
  users of torch-pruning set the number of heads;
- the number of axes in a space but not in a group, and in a group but not in a space.

Groups of network outputs are left out, because users of torch-pruning must list these layers. A
group also fails if it lists units that an axis does not have, or one unit for two. Llama is run
without grouped queries, and caches are off. With either of them, torch-pruning 1.6.1 did not finish
within 20 seconds.

Run alone, `python .ci/against/depgraph.py [CASE ...]` also prints a line for each difference.
"""

import copy
import itertools
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_pruning
import transformers
from cases import Case, Outcome
from spaces import MODELS, build
from torch import nn

from sail_jax import spec_of
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.families import Family
from sail_jax.basis.maps import select
from sail_jax.interop.torch import jax_function

# The largest difference of logits that rounding explains, of the largest logit: see `spaces`.
_TOLERANCE = 1e-5
_NAMES = ("ResNet", "ConvNeXt", "ViT", "Swin", "BERT", "Llama", "GPT-NeoX")
# Without grouped queries: see above.
_OTHER = {"Llama": {"num_key_value_heads": 4, "head_dim": 6}}

Axes = frozenset[tuple[str, int]]
Tensors = dict[str, torch.Tensor]


class Group(NamedTuple):
    """A group of torch-pruning.

    Attributes:
      size: The number of its units.
      places: For each axis, named by the parameter and its number, the indices of each unit.
    """

    size: int
    places: dict[tuple[str, int], dict[int, list[int]]]


def groups(model: Any, inputs: Tensors) -> list[Group]:
    """Lists the groups of torch-pruning; a tied weight has its first name."""
    model.config.use_cache = False
    graph = torch_pruning.DependencyGraph().build_dependency(
        model, inputs, output_transform=lambda out: out.logits, verbose=False
    )
    names = {id(x): name for name, x in _weights(model).items()}
    found = []
    for group in graph.get_all_groups():
        places: dict[tuple[str, int], dict[int, list[int]]] = {}
        for item in group.items:
            units: dict[int, list[int]] = {}
            for root, index in zip(item.root_idxs, item.idxs, strict=True):
                units.setdefault(root, []).append(index)
            for x, axis in _pruned(item):
                places.setdefault((names[id(x)], axis), units)
        found.append(Group(len(set(group[0].root_idxs)), places))
    return found


def _weights(model: Any) -> Tensors:
    """The parameters and statistics by their first name."""
    return dict(itertools.chain(model.named_parameters(), model.named_buffers()))


def _pruned(item: Any) -> list[tuple[torch.Tensor, int]]:
    """The parameters, and their axes, that an entry of a group makes shorter by one unit."""
    module, handler = item.dep.target.module, item.dep.handler
    if isinstance(module, nn.Parameter):
        return [(module, item.dep.target.pruning_dim % module.ndim)]
    if not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
        return []
    shorter = copy.deepcopy(module)
    handler(shorter, [item.idxs[0]])
    after = {**dict(shorter.named_parameters()), **dict(shorter.named_buffers())}
    return [
        (x, axis)
        for name, x in itertools.chain(module.named_parameters(), module.named_buffers())
        for axis in range(x.ndim)
        if after[name].shape[axis] < x.shape[axis]
    ]


def permuted(group: Group, weights: Tensors, order: np.ndarray) -> Tensors:
    """Weights whose units of a group are in another order, where as many indices are a unit's."""
    moved = dict(weights)
    for (name, axis), units in group.places.items():
        index = np.arange(weights[name].shape[axis])
        for unit, places in units.items():
            index[places] = units[order[unit]]
        moved[name] = moved[name].index_select(axis, torch.from_numpy(index))
    return moved


def _fits(group: Group, weights: Tensors) -> bool:
    """Whether every axis has the indices that the group names, each for one unit."""
    for (name, axis), units in group.places.items():
        named = sorted(itertools.chain(*units.values()))
        if not set(named) <= set(range(weights[name].shape[axis])) or len(set(named)) < len(named):
            return False
    return True


def _order(group: Group, block: int, rng: np.random.Generator) -> np.ndarray:
    """A random order of blocks of units, among those with as many indices in every axis."""
    while True:
        order = np.arange(group.size)
        kinds: dict[Any, list[int]] = {}
        for unit in range(group.size):
            kinds.setdefault(
                tuple(len(units.get(unit, [])) for units in group.places.values()), []
            ).append(unit)
        for same in kinds.values():
            if len(same) % block == 0:
                rows = np.array(same).reshape(-1, block)
                order[same] = rows[rng.permutation(len(rows))].reshape(-1)
        if (order != np.arange(group.size)).any():
            return order


def run(name: str) -> tuple[Outcome, list[str]]:
    """Compares the groups of a model; returns also a line for each that differs."""
    model, given = build(name, **_OTHER.get(name, {}))
    other = {key: torch.from_numpy(x) for key, x in given(1).items()}
    theirs = groups(model, {key: torch.from_numpy(x[:1]) for key, x in given(0).items()})
    function, params = jax_function(model)
    spec = spec_of(function, params, given(0)).spec
    weights = {key: x.detach() for key, x in _weights(model).items()}
    rng = np.random.default_rng(0)

    @torch.no_grad()
    def logits(changed: Tensors) -> torch.Tensor:
        return torch.func.functional_call(model, changed, kwargs=other).logits

    before = logits(weights)

    def stays(after: torch.Tensor) -> bool:
        return float((after - before).abs().max()) <= _TOLERANCE * float(before.abs().max())

    ours: dict[str, Axes] = {}
    wrong = []
    for space in spec.spaces:
        if space.size == 1 or "outer" in space.nonlinearity.split():
            continue
        ours[space.name] = frozenset((use.path, use.axis) for use in spec.uses(space.name))
        order = _order(Group(space.size, {}), 1, rng)
        moves = {space.name: select(order, space.size, family=Family.PERMUTATION)}
        moved = change_basis(params, spec, moves)
        back = {key: torch.from_numpy(np.array(x)) for key, x in moved.items()}
        if not stays(logits(weights | back)):
            wrong.append(space.name)

    sizes = {name: spec.space(name).size for name in ours}
    same, lacks, apart, by_heads, lines, matched = 0, 0, 0, 0, [], set()
    heads = model.config.num_attention_heads if "num_attention_heads" in dir(model.config) else 1
    inner: set[tuple[str, int]] = set()
    for group in theirs:
        axes: Axes = frozenset(group.places)
        if group.size == before.shape[-1]:
            continue
        if not _fits(group, weights):
            inner |= axes
            apart += 1
            lines.append(f"  theirs {min(axes)[0]} ({len(axes)} axes, {group.size} units): no fit")
            continue
        after = logits(permuted(group, weights, _order(group, 1, rng)))
        inner |= axes
        twins = [n for n, a in ours.items() if a == axes and sizes[n] == group.size]
        holds = stays(after)
        if twins and holds:
            same += 1
            matched.update(twins)
            continue
        first = min(axes)[0]
        line = f"  theirs {first} ({len(axes)} axes, {group.size} units): "
        if holds:
            lacks += 1
            lines.append(line + "holds")
            continue
        apart += 1
        counts = heads if isinstance(heads, (list, tuple)) else [heads]
        whole = False
        for count in counts:
            if group.size % count == 0 and count > 1:
                block = group.size // count
                whole |= stays(logits(permuted(group, weights, _order(group, block, rng))))
        by_heads += whole
        lines.append(line + f"changes the logits{', whole heads hold' if whole else ''}")
    only = [n for n in ours if n not in matched and n not in wrong]
    lines += [f"  ours {n} ({len(ours[n])} axes, {sizes[n]} units): holds" for n in only]
    lines += [f"  ours {n}: CHANGES THE LOGITS" for n in wrong]
    free = frozenset().union(*ours.values())
    lines += [f"  axis in no group: {a}" for a in sorted(free - inner)]
    lines += [f"  axis in no space: {a}" for a in sorted(inner - free)]
    note = f"{same} the same, {len(only)} of sail-jax, {apart} of torch-pruning do not hold"
    note += f" ({by_heads} hold by heads)" if by_heads else ""
    note += f"; {len(free - inner)} axes in no group, {len(inner - free)} in no space"
    return Outcome(lacks + len(wrong), len(ours), 0, note), lines


def _compared(name: str, _folder: Path) -> Outcome:
    """Runs a case."""
    return run(name)[0]


CASES = [Case(name, MODELS[name][0], partial(_compared, name)) for name in _NAMES]


def main(wanted: list[str]) -> None:
    """Prints a line for each case, and for each group that differs."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name in wanted or _NAMES:
        outcome, lines = run(name)
        print(f"{name}: {outcome.difference} of {outcome.scale}; {outcome.note}", *lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
