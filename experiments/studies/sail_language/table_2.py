"""Training on from checkpoints on disk: Table 2's columns and Fig. 7, for the networks at hand.

All starts see the same minibatches of one text. `checkpoints` has measured the merges already, and
chosen gamma and what is in the greedy soup.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from experiments.models.presets import describe
from experiments.models.pretrained import Pretrained, load_pretrained
from experiments.studies.sail_language import costs, ligo, parts, retraining
from experiments.studies.sail_language.config import RETRAINED, SCRATCH, Config
from experiments.training.sail_start import merged
from experiments.training.sharding import layout


class Draw(NamedTuple):
    """The held-out text of one repetition.

    Attributes:
      validation: Blocks on which weights are chosen.
      held_out: Other blocks, on which everything is judged.
      questions: Questions by their kind.
    """

    validation: Batch
    held_out: Batch
    questions: dict[str, Packed]


class Text(NamedTuple):
    """What networks are trained on, and what LiGO grows.

    Attributes:
      train: The tokens to learn from, `(length,)`.
      smaller: The network that LiGO grows; None if it is not among the ways.
    """

    train: Ids
    smaller: Pretrained | None


def load(config: Config, train: Ids, vocab: int, net: Any) -> Text:
    """Checks what a training needs, and reads the network that LiGO grows.

    - `train`: the tokens to learn from, `(length,)`.
    """
    context = config.model.context
    if len(train) <= context:
        raise ValueError(
            f"model.context must be below {len(train)}, the tokens to learn from; got {context}"
        )
    layout(config.shard).check(**{"budget.batch": config.budget.batch // config.micro_batches})
    if ("ligo" in config.ways) != (config.smaller is not None):
        raise ValueError(
            "smaller must be the folder of a checkpoint for LiGO to grow if 'ligo' is one of the "
            f"ways, and only then; got {config.smaller}"
        )
    if config.smaller is None:
        return Text(train, None)
    smaller = load_pretrained(config.smaller, vocab=vocab, context=context)
    ligo.check(smaller.module, net)
    return Text(train, smaller)


def run(
    config: Config,
    stage: Stage,
    net: Any,
    variables: Sequence[PyTree],
    draws: Sequence[Draw],
    text: Text,
    merges: Sequence[Mapping[str, Any]],
) -> xr.Dataset:
    """Trains from every start, a stage for each of them and each repetition.

    It returns the dataset:
    - `trained_loss` in nats on held-out text, `(way, seed, step)`;
    - `trained_accuracy` and `answer_loss`, `(way, seed, step, task)`: the shares of right
      answers, and the mean loss per token of right choices in nats (Fig. 7: its perplexity);
    - `saved` and `compute_saved`, `(way, seed)`: steps and share of compute that a start saves
      against scratch until the least loss that both reach, what is spent on the start counted,
      but not the checkpoints' own training;
    - `chance`, `(task,)`: the share of right answers that are guessed;
    - `retrained_loss`, `(seed, text, look, gamma)`, and `gamma_retrained`, `(seed, look)`, if
      gamma is chosen by retraining, too.
    The attribute `epochs` says how often the text is seen.
    """
    learner = parts.learner(config, describe(net), config.budget.steps)
    results: list[dict[str, Any]] = []
    swept = []
    for k, draw in enumerate(draws):
        found = dict(merges[k])
        if RETRAINED in config.ways:
            exams = draw.validation, draw.held_out
            line = _pair(variables)
            along = _stream(config, text, k)
            found |= retraining.sweep(config, stage, f"draw {k}", learner, line, *along, exams)
            swept.append(found)
        follow = partial(_follow, config, learner, variables, draw, text, found, k)
        results.append(
            {way: stage(f"{way}, draw {k}", partial(follow, way), folder=True)
             for way in config.ways}
        )  # fmt: skip
    return _dataset(config, learner, len(variables), draws, text, results, swept)


def _pair(variables: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
    """Returns the ends of the line on which gamma lies: the first, and the mean of the others."""
    rest = len(variables) - 1
    return variables[0], merged(variables[1:], np.full(rest, 1 / rest))


def _stream(config: Config, text: Text, draw: int) -> tuple[Any, Array]:
    """Returns the minibatch of a step by its number, and the key of dropout, of a repetition."""
    batch = partial(
        tokens.batch,
        text.train,
        seed=parts.order(config, draw, 2),
        size=config.budget.batch,
        context=config.model.context,
    )
    return batch, jax.random.fold_in(parts.keys(config, draw)["steps"], 2)


def started(
    config: Config,
    learner: parts.Learner,
    variables: Sequence[PyTree],
    text: Text,
    found: Mapping[str, Any],
    draw: int,
    way: str,
) -> PyTree:
    """Makes the variables with which a training starts."""
    keys = parts.keys(config, draw)
    if way == SCRATCH:
        return parts.initial(learner.net, keys[SCRATCH])
    if way == "ligo":
        assert text.smaller is not None, "`load` has refused this config"
        steps, n = config.maps.steps, config.budget.batch
        drawn = [
            tokens.batch(
                text.train, step, seed=parts.order(config, draw, 3), size=n,
                context=config.model.context,
            )
            for step in range(steps)
        ]  # fmt: skip
        batches = jax.tree.map(lambda *rows: np.stack(rows), *drawn)
        small, rate = text.smaller, config.maps.rate
        return ligo.grow(small.module, learner.net, small.variables, batches, rate, keys["ligo"])
    if way in ("uniform", "greedy"):
        taken = (
            np.ones(len(variables), bool) if way == "uniform" else np.asarray(found["taken"]) > 0
        )
        soup = [m for m, is_in in zip(variables, taken, strict=True) if is_in]
        return merged(soup, np.full(len(soup), 1 / len(soup)))
    gamma = float(found["gamma" if way == "sweep" else way])
    return merged(_pair(variables), np.array([gamma, 1 - gamma]))


def _follow(
    config: Config,
    learner: parts.Learner,
    variables: Sequence[PyTree],
    draw: Draw,
    text: Text,
    found: Mapping[str, Any],
    number: int,
    way: str,
    folder: Path | None,
) -> dict[str, np.ndarray]:
    """Trains from one start, and measures text and questions on the way."""
    start = started(config, learner, variables, text, found, number, way)

    def look(variables: PyTree) -> dict[str, float]:
        held = parts.held_out_loss(learner.net, variables, draw.held_out, config.at_once)
        seen = {"held out": float(held)}
        for task, packed in draw.questions.items():
            right, nats = asked(learner.net, variables, packed, config.at_once)
            seen |= {f"right, {task}": float(right), f"nats, {task}": float(nats)}
        return seen

    steps = (config.budget.steps,)
    stream = _stream(config, text, number)
    _, seen = parts.trained(config, learner, start, *stream, steps, folder, look)
    of = lambda what: np.stack([seen[f"{what}, {task}"] for task in draw.questions], -1)  # noqa: E731
    return {"loss": seen["held out"], "accuracy": of("right"), "answer loss": of("nats")}


@partial(jax.jit, static_argnums=(0, 3))
def asked(net: Any, variables: PyTree, packed: Packed, at_once: int) -> tuple[Array, Array]:
    """Asks a network questions.

    It returns the share of right answers; and the loss per token of right choices, in nats, the
    mean over questions. Scalars.
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
    config: Config,
    learner: parts.Learner,
    networks: int,
    draws: Sequence[Draw],
    text: Text,
    results: list[dict[str, Any]],
    swept: list[dict[str, Any]],
) -> xr.Dataset:
    """Stacks the results of the repetitions and computes what each start saves."""
    ways = list(config.ways)
    over = lambda name: np.stack(  # noqa: E731
        [np.stack([result[way][name] for result in results]) for way in ways]
    ).astype(float)
    with refused():
        cost = costs.costs(config, {"target": learner})
    loss, ahead = over("loss"), costs.ahead(config, cost, networks)
    saved = savings(loss, config.budget.every, ahead=ahead)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 1 - saved.steps / saved.scratch_steps
    per_step, questions = ("way", "seed", "step"), draws[0].questions
    chance = [float((1 / q.scored.any(-1).sum(-1)).mean()) for q in questions.values()]
    dataset = xr.Dataset(
        {
            "trained_loss": (per_step, loss, {"units": "nats"}),
            "trained_accuracy": ((*per_step, "task"), over("accuracy"), {"units": "1"}),
            "answer_loss": ((*per_step, "task"), over("answer loss"), {"units": "nats per token"}),
            "scratch_steps": (("way", "seed"), saved.scratch_steps),
            "saved": (("way", "seed"), saved.saved, {"units": "steps"}),
            "compute_saved": (("way", "seed"), share, {"units": "1"}),
            "ahead": ("way", ahead, {"long_name": "steps' worth of compute before training"}),
            "chance": ("task", chance),
        },
        {
            "way": ways,
            "step": np.arange(0, config.budget.steps + 1, config.budget.every),
            "task": list(questions),
        },
        {
            "epochs": config.budget.steps
            * config.budget.batch
            / tokens.blocks(text.train, config.model.context),
        },
    )
    if not swept:
        return dataset
    stacked = lambda name: np.stack([found[name] for found in swept])  # noqa: E731
    return dataset.assign(
        retrained_loss=(("seed", "text", "look", "gamma"), stacked("retrained loss")),
        gamma_retrained=(("seed", "look"), stacked("retrained by look")),
    ).assign_coords(look=list(config.weight.retrain))
