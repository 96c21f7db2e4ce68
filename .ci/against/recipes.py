"""Published recipes.

mergekit-yaml and sail-jax merge read the same recipe on small random Llamas, and the written
weights are compared. Both compute in float32. Each weight is a sum of a few products, or a rotation
with an angle that is a sum over the tensor. The tolerance is sixteen roundings of the largest
weight. If a method is random, the two programs have different draws. Then the differences are
paired z-scores over all entries: of the share of changed entries, and of the mean, the mean
magnitude and the mean square of the changes. Their tolerance is 4. The last column has the notes of
sail-jax.
"""

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import peft
import torch
import transformers
from cases import EPS, Case, Outcome, sail_jax
from safetensors.torch import load_file

from sail_jax.checkpoint.recipe import published
from sail_jax.checkpoint.recipe.mergekit import MERGEKIT

PLAIN = "models: [{model: A}, {model: B}]"
WEIGHTED = "models: [{model: A, parameters: {weight: 0.6}}, {model: B, parameters: {weight: 0.3}}]"
OF_BASE = "{model: BASE, parameters: {weight: 0.7, density: 0.5}}"
DENSE = "{model: A, parameters: {weight: 0.6, density: 0.5}}"
SLICES = "- sources: [{model: BASE, layer_range: [0, 2]}, {model: A, layer_range: [0, 2]}]"
RECIPES = {
    "linear": f"merge_method: linear\n{WEIGHTED}\nparameters: {{normalize: false}}",
    "slerp of slices": f"merge_method: slerp\nbase_model: BASE\nslices:\n{SLICES}\nparameters:\n"
    "  t: [{filter: self_attn, value: [0, 0.5, 1]}, {filter: mlp, value: [1, 0]}, {value: 0.5}]",
    "ties": f"merge_method: ties\nbase_model: BASE\nmodels: [{{model: BASE}}, {DENSE}, "
    "{model: B, parameters: {weight: [0, 0.4], density: 0.3}}]\n"
    "parameters: {normalize: true, int8_mask: true, lambda: 1.1}",
    "breadcrumbs_ties": "merge_method: breadcrumbs_ties\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{density: 0.7, gamma: 0.05}}",
    "nuslerp of rows": f"merge_method: nuslerp\nbase_model: BASE\n{WEIGHTED}\n"
    "parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}",
    "passthrough with scales": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: A, layer_range: [0, 2]}]\n- sources: [{model: A, layer_range: [1, 2], "
    "parameters: {scale: [{filter: o_proj, value: 0.0}, {value: 1.0}]}}]",
    "a vocabulary of both": f"merge_method: linear\n{WEIGHTED}\ntokenizer_source: union",
    "name": f"name: mine\nmerge_method: linear\n{WEIGHTED}",
    "weight, normalize, model_stock": "merge_method: model_stock\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{normalize: true}}",
    "weight, slerp": "merge_method: slerp\nbase_model: BASE\n"
    "models: [{model: BASE}, {model: A, parameters: {weight: 0.5}}]\n"
    "parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {value: 0.4}]}",
    "t of one model, slerp": "merge_method: slerp\nbase_model: BASE\nparameters: {t: 0.3}\n"
    "models: [{model: BASE}, {model: A, parameters: {t: 0.9}}]",
    "weight, normalize, sce": "merge_method: sce\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{normalize: true, select_topk: 0.5, int8_mask: true}}",
    "weight, ram": f"merge_method: ram\nbase_model: BASE\n{WEIGHTED}",
    "weight, ramplus_tl": f"merge_method: ramplus_tl\nbase_model: BASE\n{WEIGHTED}",
    "weight, nearswap": "merge_method: nearswap\nbase_model: BASE\nparameters: {t: 0.05}\n"
    "models: [{model: A, parameters: {weight: 0.5}}]",
    "weight, arcee_fusion": "merge_method: arcee_fusion\nbase_model: BASE\n"
    "models: [{model: A, parameters: {weight: 0.5}}]",
    "normalize, multislerp": "merge_method: multislerp\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{normalize: true}}",
    "density, task_arithmetic": "merge_method: task_arithmetic\nbase_model: BASE\n"
    f"models: [{DENSE}]",
    "int_space, dtype in parameters": "merge_method: ties\nbase_model: BASE\n"
    f"models: [{DENSE}, {{model: B, parameters: {{weight: 0.3}}}}]\n"
    "parameters: {int_space: true, dtype: bfloat16, normalize: false}",
    "the base's weight, breadcrumbs": "merge_method: breadcrumbs\nbase_model: BASE\n"
    f"models: [{OF_BASE}, {DENSE}]",
    "the base's weight, dare_ties": "merge_method: dare_ties\nbase_model: BASE\n"
    f"models: [{OF_BASE}, {DENSE}]",
    "the base's weight, della_linear": "merge_method: della_linear\nbase_model: BASE\n"
    f"models: [{OF_BASE}, {DENSE}]",
    "dare_ties without masks": "merge_method: dare_ties\nbase_model: BASE\n"
    f"models: [{OF_BASE}, {{model: A, parameters: {{weight: 0.6}}}}]",
    "pad_to_multiple_of, int8_mask at the top": "merge_method: ties\nbase_model: BASE\n"
    f"{WEIGHTED}\npad_to_multiple_of: 8\nint8_mask: true",
    "revision of a source": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: {model: {path: A, revision: main}}, layer_range: [0, 1]}]\n"
    "- sources: [{model: B@main, layer_range: [1, 2]}]",
    "revision beside a source": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: A, layer_range: [0, 2], revision: main}]",
    "a base with its adapter alone": "merge_method: task_arithmetic\nbase_model: BASE+LORA\n"
    "models: [{model: BASE+LORA, parameters: {weight: 1.0}}]\nparameters: {normalize: false}",
    "an adapter of the base": "merge_method: task_arithmetic\nbase_model: BASE\n"
    "models: [{model: BASE+LORA, parameters: {weight: 0.5}}]",
    "a slice without layers": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: A, layer_range: [0, 2]}]\n- sources: [{model: B, layer_range: [7, 7]}]",
    "a slice without layers, first": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: A, layer_range: [0, 0]}]\n- sources: [{model: B, layer_range: [0, 2]}]",
    "residual_weight": "merge_method: passthrough\nslices:\n"
    "- {sources: [{model: A, layer_range: [0, 2]}], residual_weight: 0.5}",
    "layer_range of whole models": "merge_method: linear\n"
    "models: [{model: A, layer_range: [0, 1], parameters: {weight: 1}}, "
    "{model: B, parameters: {weight: 3}}]",
    "weights and a base, karcher": f"merge_method: karcher\nbase_model: BASE\n{WEIGHTED}",
    "karcher in slices": "merge_method: karcher\nbase_model: BASE\nslices:\n"
    "- sources: [{model: A, layer_range: [0, 2]}, {model: B, layer_range: [0, 2]}]",
    "rescale, ties": "merge_method: ties\nbase_model: BASE\nmodels: [{model: BASE}, "
    "{model: A, parameters: {weight: 0.6, density: 0.3}}, "
    "{model: B, parameters: {weight: -0.4, density: 0.7}}]\nparameters: {rescale: true}",
    "rescale, breadcrumbs": "merge_method: breadcrumbs\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{density: 0.4, gamma: 0.05, rescale: true}}",
    "rescale, breadcrumbs_ties": "merge_method: breadcrumbs_ties\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{density: 0.4, gamma: 0.05, rescale: true, normalize: true}}",
    "eps, multislerp": "merge_method: multislerp\nbase_model: BASE\n"
    f"{WEIGHTED}\nparameters: {{eps: 0.3}}",
    "eps above a mean direction, multislerp": "merge_method: multislerp\nbase_model: BASE\n"
    "models: [{model: A, parameters: {weight: 0.6}}, {model: B, parameters: {weight: -0.3}}]\n"
    "parameters: {eps: 0.6, normalize_weights: false}",
    "one model, multislerp": "merge_method: multislerp\nbase_model: BASE\n"
    "models: [{model: A, parameters: {weight: 0.6}}]\n"
    "parameters: {eps: 0.3, normalize_weights: false}",
    "a base that is not listed, linear": "merge_method: linear\nbase_model: BASE\n"
    f"{PLAIN}\nparameters: {{weight: 1}}",
    "a negative weight, linear": "merge_method: linear\n"
    "models: [{model: A, parameters: {weight: 1.5}}, {model: B, parameters: {weight: -0.8}}]",
    "normalize, task_arithmetic": "merge_method: task_arithmetic\nbase_model: BASE\n"
    "models: [{model: A, parameters: {weight: 1}}, {model: B, parameters: {weight: -0.4}}]\n"
    "parameters: {normalize: true}",
    "density below one entry, ties": f"merge_method: ties\nbase_model: BASE\n{WEIGHTED}\n"
    "parameters: {density: 0.001}",
    "sce of all entries": f"merge_method: sce\nbase_model: BASE\n{PLAIN}",
    "nuslerp of models": f"merge_method: nuslerp\n{WEIGHTED}",
    "nuslerp of columns": f"merge_method: nuslerp\nbase_model: BASE\n{WEIGHTED}\n"
    "parameters: {nuslerp_flatten: false}",
    "multislerp of models": f"merge_method: multislerp\n{WEIGHTED}",
    "karcher of three": "merge_method: karcher\nmodels: [{model: BASE}, {model: A}, {model: B}]",
    "filter_wise, model_stock": f"merge_method: model_stock\nbase_model: BASE\n{PLAIN}\n"
    "parameters: {filter_wise: true}",
    **{
        name: f"merge_method: {name.split(',')[0]}\nbase_model: BASE\n{WEIGHTED}\n"
        f"parameters: {{density: 0.5, {more}}}"
        for name, more in {
            "dare_linear": "normalize: false",
            "dare_linear, no rescale": "rescale: false",
            "dare_ties, normalize": "normalize: true",
            "della": "epsilon: 0.2",
            "della, no rescale": "epsilon: 0.2, rescale: false",
        }.items()
    },
}  # fmt: skip
DRAWN = ("dare", "della")
"""What the names of random methods contain, but for one recipe that draws no masks."""


