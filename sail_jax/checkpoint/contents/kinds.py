"""Detects checkpoints that are not models: adapters, unmerged adapters, optimiser states."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checks import argument
from sail_jax.merging.selection import check_weights
from sail_jax.trees import factor_of

_SPLIT = re.compile(r"[./]")
# Components of names that PEFT, LyCORIS, kohya's scripts or diffusers use for the factors of
# adapters, and never for weights.
_FACTOR = re.compile(
    r"lora_(?:[ABE]|embedding_[AB]|magnitude_vector|down|up|mid|diag)|\w+_lora(?:_[AB])?"
    r"|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|ia3_l|p?vera_lambda_[bd]"
    r"|oft_(?:r|R|embedding_R|blocks|diag)|boft_[Rs]|hra_u|(?:fourierft|waveft)_spectrum|c3a_kernel"
    r"|(?:miss|bone)_block|road_(?:theta|alpha)|shira_weight|randlora_\w+|vblora_\w+|unilora_\w+"
    r"|frod_lambda_\w+|psoft_R|deft_[PR]|gralora_\w+|hira_\w+|adamss_[AB]|peanut_\w+|lily_\w+"
    r"|tinylora_v|delora_\w+|supertuning_\w+|trainable_tokens_delta|prompt_embeddings"
    r"|adaption_(?:prompt|gate)|dora_scale"
)
# The words by which the names of two factors differ.
_PAIRS = {
    **{"lora_A": "lora_B", "lora_a": "lora_b", "lora_down": "lora_up", "down": "up", "A": "B"},
    **{"linear_in": "linear_out", "lora_in": "lora_out"},
}
_MOST = 100  # words of a name that are compared
_PREFIX = "base_model."
# Names that torch's optimisers give to the tensors that they keep for each weight.
_MOMENTS = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "exp_avg_diff", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
        *("square_avg", "grad_avg", "acc_delta"),
    )
)


def check_model(checkpoint: Checkpoint) -> None:
    """Checks that an open checkpoint holds a model, and that only weights of it are selected.

    Args:
      checkpoint: The checkpoint; no tensor is read.

    Raises:
      CheckpointError: If it holds something else, according to `not_a_model`.
      ValueError: If the state of an optimiser is selected, or adapter_config.json cannot be read.
    """
    if checkpoint.selection is not None:
        check_weights(checkpoint.selection)
    path = checkpoint.path
    if reason := not_a_model(checkpoint.tensors, checkpoint.extras, str(path)):
        raise CheckpointError(f"{path} {reason}")


def not_a_model(
    tensors: Mapping[str, object], extras: Mapping[str, Path | bytes], name: str = "ADAPTER"
) -> str:
    """Describes the kind of a checkpoint, unless it is a model that can be merged entry by entry.

    The decision depends on names and on adapter_config.json. A model may use such names for its own
    weights, so factors among ordinary weights count only if they belong to one of these weights.

    Args:
      tensors: The tensors by name; none is read.
      extras: The other files of the checkpoint, by name.
      name: The checkpoint's name in a recipe.

    Returns:
      The kind and the remedy, as the rest of a sentence; "" for a model.

    Raises:
      ValueError: If adapter_config.json cannot be read.

    >>> not_a_model({"state.0.exp_avg": None, "state.0.exp_avg_sq": None}, {})
    'holds the state of an optimiser (state.0.exp_avg), not a model'
    """
    names = list(tensors)
    if factor := next(filter(factor_of, names), None):
        return (
            f"holds factors of low rank that qwix stores next to weights ({factor}). Averages of "
            "factors do not give averages of products: fold the factors into their weights first, "
            f"with sail-jax convert and {argument('lora_alpha', '...')}, or with sail_jax.lora.fold"
        )
    parts = {x: _SPLIT.split(x) for x in names}
    factors = [x for x in names if any(map(_FACTOR.fullmatch, parts[x]))]
    of_adapter = {*factors, *(x for x in names if x.startswith(_PREFIX))}
    # kohya's scripts store the alpha of each pair of factors next to the pair.
    others = [x for x in names if x not in of_adapter and parts[x][-1] != "alpha"]
    # A full model may share its folder with an adapter's config that was left there.
    beside = "adapter_config.json" in extras and "config.json" not in extras
    if names and ((of_adapter and not others) or beside):
        about = config_of(extras, "adapter_config.json")
        if not about and (factor := other_factor(names)):
            return (
                f"is an adapter, not a model: its factors ({factor}) cannot be merged separately, "
                "and are not read here. Merge it into its base with the program that made it"
            )
        return _adapter(about, name)
    if pair := factor_pair(tensors):
        return (
            f"holds factors of low rank ({pair[0]} and {pair[1]}), not a model: the mean of "
            f"factors is not the mean of products. Write base+adapter, as in BASE+{name}"
        )
    if factor := _unmerged(names, factors):
        return (
            f"holds a model with an unmerged adapter ({factor}), whose factors cannot be merged "
            "entry by entry. Merge the adapter first (in peft: model.merge_and_unload(), then "
            "save_pretrained), or save it separately and write base+adapter"
        )
    if state := _optimiser(parts):
        return f"holds the state of an optimiser ({state}), not a model"
    return ""


def other_factor(names: Iterable[str]) -> str | None:
    """Finds a tensor of an adapter that is not of low rank, such as LoHa, LoKr or IA3.

    Args:
      names: The names of the tensors.

    Returns:
      The name; None without one.
    """
    other = (
        name
        for name in names
        if any(_FACTOR.fullmatch(part) and "lora" not in part for part in _SPLIT.split(name))
    )
    return next(other, None)


def factor_pair(tensors: Mapping[str, object]) -> tuple[str, str] | None:
    """Finds two factors of low rank in a file of factors, by their names and shapes.

    Their names differ by the words of a known pair, and their shapes share a rank that is smaller
    than the other sizes. In a file of factors, all arrays of two or more dimensions are such
    factors, and none of them has a bias.

    Args:
      tensors: The tensors by name; none is read.

    Returns:
      The names of a pair; None for another file.

    >>> class Down: shape = (2, 8)
    >>> class Up: shape = (8, 2)
    >>> factor_pair({"to_q.lora.down.weight": Down, "to_q.lora.up.weight": Up})
    ('to_q.lora.down.weight', 'to_q.lora.up.weight')
    """
    shapes = {name: getattr(x, "shape", ()) for name, x in tensors.items()}
    left = {name for name, shape in shapes.items() if len(shape) > 1}
    pairs = []
    for name in sorted(left):
        parts = _SPLIT.split(name)
        places = [i for i, part in enumerate(parts[:_MOST]) if i and part in _PAIRS]
        for place in places:
            # The same separators as in the name.
            start = sum(len(x) + 1 for x in parts[:place])
            partner = name[:start] + _PAIRS[parts[place]] + name[start + len(parts[place]) :]
            if partner in left and _share_rank(shapes[name], shapes[partner]):
                pairs.append((name, partner))
    if not pairs:
        return None
    in_pairs = {name for pair in pairs for name in pair}
    biases = {re.sub(r"weight$", "bias", name) for name in in_pairs} - in_pairs
    return pairs[0] if in_pairs == left and biases.isdisjoint(shapes) else None


def _share_rank(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Checks whether factors of these shapes, in either order, have a product of lower rank."""
    orders = ((a[0], b[1], math.prod(a[1:]), b[0]), (a[-1], b[0], a[0], b[-1]))
    return any(rank == again and rank < min(into, out) for rank, again, into, out in orders)


