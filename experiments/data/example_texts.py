"""Two small networks that read text, with different tokenizers, made offline in a second.

Each predicts the next token from the last one. Its embedding and head are factors of a table of
pairs, and its only layer is the identity. The table counts pairs of tokens in the source of
Python's standard library. `few` has fewer tokens and a narrower stream than `many`.
"""

import json
import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import Float

from experiments.data import bpe, gpt2_tokens

MODELS = {"few": (100, 24), "many": (300, 40)}
"""By name: the number of the tokenizer's merges, and of the embedding's columns."""
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_MODULES = ("argparse.py", "typing.py", "inspect.py")
_HELD_OUT = "dataclasses.py"


def save(folder: Path) -> None:
    """Writes both networks as checkpoints.

    Args:
      folder: The parent of their folders.

    Raises:
      FileNotFoundError: If Python is installed without the source of its library.
      StoreError: If a file cannot be written.
    """
    from sail_jax.checkpoint.output.writer import save_checkpoint

    text = b"".join(_source(name) for name in _MODULES)
    for name, (merges, width) in MODELS.items():
        document = _tokenizer(bpe.train(text, merges))
        rows = len(document["model"]["vocab"])
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document))
        tokens = gpt2_tokens.load(path)(text)
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows,
            "hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "torch_dtype": "float32",
        }  # fmt: skip
        extras = {"config.json": json.dumps(config).encode(), "tokenizer.json": path.read_bytes()}
        save_checkpoint(folder / name, _network(tokens, rows, width), extras=extras)
        path.unlink()


def bits_per_byte(checkpoint: Path) -> float:
    """Measures how well a network predicts text that it was not trained on.

    Args:
      checkpoint: One of these networks, or a transplant of one.

    Returns:
      The cross-entropy, in bits for each byte of the text.

    Raises:
      StoreError: If it cannot be read.
    """
    from sail_jax.checkpoint.formats.open import load_checkpoint

    tensors, text = load_checkpoint(checkpoint), _source(_HELD_OUT)
    tokens = gpt2_tokens.load(checkpoint / "tokenizer.json")(text)
    stream = _normed(tensors[EMBEDDING]) * tensors[NORM]
    logits = stream @ tensors[HEAD].T
    logits -= logits.max(1, keepdims=True)
    chances = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return float(-chances[tokens[:-1], tokens[1:]].sum() / np.log(2) / len(text))


def is_one(checkpoint: Path) -> bool:
    """Returns whether a checkpoint may be one of these networks: a folder with a tokenizer.

    Args:
      checkpoint: The folder.

    Returns:
      Whether it is.
    """
    return (checkpoint / "tokenizer.json").is_file()


def _source(module: str) -> bytes:
    return (Path(sysconfig.get_path("stdlib")) / module).read_bytes()


def _tokenizer(learnt: bpe.Bpe) -> dict:
    """Builds a tokenizer.json that spells bytes as GPT-2's does."""
    letters = gpt2_tokens.byte_table()
    texts = [letters[byte] for byte in range(256)]
    merges = []
    for a, b in learnt.merges.tolist():
        merges.append([texts[a], texts[b]])
        texts.append(texts[a] + texts[b])
    # The last merges come first, so that the two tokenizers number the tokens differently.
    vocab = {text: i for i, text in enumerate(reversed(dict.fromkeys(texts)))}
    level = {"type": "ByteLevel", "add_prefix_space": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level | {"use_regex": True},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _network(tokens: np.ndarray, rows: int, width: int) -> dict[str, np.ndarray]:
    """Builds the tensors of a network that predicts pairs of tokens, in float32."""
    pairs = np.zeros((rows, rows))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    # Each pair has a small prior count, proportional to the frequency of its second token.
    often = (pairs.sum(0) + 0.1) / (pairs.sum() + 0.1 * rows)
    chances = np.log((pairs + 2 * often) / (pairs.sum(1, keepdims=True) + 2))
    u, s, _ = np.linalg.svd(chances - np.log(often), full_matrices=False)
    embedding = u[:, :width] * np.sqrt(s[:width])
    head = np.linalg.lstsq(_normed(embedding), chances, rcond=None)[0].T
    layer = "model.layers.0."
    shapes = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (8, width), "mlp.up_proj": (8, width), "mlp.down_proj": (width, 8)}
    made = {EMBEDDING: embedding, HEAD: head, NORM: np.ones(width)}
    made |= {f"{layer}{x}.weight": np.zeros(shape) for x, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        made[f"{layer}{norm}.weight"] = np.ones(width)
    return {name: x.astype(np.float32) for name, x in made.items()}


def _normed(x: Float[np.ndarray, "row width"]) -> Float[np.ndarray, "row width"]:
    """Scales rows to a root mean square of 1, as the network's last norm does."""
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)
