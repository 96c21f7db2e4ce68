"""Infers feature spaces of a Hugging Face checkpoint from the forward pass of its class.

It is used for architectures without a table in `sail_jax.architectures`. Nothing is downloaded, no
code of the checkpoint is run, and no weight is read: the class is built on the meta device.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import disk
from sail_jax.architectures import Rules
from sail_jax.architectures.files import parsed, written
from sail_jax.basis.spaces import Leaf, Spec
from sail_jax.configurations import LAYER_KEYS
from sail_jax.interop.settings import Network, table_by_probing
from sail_jax.interop.torch import jax_function, on_arrays
from sail_jax.tracing import Inferred, spec_of

LENGTH = 8  # the number of tokens in a trace
_TABLES = 64 << 20  # the most bytes of tables that are kept
_SMALL = 1 << 20  # the most parameters of a network that is built in memory
_MOST = 64  # a grown network may have this many times as many tensors and parameters


def available() -> bool:
    """Checks whether torch, torchax and transformers are installed.

    Returns:
      Whether they are. None of them is imported.
    """
    return all(importlib.util.find_spec(name) for name in ("torch", "torchax", "transformers"))


def spec_of_config(
    config: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Inferred:
    """Infers the spaces of a checkpoint's tensors from the class in its configuration.

    Args:
      config: The configuration, a config.json with `model_type` and `architectures`.
      shapes: The tensors of the checkpoint, by name.

    Returns:
      The spec of these tensors, and the reasons why some axes have no space. Tensors without an
      effect on the outputs have no space, and are listed as unused.

    Raises:
      ImportError: If torch, torchax or transformers is not installed.
      ValueError: If the class is missing in transformers, its inputs are unknown, or its tensors
        differ from the checkpoint's.
    """
    module = module_of(config, len(shapes), "meta")
    apply, params = jax_function(module)
    stored = _stored(module)
    known = {path: tuple(x.shape) for path, x in jax.eval_shape(stored, params).items()}
    for name, x in shapes.items():
        if name in known and known[name] != tuple(x.shape):
            raise ValueError(
                f"tensor {name!r} has shape {list(x.shape)}, but the configuration needs "
                f"{list(known[name])}"
            )
    if missing := sorted(known.keys() - shapes.keys()):
        raise ValueError(f"the tensor {missing[0]!r} is missing, which the configuration requires")
    found = _traced(module, apply, params, stored)
    axes = dict(found.spec.leaves)
    leaves = tuple(Leaf(name, axes.get(name, ((),) * len(x.shape))) for name, x in shapes.items())
    extra = tuple(name for name in shapes if name not in known)
    spec = Spec(leaves, found.spec.spaces)
    return Inferred(spec, found.why, found.unknown, (*found.unused, *extra))


def rules_of_config(
    config: Mapping[str, Any], tensors: int
) -> Callable[[Mapping[str, Any]], Rules]:
    """Finds the rules of an architecture, for growth: spaces, and their entries.

    Building a class with many configurations takes seconds. The result is cached as a table in
    $XDG_CACHE_HOME/sail-jax/tables (~/.cache without that variable), named by a hash of the
    configuration and of the versions. All tables together have at most 64 MiB.

    Args:
      config: The configuration, as for `spec_of_config`.
      tensors: The number of tensors of the checkpoint.

    Returns:
      A function from a configuration to its rules.

    Raises:
      ImportError: As `spec_of_config`.
      ValueError: As `spec_of_config`.
    """
    kept, name = disk.cache("tables", _TABLES), f"{_mark(config)}.json"
    found = None if kept is None else kept.get(name)
    if found is not None:
        with contextlib.suppress(ValueError):  # of another program
            return parsed(found.decode()).rules
    table = table_by_probing(config, partial(probe_config, tensors=_MOST * tensors))
    if kept is not None:
        kept.put(name, written(table).encode())
    return table.rules


def _mark(config: Mapping[str, Any]) -> str:
    """Computes a hash of everything that the table of a configuration depends on."""
    packages = ("sail-jax", "transformers", "torch", "torchax", "jax")
    about = [config, [importlib.metadata.version(name) for name in packages]]
    return disk.sha256(json.dumps(about, sort_keys=True, default=repr).encode())


def probe_config(config: Mapping[str, Any], tensors: int) -> Network:
    """Infers the network that a transformers class makes from a configuration.

    `config` is the configuration. Arguments and errors are those of `spec_of_config`.
    """
    module = module_of(config, tensors, "meta")
    if sum(p.numel() for p in module.parameters()) < _SMALL:
        # Numbers that are stored as tensors, such as the scale of embeddings, are computed then.
        module = module_of(config, tensors, "cpu")
    apply, params = jax_function(module)
    stored = _stored(module)
    found = _traced(module, apply, params, stored)
    shapes = {n: tuple(x.shape) for n, x in jax.eval_shape(stored, params).items()}
    return Network(found.spec, shapes, found.multiples)


def outputs_of_config(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Any]:
    """Builds the network of a configuration, with inputs to run it on.

    Args:
      config: The configuration, as for `spec_of_config`.
      tensors: The tensors of the checkpoint, or of one from which it was grown; their sizes bound
        the sizes of the network that is built.

    Returns:
      A function of the tensors by name. It computes the outputs of the transformers class with JAX,
      on inputs that are drawn from a fixed seed.

    Raises:
      ImportError: As `spec_of_config`.
      ValueError: As `spec_of_config`; the function raises it too, if the network cannot be run.
    """
    entries = sum(math.prod(x.shape) for x in tensors.values())
    asked = sum(p.numel() for p in module_of(config, _MOST * len(tensors), "meta").parameters())
    if asked > _MOST * entries:
        raise ValueError(f"the configuration needs {asked} parameters, but there are {entries}")
    module = module_of(config, _MOST * len(tensors), "cpu")
    apply, params = jax_function(module)
    # Every entry is stored once, so the inverse of storing is the transpose of the linear map.
    back = jax.linear_transpose(_stored(module), params)
    known = jax.eval_shape(_stored(module), params)
    rng = np.random.default_rng(0)
    text = module.config.get_text_config()
    inputs = {
        name: rng.normal(size=x.shape).astype(np.float32)
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else rng.integers(0, text.vocab_size, x.shape).astype(np.int32)
        for name, x in _inputs(module).items()
    }
    run = jax.jit(lambda own: apply(back(own)[0], inputs))

    def outputs(tensors: Mapping[str, Any]) -> Any:
        try:
            return run({name: jnp.asarray(tensors[name], x.dtype) for name, x in known.items()})
        except Exception as error:  # any error of the class for invalid tensors
            name = type(module).__name__
            raise ValueError(f"{name} cannot be run: {_first_line(error)}") from error

    return outputs


def name_of(config: Mapping[str, Any]) -> str:
    """Formats the name of a configuration's class, for messages.

    Args:
      config: The configuration.

    Returns:
      The class, and the version of transformers; "" if the configuration contains no class, or
      transformers is not installed.
    """
    classes = config.get("architectures")
    if not (
        available()
        and isinstance(classes, list | tuple)
        and classes
        and isinstance(classes[0], str)
    ):
        return ""
    return f"{classes[0]} in transformers {importlib.metadata.version('transformers')}"


def module_of(config: Mapping[str, Any], tensors: int, device: str) -> Any:
    """Builds the model of a configuration."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    classes = config.get("architectures") or [None]
    name = classes[0] if isinstance(classes, list | tuple) else None
    made = getattr(transformers, name, None) if isinstance(name, str) else None
    base = transformers.PreTrainedModel
    if not (isinstance(made, type) and issubclass(made, base) and made.config_class):
        raise ValueError(
            f"unknown class {name!r}: transformers {transformers.__version__} does not have it"
        )
    for key in LAYER_KEYS:
        # Each layer has at least one tensor. With more layers, building would take hours.
        count = config.get(key)
        if isinstance(count, int) and count > max(tensors, 1):
            raise ValueError(
                f"the configuration's {key!r} is {count}, but there are {tensors} tensors"
            )
    stated = {k: v for k, v in config.items() if k not in ("auto_map", "quantization_config")}
    kind = made.config_class
    if kind.model_type != config.get("model_type"):
        raise ValueError(f"{name} is not of the model type {config.get('model_type')!r}")
    try:
        own = kind.from_dict(stated)
        with torch.device(device):
            return made._from_config(own, attn_implementation="eager").eval()
    except Exception as error:  # any error of the class for invalid entries
        line = _first_line(error)
        raise ValueError(f"{name} cannot be built from the configuration: {line}") from error


