"""Costs of trainings in `sail_language`, and of the work before them."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, PRNGKeyArray

from experiments.data.tokens import Batch
from experiments.measures.flops import flops
from experiments.measures.savings import Savings
from experiments.studies.sail_language import parts
from experiments.studies.sail_language.config import RETRAINED, Config
from experiments.training import init
from experiments.training.step import State


class Costs(NamedTuple):
    """Numbers of floating-point operations, as counted by XLA.

    Attributes:
      step: The operations of a training step, by the shape of the network.
      validation: The operations of the target's loss on the validation text.
    """

    step: dict[str, float]
    validation: float


def costs(config: Config, learners: Mapping[str, parts.Learner]) -> Costs:
    """Counts the floating-point operations of training steps and of an evaluation."""
    shape = jax.ShapeDtypeStruct((config.budget.batch, config.model.context), np.int32)
    batch = Batch(shape, shape)  # type: ignore[arg-type]
    step = {}
    sources = [parts.SHAPE[name] for name in config.sources if name in learners]
    for name in dict.fromkeys(["target", *sources]):
        use = learners[name]

        def first(key: PRNGKeyArray, use: parts.Learner = use) -> State:
            return init(use.fit.training, parts.initial(use.net, key)["params"], key)

        step[name] = use.fit.cost(jax.eval_shape(first, jax.random.key(0)), batch)
    net = learners["target"].net
    variables = jax.eval_shape(partial(parts.initial, net), jax.random.key(0))
    forward = flops(partial(parts.next_token_loss, net), variables, batch)
    return Costs(step, forward * config.validation / config.budget.batch)


def ahead(config: Config, cost: Costs, networks: int = 2) -> Float[np.ndarray, " way"]:
    """Computes each start's cost before its training on D_t, without the training of sources."""
    step, gammas, looks = cost.step["target"], config.weight.gammas, config.weight.retrain
    # The greedy soup evaluates each network, and all but the first also in a mean with others.
    spent = {
        "ligo": config.maps.steps * step,
        "greedy": (2 * networks - 1) * cost.validation,
        "sweep": gammas * cost.validation,
        "grown": gammas * cost.validation,
        RETRAINED: gammas * (looks[-1] * step + len(looks) * cost.validation),
    }
    return np.array([spent.get(way, 0.0) for way in config.ways]) / step


def share(saved: Savings, earlier: ArrayLike = 0.0) -> Float[np.ndarray, "way seed"]:
    """Computes the fraction of compute that starts save; `earlier` is included, in target steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - (saved.steps + earlier) / saved.scratch_steps
