"""Torch modules as JAX functions, through torchax: `jax_function`.

Torch and torchax are imported only when a module is given.
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

# The state for a later call, which is not a result.
_CACHES = ("past_key_values", "cache_params")
_LOCK = threading.Lock()
# The largest number of entries of a buffer on the meta device, which tracing requires as an array:
# half a gigabyte.
_LARGEST = 1 << 26


def jax_function(
    module: Any, *, outputs: Callable[[Any], Any] | None = None, **settings: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Makes a JAX function and a dict of parameters from a torch module.

    `spec_of`, `check_spec`, `certificate` and other functions of networks accept both. The function
    calls `module.forward` on JAX or NumPy arrays. If the last input is a dict, it contains inputs
    by keyword: `apply(params, {"input_ids": ids})`. The module is run as after `module.eval()`, and
    is not changed.

    Args:
      module: A `torch.nn.Module`. On the meta device it has only shapes. In that case the
        parameters also have only shapes, and values that the module computed at its construction
        are NaN.
      outputs: Selects arrays from the result of `forward`. By default, these are the outputs called
        "logits" if there are any, otherwise all tensors. Caches are omitted.
      **settings: Keyword arguments of `forward` other than arrays, such as
        `output_hidden_states=True`. `use_cache` is False if `forward` has it.

    Returns:
      The function, called as `apply(params, *inputs)`, and the parameters: arrays by torch's names,
      including statistics of batch norms. A tied weight is listed under its first name.

    Raises:
      ImportError: If torch or torchax is not installed.
      TypeError: If the module is not a torch module.
      ValueError: If torchax computes a layer of the module wrongly.
    """
    torch, env = _environment()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if "use_cache" in inspect.signature(module.forward).parameters:
        settings.setdefault("use_cache", False)
    for name, part in module.named_modules():
        # torchax 0.0.13 uses another order of the channels of the groups.
        if getattr(part, "transposed", False) and 1 < part.groups < part.in_channels:
            raise ValueError(
                f"module {name!r}: grouped transposed convolutions are missing in torchax"
            )
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
        # One call at a time: torch has one set of modes, and the module contains other tensors
        # meanwhile.
        with _LOCK, _ready(module), env:
            # Each call draws the same numbers, and does not use the key of an earlier trace.
            env.manual_seed(0)
            tensors, given, named = jax.tree.map(
                lambda x: env.j2t_iso(jnp.asarray(x)), (own, given, dict(named))
            )
            out = torch.func.functional_call(module, tensors, given, settings | named)
        return _arrays(torch, env, outputs(out) if outputs else _chosen(out))

    return apply, params


def on_arrays(function: Callable[[dict[str, Any]], dict[str, Any]], arrays: Any) -> dict[str, Any]:
    """Calls a function of torch tensors with JAX arrays.

    `function` takes and returns a dict of tensors, and computes with torch operations. `arrays` is
    a dict of arrays, which may be traced.
    """
    _, env = _environment()
    with _LOCK, env:
        found = function({name: env.j2t_iso(jnp.asarray(x)) for name, x in arrays.items()})
        return {name: env.t2j_iso(x) for name, x in found.items()}


@functools.cache
def _environment() -> tuple[Any, Any]:
    """Returns torch, and a torchax environment in which torch tensors are constants."""
    try:
        torch = importlib.import_module("torch")
        with _named_overloads(torch):
            importlib.import_module("torchax")
            tensor = importlib.import_module("torchax.tensor")
            view = importlib.import_module("torchax.view")
            pytree = importlib.import_module("torch.utils._pytree")

            class Environment(tensor.Environment):
                """Computes on torchax tensors with JAX, and on all other tensors with torch."""

                def t2j_copy(self, args: Any) -> Any:
                    """Converts torch tensors to arrays."""
                    return pytree.tree_map_only(torch.Tensor, _constant, args)

                def t2j_iso(self, torchtensors: Any) -> Any:
                    """Extracts arrays from tensors, even if both kinds occur together."""

                    def own(x: Any) -> Any:
                        known = isinstance(x, tensor.Tensor | view.View)
                        return x if known else self.j2t_iso(self.t2j_copy(x))

                    return super().t2j_iso(pytree.tree_map_only(torch.Tensor, own, torchtensors))

                def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
                    """Runs an operation, which may write into a part of a tensor.

                    torchax 0.0.13 writes into a copy of the part if it has no function for the
                    operation, such as `zero_`.
                    """
                    written = getattr(getattr(func, "_schema", None), "is_mutable", False)
                    if not written or not args or not isinstance(args[0], view.View):
                        return super().dispatch(func, types, args, kwargs)
                    part = args[0].torch()
                    super().dispatch(func, types, (part, *args[1:]), kwargs)
                    args[0].update(part)
                    return args[0]

            return torch, Environment()
    except ImportError as error:
        what = error.name or "torchax"
        raise ImportError(f"{what} cannot be imported: pip install 'sail-jax[torch]'") from None


@contextlib.contextmanager
def _named_overloads(torch: Any) -> Iterator[None]:
    """Makes torchax skip operators of named tensors, which were removed in torch 2.13.

    torchax 0.0.13 uses them as keys of its tables when it is imported. Here each such key is a new
    object, which equals no operator.
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
    """Returns parameters and the real-valued buffers that torch saves, with ties listed once."""
    first: dict[int, tuple[str, Any]] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if hasattr(x, "is_floating_point") and x.is_floating_point():
            first.setdefault(id(x), (name, x))
    return dict(first.values())


def _array(tensor: Any) -> Any:
    """Converts a tensor to a JAX array, or to its shape if it has no values."""
    mappings = importlib.import_module("torchax.ops.mappings")
    if tensor.device.type == "meta":
        dtype = jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype))
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    return jnp.array(mappings.t2j(tensor.detach(), use_dlpack=False))


def _constant(tensor: Any) -> Any:
    """Does the same, with recognisable values if it has none."""
    array = _array(tensor)
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array
    if math.prod(array.shape) > _LARGEST:
        raise ValueError(f"a buffer of shape {list(array.shape)} is too large to be traced")
    # It is made from a NumPy array, which is opaque to tracing. An array filled by JAX would be
    # recognised as constant along its axes.
    unknown = np.nan if jnp.issubdtype(array.dtype, jnp.inexact) else -1
    return jnp.squeeze(jnp.asarray(np.full((1, *array.shape), unknown).astype(array.dtype)), 0)


@contextlib.contextmanager
def _ready(module: Any) -> Iterator[None]:
    """Sets a module to compute in a traceable form, until the end of the block."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    # By default, transformers loops over the experts that some token chose. Their number depends
    # on values, which a traced function cannot use.
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
    """Selects outputs: logits if there are any, otherwise all, without caches."""
    if not isinstance(out, Mapping):
        return out
    kept = {name: x for name, x in out.items() if name not in _CACHES}
    logits = {name: x for name, x in kept.items() if "logits" in name and "router" not in name}
    return logits or kept


def _arrays(torch: Any, env: Any, out: Any) -> Any:
    """Converts tensors in dicts, tuples and lists to arrays, and omits everything else."""
    if isinstance(out, torch.Tensor):
        return env.t2j_iso(out)
    if isinstance(out, Mapping):
        found = {name: _arrays(torch, env, x) for name, x in out.items()}
        return {name: x for name, x in found.items() if x is not None}
    if isinstance(out, tuple | list):
        return tuple(x for x in (_arrays(torch, env, x) for x in out) if x is not None)
    return None
