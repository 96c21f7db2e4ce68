"""Training data of language models: a text to pre-train on, and tasks to fine-tune on.

  shifted    blocks of the same text with high mean token values, as SAIL splits a text (App.
             H.1); if this is a task, pre-training does not use them
  rotated    the pre-training text with every letter moved 13 places on in the alphabet
  questions  sums, differences, products and sequences with their answers, as plain text

A task may also be the path of a tokenised text (.bin, .npy) with the same vocabulary, or of a file
in JSON lines (.jsonl). `experiments.data.classes` reads texts with classes. Their training target
is the words of the correct class, and the predicted class has the largest length-normalised
likelihood. Other texts are learned unchanged (`experiments.data.documents`), each in a separate
sequence.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from experiments.data import choices, classes, documents, gpt2_tokens, stream, text, tokens
from experiments.data.registry import OFFLINE_TEXT, TEXTS, TextData
from sail_jax.checks import nearest

TASKS = ("shifted", "rotated", "questions")
LINES = ".jsonl"  # the suffix of files with a text on each line
SUFFIXES = (".bin", ".npy", LINES)
# The minimum number of fine-tuning steps: a tenth of them is then one step of warm-up.
LEAST_STEPS = 10
Encode = Callable[[bytes], Any]
# The percentile of the blocks' means from which on they are reserved for fine-tuning.
SHIFTED = 66.0


class Batch(NamedTuple):
    """Sequences of tokens, and which of them the network should predict.

    Attributes:
      tokens: One more token than the network's input, `(..., token + 1)`.
      scored: Whether each token, from the second on, is part of the loss, `(..., token)`.
    """

    tokens: Int32[np.ndarray, "*any token_and_next"]
    scored: Bool[np.ndarray, "*any token"]


class Task(NamedTuple):
    """The sequences of one task.

    Attributes:
      learn: The training sequences.
      validation: Sequences to tune the learning rate with; for texts with classes, all classes.
      test: Sequences for the results, in the same form.
    """

    learn: Batch
    validation: Batch | choices.Packed
    test: Batch | choices.Packed


class Corpus(NamedTuple):
    """A text in blocks of tokens.

    Part 0 is the training text and part 1 the held-out text.

    Attributes:
      text: The tokens of both parts, and the size of the vocabulary.
      context: Tokens of a block.
      usual: For each part, indices of the blocks for pre-training: all blocks, or, if "shifted" is
        a task, those with a mean token value that is not high.
    """

    text: tokens.Tokens
    context: int
    usual: tuple[Int[np.ndarray, " learn"], Int[np.ndarray, " held_out"]]

    def windows(self, part: int, blocks: Int[np.ndarray, " n"]) -> Batch:
        """Gathers blocks, each with its next token."""
        return _windows(self.line(part), self.context, blocks)

    def line(self, part: int) -> tokens.Ids:
        """Returns the tokens of one part of the text."""
        return (self.text.train, self.text.held_out)[part]

    def shifted(self, part: int) -> Int[np.ndarray, " n"]:
        """Lists the blocks of a part that are reserved from pre-training."""
        count = tokens.blocks(self.line(part), self.context)
        return np.setdiff1d(np.arange(count), self.usual[part])

    def batch(self, step: int, *, seed: int, size: int) -> Batch:
        """Gathers the minibatch of a pre-training step.

        - `step`: number of the step, from 0.

        It returns the sequences, `(size, context + 1)`. They depend only on the arguments, so that
        a training can continue from any step.
        """
        windows = tokens.batch(
            self.text.train, step, seed=seed, size=size, context=self.context, chosen=self.usual[0]
        )
        return scored(np.concatenate([windows.inputs, windows.targets[:, -1:]], 1))

    def held_out(self, count: int, seed: int) -> Batch:
        """Draws blocks that are held out from pre-training."""
        return self.windows(1, _some("held_out", self.usual[1], count, seed))

    def unigram(self, batch: Batch) -> float:
        """Computes the loss of predicting each token from its frequency alone.

        Frequencies are counted in the training text, with one added to each count.

        It returns the mean negative log-likelihood in nats per token.
        """
        counts = np.ones(self.text.vocab)
        for start in range(0, len(self.text.train), tokens.CHUNK):
            chunk = np.asarray(self.text.train[start : start + tokens.CHUNK])
            counts += np.bincount(chunk, minlength=self.text.vocab)
        return float(-np.log(counts / counts.sum())[batch.tokens[..., 1:]].mean())


def _windows(line: tokens.Ids, context: int, blocks: Int[np.ndarray, " n"]) -> Batch:
    """Gathers blocks of a text, each with its next token."""
    at = np.asarray(blocks)[:, None] * context + np.arange(context + 1)
    return scored(np.asarray(line[at], np.int32))


def scored(sequences: Int32[np.ndarray, "*any token_and_next"]) -> Batch:
    """Makes a batch of sequences in which all tokens are scored."""
    return Batch(sequences, np.ones((*sequences.shape[:-1], sequences.shape[-1] - 1), bool))


def load(data: TextData, vocab: int, context: int, names: Sequence[str]) -> Corpus:
    """Reads a text and selects the blocks for pre-training.

    Args:
      data: The text.
      vocab: Size of the network's vocabulary.
      context: Tokens of a block.
      names: Names of the tasks. If "shifted" is one of them, blocks above the `SHIFTED`-th
        percentile of mean token values are reserved for it.

    Returns:
      The corpus.

    Raises:
      ValueError: If the text has a different vocabulary from the network.
      DataError: If files are missing or damaged.
    """
    if data.name == OFFLINE_TEXT and vocab != text.VOCAB:
        other = TEXTS["c4"].source
        raise ValueError(
            f"data.name: the network has {vocab} tokens, {data.source.name} {text.VOCAB}; 'c4' is "
            f"{other.name}, published at {other.home}"
        )
    loaded = data.read()
    if loaded.vocab > vocab:
        raise ValueError(
            f"data: {data.folder} has a vocabulary of {loaded.vocab}; the network has {vocab}"
        )
    if "shifted" in names:
        means = [tokens.block_means(part, context) for part in (loaded.train, loaded.held_out)]
        level = np.percentile(means[0], SHIFTED)  # one level for both parts
        learn, held_out = (np.flatnonzero(mean <= level) for mean in means)
    else:
        learn, held_out = (
            np.arange(tokens.blocks(part, context)) for part in (loaded.train, loaded.held_out)
        )
    return Corpus(loaded, context, (learn, held_out))


def check(names: Sequence[str]) -> None:
    """Checks that every name is a task or could be the path of a tokenised text.

    Args:
      names: Names from a config.

    Raises:
      ValueError: If a name is neither in `TASKS` nor ends in one of `SUFFIXES`.
    """
    for name in names:
        if name not in TASKS and Path(name).suffix not in SUFFIXES:
            raise ValueError(
                f"tasks: {name!r} is neither a task nor a .bin, .npy or "
                f".jsonl{nearest(name, TASKS)}"
            )


def encoder(data: TextData, tokenizer: str | None) -> Encode:
    """Returns the encoder of text in files.

    Args:
      data: The text of pre-training.
      tokenizer: The tokenizer.json that produced it; None if there is none.

    Returns:
      A function from bytes in UTF-8 to tokens `(n,)`. Without a tokenizer, and for any text except
      the offline one, it raises `ValueError` when it is called.

    Raises:
      DataError: If the tokenizer is missing, damaged or of a different kind. It is a `ValueError`.
    """
    if tokenizer is not None:
        return gpt2_tokens.load(tokenizer)
    return text.encode if data.name == OFFLINE_TEXT else _unencoded


def _unencoded(_: bytes) -> Any:
    """Raises an error for text, which requires a tokenizer."""
    raise ValueError(
        "tune.tokenizer must be the one that made data, where tune.tasks or benchmarks.files hold "
        "text"
    )


def check_tokens(name: str, found: Int[np.ndarray, "*any"], vocab: int) -> None:
    """Checks that the tokens of a file are in the vocabulary.

    Args:
      name: The file, for the message.
      found: The tokenizer's tokens for the file, of any shape.
      vocab: Size of the network's vocabulary.

    Raises:
      ValueError: If a token is outside it.
    """
    if found.max(initial=0) >= vocab:
        raise ValueError(
            f"tune.tokenizer: it made the token {found.max()} of {name}, but the network's "
            f"vocabulary ends at {vocab - 1}"
        )


def task(
    name: str,
    corpus: Corpus,
    sizes: tuple[int, int, int],
    seed: int,
    encode: Encode = text.encode,
) -> Task:
    """Gathers the sequences of a task.

    Args:
      name: One of `TASKS`, or the path of a tokenised text or of texts in JSON lines.
      corpus: The text of pre-training. "shifted" and "rotated" use its first part for training and
        the held-out part for tests.
      sizes: Numbers of sequences to train on, to tune the rate with, and for the results. A file in
        JSON lines may have fewer to train on: then all remaining ones are used.
      seed: Seed of the choice of blocks, or of the questions.
      encode: The encoder of text in files, such as `encoder` returns.

    Returns:
      The sequences, `(size, context + 1)`. No block of text is in two of the three sets.

    Raises:
      ValueError: If there are too few blocks or texts, a question is longer than the context, text
        requires a tokenizer and there is none, or the task requires a different vocabulary.
      DataError: If the file of a path is missing or damaged.
    """
    learn, validation, test = sizes
    if name in TASKS[1:] and corpus.text.vocab != text.VOCAB:
        raise ValueError(
            f"tune.tasks: {name!r} needs the characters of the offline text; give the path of a "
            "text tokenised as data is"
        )
    if name == "questions":
        items = choices.generate(seed, sum(sizes))
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        batch = _questions(items, corpus.context)
        return Task(*(Batch(*(leaf[part] for leaf in batch)) for part in parts))
    if name in TASKS:
        sources = [corpus.shifted(k) if name == "shifted" else corpus.usual[k] for k in (0, 1)]
        blocks = [_some("tune.tasks", sources[0], learn, seed)]
        blocks += np.split(_some("tune.tasks", sources[1], validation + test, seed), [validation])
        batches = [corpus.windows(min(k, 1), index) for k, index in enumerate(blocks)]
        if name == "rotated":
            batches = [Batch(rotated(batch.tokens), batch.scored) for batch in batches]
        return Task(*batches)
    if Path(name).suffix == LINES:
        read = _classes if classes.holds(name) else _documents
        return read(name, corpus, sizes, seed, encode)
    line = tokens.read(name, corpus.text.vocab)
    count = tokens.blocks(line, corpus.context)
    chosen = _some(f"tune.tasks: {name}", np.arange(count), sum(sizes), seed)
    parts = np.split(chosen, np.cumsum(sizes)[:-1])
    return Task(*(_windows(line, corpus.context, part) for part in parts))


def _divided(name: str, count: int, sizes: tuple[int, int, int], seed: int) -> list[np.ndarray]:
    """Draws the lines of a file for training, validation and test; few may remain for training."""
    kept = sum(sizes[1:])
    if count <= kept:
        raise ValueError(f"tune.held_out: {name} has {count} texts, and {kept} should be held out")
    learn = min(sizes[0], count - kept)
    order = _some(f"tune.tasks: {name}", np.arange(count), learn + kept, seed)
    return np.split(order, np.cumsum([learn, sizes[1]]))


def _documents(
    name: str, corpus: Corpus, sizes: tuple[int, int, int], seed: int, encode: Encode
) -> Task:
    """Reads texts that are learned unchanged."""
    texts = documents.read(name)
    parts = _divided(name, len(texts), sizes, seed)
    try:
        packed = [documents.pack([texts[k] for k in p], encode, corpus.context + 1) for p in parts]
    except ValueError as error:
        raise ValueError(f"tune.tasks: {name}: {error}") from None
    for part in packed:
        check_tokens(name, part.tokens, corpus.text.vocab)
    return Task(*(Batch(*part) for part in packed))


def _classes(
    name: str, corpus: Corpus, sizes: tuple[int, int, int], seed: int, encode: Encode
) -> Task:
    """Reads texts with classes. The training target is only the correct class of each."""
    items, length = classes.read(name), corpus.context + 1
    parts = _divided(name, len(items), sizes, seed)
    right = [items[k]._replace(choices=(items[k].choices[items[k].answer],)) for k in parts[0]]
    try:
        packed = choices.pack([item._replace(answer=0) for item in right], encode, length)
        # Packed together, so that both have the same number of positions for choices.
        asked = choices.pack([items[k] for part in parts[1:] for k in part], encode, length)
    except ValueError as error:
        raise ValueError(f"tune.tasks: {name}: {error}") from None
    for found in (packed, asked):
        check_tokens(name, found.tokens, corpus.text.vocab)
    validation, test = (
        choices.Packed(*(leaf[part] for leaf in asked))
        for part in (slice(None, sizes[1]), slice(sizes[1], None))
    )
    return Task(Batch(packed.tokens[:, 0], packed.scored[:, 0, 1:]), validation, test)


def _some(what: str, blocks: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draws `count` different blocks; the message of its ValueError begins with `what`."""
    if count > len(blocks):
        raise ValueError(f"{what}: {count} blocks are needed, there are {len(blocks)}")
    return blocks[stream.permuted(np.arange(count), len(blocks), [seed])]


