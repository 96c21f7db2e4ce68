"""Checkpoints merged and run on a few examples, before any is written."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sail_jax import architectures, probe
from sail_jax.checkpoint.formats.files import CheckpointError, reading
from sail_jax.checkpoint.formats.open import open_checkpoint, open_values
from sail_jax.checkpoint.planning.inputs import config_of
from sail_jax.merging.tensors import read_whole

__all__ = ["Examples", "Trial", "read_examples", "try_average"]

MOST = 1 << 28  # bytes of examples


class Examples(NamedTuple):
    """inputs: tokens [n, time], or what else the network takes, [n, ...]. labels: [n] or [n, time],
    where -100 takes no part; None for the next token, or no loss at all."""

    inputs: np.ndarray
    labels: np.ndarray | None


class Trial(NamedTuple):
    """losses: mean cross-entropy of each model, of their average, and of the ensemble of their
    logits; barrier: on the line (two models) or at the mean; None without labels. cosine,
    coefficient, gap: of the average's logits beside the mean of the models' (cross-task linearity).
    """

    losses: Float[np.ndarray, "model"] | None
    average: float | None
    ensemble: float | None
    barrier: float | None
    cosine: float
    coefficient: float
    gap: float


def read_examples(path: str | PathLike[str]) -> Examples:
    """The arrays `tokens` or `inputs`, and `labels` if there are any, of an .npz file of at most
    256 MB; no pickles. CheckpointError, a ValueError, for all else."""
    path = Path(path)
    with reading(path), open_checkpoint(path) as opened:
        tensors = opened.tensors
        total = sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors.values())
        if path.suffix != ".npz" or total > MOST:
            raise CheckpointError(f"{path}: expected an .npz of at most {MOST >> 20} MiB")
        names = [n for n in ("tokens", "inputs") if n in tensors]
        if len(names) != 1 or tensors.keys() - {"tokens", "inputs", "labels"}:
            raise CheckpointError(
                f"{path}: expected 'tokens' or 'inputs', and 'labels' if there are any; found "
                f"{', '.join(sorted(tensors)) or 'nothing'}"
            )
        arrays = {name: read_whole(tensor) for name, tensor in tensors.items()}
    inputs, labels = arrays[names[0]], arrays.get("labels")
    integral = np.issubdtype(inputs.dtype, np.integer)
    if inputs.ndim < 2 or len(inputs) < 2 or (names[0] == "tokens" and not integral):
        kind = "integers [n, time]" if names[0] == "tokens" else "an array [n, ...]"
        raise CheckpointError(
            f"{path}: '{names[0]}': expected {kind} with n >= 2, got {inputs.dtype}"
            f"{list(inputs.shape)}"
        )
    if not integral and not np.isfinite(inputs).all():
        raise CheckpointError(f"{path}: '{names[0]}' has values that are not finite")
    if labels is not None and not (
        np.issubdtype(labels.dtype, np.integer)
        and labels.shape in (inputs.shape[:1], inputs.shape[:2])
    ):
        raise CheckpointError(
            f"{path}: 'labels': expected integers [n] or [n, time] for inputs "
            f"{list(inputs.shape)}, got {labels.dtype}{list(labels.shape)}"
        )
    return Examples(inputs, labels)


def try_average(
    paths: Sequence[str | PathLike[str]],
    examples: Examples,
    config: Mapping[str, Any] | None = None,
    *,
    batch_size: int = 8,
    allow_pickle: bool = False,
) -> Trial:
    """Losses of some models and of their plain average, and how linear the outputs are in between.

    All models are in memory, in float32, beside one that is being run. config: by default the one
    beside the first. Raises CheckpointError, a ValueError, for an architecture whose forward pass
    is not known, and for examples that it cannot take.
    """
    models, config = _load(paths, config, allow_pickle)
    family = architectures.of(config)
    if family.logits is None:
        raise CheckpointError(
            f"{paths[0]}: no forward pass of the architecture {family.name!r} is known; leave out "
            "the data"
        )
    logits = family.logits
    _check_tokens(examples, config)
    labels = examples.labels
    if labels is None and family.causal and examples.inputs.ndim == 2:
        labels = np.pad(examples.inputs[:, 1:].astype(int), ((0, 0), (0, 1)), constant_values=-100)
    data = {"inputs": jnp.asarray(examples.inputs)}
    data |= {} if labels is None else {"labels": jnp.asarray(labels)}

    def network(params: Any, batch: Any) -> Array:
        return logits(params, config, batch["inputs"])

    def per_example(out: Array, batch: Any) -> Float[Array, "example"]:
        return _cross_entropy(out, batch["labels"])

    try:
        shape = jax.eval_shape(network, models[0], data).shape
        if labels is not None and labels.shape != shape[:-1]:
            raise ValueError(f"labels {list(labels.shape)} do not fit outputs {list(shape)}")
        if labels is not None and labels.max() >= shape[-1]:
            raise ValueError(f"label {labels.max()} is beyond {shape[-1]} outputs")
        linear = probe.k_model_linearity(network, models, data, batch_size=batch_size)
        trial = Trial(
            None, None, None, None, float(linear.cosine.value[-1, 0]),
            float(linear.coefficient.value[-1, 0]), float(linear.gap[-1, 0]),
        )  # fmt: skip
        if labels is None:
            return trial
        averaged = probe.averaging(network, models, data, per_example, batch_size=batch_size)
        loss = lambda params, batch: per_example(network(params, batch), batch).mean()  # noqa: E731
        points = np.full((1, len(models)), 1 / len(models))
        if len(models) == 2:
            points = np.stack([a := np.linspace(0.1, 0.9, 9), 1 - a], -1)
        hump = probe.simplex_barrier(loss, models, data, points, batch_size=batch_size)
    except (TypeError, LookupError, ValueError) as error:
        said = " ".join(str(error).split())
        raise CheckpointError(f"these examples cannot be run through {paths[0]}: {said}") from error
    return trial._replace(
        losses=np.asarray(averaged.members.value),
        average=float(averaged.average.value[0]),
        ensemble=float(averaged.ensemble.value[0]),
        barrier=float(hump.height),
    )


def _load(
    paths: Sequence[str | PathLike[str]], config: Mapping[str, Any] | None, allow_pickle: bool
) -> tuple[list[dict[str, Array]], Mapping[str, Any]]:
    models = []
    for path in paths:
        with open_values(Path(path), allow_pickle=allow_pickle) as opened:
            config = config_of(opened.extras) if config is None else config
            params = {}
            for name, tensor in opened.tensors.items():
                x = jnp.asarray(read_whole(tensor))
                params[name] = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            models.append(params)
    if not config:
        raise CheckpointError(
            f"{paths[0]}: without a config.json it cannot be run; give config=..."
        )
    return models, config


def _check_tokens(examples: Examples, config: Mapping[str, Any]) -> None:
    """JAX clips indices that are out of range: a loss would come out all the same."""
    rows = config.get("vocab_size")
    if np.issubdtype(examples.inputs.dtype, np.integer) and isinstance(rows, int):
        low, high = examples.inputs.min(), examples.inputs.max()
        if low < 0 or high >= rows:
            raise CheckpointError(f"tokens: expected 0 to {rows - 1}, got {low} to {high}")


def _cross_entropy(logits: Array, labels: ArrayLike) -> Float[Array, "example"]:
    """The mean over the labels of an example that count."""
    y = jnp.asarray(labels)
    counts = y >= 0
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_probs = jnp.take_along_axis(logs, jnp.where(counts, y, 0)[..., None], -1)[..., 0]
    axes = tuple(range(1, y.ndim))
    return -jnp.sum(log_probs * counts, axes) / jnp.maximum(counts.sum(axes), 1)