def _adapter(config: Mapping[str, object], name: str) -> str:
    """Returns the description of an adapter."""
    base = config.get("base_model_name_or_path")
    stated = repr(base[:200]) if isinstance(base, str) and base else ""
    of, base = (f" of {stated}", stated[1:-1]) if stated else ("", "BASE")
    return (
        f"is an adapter{of}, not a model: its factors cannot be merged separately. Write "
        f"base+adapter, as in {base}+{name}"
    )


def _unmerged(names: Iterable[str], factors: Iterable[str]) -> str:
    """Returns a factor that accompanies its weight; "" without such a factor."""
    names = set(names)
    bases = {name.partition(".base_layer.")[0] for name in names if ".base_layer." in name}
    for factor in factors:
        parts = _SPLIT.split(factor)
        place = next(i for i, part in enumerate(parts) if _FACTOR.fullmatch(part))
        module = ".".join(parts[:place])
        if module in bases or f"{module}.weight" in names:
            return factor
    return ""


def _optimiser(parts: Mapping[str, list[str]]) -> str:
    """A tensor of an optimiser's state, if all tensors belong to one; "" otherwise."""
    kept = [name for name, part in parts.items() if part[-1] in _MOMENTS]
    if kept and all(part[-1] in _MOMENTS or part[-1] == "step" for part in parts.values()):
        return kept[0]
    # optax: two trees with the names of the weights, and counts.
    trees = {
        moment: {name.replace(moment, "", 1) for name, part in parts.items() if moment in part}
        for moment in ("mu", "nu")
    }
    rest = [name for name, part in parts.items() if not {"mu", "nu", "count"} & set(part)]
    if trees["mu"] and trees["mu"] == trees["nu"] and not rest:
        return next(iter(parts))
    return ""
