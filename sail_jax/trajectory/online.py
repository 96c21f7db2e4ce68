"""Averages of parameters that are updated by an optimiser during training.

This module imports optax, so `sail_jax` does not import it.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from sail_jax.checks import one_of
from sail_jax.trajectory.shapes import Shape, check_decay, weights

Kind = Literal["uniform", "ema", "shape"]
"""A kind of average; see `average_params`."""


class AverageState(NamedTuple):
    """The state of `average_params`.

    Attributes:
      count: The number of updates so far.
      mean: The average in float32 (float64 for parameters in float64), sharded like the parameters.
        Non-floating leaves have their newest value.
      newer: For "uniform", the mean of the current window; None for other kinds.
      in_mean: The number of iterates in `mean`.
      in_newer: The number of iterates in `newer`.
      like: An array of the parameters' dtype; one for each leaf if their dtypes differ.
    """

    count: Int[Array, ""]
    mean: PyTree
    newer: PyTree | None
    in_mean: Int[Array, ""]
    in_newer: Int[Array, ""]
    like: tuple[Array, ...]


def average_params(
    kind: Kind,
    *,
    window: int | None = None,
    decay: float | None = None,
    shape: Shape | None = None,
    total_steps: int | None = None,
    every: int = 1,
) -> optax.GradientTransformationExtraArgs:
    """Maintains an average of the parameters next to an optimiser, and passes updates through.

    Place it last in a chain, where params + updates is the next iterate, and inside
    `optax.MultiSteps`, which calls it once for each real step. `averaged` reads the average. The
    kinds are:

    - "uniform": the mean of the last `window` to `2 * window - 1` iterates (at first, of all
      iterates). Two means are kept, of the last whole window and of the current window.
    - "ema": the exponential moving average without bias, with the factor `decay`.
    - "shape": the weights of `weights(shape, n)` for a run with a known end. It averages the
      iterates of the last `window` steps of `total_steps`, or of all steps. Before the window, the
      average is the newest iterate. During the window, it is the average so far, with the same
      weights. After the window, it does not change.

    An average requires 4 bytes per parameter, and "uniform" 8. Iterates are added in float32. A
    mean of n iterates therefore does not resolve a relative change below n * 1e-7. For more than
    about 10^4 iterates, average every tenth or hundredth iterate with `every`.

    Args:
      kind: The kind of average.
      window: For "uniform" and "shape", a number of steps.
      decay: For "ema" and for the shape "ema", the factor for each averaged iterate, between 0 and
        1.
      shape: For "shape"; see `weights`.
      total_steps: For "shape", the step after which the average is complete.
      every: Only iterates at multiples of this number of steps are averaged. `window` and
        `total_steps` must be multiples of it.

    Returns:
      A transformation that returns its updates unchanged. Its `update` needs `params`.

    Raises:
      ValueError: For an unknown kind, and for arguments that are missing, out of range, or for
        another kind.

    >>> optimizer = optax.chain(optax.sgd(1.0), average_params("uniform", window=2))
    >>> params = {"a": jnp.array(0.0)}
    >>> state = optimizer.init(params)
    >>> for _ in range(3):
    ...     updates, state = optimizer.update({"a": jnp.array(-1.0)}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params["a"]), float(averaged(state)["a"])  # of 1, 2, 3
    (3.0, 2.0)
    """
    gains = _gains(kind, window, decay, shape, total_steps, every)
    whole = window // every if kind == "uniform" and window is not None else None

    def init(params: PyTree) -> PyTree:  # optax's types do not cover pytrees
        start = jax.tree.map(_wide, params)
        newer = None if whole is None else jax.tree.map(jnp.zeros_like, start)
        zero = jnp.zeros((), jnp.int32)
        return AverageState(zero, start, newer, zero + 0, zero + 0, _like(params))

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        if params is None:
            raise ValueError(
                "average_params: expected params, got none: update(grads, state, params)"
            )
        new = optax.apply_updates(params, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        hit = count % every == 0
        if whole is None:
            before = count // every - 1
            gain = jnp.where(hit, gains(before), 0.0)
            mean = jax.tree.map(lambda a, x: _towards(a, x, gain), state.mean, new)
            return updates, state._replace(count=count, mean=mean, in_mean=state.in_mean + hit)
        filled = state.in_newer + hit
        gain = jnp.where(hit, 1.0 / jnp.maximum(filled, 1), 0.0)
        newer = jax.tree.map(lambda a, x: _towards(a, x, gain), state.newer, new)
        full = filled >= whole

        def chosen(a: PyTree, b: PyTree) -> PyTree:
            # Leaves that are not averaged have their newest value in both.
            pick = lambda a, b: jnp.where(full, a, b) if _averages(a.dtype) else a  # noqa: E731
            return jax.tree.map(pick, a, b)

        return updates, AverageState(
            count,
            mean=chosen(newer, state.mean),
            newer=jax.tree.map(lambda x: jnp.where(full, 0, x), newer),
            in_mean=jnp.where(full, filled, state.in_mean),
            in_newer=jnp.where(full, 0, filled),
            like=state.like,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: PyTree) -> PyTree:
    """Returns the average of `average_params`, in the dtypes of the parameters.

    Args:
      state: The state of an optimiser with `average_params` anywhere in it, or a pytree with such a
        state, like a Flax TrainState. For an `nnx.Optimizer`, its `opt_state`.

    Returns:
      The averaged parameters. Before the first update, the initial parameters.

    Raises:
      ValueError: Unless the state has exactly one average.

    >>> averaged(average_params("ema", decay=0.9).init({"a": jnp.ones(2, jnp.bfloat16)}))
    {'a': Array([1, 1], dtype=bfloat16)}
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AverageState))
    found = [node for node in nodes if isinstance(node, AverageState)]
    if len(found) != 1:
        raise ValueError(f"state: expected one average of average_params, got {len(found)}")
    (s,) = found
    leaves, treedef = jax.tree.flatten(s.mean)
    if s.newer is not None:
        share = s.in_newer / jnp.maximum(s.in_mean + s.in_newer, 1)
        newer = jax.tree.leaves(s.newer)
        leaves = [
            _towards(a, x, share) if _averages(a.dtype) else a
            for a, x in zip(leaves, newer, strict=True)
        ]
    like = s.like if len(s.like) == len(leaves) else s.like * len(leaves)
    cast = [
        x.astype(y.dtype) if _averages(x.dtype) else x for x, y in zip(leaves, like, strict=True)
    ]
    return treedef.unflatten(cast)


