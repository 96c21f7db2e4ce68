"""Adapters of peft.

Each case is run twice. The first adapter's files come from NumPy, and peft made and saved the
second one, with random values. If keys, shapes or config of the two differ, the case fails. The
reference is peft's `PeftModel`, the trained model before any merge. Weights may differ in eight
roundings: from a product of rank 4, its scale, the sum, and DoRA's factor. peft's
`merge_and_unload` adds the changes of both sides of a tie to the one weight. If this gives another
model, the last column has the error.

Then `sail-jax lora` is compared. It extracts an adapter from a fine-tuned model with changes of
rank 4, and peft loads the adapter. The logits are compared with the fine-tuned model's. The
tolerance is eight roundings plus the error of a singular value decomposition, which has a root mean
square of 20 eps times the change's. The sum of two adapters is compared with peft's
(`add_weighted_adapter`, "cat").

Random adapters of 26 classes follow, ten of which have other names in files than in memory. Each
has random targets, ranks and whole modules, and perhaps DoRA, biases, trained rows or factors of
experts. The difference counts those whose logits differ by more than 16 roundings. The tokens are
the whole vocabulary.

The last rows are other kinds of adapters, made and saved by peft. sail-jax must refuse them, after
a base and in place of a model. The difference counts missing refusals.
"""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import adapter_cases
import cases
import peft
import torch
import transformers
from drawing import FAMILIES
from drawing import compared as compared_drawn
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

ROUNDINGS = adapter_cases.RANK + 4
SETS = ("target_modules", "modules_to_save", "target_parameters")


def run(case: adapter_cases.Case, folder: Path) -> cases.Outcome:
    """Compares both adapters of a case."""
    torch.manual_seed(0)
    adapter_cases.write(case, folder / "numpy")
    (folder / "peft").mkdir()
    shutil.copytree(folder / "numpy" / "base", folder / "peft" / "base")
    make(case, folder / "peft")
    check_alike(folder / "numpy" / "adapter", folder / "peft" / "adapter")
    outcomes = [compared(case, folder / made) for made in ("numpy", "peft")]
    return max(outcomes, key=lambda outcome: outcome.difference / outcome.tolerance)


def base_of(case: adapter_cases.Case, folder: Path) -> Any:
    """The base as an adapter is given it: with as many rows as while it was trained."""
    model = cases.loaded(folder / "base")
    if case.rows:
        model.resize_token_embeddings(case.rows, mean_resizing=False)
    return model


def make(case: adapter_cases.Case, folder: Path) -> None:
    """Lets peft make an adapter with random values, and save it."""
    settings = {"r": adapter_cases.RANK, "lora_alpha": adapter_cases.ALPHA}
    task = {"task_type": "CAUSAL_LM"}
    config = LoraConfig(**(settings | task | case.config))
    model = get_peft_model(base_of(case, folder), config)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=random) / 8
    model.save_pretrained(folder / "adapter")


def check_alike(ours: Path, theirs: Path) -> None:
    """AssertionError unless two adapters have the same keys, shapes and entries of the config."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    shapes = [{key: array.shape for key, array in tensors.items()} for tensors in (a, b)]
    assert shapes[0] == shapes[1], f"peft writes {sorted(shapes[1].items() ^ shapes[0].items())}"
    a, b = (json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, theirs))
    for config in (a, b):
        config["base_model_name_or_path"] = "base"
        for key in SETS:
            config[key] = sorted(config[key]) if isinstance(config[key], list) else config[key]
    differing = {key for key in a.keys() | b.keys() if a.get(key, ...) != b.get(key, ...)}
    assert not differing, f"peft writes { ({key: b.get(key) for key in differing}) }"


def compared(case: adapter_cases.Case, folder: Path) -> cases.Outcome:
    """Compares the model that peft makes of an adapter with the one that sail-jax makes."""
    (folder / "recipe.yaml").write_text(
        f"merge_method: passthrough\nmodels:\n  - model: {folder / 'base'}+{folder / 'adapter'}\n"
    )
    cases.sail_jax("merge", folder / "recipe.yaml", folder / "out", "--quiet")
    ours = cases.loaded(folder / "out")
    theirs = PeftModel.from_pretrained(base_of(case, folder), folder / "adapter").eval()
    got, want = cases.logits(ours), cases.logits(theirs)
    scale = float(want.abs().max())
    difference = float((got - want).abs().max())
    merged = float((cases.logits(theirs.merge_and_unload()) - want).abs().max())
    tolerance = cases.rounding(ours, ROUNDINGS)
    note = f"`merge_and_unload` is off by {merged:.2g}" if merged > tolerance else ""
    return cases.Outcome(difference, scale, tolerance, note)


def started(start: str, folder: Path) -> cases.Outcome:
    """Compares an adapter of peft's that began in another way, and leaves the base as it is."""
    torch.manual_seed(0)
    plain = adapter_cases.CASES["plain"]
    case = plain._replace(config=plain.config | {"init_lora_weights": start})
    adapter_cases.write(case, folder)
    shutil.rmtree(folder / "adapter")
    make(case, folder)
    return compared(case, folder)


