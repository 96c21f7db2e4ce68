"""Tokenised text on disk, in nanoGPT's format, and the batches of a training step.

`load` maps train and val of a folder (.bin or .npy) into memory; `batch` cuts blocks from them.
`stream` chooses the blocks of a step.
"""

import pickletools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int32

from experiments.data.files import (
    DataError,
    DataSet,
    Source,
    inside,
    missing,
    open_npy,
    opened,
    reading,
)
from experiments.data.stream import indices
from sail_jax import disk
from sail_jax.checkpoint.formats.files import strict_json

SOURCE = Source(
    "a tokenised text such as OpenWebText",
    "skylion007.github.io/OpenWebTextCorpus, tokenised by nanoGPT's data/openwebtext/prepare.py",
    "the source of Python's standard library (experiments.data.text)",
)
_FILES = "train and val, .bin or .npy; meta.json or meta.pkl with the vocab_size"
# nanoGPT writes these tokens without the size of their vocabulary, so it is given here.
_GPT_2 = 50257
TEXTS = {
    name: DataSet(source, vocab, _FILES)
    for name, source, vocab in (
        ("openwebtext", SOURCE._replace(name="OpenWebText in GPT-2's tokens"), _GPT_2),
        (
            "wikitext-103",
            Source(
                "WikiText-103 in GPT-2's tokens",
                "huggingface.co/datasets/Salesforce/wikitext",
                SOURCE.offline,
            ),
            _GPT_2,
        ),
        (
            "c4",
            Source(
                "C4 as OLMo's tokens (one row of numbers below 50304)",
                "allenai/OLMo",
                SOURCE.offline,
            ),
            None,
        ),
        ("tokens", SOURCE, None),
    )
}
# The number of tokens checked at once.
CHUNK = 1 << 24
Ids = Int[np.ndarray, " n"]


class Tokens(NamedTuple):
    """A tokenised text in two parts, mapped from disk.

    Attributes:
      train: The tokens to learn from: integers `(n,)`.
      held_out: The tokens held out: integers `(n,)`.
      vocab: The number of tokens in the vocabulary.
    """

    train: Ids
    held_out: Ids
    vocab: int


class Batch(NamedTuple):
    """Blocks of tokens, and each token's next token.

    Attributes:
      inputs: The blocks, int32 `(batch, context)`.
      targets: The next tokens, int32 `(batch, context)`: `inputs` shifted by one.
    """

    inputs: Int32[np.ndarray, "batch context"]
    targets: Int32[np.ndarray, "batch context"]


def read(path: str | Path, vocab: int) -> Ids:
    """Maps a file of tokens into memory, and compares every token with the vocabulary.

    Args:
      path: A .npy file of integers with one axis, or else a file of 16-bit numbers, little-endian
        and without a header, like nanoGPT's .bin files.
      vocab: The number of tokens in the vocabulary, >= 1.

    Returns:
      The tokens `(n,)`, which remain on disk.

    Raises:
      ValueError: If `vocab` is below 1.
      DataError: If the file is missing, empty or truncated, contains anything else, or has a token
        outside the vocabulary. The message contains the file. It is a `ValueError`.
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
    # In chunks, because the text may be larger than memory.
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        if (low := chunk.min()) < 0 or chunk.max() >= vocab:
            raise DataError(
                f"{path} has the token {low if low < 0 else chunk.max()}; the vocabulary has "
                f"{vocab}, 0 to {vocab - 1}: another tokenizer wrote it, or it is damaged"
            )
    return tokens


def _bin(path: Path, vocab: int) -> Ids:
    """Maps a file of 16-bit tokens into memory."""
    if vocab > 1 << 16:
        raise DataError(f"{path}: 16-bit tokens cannot come from a vocabulary of {vocab}")
    with opened(path, SOURCE) as (file, size):
        if not size:
            raise DataError(f"{path} is empty; expected tokens of 16 bits")
        if file.read(6) == b"\x93NUMPY":
            raise DataError(f"{path} is a .npy; expected tokens of 16 bits without a header")
        if size % 2:
            raise DataError(f"{path} is truncated: {size} bytes are not a multiple of 16 bits")
        # Little-endian on every machine, as nanoGPT writes it.
        return np.memmap(path, "<u2", "r")


def load(folder: str | Path, vocab: int | None = None) -> Tokens:
    """Loads the tokens of a folder that nanoGPT prepared.

    The size of the vocabulary is the `vocab_size` of meta.json or meta.pkl, if present. The pickle
    is searched for the number, but its code never runs.

    Args:
      folder: The folder with `train` and `val`, each .bin or .npy.
      vocab: The number of tokens in the vocabulary; None if the folder contains it. If both are
        given, they must agree.

    Returns:
      The tokens to learn from, those held out, and the size of the vocabulary.

    Raises:
      DataError: If the folder or a file is missing or damaged, or the size of the vocabulary is not
        known, or given twice with different values. It is a `ValueError`.
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
        raise DataError(f"{folder}: its meta has a vocabulary of {stated}, expected {vocab}")
    size = vocab or stated or 0
    train, held_out = (read(_find(folder, part), size) for part in ("train", "val"))
    return Tokens(train, held_out, size)


