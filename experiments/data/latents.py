"""Images as latents of an autoencoder, the training data of diffusion transformers such as SiT.

Latents and their labels are two .npy files or one .npz file; features of the same images, for REPA,
are a further .npy file. Images that are not encoded yet are in one folder for each class.

References:
  Ma et al., SiT, 2024 (arXiv 2401.08740). Yu et al., REPA, 2024 (arXiv 2410.06940).
"""

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from experiments.data import image_folders
from experiments.data.files import (
    MAX_BYTES,
    DataError,
    DataSet,
    Source,
    checked_labels,
    inside,
    missing,
    open_npy,
    reading,
)
from experiments.data.image_folders import Pictures
from sail_jax.checkpoint.formats.files import File
from sail_jax.checkpoint.formats.npz_files import read_file

SOURCE = Source(
    "the latents of ImageNet's images under an autoencoder such as Stable Diffusion's",
    "no single publisher: ImageNet is at image-net.org, its encoding is described by SiT and REPA",
    "scikit-learn's digits (experiments.data.digits)",
)
FEATURES = Source(
    "the features of every patch of every image under a frozen encoder such as DINOv2",
    "no single publisher: REPA (Yu et al. 2024) describes how to compute them",
    "features of a classifier trained here, without data.features",
)
_PICTURES = Source(
    "a folder of images for each class, such as ImageNet's",
    "image-net.org",
    "scikit-learn's digits (experiments.data.digits)",
)
FOLDERS = "image-folders"
LATENTS = {
    "latents": DataSet(
        SOURCE,
        files="latents [n, channel, side, side] and labels [n], each a .npy or both in one .npz; "
        "features [n, patch, d], a .npy",
    ),
    FOLDERS: DataSet(
        _PICTURES,
        files="a folder for each class, with .jpeg or .png files; a function encodes them",
    ),
}
SCALE = 0.18215  # Table 3 of SAIL: the model's input is SCALE * latent
# The number of entries checked at once.
CHUNK = 1 << 24


class Latents(NamedTuple):
    """Latents of images in their stored form, and their labels.

    The model's input is `scale * latent + bias`.

    Attributes:
      latents: The latents `(n, channel, height, width)`, in float16, bfloat16, float32 or float64;
        or images that are not encoded yet.
      labels: The class of each image, int32 `(n,)`.
      scale: The factor on latents.
      bias: The term added after that.
      features: A frozen encoder's features of the same images `(n, patch, d)`; None without
        features.
    """

    latents: Float[np.ndarray, "n channel height width"] | Pictures
    labels: Int32[np.ndarray, " n"]
    scale: float = SCALE
    bias: float = 0.0
    features: Float[np.ndarray, "n patch d"] | None = None


def load(path: str | Path, labels: str | Path | None = None, *, classes: int = 1000) -> Latents:
    """Loads latents and their labels.

    Args:
      path: A .npy file of latents, which remain on disk, or a .npz file with `latents` and
        `labels`.
      labels: A .npy file of labels; None for `labels.npy` in the folder of the latents. It must be
        None for a .npz file, which contains its own labels.
      classes: The number of classes.

    Returns:
      The latents and their labels, without features. `scale` and `bias` have their defaults.

    Raises:
      ValueError: If `labels` is given with a .npz file.
      DataError: If something is missing, truncated, swapped, mislabelled, or not finite. The
        message contains the file. It is a `ValueError`.
    """
    path = Path(path)
    if path.suffix == ".npz":
        if labels is not None:
            raise ValueError(f"labels: {path} holds its own; got {labels}")
        where, archive = path, _archive(path)
        latents, classes_of = archive["latents"], archive["labels"]
    else:
        where = inside(path.parent, "labels.npy") if labels is None else Path(labels)
        latents, classes_of = open_npy(path, SOURCE), open_npy(where, SOURCE)
    kinds = ("float16", "bfloat16", "float32", "float64")
    if latents.ndim != 4 or latents.dtype.name not in kinds:
        raise DataError(
            f"{path} holds {latents.dtype}{list(latents.shape)} where latents [n, channel, height, "
            "width] of real numbers are expected: are the files of latents and labels swapped?"
        )
    checked = checked_labels(np.asarray(classes_of), classes, where, len(latents))
    # In chunks, because the latents may be larger than memory.
    per_chunk = max(1, CHUNK // math.prod(latents.shape[1:]))
    for start in range(0, len(latents), per_chunk):
        finite = np.isfinite(latents[start : start + per_chunk]).all((1, 2, 3))
        if not finite.all():
            raise DataError(
                f"{path} is damaged: latent {start + int(np.argmin(finite))} is not finite"
            )
    return Latents(latents, checked)


def load_images(folder: str | Path, side: int, *, classes: int) -> Latents:
    """Lists images in one folder for each class, without decoding them.

    Args:
      folder: The folder with the classes' folders, as `image_folders.listed` reads it.
      side: Height and width in pixels. The central square of each image is resized to them.
      classes: The maximum number of classes.

    Returns:
      The images in place of latents, and their labels.

    Raises:
      DataError: If a folder is missing or empty, or there are more classes.
    """
    listing = image_folders.listed(folder, _PICTURES)
    if len(listing.names) > classes:
        raise DataError(f"{folder} has {len(listing.names)} classes; expected at most {classes}")
    return Latents(Pictures(listing, side), listing.labels)


def features(path: str | Path, images: int) -> Float[np.ndarray, "n patch d"]:
    """Maps an encoder's features of images into memory.

    Args:
      path: A .npy file of real numbers `(n, patch, d)`, in the order of the latents.
      images: The required number of images.

    Returns:
      The features `(n, patch, d)`, which stay on disk.

    Raises:
      DataError: If the file is missing or damaged, or has a wrong number of axes or images.
    """
    array = open_npy(Path(path), FEATURES)
    if array.ndim != 3 or array.dtype.kind != "f" or len(array) != images:
        raise DataError(
            f"{path} holds {array.dtype}{list(array.shape)} where features [{images}, patch, d] of "
            "real numbers are expected, image by image as the latents"
        )
    return array


def _archive(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays `latents` and `labels` of a .npz file into memory."""
    if not path.exists():
        raise missing(path, SOURCE)
    out = {}
    with reading(path), contextlib.closing(File(path)) as file:
        tensors, _ = read_file(file)
        for name in ("latents", "labels"):
            if name not in tensors:
                held = repr(", ".join(sorted(tensors))[:99])
                raise DataError(f"{path} holds no '{name}'; it holds {held}")
            tensor = tensors[name]
            size = math.prod(tensor.shape)
            if not 0 < size * tensor.dtype.itemsize <= MAX_BYTES:
                raise DataError(
                    f"{path}: '{name}' is {tensor.dtype}{list(tensor.shape)}, which is empty or "
                    f"more than {MAX_BYTES} bytes"
                )
            flat = np.empty(size, tensor.dtype)
            tensor.read(flat)
            out[name] = flat.reshape(tensor.shape)
    return out
