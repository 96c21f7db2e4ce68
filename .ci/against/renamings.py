"""Names in files and in memory.

`sail_jax/checkpoint/sources/renamings.json` has the rules by which transformers renames tensors
when it loads a file. The table is written anew from the installed transformers. The differences are
counted. For 25 classes, names that transformers writes are translated to the names in memory, and
compared with those of the model.

Run alone with `--write`, `.ci/against/renamings.py` writes the table.
"""

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from cases import Case, Outcome
from transformers import conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import configuration_auto, modeling_auto

from sail_jax.checkpoint.contents.layers import role
from sail_jax.checkpoint.sources.renamings import Names

TABLE = Path(__file__).parents[2] / "sail_jax/checkpoint/sources/renamings.json"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
# Classes whose default configuration cannot be built, or that need further packages, are left out:
# the rules of their model type hold for them.


def written() -> dict[str, Any]:
    """The table as the installed transformers would have it."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    rules: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for key, transforms in mapping.items():
        content = [[t.source_patterns, t.target_patterns, _how(t)] for t in transforms]
        same = seen.setdefault(json.dumps(content), key)
        rules[key] = content if same == key else same
    classes, prefixes, heads = {}, defaultdict(Counter), defaultdict(dict)
    for name, (family, *others) in _classes().items():
        try:
            model = _model(family, name)
        # Whatever a class needs that is not there.
        except Exception as error:
            print(f"{name}: {type(error).__name__}", file=sys.stderr)
            continue
        prefix = model.base_model_prefix
        if hasattr(model, prefix):
            for own in {family, *others}:
                prefixes[own][prefix] += 1
            if task := re.search(r"For[A-Z]\w*$|LMHead\w*$", name):
                firsts = {key.partition(".")[0] for key, _ in model.named_parameters()}
                heads[task[0]][name] = sorted(firsts - {prefix})
        scopes = _scopes(model)
        if scopes != [[None, key] for key in (name, family) if key in mapping][:1]:
            classes[name] = {"prefix": prefix, "scopes": scopes}
    return {
        "transformers": transformers.__version__,
        "rules": rules,
        "classes": dict(sorted(classes.items())),
        "prefixes": {key: x.most_common(1)[0][0] for key, x in sorted(prefixes.items())},
        "heads": _common(heads),
        "tied": tied_heads(),
    }


def tied_heads() -> dict[str, str]:
    """The names in memory of tied heads, by class, other than lm_head."""
    found = {}
    for name in sorted(_classes()):
        try:
            tied = getattr(transformers, name)._tied_weights_keys
        # A class that needs a package that is not there.
        except (ImportError, AttributeError):
            continue
        tied = tied if isinstance(tied, Mapping) else ()
        heads = [key for key in tied if role(key) == "head" and key.endswith(".weight")]
        if heads and heads[0] != "lm_head.weight":
            found[name] = heads[0]
    return found


def _common(heads: Mapping[str, Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """The common heads of each task, and those of classes that have others."""
    found: dict[str, list[str]] = {}
    for task, classes in sorted(heads.items()):
        counts = Counter(head for own in classes.values() for head in own)
        found[task] = sorted(head for head, n in counts.items() if n > len(classes) / 5)
        found |= {name: own for name, own in sorted(classes.items()) if {*own} - {*found[task]}}
    return found


def _how(transform: Any) -> str:
    """What a rule does beyond renaming; see `Rule`."""
    kind = type(transform).__name__
    if kind in ("WeightRenaming", "PrefixChange"):
        return ""
    if kind == "GroupWeightRename":
        return "group"
    words = []
    for operation in getattr(transform, "operations", [transform]):
        dim = getattr(operation, "dim", None)
        words.append(type(operation).__name__ + (f"({dim})" if dim is not None else ""))
    return " ".join(words)


def _classes() -> dict[str, list[str]]:
    """Every class with its model types; the first one is the one that it is named after."""
    found: dict[str, list[str]] = {}
    for family in configuration_auto.CONFIG_MAPPING_NAMES:
        for names in (getattr(modeling_auto, n) for n in dir(modeling_auto) if _is_table(n)):
            own = names.get(family) or ()
            for name in [own] if isinstance(own, str) else own:
                found.setdefault(name, []).append(family)
    return found


def _is_table(name: str) -> bool:
    return name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")


def _model(family: str, name: str) -> Any:
    """A model of a class without values, with two layers where the configuration allows it."""
    config = configuration_auto.CONFIG_MAPPING[family]()
    parts = [config]
    while parts:
        part = parts.pop()
        for key in LAYERS:
            layers = vars(part).get(key)
            if type(layers) is int and layers > 2 and not getattr(part, "layer_types", None):
                setattr(part, key, 2)
        parts += [x for x in vars(part).values() if isinstance(x, transformers.PretrainedConfig)]
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def _scopes(model: Any) -> list[list[str | None]]:
    """The modules to which rules of model types or classes are limited, in order."""
    asked: list[tuple[str, Any]] = []
    real = conversion_mapping.get_checkpoint_conversion_mapping

    def spy(key: str) -> Any:
        if (rules := real(key)) is not None:
            asked.append((key, rules))
        return rules

    with mock.patch.object(conversion_mapping, "get_checkpoint_conversion_mapping", spy):
        conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [[rules[0].scope_prefix if rules else None, key] for key, rules in asked]


def compared(part: str, folder: Path) -> Outcome:
    """Counts the entries of the table that the installed transformers has otherwise."""
    global _now
    if _now is None:
        _now = written()
    old, new = json.loads(TABLE.read_text())[part], _now[part]
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    note = f"of {len(new)}" + (f"; new or changed: {', '.join(keys[:5])}" if keys else "")
    return Outcome(len(keys), len(new), 0, note)


_now: dict[str, Any] | None = None
CLASSES = (
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GPTNeoXForCausalLM", "BertForMaskedLM"),
    *("OlmoeForCausalLM", "DeepseekV3ForCausalLM", "MiniMaxForCausalLM", "Phi3ForCausalLM"),
    *("PhimoeForCausalLM", "JambaForCausalLM", "GraniteMoeForCausalLM", "LlamaForCausalLM"),
    *("ViTForImageClassification", "BeitForImageClassification", "DeiTForImageClassification"),
    *("CLIPTextModel", "SiglipVisionModel", "CLIPVisionModel", "GPT2LMHeadModel"),
    *("LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "OPTForCausalLM"),
    *("PaliGemmaForConditionalGeneration", "Gemma3ForConditionalGeneration", "BartModel"),
)


def saved(name: str, folder: Path) -> Outcome:
    """Counts the names in memory that the names in a saved file do not lead to."""
    model = _model(_classes()[name][0], name)
    files = revert_weight_conversion(model, model.state_dict())
    config = model.config.to_dict() | {"architectures": [name]}
    names = Names(files, config)
    memory = [key for key, _ in model.named_parameters()]
    lost = [key for key in memory if key not in names]
    other = len(set(files) - set(memory))
    note = f"{len(memory)} names, {other} of the file's differ"
    return Outcome(len(lost), len(memory), 0, note + (f"; lost: {lost[0]}" if lost else ""))


CASES = [
    *(
        Case(f"table, {part}", "against the installed transformers", partial(compared, part))
        for part in ("rules", "classes", "prefixes", "heads", "tied")
    ),
    *(Case(name, "names that transformers saves", partial(saved, name)) for name in CLASSES),
]
if __name__ == "__main__":
    if "--write" in sys.argv:
        rows = []
        for part, content in written().items():
            if isinstance(content, str):
                rows.append(f"{json.dumps(part)}: {json.dumps(content)}")
                continue
            lines = [f"  {json.dumps(key)}: {json.dumps(x)}" for key, x in content.items()]
            rows.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n}")
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    else:
        for case in CASES:
            with tempfile.TemporaryDirectory() as place:
                print(case.name, case.run(Path(place)), flush=True)
