"""Writes synthetic Llama-shaped checkpoints: a base, and models fine-tuned from it.

They are written in bounded memory, each as a single safetensors file, with the config and the
tokenizer that other programs require.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

CHUNK = 1 << 20  # elements drawn at a time
SPREAD = 0.02  # standard deviation of the base's matrices
DELTA, HEAVY, TAIL = 2e-4, 10.0, 0.05  # of the deltas; a fraction TAIL of them is HEAVY times that
DTYPES = {"bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)), "float32": ("F32", np.dtype("<f4"))}


@dataclass(frozen=True)
class Llama:
    """The sizes of a network of Llama's architecture.

    Attributes:
      hidden: The width of the residual stream.
      intermediate: The width of the MLP's hidden layer.
      layers: The number of layers.
      vocabulary: The number of tokens.
      heads: The number of attention heads, which divides `hidden`.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 32_000
    heads: int = 8

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Lists the tensors of the network.

        Returns shapes, `(out, in)` for matrices, by the architecture's names of tensors.
        """
        d, f, v = self.hidden, self.intermediate, self.vocabulary
        block = {
            "input_layernorm": (d,),
            **{f"self_attn.{x}_proj": (d, d) for x in "qkvo"},
            "post_attention_layernorm": (d,),
            **{f"mlp.{x}_proj": (f, d) for x in ("gate", "up")},
            "mlp.down_proj": (d, f),
        }
        layers = {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(self.layers)
            for name, shape in block.items()
        }
        ends = {"model.norm.weight": (d,), "lm_head.weight": (v, d)}
        return {"model.embed_tokens.weight": (v, d), **layers, **ends}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(map(prod, self.shapes().values()))

    def config(self, dtype: str) -> dict:
        """Makes the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": dtype,
        }


def write(
    folders: Sequence[Path],
    llama: Llama,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> None:
    """Writes a base into the first folder, and a model fine-tuned from it into each of the others.

    Entries of the base are normal; entries of norms have mean 1. The other models add independent
    normal numbers to the rounded base, a few of them much larger, and round again. Many entries
    thus stay equal to the base's. Each folder appears whole or not at all. The same arguments give
    the same bytes.

    Args:
      folders: The folders to write. Existing ones must be empty.
      llama: The sizes of all models.
      seed: Seed of the entries.
      dtype: "bfloat16" or "float32".
    """
    parts = [folder.with_name(f".{folder.name}.part") for folder in folders]
    handles: list[int] = []
    try:
        head, offsets = _header(llama, dtype)
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            handles.append(os.open(part / "model.safetensors", os.O_RDWR | os.O_CREAT, 0o644))
            os.pwrite(handles[-1], head, 0)
            _accompany(part, llama, dtype)

        def fill(job: tuple[str, int, int, int]) -> None:
            name, key, start, stop = job
            _fill(name, (seed, key), start, stop, handles, offsets[name], dtype)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(fill, list(_jobs(llama))):
                pass
        for part, folder in zip(parts, folders, strict=True):
            os.replace(part, folder)
    finally:
        for handle in handles:
            os.close(handle)
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)


def _header(llama: Llama, dtype: str) -> tuple[bytes, dict[str, int]]:
    """Returns the safetensors header, and the offset of each tensor in the file."""
    code, kind = DTYPES[dtype]
    table, at = {}, 0
    for name, shape in llama.shapes().items():
        end = at + prod(shape) * kind.itemsize
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as the format requires
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        name: first + entry["data_offsets"][0] for name, entry in table.items()
    }


def _jobs(llama: Llama) -> Iterator[tuple[str, int, int, int]]:
    """Yields the tensor, the number and the range of each chunk."""
    sizes = {name: prod(shape) for name, shape in llama.shapes().items()}
    starts = ((name, i, size) for name, size in sizes.items() for i in range(0, size, CHUNK))
    for number, (name, start, size) in enumerate(starts):
        yield name, number, start, min(start + CHUNK, size)


def _fill(name, seed, start, stop, handles, offset, dtype) -> None:
    """Draws one chunk of a tensor, and writes it into the files of all models."""
    kind = DTYPES[dtype][1]
    rng = np.random.Generator(np.random.SFC64(seed))
    base = rng.standard_normal(stop - start, np.float32) * np.float32(SPREAD)
    if name.endswith("norm.weight"):
        base += 1
    base = base.astype(kind).astype(np.float32)
    for model, handle in enumerate(handles):
        entries = base
        if model:
            change = rng.standard_normal(stop - start, np.float32) * np.float32(DELTA)
            change[rng.random(stop - start, np.float32) < TAIL] *= np.float32(HEAVY)
            entries = base + change
        os.pwrite(handle, entries.astype(kind).view(np.uint8), offset + start * kind.itemsize)


def _accompany(folder: Path, llama: Llama, dtype: str) -> None:
    """Writes the config and the tokenizer."""
    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(3, llama.vocabulary))]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": word, "special": True, **plain} for i, word in enumerate(words[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    texts = {"config": llama.config(dtype), "tokenizer": tokenizer, "tokenizer_config": about}
    for stem, data in texts.items():
        (folder / f"{stem}.json").write_text(json.dumps(data))