def draws(name: str) -> bool:
    """Whether a recipe's method draws random masks."""
    return "without masks" not in name and any(word in name for word in DRAWN)


def written(folder: Path) -> Path:
    """Writes the models that recipes name; returns their folder."""
    for seed, name in enumerate(("BASE", "A", "B")):
        checkpoints.llama(folder / name, seed)
        checkpoints.tokenizer(folder / name, ["<a>", "<b>", "<c>", "<d>"])
    # Deltas of the size that training makes, and not those of unrelated models.
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "BASE")
    for name in ("A", "B"):
        model = transformers.LlamaForCausalLM.from_pretrained(folder / name)
        with torch.no_grad():
            for weight, start in zip(model.parameters(), base.parameters(), strict=True):
                weight.copy_(start + 0.1 * (weight - start) + 0.02 * torch.randn(weight.shape))
        model.save_pretrained(folder / name)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                             init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
    peft.get_peft_model(base, config).save_pretrained(folder / "LORA")
    return folder


def text_of(recipe: str, folder: Path) -> str:
    """A recipe with the paths of the models in the place of their names."""
    return re.sub(r"\b(BASE|LORA|A|B)\b", lambda match: str(folder / match[0]), recipe)


def run(command: Any, *arguments: str | Path) -> None:
    """Runs a command of mergekit in this process: its imports take longer than its work."""
    command.main([*map(str, arguments)], standalone_mode=False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: x.double() for file in files for name, x in load_file(file).items()}