def rotated(sequences: Int32[np.ndarray, "*any"]) -> Int32[np.ndarray, "*any"]:
    """Moves every letter 13 places on in the alphabet, in the tokens of `experiments.data.text`.

    Applied twice, it is the identity.

    >>> bytes(rotated(text.encode(b"import sys").astype(np.int32)).astype(np.uint8) + 32)
    b'vzcbeg flf'
    """
    table = np.arange(text.VOCAB, dtype=np.int32)  # a token is a character's code minus 32
    for first in (ord("a") - 32, ord("A") - 32):
        table[first : first + 26] = first + (np.arange(26) + 13) % 26
    return table[sequences]


def _questions(items: Sequence[choices.Item], context: int) -> Batch:
    """Encodes each question with its correct answer and a new line, and pads it with spaces.

    The padding is not scored.
    """
    sequences = np.zeros((len(items), context + 1), np.int32)
    mask = np.zeros((len(items), context), bool)
    for i, item in enumerate(items):
        line = text.encode(f"{item.context}{item.choices[item.answer]}\n".encode())
        if len(line) > context + 1:
            raise ValueError(
                f"model.context: a question has {len(line)} tokens, the network sees {context} + 1"
            )
        sequences[i, : len(line)] = line
        mask[i, : len(line) - 1] = True
    return Batch(sequences, mask)
