"""Maps found by their loss: straight-through estimation (Git Re-Basin, algorithm 2)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from sail_jax.align.blocks import change_blocks
from sail_jax.align.matching import match_weights
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec

__all__ = ["StraightThrough", "straight_through"]


class StraightThrough(NamedTuple):
    """`maps` of the lowest loss seen, and the loss of the midpoint at each step."""

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
    """Learn maps that minimise `loss` of the midpoint of `reference` and the moved `params`.

    A proxy network, which starts at the reference, is moved by an optax optimiser (None: SGD of
    rate 0.01 and momentum 0.9, as published). At each batch `params` are matched to the proxy by
    `match_weights` (`options` are its own), starting from the maps before; the midpoint is taken
    with the matched network, and its gradient passed to the proxy as if it were taken with that.
    Float leaves only. `init` (None: a first visit) is what the first matching starts from.

    The loss kept is that of one batch: give the same large batch each time, or compare the maps
    on held-out data. Raises ValueError as `match_weights` does, and if there are no batches.
    """
    import optax

    optimizer = optax.sgd(0.01, momentum=0.9) if optimizer is None else optimizer

    @jax.jit
    def step(a: PyTree, b: PyTree, proxy: PyTree, state: Any, batch: Any) -> tuple[Any, Any, Array]:
        def midpoint_loss(proxy: PyTree) -> Array:
            def midpoint(a: Array, b: Array, p: Array) -> Array:
                return (a + (p + jax.lax.stop_gradient(b - p))) / 2

            return loss(jax.tree.map(midpoint, a, b, proxy), batch)

        value, slope = jax.value_and_grad(midpoint_loss)(proxy)
        change, state = optimizer.update(slope, state, proxy)
        return optax.apply_updates(proxy, change), state, value

    proxy, state = reference, optimizer.init(reference)
    best: tuple[float, dict[str, SpaceMap]] | None = None
    history = []
    for batch in batches:
        maps = match_weights(proxy, params, spec, init=init, **options).maps
        init, moved = maps, change_blocks(params, spec, maps, options.get("within") or {})
        proxy, state, value = step(reference, moved, proxy, state, batch)
        history.append(float(value))
        if best is None or history[-1] < best[0]:
            best = history[-1], maps
    if best is None:
        raise ValueError("there are no batches")
    return StraightThrough(best[1], tuple(history))
