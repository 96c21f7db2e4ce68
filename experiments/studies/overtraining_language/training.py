"""How `overtraining_language` trains: many networks side by side, along a leading axis of all their
parameters, by the one trainer; and the losses."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from experiments.models.next_token import token_losses
from experiments.studies.overtraining_language.tasks import Batch
from experiments.training import Training, sharding
from experiments.training.fit import Fit
from experiments.training.step import State

Shard = Literal[sharding.Shard, "members"]


class Layout(NamedTuple):
    """Where trainings side by side lie: as one training would, its batch shared out by examples, or
    by members, those that lack to a multiple of the devices trained twice."""

    one: sharding.Layout
    by_member: bool

    def check(self, **batches: int) -> None:
        """As `sharding.Layout` has it; members can always be shared."""
        if not self.by_member:
            self.one.check(**batches)

    def filled(self, some: Sequence[Any]) -> list[Any]:
        """One for each member that is trained."""
        devices = self.one.mesh.size if self.one.mesh is not None and self.by_member else 1
        return [some[k % len(some)] for k in range(devices * math.ceil(len(some) / devices))]

    def _leading(self, tree: PyTree) -> PyTree:
        """Shared out by members, their leading axis; numbers have none."""
        mesh = self.one.mesh
        assert mesh is not None
        return jax.tree.map(
            lambda x: NamedSharding(mesh, P(sharding.AXIS) if x.ndim else P()), tree
        )

    def shardings(self, state: State) -> State | None:
        if self.one.mesh is None or not self.by_member:
            return self.one.shardings(state)
        spread = {k: self._leading(getattr(state, k)) for k in ("params", "opt_state")}
        return sharding.replicated(self.one.mesh, state)._replace(**spread)

    def lay(self, state: State) -> State:
        """The state where the step expects it."""
        where = self.shardings(state)
        return state if where is None else sharding.place(state, where)

    def spread(self, *trees: PyTree) -> tuple[PyTree, ...]:
        """Arrays with a leading axis of members."""
        if self.one.mesh is None or not self.by_member:
            return self.one.lay(trees)
        return sharding.place(trees, self._leading(trees))

    def place(self, batch: Batch) -> PyTree:
        """A batch [example, member, ...]."""
        if self.one.mesh is None or not self.by_member:
            return self.one.place(batch)
        where = NamedSharding(self.one.mesh, P(None, sharding.AXIS))
        put = lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index])  # noqa: E731
        return jax.tree.map(put, batch)


def layout(shard: Shard) -> Layout:
    """Over all devices, unless there is one or `shard` is "no"."""
    inner = sharding.layout("data" if shard == "members" else shard)
    return Layout(inner, shard == "members" and inner.mesh is not None)


def unstacked(tree: PyTree, count: int) -> list[PyTree]:
    """Each of `count` members."""
    return [jax.tree.map(lambda x: x[k], tree) for k in range(count)]  # noqa: B023


def nll(
    net: nn.Module, params: PyTree, batch: Batch, key: Array | None = None
) -> Float[Array, " example"]:
    """Per example the mean over its scored tokens of their negative log-likelihood given those
    before, in nats; with a key under dropout."""
    inputs, targets = batch.tokens[..., :-1], batch.tokens[..., 1:]
    losses = token_losses(net, {"params": params}, inputs, targets, key)
    scored = batch.scored
    return jnp.where(scored, losses, 0).sum(-1) / jnp.maximum(scored.sum(-1), 1)


@functools.lru_cache(maxsize=4)
def mean_loss(net: nn.Module) -> Callable[[PyTree, Batch], Float[Array, ""]]:
    """The mean of `nll` over examples, as the probes want it: one function for one network."""
    return lambda params, batch: nll(net, params, batch).mean()


def each_nll(
    net: nn.Module, params: PyTree, batch: Batch, at_once: int
) -> Float[Array, " example"]:
    """The same, so many examples at a time."""
    of_example = lambda example: nll(net, params, example)  # noqa: E731
    return jax.lax.map(of_example, batch, batch_size=at_once)


def stacked(trees: Sequence[PyTree]) -> PyTree:
    """The same along a leading axis of members."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


Join = Callable[[PyTree, PyTree], PyTree]
"""The parameters of a network, of those that stay as they are and those that are trained."""


@functools.lru_cache(maxsize=16)
def _fit(net: nn.Module, training: Training, count: int, where: Layout, join: Join | None) -> Fit:
    """The training of `count` members by one compiled step; with `join` the state's `mutable`, the
    same for all, is what stays as it is."""

    def loss(params: PyTree, mutable: PyTree, batch: Batch, key: Array) -> Any:
        whole = lambda p: p if join is None else join(mutable, p)  # noqa: E731
        member_loss = lambda p, b, k: nll(net, whole(p), b, k).mean()  # noqa: E731
        losses = jax.vmap(member_loss, (0, 1, 0))(params, batch, jax.random.split(key, count))
        # the mean is told; the sum's gradient is each member's own
        total = losses.sum()
        return losses.mean() + (total - jax.lax.stop_gradient(total)), {}, mutable

    return Fit(loss, training, where)


@functools.partial(jax.jit, static_argnums=0)
def first(net: nn.Module, key: Array) -> PyTree:
    """Initial parameters."""
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
) -> list[PyTree]:
    """The parameters of all members after `steps`, from those given; `batch(step)` has their
    examples, [example, member, ...]. The optimizer's `members` are theirs. With `join`, one of a
    kind that can be hashed, a member's network is `join(frozen, its parameters)`."""
    members = where.filled(params)
    shares = training.optimizer.members or (1.0,) * len(params)
    optimizer = dataclasses.replace(training.optimizer, members=tuple(where.filled(shares)))
    fit = _fit(net, dataclasses.replace(training, optimizer=optimizer), len(members), where, join)
    which = np.asarray(where.filled(range(len(params))))
    trained = fit.run(
        fit.start(stacked(members), key, frozen),
        lambda t: jax.tree.map(lambda x: x[:, which], batch(t)),
        steps,
        directory,
        config=config,
        save_every=save_every,
        log_every=max(1, steps // 10),
    )
    return unstacked(sharding.gathered(trained.state.params), len(params))
