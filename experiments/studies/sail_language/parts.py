"""The trainings and merges of `sail_language`; each network's step is compiled once for all seeds.

`run` calls these functions as stages, and `data` provides their text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from experiments.data.choices import Packed
from experiments.data.tokens import Batch
from experiments.lab.callbacks import METRICS
from experiments.measures import choice_scores
from experiments.models import presets
from experiments.models.next_token import token_losses
from experiments.studies.sail_language import data
from experiments.studies.sail_language.config import MADE_OF, SCRATCH, SOURCES, Config
from experiments.studies.sail_language.data import Corpus
from experiments.studies.shared import growth_tasks, growth_ways
from experiments.training import Training, sharding, stateless
from experiments.training.fit import Fit
from experiments.training.sail_start import between, brought, mean
from sail_jax import proximal
from sail_jax.methods.soups import greedy_soup

SHAPE = {"one": "target", "two": "target", "narrow": "narrow", "shallow": "shallow"}
PART = {"one": 0, "two": 1, "narrow": 1, "shallow": 0}  # the source text of each network


class Learner(NamedTuple):
    """A network and its training.

    Attributes:
      config: The settings.
      net: The network.
      fit: Its trainer.
    """

    config: Config
    net: nn.Module
    fit: Fit


class Lesson(NamedTuple):
    """The common data of all trainings on D_t in one repetition.

    Attributes:
      learner: The target's network and its trainer.
      batch: The minibatch of a step, by the step's number.
      key: A random key, for dropout.
      validation: Blocks of D_t on which weights are chosen.
      held_out: Other blocks, for all results.
      questions: Questions by their kind.
    """

    learner: Learner
    batch: Callable[[int], Batch]
    key: PRNGKeyArray
    validation: Batch
    held_out: Batch
    questions: Mapping[str, Packed]


def next_token_loss(
    net: nn.Module, variables: PyTree, batch: Batch, key: PRNGKeyArray | None = None
) -> Array:
    """Computes the mean cross-entropy of the next token, in nats."""
    return token_losses(net, variables, batch.inputs, batch.targets, key).mean()


def learner(config: Config, sizes: Mapping[str, Any], steps: int) -> Learner:
    """Prepares the training of a network."""
    net = presets.build(sizes)

    def loss(params: PyTree, batch: Batch, key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
        dropout = key if sizes.get("dropout") else None
        return next_token_loss(net, {"params": params}, batch, dropout), {}

    training = Training(config.optimizer.over(steps), config.micro_batches, config.compute)
    where, save_every = sharding.layout(config.shard), config.budget.save_every
    return Learner(config, net, Fit(stateless(loss), training, where, config, save_every))


def learners(config: Config, vocab: int) -> dict[str, Learner]:
    """Prepares the trainings of the target and of all sources.

    It returns the trainings by the names "target" and `config.sources`. Equal ones are one object,
    which is compiled once.
    """
    made: dict[tuple[str, int], Learner] = {}  # by shape and steps
    wanted = {"target": ("target", config.budget.steps)}
    wanted |= {name: (SHAPE[name], config.source.steps) for name in config.sources}
    for what in wanted.values():
        if what not in made:
            made[what] = learner(config, config.network(what[0], vocab), what[1])
    return {name: made[what] for name, what in wanted.items()}


@partial(jax.jit, static_argnums=0)
def initial(net: nn.Module, key: PRNGKeyArray) -> PyTree:
    """Draws the initial variables of a network."""
    return net.init(key, jnp.zeros((1, 1), int))


@partial(jax.jit, static_argnums=(0, 3))
def held_out_loss(net: nn.Module, variables: PyTree, blocks: Batch, at_once: int) -> Array:
    """Computes the mean loss over blocks, in chunks to save memory.

    - `blocks`: inputs and targets, `(n, context)`.

    It returns the loss in nats, a scalar.
    """

    def block_loss(block: Batch) -> Array:
        return next_token_loss(net, variables, jax.tree.map(lambda row: row[None], block))

    rows = jax.tree.map(jnp.asarray, blocks)
    return jax.lax.map(block_loss, rows, batch_size=min(at_once, len(rows.inputs))).mean()


@partial(jax.jit, static_argnums=(0, 5))
def along(
    net: nn.Module, one: PyTree, two: PyTree, gamma: Array, blocks: Batch, at_once: int
) -> Float[Array, " gamma"]:
    """Computes the loss along the line through two models, without training.

        L(gamma theta_1 + (1 - gamma) theta_2)

    - `gamma`: weights of the first model, `(gamma,)`.
    - `blocks`: inputs and targets, `(n, context)`.

    It returns the losses in nats, `(gamma,)`.

    References:
      SAIL (Structured-Initialization Learning), eq. 3.
    """
    loss = lambda params, blocks: held_out_loss(net, params, blocks, at_once)  # noqa: E731
    objective = proximal.after_training([one, two], loss, None, blocks)
    return proximal.sweep(objective, jnp.stack([gamma, 1 - gamma], 1), batch_size=1)


@partial(jax.jit, static_argnums=(0, 3))
def _answered(net: nn.Module, variables: PyTree, packed: Packed, at_once: int) -> Array:
    """Computes the fraction of correct answers to one kind of question."""
    apply = lambda tokens: jnp.asarray(net.apply(variables, tokens))  # noqa: E731
    # Divided by `packed.length`, which `data.questions` chose.
    return choice_scores.answered(apply, packed, by="byte", batch_size=at_once)


def answers(
    net: nn.Module, variables: PyTree, questions: Mapping[str, Packed], at_once: int
) -> Float[np.ndarray, " task"]:
    """Computes the fraction of correct answers to each kind of question."""
    return np.array([float(_answered(net, variables, q, at_once)) for q in questions.values()])


def keys(config: Config, seed: int) -> dict[str, PRNGKeyArray]:
    """Creates the random keys of a repetition.

    It returns a key for the initial weights of each source and of "scratch", and one each for
    "steps" (of training), "grow" and "ligo".
    """
    names = (*SOURCES, SCRATCH, "steps", "grow", "ligo")
    first = jax.random.fold_in(jax.random.key(config.seed), seed)
    by_name = dict(zip(names, jax.random.split(first, len(names)), strict=True))
    return by_name | ({"two": by_name["one"]} if config.source.start == "shared" else {})


def order(config: Config, seed: int, part: int) -> int:
    """Computes the seed of the order of minibatches."""
    return int(np.random.SeedSequence((config.seed, 3, seed, part)).generate_state(1)[0])


Look = Callable[[PyTree], dict[str, float]]
"""Measures the variables of a network: finite numbers by name."""


def trained(
    learner: Learner,
    variables: PyTree,
    batch: Callable[[int], Batch],
    key: PRNGKeyArray,
    stops: tuple[int, ...],
    folder: Path | None = None,
    look: Look | None = None,
) -> tuple[list[PyTree], dict[str, Float[np.ndarray, " evaluation"]]]:
    """Trains a network, and returns it at one or more steps.

    - `stops`: numbers of steps, ascending, after which the network is returned.
    - `folder`: directory for checkpoints, from which a killed training continues. None stores none.
    - `look`: computes the measurements before the first and after every `budget.every` steps; None
      disables measurements.

    It returns the variables after each of `stops`; and the measurements during the training, by
    name, `(evaluation,)` each.
    """
    params = jax.tree.map(jnp.asarray, variables["params"])
    state = learner.fit.start(params, key)
    models, seen = [], []
    looks: dict[str, Any] = {}
    if look is not None:
        evaluate = lambda state: look({"params": state.params})  # noqa: E731
        looks = {"evaluate": evaluate, "evaluate_every": learner.config.budget.every}
    for stop in stops:
        place = None if folder is None else folder / str(stop)
        # The trainer expects the metrics of earlier steps in its folder. Metrics before this stop
        # are in another stop's folder, so an empty file replaces them here.
        if place is not None and int(state.step):
            place.mkdir(parents=True, exist_ok=True)
            (place / METRICS).touch()
        state, rows, *_ = learner.fit.run(state, batch, stop, place, **looks)
        models.append({"params": sharding.gathered(state.params)})
        # The trainer's own metrics are in separate rows.
        seen += [row for row in rows if look is not None and "loss" not in row]
    names = [name for name in (seen[0] if seen else ()) if name != "step"]
    return models, {name: np.array([row[name] for row in seen]) for name in names}


def learn_sources(
    config: Config,
    learners: Mapping[str, Learner],
    corpus: Corpus,
    seed: int,
    folder: Path | None,
) -> dict[str, Any]:
    """Trains the sources of a repetition.

    - `folder`: directory for checkpoints, from which a killed training continues. None stores none.

    It returns the results by name:
    - the variables of each source, under the source's name.
    - "series_loss", `(checkpoint + 1, 2)`: losses of the first source's checkpoints and of their
      mean, on held-out text of D_1 and of D_t.
    """
    key, blocks = keys(config, seed), data.sources(config, corpus, seed)
    sources: dict[str, Any] = {}
    for name in config.sources:
        part, use = PART[name], learners[name]
        stops = (*(config.series_steps if name == "one" else ()), config.source.steps)
        batch = partial(data.batch, config, corpus, blocks[part], order(config, seed, part))
        start, steps_key = initial(use.net, key[name]), jax.random.fold_in(key["steps"], part)
        models, _ = trained(use, start, batch, steps_key, stops, folder and folder / name)
        sources[name] = models[-1]
        if name == "one":
            series = models[: len(config.series_steps)]
            exams = corpus.own, corpus.held_out
            sources["series_loss"] = [
                [held_out_loss(use.net, m, exam, config.at_once) for exam in exams]
                for m in (*series, mean(series))
            ]
    sources["series_loss"] = np.array(sources["series_loss"], float)
    return sources


def choose(
    config: Config, learner: Learner, corpus: Corpus, sources: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Chooses the weights of the sources before any training on the target.

    It returns the weights of the first source, and the data for their choice:
    - "distance": the weight by eq. 11.
    - "sweep" and, if it is a start, "grown": the gamma with the smallest validation loss, between
      the sources of the target's shape and between the grown ones.
    - "sweep loss" and "grown loss", `(2, gamma)`: these losses, on validation and on held-out
      text.
    - "taken", `(2,)`: whether the greedy soup has taken each source of the target's shape.
    """
    pairs = {"sweep": [sources["one"], sources["two"]]}
    if "grown" in config.pairs:
        pairs["grown"] = of_target_shape(config, sources, corpus.vocab, seed)
    weights: dict[str, Any] = {"distance": data.weight(config, corpus, seed)}
    for name, pair in pairs.items():
        gamma, losses = lowest(learner, pair, corpus.validation, corpus.held_out)
        weights |= {name: gamma, f"{name} loss": losses.astype(float)}
    score = lambda m: -float(held_out_loss(learner.net, m, corpus.validation, config.at_once))  # noqa: E731
    taken = greedy_soup(pairs["sweep"], score).taken
    weights["taken"] = np.array([k in taken for k in range(2)])
    return weights