def _gains(
    kind: Kind,
    window: int | None,
    decay: float | None,
    shape: Shape | None,
    total_steps: int | None,
    every: int,
) -> Any:
    """Checks the arguments; returns the step towards the next iterate, given the number of earlier
    iterates.
    """
    one_of("kind", kind, Kind)
    _whole("every", every, 1)
    takes = {
        "uniform": {"window"},
        "ema": {"decay"},
        "shape": {"shape", "total_steps", "window", "decay"},
    }[kind]
    given = {"window": window, "decay": decay, "shape": shape, "total_steps": total_steps}
    for name, value in given.items():
        if value is not None and name not in takes:
            raise ValueError(f"{name}: expected none for the kind {kind!r}, got {value!r}")
    if kind == "uniform":
        _whole("window", window, every)
        return None
    if kind == "ema":
        check_decay("ema", decay)
        assert decay is not None
        slope = float(np.log(decay))
        # In the mean of n + 1 iterates, the last has the weight `(1 - b)/(1 - b^(n+1))`.
        return lambda n: (1 - decay) / -jnp.expm1(slope * jnp.maximum(n + 1, 1))
    _whole("total_steps", total_steps, every)
    assert total_steps is not None
    _whole("window", total_steps if window is None else window, every)
    many = (total_steps if window is None else window) // every
    last = total_steps // every
    if many > last:
        raise ValueError(f"window: expected at most total_steps, {total_steps}, got {window}")
    if shape is None:
        raise ValueError("shape: expected the name of a shape, got None")
    c = weights(shape, many, decay=decay)
    # Before the window the average follows the iterates. After the window it does not change.
    table = np.concatenate([[1.0], c / np.cumsum(c), [0.0]]).astype(np.float32)
    return lambda n: jnp.asarray(table)[jnp.clip(n - (last - many) + 1, 0, many + 1)]


def _whole(name: str, value: int | None, of: int) -> None:
    """Checks a number of steps: a positive multiple of `of`."""
    good = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not good or value is None or value < 1 or value % of:
        what = "a whole number >= 1" if of == 1 else f"a multiple of every, {of}"
        raise ValueError(f"{name}: expected {what}, got {value!r}")


def _averages(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _wide(x: Array) -> Array:
    """Makes a copy in float32 or wider, because parameters and state may both be donated."""
    x = jnp.asarray(x)
    wide = jnp.promote_types(x.dtype, jnp.float32) if _averages(x.dtype) else x.dtype
    return jnp.array(x, wide, copy=True)


def _towards(a: Array, x: Array, gain: Float[Array, ""]) -> Array:
    """Computes a + gain (x - a) in the dtype of a; x for leaves without an average."""
    if not _averages(a.dtype):
        return jnp.asarray(x, a.dtype)
    return a + gain.astype(jnp.finfo(a.dtype).dtype) * (x.astype(a.dtype) - a)


def _like(params: PyTree) -> tuple[Array, ...]:
    """Makes arrays with the dtypes of the floating leaves; one array if all are equal."""
    # Arrays instead of names, because a state of only arrays can be saved, sharded and mapped.
    dtypes = [jnp.asarray(x).dtype for x in jax.tree.leaves(params)]
    floating = [dtype for dtype in dtypes if _averages(dtype)] or [jnp.dtype(jnp.float32)]
    each = floating[:1] if len(set(floating)) == 1 else dtypes
    return tuple(jnp.zeros((), dtype) for dtype in each)
