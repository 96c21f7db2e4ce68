"""Reads the adapters of other programs as PEFT's.

kohya's scripts, diffusers, MLX and NeMo store the same pairs of factors under other names.
`in_peft` renames their tensors, finds the modules among the names of the base, and makes the config
that PEFT would write. Files of other programs are refused, with the pair of names that identifies
them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sail_jax.checkpoint.contents.kinds import factor_pair, other_factor
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.sources.adapted import Turned
from sail_jax.checkpoint.sources.adapter_keys import PREFIX
from sail_jax.checkpoint.sources.renamings import Names
from sail_jax.checkpoint.sources.unet_names import other_names
from sail_jax.checks import nearest
from sail_jax.configurations import Config
from sail_jax.merging.tensors import Tensor, Tensors, read_whole

# The keys of each program: the module, and the factor.
_PROGRAMS = {
    program: [re.compile(pattern) for pattern in patterns]
    for program, patterns in {
        "kohya": [r"(?P<module>[^.]+)\.(?:(?P<A>lora_down)|lora_up)\.weight"],
        "diffusers": [
            r"(?P<module>.+?)(?:\.lora\.|_lora\.)(?:(?P<A>down)|up)\.weight",
            r"(?P<module>.+)\.lora_(?:(?P<A>A)|B)(?:\.default)?\.weight",
        ],
        "MLX": [r"(?P<module>.+)\.(?:(?P<A>lora_a)|lora_b)"],
        "NeMo": [
            r"(?P<module>.+\.adapter_layer\.lora_\w+_adapter)\.linear_(?:(?P<A>in)|out)\.weight",
            r"(?P<module>.+)\.adapter\.linear_(?:(?P<A>in)|out)\.weight",
        ],
    }.items()
}
# NeMo's first names of an adapter, and its layer with Megatron's core and without it.
_NEMO_LAYERS = {
    "lora_kqv_adapter": ("linear_qkv", "query_key_value"),
    "lora_dense_attention_adapter": ("linear_proj", "dense"),
    "lora_hto4h_adapter": ("linear_fc1", "dense_h_to_4h"),
    "lora_4htoh_adapter": ("linear_fc2", "dense_4h_to_h"),
}
_ALPHA = re.compile(r"(?P<module>.+?)(?:\.lora)?\.alpha")
# The prefix of kohya's scripts for the name of a module, and of diffusers for a component.
_FLAT = re.compile(r"(lora_(?:unet|te\d?|transformer)|lycoris|lora)_")
_COMPONENT = re.compile(r"(unet|transformer|text_encoder(?:_\d)?)\.")
# The names of attention processors in diffusers' first files.
_PROCESSOR = ((".processor.to_out", ".to_out.0"), (".processor.", "."))
_METADATA = "lora_adapter_metadata"


class _Factors(NamedTuple):
    """The content of an adapter's file.

    Attributes:
      program: The program that wrote it.
      pairs: The factors A and B by module, in PEFT's order of axes.
      alphas: The alpha of each module; the rank where it is missing.
      scale: A factor on all products.
    """

    program: str
    pairs: dict[str, dict[str, Tensor]]
    alphas: dict[str, float]
    scale: float = 1.0


def in_peft(
    adapter: Checkpoint, names: Names | None = None
) -> tuple[Tensors, Config, tuple[str, ...]]:
    """Reads an adapter, and returns it as PEFT would have written it.

    Args:
      adapter: The open adapter.
      names: The names of the base's tensors; None without a base.

    Returns:
      The tensors by PEFT's keys, the content of `adapter_config.json`, and notes for the user.

    Raises:
      CheckpointError: If it is not an adapter, or an adapter of an unsupported program; or if a
        module is missing in the base.
      ValueError: If its config cannot be read.
    """
    config = config_of(adapter.extras, "adapter_config.json")
    if "peft_type" in config or any(key.startswith(PREFIX) for key in adapter.tensors):
        return adapter.tensors, config, ()
    read = _read(adapter, config)
    modules, notes = _modules(read, names, adapter)
    tensors: dict[str, Tensor] = {}
    ranks, alphas = {}, {}
    for stem, module in modules.items():
        for side, tensor in read.pairs[stem].items():
            key = f"{PREFIX}{module}.lora_{side}.weight"
            if key in tensors:
                raise CheckpointError(f"{tensor.source}: several factors for {module!r}")
            tensors[key] = tensor
        ranks[module] = read.pairs[stem]["A"].shape[0]
        alphas[module] = read.alphas.get(stem, float(ranks[module])) * read.scale
    return tensors, _config(ranks, alphas), notes


def _read(adapter: Checkpoint, config: Config) -> _Factors:
    """Reads factors of another program; raises a CheckpointError if the program is unknown."""
    tensors = adapter.tensors
    for program, patterns in _PROGRAMS.items():
        pairs: dict[str, dict[str, Tensor]] = {}
        alphas: dict[str, float] = {}
        others = []
        for key, tensor in tensors.items():
            if match := next(filter(None, (x.fullmatch(key) for x in patterns)), None):
                pairs.setdefault(match["module"], {})["A" if match["A"] else "B"] = tensor
            elif (match := _ALPHA.fullmatch(key)) and tensor.shape in ((), (1,)):
                alphas[match["module"]] = float(read_whole(tensor).reshape(-1)[0])
            else:
                others.append(key)
        if not pairs:
            continue
        if others:
            raise CheckpointError(
                f"{adapter.path}: {others[0]!r} is not a factor, nor the alpha of one, in "
                f"{program}'s layout; convert the adapter to PEFT's with the program that made it"
            )
        for module, pair in pairs.items():
            if pair.keys() != {"A", "B"}:
                raise CheckpointError(
                    f"{adapter.path}: one of the two factors of {module!r} is missing"
                )
        if lost := [module for module in alphas if module not in pairs]:
            raise CheckpointError(f"{adapter.path}: {lost[0]!r} has an alpha, but no factors")
        if program == "MLX":
            return _of_mlx(adapter, config, pairs)
        if config:
            break
        scale = _stated_scale(adapter) if program == "diffusers" else 1.0
        return _Factors(program, pairs, alphas, scale)
    if pair := factor_pair(tensors):
        raise CheckpointError(
            f"{adapter.path} holds factors of low rank ({pair[0]} and {pair[1]}) in a layout that "
            "is not read here: convert it to PEFT's, or merge it into its base, with the program "
            "that made it"
        )
    if not config and (factor := other_factor(tensors)):
        raise CheckpointError(
            f"{adapter.path}: adapters with {factor} are not read here: merge it into its base "
            "with the program that made it"
        )
    raise CheckpointError(f"{adapter.path} is not an adapter: adapter_config.json is missing")


def _of_mlx(adapter: Checkpoint, config: Config, pairs: dict[str, dict[str, Tensor]]) -> _Factors:
    """Reads MLX's factors, [in, rank] and [rank, out], with one scale in its config."""
    about = config.get("lora_parameters")
    scale = about.get("scale") if isinstance(about, Mapping) else None
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora" or isinstance(scale, bool) or not isinstance(scale, int | float):
        raise CheckpointError(
            f"{adapter.path}: expected an adapter_config.json of MLX with fine_tune_type 'lora' "
            "and a number lora_parameters.scale"
        )
    turned: dict[str, dict[str, Tensor]] = {
        module: {side: Turned(tensor) for side, tensor in pair.items()}
        for module, pair in pairs.items()
    }
    # The scale is alpha / rank in PEFT's words; MLX multiplies by the scale itself.
    return _Factors("MLX", turned, {}, float(scale))


