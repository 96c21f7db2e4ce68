"""The loop of SAIL's eq. 3: networks between two models are retrained for every gamma.

The gamma that it takes is the best after some training, beside those that `parts.choose` takes
before any.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from experiments.data.tokens import Batch
from experiments.lab.progress import Stage
from experiments.studies.sail_language import parts
from experiments.studies.sail_language.config import Config
from experiments.training.sail_start import merged


def sweep(
    config: Config,
    stage: Stage,
    name: str,
    learner: parts.Learner,
    pair: Sequence[PyTree],
    batch: Callable[[int], Batch],
    key: PRNGKeyArray,
    exams: Sequence[Batch],
) -> dict[str, Any]:
    """Retrains from every gamma on the line through two models, a stage for each gamma.

        gamma* = argmin J_D(L_D(gamma theta_1 + (1 - gamma) theta_2)) (eq. 3)

    The training L_D is the first steps of the very training that the study then follows: of the
    same minibatches and learning rates.

    It returns "retrained loss", the losses after retraining, `(exam, look, gamma)`; and "retrained
    by look", `(look,)`, the gammas of least validation loss, of which the last is "retrained".

    References:
      SAIL (Structured-Initialization Learning), eq. 3 and Sec. 4.4 (Fig. 2b).
    """
    gamma = config.gamma()
    losses = np.stack(
        [
            stage(
                f"gamma {k + 1} of {len(gamma)} retrained, {name}",
                partial(_at, config, learner, pair, float(g), batch, key, exams),
            )["loss"]
            for k, g in enumerate(gamma)
        ],
        -1,
    )
    best = gamma[np.argmin(losses[0], -1)]
    return {"retrained loss": losses, "retrained by look": best, "retrained": best[-1]}


def _at(
    config: Config,
    learner: parts.Learner,
    pair: Sequence[PyTree],
    gamma: float,
    batch: Callable[[int], Batch],
    key: PRNGKeyArray,
    exams: Sequence[Batch],
) -> dict[str, Float[np.ndarray, "exam look"]]:
    """Retrains from one gamma, and measures the loss on each text after each look."""
    start = merged(pair, np.array([gamma, 1 - gamma]))
    models, _ = parts.trained(config, learner, start, batch, key, config.weight.retrain)
    loss = partial(parts.held_out_loss, learner.net)
    return {
        "loss": np.array([[float(loss(m, exam, config.at_once)) for m in models] for exam in exams])
    }