def tuned(kind: str, folder: Path, seed: int = 0, what: str = "", **config: Any) -> float:
    """Writes `base` and `tuned`, whose matrices differ by rank 4, and everything else by little.

    Returns the largest change of a matrix, the root mean square of its entries, in units of the
    largest entry of the matrix.
    """
    torch.manual_seed(0)
    model = MODELS[kind](**config).eval()
    model.save_pretrained(folder / "base")
    random = torch.Generator().manual_seed(seed)
    worst, done = 0.0, set()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if what not in name or weight.data_ptr() in done:
                continue
            done.add(weight.data_ptr())
            if weight.ndim == 2:
                left, right = (
                    torch.randn(size, adapter_cases.RANK, generator=random) for size in weight.shape
                )
                change = left @ right.T / 30
                size = change.square().mean().sqrt() / weight.abs().max()
                worst = max(worst, float(size))
            else:
                change = torch.randn(weight.shape, generator=random) / 8
            weight += change
    model.save_pretrained(folder / "tuned")
    return worst


def extracted(kind: str, config: Any, keys: list[str], folder: Path) -> cases.Outcome:
    """Compares a tuned model with its base and the adapter that sail-jax extracts."""
    size = tuned(kind, folder, **config)
    base, out = folder / "base", folder / "lora"
    options = ("--rank", 2 * adapter_cases.RANK, "--modules-to-save", "rest", "--quiet")
    cases.sail_jax("lora", "extract", base, folder / "tuned", out, *options)
    cases.sail_jax("lora", "apply", base, out, folder / "applied", "--quiet")
    there = load_file(out / "adapter_model.safetensors")
    for key in keys:
        assert any(key in name for name in there), f"no {key} in {sorted(there)}"
    model = cases.loaded(folder / "tuned")
    want = cases.logits(model)
    before = float((cases.logits(cases.loaded(base)) - want).abs().max())
    adapted = PeftModel.from_pretrained(cases.loaded(base), out).eval()
    got = (cases.logits(adapted), cases.logits(cases.loaded(folder / "applied")))
    difference = max(float((x - want).abs().max()) for x in got)
    tolerance = cases.rounding(model, round(ROUNDINGS + 20 * size))
    note = f"base and tuned differ by {before:.2g}"
    return cases.Outcome(difference, float(want.abs().max()), tolerance, note)


def summed(kind: str, config: Any, what: str, folder: Path) -> cases.Outcome:
    """Compares the sum of two adapters with the one that peft makes."""
    size = 0.0
    for seed in (1, 2):
        size += tuned(kind, folder, seed, what, **config)
        options = ("--rank", adapter_cases.RANK, "--quiet")
        cases.sail_jax(
            "lora", "extract", folder / "base", folder / "tuned", folder / f"{seed}", *options
        )
    weights = (0.75, -0.5)
    cases.sail_jax(
        "lora",
        "merge",
        folder / "1",
        folder / "2",
        folder / "sum",
        "--weights=0.75,-0.5",
        "--quiet",
    )
    base = folder / "base"
    theirs = PeftModel.from_pretrained(cases.loaded(base), folder / "1", adapter_name="a")
    theirs.load_adapter(folder / "2", adapter_name="b")
    theirs.add_weighted_adapter(["a", "b"], list(weights), "sum", combination_type="cat")
    theirs.set_adapter("sum")
    want = cases.logits(theirs.eval())
    ours = PeftModel.from_pretrained(cases.loaded(base), folder / "sum").eval()
    difference = float((cases.logits(ours) - want).abs().max())
    tolerance = cases.rounding(cases.loaded(base), round(ROUNDINGS + size))
    return cases.Outcome(difference, float(want.abs().max()), tolerance, "")


