"""Tokenised text on disk: nanoGPT's train.bin and val.bin, or .npy; and its blocks as batches."""

import pickletools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int32

from experiments.data.files import DataError, Source, inside, missing, open_npy, opened, reading
from experiments.data.stream import indices
from sail_jax import disk
from sail_jax.checkpoint.formats.files import strict_json

SOURCE = Source(
    "a tokenised text such as OpenWebText",
    "skylion007.github.io/OpenWebTextCorpus, tokenised by nanoGPT's data/openwebtext/prepare.py",
    "the source of Python's standard library (experiments.data.text)",
)
CHUNK = 1 << 24  # tokens looked at together
Ids = Int[np.ndarray, " n"]


class Tokens(NamedTuple):
    """Tokens to learn from and tokens held out, mapped from disk, and how many there can be."""

    train: Ids
    held_out: Ids
    vocab: int


class Batch(NamedTuple):
    """Blocks of tokens, and the token that follows each of them."""

    inputs: Int32[np.ndarray, "batch context"]
    targets: Int32[np.ndarray, "batch context"]


def read(path: str | Path, vocab: int) -> Ids:
    """The tokens of a .bin (16-bit, little-endian, no header) or of a .npy with one axis.

    They stay on disk; each was compared with the vocabulary. `DataError` names the file.
    """
    path = Path(path)
    if vocab < 1:
        raise ValueError(f"vocab must be at least 1; got {vocab}")
    if path.suffix == ".npy":
        tokens = open_npy(path, SOURCE)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise DataError(
                f"{path} holds {tokens.dtype}{list(tokens.shape)}; expected a row of whole numbers"
            )
    else:
        tokens = _bin(path, vocab)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        if (low := chunk.min()) < 0 or chunk.max() >= vocab:
            raise DataError(
                f"{path} has the token {low if low < 0 else chunk.max()}; the vocabulary has "
                f"{vocab}, 0 to {vocab - 1}: another tokenizer wrote it, or it is damaged"
            )
    return tokens


def _bin(path: Path, vocab: int) -> Ids:
    if vocab > 1 << 16:
        raise DataError(f"{path}: 16-bit tokens cannot come from a vocabulary of {vocab}")
    with opened(path, SOURCE) as (file, size):
        if not size:
            raise DataError(f"{path} is empty; expected tokens of 16 bits")
        if file.read(6) == b"\x93NUMPY":
            raise DataError(f"{path} is a .npy; expected tokens of 16 bits without a header")
        if size % 2:
            raise DataError(
                f"{path} is truncated: {size} bytes are no whole number of 16-bit tokens"
            )
        return np.memmap(path, "<u2", "r")


def load(folder: str | Path, vocab: int | None = None) -> Tokens:
    """`train` and `val` (.bin or .npy) of a folder as nanoGPT prepares it.

    The vocabulary is what meta.json or meta.pkl gives as vocab_size (the pickle is looked through,
    not run); `vocab` must agree with it, or stand in where there is none.
    """
    folder = Path(folder)
    stated = _stated(folder)
    if vocab is None and stated is None:
        if not folder.is_dir():
            raise missing(folder / "train.bin", SOURCE)
        raise DataError(
            f"{folder / 'meta.json'} is missing: give the size of the vocabulary as vocab, "
            "for GPT-2's tokens 50257"
        )
    if None not in (vocab, stated) and vocab != stated:
        raise DataError(f"{folder}: its meta says a vocabulary of {stated}, {vocab} are expected")
    size = vocab or stated or 0
    train, held_out = (read(_find(folder, part), size) for part in ("train", "val"))
    return Tokens(train, held_out, size)


def _find(folder: Path, part: str) -> Path:
    candidates = (inside(folder, part + end) for end in (".bin", ".npy"))
    return next((path for path in candidates if path.exists()), folder / f"{part}.bin")


def _stated(folder: Path) -> int | None:
    """The vocabulary's size by the folder's own account."""
    for name in ("meta.json", "meta.pkl"):
        path = inside(folder, name)
        if not path.exists():
            continue
        with reading(path):
            data = disk.read_bytes(path, disk.MAX_JSON)
            size = (
                strict_json(data, path).get("vocab_size") if name.endswith("json") else _peek(data)
            )
        if type(size) is not int or not 1 <= size < 1 << 31:
            raise DataError(f"{path}: expected a positive vocab_size, got {repr(size)[:99]}")
        return size
    return None


def _peek(pickled: bytes) -> int | None:
    """The whole number that follows the text "vocab_size" in a pickle, none of which is run."""
    due = False
    for code, value, _ in pickletools.genops(pickled):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            continue
        if due:
            return value if type(value) is int else None
        due = value == "vocab_size"
    return None


def split(tokens: Ids, held_out: float) -> tuple[Ids, Ids]:
    """The text and its last share, without a copy.

    >>> [len(part) for part in split(np.arange(10), 0.2)]
    [8, 2]
    """
    at = len(tokens) - round(held_out * len(tokens))
    if not 0 < at < len(tokens):
        raise ValueError(
            f"held_out must leave tokens on both sides of {len(tokens)}; got {held_out}"
        )
    return tokens[:at], tokens[at:]


def blocks(tokens: Ids, context: int) -> int:
    """How many blocks of `context` tokens, one after the other, have a token after each of theirs.

    >>> blocks(np.arange(9), 4), blocks(np.arange(8), 4)
    (2, 1)
    """
    if not 1 <= context < len(tokens):
        raise ValueError(f"context must be from 1 to {len(tokens) - 1} tokens; got {context}")
    return (len(tokens) - 1) // context


def block_means(tokens: Ids, context: int) -> Float64[np.ndarray, " block"]:
    """The mean token value of each block, by whose percentiles SAIL (App. H.1) splits a corpus.

    >>> block_means(np.array([1, 3, 2, 6, 0], np.uint16), 2).tolist()
    [2.0, 4.0]
    """
    count = blocks(tokens, context)
    per_chunk = max(1, CHUNK // context)
    parts = (
        tokens[start * context : min(start + per_chunk, count) * context]
        .reshape(-1, context)
        .mean(1)
        for start in range(0, count, per_chunk)
    )
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def batch(
    tokens: Ids,
    step: int,
    *,
    seed: int,
    size: int,
    context: int,
    chosen: Int[np.ndarray, " k"] | None = None,
) -> Batch:
    """The batch of a training step: a function of the arguments alone, so resuming needs no state.

    Every epoch takes each block once, in an order of its own; only `chosen` blocks if given, as for
    one part of a split corpus.
    """
    count = blocks(tokens, context)
    which = indices(step, examples=count if chosen is None else len(chosen), size=size, seed=seed)
    if chosen is not None:
        if chosen.min() < 0 or chosen.max() >= count:
            raise ValueError(
                f"chosen must be blocks from 0 to {count - 1}; got {chosen.min()} to {chosen.max()}"
            )
        which = chosen[which]
    at = np.asarray(which)[:, None] * context + np.arange(context + 1)
    taken = np.asarray(tokens[at], np.int32)
    return Batch(taken[:, :-1], taken[:, 1:])
