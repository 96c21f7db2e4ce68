"""Models by their names on the Hub.

A local server replaces the Hub. transformers and PEFT load the downloads of sail-jax from the
cache, and sail-jax reads their downloads there. No program contacts the server again. The tolerance
is eighty roundings of the largest logit.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import huggingface_hub
import peft
import torch
import transformers
from cases import EPS, Case, Outcome, loaded, logits, sail_jax
from huggingface_hub import constants

CONFIG = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


def saved(folder: Path) -> None:
    """Saves a random model in shards, and a random adapter of it."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[fake_hub.FakeHub]:
    """Serves them, to this process and to those that it starts, with a cache of their own."""
    with fake_hub.serving() as server, contextlib.ExitStack() as stack:
        for name in ("model", "adapter"):
            files = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
            server.models[f"org/{name}"] = {"main": files}
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        values = {
            "ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(folder / "cache"),
        }  # fmt: skip
        for name, value in values.items():
            stack.callback(setattr, constants, name, getattr(constants, name))
            setattr(constants, name, value)
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(folder / "cache")}
        for name, value in environment.items():
            stack.callback(os.environ.pop, name)
            os.environ[name] = value
        yield server


def by_peers(cache: Path, *, offline: bool) -> torch.Tensor:
    """The logits of the model with its adapter, loaded by name."""
    options = {"cache_dir": cache, "local_files_only": offline}
    model = transformers.LlamaForCausalLM.from_pretrained("org/model", **options)
    # By its folder: PEFT asks an address that was read when it was imported.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = huggingface_hub.hf_hub_download("org/adapter", name, **options)
    return logits(peft.PeftModel.from_pretrained(model, Path(file).parent))


def merged(folder: Path, *options: str) -> torch.Tensor:
    """The logits of what sail-jax makes of both names."""
    recipe = folder / "recipe.yaml"
    recipe.write_text("merge_method: passthrough\nmodels: [{model: org/model+org/adapter}]\n")
    sail_jax("merge", recipe, folder / "merged", *options)
    return logits(loaded(folder / "merged"))


def downloaded_here(folder: Path) -> Outcome:
    """sail-jax downloads, the others read."""
    saved(folder)
    with served(folder) as server:
        ours = merged(folder)
        server.asked.clear()
        return outcome(ours, by_peers(folder / "cache", offline=True), server)


def downloaded_there(folder: Path) -> Outcome:
    """The others download, sail-jax reads."""
    saved(folder)
    with served(folder) as server:
        theirs = by_peers(folder / "cache", offline=False)
        server.asked.clear()
        return outcome(merged(folder, "--offline"), theirs, server)


def outcome(ours: torch.Tensor, theirs: torch.Tensor, server: fake_hub.FakeHub) -> Outcome:
    """Compares logits; an error if the server was asked again."""
    if again := [path for _, path in server.asked if "/org/" in path]:
        raise RuntimeError(f"asked again: {again[0]}")
    scale = float(theirs.abs().max())
    return Outcome(float((ours - theirs).abs().max()), scale, 80 * EPS * scale, "")


CASES = [
    Case("sail-jax downloads", "a merge of base and adapter, and what PEFT runs", downloaded_here),
    Case("PEFT downloads", "what PEFT runs, and a merge of base and adapter", downloaded_there),
]
