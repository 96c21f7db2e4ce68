"""Tries a merge: runs the average of some models on a few examples, without writing it."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sail_jax import architectures, probe
from sail_jax.checkpoint.formats.files import CheckpointError, reading
from sail_jax.checkpoint.formats.open import Checkpoint, check_there, open_checkpoint
from sail_jax.checkpoint.operations.running import DEFAULTS, RunOptions
from sail_jax.checkpoint.planning.inputs import config_of
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.checks import argument
from sail_jax.merging.tensors import bytes_of, read_whole

Params = Mapping[str, Array]
# The largest number of bytes of examples.
MOST = 1 << 28


class Examples(NamedTuple):
    """Examples to run models on.

    Attributes:
      inputs: Tokens `[n, time]`, or other inputs of the network, `[n, ...]`.
      labels: `[n]` or `[n, time]`; entries below 0, such as -100, are ignored. None stands for the
        next token if the network is causal, and for no loss otherwise.
      texts: Tokens `[class, time]` of each class's name, for CLIP.
    """

    inputs: np.ndarray
    labels: np.ndarray | None
    texts: np.ndarray | None = None


class Running(NamedTuple):
    """Models in memory, with the network that runs them on examples.

    Attributes:
      family: The architecture.
      models: The tensors of each model by name, floating ones in float32.
      network: A network of the third form (`sail_jax.probe.networks`). Its features are the outputs
        of its layers.
      data: The examples: "inputs", and "labels" if a loss can be computed.
    """

    family: architectures.Architecture
    models: list[dict[str, Array]]
    network: probe.Apply
    data: dict[str, Array]

    def loss(self, out: Array, batch: Mapping[str, Array]) -> Float[Array, "example"]:
        """Returns the cross-entropy of each example: the mean over its labels that count."""
        return _cross_entropy(out, batch["labels"])


class Trial(NamedTuple):
    """The results of the average of some models on examples.

    The linearity of the outputs (cross-task linearity) compares the average's logits, f(mean
    theta), with the mean of the models' logits, mean f(theta).

    Attributes:
      losses: The mean cross-entropy of each model, `[model]`; None without labels.
      average: The loss of the averaged model; None without labels.
      ensemble: The loss of the mean of the models' logits; None without labels.
      barrier: The largest rise of the loss above the interpolated losses of the models: on the line
        between two models, or at the mean of several; at least 0. None without labels.
      cosine: The cosine between the two logits; 1 if they are linear.
      coefficient: |f(mean theta)| times the cosine, divided by |mean f(theta)|; 1 if they are
        linear.
      gap: The root mean square of the difference of the two logits, divided by the second's.
    """

    losses: Float[np.ndarray, "model"] | None
    average: float | None
    ensemble: float | None
    barrier: float | None
    cosine: float
    coefficient: float
    gap: float


def read_examples(path: str | PathLike[str]) -> Examples:
    """Reads examples from an .npz file, without pickles.

    Args:
      path: The file, of at most 256 MiB. It contains the arrays "tokens" or "inputs", and
        optionally "labels". For CLIP it contains "inputs", which are images, and "tokens", one row
        per class name.

    Returns:
      The examples.

    Raises:
      CheckpointError: If the file cannot be read, is too large, contains other arrays, or arrays of
        other shapes and types; if there are fewer than two examples, or inputs that are not finite.
    """
    arrays = read_arrays(path)
    names = [n for n in ("inputs", "tokens") if n in arrays]
    # Images have four axes. With images, "tokens" are the names of their classes, for CLIP;
    # otherwise there is only one of the two arrays.
    with_texts = len(names) == 2 and arrays["inputs"].ndim == 4
    if len(names) - with_texts != 1 or arrays.keys() - {"tokens", "inputs", "labels"}:
        raise CheckpointError(
            f"{path}: expected 'tokens' or 'inputs', and 'labels' if there are any; found "
            f"{', '.join(sorted(arrays)) or 'nothing'}"
        )
    inputs, labels = arrays[names[0]], arrays.get("labels")
    texts = arrays["tokens"] if with_texts else None
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
        and labels.ndim in (1, 2)
        and len(labels) == len(inputs)
    ):
        raise CheckpointError(
            f"{path}: 'labels': expected integers [n] or [n, time] for inputs "
            f"{list(inputs.shape)}, got {labels.dtype}{list(labels.shape)}"
        )
    if texts is not None and not (np.issubdtype(texts.dtype, np.integer) and texts.ndim == 2):
        raise CheckpointError(
            f"{path}: 'tokens': expected integers [class, time] with images, got {texts.dtype}"
            f"{list(texts.shape)}"
        )
    return Examples(inputs, labels, texts)


def read_arrays(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without pickles.

    Args:
      path: The file, of at most 256 MiB.

    Returns:
      The arrays by name.

    Raises:
      CheckpointError: If the file cannot be read, is too large, or is not an .npz.
    """
    path = Path(path)
    with reading(path), open_checkpoint(path) as opened:
        total = sum(map(bytes_of, opened.tensors.values()))
        if path.suffix != ".npz" or total > MOST:
            raise CheckpointError(f"{path}: expected an .npz of at most {MOST >> 20} MiB")
        return {name: read_whole(tensor) for name, tensor in opened.tensors.items()}


