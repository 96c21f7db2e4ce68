"""One step of training: a pure, jitted function from a state and a batch to the next state."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32, PRNGKeyArray, PyTree

from experiments.training.optimizers import Optimizer
from sail_jax.trees import leaf_paths

Metrics = dict[str, Float[Array, ""]]
Loss = Callable[[PyTree, PyTree, PyTree, PRNGKeyArray], tuple[Float[Array, ""], Metrics, PyTree]]
"""`(params, mutable, batch, key) -> (loss, metrics, mutable)`: means over the batch's examples, and
what is carried from step to step unlearned (BatchNorm's running statistics)."""
Compute = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Training:
    """What a step does, beside the loss."""

    optimizer: Optimizer
    """How gradients become updates."""
    micro_batches: int = 1
    """Parts of a batch whose gradients are averaged, one after the other, to save memory."""
    compute: Compute = "float32"
    """Type that parameters and the batch's floats are cast to; what is learned stays float32."""
    ema: float | None = None
    """Decay of the exponential moving average of the parameters, if there is one."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1; got {self.micro_batches}")
        if self.compute not in get_args(Compute):
            raise ValueError(
                f"compute must be one of {', '.join(get_args(Compute))}; got {self.compute}"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1); got {self.ema}")


class State(NamedTuple):
    """All that a later step depends on."""

    step: Int32[Array, ""]
    """Steps taken, and so the number of the next."""
    params: PyTree
    opt_state: PyTree
    mutable: PyTree
    ema: PyTree
    """The averaged parameters, or None."""
    key: PRNGKeyArray
    """Never changes: a step folds its number in."""
    fault: Int32[Array, "2"]
    """The first step that met something not finite, and its place; -1 each while there is none."""


Step = Callable[[State, PyTree], tuple[State, Metrics, Int32[Array, "2"]]]


def stateless(loss: Callable[[PyTree, PyTree, PRNGKeyArray], tuple[Array, Metrics]]) -> Loss:
    """The `Loss` of a `(params, batch, key) -> (loss, metrics)`, which carries nothing."""
    return lambda params, mutable, batch, key: (*loss(params, batch, key), mutable)


def init(training: Training, params: PyTree, key: PRNGKeyArray, mutable: PyTree = None) -> State:
    """The state before the first step; `TypeError` names a parameter that is not float32."""
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        if jnp.result_type(leaf) != jnp.float32:
            raise TypeError(f"params/{path}: expected float32, got {jnp.result_type(leaf)}")
    return State(
        jnp.zeros((), jnp.int32),
        params,
        training.optimizer.transformation().init(params),
        mutable,
        None if training.ema is None else jax.tree.map(jnp.copy, params),
        key,
        jnp.full(2, -1, jnp.int32),
    )


def make_step(
    loss: Loss, training: Training, shardings: State | None = None, *, donate: bool = True
) -> Step:
    """The jitted step: the next state, the metrics of this step, and the state's `fault`.

    Metrics are the loss's, with `loss`, `grad_norm` (before clipping) and `rate`. The state's
    buffers are donated. Its arrays, and the batch's, may lie sharded on a mesh: the result is that
    of one device up to the order of its sums. `shardings` keeps the next state where it was.

    Micro-batch i holds the examples i, i + n, i + 2n, ...: each device keeps its share of each.
    Means over them equal means over the batch unless the loss couples examples (BatchNorm).
    """
    transformation = training.optimizer.transformation()
    compute, n = jnp.dtype(training.compute), training.micro_batches

    def evaluate(params: PyTree, mutable: PyTree, batch: PyTree, key: PRNGKeyArray) -> Any:
        value, metrics, mutable = loss(cast(params, compute), mutable, cast(batch, compute), key)
        if value.dtype != jnp.float32 or value.shape:
            raise TypeError(
                f"the loss must be a float32 number, got {value.dtype}{list(value.shape)}: cast "
                "what it is computed from, such as logits.astype(jnp.float32)"
            )
        clash = {"loss", "grad_norm", "rate"} & metrics.keys()
        if clash:
            raise ValueError(f"metrics: {', '.join(sorted(clash))} is given by the step itself")
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"loss": value, **metrics})
        return value, (metrics, mutable)

    def gradients(state: State, batch: PyTree) -> tuple[PyTree, Metrics, PyTree]:
        key = jax.random.fold_in(state.key, state.step)
        grad = jax.grad(evaluate, has_aux=True)
        if n == 1:
            grads, (metrics, mutable) = grad(state.params, state.mutable, batch, key)
            return grads, metrics, mutable
        parts = jax.tree.map_with_path(lambda path, x: parted(path, x, n), batch)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            *total, mutable = carry
            part_grads, (metrics, mutable) = grad(
                state.params, mutable, part[1], jax.random.fold_in(key, part[0])
            )
            return (*jax.tree.map(jnp.add, tuple(total), (part_grads, metrics)), mutable), None

        shapes = jax.eval_shape(
            grad, state.params, state.mutable, jax.tree.map(lambda x: x[0], parts), key
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1][0]))
        (grads, metrics, mutable), _ = jax.lax.scan(
            add, (*zeros, state.mutable), (jnp.arange(n), parts)
        )
        mean = lambda tree: jax.tree.map(lambda x: x / n, tree)  # noqa: E731
        return mean(grads), mean(metrics), mutable

    def step(state: State, batch: PyTree) -> tuple[State, Metrics, Int32[Array, "2"]]:
        grads, metrics, mutable = gradients(state, batch)
        rate = training.optimizer.schedule(state.step)
        metrics |= {"grad_norm": optax.tree.norm(grads), "rate": rate}
        update, opt_state = transformation.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, update)
        ema = state.ema
        if training.ema is not None:
            decay = training.ema
            ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params)
        fault = _fault(state, batch, mutable, grads, metrics)
        after = State(state.step + 1, params, opt_state, mutable, ema, state.key, fault)
        return after, metrics, fault

    out: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, None, None)}
    return jax.jit(step, donate_argnums=(0,) if donate else (), **out)


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """The tree with its floating-point arrays in another type."""
    converted = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(converted, tree)


def parted(path: Any, x: Array, n: int) -> Array:
    """One array of a batch as micro-batches, by its path for the error."""
    if x.ndim < 1 or x.shape[0] % n:
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        raise ValueError(f"micro_batches: {n} does not divide {where} of shape {list(x.shape)}")
    return jnp.swapaxes(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 0, 1)


def watched(batch: PyTree, params: PyTree, mutable: PyTree, grads: PyTree, metrics: PyTree) -> Any:
    """What is looked through for the first leaf that is not finite, causes before effects."""
    named = (
        ("batch", batch),
        ("params", params),
        ("gradient", grads),
        ("mutable", mutable),
        ("metrics", metrics),
    )
    return [
        (f"{name}/{path}" if path else name, leaf)
        for name, tree in named
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


def places(state: State, batch: PyTree, metrics: Metrics) -> list[str]:
    """The names of what `fault` counts."""
    grads = state.params
    return [name for name, _ in watched(batch, state.params, state.mutable, grads, metrics)]


def _fault(state: State, batch: PyTree, mutable: PyTree, grads: PyTree, metrics: Metrics) -> Array:
    leaves = [leaf for _, leaf in watched(batch, state.params, mutable, grads, metrics)]

    def located() -> Array:  # looked for only once there is something to be found
        bad = jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])
        return jnp.stack([state.step, jnp.argmax(bad).astype(jnp.int32)])

    fine = jnp.isfinite(jnp.stack(list(metrics.values()))).all()
    return jax.lax.cond(fine | (state.fault[0] >= 0), lambda: state.fault, located)


def examples(batch: PyTree) -> int:
    """How many there are in a batch: the length of its first axis."""
    return math.prod(jax.tree.leaves(batch)[0].shape[:1])
