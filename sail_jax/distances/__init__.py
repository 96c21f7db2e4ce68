"""Distances between tasks: between samples, Gaussians and token streams.

- Exact for the given samples: `wasserstein1` and `dudley` (by matchings).
- Estimates for the distributions behind the samples, with a standard error (`Distance`): `mmd` and
  `energy` (squared Hilbert distances, in JAX), `sliced_wasserstein` (in JAX), `wasserstein` (one
  dimension, weights), `total_variation_histogram`, `total_variation_classifier`,
  `total_variation_tokens` and `jensen_shannon_tokens`.
- Closed forms: `total_variation_gaussian` and its inverse `gaussian_separation`.
"""

from sail_jax.distances.estimates import Distance
from sail_jax.distances.gaussian import gaussian_separation, total_variation_gaussian
from sail_jax.distances.kernels import energy, median_distance, mmd
from sail_jax.distances.matching import LARGEST, Dudley, dudley, wasserstein1
from sail_jax.distances.tokens import jensen_shannon_tokens, total_variation_tokens
from sail_jax.distances.transport import sliced_wasserstein, wasserstein
from sail_jax.distances.variation import total_variation_classifier, total_variation_histogram
from sail_jax.lazy import listed

__dir__ = listed(__name__)

__all__ = [
    "LARGEST",
    "Distance",
    "Dudley",
    "dudley",
    "energy",
    "gaussian_separation",
    "jensen_shannon_tokens",
    "median_distance",
    "mmd",
    "sliced_wasserstein",
    "total_variation_classifier",
    "total_variation_gaussian",
    "total_variation_histogram",
    "total_variation_tokens",
    "wasserstein",
    "wasserstein1",
]