def in_float32(checkpoint: Checkpoint) -> dict[str, Array]:
    """Reads all tensors of an open checkpoint.

    Args:
      checkpoint: The checkpoint.

    Returns:
      The tensors by name, floating ones in float32.
    """
    tensors = {name: jnp.asarray(read_whole(x)) for name, x in checkpoint.tensors.items()}
    return {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in tensors.items()
    }


def try_average(
    paths: Sequence[str | PathLike[str]],
    examples: Examples,
    config: Mapping[str, Any] | None = None,
    *,
    batch_size: int = 8,
    run: RunOptions = DEFAULTS,
) -> Trial:
    """Measures the losses of some models and of their average, and the linearity of their outputs.

    All models and their average are in memory, in float32.

    Args:
      paths: The checkpoints of the models.
      examples: The examples that they are run on.
      config: The configuration of the models; by default the first one's config.json.
      batch_size: How many examples are run at a time.
      run: Whether PyTorch's pickles are read, and models downloaded.

    Returns:
      The losses, and the linearity of the outputs.

    Raises:
      CheckpointError: If the configuration is missing, no forward pass of its architecture is
        known, or the models cannot be run on these examples.
      ValueError: If the architecture is unknown.

    References:
      Zhou et al., On the Emergence of Cross-Task Linearity, 2024 (arXiv 2402.03660), eq. 1, for the
      linearity of outputs.
    """
    ready = running(paths, examples, config, run=run)
    models, data = ready.models, ready.data

    def outputs(params: Params, batch: Params) -> Array:
        return ready.network(params, batch)[0]

    try:
        linear = probe.k_model_linearity(outputs, models, data, batch_size=batch_size)
        trial = Trial(
            None, None, None, None, float(linear.cosine.value[-1, 0]),
            float(linear.coefficient.value[-1, 0]), float(linear.gap[-1, 0]),
        )  # fmt: skip
        if "labels" not in data:
            return trial
        averaged = probe.averaging(outputs, models, data, ready.loss, batch_size=batch_size)
        loss = lambda params, batch: ready.loss(outputs(params, batch), batch).mean()  # noqa: E731
        # Two models have a line between them; for several, only the mean is measured.
        points = np.full((1, len(models)), 1 / len(models))
        if len(models) == 2:
            # The ends are omitted, because `simplex_barrier` also measures the models themselves.
            points = np.stack([a := np.linspace(0.1, 0.9, 9), 1 - a], -1)
        hump = probe.simplex_barrier(loss, models, data, points, batch_size=batch_size)
    except (TypeError, LookupError, ValueError) as error:
        raise unfit(paths[0], error) from error
    return trial._replace(
        losses=np.asarray(averaged.members.value),
        average=float(averaged.average.value[0]),
        ensemble=float(averaged.ensemble.value[0]),
        barrier=float(hump.height),
    )


def running(
    paths: Sequence[str | PathLike[str]],
    examples: Examples,
    config: Mapping[str, Any] | None = None,
    *,
    run: RunOptions = DEFAULTS,
) -> Running:
    """Loads models, and makes the network that runs them on examples.

    T5 is run on the tokens, and decodes the labels, each from the previous ones.

    Args:
      paths: The checkpoints of the models.
      examples: The examples.
      config: The configuration of the models; by default the first one's config.json.
      run: Whether PyTorch's pickles are read, and models downloaded.

    Returns:
      The models and the network.

    Raises:
      CheckpointError: If the configuration is missing, no forward pass of its architecture is
        known, or the first model cannot be run on these examples.
      ValueError: If the architecture is unknown.
    """
    models, settings = _load(paths, config, run)
    family = architectures.of(settings)
    if family.logits is None:
        raise CheckpointError(
            f"{paths[0]}: no forward pass of the architecture {family.name!r} is known; leave out "
            "the data"
        )
    logits, labels = family.logits, examples.labels
    _check_tokens(examples, settings)
    if labels is None and family.causal and examples.inputs.ndim == 2:
        # A causal model predicts the next token. The last position has no next token, and its label
        # -100 is ignored.
        labels = np.pad(examples.inputs[:, 1:].astype(int), ((0, 0), (0, 1)), constant_values=-100)
    data = {"inputs": jnp.asarray(examples.inputs)}
    data |= {} if labels is None else {"labels": jnp.asarray(labels)}
    inputs = _inputs(paths[0], family, settings, examples)

    def network(
        params: Params, batch: Params, override: Params | None = None
    ) -> tuple[Array, dict[str, Array]]:
        seen: dict[str, Array] = {}

        def see(name: str, x: Array) -> Array:
            if name.startswith("text_model."):
                # The text tower runs on the names of the classes, so its features do not belong to
                # the examples.
                return x
            seen[name] = x = override[name] if override and name in override else x
            return x

        return logits(params, settings, inputs(batch), see), seen

    try:
        # Shapes show whether the examples are valid, before anything is compiled or run.
        shape = jax.eval_shape(network, models[0], data)[0].shape
        if labels is not None and labels.shape != shape[:-1]:
            raise ValueError(f"labels {list(labels.shape)} do not fit outputs {list(shape)}")
        if labels is not None and labels.max() >= shape[-1]:
            raise ValueError(f"label {labels.max()} is beyond {shape[-1]} outputs")
    except (TypeError, LookupError, ValueError) as error:
        raise unfit(paths[0], error) from error
    return Running(family, models, network, data)


