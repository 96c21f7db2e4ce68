"""Adapters of peft.

Each case is run twice: with an adapter whose files NumPy wrote, and with one that peft itself made
and saved, with random values. The keys, the shapes and the config of the two are the same, or the
case fails. peft's `PeftModel` is the reference: the model as it was trained, before anything is
merged. Weights may differ in eight roundings: those of a product of rank 4, of its scale, of the
sum and of what DoRA multiplies it by. The last column has what peft's own `merge_and_unload` does
where that is another model: it adds the change of one side of a tie to both.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import adapter_cases
import cases
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


CASES = [
    cases.Case(name, case.what, partial(run, case)) for name, case in adapter_cases.CASES.items()
]
