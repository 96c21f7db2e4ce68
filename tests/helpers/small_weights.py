"""Weights by name, and inputs for small networks, which are the same in every program."""

import zlib

import numpy as np

TOKENS = np.array([[3, 5, 0, 7, 7, 2, 11, 16], [4, 1, 9, 16, 2, 8, 13, 6]])
IMAGES = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def weights(name, shape):
    """Draws the weights of a tensor by its name; norm scales are around one."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2:
        norm = "norm" in name.lower() or "ln_" in name or "layrnorm" in name
        return np.asarray(x * 0.2 + norm, np.float32)
    return np.asarray(x * 0.4, np.float32)
