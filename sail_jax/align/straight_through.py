"""Maps found by the loss of the midpoint: straight-through estimation (Git Re-Basin, algorithm 2).

Each step is a `match_weights` of the second network to a proxy, which an optimiser moves.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from sail_jax.align.blocks import change_blocks
from sail_jax.align.matching import match_weights
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec


class StraightThrough(NamedTuple):
    """The maps that straight-through estimation found, and the losses on its way.

    Attributes:
      maps: The maps of the step with the lowest loss.
      loss: The loss of the midpoint at each step.
    """

    maps: dict[str, SpaceMap]
    loss: tuple[float, ...]


def straight_through(
    reference: PyTree,
    params: PyTree,
    spec: Spec,
    loss: Callable[[PyTree, Any], Float[Array, ""]],
    batches: Iterable[Any],
    *,
    optimizer: Any = None,
    init: Mapping[str, SpaceMap] | None = None,
    **options: Any,
) -> StraightThrough:
    """Learns maps that minimise the loss of the midpoint of two networks.

    A proxy network starts at `reference`. At each batch `params` are matched to the proxy by
    `match_weights`, starting from the maps of the step before. The loss and its gradient are taken
    at the midpoint of `reference` and the matched network. The gradient is passed to the proxy as
    if the midpoint had been taken with the proxy.

    The loss that decides which maps are kept is that of one batch. Give the same large batch each
    time, or compare the maps on held-out data.

    Args:
      reference: The parameters of the network that stays; floating leaves only.
      params: The parameters of the network to be moved, of the same shapes.
      spec: The spec of both.
      loss: A function `(params, batch) -> scalar`, which is compiled.
      batches: One batch for each step.
      optimizer: An optax optimiser of the proxy. None: SGD at rate 0.01 with momentum 0.9, as
        published.
      init: Maps that the first matching starts from. None: a first visit of `match_weights`.
      **options: Other arguments of `match_weights`.

    Returns:
      The best maps, for `change_basis` (with `within`, for `change_blocks`), and the losses.

    Raises:
      ValueError: If there are no batches, a loss is NaN or the optimiser's rate too high for the
        proxy to stay finite, and as `match_weights`.

    References:
      Ainsworth et al., Git Re-Basin, 2023 (arXiv 2209.04836), algorithm 2.
    """
    import optax

    optimizer = optax.sgd(0.01, momentum=0.9) if optimizer is None else optimizer

    @jax.jit
    def step(
        a: PyTree, b: PyTree, proxy: PyTree, state: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, Array]:
        def midpoint_loss(proxy: PyTree) -> Array:
            def midpoint(a: Array, b: Array, p: Array) -> Array:
                # Its value is that of b, and its gradient that of p: this is the straight-through
                # estimator.
                return (a + (p + jax.lax.stop_gradient(b - p))) / 2

            return loss(jax.tree.map(midpoint, a, b, proxy), batch)

        value, slope = jax.value_and_grad(midpoint_loss)(proxy)
        change, state = optimizer.update(slope, state, proxy)
        return optax.apply_updates(proxy, change), state, value

    proxy, state = reference, optimizer.init(reference)
    best: tuple[float, dict[str, SpaceMap]] | None = None
    history = []
    for k, batch in enumerate(batches):
        if k and not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(proxy)):
            raise ValueError(
                f"the proxy is not finite after batch {k - 1}, loss {history[-1]:g}: give "
                "an optimizer of a lower rate"
            )
        maps = match_weights(proxy, params, spec, init=init, **options).maps
        # The maps of this step are where the next one begins: the proxy moves little in between.
        init, moved = maps, change_blocks(params, spec, maps, options.get("within") or {})
        proxy, state, value = step(reference, moved, proxy, state, batch)
        history.append(float(value))
        if math.isnan(history[-1]):
            raise ValueError(f"loss must be a number, but that of batch {k} is NaN")
        if best is None or history[-1] < best[0]:
            best = history[-1], maps
    if best is None:
        raise ValueError("there are no batches")
    return StraightThrough(best[1], tuple(history))
