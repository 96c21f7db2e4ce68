"""scikit-learn's bundled handwritten digits, which every installation has.

References:
  Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998.
"""

import numpy as np
from jaxtyping import Float, Int

EXAMPLES = 1797
SIDE = 8  # pixels of an image


def load() -> tuple[Float[np.ndarray, "1797 8 8 1"], Int[np.ndarray, " 1797"]]:
    """Loads all 1797 images of handwritten digits and their labels.

    Returns:
      The images, float32 `(1797, 8, 8, 1)` with pixels in [0, 1], and the labels 0 to 9, int32
      `(1797,)`.

    >>> images, labels = load()
    >>> images.shape, labels[:4].tolist()
    ((1797, 8, 8, 1), [0, 1, 2, 3])
    """
    from sklearn.datasets import load_digits  # slow to import

    pixels, target = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, SIDE, SIDE, 1) / 16
    return images, np.asarray(target, np.int32)
