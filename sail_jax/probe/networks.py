"""The interface of networks for probes: a function of parameters and a batch.

    apply(params, batch) -> outputs
    apply(params, batch) -> (outputs, features)
    apply(params, batch, override) -> (outputs, features)

The features are a mapping from layer to array `(example, ...)`, in the order of the layers. The
third form accepts a mapping of such features that replace the network's own. `stitching` requires
it.
"""

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, PyTree

from sail_jax.checks import nearest

Apply = Callable[..., Any]
OUTPUT = "output"


@jax.tree_util.register_static
class Names(tuple):
    """Names in order: a tuple of strings that results can carry through `jit`."""

    __slots__ = ()


def outputs(apply: Apply, params: PyTree, batch: PyTree, *override: Any) -> Any:
    """Runs a network and returns only its outputs.

    Args:
      apply: The network, in any of the three forms.
      params: Its parameters.
      batch: Its inputs.
      *override: Features that replace its own, if it accepts them.

    Returns:
      The outputs.
    """
    return _split(apply(params, batch, *override))[0]


def features(apply: Apply, params: PyTree, batch: PyTree) -> dict[str, Array]:
    """Runs a network and returns the features of each layer.

    Args:
      apply: The network, in any of the three forms.
      params: Its parameters.
      batch: Its inputs.

    Returns:
      The features by layer, in order. The outputs are the last layer, "output", unless the network
      has a layer of that name.

    >>> import jax.numpy as jnp
    >>> features(lambda params, x: params * x, 2.0, jnp.array([[3.0]]))
    {'output': Array([[6.]], dtype=float32)}
    """
    out, by_layer = _split(apply(params, batch))
    # The output counts as the last layer.
    return {**by_layer, OUTPUT: out} if OUTPUT not in by_layer else dict(by_layer)


def layers(apply: Apply, params: PyTree, batch: PyTree) -> Names:
    """Returns the names of a network's layers, without running it.

    Args:
      apply: The network, in any of the three forms.
      params: Its parameters.
      batch: Its inputs, a tree of arrays `(example, ...)`.

    Returns:
      The names, in order, the outputs last.

    Raises:
      ValueError: If the features of a layer are not an array `(example, ...)`, with the layer's
        name.
    """
    seen: list[str] = []

    def look(params: PyTree, batch: PyTree) -> list[Any]:
        by_layer = features(apply, params, batch)
        # `eval_shape` returns only arrays. Names are collected while the network is traced, in the
        # order of its layers.
        seen.extend(by_layer)
        return list(by_layer.values())

    shapes = jax.eval_shape(look, params, batch)
    sizes = {x.shape[0] for x in jax.tree.leaves(batch)}
    for name, layer in zip(seen, shapes, strict=True):
        if not hasattr(layer, "shape") or layer.shape[:1] not in {(n,) for n in sizes}:
            got = getattr(layer, "shape", jax.tree.structure(layer))
            raise ValueError(
                f"apply: features of layer {name!r}: expected [example, ...] with "
                f"{'/'.join(map(str, sorted(sizes)))} examples, got {got}"
            )
    return Names(seen)