def lowest(
    learner: Learner, pair: Sequence[PyTree], validation: Batch, held_out: Batch
) -> tuple[float, Float[np.ndarray, "2 gamma"]]:
    """Finds the gamma with the smallest validation loss on the line through two models.

    It returns the gamma, and the losses on validation and on held-out text, which are only
    reported.
    """
    gamma, at_once = learner.config.gamma(), learner.config.at_once
    losses = np.stack(
        [
            np.asarray(along(learner.net, *pair, jnp.asarray(gamma), exam, at_once))
            for exam in (validation, held_out)
        ]
    )
    return gamma[int(np.argmin(losses[0]))], losses


def of_target_shape(
    config: Config, sources: Mapping[str, Any], vocab: int, seed: int
) -> list[PyTree]:
    """Grows the shallow source, of D_1, and the narrow one, of D_2, to the target's shape."""
    small = [(sources[name], config.network(name, vocab)) for name in MADE_OF["grown"]]
    key = keys(config, seed)["grow"]
    return brought(small, config.network("target", vocab), config.grow, key, untie=False)


def started(
    config: Config,
    way: str,
    learner: Learner,
    corpus: Corpus,
    sources: Mapping[str, Any],
    chosen: Mapping[str, Any],
    seed: int,
) -> PyTree:
    """Creates the initial variables of a training on D_t."""
    key, pair = keys(config, seed), [sources["one"], sources["two"]]
    if way == SCRATCH:
        return initial(learner.net, key[SCRATCH])
    if way == "ligo":
        return _ligo(config, corpus, sources["narrow"], seed)
    if way in ("uniform", "greedy"):
        return soup(way, pair, chosen["taken"])
    if way == "grown":
        pair = of_target_shape(config, sources, corpus.vocab, seed)
    gamma = float(chosen[way])
    # Eq. 11 gives no weight if the sources' texts are the same.
    if np.isnan(gamma):
        gamma = 0.5
    return between(pair, gamma)


