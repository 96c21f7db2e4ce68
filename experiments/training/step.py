"""One step of training: a pure, compiled function from a state and a batch to the next state.

`loop.train` runs many of them; `fit.Fit` binds one to a loss, an optimiser and devices.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray, PyTree

from experiments.lab.config import Natural, config
from experiments.training.optimizers import Optimizer, Part
from sail_jax.trees import leaf_paths

Metrics = dict[str, Float[Array, "*replicate"]]
"""The metrics of a step by name: scalars, or arrays with an entry for each replicate."""
Loss = Callable[[PyTree, PyTree, PyTree, PRNGKeyArray], tuple[Float[Array, ""], Metrics, PyTree]]
"""The loss of a training: `(params, mutable, batch, key) -> (loss, metrics, mutable)`.

The loss and the metrics are means over the examples of the batch. `mutable` holds values carried
from step to step without being learned, such as BatchNorm's running statistics.
"""
Compute = Literal["float32", "bfloat16"]


@config
class Training:
    """The settings of a step, except the loss.

    Attributes:
      optimizer: The optimiser, which turns gradients into updates.
      micro_batches: The number of parts of a batch. Their gradients are computed one after another
        and averaged, to save memory.
      compute: The dtype of parameters and of a batch's floats in the loss. The parameters
        themselves remain in float32.
      ema: The decay of the exponential moving average of the parameters, in [0, 1); None for no
        average.

    Raises:
      ValueError: If a field is not allowed.
    """

    optimizer: Optimizer
    micro_batches: Natural = 1
    compute: Compute = "float32"
    ema: Part | None = None


class State(NamedTuple):
    """The state on which later steps depend.

    Attributes:
      step: The number of steps taken, which is also the index of the next one.
      params: The parameters.
      opt_state: The state of the optimiser.
      mutable: The values that the loss carries from step to step without learning them.
      ema: The averaged parameters; None without an average.
      key: The key of all randomness. It never changes: each step folds in its number.
      fault: The first step that met a value that is not finite, and its index in `places`; both -1
        without a fault.
    """

    step: Int32[Array, ""]
    params: PyTree
    opt_state: PyTree
    mutable: PyTree
    ema: PyTree
    key: PRNGKeyArray
    fault: Int32[Array, "2"]


Step = Callable[[State, PyTree], tuple[State, Metrics, Int32[Array, "2"]]]
"""A step: from a state and a batch to the next state, the metrics, and the state's `fault`."""


def stateless(loss: Callable[[PyTree, PyTree, PRNGKeyArray], tuple[Array, Metrics]]) -> Loss:
    """Turns a loss that carries nothing from step to step into a `Loss`.

    Args:
      loss: A function `(params, batch, key) -> (loss, metrics)`.

    Returns:
      The loss with the carried values as a further argument and result, unchanged.
    """
    return lambda params, mutable, batch, key: (*loss(params, batch, key), mutable)


def init(training: Training, params: PyTree, key: PRNGKeyArray, mutable: PyTree = None) -> State:
    """Creates the state before the first step.

    Args:
      training: The settings of a step.
      params: The initial parameters, in float32.
      key: The key of all randomness in the steps.
      mutable: The values that the loss carries from step to step without learning them.

    Returns:
      The state. It shares the buffers of `params`, which the first step takes over if it donates.

    Raises:
      TypeError: If a parameter is not float32. The message contains its name.
      ValueError: If there is weight decay, but no parameter to which it applies.
    """
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
    """Compiles the step of a training.

    The metrics of a step are the loss's metrics, and "loss", "grad_norm" (before clipping) and
    "rate". Arrays may be sharded on a mesh of devices. The result is the same as on one device, up
    to the order of sums.

    Micro-batch i of n contains the examples i, i + n, i + 2n, ..., so that each device keeps its
    examples. Means over micro-batches equal means over the batch unless the loss couples examples,
    for example by BatchNorm.

    Args:
      loss: The loss to minimise.
      training: The other settings of the step.
      shardings: The layout of the next state, an entry for each array; None leaves it to JAX.
      donate: Whether a step may reuse the buffers of its input state. That state is then no longer
        valid.

    Returns:
      The step: from a state and a batch to the next state, the metrics of this step, and the
      `fault` of the next state. Its first call raises `TypeError` if the loss is not a float32
      number. It raises `ValueError` if the loss has a metric with a name above, or a batch cannot
      be split.
    """
    transformation = training.optimizer.transformation()
    compute, n = jnp.dtype(training.compute), training.micro_batches

    def evaluate(params: PyTree, mutable: PyTree, batch: PyTree, key: PRNGKeyArray) -> Any:
        """Computes the loss in the dtype of the training, with its metrics and the carried
        values."""
        value, metrics, mutable = loss(cast(params, compute), mutable, cast(batch, compute), key)
        if value.dtype != jnp.float32 or value.shape:
            raise TypeError(
                f"the loss must be a float32 number, got {value.dtype}{list(value.shape)}: cast "
                "its inputs, such as logits.astype(jnp.float32)"
            )
        clash = {"loss", "grad_norm", "rate"} & metrics.keys()
        if clash:
            raise ValueError(f"metrics: the step itself provides {', '.join(sorted(clash))}")
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"loss": value, **metrics})
        return value, (metrics, mutable)

    def gradients(state: State, batch: PyTree) -> tuple[PyTree, Metrics, PyTree]:
        """Averages gradients and metrics over micro-batches. Carried values come from the last
        one."""
        # The key of a step depends only on its number, so that a resumed training draws the same
        # numbers.
        key = jax.random.fold_in(state.key, state.step)
        grad = jax.grad(evaluate, has_aux=True)
        if n == 1:
            grads, (metrics, mutable) = grad(state.params, state.mutable, batch, key)
            return grads, metrics, mutable
        parts = jax.tree.map_with_path(lambda path, x: parted(path, x, n), batch)

        def add(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
            """Adds the gradients and metrics of one micro-batch to the sums."""
            *total, mutable = carry
            part_grads, (metrics, mutable) = grad(
                state.params, mutable, part[1], jax.random.fold_in(key, part[0])
            )
            return (*jax.tree.map(jnp.add, tuple(total), (part_grads, metrics)), mutable), None

        shapes = jax.eval_shape(
            grad, state.params, state.mutable, jax.tree.map(lambda x: x[0], parts), key
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1][0]))
        # The parts run one after another, so that only one part's activations are in memory at a
        # time.
        (grads, metrics, mutable), _ = jax.lax.scan(
            add, (*zeros, state.mutable), (jnp.arange(n), parts)
        )
        mean = lambda tree: jax.tree.map(lambda x: x / n, tree)  # noqa: E731
        return mean(grads), mean(metrics), mutable

    def step(state: State, batch: PyTree) -> tuple[State, Metrics, Int32[Array, "2"]]:
        """Takes one step."""
        grads, metrics, mutable = gradients(state, batch)
        # Counted by the state and not by optax, only for the metrics; both count from 0.
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
        # The fault is also returned outside the state, because the next step takes over the state's
        # buffers before the fault is read.
        return after, metrics, fault

    out: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, None, None)}
    return jax.jit(step, donate_argnums=(0,) if donate else (), **out)


