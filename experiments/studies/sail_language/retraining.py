"""The loop of SAIL's eq. 3: networks between two models are retrained for every gamma.

It chooses the best gamma after some training. `parts.choose` chooses before any training.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, PyTree

from experiments.lab.progress import Stage
from experiments.studies.sail_language import parts
from experiments.studies.sail_language.config import RETRAINED, Config
from experiments.studies.sail_language.parts import Lesson
from experiments.training.sail_start import between


def sweep(stage: Stage, name: str, lesson: Lesson, pair: Sequence[PyTree]) -> dict[str, Any]:
    """Retrains from every gamma on the line through two models, a stage for each gamma.

        gamma* = argmin J_D(L_D(gamma theta_1 + (1 - gamma) theta_2)) (eq. 3)

    The training L_D is the first steps of the same training that the study then continues, with the
    same minibatches and learning rates. Gamma is chosen on the validation text.

    It returns "retrained loss", the losses after retraining, `(exam, look, gamma)`; and "retrained
    by look", `(look,)`, the gammas with the smallest validation loss. The last of them is
    "retrained".

    References:
      SAIL (Structured-Initialization Learning), eq. 3 and Sec. 4.4 (Fig. 2b).
    """
    gamma, losses = lesson.learner.config.gamma(), []
    for k, g in enumerate(gamma):
        title = f"gamma {k + 1} of {len(gamma)} retrained, {name}"
        losses.append(stage(title, partial(_at, lesson, pair, float(g)))["loss"])
    stacked = np.stack(losses, -1)
    best = gamma[np.argmin(stacked[0], -1)]
    return {"retrained loss": stacked, "retrained by look": best, "retrained": best[-1]}


def _at(
    lesson: Lesson, pair: Sequence[PyTree], gamma: float
) -> dict[str, Float[np.ndarray, "exam look"]]:
    """Retrains from one gamma, and measures the loss on each text after each look."""
    learner, config = lesson.learner, lesson.learner.config
    start, looks = between(pair, gamma), config.weight.retrain
    models, _ = parts.trained(learner, start, lesson.batch, lesson.key, looks)
    loss = lambda m, exam: float(parts.held_out_loss(learner.net, m, exam, config.at_once))  # noqa: E731
    exams = lesson.validation, lesson.held_out
    return {"loss": np.array([[loss(m, exam) for m in models] for exam in exams])}


def noted(dataset: xr.Dataset, config: Config, found: Sequence[Mapping[str, Any]]) -> xr.Dataset:
    """Adds the results of `sweep` in each repetition to a dataset, if gamma is chosen by it."""
    if RETRAINED not in config.ways:
        return dataset
    over = lambda name: np.stack([one[name] for one in found])  # noqa: E731
    return dataset.assign(
        retrained_loss=(("seed", "text", "look", "gamma"), over("retrained loss")),
        gamma_retrained=(("seed", "look"), over("retrained by look")),
    ).assign_coords(look=list(config.weight.retrain))
