"""Tokenizers of a few merges, as Hugging Face stores them."""

import json

from experiments.data import gpt2_tokens


def tokenizer(folder, merges, **more):
    symbols = [*gpt2_tokens.byte_table().values()]
    vocab = {s: k for k, s in enumerate([*symbols, *("".join(m) for m in merges)])}
    model = {"type": "BPE", "vocab": vocab, "merges": [" ".join(m) for m in merges]}
    before = {"type": "ByteLevel", "add_prefix_space": False}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"model": model, "pre_tokenizer": before, **more}))
    return path, {k: s for s, k in vocab.items()}
