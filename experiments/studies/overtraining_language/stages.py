"""The stages of `overtraining_language`, which train, perturb or fine-tune some of its models.

Each stage processes several models in parallel. `run` decides which, and `training` trains them.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments.data import stream
from experiments.studies.overtraining_language.config import Config
from experiments.studies.shared import language_tasks as tasks
from experiments.studies.shared import language_training as training
from experiments.studies.shared.linear_overtraining import (
    Tasks,
    inflection,
    pre_trained,
    tuned_losses,
)
from experiments.training import Optimizer, Schedule, Training, mup, sharding
from sail_jax import probe
from theory.two_layer import perturbation

B2 = 0.95  # Adam's second decay; the first is 0.9, the default
WEIGHT_DECAY = 0.1  # in pre-training; fine-tuning has none


def _keys(config: Config, replicate: int) -> jax.Array:
    """Creates a repetition's random keys: for its initial weights, for dropout, and for noise."""
    return jax.random.split(jax.random.fold_in(jax.random.key(config.seed), replicate), 3)


def _order(config: Config, replicate: int) -> int:
    """Returns the seed of a repetition's minibatches."""
    return int(np.random.SeedSequence((config.seed, replicate)).generate_state(1)[0])


def _initial(config: Config, net: nn.Module, replicates: Sequence[int]) -> list[PyTree]:
    """Draws the initial parameters of some repetitions."""
    scales = config.model.parametrisation()
    return [
        jax.device_get(mup.scaled(training.first(net, _keys(config, k)[0]), scales))
        for k in replicates
    ]


def _training(config: Config, schedule: Schedule, **options: Any) -> Training:
    """Returns the training settings for a schedule, with further options of the optimiser."""
    own = mup.rates(config.model.parametrisation())
    optimizer = Optimizer(schedule, b2=B2, rates=own, **options)
    return Training(optimizer, config.memory.micro_batches, config.compute)


def pre_train(
    config: Config,
    net: nn.Module,
    corpus: tasks.Corpus,
    where: sharding.Layout,
    budget: int,
    some: Sequence[int],
    folder: Path | None,
) -> PyTree:
    """Pre-trains some repetitions for one budget.

    Args:
      config: The settings.
      net: The network.
      corpus: The training text.
      where: The layout of the work on devices.
      budget: Tokens to train on.
      some: Numbers of the repetitions.
      folder: Directory for checkpoints, from which a killed training continues. None stores none.

    Returns:
      The trained parameters, `(replicate, ...)`.
    """
    steps, pretrain = config.steps(budget), config.pretrain
    schedule = Schedule(
        pretrain.rate,
        steps,
        round(pretrain.warmup * steps),
        pretrain.decay,
        cooldown=pretrain.cooldown,
    )
    how = _training(config, schedule, weight_decay=WEIGHT_DECAY)
    orders = [_order(config, k) for k in some]

    def batch(step: int) -> tasks.Batch:
        parts = [corpus.batch(step, seed=order, size=pretrain.batch) for order in orders]
        return jax.tree.map(lambda *leaves: np.stack(leaves, 1), *parts)

    trained = training.together(
        net,
        how,
        _initial(config, net, some),
        batch,
        steps,
        key=_keys(config, some[0])[1],
        where=where,
        directory=folder,
        config=config,
        save_every=config.save_every,
    )
    return training.stacked(trained)


