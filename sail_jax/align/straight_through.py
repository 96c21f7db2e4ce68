"""Maps that minimise the loss of the midpoint: straight-through estimation (Git Re-Basin, alg. 2).

Each step runs `match_weights` of the second network to a proxy, which an optimiser moves.
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
    """The maps found by straight-through estimation, and the losses of the steps.

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
    `match_weights`, starting from the maps of the previous step. The loss and its gradient are
    computed at the midpoint of `reference` and the matched network. The gradient is applied to the
    proxy, as if the midpoint had been computed from the proxy.

    The kept maps are those with the lowest loss on their batch. Use the same large batch each time,
    or compare the maps on held-out data.

    Args:
      reference: The parameters of the network that stays; floating leaves only.
      params: The parameters of the network to move, with the same shapes.
      spec: The spec of both.
      loss: A function `(params, batch) -> scalar`. It is compiled.
      batches: One batch for each step.
      optimizer: An optax optimiser of the proxy. None: SGD at rate 0.01 with momentum 0.9, as
        published.
      init: The initial maps of the first matching. None: a first visit of `match_weights`.
      **options: Other arguments of `match_weights`.

    Returns:
      The best maps, for `change_basis` (with `within`: for `change_blocks`), and the losses.

    Raises:
      ValueError: If there are no batches, a loss is NaN, or the proxy becomes non-finite because
        the learning rate is too high; and as `match_weights` does.

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
                # Its value is b, and its gradient is p's: this is the straight-through
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
                f"the proxy is not finite after batch {k - 1}, loss {history[-1]:g}: use "
                "an optimizer with a lower learning rate"
            )
        maps = match_weights(proxy, params, spec, init=init, **options).maps
        # The next step starts from the maps of this one: the proxy moves little in between.
        init, moved = maps, change_blocks(params, spec, maps, options.get("within") or {})
        proxy, state, value = step(reference, moved, proxy, state, batch)
        history.append(float(value))
        if math.isnan(history[-1]):
            raise ValueError(f"loss must be a number, but it is NaN on batch {k}")
        if best is None or history[-1] < best[0]:
            best = history[-1], maps
    if best is None:
        raise ValueError("there are no batches")
    return StraightThrough(best[1], tuple(history))