def _stated_scale(adapter: Checkpoint) -> float:
    """Returns the scale in the metadata of diffusers, or 1 if it is missing."""
    text = adapter.metadata.get(_METADATA)
    if text is None:
        return 1.0
    try:
        about = json.loads(text)
        stated = {key.rpartition(".")[2]: {} for key in about}
        for key, value in about.items():
            stated[key.rpartition(".")[2]][key.rpartition(".")[0]] = value
        scales = {
            alpha / stated["r"][part] for part, alpha in stated.get("lora_alpha", {}).items()
        } or {1.0}
        switched = ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern", "lora_bias")
        on = [key for key in switched if any(stated.get(key, {}).values())]
    except (ValueError, AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{adapter.path}: its metadata {_METADATA} cannot be read") from error
    if on or len(scales) != 1:
        what = on[0] if on else "several scales"
        raise CheckpointError(
            f"{adapter.path}: its metadata {_METADATA} states {what}: not read here"
        )
    return float(scales.pop())


def _modules(
    read: _Factors, names: Names | None, adapter: Checkpoint
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the base's name of each module, and notes on scales and factors of other models."""
    wanted = {stem: _names(stem, read.program, adapter) for stem in read.pairs}
    notes = []
    if read.program == "NeMo" and not read.alphas:
        notes = ["its adapter's file does not state alpha: it is taken as the rank, as NeMo does"]
    if names is None:
        if read.program == "kohya":
            raise CheckpointError(
                f"{adapter.path}: kohya's names of modules ({next(iter(read.pairs))}) are read "
                "only next to their base: write base+adapter in a recipe"
            )
        # Names in a file for a single model may not state the model.
        several = len({part for part, _ in wanted.values()}) > 1
        alone = {x: _plain(x) if several else each[0] for x, (_, each) in wanted.items()}
        return alone, tuple(notes)
    known = _known(names, flat=read.program == "kohya")
    found: dict[str, str] = {}
    lost: dict[str, list[str]] = {}
    for stem, (part, each) in wanted.items():
        if module := next((known[name] for name in each if name in known), None):
            found[stem] = module
        else:
            lost.setdefault(part, []).append(stem)
    here = {wanted[stem][0] for stem in found}
    for part, stems in lost.items():
        if not part or part in here or not here:
            near = nearest(wanted[stems[0]][1][0], known)
            raise CheckpointError(f"{adapter.path}: {stems[0]!r} is not in the base{near}")
        notes.append(
            f"its adapter's factors for {part} ({len(stems)} modules) belong to another model"
        )
    return found, tuple(notes)


def _names(stem: str, program: str, adapter: Checkpoint) -> tuple[str, list[str]]:
    """Returns the model of a module ("" if it is not stated), and its possible names there."""
    if program == "NeMo":
        before, _, kind = stem.rpartition(".adapter_layer.")
        if before and kind not in _NEMO_LAYERS:
            raise CheckpointError(
                f"{adapter.path}: {stem!r} is not one of NeMo's adapters that are read here: "
                f"{', '.join(_NEMO_LAYERS)}"
            )
        return "", [f"{before}.{x}" for x in _NEMO_LAYERS[kind]] if before else [stem]
    match = (_FLAT if program == "kohya" else _COMPONENT).match(stem)
    return (match[1], [_plain(stem[match.end() :])]) if match else ("", [_plain(stem)])


def _plain(stem: str) -> str:
    """Removes the words for attention processors from a module's name."""
    for old, new in _PROCESSOR:
        stem = stem.replace(old, new)
    return stem


def _known(names: Names, flat: bool) -> dict[str, str]:
    """Returns the modules of a base by their possible names in an adapter.

    A base in one file has a prefix before the names ("model.diffusion_model."). Ambiguous names are
    omitted. A U-Net has two names for each module.
    """
    modules = [name.rpartition(".")[0] for name, _ in names.items() if name.endswith(".weight")]
    joint = "_" if flat else "."
    whole = {module.replace(".", joint): module for module in modules}
    shorter: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for module in modules:
        parts = module.split(".")
        for start in range(1, min(5, len(parts) - 2)):
            name = joint.join(parts[start:])
            counts[name] += 1
            shorter[name] = module
    found = {name: x for name, x in shorter.items() if counts[name] == 1} | whole
    return {name.replace(".", joint): x for name, x in other_names(modules).items()} | found


def _config(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """Makes the config of an adapter with these ranks and alphas."""
    rank, alpha = _most(ranks.values()), _most(alphas.values())
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{re.escape(m)}": r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(m)}": a for m, a in alphas.items() if a != alpha},
    }


def _most(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
