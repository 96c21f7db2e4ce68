"""Trains many networks in parallel for studies of overtraining, and computes their losses.

The networks are stacked along a leading axis of all parameters and trained by
`experiments.training`. They are called members.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from experiments.data import choices
from experiments.measures import choice_scores
from experiments.models.next_token import token_losses
from experiments.studies.shared.language_tasks import Batch
from experiments.training import Training, sharding
from experiments.training.fit import Fit
from experiments.training.sharding import Layout


def unstacked(tree: PyTree, count: int) -> list[PyTree]:
    """Splits a tree along the leading axis of members.

    Args:
      tree: Arrays `(member, ...)`.
      count: Number of members to return, the first ones.

    Returns:
      A tree for each.
    """
    return [jax.tree.map(lambda x: x[k], tree) for k in range(count)]  # noqa: B023


def nll(
    net: nn.Module, params: PyTree, batch: Batch, key: Array | None = None
) -> Float[Array, " example"]:
    """Computes the mean negative log-likelihood of the scored tokens, for each sequence.

    Each token is predicted from those before it.

    Args:
      net: The network.
      params: Its parameters.
      batch: Sequences `(..., token + 1)`, and which tokens are scored.
      key: A random key for dropout; None applies none.

    Returns:
      The means in nats, `(...)`; 0 for a sequence without scored tokens.
    """
    inputs, targets = batch.tokens[..., :-1], batch.tokens[..., 1:]
    losses = token_losses(net, {"params": params}, inputs, targets, key)
    scored = batch.scored
    return jnp.where(scored, losses, 0).sum(-1) / jnp.maximum(scored.sum(-1), 1)


@functools.lru_cache(maxsize=4)
def mean_loss(net: nn.Module) -> Callable[[PyTree, Batch], Float[Array, ""]]:
    """Creates the mean of `nll` over sequences, in the form that the probes need.

    Args:
      net: The network.

    Returns:
      `loss(params, batch)`, which returns a scalar. Equal networks give the same function object,
      so that the probes compile once.
    """
    return lambda params, batch: nll(net, params, batch).mean()


def each_nll(
    net: nn.Module, params: PyTree, batch: Batch, at_once: int
) -> Float[Array, " example"]:
    """Computes `nll` without dropout, some sequences at a time to save memory.

    Args:
      net: The network.
      params: Its parameters.
      batch: Sequences `(example, token + 1)`.
      at_once: Number of sequences evaluated together.

    Returns:
      The means in nats, `(example,)`.
    """
    of_example = lambda example: nll(net, params, example)  # noqa: E731
    return jax.lax.map(of_example, batch, batch_size=at_once)


def own_losses(
    net: nn.Module, params: PyTree, held_out: Batch | choices.Packed, at_once: int
) -> Float[Array, " example"]:
    """Computes the losses on held-out examples of a task, without dropout.

    Args:
      net: The network.
      params: Its parameters.
      held_out: Sequences, or texts with classes.
      at_once: Number of sequences evaluated together.

    Returns:
      The losses, `(example,)`. For sequences this is `nll`, in nats per token. For texts with
      classes it is the negative log-probability of the correct class in nats, in a softmax of the
      log-likelihoods per token. exp of its mean is the perplexity over the classes.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Appendix C.1.
    """
    if isinstance(held_out, Batch):
        return each_nll(net, params, held_out, at_once)
    apply = lambda tokens: jnp.asarray(net.apply({"params": params}, tokens))  # noqa: E731
    scores = choice_scores.normalised(apply, held_out, batch_size=at_once)
    return choices.class_losses(scores, jnp.asarray(held_out.answer))


def stacked(trees: Sequence[PyTree]) -> PyTree:
    """Stacks trees along a new leading axis of members.

    Args:
      trees: One tree for each member.

    Returns:
      One tree of NumPy arrays `(member, ...)`.
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


Join = Callable[[PyTree, PyTree], PyTree]
"""Builds the parameters of a network from its frozen and its trained parameters."""


