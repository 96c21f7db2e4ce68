"""The data of `sail_diffusion`: images or their latents, and an encoder's features of them.

`experiments.data` reads them; this module checks that they match the model, splits them and makes
batches.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.data.image_folders import Pictures
from experiments.data.latents import Latents
from experiments.models import presets
from experiments.studies.sail_diffusion.config import Config
from experiments.studies.sail_diffusion.functions import Traced, decoded, shaped
from experiments.studies.sail_diffusion.quality import measured

Batch = dict[str, np.ndarray]
"""A network's batch: `x` [n, side, side, channel], `labels` [n], `features` [n, patch, d]. For
images that are not encoded yet, `x` is their bytes."""


class Split(NamedTuple):
    """Disjoint sets of examples, as sorted indices into the data.

    Attributes:
      learn: The training examples, of shape (n,).
      held_out: The examples to compare samples with, of shape (m,).
    """

    learn: Int[np.ndarray, " n"]
    held_out: Int[np.ndarray, " m"]


def load(config: Config) -> Latents:
    """Reads the data of a config and checks that they match its model.

    It returns the latents with their labels, and with an encoder's features if the config names a
    file of them.
    """
    sizes = presets.config(config.model)
    images = config.data.read(sizes["classes"])
    shape, held = (sizes["channels"], sizes["side"], sizes["side"]), images.latents.shape[1:]
    if not isinstance(images.latents, Pictures) and held != shape:
        raise ValueError(
            f"model: {config.model} takes {list(shape)}, {config.data.file or config.data.name} "
            f"holds {list(held)}"
        )
    patches = (sizes["side"] // sizes["patch"]) ** 2
    _check_functions(config, images, (*shape[1:], shape[0]), patches)
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


def _check_functions(config: Config, images: Latents, shape: tuple[int, ...], patches: int) -> None:
    """Checks that the functions exist, and that their results are valid, on two examples."""
    of, pictured = config.functions, isinstance(images.latents, Pictures)
    if pictured and of.encode is None:
        raise ValueError(
            f"functions.encode must be given for data.name {config.data.name}: a function of JAX "
            "that makes latents of images (MODULE:FUNCTION)"
        )
    traced = Traced(of)
    if of.encode is not None:
        shaped("encode", traced.shape("encode", (2, *images.latents.shape[1:])), (2, *shape))
    if of.features is not None:
        shaped("features", traced.shape("features", (2, *shape)), (2, patches, "d"))
    if of.measure is not None:
        two = np.asarray(images.latents[np.arange(2)], np.float32)
        if pictured and of.decode is not None:
            decoded(of, np.zeros((2, *shape), np.float32))
        measured(of, two / 255 if pictured else decoded(of, two.transpose(0, 2, 3, 1)))


def batch(images: Latents, index: Int[np.ndarray, " b"]) -> Batch:
    """Gathers some images in the form that the networks require.

    - `index`: indices of the images, of shape (b,).

    It returns `x`, float32 of shape (b, side, side, channel), which is scale * latent + bias, or
    the bytes of images that are not encoded yet; `labels`, of shape (b,); and `features`, float32
    of shape (b, patch, d), if the data have any.
    """
    if isinstance(images.latents, Pictures):
        return {"x": images.latents[index], "labels": images.labels[index]}
    x = np.asarray(images.latents[index], np.float32).transpose(0, 2, 3, 1)
    fields = {"x": images.scale * x + np.float32(images.bias), "labels": images.labels[index]}
    if images.features is not None:
        fields["features"] = np.asarray(images.features[index], np.float32)
    return fields


def split(seed: int, replicate: int, n: int, held_out: int) -> Split:
    """Splits the examples at random into training and held-out examples."""
    order = np.random.default_rng([seed, replicate]).permutation(n)
    return Split(np.sort(order[held_out:]), np.sort(order[:held_out]))


def draw(index: Int[np.ndarray, " n"], seed: tuple[int, ...], step: int, size: int) -> np.ndarray:
    """Draws the examples of one training step, with replacement."""
    return index[np.random.default_rng([*seed, step]).integers(len(index), size=size)]
