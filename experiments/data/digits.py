"""scikit-learn's bundled handwritten digits (Alpaydin and Kaynak, 1998)."""

import numpy as np
from jaxtyping import Float, Int

EXAMPLES = 1797
SIDE = 8  # pixels of an image


def load() -> tuple[Float[np.ndarray, "1797 8 8 1"], Int[np.ndarray, " 1797"]]:
    """All images, pixels in [0, 1], and their labels."""
    from sklearn.datasets import load_digits  # slow to import

    pixels, target = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, SIDE, SIDE, 1) / 16
    return images, np.asarray(target, np.int32)
