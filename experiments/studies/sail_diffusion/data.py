"""The data of `sail_diffusion`: images or their latents, and an encoder's features of them.

`experiments.data` reads them; this module checks that they fit the model, splits them and makes
batches.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.data.latents import Latents
from experiments.models import presets
from experiments.studies.sail_diffusion.config import Config

Batch = dict[str, np.ndarray]
"""What a network sees: `x` [n, side, side, channel], `labels` [n], `features` [n, patch, d]."""


class Split(NamedTuple):
    """Disjoint sets of examples, as sorted indices into the data.

    Attributes:
      learn: The examples to learn from, of shape (n,).
      held_out: The examples that samples are compared with, of shape (m,).
    """

    learn: Int[np.ndarray, " n"]
    held_out: Int[np.ndarray, " m"]


def load(config: Config) -> Latents:
    """Reads the data of a config and checks that they fit its model.

    Args:
      config: The config; its `data` names the digits or files of latents.

    Returns:
      The latents with their labels, and with an encoder's features if the config names a file of
      them.

    Raises:
      DataError: If a file is missing or damaged (a `ValueError` too).
      ValueError: If latents or features do not have the model's shape, or if there are fewer images
        than `held_out` and `samples` together.
    """
    sizes = presets.config(config.model)
    images = config.data.read(sizes["classes"])
    shape, held = (sizes["channels"], sizes["side"], sizes["side"]), images.latents.shape[1:]
    if held != shape:
        raise ValueError(
            f"model: {config.model} takes {list(shape)}, {config.data.file or config.data.name} "
            f"holds {list(held)}"
        )
    patches = (sizes["side"] // sizes["patch"]) ** 2
    if images.features is not None and images.features.shape[1] != patches:
        raise ValueError(
            f"data.features: {config.model} has {patches} patches, {config.data.features} "
            f"{images.features.shape[1]}"
        )
    if config.held_out + config.samples > len(images.labels):
        raise ValueError(
            f"held_out, samples: {config.held_out} and {config.samples} of the "
            f"{len(images.labels)} images"
        )
    return images


def batch(images: Latents, index: Int[np.ndarray, " b"]) -> Batch:
    """Gathers some images as the networks take them.

    Args:
      images: The data.
      index: Which images, of shape (b,).

    Returns:
      `x`, float32 of shape (b, side, side, channel), which is scale * latent + bias; `labels`, of
      shape (b,); and `features`, float32 of shape (b, patch, d), if the data have any.
    """
    x = np.asarray(images.latents[index], np.float32).transpose(0, 2, 3, 1)
    fields = {"x": images.scale * x + np.float32(images.bias), "labels": images.labels[index]}
    if images.features is not None:
        fields["features"] = np.asarray(images.features[index], np.float32)
    return fields


def split(seed: int, replicate: int, n: int, held_out: int) -> Split:
    """Splits the examples at random into those to learn from and those held out.

    Args:
      seed: The seed of the run.
      replicate: The number of the repetition; each has a split of its own.
      n: The number of examples.
      held_out: How many of them are held out.

    Returns:
      The split: n - `held_out` examples to learn from, and the others.
    """
    order = np.random.default_rng([seed, replicate]).permutation(n)
    return Split(np.sort(order[held_out:]), np.sort(order[:held_out]))


def draw(index: Int[np.ndarray, " n"], seed: tuple[int, ...], step: int, size: int) -> np.ndarray:
    """Draws the examples of one training step, with replacement.

    Args:
      index: The examples to draw from, of shape (n,).
      seed: The seed of the training: numbers that tell it from others.
      step: The number of the step. Equal seeds and steps give equal examples, so that a resumed
        training sees what it would have seen.
      size: The number of examples.

    Returns:
      Entries of `index`, of shape (size,).
    """
    return index[np.random.default_rng([*seed, step]).integers(len(index), size=size)]
