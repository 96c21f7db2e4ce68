"""What `sail_language` reads: a text's parts by the mean token of blocks (SAIL, App. H.1), what is
held out of the target, distances between the parts, and questions."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.data import choices, gpt2_tokens, text, tokens
from experiments.data.choices import Packed
from experiments.data.registry import OFFLINE_TEXT
from experiments.data.tokens import Batch, Ids
from experiments.studies.sail_language.config import Config
from experiments.training import choice_scores
from experiments.training import gamma_sweep as line
from sail_jax import distances

PERCENTILES = (33, 66)


class Corpus(NamedTuple):
    """A text to learn from, which of its blocks are D_1, D_2 and D_t, and what is held out.

    `validation` is what weights are chosen on, `held_out` what everything is judged on; both are of
    D_t, and `own` is of D_1, from text that is kept from training.
    """

    train: Ids
    vocab: int
    parts: text.Parts
    validation: Batch
    held_out: Batch
    own: Batch
    questions: dict[str, Packed]


def load(config: Config) -> Corpus:
    """The corpus of a config; ValueError, naming the field, for a text that is too short."""
    train, held_out, vocab = config.data.read()
    shortest, context = min(len(train), len(held_out)), config.model.context
    if shortest <= context:
        raise ValueError(
            f"model.context must be below {shortest}, the tokens of the text; got {context}"
        )
    means, of_kept = (tokens.block_means(part, context) for part in (train, held_out))
    thresholds = np.percentile(means, PERCENTILES)
    parts = text.by_mean(means[:, None], thresholds)
    low, _, high = text.by_mean(of_kept[:, None], thresholds)
    if config.held_out > min(len(low), len(high) - config.validation):
        raise ValueError(
            f"held_out, validation: {config.held_out} and {config.validation} blocks of "
            f"{context} tokens are more than the text kept from training has, {len(low)} of "
            f"D_1 and {len(high)} of D_t"
        )
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
    """Some blocks of a text, and the token after each of theirs."""
    rows = np.asarray(line[which[:, None] * context + np.arange(context + 1)], np.int32)
    return Batch(rows[:, :-1], rows[:, 1:])


def questions(config: Config, held: Batch, vocab: int) -> dict[str, Packed]:
    """How held-out blocks of the target go on; and those of the file, or generated arithmetic
    where the tokens are the characters of the offline text."""
    how, context = config.questions, config.model.context
    asked = choice_scores.continuations(
        held.inputs,
        context=context - how.ending,
        items=min(how.items, len(held.inputs)),
        choices=how.choices,
        seed=config.seed,
    )
    by_task = {"continuation": asked}
    if how.file is not None:
        items = choices.read(how.file)[: how.items]
        encode = text.encode if how.tokenizer is None else gpt2_tokens.load(how.tokenizer)
        packed = choices.pack(items, encode, context)
        if packed.tokens.max() >= vocab:
            raise ValueError(
                f"questions.tokenizer: it has the token {packed.tokens.max()}, but the networks' "
                f"vocabulary ends at {vocab - 1}"
            )
        by_task["file"] = packed
    elif config.data.name == OFFLINE_TEXT:
        items = choices.generate(config.seed, how.items, how.choices)
        by_task["arithmetic"] = choices.pack(items, text.encode, context)
    return by_task


def sources(config: Config, corpus: Corpus, seed: int) -> Int[np.ndarray, "2 count"]:
    """Which blocks make the two sources of a repetition."""
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
    """The blocks of a training step; equal seeds give equal minibatches to all networks."""
    return tokens.batch(
        corpus.train,
        step,
        seed=seed,
        size=size or config.budget.batch,
        context=config.model.context,
        chosen=chosen,
    )


def weight(config: Config, corpus: Corpus, seed: int) -> float:
    """The weight of the first source by eq. 11, from distances of samples of blocks; NaN where
    that of the sources is within their noise."""
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
    """A distance of every pair, and whether it is a squared one: of the means of blocks, by which
    the parts were made, or of how frequent tokens are."""
    if name == "tv":
        return line.distances(distances.total_variation_tokens, *samples), False
    means: list[Float[np.ndarray, " block"]] = [sample.mean(1) for sample in samples]
    if name == "w1":
        return line.distances(distances.wasserstein, *means), False
    return line.mmd(*(mean[:, None] for mean in means)), True
