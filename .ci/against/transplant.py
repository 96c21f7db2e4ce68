"""Tokens that a model lacks.

mergekit-tokensurgeon and sail-jax transplant give a small random Llama the tokenizer of another
Llama with another width, and the written weights are compared. Both compute in float32. Rows are
sums of other rows, with coefficients from least squares. Their sensitivity is measured: the weights
of both models move by one rounding error each, and mergekit transplants again. The tolerance is
sixteen times the measured change, and at least sixteen roundings of the largest weight.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import torch
import transformers
from cases import EPS, Case, Outcome, loaded, sail_jax
from recipes import compared, run, weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{i}" for i in range(60)]
NEW = [f"n{i}" for i in range(30)]
# What is done with both programs: our method and options, mergekit's, and settings of the models.
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "omp, k 8": (("omp", "--k", "8"), ("omp", "-k", "8"), {}),
    "omp, k 8, tied": (("omp", "--k", "8"), ("omp", "-k", "8"), {"tie_word_embeddings": True}),
    "omp, k as the donor's width": (("omp", "--k", "16"), ("omp", "-k", "16"), {}),
    "nearest, k 1": (("nearest", "--k", "1"), ("common_interpolation", "-k", "1"), {}),
    "nearest, k 8": (("nearest", "--k", "8"), ("common_interpolation", "-k", "8"), {}),
    "mean": (("mean",), ("mean",), {}),
    "zero": (("zero",), ("zero",), {}),
}


def tokenizer(folder: Path, words: list[str], end: str) -> None:
    """Saves a tokenizer of words, with a token that ends texts."""
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)
    fast.save_pretrained(folder)


def written(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Saves a base and a donor, which has all its words in another order, and thirty more."""
    base, donor = folder / "base", folder / "donor"
    checkpoints.llama(base, 0, rows=len(WORDS) + 1, **settings)
    tokenizer(base, WORDS, "</s>")
    narrow = {"hidden_size": 16, "num_key_value_heads": 4, "eos_token_id": len(WORDS + NEW)}
    checkpoints.llama(donor, 1, rows=len(WORDS + NEW) + 1, **narrow, **settings)
    tokenizer(donor, [*WORDS[:1], *NEW, *reversed(WORDS[1:])], "<|end|>")
    return base, donor


def moved(folder: Path, seed: int) -> Path:
    """A copy of a model, every entry moved by up to one rounding error of the largest."""
    copy = folder.with_name(f"{folder.name}-moved")
    shutil.copytree(folder, copy)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(copy / "model.safetensors")
    for x in tensors.values():
        x += EPS * x.abs().max() * (2 * torch.rand(x.shape, generator=random) - 1)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def transplanted(name: str, folder: Path) -> Outcome:
    """Transplants by one method with both programs."""
    from mergekit.scripts.tokensurgeon import main as tokensurgeon

    (method, *own), (theirs, *more), settings = METHODS[name]
    base, donor = written(folder, settings)
    said = sail_jax("transplant", base, donor, folder / "ours", "--method", method, *own, "--quiet")
    run(tokensurgeon, base, donor, folder / "theirs", "-a", theirs, *more, "--quiet")
    pair = moved(base, 2), moved(donor, 3)
    run(tokensurgeon, *pair, folder / "moved", "-a", theirs, *more, "--quiet")
    found = compared(folder / "ours", folder / "theirs", said)
    noise = compared(folder / "moved", folder / "theirs", "").difference
    ours = loaded(folder / "ours")
    tokens = transformers.AutoTokenizer.from_pretrained(folder / "ours")
    ends = tokens.eos_token_id, ours.config.eos_token_id
    assert ends[0] == ends[1], f"ends of texts: {ends}"
    rows = ours.get_input_embeddings().weight
    end = load_file(base / "model.safetensors")["model.embed_tokens.weight"][len(WORDS)]
    assert torch.equal(rows[ends[0]].detach(), end), "the end of texts has another row"
    largest = max(float(x.abs().max()) for x in weights(folder / "theirs").values())
    return found._replace(tolerance=16 * max(noise, EPS * largest), note="")


CASES = [
    Case(f"transplant: {name}", "the weights that both programs write", partial(transplanted, name))
    for name in METHODS
]