def perturb(
    config: Config,
    net: nn.Module,
    where: sharding.Layout,
    held_out: tasks.Batch,
    bases: Sequence[PyTree],
    some: Sequence[int],
) -> dict[str, np.ndarray]:
    """Measures how much Gaussian noise increases the pre-training loss of some models.

    Args:
      config: The settings.
      net: The network.
      where: The layout of the work on devices.
      held_out: Sequences held out from pre-training.
      bases: Parameters of all models, ordered by budget and then by repetition.
      some: Indices in `bases` of the models to perturb.

    Returns:
      Measurements of each model:
      - "base": the loss without noise, `(model,)`.
      - "increase": the mean increase of the loss under noise, `(model, noise)`.
      - "draws_error": its standard error over draws, `(model, noise)`.
      - "predicted": the increase by second derivatives, `(model, noise)`.

    References:
      Springer et al., 2025 (arXiv 2503.19206), eq. 1, Figures 3 and 9.
    """
    initial = _initial(config, net, range(config.replicates))
    # Noise has the deviation of each initial array, from the initialisation of the same repetition.
    deviations = [jax.tree.map(lambda x: np.float32(x.std()), params) for params in initial]
    of = [k % config.replicates for k in some]
    members = where.spread(
        training.stacked(where.filled([bases[k] for k in some])),
        training.stacked(where.filled([deviations[r] for r in of])),
        jnp.stack(where.filled([_keys(config, r)[2] for r in of])),
    )
    sensitivity = _perturbed(
        net, config.draws, config.memory.at_once, held_out, jnp.asarray(config.noise), *members
    )
    named = {
        "base": sensitivity.loss,
        "increase": sensitivity.increase.value,
        "predicted": sensitivity.predicted.value,
        "draws_error": sensitivity.increase.stderr,
    }
    return {name: value[: len(some)] for name, value in sharding.gathered(named).items()}


@partial(jax.jit, static_argnums=(0, 1, 2))
def _perturbed(net, draws, at_once, data, scales, params, deviations, keys) -> probe.Sensitivity:
    """Applies `probe.gaussian_sensitivity` to stacked models."""
    how: dict[str, Any] = {"draws": draws, "batch_size": at_once}

    def of_model(params: PyTree, deviation: PyTree, key: jax.Array) -> probe.Sensitivity:
        loss = training.mean_loss(net)
        return probe.gaussian_sensitivity(
            loss, params, data, key, scales, deviation=deviation, **how
        )

    return jax.vmap(of_model)(params, deviations, keys)


