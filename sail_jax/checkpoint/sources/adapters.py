"""LoRA adapters in PEFT's layout, added to a base tensor by tensor as it is read.

An adapter is a pair of files, `adapter_config.json` and `adapter_model.safetensors`. `adapted` adds
one to the tensors of a base, `load_adapter` brings its factors into memory, and `adapter_files`
makes both files' content from factors.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint
from sail_jax.checkpoint.recipe.declared import kind
from sail_jax.checkpoint.recipe.patterns import compiled
from sail_jax.checkpoint.sources.view import View
from sail_jax.checks import nearest
from sail_jax.lora import Adapter, LowRank
from sail_jax.merging.tensors import OnDemand, Shape, Tensor, Tensors, held, read_whole

__all__ = ["Adapted", "adapted", "adapter_files", "load_adapter", "with_adapter"]

PREFIX = "base_model.model."
# How many entries of B A are formed at once.
_BLOCK = 1 << 18
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_embedding_|lora_)(?P<side>[AB])(?:\.(?!weight$|bias$)[^.]+)?"
    r"(?P<weight>\.weight)?"
)
# Entries of a config that would change the numbers, with the values under which they do not. Any
# other value is refused.
_PLAIN = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "megatron_config": (None,),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "arrow_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
_LARGEST = float(np.finfo(np.float32).max)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def _rank(value: Any) -> int:
    """A rank from a config, checked."""
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError("expected an integer >= 1")
    return value


def _alpha(value: Any) -> float:
    """An alpha from a config, checked."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError("expected a number of float32")
    return float(value)


def _module(text: Any) -> Any:
    """The compiled pattern of a module's name, which PEFT matches against the name's end."""
    # Compiled alone first: its parentheses might otherwise be closed by those around it.
    compiled(str(text))
    return compiled(rf"(?:.*\.)?(?:{text})$")


_Rank = Annotated[int, PlainValidator(_rank)]
_Alpha = Annotated[float, PlainValidator(_alpha)]
_Module = Annotated[Any, PlainValidator(_module)]


class _Config(BaseModel):
    """The entries of `adapter_config.json` that the numbers depend on."""

    model_config = ConfigDict(frozen=True, strict=True, defer_build=True)

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[_Module, _Rank] | None = None
    alpha_pattern: dict[_Module, _Alpha] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None
    modules_to_save: list[str] | None = None
    bias: str | None = None
    init_lora_weights: Any = None


class _Factors(NamedTuple):
    """The factors of a weight's change, scale * B A or, if `transposed`, scale * (B A)^T."""

    B: Tensor
    A: Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> Shape:
        """The shape of the weight that they change."""
        shape = (self.B.shape[0], self.A.shape[1])
        return shape[::-1] if self.transposed else shape


