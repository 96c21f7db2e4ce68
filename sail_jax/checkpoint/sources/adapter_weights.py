"""Finds the content of an adapter for each weight of its base, under the base's names."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from sail_jax.checkpoint.contents.layers import position, role
from sail_jax.checkpoint.contents.relations import tied
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.adapted import Change, Piece, same
from sail_jax.checkpoint.sources.adapter_config import AdapterConfig
from sail_jax.checkpoint.sources.adapter_keys import Pair, Stated, Whole
from sail_jax.checkpoint.sources.renamings import Names, file_name, heads_of, rules_of, tied_head
from sail_jax.checks import nearest
from sail_jax.configurations import CONV1D, Config, class_of, look_up
from sail_jax.merging.tensors import Shape, Tensor, Tensors

# The Conv1D modules of these families. PEFT sets `fan_in_fan_out` for each module, but the entry in
# the file belongs to the last module only.
_CONV1D_MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")
KERNEL = "kernel"
"""Flax's name of a weight stored as [in, out]."""
# Families with stacked experts [expert, in, out]; other families use [expert, out, in]. The
# difference matters only for square matrices.
_EXPERTS_TRANSPOSED = ("gpt_oss", "aria", "openai_privacy_filter")
_MOST = 6  # parameters of one module
# The embedding of T5, BART and similar models, which several modules use and PEFT changes in one.
_SHARED = "shared.weight"
_HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Weight:
    """The content of an adapter for one weight.

    Attributes:
      source: The path of the adapter, for messages.
      stored: The weight that the change is added to, if not the base's.
      saved: The tensor that replaces the weight.
      change: The change that is added.
      rows: Rows that replace some rows of the weight, and their numbers.
    """

    source: str
    stored: Tensor | None = None
    saved: Tensor | None = None
    change: Change | None = None
    rows: tuple[Tensor, list[int]] | None = None


