"""What `sail_diffusion` learns from: images or their latents, and what an encoder makes of them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32

from experiments.data import digits, latents
from experiments.data.files import DataError, Source, open_npy

FEATURES = Source(
    "the features of every patch of every image under a frozen encoder such as DINOv2",
    "no one place: REPA (Yu et al. 2024) describes how to compute them",
    "those of a classifier trained here, with --data left out too",
)
Batch = dict[str, np.ndarray]
"""What a network sees: `x` [n, side, side, channel], `labels` [n], `features` [n, patch, d]."""


class Images(NamedTuple):
    """Images or latents as stored, of which a network sees scale * stored + bias."""

    stored: Float[np.ndarray, "n channel side side"]
    labels: Int32[np.ndarray, " n"]
    scale: float
    bias: float
    features: Float[np.ndarray, "n patch d"] | None = None

    def batch(self, index: Int[np.ndarray, " b"]) -> Batch:
        """Those of `index`, in float32; `features` only where there are any."""
        x = np.asarray(self.stored[index], np.float32).transpose(0, 2, 3, 1)
        found = {"x": self.scale * x + np.float32(self.bias), "labels": self.labels[index]}
        if self.features is not None:
            found["features"] = np.asarray(self.features[index], np.float32)
        return found


class Split(NamedTuple):
    """Examples to learn from, and those that samples are compared with."""

    learn: Int[np.ndarray, " n"]
    held_out: Int[np.ndarray, " m"]


def load(
    data: str | None, labels: str | None, features: str | None, sizes: dict[str, Any]
) -> Images:
    """The digits, or latents by path with an encoder's features of them, for a SiT of `sizes`.

    `DataError` or `ValueError` names a file that is missing or damaged, or what does not fit.
    """
    side, channels, classes = (sizes[name] for name in ("side", "channels", "classes"))
    if data is None:
        for name, path in (("labels", labels), ("features", features)):
            if path is not None:
                raise ValueError(f"{name}: the digits have their own; got {path} without data")
        task = digits.load()
        pixels = np.asarray(task.images).reshape(-1, 1, digits.SIDE, digits.SIDE)
        images = Images(pixels, np.asarray(task.labels), 2.0, -1.0)
        told = "the digits"
        if classes != 10:
            raise ValueError(f"model: the digits have 10 classes, the network {classes}")
    else:
        images = Images(*latents.load(data, labels, classes=classes), latents.SCALE, 0.0)
        told = data
    if images.stored.shape[1:] != (channels, side, side):
        raise ValueError(
            f"model: it takes [{channels}, {side}, {side}], {told} holds "
            f"{list(images.stored.shape[1:])}"
        )
    return images if features is None else images._replace(features=_features(features, images))


def _features(path: str, images: Images) -> np.ndarray:
    found = open_npy(Path(path), FEATURES)
    if found.ndim != 3 or found.dtype.kind != "f" or len(found) != len(images.labels):
        raise DataError(
            f"{path} holds {found.dtype}{list(found.shape)} where features [{len(images.labels)}, "
            "patch, d] of real numbers are expected, image by image as the latents"
        )
    return found


def split(seed: int, replicate: int, n: int, held_out: int) -> Split:
    """A shuffle of its own for every replicate."""
    order = np.random.default_rng([seed, replicate]).permutation(n)
    return Split(np.sort(order[held_out:]), np.sort(order[:held_out]))


def draw(index: Int[np.ndarray, " n"], seed: tuple[int, ...], step: int, size: int) -> np.ndarray:
    """The examples of one step, with replacement."""
    return index[np.random.default_rng([*seed, step]).integers(len(index), size=size)]