def _find(folder: Path, part: str) -> Path:
    """Returns the file of a part, .bin or .npy. If neither exists, the first, for the message."""
    candidates = (inside(folder, part + end) for end in (".bin", ".npy"))
    return next((path for path in candidates if path.exists()), folder / f"{part}.bin")


def _stated(folder: Path) -> int | None:
    """Returns the vocabulary's size from the folder's own files, or None."""
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
    """Returns the integer after the text "vocab_size" in a pickle, without running the pickle."""
    due = False
    for code, value, _ in pickletools.genops(pickled):
        # These opcodes store a value for later use, and may occur between a key and its value.
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            continue
        if due:
            return value if type(value) is int else None
        due = value == "vocab_size"
    return None


def split(tokens: Ids, held_out: float) -> tuple[Ids, Ids]:
    """Splits a text into its beginning and its end, without a copy.

    Args:
      tokens: The text `(n,)`.
      held_out: The fraction of tokens in the second part, in (0, 1).

    Returns:
      The tokens to learn from, and those held out.

    Raises:
      ValueError: If either part would be empty.

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
    """Counts the consecutive blocks of a text. Each token of a block has a next token.

    Args:
      tokens: The text `(n,)`.
      context: The number of tokens in a block, from 1 to n - 1.

    Returns:
      The number of blocks, (n - 1) // context.

    Raises:
      ValueError: If `context` is out of range.

    >>> blocks(np.arange(9), 4), blocks(np.arange(8), 4)
    (2, 1)
    """
    if not 1 <= context < len(tokens):
        raise ValueError(f"context must be from 1 to {len(tokens) - 1} tokens; got {context}")
    return (len(tokens) - 1) // context


def block_means(tokens: Ids, context: int) -> Float64[np.ndarray, " block"]:
    """Computes the mean token value of each block.

    SAIL splits a corpus by percentiles of these means.

    Args:
      tokens: The text `(n,)`.
      context: The number of tokens in a block, from 1 to n - 1.

    Returns:
      The means, float64 `(block,)`.

    References:
      SAIL, App. H.1.

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
    """Returns the batch of a training step, as a function of its arguments only.

    Every epoch uses each block once, in a new order. Resuming a run therefore requires no state.

    Args:
      tokens: The text `(n,)`.
      step: The number of the step, >= 0.
      seed: Seed of the orders, >= 0.
      size: The number of blocks in the batch, >= 1.
      context: The number of tokens in a block, from 1 to n - 1.
      chosen: The blocks to choose from `(k,)`, such as one part of a split corpus; None for all.

    Returns:
      The blocks and their next tokens.

    Raises:
      ValueError: If an argument is out of range, or `chosen` has an unknown block.

    >>> first = batch(np.arange(9), 0, seed=0, size=2, context=4)
    >>> first.inputs.shape, bool((first.targets == first.inputs + 1).all())
    ((2, 4), True)
    """
    count = blocks(tokens, context)
    which = indices(step, examples=count if chosen is None else len(chosen), size=size, seed=seed)
    if chosen is not None:
        if chosen.min() < 0 or chosen.max() >= count:
            raise ValueError(
                f"chosen must be blocks from 0 to {count - 1}; got {chosen.min()} to {chosen.max()}"
            )
        which = chosen[which]
    # One token more than a block: the targets are the block shifted by one.
    at = np.asarray(which)[:, None] * context + np.arange(context + 1)
    taken = np.asarray(tokens[at], np.int32)
    return Batch(taken[:, :-1], taken[:, 1:])