@dataclass
class Weights:
    """The content of an adapter, by the base's names of weights.

    Attributes:
      weights: The content by the name of the weight.
      sides: The names of the embedding and of the head that is tied to it, if the adapter changes
        either of them; else empty.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    sides: tuple[str, ...] = ()

    def both_sides(self) -> dict[str, Weight]:
        """Returns the content for both sides of a tie; each side includes the shared content.

        In memory a tied weight is one tensor, into which PEFT loads what the adapter stores for
        either side. PEFT also applies rows that were trained alone to both sides, unless the head
        has its own.

        Returns:
          The content for the embedding and the head, by name.

        Raises:
          CheckpointError: If one side has such rows through the tie, and another change as well.
        """
        embedding, head = (self.weights.get(name) for name in self.sides)
        source = next(w.source for w in (embedding, head) if w is not None)
        embedding, head = embedding or Weight(source), head or Weight(source)
        stored = embedding.stored or head.stored
        sides = (
            replace(embedding, stored=stored),
            replace(head, stored=head.stored or stored, rows=head.rows or embedding.rows),
        )
        for name, weight in zip(self.sides, sides, strict=True):
            if weight.rows and (weight.change or weight.saved):
                raise CheckpointError(
                    f"{source}: {name!r} has trained rows (trainable_token_indices) through its "
                    "tie to the embedding, and another change; this is not supported"
                )
        return dict(zip(self.sides, sides, strict=True))

    @classmethod
    def of(
        cls,
        stated: Stated,
        config: AdapterConfig,
        base: Tensors,
        model: Config,
        names: Names,
    ) -> "Weights":
        """Sorts the content of an adapter by weight.

        Args:
          stated: The adapter's sorted tensors.
          config: Its config.
          base: The tensors of the base.
          model: The content of the base's config.json.
          names: The names in memory of the base's tensors.

        Returns:
          The content for each weight, by the base's names.

        Raises:
          CheckpointError: If something occurs twice, does not match the base, or has an unknown
            name.
        """
        new = cls()
        to = _Trained(config, base, model, names)
        of_module: dict[str, list[Pair]] = {}
        for pair in stated.pairs:
            of_module.setdefault(pair.module, []).append(pair)
        for module, pairs in of_module.items():
            for name, change in _changes(module, pairs, to):
                new._add(name, change.B, change=change)
        for name, whole in _one_bias(stated.whole, to.stored).items():
            for how, copies in (("saved", whole.saved), ("stored", whole.stored)):
                if copies:
                    for file, tensor in _of_whole(name, _one(copies), to):
                        new._add(file, tensor, **{how: tensor})
        if config.trainable_token_indices and not stated.tokens:
            raise CheckpointError(
                f"{stated.source}: its config has trainable_token_indices, but it holds no rows"
            )
        for module, tensor in stated.tokens.items():
            name = to.stored.file(f"{module}.weight", tensor.source)
            rows = config.tokens(module)
            if rows is None and role(name) == "head":
                # A tied head is saved with the rows of the embedding, which alone is listed.
                rows = next((r for r in map(config.tokens, stated.tokens) if r is not None), None)
            if rows is None or len(set(rows)) != len(rows):
                raise CheckpointError(
                    f"{tensor.source}: expected each row of {module!r} once in "
                    "trainable_token_indices"
                )
            new._add(name, tensor, rows=(tensor, rows))
        new.sides = _sides(new.weights, to)
        for name, weight in new.weights.items():
            if sum(x is not None for x in (weight.saved, weight.change, weight.rows)) > 1:
                raise CheckpointError(
                    f"{weight.source}: {name!r} is changed in several ways: expected one of "
                    "factors, a whole weight of modules_to_save, or trained rows"
                )
            changed = weight.saved or weight.change or weight.rows
            if changed and name.endswith(_SHARED) and role(name) == "embedding":
                raise CheckpointError(
                    f"{weight.source}: {name!r} is shared by modules of encoder and decoder, "
                    "but the adapter changes only one of them; this is not supported"
                )
        return new

    def _add(self, name: str, tensor: Tensor, **what: Any) -> None:
        """Adds content for a weight; raises a CheckpointError if this kind exists already."""
        before = self.weights.get(name, Weight(tensor.source))
        for how in what:
            if getattr(before, how) is not None:
                raise CheckpointError(f"{tensor.source}: {name!r} occurs twice")
        self.weights[name] = replace(before, **what)


def _one(copies: Mapping[str, Tensor]) -> Tensor:
    """Returns the tensor of which several keys contain copies; they must be equal."""
    (key, tensor), *others = copies.items()
    for other, again in others:
        if not same(tensor, again):
            raise CheckpointError(
                f"{tensor.source}: {key!r} and {other!r} are the same weight, but differ"
            )
    return tensor


def _one_bias(whole: Mapping[str, Whole], stored: Names) -> dict[str, Whole]:
    """Returns whole tensors, with a single name for the tied bias of a head.

    BERT and RoBERTa tie the bias of a head as well as its weight, and PEFT may save both.
    """
    found: dict[str, Whole] = {}
    for name, x in whole.items():
        outer, _, last = name.rpartition(".decoder.")
        one = f"{outer}.bias"
        name = one if last == "bias" and name not in stored and one in stored else name
        before = found.get(name, Whole())
        found[name] = Whole(before.saved | x.saved, before.stored | x.stored)
    return found


def _of_whole(name: str, tensor: Tensor, to: "_Trained") -> Iterator[tuple[str, Tensor]]:
    """Returns the base's tensors that a whole tensor replaces: one, or those of stacked experts."""
    found = to.stored.find(name)
    if found is None or found.how != "experts":
        file = to.stored.file(name, tensor.source)
        if file not in to.base:
            _check_new(name, file, tensor, to)
        yield file, tensor
        return
    shape = _stacked_shape(found.experts(), to.base)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.source}: expected {name!r} of shape {shape}, got {tensor.shape}"
        )
    start = 0
    for file in found.files:
        own = to.base[file].shape
        yield file, Piece(tensor, file, start, own)
        start += math.prod(own)