def soup(way: str, models: Sequence[PyTree], taken: Bool[np.ndarray, " model"]) -> PyTree:
    """Averages models: all of them ("uniform"), or those that the greedy soup has taken."""
    return mean([m for m, kept in zip(models, taken, strict=True) if kept or way == "uniform"])


def _ligo(config: Config, corpus: Corpus, variables: PyTree, seed: int) -> PyTree:
    """Widens the narrow source by LiGO's maps, which are learned on blocks of D_t."""
    steps, batch = config.maps.steps, config.budget.batch
    size = steps * batch
    drawn = data.batch(config, corpus, corpus.parts[2], order(config, seed, 3), 0, size=size)
    # `growth_training` draws its windows from one line of text
    text = jnp.asarray(drawn.inputs.ravel())
    line = growth_tasks.Batch(text, text)
    how = growth_ways.Learning("ligo", steps, batch, config.maps.rate)
    vocab = corpus.vocab
    sizes = config.network("narrow", vocab), config.network("target", vocab)
    held = growth_tasks.Data(line, line)
    return growth_ways.learn(how, variables, *sizes, held, keys(config, seed)["ligo"]).variables


def follow(
    lesson: Lesson, start: Callable[[], PyTree], folder: Path | None
) -> dict[str, Float[np.ndarray, "..."]]:
    """Trains on D_t from one start and measures the network during training.

    - `folder`: directory for checkpoints, from which a killed training continues. None stores none.

    It returns "loss", the held-out loss before the first and after every `budget.every` steps,
    `(evaluation,)`; and "accuracy", the fractions of correct answers before and after training,
    `(2, task)`.
    """
    (learner, batch, key, _, held_out, questions), first = lesson, start()
    at_once = learner.config.at_once

    def look(variables: PyTree) -> dict[str, float]:
        return {"held_out": float(held_out_loss(learner.net, variables, held_out, at_once))}

    steps = (learner.config.budget.steps,)
    (last,), seen = trained(learner, first, batch, key, steps, folder, look)
    right = [answers(learner.net, m, questions, at_once) for m in (first, last)]
    return {"loss": seen["held_out"], "accuracy": np.stack(right)}


def on_target(config: Config, learner: Learner, corpus: Corpus, seed: int) -> Lesson:
    """Creates the `Lesson` of a repetition."""
    batch = partial(data.batch, config, corpus, corpus.parts[2], order(config, seed, 2))
    key = jax.random.fold_in(keys(config, seed)["steps"], 2)
    return Lesson(learner, batch, key, corpus.validation, corpus.held_out, corpus.questions)