def _split(returned: Any) -> tuple[Any, Mapping[str, Array]]:
    """Returns the outputs and the features, which may be empty."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    return returned, {}


def accepts_override(apply: Apply) -> bool:
    """Checks whether a network can be called with a third argument.

    Args:
      apply: The network.

    Returns:
      True if it can.
    """
    try:
        inspect.signature(apply).bind(None, None, {})
    except TypeError:
        return False
    return True


def sequential(functions: Mapping[str, Callable[[PyTree, Array], Array]]) -> Apply:
    """Makes a network from functions that are applied one after another.

    Args:
      functions: A function `(params, x) -> x` for each layer, by name, in order.

    Returns:
      A network of the third form. Its features are the results of the functions.

    >>> net = sequential({"hidden": lambda p, x: x * p["a"], "out": lambda p, x: x + p["b"]})
    >>> import jax.numpy as jnp
    >>> net({"a": 2.0, "b": 1.0}, jnp.array([3.0]))[1]
    {'hidden': Array([6.], dtype=float32), 'out': Array([7.], dtype=float32)}
    >>> net({"a": 2.0, "b": 1.0}, jnp.array([3.0]), {"hidden": jnp.array([5.0])})[0]
    Array([6.], dtype=float32)
    """

    def apply(
        params: PyTree, batch: PyTree, override: Mapping[str, Array] | None = None
    ) -> tuple[Array, dict[str, Array]]:
        x, by_layer = batch, {}
        for name, function in functions.items():
            x = override[name] if override and name in override else function(params, x)
            by_layer[name] = x
        return x, by_layer

    return apply


def flax_network(
    apply: Callable[..., Any],
    layers: str | Sequence[str] = "*",
    *,
    intercept: Callable[..., Any] | None = None,
    inputs: Callable[[Any], Any] = lambda batch: batch,
) -> Apply:
    """Makes a network from a Flax module: `flax_network(module.apply)`.

    Its params are the module's variables. Its features are the return values of the submodules and
    the values that they sow as "intermediates", in the order of the computation. Their names are
    paths, such as "block_0/in". From the second call of a submodule on, ":1" and so on is added. A
    `Dense` returns its values before the nonlinearity. To get the values after it, sow them, or
    make the nonlinearity a module.

    Args:
      apply: The module's `apply`.
      layers: Glob patterns of the layers to return. "*" crosses "/".
      intercept: `flax.linen.intercept_methods`, for a network that accepts features. None: it does
        not.
      inputs: A function from a batch to the module's input.

    Returns:
      A network of the third form. It raises a ValueError if no layer matches `layers`, or an
      override contains a layer that no submodule returned. It raises a TypeError for an override
      without `intercept`.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)

    def network(
        params: PyTree, batch: PyTree, override: Mapping[str, Array] | None = None
    ) -> tuple[Any, dict[str, Array]]:
        def run() -> Any:
            return apply(
                params, inputs(batch), capture_intermediates=True, mutable=["intermediates"]
            )

        if override:
            if intercept is None:
                raise TypeError(
                    "flax_network: features are overridden with intercept=flax.linen."
                    "intercept_methods"
                )
            replace = _Replace(override)
            with intercept(replace):
                out, state = run()
            if unused := sorted(set(override) - replace.used):
                raise ValueError(f"override: no submodule returned {unused}")
        else:
            out, state = run()
        by_layer = dict(_walk(state.get("intermediates", {})))
        chosen = {
            name: x
            for name, x in by_layer.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not chosen:
            raise ValueError(f"layers: none matches {patterns}{nearest(patterns[0], by_layer)}")
        return out, chosen

    return network


class _Replace:
    """Makes an interceptor of methods that returns given features instead of a module's own."""

    def __init__(self, override: Mapping[str, Array]):
        self.override, self.calls, self.used = override, {}, set()

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        path = "/".join(context.module.path)
        # Only the values that `capture_intermediates` records have names: results of __call__.
        if not path or context.method_name != "__call__":
            return call(*args, **kwargs)
        n = self.calls[path] = self.calls.get(path, -1) + 1
        name = _nth(path, n)
        if name not in self.override:
            return call(*args, **kwargs)
        self.used.add(name)
        return self.override[name]


def _nth(path: str, n: int) -> str:
    """Returns the name of the n-th call of the module at a path, counting from 0."""
    return f"{path}:{n}" if n else path


def _walk(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Lists the arrays of nested intermediates, each with the name of its layer."""
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        if isinstance(value, Mapping):
            yield from _walk(value, name)
        # The network's own result is its output, not a layer.
        elif key != "__call__" or path:
            name = path if key == "__call__" else name
            yield from ((_nth(name, n), x) for n, x in enumerate(value))