def _check_new(name: str, file: str, tensor: Tensor, to: "_Trained") -> None:
    """Raises a CheckpointError unless a tensor that is not in the base is a head that is used."""
    if file == head_of(to.base, to.model, [file], to.config.task_type):
        return
    what = f"{tensor.source}: {name!r} is not in the base"
    if not to.config.is_saved(name.rpartition(".")[0]):
        near = nearest(name, to.base)
        raise CheckpointError(f"{what}, and is not a new head (modules_to_save){near}")
    reader = class_of(to.model)
    if name.partition(".")[0] not in heads_of(reader):
        raise CheckpointError(
            f"{what}, and {reader or 'a class that its config.json does not name'} does not read "
            "it: for a new head, put the class that the adapter was trained with into "
            f"architectures in the base's config.json{nearest(name, to.base)}"
        )


def lacking(
    weights: Weights, config: AdapterConfig, names: Names, base: Tensors, model: Config
) -> tuple[list[str], list[str]]:
    """Lists modules and parameters without factors that an adapter's config requires.

    Args:
      weights: The adapter's content.
      config: Its config.
      names: The names in memory of the base's tensors.
      base: The tensors of the base.
      model: The content of its config.json.

    Returns:
      The modules and parameters that must have factors; and those that need not have them: the
      config states a pattern, the same module of another layer has factors, or they belong to a
      stack of layers or to experts that the adapter does not change, as after training a part of
      the model.
    """
    layers = look_up(model, "num_hidden_layers")
    changed = {name for name, weight in weights.weights.items() if weight.change}
    touched = {_place(name) for name, where in names.items() if changed.intersection(where.files)}
    stacks = {stack for stack, _ in touched}
    must, may = [], []
    for name, where in names.items():
        if changed.intersection(where.files) or len(base[where.files[0]].shape) < 2:
            continue
        module, _, last = name.rpartition(".")
        parameter = last in config.parameters(module)
        asked = parameter or (last in ("weight", KERNEL) and config.asks_for(module))
        place = position(name)
        # Layers beyond the last one predict further tokens, and are not loaded.
        beyond = place is not None and type(layers) is int and place.index >= layers
        if not asked or beyond or config.is_saved(module):
            continue
        stack, kind = _place(name)
        apart = (stack and stack not in stacks) or ".0." in kind or (stack, kind) in touched
        strict = parameter or isinstance(config.target_modules, list)
        (may if apart or not strict else must).append(name if parameter else module)
    return must, may


def _place(name: str) -> tuple[str, str]:
    """Returns the stack of a tensor, and its name within a layer, with 0 for further numbers."""
    place = position(name)
    stack, rest = ("", name) if place is None else (place.stack, place.rest)
    return stack, re.sub(r"\d+", "0", rest)


# --- factors


@dataclass(frozen=True)
class _Trained:
    """The context of an adapter's training.

    Attributes:
      config: Its config.
      base: The tensors of the base.
      model: The content of the base's config.json.
      stored: The location in the base of the tensors in the adapter.
    """

    config: AdapterConfig
    base: Tensors
    model: Config
    stored: Names


def _changes(module: str, pairs: list[Pair], to: _Trained) -> Iterator[tuple[str, Change]]:
    """Returns the changes of one module's weight, bias or parameters, by name."""
    config, base = to.config, to.base
    if parameters := _parameters(module, to):
        yield from _of_parameters(module, pairs, parameters, to)
        return
    pair, source = pairs[0], pairs[0].parts["A"].source
    if len(pairs) > 1 or pair.nested:
        raise CheckpointError(
            f"{source}: {module!r} has factors of several parameters, but "
            f"{config.target_parameters or []} (target_parameters) matches none in the base"
        )
    flax = f"{module}.{KERNEL}"
    name = to.stored.file(f"{module}.weight", source)
    if flax in base and name not in base:
        name = flax
    start = base.get(name)
    A, B = _factors(pair, config.rank(module))
    scale = config.scale(module)
    transposed = bool(pair.embedding) or name == flax
    transposed = transposed or _is_transposed(module, A, B, start, to)
    yield name, Change(B, A, scale, transposed, pair.parts.get("magnitude"))
    if bias := pair.parts.get("bias"):
        _check_floating(pair, bias)
        if len(bias.shape) != 1:
            raise CheckpointError(f"{source}: {module!r}: expected lora_B.bias [out]")
        of = to.stored.file(f"{module}.bias", source)
        if of not in base:
            raise CheckpointError(
                f"{source}: {module!r} has a lora_B.bias, but no bias in the base to add it to"
            )
        yield of, Change(bias, None, scale)


