"""Optimisers of the papers as data: a rule, its learning rate, clipping, and weight decay."""

import fnmatch
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jax.tree_util import KeyPath
from jaxtyping import Bool, PyTree

from experiments.lab.config import NotNegative, Positive, Some, config
from experiments.training.schedules import Schedule
from sail_jax.trees import leaf_paths, path_str

Rule = Literal["adamw", "adam", "sgd"]
Part = Annotated[float, Interval(ge=0, lt=1)]


@config
class Optimizer:
    """An optimiser: it clips gradients, a rule turns them into updates, and a schedule scales
    these.

    AdamW adds weight decay to its update. Adam and SGD add it to the gradient, as an L2 penalty.

    Attributes:
      schedule: The learning rate by step.
      rule: "adamw", "adam" or "sgd" (with momentum).
      weight_decay: The coefficient of weight decay. AdamW multiplies it by the learning rate.
      undecayed: Shell patterns of the paths without weight decay. By default these are biases,
        norms and embeddings.
      clip: The largest global norm of a gradient; None disables clipping.
      b1: The decay of Adam's first moment.
      b2: The decay of Adam's second moment.
      eps: The term that Adam adds to the root of the second moment.
      momentum: The momentum of SGD.
      nesterov: Whether SGD uses Nesterov's momentum.
      members: For trainings in parallel, along the leading axis of every parameter: the fraction of
        the schedule's rate of each. None for one training. Clipping is rejected, because it would
        couple the members.
      rates: Pairs of a parameter's path and its fraction of the learning rate; other parameters
        have the full rate. AdamW's weight decay uses the full rate.

    Raises:
      ValueError: If a field is not allowed.

    References:
      Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv 1711.05101).
    """

    schedule: Schedule
    rule: Rule = "adamw"
    weight_decay: NotNegative = 0.0
    undecayed: tuple[str, ...] = ("*bias", "*scale", "*norm*", "*embedding", "*position_embed")
    clip: Positive | None = None
    b1: Part = 0.9
    b2: Part = 0.999
    eps: Positive = 1e-8
    momentum: Part = 0.9
    nesterov: bool = False
    members: Some[NotNegative] | None = None
    rates: tuple[tuple[str, NotNegative], ...] = ()

    def __post_init__(self) -> None:
        if self.members is not None and self.clip is not None:
            raise ValueError("clip: a global norm couples members; leave one of them out")

    def decayed(self, params: PyTree) -> PyTree[Bool]:
        """Returns a mask of the parameters with weight decay.

        Args:
          params: The parameters.

        Returns:
          A pytree of the same structure, True where the path of a leaf matches none of `undecayed`.

        Raises:
          ValueError: If there is weight decay, but no parameter to which it applies.

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
        """Builds the optimiser as an optax transformation.

        Returns:
          The transformation. Add its updates to the parameters.
        """
        decay = optax.add_decayed_weights(self.weight_decay, self.decayed)
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        own = (_own_rates(self.rates),) if self.rates else ()
        return optax.chain(
            optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip),
            *{
                # The position of the decay matters: after Adam's division it is decoupled from the
                # gradient, and before it an L2 penalty.
                "adamw": (adam, *own, decay),
                "adam": (decay, adam, *own),
                "sgd": (decay, optax.trace(self.momentum, self.nesterov), *own),
            }[self.rule],
            optax.scale_by_learning_rate(self.schedule),
            optax.identity() if self.members is None else _shares(self.members),
        )


def _own_rates(rates: tuple[tuple[str, float], ...]) -> optax.GradientTransformation:
    """Multiplies the updates of some parameters by their fractions of the learning rate."""
    share = dict(rates)

    def scaled(updates: PyTree) -> PyTree:
        paths = leaf_paths(updates)
        if unknown := sorted(share.keys() - set(paths)):
            raise ValueError(f"rates: no parameter has the path {unknown[0]!r}")
        return jax.tree.map_with_path(
            lambda path, x: x * jnp.asarray(share.get(path_str(path), 1.0), x.dtype), updates
        )

    return optax.stateless(lambda updates, _: scaled(updates))


def _shares(members: tuple[float, ...]) -> optax.GradientTransformation:
    """Multiplies the updates of each member by its fraction of the learning rate."""

    def scaled(path: KeyPath, update: jax.Array) -> jax.Array:
        if update.shape[:1] != (len(members),):
            raise ValueError(
                f"members: {len(members)} shares for params/{path_str(path)} of shape "
                f"{list(update.shape)}: its first axis must have one entry for each member"
            )
        shares = jnp.asarray(members, update.dtype)
        return update * shares.reshape(-1, *[1] * (update.ndim - 1))

    return optax.stateless(lambda updates, _: jax.tree.map_with_path(scaled, updates))
