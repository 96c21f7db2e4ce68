"""Bootstrap your own latent (Grill et al. 2020, BYOL): representations learned without labels.

An online network (encoder, projector, predictor) sees one view of an image and predicts what the
target network, an exponential moving average of its encoder and projector, makes of another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

Encode = Callable[[PyTree, PyTree, Array, bool], tuple[Float[Array, "n feature"], PyTree]]
"""`(params, stats, images, train) -> (features, stats)`."""


class Head(nn.Module):
    """The projector or the predictor: a hidden layer with BatchNorm and ReLU, a linear one.

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
        x = nn.BatchNorm(not train, momentum=0.9, name="bn")(
            nn.Dense(self.hidden, name="hidden")(x)
        )
        return nn.Dense(self.outputs, name="out")(nn.relu(x))


def regression(prediction: Float[Array, "n d"], target: Float[Array, "n d"]) -> Float[Array, " n"]:
    """|p / |p| - z / |z||^2 = 2 - 2 cos(p, z), eq. 2, of each example; 2 where either is 0.

    >>> regression(jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 5.0]])).tolist()
    [2.0]
    """
    return 2 - 2 * (_unit(prediction) * _unit(target)).sum(-1)


def _unit(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    # the root's argument is kept from 0, where its gradient is infinite
    return x / jnp.sqrt(jnp.maximum((x**2).sum(-1, keepdims=True), 1e-12))


def decay(step: ArrayLike, steps: int, base: float) -> Float[Array, ""]:
    """The target's decay, from `base` up to 1 along a half cosine (Section 3.3).

    >>> [round(float(decay(k, 10, 0.99)), 4) for k in (0, 5, 10)]
    [0.99, 0.995, 1.0]
    """
    progress = jnp.minimum(jnp.asarray(step) / steps, 1)
    return 1 - (1 - base) * (jnp.cos(jnp.pi * progress) + 1) / 2


def moved(target: PyTree, online: PyTree, decay: ArrayLike) -> PyTree:
    """decay x target + (1 - decay) x online, eq. 1, of the target's leaves."""
    return jax.tree.map(lambda t, o: decay * t + (1 - decay) * o, target, online)


class Byol(NamedTuple):
    """The networks around an encoder, and how long they are trained: a `Loss` of the trainer.

    The target is carried as what is not learned, and is moved towards the online network of the
    last update before it is used: the same as after each update, as the paper has it.
    """

    encode: Encode
    projector: Head
    predictor: Head
    steps: int
    base: float = 0.996

    def init(
        self, encoder: PyTree, stats: PyTree, features: int, key: PRNGKeyArray
    ) -> tuple[PyTree, PyTree]:
        """Parameters and what is carried; the target starts as a copy of the online network."""
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
        """The symmetrised loss, averaged over images, of two batches of views of the same images.

        The metric `spread` is the root of the total variance of the target's unit projections:
        near 1 for directions at random, 0 for a collapse to one.
        """
        online = jax.lax.stop_gradient(_followed(params))
        target = moved(carried["target"], online, decay(carried["step"], self.steps, self.base))
        stats = carried["stats"]
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
        features, encoder = self.encode(params["encoder"], stats["encoder"], view, True)
        z, projector = _applied(self.projector, params["projector"], stats["projector"], features)
        return z, {**stats, "encoder": encoder, "projector": projector}


def _followed(params: PyTree) -> PyTree:
    """What of the online network the target is an average of."""
    return {k: params[k] for k in ("encoder", "projector")}


def _applied(head: Head, params: PyTree, stats: PyTree, x: Array) -> tuple[Array, PyTree]:
    out: Any = head.apply(
        {"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"]
    )
    return out[0], out[1]["batch_stats"]