def _factors(pair: Pair, rank: int, experts: int = 1) -> tuple[Tensor, Tensor]:
    """Checks and returns the factors A and B of a pair."""
    A, B = pair.parts["A"], pair.parts["B"]
    for factor in (A, B):
        _check_floating(pair, factor)
    fits = len(A.shape) == len(B.shape) >= 2 and A.shape[0] == B.shape[1]
    if not fits or any(size != 1 for size in B.shape[2:]):
        raise CheckpointError(
            f"{A.source}: {pair.module!r}: expected A [rank, in] and B [out, rank], got {A.shape} "
            f"and {B.shape}"
        )
    if A.shape[0] != rank * experts:
        raise CheckpointError(
            f"{A.source}: {pair.module!r} has rank {A.shape[0] / experts:g}, but its config has "
            f"{rank}"
        )
    return A, B


def _check_floating(pair: Pair, factor: Tensor) -> None:
    """Raises a CheckpointError unless a factor is floating."""
    if not jnp.issubdtype(factor.dtype, jnp.floating):
        raise CheckpointError(
            f"{factor.source}: {pair.module!r}: expected factors of a floating dtype, got "
            f"{factor.dtype}"
        )


def _is_transposed(module: str, A: Tensor, B: Tensor, start: Tensor | None, to: _Trained) -> bool:
    """Checks whether a weight is stored as [in, out]."""
    flipped = bool(to.config.fan_in_fan_out) or is_conv1d(module, to.model)
    # Heads of tokens are plain linear layers in all families.
    if len(A.shape) != 2 or role(f"{module}.weight") == "head":
        return False
    # The shape determines it, because a model may have both kinds. A square weight is ambiguous.
    shape = (B.shape[0], A.shape[1])
    if start is not None and shape == start.shape and shape != shape[::-1]:
        return False
    return flipped


def is_conv1d(module: str, model: Config) -> bool:
    """Checks whether a module is a Conv1D of transformers, which stores weights as [in, out].

    Args:
      module: The name of the module.
      model: The content of the base's config.json.

    Returns:
      Whether it is.
    """
    return look_up(model, "model_type") in CONV1D and module.rpartition(".")[2] in _CONV1D_MODULES


# --- parameters


class _Parameter(NamedTuple):
    """A parameter with its own factors.

    Attributes:
      shape: Its shape in memory.
      whole: The name of the base's tensor; "" if the base stores each expert in separate tensors.
      experts: In that case the names of each expert's tensors, which are concatenated in memory.
    """

    shape: Shape
    whole: str
    experts: list[list[str]]


def _parameters(module: str, to: _Trained) -> dict[str, _Parameter]:
    """Returns the parameters of a module that match `target_parameters` and exist in the base."""
    parameters: dict[str, _Parameter] = {}
    for parameter in to.config.parameters(module):
        name = f"{module}.{parameter}"
        found = to.stored.find(name)
        if found is None:
            continue
        if found.how == "experts":
            experts = found.experts()
            parameters[parameter] = _Parameter(_stacked_shape(experts, to.base), "", experts)
        else:
            whole = to.stored.file(name, f"adapter of {module}")
            parameters[parameter] = _Parameter(to.base[whole].shape, whole, [])
    return parameters


def _stacked_shape(experts: list[list[str]], base: Tensors) -> Shape:
    """Returns the shape in memory of experts that the base stores separately."""
    first = [base[name].shape for name in experts[0]]
    if any([base[name].shape for name in one] != first for one in experts):
        raise CheckpointError(f"the experts {experts[0][0]!r}, ... of the base differ in shape")
    rows = sum(shape[0] for shape in first)
    return (len(experts), rows, *first[0][1:])


