"""Tasks, constants and helpers that the claims of this package share."""

import numpy as np

PAPER = "sail"

# Tasks of classes +-m: two models' m and the target's, one to two units apart.
MEANS = np.array([[0.9, 0.1, -0.4], [-0.8, 0.6, 0.9]])
TARGET = np.array([0.4, 0.9, 0.3])
