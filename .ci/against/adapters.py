"""Adapters of peft.

Each case is run twice: with an adapter whose files NumPy wrote, and with one that peft itself made
and saved, with random values. The keys, the shapes and the config of the two are the same, or the
case fails. peft's `PeftModel` is the reference: the model as it was trained, before anything is
merged. Weights may differ in eight roundings: those of a product of rank 4, of its scale, of the
sum and of what DoRA multiplies it by. The last column has what peft's own `merge_and_unload` does
where that is another model: it adds the changes of both sides of a tie to the one weight.

The last rows are adapters of other kinds, made and saved by peft. They have to be refused, after a
base and in the place of a model; the difference is the number of times that they were not.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import adapter_cases
import cases
import peft
import torch
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
STARTS = ("gaussian", "orthogonal", "mica")
CASES = [
    *(cases.Case(name, x.what, partial(run, x)) for name, x in adapter_cases.CASES.items()),
    *(cases.Case(x, "LoRA that began so (init_lora_weights)", partial(started, x)) for x in STARTS),
    *(cases.Case(name, "refused", partial(refused, config)) for name, config in OTHERS.items()),
]
