"""What a network is to the probes: a function of parameters and a batch that may show its features.

    apply(params, batch) -> outputs
    apply(params, batch) -> (outputs, features)
    apply(params, batch, override) -> (outputs, features)

features: a mapping, in the order of the layers, from layer to array [example, ...]. The third
form takes a mapping of such features to use in place of its own and is what `stitching` needs.
"""

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, PyTree

from sail_jax.checks import nearest

__all__ = [
    "Apply",
    "Names",
    "accepts_override",
    "features",
    "flax_network",
    "layers",
    "outputs",
    "sequential",
]

Apply = Callable[..., Any]
OUTPUT = "output"


@jax.tree_util.register_static
class Names(tuple):
    """Names in order: a tuple of strings that results may carry through jit."""

    __slots__ = ()


def outputs(apply: Apply, params: PyTree, batch: Any, *override: Any) -> Any:
    """The outputs alone."""
    return _split(apply(params, batch, *override))[0]


def features(apply: Apply, params: PyTree, batch: Any) -> dict[str, Array]:
    """The features of each layer, in order; the outputs are those of the last one, "output".

    >>> import jax.numpy as jnp
    >>> features(lambda params, x: params * x, 2.0, jnp.array([[3.0]]))
    {'output': Array([[6.]], dtype=float32)}
    """
    out, by_layer = _split(apply(params, batch))
    return {**by_layer, OUTPUT: out} if OUTPUT not in by_layer else dict(by_layer)


def layers(apply: Apply, params: PyTree, batch: Any) -> Names:
    """The layers of a network; ValueError, naming it, for one whose features are not an array with
    an entry for every example. Nothing is computed."""
    seen: list[str] = []

    def look(params: PyTree, batch: Any) -> list[Any]:
        by_layer = features(apply, params, batch)
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
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned
    return returned, {}


def accepts_override(apply: Apply) -> bool:
    """Whether a network can be called with a third argument."""
    try:
        inspect.signature(apply).bind(None, None, {})
    except TypeError:
        return False
    return True


def sequential(functions: Mapping[str, Callable[[PyTree, Array], Array]]) -> Apply:
    """The network that applies `function(params, x)` of each layer in turn.

    >>> net = sequential({"hidden": lambda p, x: x * p["a"], "out": lambda p, x: x + p["b"]})
    >>> import jax.numpy as jnp
    >>> net({"a": 2.0, "b": 1.0}, jnp.array([3.0]))[1]
    {'hidden': Array([6.], dtype=float32), 'out': Array([7.], dtype=float32)}
    >>> net({"a": 2.0, "b": 1.0}, jnp.array([3.0]), {"hidden": jnp.array([5.0])})[0]
    Array([6.], dtype=float32)
    """

    def apply(
        params: PyTree, batch: Any, override: Mapping[str, Array] | None = None
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
    """A Flax module as a network: `flax_network(module.apply)`, whose params are the variables.

    Its features are what submodules return (and sow as "intermediates"), in the order in which
    they do so, by path, "block_0/in"; from the second call of a submodule on ":1" and so on is
    added. A `Dense` returns pre-activations: sow what comes after, or make it a module.
    layers: glob patterns of those to show; "*" crosses "/". inputs: of the module, in a batch.
    intercept: `flax.linen.intercept_methods`, for a network whose features can be overridden.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)

    def network(
        params: PyTree, batch: Any, override: Mapping[str, Array] | None = None
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
    """An interceptor of methods that returns what is to be used in place of a module's own."""

    def __init__(self, override: Mapping[str, Array]):
        self.override, self.calls, self.used = override, {}, set()

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        path = "/".join(context.module.path)
        if not path or context.method_name != "__call__":
            return call(*args, **kwargs)
        n = self.calls[path] = self.calls.get(path, -1) + 1
        name = _nth(path, n)
        if name not in self.override:
            return call(*args, **kwargs)
        self.used.add(name)
        return self.override[name]


def _nth(path: str, n: int) -> str:
    return f"{path}:{n}" if n else path


def _walk(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        if isinstance(value, Mapping):
            yield from _walk(value, name)
        elif key != "__call__" or path:
            name = path if key == "__call__" else name
            yield from ((_nth(name, n), x) for n, x in enumerate(value))