def refused(config: Any, folder: Path) -> cases.Outcome:
    """Lets peft save an adapter of another kind, and counts how often it is not refused."""
    torch.manual_seed(0)
    adapter_cases.write(adapter_cases.CASES["plain"], folder)
    base, adapter = folder / "base", folder / "other"
    get_peft_model(cases.loaded(base), config()).save_pretrained(adapter)
    passed, said = 0, ""
    for name, wanted in (
        (f"{base}+{adapter}", "adapter config: "),
        (f"{adapter}", "is an adapter"),
        (f"{adapter / 'adapter_model.safetensors'}", "is an adapter"),
    ):
        (folder / "recipe.yaml").write_text(
            f"merge_method: passthrough\nmodels:\n  - model: {name}\n"
        )
        try:
            cases.sail_jax("merge", folder / "recipe.yaml", folder / "out", "--quiet")
        except RuntimeError as error:
            said = said or str(error).rpartition("adapter config: ")[2]
            passed += wanted not in str(error)
        else:
            passed += 1
    return cases.Outcome(passed, 0, 0, f'"{said}"')


def other(kind: str, **settings: Any) -> Any:
    """A function that makes a config of another kind."""
    targets = {"target_modules": ["q_proj"]} if kind not in PROMPTS else {}
    return lambda: getattr(peft, kind)(task_type="CAUSAL_LM", **(targets | settings))


PROMPTS = ("PromptTuningConfig", "PrefixTuningConfig", "LNTuningConfig", "TrainableTokensConfig")
OTHERS = {
    "IA3": other("IA3Config", feedforward_modules=[]),
    "LoHa": other("LoHaConfig"),
    "LoKr": other("LoKrConfig"),
    "VeRA": other("VeraConfig"),
    "OFT": other("OFTConfig", oft_block_size=4),
    "BOFT": other("BOFTConfig", boft_block_size=4),
    "HRA": other("HRAConfig"),
    "AdaLoRA": other("AdaLoraConfig", total_step=10),
    "FourierFT": other("FourierFTConfig", n_frequency=10),
    "VB-LoRA": other("VBLoRAConfig", num_vectors=8, vector_length=8, topk=2),
    "RandLoRA": other("RandLoraConfig"),
    "SHiRA": other("ShiraConfig", r=2),
    "C3A": other("C3AConfig", block_size=8),
    "MiSS": other("MissConfig", r=4),
    "RoAd": other("RoadConfig", group_size=8),
    "LN tuning": other("LNTuningConfig"),
    "rows alone": other("TrainableTokensConfig", token_indices=[1]),
    "a prompt": other("PromptTuningConfig", num_virtual_tokens=2),
    "a prefix": other("PrefixTuningConfig", num_virtual_tokens=2),
    "PiSSA": other("LoraConfig", init_lora_weights="pissa"),
    "OLoRA": other("LoraConfig", init_lora_weights="olora"),
    "aLoRA": other("LoraConfig", alora_invocation_tokens=[1]),
    "BD-LoRA": other("LoraConfig", use_bdlora=peft.tuners.lora.BdLoraConfig(
        target_modules_bd_b=["q_proj"], nblocks=2
    )),
    "layer replication": other("LoraConfig", layer_replication=[[0, 2], [1, 2]]),
}  # fmt: skip
LLAMA = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 96}
MODELS = {
    "llama": lambda **x: transformers.LlamaForCausalLM(transformers.LlamaConfig(**x)),
    "gpt2": lambda **x: transformers.GPT2LMHeadModel(transformers.GPT2Config(**x)),
}
PLAIN = ["q_proj.lora_A.weight", "embed_tokens.lora_embedding_B", "lm_head.lora_B.weight", "norm"]
CONV1D = ["c_attn.lora_A.weight", "wte.lora_embedding_A", "wpe.lora_embedding_A", "base_layer.bias"]
EXTRACTED = [
    ("extracted, Llama", "llama", LLAMA, PLAIN),
    ("extracted, Llama, tied", "llama", LLAMA | {"tie_word_embeddings": True}, PLAIN),
    ("extracted, GPT-2", "gpt2", GPT2, CONV1D),
]
STARTS = ("gaussian", "orthogonal", "mica")
CASES = [
    *(cases.Case(name, x.what, partial(run, x)) for name, x in adapter_cases.CASES.items()),
    *(cases.Case(x, "LoRA that began so (init_lora_weights)", partial(started, x)) for x in STARTS),
    *(
        cases.Case(name, "all of a tuned model, by its adapter", partial(extracted, *x))
        for name, *x in EXTRACTED
    ),
    cases.Case("summed, Llama", "the sum of two", partial(summed, "llama", LLAMA, "proj.weight")),
    cases.Case("summed, GPT-2", "the sum of two", partial(summed, "gpt2", GPT2, "c_")),
    *(
        cases.Case(
            f"random, {kind}", "8 random adapters", partial(compared_drawn, kind, range(i, i + 8))
        )
        for i, kind in zip(itertools.count(0, 100), FAMILIES, strict=False)
    ),
    *(cases.Case(name, "refused", partial(refused, config)) for name, config in OTHERS.items()),
]
