"""Bootstrap your own latent (BYOL): representations of images, learned without labels.

An online network (encoder, projector, predictor) sees one view of an image. It predicts the output
of the target network for another view. The target is an exponential moving average of the online
encoder and projector.

References:
  Grill et al., Bootstrap your own latent, 2020 (arXiv 2006.07733).
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

Encode = Callable[[PyTree, PyTree, Array, bool], tuple[Float[Array, "n feature"], PyTree]]
"""An encoder: `(params, stats, images, train) -> (features, stats)`."""


class Head(nn.Module):
    """The projector or the predictor: a hidden layer with BatchNorm and ReLU, then a linear layer.

    Attributes:
      hidden: The number of hidden units.
      outputs: The number of outputs.

    >>> head = Head(8, 3)
    >>> made = jax.eval_shape(head.init_with_output, jax.random.key(0), jnp.zeros((2, 5)))
    >>> projections, variables = made
    >>> projections.shape
    (2, 3)
    """

    hidden: int
    outputs: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "n feature"], train: bool = False
    ) -> Float[Array, "n output"]:
        """Computes the outputs."""
        x = nn.BatchNorm(not train, momentum=0.9, name="bn")(
            nn.Dense(self.hidden, name="hidden")(x)
        )
        return nn.Dense(self.outputs, name="out")(nn.relu(x))


def regression(prediction: Float[Array, "n d"], target: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Computes the squared distance between the directions of predictions and of targets.

    |p / |p| - z / |z||^2 = 2 - 2 cos(p, z)

    References:
      Grill et al., Bootstrap your own latent, 2020 (arXiv 2006.07733), eq. (2).

    >>> regression(jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 5.0]])).tolist()
    [2.0]
    """
    return 2 - 2 * (_unit(prediction) * _unit(target)).sum(-1)


def _unit(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Scales each row to norm 1; a row of zeros does not change."""
    # A small floor keeps the root's argument away from 0, where its gradient is infinite.
    return x / jnp.sqrt(jnp.maximum((x**2).sum(-1, keepdims=True), 1e-12))


def decay(step: ArrayLike, steps: int, base: float) -> Float[Array, ""]:
    """Computes the decay of the target network, which increases from `base` to 1 along half a
    cosine.

    1 - (1 - base) (cos(pi step / steps) + 1) / 2

    References:
      Grill et al., Bootstrap your own latent, 2020 (arXiv 2006.07733), Section 3.3.

    >>> [round(float(decay(k, 10, 0.99)), 4) for k in (0, 5, 10)]
    [0.99, 0.995, 1.0]
    """
    progress = jnp.minimum(jnp.asarray(step) / steps, 1)
    return 1 - (1 - base) * (jnp.cos(jnp.pi * progress) + 1) / 2


def moved(target: PyTree, online: PyTree, decay: ArrayLike) -> PyTree:
    """Moves the target network towards the online network: decay * target + (1 - decay) * online.

    References:
      Grill et al., Bootstrap your own latent, 2020 (arXiv 2006.07733), eq. (1).
    """
    return jax.tree.map(lambda t, o: decay * t + (1 - decay) * o, target, online)


class Byol(NamedTuple):
    """The networks around an encoder, and the length of their training.

    The target network is carried from step to step, separate from the learned parameters. Before
    each use, it moves towards the online network of the last update. In the paper it moves after
    each update, which is equivalent.

    Attributes:
      encode: Computes the features of images: `(params, stats, images, train) -> (features,
        stats)`, where `stats` are the encoder's running statistics.
      projector: The map from features to projections.
      predictor: The map from projections to predictions of the target's projections.
      steps: The number of steps of the training.
      base: The decay of the target network at the first step.
    """

    encode: Encode
    projector: Head
    predictor: Head
    steps: int
    base: float = 0.996

    def init(
        self, encoder: PyTree, stats: PyTree, features: int, key: PRNGKeyArray
    ) -> tuple[PyTree, PyTree]:
        """Creates the initial values of a training, with the target as a copy of the online
        network.

        It returns the learned parameters, and the values carried from step to step: running
        statistics, target, and number of steps.
        """
        first, second = jax.random.split(key)
        heads = {
            "projector": self.projector.init(first, jnp.zeros((1, features))),
            "predictor": self.predictor.init(second, jnp.zeros((1, self.projector.outputs))),
        }
        params = {"encoder": encoder, **{k: v["params"] for k, v in heads.items()}}
        target = jax.tree.map(jnp.copy, _followed(params))
        carried = {"encoder": stats, **{k: v["batch_stats"] for k, v in heads.items()}}
        return params, {"stats": carried, "target": target, "step": jnp.zeros((), jnp.int32)}

    def loss(
        self, params: PyTree, carried: PyTree, first: Array, second: Array
    ) -> tuple[Float[Array, ""], dict[str, Array], PyTree]:
        """Computes the loss of two views of the same images.

        The loss is the mean over images of `regression` from the first view to the second, plus the
        mean from the second to the first.

        It returns the loss, the metrics, and the values carried to the next step. The metric
        "spread" is the root of the total variance of the target's unit projections. It is close to
        1 for random directions, and 0 if all images have the same direction (a collapse).
        """
        online = jax.lax.stop_gradient(_followed(params))
        target = moved(carried["target"], online, decay(carried["step"], self.steps, self.base))
        stats = carried["stats"]
        # Batch statistics normalise both networks. The new running statistics
        # are dropped: the target uses the online network's.
        wanted = [
            jax.lax.stop_gradient(self._projected(target, stats, view)[0])
            for view in (first, second)
        ]
        total = jnp.zeros(())
        for view, other in ((first, wanted[1]), (second, wanted[0])):
            z, new = self._projected(params, stats, view)
            p, last = _applied(self.predictor, params["predictor"], stats["predictor"], z)
            stats = {**new, "predictor": last}
            total += regression(p.astype(jnp.float32), other.astype(jnp.float32)).mean()
        unit = _unit(wanted[0].astype(jnp.float32))
        spread = jnp.sqrt(unit.var(axis=0).sum())
        after = {"stats": stats, "target": target, "step": carried["step"] + 1}
        return total, {"spread": spread}, after

    def _projected(self, params: PyTree, stats: PyTree, view: Array) -> tuple[Array, PyTree]:
        """Computes the projections of a view, and the running statistics after it."""
        features, encoder = self.encode(params["encoder"], stats["encoder"], view, True)
        z, projector = _applied(self.projector, params["projector"], stats["projector"], features)
        return z, {**stats, "encoder": encoder, "projector": projector}


def _followed(params: PyTree) -> PyTree:
    """Returns the online parameters that the target averages: all except the predictor."""
    return {k: params[k] for k in ("encoder", "projector")}


def _applied(head: Head, params: PyTree, stats: PyTree, x: Array) -> tuple[Array, PyTree]:
    """Computes the outputs of a head in training, and its running statistics after them."""
    variables = {"params": params, "batch_stats": stats}
    out, after = head.apply(variables, x, True, mutable=["batch_stats"])
    return jnp.asarray(out), after["batch_stats"]
