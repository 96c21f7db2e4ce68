"""How good samples are, in the features of a classifier: the measures of SAIL's Table 4.

The classifier is trained on the data at hand, in place of Inception: values are comparable within
one run only.
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from experiments.models.resnet import ResNet
from experiments.studies.sail_diffusion.networks import captured
from experiments.training import frechet

SPATIAL = 7  # channels whose values at every place make sFID's features (Nash et al. 2021)
NEIGHBOURS = 3  # whose distance is the radius around a point (Kynkäänniemi et al. 2019)
POINTS = 10_000  # of each sample, for precision and recall
MEASURES = {
    "fd": "Fréchet distance",
    "sfd": "spatial Fréchet distance",
    "inception": "inception score",
    "precision": "precision",
    "recall": "recall",
}


class Seen(NamedTuple):
    """What a classifier makes of images."""

    pooled: Float[np.ndarray, "n d"]
    """The last features, averaged over places."""
    spatial: Float[np.ndarray, "n s"]
    """Some channels of them, place by place."""
    log_probabilities: Float[np.ndarray, "n classes"]


@partial(jax.jit, static_argnames="net")
def look(net: ResNet, variables: PyTree, x: Float[Array, "n side side channel"]) -> Seen:
    """The features before the classifier's last layer, and its answers."""
    *_, last = net.places()
    logits, places = captured(net, variables, last, x)
    spatial = places[..., :SPATIAL].reshape(len(x), -1)
    return Seen(places.mean((1, 2)), spatial, nn.log_softmax(logits))  # type: ignore[arg-type]


class Reference(NamedTuple):
    """Real images, as samples are compared with them."""

    pooled: frechet.Normal
    spatial: frechet.Normal
    points: Float[np.ndarray, "n d"]
    radii: Float[np.ndarray, " n"]


def reference(real: Seen) -> Reference:
    points = real.pooled[:POINTS]
    pooled, spatial = frechet.fit(real.pooled), frechet.fit(real.spatial)
    return Reference(pooled, spatial, points, _radii(points))


def scores(seen: Seen, real: Reference) -> dict[str, float]:
    """Every measure of `MEASURES`."""
    points = seen.pooled[:POINTS]
    return {
        "fd": frechet.distance(frechet.fit(seen.pooled), real.pooled),
        "sfd": frechet.distance(frechet.fit(seen.spatial), real.spatial),
        "inception": inception_score(seen.log_probabilities),
        "precision": _covered(points, real.points, real.radii),
        "recall": _covered(real.points, points, _radii(points)),
    }


def inception_score(log_probabilities: Float[np.ndarray, "n classes"]) -> float:
    """exp of the mean divergence of answers from their mean (Salimans et al. 2016), 1 to classes.

    >>> round(inception_score(np.log(np.eye(4) * 0.997 + 0.001)), 1)
    3.9
    """
    log_probabilities = np.asarray(log_probabilities, np.float64)
    p = np.exp(log_probabilities)
    return float(np.exp(np.sum(p * (log_probabilities - np.log(p.mean(0))), axis=1).mean()))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    squares = np.sum(a**2, 1)[:, None] + np.sum(b**2, 1) - 2 * a @ b.T
    return np.sqrt(np.maximum(squares, 0))


def _chunks(points: np.ndarray) -> list[np.ndarray]:
    return np.array_split(points, -(-len(points) // 1000))


def _radii(points: np.ndarray) -> np.ndarray:
    """To the `NEIGHBOURS`-th nearest of the others (or the farthest, of few points)."""
    rank = min(NEIGHBOURS, len(points) - 1)  # each point is its own nearest
    nearest = [np.partition(_distances(chunk, points), rank)[:, rank] for chunk in _chunks(points)]
    return np.concatenate(nearest)


def _covered(points: np.ndarray, centres: np.ndarray, radii: np.ndarray) -> float:
    """The share of the points that are within the radius of one of the centres."""
    inside = [(_distances(chunk, centres) <= radii).any(1) for chunk in _chunks(points)]
    return float(np.concatenate(inside).mean())
