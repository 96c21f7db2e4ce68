"""Tasks, constants and helpers that the claims of this package share."""

from functools import partial

import numpy as np

from theory import claims

# Page numbers in sources refer to the review copy, with 54 numbered lines per page.
PAPER = "sail"
claim = partial(claims.claim, PAPER)

# Tasks with classes +-m, in which the m of two models and of the target are one to two units apart.
MEANS = np.array([[0.9, 0.1, -0.4], [-0.8, 0.6, 0.9]])
TARGET = np.array([0.4, 0.9, 0.3])
