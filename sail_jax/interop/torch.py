"""Torch modules as functions in JAX, by torchax: `jax_function`.

Torch and torchax are imported when a module is given, never before.
"""

import contextlib
import functools
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Values that a later call would start from: they are no result.
_CACHES = ("past_key_values", "cache_params")
_LOCK = threading.Lock()
# Entries of a buffer on the meta device, which a trace needs as an array: half a gigabyte.
_LARGEST = 1 << 26


def jax_function(
    module: Any, *, outputs: Callable[[Any], Any] | None = None, **settings: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Makes a function in JAX of a torch module, and a dict of its parameters.

    `spec_of`, `check_spec`, `certificate` and all else that takes a network take the two. The
    function calls `module.forward` on arrays of JAX or NumPy. A dict as the last of its inputs has
    inputs by keyword: `apply(params, {"input_ids": ids})`. The module is run as after
    `module.eval()`, and stays as it was.

    Args:
      module: A `torch.nn.Module`. On the meta device it has shapes only: so do the parameters, and
        what the module computed when it was made is NaN.
      outputs: Takes what `forward` returned, and returns the arrays that count. By default, these
        are the entries named "logits" if the outputs have names and there are such entries, else
        all tensors. Caches are left out.
      **settings: Keyword arguments of `forward` that are no arrays, such as
        `output_hidden_states=True`. `use_cache` is False where `forward` has it.

    Returns:
      The function, called as `apply(params, *inputs)`, and the parameters: arrays by the names that
      torch gives them, statistics of batch norms among them. A tied weight has its first name.

    Raises:
      ImportError: If torch or torchax is not installed.
      TypeError: If the module is not of torch.
      ValueError: If the module has a layer that torchax computes wrongly.
    """
    torch, env = _environment()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if "use_cache" in inspect.signature(module.forward).parameters:
        settings.setdefault("use_cache", False)
    for name, part in module.named_modules():
        # torchax 0.0.13 takes the channels of the groups in another order.
        if getattr(part, "transposed", False) and 1 < part.groups < part.in_channels:
            raise ValueError(f"module {name!r}: torchax has no transposed convolution in groups")
    weights = _weights(module)
    known = {id(x) for x in weights.values()}
    buffers = {name: x for name, x in module.named_buffers() if id(x) not in known}
    params = {name: _array(x) for name, x in weights.items()}

    def apply(params: Mapping[str, Any], *inputs: Any) -> Any:
        """Calls the module with other parameters."""
        named = inputs[-1] if inputs and isinstance(inputs[-1], Mapping) else {}
        given = inputs[:-1] if named else inputs
        if missing := weights.keys() - params.keys():
            raise ValueError(f"params must have {min(missing)!r}, a parameter of the module")
        own = {name: _constant(x) for name, x in buffers.items()}
        own |= {name: params[name] for name in weights}
        # One at a time: torch has one set of modes, and the module holds other tensors meanwhile.
        with _LOCK, _ready(module), env:
            # Each call draws the same numbers, and starts from no key of an earlier trace.
            env.manual_seed(0)
            tensors, given, named = jax.tree.map(
                lambda x: env.j2t_iso(jnp.asarray(x)), (own, given, dict(named))
            )
            out = torch.func.functional_call(module, tensors, given, settings | named)
        return _arrays(torch, env, outputs(out) if outputs else _chosen(out))

    return apply, params


def on_arrays(function: Callable[[dict[str, Any]], dict[str, Any]], arrays: Any) -> dict[str, Any]:
    """Calls a function of tensors of torch with arrays of JAX.

    `function` takes a dict of tensors and returns one, as its operations in torch define it.
    `arrays` is a dict of arrays; they may be traced.
    """
    _, env = _environment()
    with _LOCK, env:
        found = function({name: env.j2t_iso(jnp.asarray(x)) for name, x in arrays.items()})
        return {name: env.t2j_iso(x) for name, x in found.items()}


@functools.cache
def _environment() -> tuple[Any, Any]:
    """Torch, and an environment of torchax in which tensors of torch are constants."""
    try:
        torch = importlib.import_module("torch")
        with _named_overloads(torch):
            importlib.import_module("torchax")
            tensor = importlib.import_module("torchax.tensor")
            view = importlib.import_module("torchax.view")
            pytree = importlib.import_module("torch.utils._pytree")

            class Environment(tensor.Environment):
                """Computes on tensors of torchax by JAX, and on all others by torch."""

                def t2j_copy(self, args: Any) -> Any:
                    """Makes arrays of tensors of torch."""
                    return pytree.tree_map_only(torch.Tensor, _constant, args)

                def t2j_iso(self, torchtensors: Any) -> Any:
                    """Takes arrays out of tensors, also where both kinds meet."""

                    def own(x: Any) -> Any:
                        known = isinstance(x, tensor.Tensor | view.View)
                        return x if known else self.j2t_iso(self.t2j_copy(x))

                    return super().t2j_iso(pytree.tree_map_only(torch.Tensor, own, torchtensors))

            return torch, Environment()
    except ImportError as error:
        what = error.name or "torchax"
        raise ImportError(f"{what} cannot be imported: pip install 'sail-jax[torch]'") from None


@contextlib.contextmanager
def _named_overloads(torch: Any) -> Iterator[None]:
    """Lets torchax name operators of named tensors, which torch 2.13 no longer has.

    torchax 0.0.13 lists them as keys of its tables when it is imported. Each such key is a new
    object here, which equals no operator.
    """
    packet = importlib.import_module("torch._ops").OpOverloadPacket
    found = packet.__getattr__

    def get(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("_") or "name" not in name.lower():
                raise
            return object()

    packet.__getattr__ = get
    try:
        yield
    finally:
        packet.__getattr__ = found


def _weights(module: Any) -> dict[str, Any]:
    """Parameters, and buffers of real numbers that torch saves with them; ties once."""
    first: dict[int, tuple[str, Any]] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if hasattr(x, "is_floating_point") and x.is_floating_point():
            first.setdefault(id(x), (name, x))
    return dict(first.values())


def _array(tensor: Any) -> Any:
    """A tensor as an array of JAX, or its shape where it has no values."""
    mappings = importlib.import_module("torchax.ops.mappings")
    if tensor.device.type == "meta":
        dtype = jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype))
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    return jnp.array(mappings.t2j(tensor.detach(), use_dlpack=False))


def _constant(tensor: Any) -> Any:
    """The same, with values that show it where there are none."""
    array = _array(tensor)
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array
    if math.prod(array.shape) > _LARGEST:
        raise ValueError(f"a buffer of shape {list(array.shape)} is too large to be traced")
    # Taken out of an array of NumPy, of which nothing is known: what JAX fills would be known to be
    # the same all along its axes.
    unknown = np.nan if jnp.issubdtype(array.dtype, jnp.inexact) else -1
    return jnp.squeeze(jnp.asarray(np.full((1, *array.shape), unknown).astype(array.dtype)), 0)


@contextlib.contextmanager
def _ready(module: Any) -> Iterator[None]:
    """Sets a module to compute in a way that can be traced, until the end of the block."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    # By default, transformers goes through those experts that some token chose: their number
    # depends on values, and a traced function may not.
    experts = getattr(module, "get_experts_implementation", dict)()
    changed = any(kind not in (None, "batched_mm") for kind in experts.values())
    try:
        if changed:
            module.set_experts_implementation("batched_mm")
        yield
    finally:
        for part in training:
            part.training = True
        if changed:
            module.set_experts_implementation(experts)


def _chosen(out: Any) -> Any:
    """The outputs that count: logits where there are any, no caches."""
    if not isinstance(out, Mapping):
        return out
    kept = {name: x for name, x in out.items() if name not in _CACHES}
    logits = {name: x for name, x in kept.items() if "logits" in name and "router" not in name}
    return logits or kept


def _arrays(torch: Any, env: Any, out: Any) -> Any:
    """The tensors of a result as arrays, in dicts, tuples and lists; all else is left out."""
    if isinstance(out, torch.Tensor):
        return env.t2j_iso(out)
    if isinstance(out, Mapping):
        found = {name: _arrays(torch, env, x) for name, x in out.items()}
        return {name: x for name, x in found.items() if x is not None}
    if isinstance(out, tuple | list):
        return tuple(x for x in (_arrays(torch, env, x) for x in out) if x is not None)
    return None
