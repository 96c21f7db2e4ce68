"""Measures the quality of samples in a classifier's features, as in SAIL's Table 4.

The classifier is trained on the data at hand and replaces Inception. Values can therefore only be
compared within one run, unless a function of the user measures images (`measured`).
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from experiments.measures import frechet
from experiments.models.resnet import ResNet
from experiments.studies.sail_diffusion.functions import Functions, called, finite, shaped
from experiments.studies.sail_diffusion.networks import captured

SPATIAL = 7  # channels; their values at every position are sFID's features (Nash et al. 2021)
NEIGHBOURS = 3  # the distance of this neighbour is a point's radius (Kynkäänniemi et al. 2019)
POINTS = 10_000  # of each sample, for precision and recall
MEASURES = {
    "fd": "Fréchet distance",
    "sfd": "spatial Fréchet distance",
    "inception": "inception score",
    "precision": "precision",
    "recall": "recall",
}


class Seen(NamedTuple):
    """The results of the measuring classifier, or of a function of the user, for n images.

    Attributes:
      pooled: The features of its last block, averaged over positions.
      spatial: The first `SPATIAL` channels of the same features at every position, flattened.
      log_probabilities: The log of the predicted class probabilities, natural.
    """

    pooled: Float[np.ndarray, "n d"]
    spatial: Float[np.ndarray, "n s"]
    log_probabilities: Float[np.ndarray, "n classes"]


@partial(jax.jit, static_argnames="net")
def look(net: ResNet, variables: PyTree, x: Float[Array, "n side side channel"]) -> Seen:
    """Evaluates the measuring classifier on images.

    - `net`: the ResNet (static under jit).
    """
    # The classifier's head reads the output of the last block, averaged over positions.
    *_, last = net.places()
    logits, places = captured(net, variables, last, x)
    spatial = places[..., :SPATIAL].reshape(len(x), -1)
    return Seen(places.mean((1, 2)), spatial, nn.log_softmax(logits))  # type: ignore[arg-type]


def measured(given: Functions, images: np.ndarray) -> Seen:
    """Evaluates the user's network that measures images.

    - `images`: the images `(n, height, width, channel)`.
    """
    assert given.measure is not None
    found = called("measure", given.measure, images)
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise ValueError(
            "functions.measure must return a tuple of features, spatial features and logits; got "
            f"{type(found).__name__}"
        )
    pooled, spatial, logits = (jnp.asarray(x) for x in found)
    for array, axis in ((pooled, "d"), (spatial, "s"), (logits, "class")):
        shaped("measure", array, (len(images), axis))
    finite("measure", images, *found)
    return Seen(pooled, spatial, jax.nn.log_softmax(logits.astype(jnp.float32)))  # type: ignore[arg-type]


class Reference(NamedTuple):
    """Statistics of real images for comparison with samples.

    Attributes:
      pooled: The normal distribution fitted to the pooled features.
      spatial: The normal distribution fitted to the spatial features.
      points: The pooled features of the first `POINTS` images.
      radii: For each point, the distance to its `NEIGHBOURS`-th nearest other point.
    """

    pooled: frechet.Normal
    spatial: frechet.Normal
    points: Float[np.ndarray, "n d"]
    radii: Float[np.ndarray, " n"]


def reference(real: Seen) -> Reference:
    """Computes the statistics of real images.

    - `real`: the classifier's results for at least two images.

    It raises `ValueError` if there are fewer than two images or a feature is not finite.
    """
    points = real.pooled[:POINTS]
    pooled, spatial = frechet.fit(real.pooled), frechet.fit(real.spatial)
    return Reference(pooled, spatial, points, _radii(points))


def scores(seen: Seen, real: Reference) -> dict[str, float]:
    """Computes every measure of `MEASURES` for a sample.

    Precision is the fraction of samples within the radius of a real image. Recall is the same with
    samples and real images exchanged.

    - `seen`: the classifier's results for the samples, at least two.

    It returns the measures by name. Lower is better for `fd` and `sfd` (squared Fréchet distances),
    higher for the others.

    It raises `ValueError` if there are fewer than two samples or a feature is not finite.

    References:
      Heusel et al. 2017 (Fréchet distance); Nash et al. 2021 (its spatial form); Salimans et al.
      2016 (inception score); Kynkäänniemi et al. 2019 (precision and recall).
    """
    points = seen.pooled[:POINTS]
    return {
        "fd": frechet.distance(frechet.fit(seen.pooled), real.pooled),
        "sfd": frechet.distance(frechet.fit(seen.spatial), real.spatial),
        "inception": inception_score(seen.log_probabilities),
        "precision": _covered(points, real.points, real.radii),
        "recall": _covered(real.points, points, _radii(points)),
    }


def inception_score(log_probabilities: Float[np.ndarray, "n classes"]) -> float:
    """Computes the inception score of predicted class probabilities.

        exp(mean over examples of KL(p(y | x) || mean p(y)))

    It ranges from 1, if all predictions are equal, to the number of classes.

    References:
      Salimans et al., Improved Techniques for Training GANs, 2016.

    >>> round(inception_score(np.log(np.eye(4) * 0.997 + 0.001)), 1)
    3.9
    """
    log_probabilities = np.asarray(log_probabilities, np.float64)
    p = np.exp(log_probabilities)
    return float(np.exp(np.sum(p * (log_probabilities - np.log(p.mean(0))), axis=1).mean()))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns Euclidean distances between all pairs of rows, (len(a), len(b)), in float64."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    squares = np.sum(a**2, 1)[:, None] + np.sum(b**2, 1) - 2 * a @ b.T
    # The square of a small distance can be negative due to rounding.
    return np.sqrt(np.maximum(squares, 0))


def _chunks(points: np.ndarray) -> list[np.ndarray]:
    """Splits the points into parts of at most 1000, which keeps matrices of distances small."""
    return np.array_split(points, -(-len(points) // 1000))


def _radii(points: np.ndarray) -> np.ndarray:
    """Returns each point's distance to its `NEIGHBOURS`-th nearest other, or the farthest of
    few."""
    rank = min(NEIGHBOURS, len(points) - 1)  # each point is its own nearest
    nearest = [np.partition(_distances(chunk, points), rank)[:, rank] for chunk in _chunks(points)]
    return np.concatenate(nearest)


def _covered(points: np.ndarray, centres: np.ndarray, radii: np.ndarray) -> float:
    """Returns the fraction of points within the radius of at least one centre."""
    inside = [(_distances(chunk, centres) <= radii).any(1) for chunk in _chunks(points)]
    return float(np.concatenate(inside).mean())