def compared(ours: Path, theirs: Path, said: str, base: Path | None = None) -> Outcome:
    """Compares the weights of two folders; with the base of a random method, their changes."""
    got, want = weights(ours), weights(theirs)
    shapes = [{name: x.shape for name, x in side.items()} for side in (got, want)]
    assert shapes[0] == shapes[1], f"other tensors: {shapes[0].items() ^ shapes[1].items()}"
    notes = re.findall(r"^note: (.*has no effect.*)$", said.replace(str(ours.parent), ""), re.M)
    said = "; ".join(["random: z-scores"] * (base is not None) + notes).replace("/", "")
    if base is not None:
        start = weights(base)
        changes = [torch.cat([(x[n] - start[n]).ravel() for n in start]) for x in (got, want)]
        return Outcome(max(map(abs, scores(*changes))), 1, 4, said)
    scale = max(float(x.abs().max()) for x in want.values())
    apart = max(float((got[name] - want[name]).abs().max()) for name in want)
    return Outcome(apart, scale, 16 * EPS * scale, said)


def scores(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Paired z-scores of changes that two programs drew.

    If both draw their masks independently from one distribution, each entry's pair of values is
    exchangeable, and the scores are nearly standard normal.
    """
    looks = (lambda x: (x != 0).double(), lambda x: x, torch.abs, torch.square)
    apart = [look(a) - look(b) for look in looks]
    return [float(d.mean() / d.std() * len(d) ** 0.5) if d.any() else 0.0 for d in apart]


def merged(name: str, folder: Path) -> Outcome:
    """Merges by one recipe with both programs."""
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    torch.manual_seed(0)
    recipe = written(folder) / "recipe.yaml"
    recipe.write_text(text_of(RECIPES[name], folder))
    cache = ("--lora-merge-cache", folder / "cache")
    run(mergekit_yaml, recipe, folder / "theirs", "--quiet", *cache)
    said = sail_jax("merge", recipe, folder / "ours", "--quiet")
    base = folder / "BASE" if draws(name) else None
    return compared(folder / "ours", folder / "theirs", said, base)


DOCUMENTS = """\
merge_method: linear
dtype: float32
models: [{model: second, parameters: {weight: 2}}, {model: first, parameters: {weight: 1}}]
---
name: second
merge_method: task_arithmetic
base_model: first
models: [{model: B, parameters: {weight: 0.5}}, {model: first+LORA, parameters: {weight: 0.5}}]
---
name: first
merge_method: slerp
base_model: BASE
models: [{model: BASE}, {model: A}]
parameters: {t: 0.3}
"""


def several(folder: Path) -> Outcome:
    """Merges by several documents with both programs."""
    from mergekit.scripts.multimerge import main as mergekit_multi

    torch.manual_seed(0)
    recipe = written(folder) / "recipe.yaml"
    recipe.write_text(text_of(DOCUMENTS, folder))
    run(
        mergekit_multi, recipe, "--intermediate-dir", folder / "between", "--out-path",
        folder / "theirs", "--quiet", "--lora-merge-cache", folder / "cache",
    )  # fmt: skip
    said = sail_jax("merge", recipe, folder / "ours", "--quiet")
    assert not list(folder.glob(".ours*")), "what only serves other documents was left"
    return compared(folder / "ours", folder / "theirs", said)


def apart(folder: Path) -> Outcome:
    """Merges by two documents that nothing uses with both programs."""
    from mergekit.scripts.multimerge import main as mergekit_multi

    torch.manual_seed(0)
    recipe = written(folder) / "recipe.yaml"
    _, *documents = DOCUMENTS.split("---\n")
    third = "name: third\nmerge_method: passthrough\nmodels: [{model: first}]\n"
    recipe.write_text(text_of("---\n".join([third, *documents]), folder))
    run(
        mergekit_multi, recipe, "--intermediate-dir", folder / "theirs", "--quiet",
        "--lora-merge-cache", folder / "cache",
    )  # fmt: skip
    sail_jax("merge", recipe, folder / "ours", "--quiet")
    found = sorted(path.name for path in (folder / "ours").iterdir())
    assert found == ["second", "third"], f"{found} was written"
    outcomes = [compared(folder / "ours" / n, folder / "theirs" / n, "") for n in found]
    return max(outcomes, key=lambda outcome: outcome.difference / outcome.tolerance)


def words(folder: Path) -> Outcome:
    """Counts the words that sail-jax takes for mergekit's and that are not, and the other way."""
    from mergekit import common, config, merge_methods
    from mergekit.tokenizer import config as tokens

    del folder
    theirs = {
        "at the top": {*config.MergeConfiguration.model_fields, "name"},
        "in a module": {*config.OutputModuleDefinition.model_fields},
        "in a slice": {*config.OutputSliceDefinition.model_fields} - {"residual_weight"},
        "in a source": {*config.InputSliceDefinition.model_fields},
        "in model: {model: ...}": {*common.ModelReference.model_fields} - {"override_architecture"},
        "in model: {model: {path: ...}}": {*common.ModelPath.model_fields},
        "in a condition": {*config.ConditionalParameter.model_fields},
        "in tokenizer": {*tokens.TokenizerConfig.model_fields},
        "in tokenizer.tokens": {*tokens.TokenEmbeddingConfig.model_fields},
        "in the source of a token": {*tokens.ModelTokenEmbedding.model_fields},
    }
    apart = {(place, word) for place, keys in published.KEYS.items() for word in keys}
    apart ^= {(place, word) for place, keys in theirs.items() for word in keys}
    methods = merge_methods.registered_methods()
    read = {(m.spec.name, p.name, p.scope != "shared") for m in methods for p in m.spec.parameters}
    ours = {name: entry.parameters.values() for name, entry in MERGEKIT.items()}
    apart ^= read ^ {
        (name, p.theirs or p.name, p.per_model) for name, own in ours.items() for p in own
    }
    return Outcome(len(apart), len(read), 0, ", ".join(map(str, sorted(apart, key=str))))


CASES = [
    Case(name, "weights that both programs write", partial(merged, name)) for name in RECIPES
] + [
    Case(
        "words", "keys of mappings, parameters of methods and whether models have their own", words
    ),
    Case("three documents", "weights that both programs write", several),
    Case("documents of two outcomes", "weights that both programs write", apart),
]
if importlib.util.find_spec("mergekit") is None:
    CASES = []
