"""The papers' optimisers as data: a rule, its rate, clipping, and what weight decay leaves out."""

import dataclasses
import fnmatch
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, PyTree

from experiments.training.schedules import Schedule
from sail_jax.trees import path_str

Rule = Literal["adamw", "adam", "sgd"]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Gradients clipped by their global norm, a rule, and the schedule's rate.

    AdamW's weight decay is added to its update (Loshchilov and Hutter, 2019); that of Adam and SGD
    to their gradient, as an L2 penalty.
    """

    schedule: Schedule
    """Learning rate by step."""
    rule: Rule = "adamw"
    """'adamw', 'adam' or 'sgd' (with momentum)."""
    weight_decay: float = 0.0
    """Its coefficient, which AdamW multiplies by the rate."""
    undecayed: tuple[str, ...] = ("*bias", "*scale", "*norm*", "*embedding", "*position_embed")
    """Shell patterns of the paths that weight decay leaves out: biases, norms, embeddings."""
    clip: float | None = None
    """Largest global norm of a gradient."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.999
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's addition to the root of the second moment."""
    momentum: float = 0.9
    """SGD's."""
    nesterov: bool = False
    """Whether SGD looks ahead (Nesterov, 1983)."""
    members: tuple[float, ...] | None = None
    """Of trainings side by side, along the leading axis of every parameter: the share of the
    schedule's rate that each has. They must not be coupled by clipping."""

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}; got {self.rule}")
        for field in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field} must be in [0, 1); got {getattr(self, field)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and >= 0; got {self.weight_decay}")
        for field in ("eps", "clip"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field} must be finite and > 0; got {value}")
        if self.members is not None:
            if not self.members or not all(0 <= share < math.inf for share in self.members):
                raise ValueError(f"members must be finite and >= 0; got {self.members}")
            if self.clip is not None:
                raise ValueError("clip: a global norm couples members; leave one of them out")

    def decayed(self, params: PyTree) -> PyTree[Bool]:
        """Which parameters weight decay shrinks; `ValueError` if it is on and there are none.

        >>> Optimizer(Schedule(0.1, 9)).decayed({"dense": {"kernel": 0.0, "bias": 0.0}})
        {'dense': {'bias': False, 'kernel': True}}
        """
        mask = jax.tree.map_with_path(
            lambda path, _: not any(fnmatch.fnmatchcase(path_str(path), p) for p in self.undecayed),
            params,
        )
        if self.weight_decay and not any(jax.tree.leaves(mask)):
            raise ValueError(f"undecayed: {self.undecayed} leaves nothing for weight_decay")
        return mask

    def transformation(self) -> optax.GradientTransformation:
        """The same in optax."""
        decay = optax.add_decayed_weights(self.weight_decay, self.decayed)
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.chain(
            optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip),
            *{
                "adamw": (adam, decay),
                "adam": (decay, adam),
                "sgd": (decay, optax.trace(self.momentum, self.nesterov)),
            }[self.rule],
            optax.scale_by_learning_rate(self.schedule),
            optax.identity() if self.members is None else _shares(self.members),
        )


def _shares(members: tuple[float, ...]) -> optax.GradientTransformation:
    """Each member's updates times its share."""

    def scaled(path: Any, update: jax.Array) -> jax.Array:
        if update.shape[:1] != (len(members),):
            raise ValueError(
                f"members: {len(members)} shares for params/{path_str(path)} of shape "
                f"{list(update.shape)}, whose first axis should be theirs"
            )
        shares = jnp.asarray(members, update.dtype)
        return update * shares.reshape(-1, *[1] * (update.ndim - 1))

    return optax.stateless(lambda updates, _: jax.tree.map_with_path(scaled, updates))
