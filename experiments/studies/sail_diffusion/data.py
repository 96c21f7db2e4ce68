"""What `sail_diffusion` learns from: images or their latents, and what an encoder makes of them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.data.latents import Latents
from experiments.models import presets
from experiments.studies.sail_diffusion.config import Config

Batch = dict[str, np.ndarray]
"""What a network sees: `x` [n, side, side, channel], `labels` [n], `features` [n, patch, d]."""


class Split(NamedTuple):
    """Examples to learn from, and those that samples are compared with."""

    learn: Int[np.ndarray, " n"]
    held_out: Int[np.ndarray, " m"]


def load(config: Config) -> Latents:
    """The digits, or latents of files, with an encoder's features of them if there are any.

    `DataError` or `ValueError` names a file that is missing or damaged, or what does not fit.
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
    """The images of `index`, in float32; `features` only where there are any."""
    x = np.asarray(images.latents[index], np.float32).transpose(0, 2, 3, 1)
    fields = {"x": images.scale * x + np.float32(images.bias), "labels": images.labels[index]}
    if images.features is not None:
        fields["features"] = np.asarray(images.features[index], np.float32)
    return fields


def split(seed: int, replicate: int, n: int, held_out: int) -> Split:
    """A shuffle of its own for every replicate."""
    order = np.random.default_rng([seed, replicate]).permutation(n)
    return Split(np.sort(order[held_out:]), np.sort(order[:held_out]))


def draw(index: Int[np.ndarray, " n"], seed: tuple[int, ...], step: int, size: int) -> np.ndarray:
    """The examples of one step, with replacement."""
    return index[np.random.default_rng([*seed, step]).integers(len(index), size=size)]
