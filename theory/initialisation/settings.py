"""Tasks, constants and helpers that the claims of this package share."""

from functools import partial

import numpy as np

from theory import claims

# Page numbers in sources refer to the review copy, which has 54 numbered lines on each page.
PAPER = "sail"
claim = partial(claims.claim, PAPER)

# Tasks with classes +-m, with two models' m and the target's one to two units apart.
MEANS = np.array([[0.9, 0.1, -0.4], [-0.8, 0.6, 0.9]])
TARGET = np.array([0.4, 0.9, 0.3])
