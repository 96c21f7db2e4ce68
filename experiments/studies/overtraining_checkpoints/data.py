"""Data that `overtraining_checkpoints` reads before any measurement.

These are the checkpoints' configurations, held-out text of pre-training, instructions, and
multiple-choice questions. `measure` reads the weights, one checkpoint at a time.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from jaxtyping import Int

from experiments.data import choices, instructions, text
from experiments.data.registry import OFFLINE_TEXT
from experiments.models.presets import describe
from experiments.models.pretrained import module_of, read_config
from experiments.studies.overtraining_checkpoints.config import QUESTIONS, Config
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared.language_tasks import Batch

UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # units of tokens in folders' names


class Part(NamedTuple):
    """The examples of a task in one repetition; no example is in two of the sets.

    Attributes:
      learn: Indices of the examples to fine-tune on, `(n,)`.
      validation: Indices of the examples to tune the learning rate with, `(m,)`.
      test: Indices of the examples for the results, `(m,)`.
    """

    learn: Int[np.ndarray, " n"]
    validation: Int[np.ndarray, " m"]
    test: Int[np.ndarray, " m"]


class Task(NamedTuple):
    """The examples of a task, and their division in each repetition.

    Attributes:
      examples: All examples: tokens `(example, context + 1)`, scored `(example, context)`.
      parts: The division of each repetition.
    """

    examples: Batch
    parts: tuple[Part, ...]

    def of(self, index: Int[np.ndarray, "*any"]) -> Batch:
        """Gathers some of the examples."""
        return Batch(self.examples.tokens[index], self.examples.scored[index])


class Data(NamedTuple):
    """The data for training and measuring all checkpoints.

    Attributes:
      held_out: Text held out from pre-training, for each repetition: tokens `(n, context + 1)`.
      tasks: The tasks, in the order of `Tuning.tasks`.
      benchmarks: Multiple-choice questions by the names of their files, without suffix.
      unigram: The loss of predicting each token from its frequency alone, in nats per token, on the
        held-out text of the first repetition.
    """

    held_out: tuple[Batch, ...]
    tasks: tuple[Task, ...]
    benchmarks: dict[str, choices.Packed]
    unigram: float


def seeded(config: Config, *what: int) -> int:
    """Derives a seed from the config's, one for each purpose."""
    return int(np.random.SeedSequence((config.seed, *what)).generate_state(1)[0])


def network(config: Config, paths: Sequence[str]) -> nn.Module:
    """Builds the network of the checkpoints, without their parameters.

    Args:
      config: The settings.
      paths: Folders of the checkpoints, one or more.

    Returns:
      The module, without parameters.

    Raises:
      ValueError: If a folder has no readable config.json or describes a model that the modules
        cannot represent, if two checkpoints differ in more than their weights, or if the first has
        fewer positions than `config.model.context`.
    """
    modules = [module_of(read_config(path)) for path in paths]
    for path, module in zip(paths, modules, strict=True):
        if describe(module) != describe(modules[0]):
            raise ValueError(f"checkpoints must have one shape; {path} differs from {paths[0]}")
    most = modules[0].context
    if config.model.context > most:
        raise ValueError(
            f"model.context must be at most {most}, the positions of {paths[0]}; got "
            f"{config.model.context}"
        )
    return modules[0]


def budgets(config: Config, paths: Sequence[str]) -> tuple[np.ndarray, str]:
    """Determines how long each checkpoint was trained.

    The config's numbers come first, then numbers in the folders' names, such as "tokens41B" with
    one of the units K, M, B and T. If a name has no number, the checkpoints are numbered from 1.

    Args:
      config: The settings.
      paths: Folders of the checkpoints, from the first to the last.

    Returns:
      The numbers, ascending floats `(checkpoint,)`, and their unit: "tokens" or "order".

    Raises:
      ValueError: If the numbers in the folders' names do not increase.
    """
    if config.checkpoints is None or config.tokens is not None:
        return np.asarray(config.tokens or config.series.budgets, float), "tokens"
    names = [Path(path).name for path in paths]
    found = [re.search(r"tokens-?(\d+(?:\.\d+)?)([KMBT])\b", name, re.I) for name in names]
    if not all(found):
        return np.arange(1.0, len(paths) + 1), "order"
    told = np.array([float(m[1]) * UNITS[m[2].upper()] for m in found if m])
    if not (np.diff(told) > 0).all():
        raise ValueError(f"checkpoints must be ordered from the first to the last; got {told}")
    return told, "tokens"


def load(config: Config, vocab: int, end: Sequence[int] = ()) -> Data:
    """Reads all data of a run.

    Args:
      config: The settings.
      vocab: Size of the network's vocabulary.
      end: Tokens that end a response. If there are none, a new line ends the offline text, and
        other texts have no end.

    Returns:
      The data.

    Raises:
      ValueError: If text needs a tokenizer and there is none, a token is not in the vocabulary, the
        text has another vocabulary, there are too few examples or blocks of held-out text, or a
        benchmark has no questions left, or one whose answers leave no room for the question.
      DataError: If files are missing or damaged. It is a `ValueError`.
    """
    tune, context = config.tune, config.model.context
    offline = config.data.name == OFFLINE_TEXT
    if QUESTIONS in tune.tasks and not offline:
        raise ValueError(
            f"tune.tasks: '{QUESTIONS}' needs the characters of the offline text; give a file of "
            "instructions"
        )
    encode = tasks.encoder(config.data, tune.tokenizer)
    corpus = tasks.load(config.data, vocab, context, ())
    held_out = tuple(
        corpus.held_out(config.held_out, seeded(config, 0, k)) for k in range(config.replicates)
    )
    # A network of characters only has a new line as an end.
    end = end or (tuple(text.encode(b"\n")) if encode is text.encode else ())
    taught = tuple(_task(config, name, encode, end) for name in tune.tasks)
    asked = {Path(name).stem: _benchmark(config, name, encode) for name in config.benchmarks.files}
    for name, tokens in (
        *((name, task.examples.tokens) for name, task in zip(tune.tasks, taught, strict=True)),
        *((name, packed.tokens) for name, packed in asked.items()),
    ):
        tasks.check_tokens(name, tokens, vocab)
    return Data(held_out, taught, asked, corpus.unigram(held_out[0]))


def _task(config: Config, name: str, encode: Callable[[bytes], Any], end: Sequence[int]) -> Task:
    """Reads or generates the examples of a task, and divides them for each repetition."""
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
            f"{config.model.context}; {sum(sizes)} are needed"
        )
    parts = []
    for k in range(config.replicates):
        order = np.random.default_rng(seeded(config, 2, k)).permutation(count)[: sum(sizes)]
        parts.append(Part(*np.split(order, np.cumsum(sizes)[:-1])))
    return Task(Batch(packed.tokens, packed.scored), tuple(parts))


def _benchmark(config: Config, name: str, encode: Callable[[bytes], Any]) -> choices.Packed:
    """Reads the questions of a file, with solved ones before each if requested."""
    how, items = config.benchmarks, choices.read(name)
    shots, asked = items[: how.shots], items[how.shots :][: how.items]
    if not asked:
        raise ValueError(f"benchmarks.shots: {name} has {len(items)} questions, so none is left")
    before = "".join(f"{item.context}{item.choices[item.answer]}\n\n" for item in shots)
    asked = [item._replace(context=before + item.context) for item in asked]
    return choices.pack(asked, encode, config.model.context)