def _traced(module: Any, apply: Any, params: Any, stored: Any) -> Inferred:
    """Infers the spaces of a model's stored tensors."""
    try:
        return spec_of(apply, params, _inputs(module), stored=stored)
    except Exception as error:  # any error of the class for invalid entries
        name = type(module).__name__
        raise ValueError(f"{name} cannot be traced: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _stored(module: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Converts a model's parameters to the tensors that transformers saves, by their names on disk.

    Some models are saved with older names, or with a separate tensor for each expert.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    # A tensor with two names is saved under the second one.
    tied = getattr(module, "all_tied_weights_keys", {})

    def named(params: Mapping[str, Any]) -> dict[str, Any]:
        other = {name: tied[name] for name in params if tied.get(name, name) not in params}
        return {other.get(name, name): x for name, x in params.items()}

    def stored(params: Mapping[str, Any]) -> dict[str, Any]:
        return on_arrays(lambda own: loading.revert_weight_conversion(module, own), named(params))

    return stored


def _inputs(module: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the inputs of a model: tokens, images, or both."""
    config, main = module.config, module.main_input_name
    # Several texts are one input of classes that choose among them.
    chooses = type(module).__name__.endswith(("ForMultipleChoice", "DoubleHeadsModel"))
    tokens = jax.ShapeDtypeStruct((1, *[2] * chooses, LENGTH), jnp.int32)
    given: dict[str, jax.ShapeDtypeStruct] = {}
    if main == "input_ids":
        given["input_ids"] = tokens
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = tokens
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if main == "pixel_values" or (size is not None and vision is not config):
        height, width = size if isinstance(size, list | tuple) else (size or 32, size or 32)
        channels = getattr(vision, "num_channels", 3)
        given["pixel_values"] = jax.ShapeDtypeStruct((1, channels, height, width), jnp.float32)
    if type(module).__name__.endswith("ForMaskedImageModeling"):
        # Without masked patches, the token for masked patches would be unused.
        side = getattr(vision, "patch_size", 16)
        count = math.prod(n // side for n in given["pixel_values"].shape[2:])
        given["bool_masked_pos"] = jax.ShapeDtypeStruct((1, count), jnp.bool_)
    if not given:
        raise ValueError(f"inputs of the kind {main!r} are not supported")
    return given