def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the floating-point arrays of a pytree.

    Args:
      tree: The arrays.
      dtype: Their new dtype.

    Returns:
      The tree with its floating-point arrays in that dtype. Other arrays do not change.
    """
    converted = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(converted, tree)


def parted(path: KeyPath, x: Array, n: int) -> Array:
    """Splits one array of a batch into micro-batches.

    Args:
      path: The path of the array in the batch, for the message.
      x: The array. Its first axis runs over examples.
      n: The number of micro-batches.

    Returns:
      The array `(n, examples / n, ...)`: micro-batch i contains the examples i, i + n, i + 2n, ...

    Raises:
      ValueError: If the number of examples is not a multiple of n.

    >>> parted((), jnp.arange(6), 2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    if x.ndim < 1 or x.shape[0] % n:
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        raise ValueError(f"micro_batches: {n} does not divide {where} of shape {list(x.shape)}")
    # [batch, ...] -> [n, batch / n, ...], with neighbours in different parts. Splitting a batch
    # that is sharded along its first axis thus moves no examples.
    return jnp.swapaxes(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 0, 1)


def watched(batch: PyTree, params: PyTree, mutable: PyTree, grads: PyTree, metrics: PyTree) -> Any:
    """Lists the floating-point leaves that are searched for non-finite values.

    Causes come before effects, so the first hit is the most useful: the batch, the parameters,
    their gradient, the carried values, the metrics.

    Args:
      batch: The batch of the step.
      params: The parameters.
      mutable: The values that the loss carries.
      grads: The gradients.
      metrics: The metrics.

    Returns:
      Pairs of a name, such as "params/dense/kernel", and the leaf.
    """
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
    """Returns the names behind the indices of `State.fault`.

    Args:
      state: A state with the structure of the training's states.
      batch: A batch with the structure of the training's batches.
      metrics: The metrics of a step.

    Returns:
      The names, in the order of the indices in `State.fault`.
    """
    grads = state.params
    return [name for name, _ in watched(batch, state.params, state.mutable, grads, metrics)]


def _fault(state: State, batch: PyTree, mutable: PyTree, grads: PyTree, metrics: Metrics) -> Array:
    """Returns the `State.fault` after a step."""
    leaves = [leaf for _, leaf in watched(batch, state.params, mutable, grads, metrics)]

    # The leaf is searched for only after a fault was detected.
    def located() -> Array:
        """Returns the number of this step, and the index of the first leaf that is not finite."""
        bad = jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])
        return jnp.stack([state.step, jnp.argmax(bad).astype(jnp.int32)])

    # The metrics reveal a fault cheaply: the loss and the norm of the gradient are among them.
    fine = jnp.isfinite(jnp.concatenate([x.ravel() for x in metrics.values()])).all()
    return jax.lax.cond(fine | (state.fault[0] >= 0), lambda: state.fault, located)


def examples(batch: PyTree) -> int:
    """Counts the examples of a batch.

    Args:
      batch: The batch. The first axis of its arrays runs over examples.

    Returns:
      The length of the first axis; 1 for a scalar.
    """
    return math.prod(jax.tree.leaves(batch)[0].shape[:1])
