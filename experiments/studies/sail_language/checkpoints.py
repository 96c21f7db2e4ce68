"""The part of `sail_language` that merges checkpoints on disk.

They may be several of one run, such as OLMo's in SAIL (App. I.1.2), or any of one architecture. The
study measures their held-out loss and their answers to multiple-choice questions. With `retrain` it
also measures the training that continues from them (`table_2`).
"""

from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import PyTree

from experiments.data import tokens
from experiments.data.choices import Packed
from experiments.data.files import refused
from experiments.data.tokens import Batch
from experiments.lab.progress import Stage
from experiments.models.presets import describe
from experiments.models.pretrained import Pretrained, load_pretrained
from experiments.studies.sail_language import data, parts, table_2
from experiments.studies.sail_language.config import Config
from experiments.studies.sail_language.parts import Learner
from experiments.studies.sail_language.table_2 import Draw, Text
from experiments.studies.shared.checking import must
from experiments.training.sail_start import between, brought, mean
from sail_jax.methods.soups import greedy_soup

MERGES = ("uniform", "greedy", "sweep")  # two soups, and SAIL with gamma by validation loss


def run(config: Config, stage: Stage) -> xr.Dataset:
    """Evaluates all checkpoints and their merges, a stage for each draw of held-out text.

    It returns the dataset:
    - `loss` in nats, `(seed, model)`, and `accuracy`, `(seed, model, task)`, of all checkpoints
      and merges.
    - `gamma_loss`, `(seed, text, gamma)`: along the line through the first checkpoint and the
      mean of the others.
    - `gamma_swept`, `(seed,)`: the gamma with the smallest loss on the validation text.
    - `taken`, `(seed, checkpoint)`: whether the greedy soup has taken each checkpoint.
    - with `retrain`, the results of `table_2.run`.

    It raises `DataError` if checkpoints, text or questions are missing or inconsistent.
    """
    with refused():
        models, draws, text = load(config)
        given = [(model.variables, model.config) for model in models]
        key = parts.keys(config, 0)["grow"]
        variables = brought(given, models[0].config, config.grow, key, untie=False)
    names = [f"checkpoint {k + 1}" for k in range(len(models))]
    learner = parts.learner(config, describe(models[0].module), config.budget.steps)
    measured = [
        stage(f"merges, draw {k}", partial(measure, learner, variables, *draw))
        for k, draw in enumerate(draws)
    ]
    over = lambda name: np.stack([draw[name] for draw in measured]).astype(float)  # noqa: E731
    dataset = xr.Dataset(
        {
            "loss": (("seed", "model"), over("loss"), {"units": "nats"}),
            "accuracy": (("seed", "model", "task"), over("accuracy"), {"units": "1"}),
            "gamma_loss": (("seed", "text", "gamma"), over("gamma loss")),
            "gamma_swept": ("seed", over("gamma")),
            "taken": (("seed", "checkpoint"), over("taken") > 0),
        },
        {
            "seed": np.arange(config.replicates),
            "model": [*names, *MERGES],
            "checkpoint": names,
            "task": list(draws[0].questions),
            "text": ["validation", "held out"],
            "gamma": config.gamma(),
        },
        {"choices": config.questions.choices, "items": config.questions.items},
    )
    if text is None:
        return dataset
    trained = table_2.run(stage, learner, variables, draws, text, measured)
    return dataset.merge(trained).assign_attrs(dataset.attrs | trained.attrs)


def load(config: Config) -> tuple[list[Pretrained], list[Draw], Text | None]:
    """Reads the checkpoints, and draws held-out text and questions for every repetition.

    It detects all errors in a config before anything is evaluated.

    It returns the checkpoints; for each repetition the held-out text and questions; and the
    training text, None without `retrain`.
    """
    paths = config.checkpoints or ()
    if len(paths) < 2 or len(set(paths)) < len(paths):
        raise ValueError(
            f"checkpoints must be two or more folders, all different; got {list(paths)}: GPT-2, "
            "Llama or OLMo as published at huggingface.co; without any, the preset 'default' "
            "trains small ones"
        )
    if config.data.folder is None:
        about = tokens.SOURCE
        raise ValueError(
            f"data.folder: give the folder of a text in the checkpoints' tokens; {about.name} is "
            f"published at {about.home}; the offline default, characters of Python's standard "
            "library, is only for networks trained on them"
        )
    text, context = config.data.read(), config.model.context
    models = [load_pretrained(p, vocab=text.vocab, context=context) for p in paths]
    kinds = {str(model.config["model_type"]) for model in models}
    if len(kinds) > 1:
        raise ValueError(f"checkpoints must be of one architecture; got {', '.join(sorted(kinds))}")
    blocks = tokens.blocks(text.held_out, context)
    left = blocks - config.validation
    most = f"be at most {left}, because the held-out text has {blocks} blocks of {context} tokens"
    must(config, "held_out", config.held_out <= left, most)
    draws = []
    for seed in range(config.replicates):
        order = np.random.default_rng((config.seed, 0, seed)).permutation(blocks)
        first, rest = np.split(order[: config.validation + config.held_out], [config.validation])
        held = data.take(text.held_out, context, rest)
        asked = data.questions(config, held, models[0].module.vocab)  # type: ignore[attr-defined]
        draws.append(Draw(data.take(text.held_out, context, first), held, asked))
    if not config.retrain:
        return models, draws, None
    return models, draws, table_2.load(config, text.train, text.vocab, models[0].module)


def measure(
    learner: Learner,
    models: list[PyTree],
    validation: Batch,
    held_out: Batch,
    questions: dict[str, Packed],
) -> dict[str, Any]:
    """Evaluates the checkpoints and their merges on one draw of text.

    It returns measurements of the checkpoints, followed by those of `MERGES`:
    - "loss", `(model,)`, in nats, and "accuracy", `(model, task)`.
    - "gamma loss", `(2, gamma)`: along the line, on validation and on held-out text.
    - "gamma": the gamma with the smallest loss on validation text.
    - "taken", `(checkpoint,)`: whether the greedy soup has taken each checkpoint.
    """
    at_once = learner.config.at_once
    loss = lambda m, blocks: float(parts.held_out_loss(learner.net, m, blocks, at_once))  # noqa: E731
    soup = greedy_soup(models, lambda m: -loss(m, validation))
    pair = models[0], mean(models[1:])
    gamma, swept = parts.lowest(learner, pair, validation, held_out)
    candidates = [*models, mean(models), soup.params, between(pair, gamma)]
    right = [parts.answers(learner.net, m, questions, at_once) for m in candidates]
    return {
        "loss": np.array([loss(m, held_out) for m in candidates]),
        "accuracy": np.stack(right),
        "gamma loss": swept,
        "gamma": gamma,
        "taken": np.array([k in soup.taken for k in range(len(models))]),
    }
