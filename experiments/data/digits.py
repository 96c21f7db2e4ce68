"""scikit-learn's bundled handwritten digits, which are part of every installation.

References:
  Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998.
"""

import importlib.util
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from experiments.data.files import DataSet, Source

NAME = "digits"
EXAMPLES = 1797
SIDE = 8  # pixels of an image
IMAGES = {NAME: DataSet(Source("scikit-learn's digits", "scikit-learn", "itself"), 10)}
# Each image is its own latent.
LATENTS = {NAME: IMAGES[NAME]._replace(count=None)}


def load() -> tuple[Float[np.ndarray, "1797 8 8 1"], Int[np.ndarray, " 1797"]]:
    """Loads all 1797 images of handwritten digits and their labels.

    Returns:
      The images, float32 `(1797, 8, 8, 1)` with pixels in [0, 1], and the labels 0 to 9, int32
      `(1797,)`.

    >>> images, labels = load()
    >>> images.shape, labels[:4].tolist()
    ((1797, 8, 8, 1), [0, 1, 2, 3])
    """
    rows = _rows()
    images = rows[:, :-1].astype(np.float32).reshape(-1, SIDE, SIDE, 1) / 16
    return images, rows[:, -1].astype(np.int32)


def _rows() -> np.ndarray:
    """Reads the pixels of each image, 0 to 16, and its label, `(1797, 65)`."""
    package = importlib.util.find_spec("sklearn")
    # The file itself is read, because importing scikit-learn takes longer than most uses of the
    # data.
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # wherever this version keeps it

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