def fine_tune(
    config: Config,
    net: nn.Module,
    where: sharding.Layout,
    held_out: tasks.Batch,
    task: tasks.Task,
    bases: Sequence[PyTree],
    some: Sequence[tuple[int, int]],
    folder: Path | None,
) -> dict[str, np.ndarray]:
    """Fine-tunes some models on a task, each at its learning rate, and measures the losses.

    Args:
      config: The settings.
      net: The network.
      where: The layout of the work on devices.
      held_out: Sequences held out from pre-training.
      task: The task of the fine-tuning.
      bases: Parameters of all models, ordered by budget and then by repetition.
      some: For each run the index of its model in `bases`, and of its rate in `config.tune.rates`.
      folder: Directory for checkpoints, from which a killed training continues. None stores none.

    Returns:
      Measurements of each run. The scales interpolate from the model to its fine-tuned version.
      - "increase": the increase of the pre-training loss, `(run, scale)`.
      - "predicted": the same by first and second derivatives, `(run, scale)`.
      - "distance": the L2 norm of the change of all parameters, `(run,)`.
      - "before" and "test": the loss on the task's test sequences before and after, `(run,)`.
      - "validation": the loss on its validation sequences afterwards, `(run,)`.
      - "epoch": the number of epochs after which training was stopped, `(run,)`; only with
        `config.tune.early_stopping`, which uses the epoch with the smallest validation loss.
      The task's losses are `training.own_losses`.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Figures 4 to 6, 8 and 10.
    """
    tune, examples = config.tune, len(task.learn.tokens)
    # One schedule with the largest rate. Every run uses a fraction of that rate.
    steps, top = tune.steps(examples), tune.rates[-1]
    schedule = Schedule(top, steps, round(tune.warmup * steps), tune.decay, cooldown=tune.cooldown)
    shares = tuple(tune.rates[rate] / top for _, rate in some)
    how = _training(config, schedule, members=shares)
    # The rates of one repetition use the same minibatches.
    orders = [_order(config, k) for k in range(config.replicates)]
    of = np.array([model % config.replicates for model, _ in some])

    def batch(step: int) -> tasks.Batch:
        size = {"examples": examples, "size": tune.batch}
        index = np.stack([stream.indices(step, seed=order, **size) for order in orders], 1)
        return jax.tree.map(lambda x: x[index[:, of]], task.learn)

    validations: list[np.ndarray] = []

    def score(params: PyTree) -> jax.Array:
        found = _validation(net, config.memory.at_once, task.validation, params)
        validations.append(sharding.gathered(found))
        return found

    stops = [k * examples // tune.batch for k in range(1, tune.epochs + 1)]
    early: dict[str, Any] = {"stops": stops, "score": score} if tune.early_stopping else {}
    before = [bases[model] for model, _ in some]
    after = training.together(
        net,
        how,
        before,
        batch,
        steps,
        key=jax.random.fold_in(_keys(config, 0)[1], some[0][0] * len(tune.rates) + some[0][1]),
        where=where,
        directory=folder,
        config=config,
        save_every=config.save_every,
        **early,
    )
    pair = where.spread(
        training.stacked(where.filled(before)), training.stacked(where.filled(after))
    )
    tuned = _tuned(net, config.memory.at_once, held_out, task, jnp.asarray(tune.scales), *pair)
    measured = sharding.gathered(tuned)
    if validations:
        measured["epoch"] = 1 + np.argmin(validations, 0)
    return {name: value[: len(some)] for name, value in measured.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _tuned(net, at_once, held_out, task, scales, before, after) -> dict[str, jax.Array]:
    """Measures stacked models before and after fine-tuning."""
    # Both sets in one pass; the first `count` results are those of the validation set.
    loss, count = training.mean_loss(net), len(task.validation.tokens)
    examples = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), task.validation, task.test)

    def of_run(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
        line = probe.fine_tuning_sensitivity(
            loss, before, after, held_out, scales, batch_size=at_once
        )
        apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), before, after)
        ends = jax.tree.map(lambda *leaves: jnp.stack(leaves), before, after)
        own = jax.lax.map(lambda p: training.own_losses(net, p, examples, at_once), ends)
        return {
            "increase": line.increase,
            "predicted": line.predicted,
            "distance": jnp.sqrt(sum(jax.tree.leaves(apart))),
            "before": own[0, count:].mean(),
            "validation": own[1, :count].mean(),
            "test": own[1, count:].mean(),
        }

    return jax.vmap(of_run)(before, after)


@partial(jax.jit, static_argnums=(0, 1))
def _validation(net, at_once, validation, params) -> jax.Array:
    """Computes the validation loss of stacked models."""
    of_one = lambda p: training.own_losses(net, p, validation, at_once).mean()  # noqa: E731
    return jax.vmap(of_one)(params)


# The two-layer theory next to this study's results: sizes of noise, and rates for so many steps.
POINTS, STEPS = 60, 200
ROWS = {"noise": np.linspace(0.0, 0.35, POINTS), "rate": np.linspace(0.0, 0.0005, POINTS)}


def theory() -> dict[str, Any]:
    """Evaluates the theory of two-layer linear networks, for comparison.

    Returns for "noise" and for "rate" (of fine-tuning):
    - "loss": the pre-training loss afterwards, `(row, time)`.
    - "inflection": the time after which more pre-training hurts, 0 without such a time, `(row,)`.
    - "row": the sizes of noise, or the rates.
    - "time": the pre-training times.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Section 4.
    """
    linear = Tasks()
    sigma = linear.spectrum()
    time = linear.times(sigma, POINTS)
    with jax.enable_x64(True):
        y = pre_trained(linear, sigma, time)
        tuned = ROWS["rate"][:, None, None] * STEPS
        losses = {
            "noise": perturbation.perturbed_mode_loss(y, sigma, ROWS["noise"][:, None]),
            "rate": tuned_losses(y, sigma, linear.target(sigma), tuned)[0],
        }
    return {
        name: {
            "loss": np.asarray(loss),
            "inflection": np.nan_to_num(inflection(time, loss)),  # NaN becomes 0
            "row": ROWS[name],
            "time": time,
        }
        for name, loss in losses.items()
    }
