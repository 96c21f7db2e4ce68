"""Adapters as PEFT stores them, `adapter_config.json` and `adapter_model.safetensors`: added to a
base tensor by tensor as it is read, and written."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.recipe.declared import kind
from sail_jax.checkpoint.recipe.patterns import compiled
from sail_jax.checks import nearest
from sail_jax.lora import Adapter, LowRank
from sail_jax.merging.tensors import OnDemand, Shape, Tensor, Tensors, held, read_whole

__all__ = ["Adapted", "adapted", "adapter_files", "load_adapter"]

PREFIX = "base_model.model."
_BLOCK = 1 << 18  # entries of a product formed at once
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_embedding_|lora_)(?P<side>[AB])(?:\.(?!weight$|bias$)[^.]+)?"
    r"(?P<weight>\.weight)?"
)
# of the config: what changes the numbers, and the only values that are understood
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
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError("expected an integer >= 1")
    return value


def _alpha(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError("expected a number of float32")
    return float(value)


def _module(text: Any) -> Any:
    """What matches the end of a module's name, as in PEFT."""
    compiled(str(text))  # alone, as parentheses might be closed by those around it
    return compiled(rf"(?:.*\.)?(?:{text})$")


_Rank = Annotated[int, PlainValidator(_rank)]
_Alpha = Annotated[float, PlainValidator(_alpha)]
_Module = Annotated[Any, PlainValidator(_module)]


class _Config(BaseModel):
    """What a config says of the numbers."""

    model_config = ConfigDict(frozen=True, strict=True)

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
    """The tensors of left @ right * scale = the change of a weight, and whether it is (B A)^T."""

    B: Tensor
    A: Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> Shape:
        shape = (self.B.shape[0], self.A.shape[1])
        return shape[::-1] if self.transposed else shape


class Adapted(OnDemand):
    """base + scale * B A, computed in float32 and rounded once to `dtype`, the base's by default.

    The factors are what is kept. Products are formed by blocks of rows that depend on the shape
    alone, so that an entry has the same bits whatever is read along with it.
    """

    def __init__(self, base: Tensor, factors: _Factors, dtype: np.dtype | None = None) -> None:
        dtype = base.dtype if dtype is None else np.dtype(dtype)
        super().__init__(base.name, dtype, base.shape, f"{base.source} + {factors.B.source}")
        self.base, self.factors = base, factors

    @property
    def needs(self) -> int:
        """Bytes of the factors, and of a block: of the base, its change, and their sum."""
        entries = sum(math.prod(factor.shape) for factor in self.factors[:2])
        block = max(_BLOCK, self.shape[1]) * (self.base.dtype.itemsize + 3 * 4)
        return 4 * entries + block + sum(map(held, (self.base, *self.factors[:2])))

    def form(self) -> tuple[np.ndarray, np.ndarray]:
        B, A = (_whole(x) for x in self.factors[:2])
        B = B * np.float32(self.factors.scale)
        return (A.T, B.T) if self.factors.transposed else (B, A)

    def fill(self, formed: tuple[np.ndarray, np.ndarray], out: np.ndarray, start: int) -> None:
        left, right = formed
        columns, stop = self.shape[1], start + out.size
        height = max(1, _BLOCK // columns)
        for row in range(start // columns // height * height, -(-stop // columns), height):
            at = row * columns
            begin, end = max(start, at), min(stop, at + height * columns)
            original = np.empty(end - begin, self.base.dtype)
            self.base.read(original, begin)
            change = (left[row : row + height] @ right).reshape(-1)[begin - at : end - at]
            total = original.astype(np.float32) + change
            out[begin - start : end - start] = total.astype(self.dtype)


def adapted(
    base: Tensors, tensors: Tensors, config: Mapping[str, Any], dtype: np.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of `base` with a LoRA adapter added, computed as they are read.

    tensors, config: of `adapter_model.safetensors` and `adapter_config.json`. The scale is
    lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora, per module where `rank_pattern` and
    `alpha_pattern` say so; fan_in_fan_out and embeddings add (B A)^T. Whole tensors (of
    modules_to_save, biases, embeddings saved along) replace the base's. dtype: of the sums, if not
    the base's: float32 keeps what half precision would round off before a merge.

    CheckpointError for any key that means something else or has no place in the base, a factor
    without the other, shapes that do not fit, and adapters that are more than B A: DoRA, other
    types than LORA, initialisations that changed the base (PiSSA, OLoRA, CorDA, LoftQ).
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


def load_adapter(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, LowRank]:
    """The factors in memory, float32, by the name of the weight, their scale multiplied into B;
    what adds (B A)^T has them exchanged. CheckpointError as `adapted`, and for whole tensors."""
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
    """The tensors and the config of an adapter in PEFT's layout, for weights [out, in].

    adapter: by the names of weights, "....weight". whole: tensors that replace the base's, also
    by name; their modules become modules_to_save. The alphas equal the ranks: the scale is 1.
    ValueError for other names.

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
    """The factors by the name of the weight they change, and whole tensors by name."""
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
    """What the first pattern says that matches, else the value of all others."""
    fitting = (v for pattern, v in (patterns or {}).items() if pattern.fullmatch(module))
    return next(fitting, value)


def _checked(config: Mapping[str, Any], source: str) -> _Config:
    """CheckpointError, naming the key, for what would change the numbers in another way."""
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
    """The name in the base of a tensor that replaces one; CheckpointError if none is announced."""
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
    if not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"{expected} of a floating dtype, got {dtype}")


def _in_base(name: str, source: str, base: Tensors) -> Tensor:
    if name not in base:
        raise CheckpointError(f"{source}: {name!r} is not in the base{nearest(name, base)}")
    return base[name]


def _whole(tensor: Tensor) -> np.ndarray:
    return read_whole(tensor).astype(np.float32)


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:3]) + ", ..." * (len(names) > 3)
