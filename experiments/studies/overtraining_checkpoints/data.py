"""What `overtraining_checkpoints` reads: the checkpoints' configurations, held-out text of
pre-training, instructions, and multiple choice."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from jaxtyping import Int

from experiments.data import choices, gpt2_tokens, instructions, text
from experiments.data.registry import OFFLINE_TEXT
from experiments.models.presets import describe
from experiments.models.pretrained import module_of, read_config
from experiments.studies.overtraining_checkpoints.config import QUESTIONS, Config
from experiments.studies.overtraining_language import tasks
from experiments.studies.overtraining_language.tasks import Batch

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Part(NamedTuple):
    """Which examples of a task a repetition learns from, tunes the rate by, and reports."""

    learn: Int[np.ndarray, " n"]
    validation: Int[np.ndarray, " m"]
    test: Int[np.ndarray, " m"]


class Task(NamedTuple):
    """Examples, and the part that each repetition has of them."""

    examples: Batch
    parts: tuple[Part, ...]

    def of(self, index: Int[np.ndarray, "*any"]) -> Batch:
        return Batch(self.examples.tokens[index], self.examples.scored[index])


class Data(NamedTuple):
    """All that is measured on, the same for all checkpoints."""

    held_out: tuple[Batch, ...]
    """Of each repetition."""
    tasks: tuple[Task, ...]
    benchmarks: dict[str, choices.Packed]
    unigram: float
    """The loss of knowing no more than how frequent each token is."""


def seeded(config: Config, *what: int) -> int:
    """A seed of its own for each purpose."""
    return int(np.random.SeedSequence((config.seed, *what)).generate_state(1)[0])


def network(config: Config, paths: Sequence[str]) -> nn.Module:
    """The network that all checkpoints are of.

    ValueError for what is no checkpoint of ours, or where they differ in their sizes.
    """
    modules = [module_of(read_config(path)) for path in paths]
    for path, module in zip(paths, modules, strict=True):
        if describe(module) != describe(modules[0]):
            raise ValueError(f"checkpoints must be of one shape; {path} is not of {paths[0]}'s")
    most = modules[0].context
    if config.model.context > most:
        raise ValueError(
            f"model.context must be at most {most}, the positions of {paths[0]}; got "
            f"{config.model.context}"
        )
    return modules[0]


def budgets(config: Config, paths: Sequence[str]) -> tuple[np.ndarray, str]:
    """How long each checkpoint was trained, ascending, and in which unit: tokens, or their order.

    ValueError for tokens in folders' names that do not ascend.
    """
    if config.checkpoints is None or config.tokens is not None:
        return np.asarray(config.tokens or config.series.budgets, float), "tokens"
    found = [re.search(r"tokens-?(\d+(?:\.\d+)?)([KMBT])\b", path, re.I) for path in paths]
    if not all(found):
        return np.arange(1.0, len(paths) + 1), "order"
    told = np.array([float(m[1]) * UNITS[m[2].upper()] for m in found if m])
    if not (np.diff(told) > 0).all():
        raise ValueError(f"checkpoints must be given from the first to the last; got {told}")
    return told, "tokens"


def load(config: Config, vocab: int, end: Sequence[int] = ()) -> Data:
    """The data for a network of so many tokens, which ends its responses so.

    ValueError (or `DataError`, which is one) for what does not fit it, or is too short.
    """
    tune, context = config.tune, config.model.context
    offline = config.data.name == OFFLINE_TEXT
    if QUESTIONS in tune.tasks and not offline:
        raise ValueError(
            f"tune.tasks: '{QUESTIONS}' needs the characters of the offline text; give a file of "
            "instructions"
        )
    encode: Callable[[bytes], Any] = text.encode if offline else _unencoded
    if tune.tokenizer is not None:
        encode = gpt2_tokens.load(tune.tokenizer)
    corpus = tasks.load(config.data, vocab, context, ())
    held_out = tuple(
        corpus.held_out(config.held_out, seeded(config, 0, k)) for k in range(config.replicates)
    )
    # a network of characters has no other end than a new line
    end = end or (tuple(text.encode(b"\n")) if encode is text.encode else ())
    taught = tuple(_task(config, name, encode, end) for name in tune.tasks)
    asked = {Path(name).stem: _benchmark(config, name, encode) for name in config.benchmarks.files}
    for name, tokens in (
        *((name, task.examples.tokens) for name, task in zip(tune.tasks, taught, strict=True)),
        *((name, packed.tokens) for name, packed in asked.items()),
    ):
        if tokens.max(initial=0) >= vocab:
            raise ValueError(
                f"tune.tokenizer: it made the token {tokens.max()} of {name}, but the network's "
                f"vocabulary ends at {vocab - 1}"
            )
    return Data(held_out, taught, asked, corpus.unigram(held_out[0]))


def _unencoded(_: bytes) -> Any:
    raise ValueError(
        "tune.tokenizer must be the one that made data, where tune.tasks or benchmarks.files hold "
        "text"
    )


def _task(config: Config, name: str, encode: Callable[[bytes], Any], end: Sequence[int]) -> Task:
    tune = config.tune
    sizes = (tune.examples, tune.held_out, tune.held_out)
    if name == QUESTIONS:
        items = choices.generate(seeded(config, 1), sum(sizes))
        examples = [instructions.Instruction(i.context, i.choices[i.answer]) for i in items]
    else:
        examples = instructions.read(name)
    packed = instructions.pack(examples, encode, config.model.context + 1, end)
    count = len(packed.tokens)
    if count < sum(sizes):
        raise ValueError(
            f"tune.examples: {name} has {count} examples that fit model.context = "
            f"{config.model.context}; {sum(sizes)} are asked for"
        )
    parts = []
    for k in range(config.replicates):
        order = np.random.default_rng(seeded(config, 2, k)).permutation(count)[: sum(sizes)]
        parts.append(Part(*np.split(order, np.cumsum(sizes)[:-1])))
    return Task(Batch(packed.tokens, packed.scored), tuple(parts))


def _benchmark(config: Config, name: str, encode: Callable[[bytes], Any]) -> choices.Packed:
    how, items = config.benchmarks, choices.read(name)
    shots, asked = items[: how.shots], items[how.shots :][: how.items]
    if not asked:
        raise ValueError(f"benchmarks.shots: {name} has {len(items)} questions, none is left")
    before = "".join(f"{item.context}{item.choices[item.answer]}\n\n" for item in shots)
    asked = [item._replace(context=before + item.context) for item in asked]
    return choices.pack(asked, encode, config.model.context)