def _inputs(
    path: str | PathLike[str],
    family: architectures.Architecture,
    config: Mapping[str, Any],
    examples: Examples,
) -> Callable[[Any], Any]:
    """Returns the inputs of an architecture's forward pass, from a batch."""
    if family.name == "clip":
        texts = examples.texts
        if texts is None:
            raise CheckpointError(
                f"{path}: CLIP needs 'inputs', images [n, channel, y, x], and 'tokens', the "
                "names of the classes [class, time]; one of them is missing"
            )
        return lambda batch: (jnp.asarray(texts), batch["inputs"])
    if examples.texts is not None:
        raise CheckpointError(
            f"{path}: 'tokens' together with 'inputs' are for CLIP; this is {family.name!r}"
        )
    if family.name != "t5":
        return lambda batch: batch["inputs"]
    if examples.labels is None or examples.labels.ndim != 2:
        raise CheckpointError(f"{path}: T5 needs 'tokens' and 'labels', both [n, time]")
    pad = config.get("pad_token_id") or 0
    first = config.get("decoder_start_token_id")
    first = pad if first is None else first

    def shifted(batch: Params) -> tuple[Array, Array]:
        # The decoder sees the label before the predicted one, and the start token before the first.
        before = jnp.pad(batch["labels"][:, :-1], ((0, 0), (1, 0)), constant_values=first)
        return batch["inputs"], jnp.where(before < 0, pad, before)

    return shifted


def unfit(path: str | PathLike[str], error: Exception) -> CheckpointError:
    """Makes the error for examples that are invalid for a model."""
    said = " ".join(str(error).split())
    return CheckpointError(f"these examples cannot be run through {path}: {said}")


def _load(
    paths: Sequence[str | PathLike[str]],
    config: Mapping[str, Any] | None,
    run: RunOptions,
) -> tuple[list[dict[str, Array]], Mapping[str, Any]]:
    """Returns all models in memory, floating tensors in float32, and their configuration."""
    models = []
    check_there(paths, offline=run.offline)
    for path in paths:
        with open_values(path, allow_pickle=run.allow_pickle, offline=run.offline) as opened:
            config = config_of(opened.extras) if config is None else config
            models.append(in_float32(opened))
    if not config:
        raise CheckpointError(
            f"{paths[0]} cannot be run without a config.json; give {argument('config', '...')}"
        )
    return models, config


def _check_tokens(examples: Examples, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for tokens beyond the vocabulary.

    JAX clips indices that are out of range, so the loss would be wrong without an error.
    """
    of_text = config if examples.texts is None else config.get("text_config") or {}
    rows, tokens = of_text.get("vocab_size"), examples.inputs
    tokens = tokens if examples.texts is None else examples.texts
    if np.issubdtype(tokens.dtype, np.integer) and isinstance(rows, int):
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= rows:
            raise CheckpointError(f"tokens: expected 0 to {rows - 1}, got {low} to {high}")


def _cross_entropy(logits: Array, labels: ArrayLike) -> Float[Array, "example"]:
    """Returns the cross-entropy of each example: the mean over its labels that count."""
    y = jnp.asarray(labels)
    counts = y >= 0
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    # An ignored label may be -100, which would index from the end; its entry is multiplied by 0
    # below.
    log_probs = jnp.take_along_axis(logs, jnp.where(counts, y, 0)[..., None], -1)[..., 0]
    axes = tuple(range(1, y.ndim))
    return -jnp.sum(log_probs * counts, axes) / jnp.maximum(counts.sum(axes), 1)
