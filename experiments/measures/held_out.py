"""Reads held-out examples from files, and scores a network on each of them.

It reads three kinds of files: arrays (.npz), questions with choices, and texts (both JSON lines).
Each file is a task. `docs/how_to/search.md` describes them, with an example of each.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from experiments.data import choices, documents, gpt2_tokens
from experiments.data.files import DataError
from experiments.measures.choice_scores import normalised
from sail_jax.checkpoint.operations.trying import Examples, Running, read_arrays

Kind = Literal["arrays", "texts", "questions"]
IGNORED = -100
"""The label of a token that does not count."""


class HeldOut(NamedTuple):
    """Examples of one or more tasks.

    Attributes:
      kind: The kind of the examples.
      data: Arrays `[n, ...]` by name. Questions have the arrays of `choices.Packed`, texts "inputs"
        and "labels", and array files the arrays in the file.
      tasks: The task of each example, which is the name of its file.
    """

    kind: Kind
    data: dict[str, np.ndarray]
    tasks: list[str]


def read(
    paths: Sequence[str | Path], tokenizer: str | Path | None = None, *, length: int = 512
) -> HeldOut:
    """Reads held-out examples, one task in each file.

    Args:
      paths: Files of one kind: .npz, or JSON lines of questions or of texts.
      tokenizer: The tokenizer.json of the models, for JSON lines.
      length: The largest number of tokens of a sequence. Longer ones are truncated.

    Returns:
      The examples of all files, in order.

    Raises:
      DataError: If a file is missing, damaged or too large, or files are of different kinds or
        shapes.
      ValueError: If a tokenizer is missing, or is given for arrays.
    """
    parts: list[tuple[Kind, dict[str, np.ndarray]]] = []
    texts = [path for path in paths if Path(path).suffix in (".jsonl", ".json")]
    if bool(texts) != (tokenizer is not None):
        need = "JSON lines need a tokenizer" if texts else "a tokenizer is for JSON lines"
        raise ValueError(f"tokenizer: {need}")
    encode = None if tokenizer is None else gpt2_tokens.load(tokenizer)
    for path in paths:
        parts.append(_arrays(Path(path)) if encode is None else _lines(Path(path), encode, length))
    kinds, names = {kind for kind, _ in parts}, {frozenset(data) for _, data in parts}
    if len(kinds) > 1 or len(names) > 1:
        listed = ", ".join(map(str, paths))
        raise DataError(f"data: expected files of one kind with the same arrays, got {listed}")
    tasks = [
        Path(path).stem
        for path, (_, data) in zip(paths, parts, strict=True)
        for _ in range(len(next(iter(data.values()))))
    ]
    joined = {name: _joined(name, [data[name] for _, data in parts]) for name in parts[0][1]}
    return HeldOut(parts[0][0], joined, tasks)


def _joined(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the arrays of all files, after padding sequences of different lengths at their ends."""
    widths = np.max([x.shape[1:] for x in arrays], 0)
    if any(x.ndim != arrays[0].ndim for x in arrays):
        raise DataError(f"data: {name!r} has different numbers of axes in different files")
    fill = IGNORED if name == "labels" else 0
    return np.concatenate([
        np.pad(
            x,
            [(0, 0), *((0, width - size) for size, width in zip(x.shape[1:], widths, strict=True))],
            constant_values=fill,
        )
        for x in arrays
    ])  # fmt: skip


def _arrays(path: Path) -> tuple[Kind, dict[str, np.ndarray]]:
    """Reads the arrays of an .npz file. Each array has one entry for each example."""
    if path.suffix != ".npz":
        raise DataError(f"{path}: expected .npz, or .jsonl with a tokenizer")
    data = read_arrays(path)
    counts = {x.shape[:1] for x in data.values()}
    if len(counts) != 1 or counts == {()}:
        raise DataError(f"{path}: expected arrays [n, ...] of one length n, got {sorted(counts)}")
    return "arrays", data


def _lines(
    path: Path, encode: Callable[[bytes], Any], length: int
) -> tuple[Kind, dict[str, np.ndarray]]:
    """Reads and encodes questions or texts."""
    if documents.holds(path):
        packed = documents.pack(documents.read(path), encode, length)
        labels = np.full_like(packed.tokens, IGNORED)
        labels[:, :-1] = np.where(packed.scored, packed.tokens[:, 1:], IGNORED)
        used = int(packed.scored.sum(1).max()) + 1
        return "texts", {"inputs": packed.tokens[:, :used], "labels": labels[:, :used]}
    asked = choices.pack(choices.read(path), encode, length)
    used = int(np.flatnonzero(asked.scored.any((0, 1))).max()) + 1
    cut = asked._replace(tokens=asked.tokens[..., :used], scored=asked.scored[..., :used])
    return "questions", cut._asdict()


def examples(held_out: HeldOut) -> Examples:
    """Returns examples as inputs for a known network, to check that they match it.

    Args:
      held_out: The examples.

    Returns:
      Their inputs and labels. For questions these are the tokens of the first choices.

    Raises:
      ValueError: If both "inputs" and "tokens" are missing.
    """
    data = held_out.data
    if held_out.kind == "questions":
        return Examples(data["tokens"][:, 0], None)
    name = "inputs" if "inputs" in data else "tokens"
    if name not in data or data.keys() - {name, "labels"}:
        raise ValueError(
            f"data: expected 'inputs' or 'tokens', and 'labels' if there are any; found "
            f"{', '.join(sorted(data))}"
        )
    return Examples(data[name], data.get("labels"))


def score(
    running: Running, held_out: HeldOut
) -> tuple[Callable[[PyTree, PyTree], Float[Array, "n"]], dict[str, np.ndarray]]:
    """Creates the score function of a known network, and its data.

    Args:
      running: The network.
      held_out: The examples.

    Returns:
      `score(params, batch)`, and the arrays that are split into batches. The function scores each
      example. For a question, the score is 1 if the correct choice has the highest log-likelihood
      per token, else 0. For texts and arrays it is the negative mean cross-entropy.

    Raises:
      ValueError: If no loss can be computed from the data.
    """
    if held_out.kind != "questions":
        data = {name: np.asarray(x) for name, x in running.data.items()}
        if "labels" not in data:
            raise ValueError("data: expected 'labels', because this network predicts no next token")
        return lambda params, batch: -running.loss(running.network(params, batch)[0], batch), data

    def right(params: PyTree, batch: PyTree) -> Float[Array, "n"]:
        apply = lambda tokens: running.network(params, {"inputs": tokens})[0]  # noqa: E731
        packed = choices.Packed(**batch)
        best = normalised(apply, packed, batch_size=len(batch["answer"])).argmax(-1)
        return (best == jnp.asarray(batch["answer"])).astype(jnp.float32)

    return right, held_out.data
