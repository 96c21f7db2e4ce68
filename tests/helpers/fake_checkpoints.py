"""Checkpoints in memory for tests of planning: Llama-shaped, with small files beside them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from sail_jax.checkpoint.formats.open import Checkpoint

WIDTH, INNER = 4, 6


class Array:
    """A Tensor over a NumPy array that records its reads as (start, count)."""

    def __init__(self, name, array, source="memory"):
        self.name, self.array, self.source = name, np.asarray(array), source
        self.dtype, self.shape, self.reads = self.array.dtype, self.array.shape, []

    @property
    def read_entries(self):
        return sum(count for _, count in self.reads)

    def read(self, out, start=0):
        flat = self.array.reshape(-1)
        if start + out.size > flat.size:
            raise ValueError("beyond the end")
        self.reads.append((start, out.size))
        out[...] = flat[start : start + out.size]


def held(arrays):
    return {name: Array(name, x) for name, x in arrays.items()}


class Fake(Checkpoint):
    def __init__(self, path, arrays, extras=()):
        super().__init__(Path(path))
        self.tensors = {name: Array(name, x, f"{path}/{name}") for name, x in arrays.items()}
        self.extras = dict(extras)


def entries(tensor):
    """Returns all entries of a Tensor, read in three pieces."""
    out = np.empty(int(np.prod(tensor.shape)), tensor.dtype)
    a, b = out.size // 3, out.size // 2 + 1
    for start, stop in ((0, a), (a, b), (b, out.size)):
        if start < stop:
            tensor.read(out[start:stop], start)
    return out.reshape(tensor.shape)


def llama(
    path, seed=0, layers=2, vocab=10, tied=False, dtype=ml_dtypes.bfloat16, prefix="", **more
):
    """Makes a checkpoint with the names and shapes of a Llama, with entries by the seed."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab, WIDTH)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {at + f"self_attn.{x}_proj.weight": (WIDTH, WIDTH) for x in "qkvo"}
        shapes |= {at + f"mlp.{x}_proj.weight": (INNER, WIDTH) for x in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes[at + "input_layernorm.weight"] = (WIDTH,)
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, WIDTH)
    arrays = {prefix + k: rng.normal(size=shape).astype(dtype) for k, shape in shapes.items()}
    return Fake(path, arrays | more)


def beside(fake, folder, **documents):
    """Writes JSON documents next to a fake: config={...}, tokenizer={...}, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(document))
        fake.extras[file.name] = file
    return fake


def config(**more):
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "vocab_size": 10,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | more
