"""Continued training from checkpoints on disk: Table 2's columns and Fig. 7.

All starts use the same minibatches of one text. `checkpoints` has already measured the merges, and
chosen gamma and the members of the greedy soup.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PyTree

from experiments.data import choices, tokens
from experiments.data.choices import Packed
from experiments.data.files import refused
from experiments.data.tokens import Batch, Ids
from experiments.lab.progress import Stage
from experiments.measures import choice_scores
from experiments.measures.savings import savings
from experiments.models.pretrained import Pretrained, load_pretrained
from experiments.studies.sail_language import costs, ligo, parts, retraining
from experiments.studies.sail_language.config import RETRAINED, SCRATCH, Config
from experiments.studies.sail_language.parts import Learner, Lesson
from experiments.studies.shared.checking import must
from experiments.training.sail_start import between, mean
from experiments.training.sharding import layout


class Draw(NamedTuple):
    """The held-out text of one repetition.

    Attributes:
      validation: Blocks on which weights are chosen.
      held_out: Other blocks, for all results.
      questions: Questions by their kind.
    """

    validation: Batch
    held_out: Batch
    questions: dict[str, Packed]


class Text(NamedTuple):
    """The training text, and the network that LiGO grows.

    Attributes:
      train: The training tokens, `(length,)`.
      smaller: The network that LiGO grows; None if it is not among the ways.
    """

    train: Ids
    smaller: Pretrained | None


def load(config: Config, train: Ids, vocab: int, net: nn.Module) -> Text:
    """Checks the conditions of a training, and reads the network that LiGO grows.

    - `train`: the training tokens, `(length,)`.
    """
    context = config.model.context
    short = f"be below {len(train)}, the number of training tokens"
    must(config, "model.context", context < len(train), short)
    layout(config.shard).check(**{"budget.batch": config.budget.batch // config.micro_batches})
    named = ("ligo" in config.ways) == (config.smaller is not None)
    grown = "be the folder of a checkpoint for LiGO to grow if 'ligo' is one of the ways"
    must(config, "smaller", named, f"{grown}, and only then")
    if config.smaller is None:
        return Text(train, None)
    smaller = load_pretrained(config.smaller, vocab=vocab, context=context)
    ligo.check(smaller.module, net)
    return Text(train, smaller)


def run(
    stage: Stage,
    learner: Learner,
    variables: Sequence[PyTree],
    draws: Sequence[Draw],
    text: Text,
    merges: Sequence[Mapping[str, Any]],
) -> xr.Dataset:
    """Trains from every start, a stage for each of them and each repetition.

    It returns the dataset:
    - `trained_loss` in nats on held-out text, `(way, seed, step)`.
    - `trained_accuracy` and `answer_loss`, `(way, seed, step, task)`: the fractions of correct
      answers, and the mean loss per token of correct choices in nats (Fig. 7: its perplexity).
    - `saved` and `compute_saved`, `(way, seed)`: steps and fraction of compute that a start saves
      against scratch until the smallest loss that both reach. They include the cost of the start,
      but not the checkpoints' own training.
    - `chance`, `(task,)`: the fraction of correct answers by guessing.
    - `retrained_loss`, `(seed, text, look, gamma)`, and `gamma_retrained`, `(seed, look)`, if gamma
      is also chosen by retraining.
    The attribute `epochs` is the number of passes through the text.
    """
    config, results, found = learner.config, [], []
    pair = variables[0], mean(variables[1:])
    for k, draw in enumerate(draws):
        key = jax.random.fold_in(parts.keys(config, k)["steps"], 2)
        lesson = Lesson(learner, _batches(config, text, k, 2), key, *draw)
        chosen = dict(merges[k])
        if RETRAINED in config.ways:
            chosen |= retraining.sweep(stage, f"draw {k}", lesson, pair)
        found.append(chosen)
        ways = {}
        for way in config.ways:
            start = partial(started, learner, variables, pair, text, chosen, k, way)
            follow = partial(_follow, lesson, start)
            ways[way] = stage(f"{way}, draw {k}", follow, folder=True)
        results.append(ways)
    dataset = _dataset(learner, len(variables), draws, text, results)
    return retraining.noted(dataset, config, found)


def _batches(config: Config, text: Text, draw: int, part: int) -> Callable[[int], Batch]:
    """Returns the minibatch of a step by its number, in a repetition."""
    size, seed = config.budget.batch, parts.order(config, draw, part)
    context = config.model.context
    return partial(tokens.batch, text.train, seed=seed, size=size, context=context)


def started(
    learner: Learner,
    variables: Sequence[PyTree],
    pair: Sequence[PyTree],
    text: Text,
    chosen: Mapping[str, Any],
    draw: int,
    way: str,
) -> PyTree:
    """Creates the initial variables of a training.

    - `pair`: the ends of gamma's line, the first checkpoint and the mean of the others.
    - `chosen`: the choices on validation text: "gamma", "taken" and, if a way, "retrained".
    """
    config, keys = learner.config, parts.keys(learner.config, draw)
    if way == SCRATCH:
        return parts.initial(learner.net, keys[SCRATCH])
    if way == "ligo":
        assert text.smaller is not None, "`load` has refused this config"
        batch = _batches(config, text, draw, 3)
        drawn = [batch(step) for step in range(config.maps.steps)]
        batches = jax.tree.map(lambda *rows: np.stack(rows), *drawn)
        small, rate = text.smaller, config.maps.rate
        return ligo.grow(small.module, learner.net, small.variables, batches, rate, keys["ligo"])
    if way in ("uniform", "greedy"):
        return parts.soup(way, variables, np.asarray(chosen["taken"]) > 0)
    return between(pair, float(chosen["gamma" if way == "sweep" else way]))


def _follow(
    lesson: Lesson, start: Callable[[], PyTree], folder: Path | None
) -> dict[str, np.ndarray]:
    """Trains from one start, and measures text and questions during training."""
    learner, batch, key, _, held_out, questions = lesson
    config, net = learner.config, learner.net

    def look(variables: PyTree) -> dict[str, float]:
        held = parts.held_out_loss(net, variables, held_out, config.at_once)
        seen = {"held out": float(held)}
        for task, packed in questions.items():
            right, nats = asked(net, variables, packed, config.at_once)
            seen |= {f"right, {task}": float(right), f"nats, {task}": float(nats)}
        return seen

    _, seen = parts.trained(learner, start(), batch, key, (config.budget.steps,), folder, look)
    of = lambda what: np.stack([seen[f"{what}, {task}"] for task in questions], -1)  # noqa: E731
    return {"loss": seen["held out"], "accuracy": of("right"), "answer loss": of("nats")}


@partial(jax.jit, static_argnums=(0, 3))
def asked(net: nn.Module, variables: PyTree, packed: Packed, at_once: int) -> tuple[Array, Array]:
    """Asks a network questions.

    It returns the fraction of correct answers; and the loss per token of correct choices, in nats,
    the mean over questions. Scalars.
    """
    apply = lambda tokens: jnp.asarray(net.apply(variables, tokens))  # noqa: E731
    log_probs = choice_scores.log_likelihood(apply, packed.tokens, batch_size=at_once)
    answer = jnp.asarray(packed.answer)
    scored = jnp.asarray(packed.scored)
    by_length = choices.scores(log_probs, scored, jnp.asarray(packed.length))
    per_token = choices.scores(log_probs, scored)
    nats = -jnp.take_along_axis(per_token, answer[:, None], 1).mean()
    return choices.accuracy(by_length, answer), nats


def _dataset(
    learner: Learner,
    networks: int,
    draws: Sequence[Draw],
    text: Text,
    results: Sequence[Mapping[str, Any]],
) -> xr.Dataset:
    """Stacks the results of the repetitions and computes each start's savings."""
    config, ways = learner.config, list(learner.config.ways)
    over = lambda name: np.array([[r[way][name] for r in results] for way in ways], float)  # noqa: E731
    with refused():
        cost = costs.costs(config, {"target": learner})
    loss, ahead = over("loss"), costs.ahead(config, cost, networks)
    saved = savings(loss, config.budget.every, ahead=ahead)
    per_step, questions = ("way", "seed", "step"), draws[0].questions
    chance = [float((1 / q.scored.any(-1).sum(-1)).mean()) for q in questions.values()]
    seen = config.budget.steps * config.budget.batch
    return xr.Dataset(
        {
            "trained_loss": (per_step, loss, {"units": "nats"}),
            "trained_accuracy": ((*per_step, "task"), over("accuracy"), {"units": "1"}),
            "answer_loss": ((*per_step, "task"), over("answer loss"), {"units": "nats per token"}),
            "scratch_steps": (("way", "seed"), saved.scratch_steps),
            "saved": (("way", "seed"), saved.saved, {"units": "steps"}),
            "compute_saved": (("way", "seed"), costs.share(saved), {"units": "1"}),
            "ahead": ("way", ahead, {"long_name": "compute before training, in steps"}),
            "chance": ("task", chance),
        },
        {
            "way": ways,
            "step": np.arange(0, config.budget.steps + 1, config.budget.every),
            "task": list(questions),
        },
        {"epochs": seen / tokens.blocks(text.train, config.model.context)},
    )
