"""The data of `sail_language`: the parts of a text, held-out text, and questions.

A text is divided by the mean token of its blocks (SAIL, App. H.1). Distances between its parts give
SAIL's weight of the sources.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.data import benchmarks, choices, gpt2_tokens, text, tokens
from experiments.data.choices import Packed
from experiments.data.registry import OFFLINE_TEXT
from experiments.data.tokens import Batch, Ids
from experiments.measures import choice_scores
from experiments.studies.sail_language.config import Config
from experiments.studies.shared import gamma_sweep as line
from experiments.studies.shared.checking import must
from sail_jax import distances

# Percentiles of mean token values between D_1, D_2 and D_t (SAIL, App. H.1).
PERCENTILES = (33, 66)


class Corpus(NamedTuple):
    """A training text, divided into D_1, D_2 and D_t, and held-out text.

    Held-out text comes from a different part of the text from training text.

    Attributes:
      train: The training tokens, `(length,)`.
      vocab: Size of the vocabulary.
      parts: Indices of the blocks of D_1, D_2 and D_t in `train`.
      validation: Held-out blocks of D_t, on which weights are chosen.
      held_out: Other held-out blocks of D_t, for all results.
      own: Held-out blocks of D_1.
      questions: Questions by their kind.
    """

    train: Ids
    vocab: int
    parts: text.Parts
    validation: Batch
    held_out: Batch
    own: Batch
    questions: dict[str, Packed]


def load(config: Config) -> Corpus:
    """Reads the text and divides it."""
    train, held_out, vocab = config.data.read()
    shortest, context = min(len(train), len(held_out)), config.model.context
    short = f"be below {shortest}, the tokens of the text"
    must(config, "model.context", context < shortest, short)
    means, of_kept = (tokens.block_means(part, context) for part in (train, held_out))
    # The thresholds of the training text also divide the held-out text.
    thresholds = np.percentile(means, PERCENTILES)
    parts = text.by_mean(means[:, None], thresholds)
    low, _, high = text.by_mean(of_kept[:, None], thresholds)
    if config.held_out > min(len(low), len(high) - config.validation):
        raise ValueError(
            f"held_out, validation: {config.held_out} and {config.validation} blocks of "
            f"{context} tokens are more than the held-out text has, {len(low)} of "
            f"D_1 and {len(high)} of D_t"
        )
    # Separate streams by the second number: 0 for held-out text, 1 for the sources' blocks, 2 for
    # the samples of distances, 3 for the order of minibatches (`parts`).
    rng = np.random.default_rng((config.seed, 0))
    low, high = rng.permutation(low), rng.permutation(high)
    count, first = config.held_out, config.validation
    of = partial(take, held_out, context)
    held = of(high[first : first + count])
    return Corpus(
        train,
        vocab,
        parts,
        of(high[:first]),
        held,
        of(low[:count]),
        questions(config, held, vocab),
    )


def take(line: Ids, context: int, which: Int[np.ndarray, " n"]) -> Batch:
    """Gathers blocks of a text, each with the next tokens of its tokens."""
    rows = np.asarray(line[which[:, None] * context + np.arange(context + 1)], np.int32)
    return Batch(rows[:, :-1], rows[:, 1:])


def questions(config: Config, held: Batch, vocab: int) -> dict[str, Packed]:
    """Creates the questions for the networks.

    It returns questions by their kind: always "continuation", how held-out blocks continue; "file",
    the questions of a given file; benchmarks by their names; otherwise "arithmetic", generated
    questions, if the tokens are the characters of the offline text. `length` is the divisor of a
    choice's log-likelihood: its tokens, or for benchmarks the length by `questions.scoring`.
    """
    how, context = config.questions, config.model.context
    asked = choice_scores.continuations(
        held.inputs,
        context=context - how.ending,
        items=min(how.items, len(held.inputs)),
        choices=how.choices,
        seed=config.seed,
    )
    by_task = {"continuation": asked}
    if how.file is not None or how.tasks:
        encode = text.encode if how.tokenizer is None else gpt2_tokens.load(how.tokenizer)
        if how.file is not None:
            items = choices.read(how.file)[: how.items]
            by_task["file"] = benchmarks.per_token(choices.pack(items, encode, context))
        by_task |= _benchmarks(config, encode)
    elif config.data.name == OFFLINE_TEXT:
        items = choices.generate(config.seed, how.items, how.choices)
        by_task["arithmetic"] = benchmarks.per_token(choices.pack(items, text.encode, context))
    if (most := max(packed.tokens.max() for packed in by_task.values())) >= vocab:
        raise ValueError(
            f"questions.tokenizer: it has the token {most}, but the networks' vocabulary ends at "
            f"{vocab - 1}"
        )
    return by_task


def _benchmarks(config: Config, encode: Callable[[bytes], Ids]) -> dict[str, Packed]:
    """Reads and packs the questions of the benchmarks by their names."""
    how, packed = config.questions, {}
    if how.tasks and how.folder is None:
        raise ValueError(
            f"questions.folder: give the folder of {', '.join(f'{n}.jsonl' for n in how.tasks)}, "
            "or no questions.tasks"
        )
    for name in how.tasks:
        asked = benchmarks.read(how.folder or "", name)[: how.items]
        unit = benchmarks.BENCHMARKS[name].unit if how.scoring == "olmo" else how.scoring
        try:
            packed[name] = benchmarks.pack(asked, encode, config.model.context, unit)
        except ValueError as error:
            raise ValueError(f"questions.tasks: {name}: {error}") from None
    return packed


def sources(config: Config, corpus: Corpus, seed: int) -> Int[np.ndarray, "2 count"]:
    """Draws the blocks of the texts of both sources."""
    rng, source = np.random.default_rng((config.seed, 1, seed)), config.source
    return text.overlapping(rng, corpus.parts, source.blocks, alpha=source.alpha, beta=source.beta)


def batch(
    config: Config,
    corpus: Corpus,
    chosen: Int[np.ndarray, " k"],
    seed: int,
    step: int,
    *,
    size: int | None = None,
) -> Batch:
    """Gathers the minibatch of a training step.

    Networks that are trained with the same seed on the same blocks use the same minibatches.

    - `chosen`: indices of the training blocks, `(k,)`.
    - `step`: number of the step, from 0.
    - `size`: blocks of the minibatch; None for `budget.batch`.

    It returns inputs and targets, each `(size, context)`.
    """
    return tokens.batch(
        corpus.train,
        step,
        seed=seed,
        size=size or config.budget.batch,
        context=config.model.context,
        chosen=chosen,
    )


def weight(config: Config, corpus: Corpus, seed: int) -> float:
    """Computes SAIL's weight of the first source from distances between texts.

    Distances are estimated from samples of blocks.

    It returns the weight; NaN if the distance between the sources is within its noise.

    References:
      SAIL (Structured-Initialization Learning), eq. 11.
    """
    rng = np.random.default_rng((config.seed, 2, seed))
    parts = (*sources(config, corpus, seed), corpus.parts[2])
    count = config.weight.blocks
    samples = [
        take(corpus.train, config.model.context, rng.permutation(part)[:count]).inputs
        for part in parts
    ]
    by_pair, squared = _measured(config.weight.distance, samples)
    return line.weight(by_pair, squared=squared)


def _measured(name: str, samples: list[Int[np.ndarray, "block token"]]) -> tuple[Any, bool]:
    """Estimates the distances between three samples, and returns whether they are squared.

    "tv" compares frequencies of tokens. The others compare the means of blocks, by which the text
    was divided.
    """
    if name == "tv":
        return line.distances(distances.total_variation_tokens, *samples), False
    means: list[Float[np.ndarray, " block"]] = [sample.mean(1) for sample in samples]
    if name == "w1":
        return line.distances(distances.wasserstein, *means), False
    return line.mmd(*(mean[:, None] for mean in means)), True