@functools.lru_cache(maxsize=16)
def _fit(net: nn.Module, training: Training, count: int, where: Layout, join: Join | None) -> Fit:
    """Creates the training of `count` members; equal arguments share one compiled step.

    With `join`, the state's `mutable` has the frozen parameters, the same for all.
    """

    def loss(params: PyTree, mutable: PyTree, batch: Batch, key: Array) -> Any:
        whole = lambda p: p if join is None else join(mutable, p)  # noqa: E731
        member_loss = lambda p, b, k: nll(net, whole(p), b, k).mean()  # noqa: E731
        losses = jax.vmap(member_loss, (0, 1, 0))(params, batch, jax.random.split(key, count))
        # The value is the mean, which is logged. The gradient is that of the sum: each member gets
        # the gradient of its own loss, for any number of members.
        total = losses.sum()
        return losses.mean() + (total - jax.lax.stop_gradient(total)), {}, mutable

    return Fit(loss, training, where)


@functools.partial(jax.jit, static_argnums=0)
def first(net: nn.Module, key: Array) -> PyTree:
    """Draws the initial parameters of a network.

    Args:
      net: The network.
      key: A random key.

    Returns:
      The parameters.
    """
    return net.init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def together(
    net: nn.Module,
    training: Training,
    params: Sequence[PyTree],
    batch: Callable[[int], Batch],
    steps: int,
    *,
    key: Array,
    where: Layout,
    directory: Path | None = None,
    config: Any = None,
    save_every: int = 1000,
    frozen: PyTree = None,
    join: Join | None = None,
    stops: Sequence[int] | None = None,
    score: Callable[[PyTree], Float[Array, " member"]] | None = None,
) -> list[PyTree]:
    """Trains several networks of one shape in parallel.

    With `stops` and `score`, each network is returned as it was at the stop with its smallest score
    (early stopping). Of equal scores, the first is used.

    Args:
      net: The network.
      training: The settings of the training. `optimizer.members`, if given, are each network's
        fraction of the schedule's learning rate.
      params: Initial parameters, one tree for each network.
      batch: Gives the minibatch of a step, `(example, member, ...)`.
      steps: Number of steps.
      key: A random key, for dropout.
      where: The layout of the work on devices.
      directory: Directory for checkpoints, from which a killed training continues. None stores
        none.
      config: The config that checkpoints must match.
      save_every: Steps between two checkpoints.
      frozen: Parameters that do not change, the same for all networks.
      join: Builds a network's parameters from `frozen` and the trained ones; it must be hashable.
        None trains all parameters.
      stops: Numbers of steps after which `score` is computed, ascending, ending with `steps`; None
        computes it only at the end.
      score: Maps parameters `(member, ...)` to a number for each member, including those that are
        trained twice. None returns the networks at the end.

    Returns:
      The trained parameters, one tree for each network, as NumPy arrays.
    """
    members = where.filled(params)
    shares = training.optimizer.members or (1.0,) * len(params)
    optimizer = dataclasses.replace(training.optimizer, members=tuple(where.filled(shares)))
    fit = _fit(net, dataclasses.replace(training, optimizer=optimizer), len(members), where, join)
    # Members that are trained twice use their minibatches twice.
    which = np.asarray(where.filled(range(len(params))))
    state = fit.start(stacked(members), key, frozen)
    kept, least = None, None
    for k, stop in enumerate(stops or (steps,), 1):
        # A folder for each stop, so that a killed training finds the states at all earlier stops.
        own = directory / f"stop-{k}" if directory is not None and stops else directory
        state = fit.run(
            state,
            lambda t: jax.tree.map(lambda x: x[:, which], batch(t)),
            stop,
            own,
            config=config,
            save_every=save_every,
            log_every=max(1, steps // 10),
        ).state
        found = np.zeros(len(members)) if score is None else sharding.gathered(score(state.params))
        params_now = sharding.gathered(state.params)
        if kept is None or least is None:
            kept, least = params_now, found
            continue
        better = found < least
        kept = jax.tree.map(
            lambda a, b: np.where(better.reshape(-1, *[1] * (a.ndim - 1)), b, a),  # noqa: B023
            kept,
            params_now,
        )
        least = np.where(better, found, least)
    return unstacked(kept, len(params))