def _of_parameters(
    module: str, pairs: list[Pair], parameters: Mapping[str, _Parameter], to: _Trained
) -> Iterator[tuple[str, Change]]:
    """Returns the changes of a module's parameters.

    Each wrapper contains the factors of one parameter without its name; the shapes identify the
    parameter.
    """
    config, source = to.config, pairs[0].parts["A"].source
    few = len(pairs) == len(parameters) <= _MOST
    orders = [
        order
        for order in (itertools.permutations(parameters) if few else ())
        if all(
            _fits(pair, config.rank(f"{module}.{parameter}"), parameters[parameter].shape)
            for pair, parameter in zip(pairs, order, strict=True)
        )
    ]
    if len(orders) != 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in parameters.items())
        raise CheckpointError(
            f"{source}: expected one pair of factors for each of {shapes} of {module!r}, got "
            + ("factors that fit in several ways" if orders else "others")
        )
    for pair, parameter in zip(pairs, orders[0], strict=True):
        if pair.parts.keys() != {"A", "B"} or pair.embedding:
            raise CheckpointError(f"{source}: {module!r}: expected only factors A and B")
        name, (shape, whole, experts) = f"{module}.{parameter}", parameters[parameter]
        count = shape[0] if len(shape) == 3 else 1
        A, B = _factors(pair, config.rank(name), count)
        change = Change(B, A, config.scale(name), experts=count)
        if whole:
            square = len(shape) == 3 and shape[1] == shape[2]
            known = look_up(to.model, "model_type") in _EXPERTS_TRANSPOSED
            yield whole, change._replace(transposed=known if square else change.shape != shape)
            continue
        for expert, names in enumerate(experts):
            first = 0
            for one in names:
                last = first + to.base[one].shape[0]
                yield one, change._replace(one=(expert, first, last))
                first = last


def _fits(pair: Pair, rank: int, shape: Shape) -> bool:
    """Checks whether factors of this rank for each expert can change a parameter of this shape."""
    A, B = pair.parts["A"].shape, pair.parts["B"].shape
    experts = shape[0] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or len(A) != 2 or len(B) != 2:
        return False
    product, wanted = (B[0], A[1]), shape[-2:]
    return A[0] == B[1] == rank * experts and (
        product == wanted or (len(shape) == 3 and product[::-1] == wanted)
    )


def _sides(weights: Mapping[str, Weight], to: _Trained) -> tuple[str, ...]:
    """Returns the names of an embedding and its tied head, if the adapter changes one of them."""
    base = to.base
    embeddings = [
        name for name, x in base.items() if role(name) == "embedding" and len(x.shape) == 2
    ]
    head = head_of(base, to.model, weights, to.config.task_type)
    heads = [*filter(_is_head, weights), *filter(_is_head, base)]
    if not head or not embeddings or weights.keys().isdisjoint((*embeddings, *heads)):
        return ()
    return next((name for name in embeddings if name in weights), embeddings[0]), head


def head_of(
    base: Mapping[str, Tensor],
    model: Config,
    stated: Iterable[str] = (),
    task_type: str | None = None,
) -> str:
    """Finds the name of a model's tied head.

    Args:
      base: The tensors of the model.
      model: The content of its config.json.
      stated: Names of further weights, which may include the head.
      task_type: The task of an adapter, if it is known.

    Returns:
      The name of the head's weight, which may not be stored; "" if the model has no head of tokens,
      or its head is not tied.
    """
    stored = [name for name in base if _is_head(name)]
    decided = tied(model, base)
    if not (decided is True or (decided is None and bool(model) and not stored)):
        return ""
    if heads := [*filter(_is_head, stated), *stored]:
        return heads[0]
    kind = class_of(model)
    known = tied_head(kind)
    # A classifier has no head of tokens, even if its configuration ties one.
    headed = known or kind.endswith(_HEADED) or task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM")
    if not headed:
        return ""
    rules = rules_of(kind, str(look_up(model, "model_type")))
    return file_name(known or "lm_head.weight", rules)


def _is_head(name: str) -> bool:
    """Checks whether a weight, not a bias, computes the output tokens."""
    return role(name) == "head" and name.endswith("weight")