class Adapted(OnDemand):
    """A weight with an adapter added: base + scale * B A, computed as it is read.

    The sum is taken in float32 and rounded once. The factors are kept in memory, the product is
    not: it is formed in blocks of rows that depend on the shape alone, so that an entry has the
    same bits whatever else is read with it.

    Attributes:
      base: The weight without the adapter.
      factors: The factors B and A, their scale, and whether the product is transposed.
    """

    def __init__(self, base: Tensor, factors: _Factors, dtype: np.dtype | None = None) -> None:
        """Describes the sum; nothing is read yet.

        Args:
          base: The weight without the adapter, of two axes.
          factors: The factors of the change.
          dtype: The type of the sum; by default that of the base.
        """
        dtype = base.dtype if dtype is None else np.dtype(dtype)
        super().__init__(base.name, dtype, base.shape, f"{base.source} + {factors.B.source}")
        self.base, self.factors = base, factors

    @property
    def needs(self) -> int:
        """Bytes of the factors, and of a block: of the base, of its change, and of their sum."""
        entries = sum(math.prod(factor.shape) for factor in self.factors[:2])
        block = max(_BLOCK, self.shape[1]) * (self.base.dtype.itemsize + 3 * 4)
        return 4 * entries + block + sum(map(held, (self.base, *self.factors[:2])))

    def form(self) -> tuple[np.ndarray, np.ndarray]:
        B, A = (_whole(x) for x in self.factors[:2])
        # Scaled once, on the small factor instead of on every block of the product.
        B = B * np.float32(self.factors.scale)
        # (B A)^T = A^T B^T: a transposed product is a product of transposed factors.
        return (A.T, B.T) if self.factors.transposed else (B, A)

    def fill(self, formed: tuple[np.ndarray, np.ndarray], out: np.ndarray, start: int) -> None:
        left, right = formed
        columns, stop = self.shape[1], start + out.size
        height = max(1, _BLOCK // columns)
        # Blocks begin at multiples of their height, wherever reading begins.
        for row in range(start // columns // height * height, -(-stop // columns), height):
            at = row * columns
            begin, end = max(start, at), min(stop, at + height * columns)
            original = np.empty(end - begin, self.base.dtype)
            self.base.read(original, begin)
            change = (left[row : row + height] @ right).reshape(-1)[begin - at : end - at]
            # The sum in float32 and one cast: a small change added in bfloat16 would be rounded
            # away.
            total = original.astype(np.float32) + change
            out[begin - start : end - start] = total.astype(self.dtype)


def adapted(
    base: Tensors, tensors: Tensors, config: Mapping[str, Any], dtype: np.dtype | None = None
) -> dict[str, Tensor]:
    """Adds a LoRA adapter to the tensors of a base; each sum is computed as it is read.

    A weight becomes W + s B A, where s = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
    `rank_pattern` and `alpha_pattern` give single modules an r and an alpha of their own.
    Embeddings, and all weights under `fan_in_fan_out`, get (B A)^T instead. Whole tensors in the
    adapter (of `modules_to_save`, biases, embeddings saved along) replace those of the base.

    Args:
      base: The tensors of the base model, by name.
      tensors: The tensors of `adapter_model.safetensors`.
      config: The content of `adapter_config.json`.
      dtype: The type of the sums; by default that of the base. Float32 keeps, for a merge that
        follows, what half precision would round off.

    Returns:
      The tensors of the base by name, with those in place that the adapter changes.

    Raises:
      CheckpointError: If a key is unknown or has no place in the base, a factor lacks the other,
        shapes do not fit, or the adapter is more than B A: DoRA, another type than LORA, or an
        initialisation that changed the base (PiSSA, OLoRA, CorDA, LoftQ).

    References:
      Hu et al., LoRA, 2021 (arXiv 2106.09685); Kalajdzievski, A Rank Stabilization Scaling Factor
      for Fine-Tuning with LoRA, 2023 (arXiv 2312.03732), for `use_rslora`.
    """
    factors, replacements = _parsed(tensors, config)
    merged: dict[str, Tensor] = dict(base)
    for name, pair in factors.items():
        start = _in_base(name, pair.B.source, base)
        if start.shape != pair.shape:
            raise CheckpointError(
                f"{name} of {pair.B.source}: expected a change of shape {start.shape}, got "
                f"{pair.shape}{' (fan_in_fan_out?)' if start.shape == pair.shape[::-1] else ''}"
            )
        _check_floating(f"{name} of {pair.B.source}: expected a base", start.dtype)
        merged[name] = Adapted(start, pair, dtype)
    for name, tensor in replacements.items():
        _in_base(name, tensor.source, base)
        merged[name] = _Renamed(tensor, name)
    return merged


def with_adapter(base: Checkpoint, adapter: Checkpoint) -> View:
    """Adds an open adapter to an open checkpoint.

    Args:
      base: The checkpoint of the base model.
      adapter: The folder of the adapter.

    Returns:
      The adapted model as a checkpoint.

    Raises:
      CheckpointError: As `adapted` does.
      ValueError: If adapter_config.json cannot be read.
    """
    config = config_of(adapter.extras, "adapter_config.json")
    return View([base], adapted(base.tensors, adapter.tensors, config))


def load_adapter(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, LowRank]:
    """Loads the factors of an adapter into memory, in float32.

    Args:
      tensors: The tensors of `adapter_model.safetensors`.
      config: The content of `adapter_config.json`.

    Returns:
      The factors by the name of the weight, with the scale multiplied into B. Where the adapter
      adds (B A)^T, the factors are A^T and B^T, so that their product is what is added.

    Raises:
      CheckpointError: As `adapted` does, and if the adapter holds whole tensors.
    """
    factors, replacements = _parsed(tensors, config)
    if replacements:
        raise CheckpointError(
            f"adapter: expected factors only, got the whole of {_some(replacements)}"
        )
    adapter = {}
    for name, pair in factors.items():
        B, A = np.float32(pair.scale) * _whole(pair.B), _whole(pair.A)
        adapter[name] = LowRank(A.T, B.T) if pair.transposed else LowRank(B, A)  # type: ignore
    return adapter


def adapter_files(
    adapter: Adapter, whole: Mapping[str, Any] | None = None, *, base_model: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Makes the content of an adapter's two files, in PEFT's layout for weights [out, in].

    Each alpha equals its rank, so that the scale is 1.

    Args:
      adapter: Factors B `(out, rank)` and A `(rank, in)` by the name of the weight, which ends in
        ".weight".
      whole: Tensors that replace those of the base, by name. Their modules become
        `modules_to_save`.
      base_model: The name of the base model, for the config.

    Returns:
      The tensors by key, and the config.

    Raises:
      ValueError: If a name has another form.

    >>> pair = LowRank(np.ones((3, 1), "f"), np.ones((1, 2), "f"))
    >>> tensors, config = adapter_files({"layer.weight": pair})
    >>> sorted(tensors)[0], config["r"], config["target_modules"]
    ('base_model.model.layer.lora_A.weight', 1, ['layer'])
    """
    tensors, ranks = {}, {}
    for name, pair in adapter.items():
        module, dot, last = name.rpartition(".")
        if not dot or last != "weight":
            raise ValueError(f"adapter: expected names that end in '.weight', got {name!r}")
        ranks[module] = int(np.shape(pair.A)[0])
        for side, factor in (("A", pair.A), ("B", pair.B)):
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = np.ascontiguousarray(factor)
    for name, array in (whole or {}).items():
        if "." not in name:
            raise ValueError(f"whole: expected names 'module.parameter', got {name!r}")
        tensors[PREFIX + name] = np.ascontiguousarray(array)
    most = max(ranks.values(), default=1)
    # The config has one rank for all modules; those that differ are listed.
    pattern = {f"^{re.escape(m)}": r for m, r in ranks.items() if r != most}
    saved = sorted({name.rpartition(".")[0] for name in whole or {}})
    return tensors, {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": pattern,
        "alpha_pattern": dict(pattern),
        "target_modules": sorted(ranks),
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }


class _Renamed:
    """A tensor under another name."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self.dtype, self.shape, self.source = tensor.dtype, tensor.shape, tensor.source

    @property
    def needs(self) -> int:
        """Bytes that the tensor itself holds."""
        return held(self.tensor)

    def read(self, out: np.ndarray, start: int = 0) -> None:
        self.tensor.read(out, start)


def _parsed(
    tensors: Tensors, config: Mapping[str, Any]
) -> tuple[dict[str, _Factors], dict[str, Tensor]]:
    """Sorts an adapter's tensors: factors by the weight they change, whole tensors by name."""
    if not tensors:
        raise CheckpointError("adapter: expected factors A and B, got no tensors at all")
    checked = _checked(config, next(iter(tensors.values())).source)
    pairs: dict[tuple[str, bool], dict[str, Tensor]] = {}
    replacements: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise CheckpointError(
                f"{tensor.source}: expected keys '{PREFIX}...' in an adapter, got {key!r}"
            )
        match = _FACTOR.fullmatch(key.removeprefix(PREFIX))
        if match and bool(match["weight"]) == (match["kind"] == "lora_"):
            sides = pairs.setdefault((match["module"], match["kind"] != "lora_"), {})
            if match["side"] in sides:
                raise CheckpointError(f"{tensor.source}: several adapters for {match['module']!r}")
            sides[match["side"]] = tensor
        elif match or ".lora_" in key:
            raise CheckpointError(f"{tensor.source}: {key!r} is no factor A or B of an adapter")
        else:
            replacements[_whole_name(key, tensor, checked)] = tensor
    return {
        f"{module}.weight": _factors(module, sides, embedding, checked)
        for (module, embedding), sides in pairs.items()
    }, replacements


def _factors(
    module: str, sides: Mapping[str, Tensor], embedding: bool, config: _Config
) -> _Factors:
    """The checked factors of one module, with their scale."""
    for side in "AB":
        if side not in sides:
            other = next(iter(sides.values()))
            raise CheckpointError(f"{other.source}: {module!r} has no lora_{side}")
    A, B = sides["A"], sides["B"]
    rank = _of_module(config.r, config.rank_pattern, module)
    for factor in (A, B):
        _check_floating(f"{factor.source}: {module!r}: expected factors", factor.dtype)
    if len(A.shape) != 2 or len(B.shape) != 2 or A.shape[0] != B.shape[1]:
        raise CheckpointError(
            f"{A.source}: {module!r}: expected A [rank, in] and B [out, rank], got {A.shape} and "
            f"{B.shape}"
        )
    if A.shape[0] != rank:
        raise CheckpointError(
            f"{A.source}: {module!r} has rank {A.shape[0]}, but its config says {rank}"
        )
    alpha = _of_module(config.lora_alpha, config.alpha_pattern, module)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    return _Factors(B, A, scale, embedding or bool(config.fan_in_fan_out))


def _of_module(value: Any, patterns: Mapping[Any, Any] | None, module: str) -> Any:
    """The value of the first pattern that matches a module, else the value for all."""
    fitting = (v for pattern, v in (patterns or {}).items() if pattern.fullmatch(module))
    return next(fitting, value)


def _checked(config: Mapping[str, Any], source: str) -> _Config:
    """Checks a config; CheckpointError names the entry that means more than scale * B A."""
    what = f"{source}: adapter config"
    for key, understood in _PLAIN.items():
        if key in config and config[key] not in understood:
            raise CheckpointError(f"{what}: {key}={kind(config[key])} is not supported")
    try:
        checked = _Config.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"] if part != "[key]")
        if first["type"] == "missing":
            raise CheckpointError(f"{what}: {key} is missing") from error
        expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        raise CheckpointError(f"{what}: {key}: {expected}, got {kind(first['input'])}") from error
    start = checked.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{what}: init_lora_weights={kind(start)} belongs to a changed base; convert the "
            "adapter to plain LoRA where it was trained"
        )
    return checked


def _whole_name(key: str, tensor: Tensor, config: _Config) -> str:
    """The name, in the base, of the tensor that a whole tensor replaces.

    CheckpointError if the config announces no such tensor.
    """
    name = re.sub(r"\.modules_to_save(\.[^.]+)?(?=\.[^.]+$)", "", key.removeprefix(PREFIX))
    name = name.replace(".base_layer.", ".")
    module, _, parameter = name.rpartition(".")
    saved = config.modules_to_save or []
    announced = any(f".{part}." in f".{module}." for part in saved)
    announced |= parameter == "bias" and config.bias not in (None, "none")
    announced |= module.rpartition(".")[2] in (
        "embed_tokens",
        "lm_head",
        "wte",
    )  # saved along if resized
    if not announced:
        raise CheckpointError(
            f"{tensor.source}: unknown key {key!r}: neither a factor nor of modules_to_save {saved}"
        )
    return name


def _check_floating(expected: str, dtype: np.dtype) -> None:
    """CheckpointError unless a dtype is floating."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"{expected} of a floating dtype, got {dtype}")


def _in_base(name: str, source: str, base: Tensors) -> Tensor:
    """The base's tensor of a name; CheckpointError, with the nearest names, if it has none."""
    if name not in base:
        raise CheckpointError(f"{source}: {name!r} is not in the base{nearest(name, base)}")
    return base[name]


def _whole(tensor: Tensor) -> np.ndarray:
    """A tensor in memory, in float32."""
    return read_whole(tensor).astype(np.float32)


def _some(names: Mapping[str, Any]) -> str:
    """The first three names, for messages."""
    return ", ".join(list(names)[:3]) + ", ..." * (len(names) > 3)
