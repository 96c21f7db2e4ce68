"""The entries of an adapter's configuration that affect the computation.

Some entries affect the computation: the fields of `AdapterConfig`. Some select the trained modules,
which also follows from the tensors, or matter only in training. Any other entry is refused by its
key, unless it is switched off: it changes the function or the base, or is unknown.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from sail_jax.checkpoint.contents.layers import position
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.recipe.declared import expected, kind
from sail_jax.checkpoint.recipe.patterns import Pattern, compiled
from sail_jax.configurations import Config

# Entries of peft 0.21's LoraConfig that do not affect a trained adapter: its origin, the choice of
# modules, and options of training and initialisation. (Options of an initialisation have an effect
# only if `init_lora_weights` selects it, which is checked.)
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
        *("layers_pattern",),
        *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    )
)
# Initialisations that leave the base unchanged. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
# subtract the initial factors from the base.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_LARGEST = float(np.finfo(np.float32).max)


def _integer(least: int) -> PlainValidator:
    """Checks an integer."""

    def check(value: object) -> int:
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(f"expected an integer >= {least}")
        return value

    return PlainValidator(check)


def _alpha(value: object) -> float:
    """Checks an alpha from a config."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError("expected a number of float32")
    return float(value)


def _module(text: object) -> Pattern:
    """Compiles the pattern of a module's name, which PEFT matches against the name's end."""
    # It is first compiled separately, because the surrounding parentheses could otherwise close its
    # own.
    compiled(str(text))
    return compiled(rf"(?:.*\.)?(?:{text})$")


N = TypeVar("N", int, float)
_Rank = Annotated[int, _integer(1)]
_Alpha = Annotated[float, PlainValidator(_alpha)]
_Row = Annotated[int, _integer(0)]
_Module = Annotated[Pattern, PlainValidator(_module)]


class AdapterConfig(BaseModel):
    """The entries of `adapter_config.json` that affect the computation.

    Attributes:
      peft_type: The kind of adapter.
      task_type: The task, which determines whether the model has a head of tokens.
      r: The rank of modules without an entry in `rank_pattern`.
      lora_alpha: The alpha of modules without an entry in `alpha_pattern`.
      rank_pattern: Ranks of single modules.
      alpha_pattern: Alphas of single modules.
      use_rslora: Whether the scale is alpha / sqrt(r).
      fan_in_fan_out: Whether weights are stored as [in, out], if their shape does not determine it.
      modules_to_save: The modules that were trained and saved whole.
      bias: Which biases were trained.
      init_lora_weights: The initialisation of the factors.
      use_dora: Whether each output unit has its own magnitude.
      lora_bias: Whether the factor B has a bias.
      trainable_token_indices: The rows of embeddings that were trained alone, by module.
      target_parameters: Parameters, not modules, that have factors.
      target_modules: The modules that have factors: ends of names, or one pattern.
      exclude_modules: Modules among them without factors, stated in the same way.
      layers_to_transform: The numbers of the layers with factors; None for all.
    """

    model_config = ConfigDict(frozen=True, strict=True, defer_build=True)

    peft_type: Literal["LORA"]
    task_type: str | None = None
    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[_Module, _Rank] | None = None
    alpha_pattern: dict[_Module, _Alpha] | None = None
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None
    modules_to_save: list[str] | None = None
    bias: str | None = None
    init_lora_weights: Any = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    trainable_token_indices: list[_Row] | dict[str, list[_Row]] | None = None
    target_parameters: list[str] | None = None
    target_modules: Any = None
    exclude_modules: Any = None
    layers_to_transform: Any = None

    def rank(self, module: str) -> int:
        """Returns the rank of a module."""
        return _of_module(self.r, self.rank_pattern, module)

    def scale(self, module: str) -> float:
        """Returns the factor on the product of a module's factors."""
        rank, alpha = self.rank(module), _of_module(self.lora_alpha, self.alpha_pattern, module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def tokens(self, module: str) -> list[int] | None:
        """Returns the rows of a module that were trained alone.

        Args:
          module: The name of an embedding or head.

        Returns:
          The rows; None without an entry for the module.
        """
        stated = self.trainable_token_indices
        if not isinstance(stated, dict):
            return stated
        fitting = (rows for part, rows in stated.items() if ends_with(module, part))
        return next(fitting, None)

    def is_saved(self, module: str) -> bool:
        """Returns whether a module was trained whole."""
        # PEFT compares the end of the name of a module, or of one around it, letter by letter.
        return any(f"{part}." in f"{module}." for part in self.modules_to_save or ())

    def parameters(self, module: str) -> list[str]:
        """Lists the parameters of a module that may have their own factors.

        Args:
          module: The name of the module.

        Returns:
          The names of parameters within the module, by `target_parameters`.
        """
        parts = [target.rpartition(".") for target in self.target_parameters or ()]
        fitting = (name for of, _, name in parts if not of or ends_with(module, of))
        return list(dict.fromkeys(fitting))

    def asks_for(self, module: str) -> bool:
        """Returns whether a module of the base should have factors.

        Args:
          module: The name of the module.

        Returns:
          Whether the config lists it. The word "all-linear" lists no module.
        """
        if _states(self.exclude_modules, module) or not _states(self.target_modules, module):
            return False
        layers, place = self.layers_to_transform, position(f"{module}.weight")
        layers = [layers] if type(layers) is int else layers
        return not isinstance(layers, list) or (place is not None and place.index in layers)


def _states(stated: object, module: str) -> bool:
    """Checks whether ends of names, or a pattern, match a module, as in PEFT."""
    if isinstance(stated, list):
        return any(isinstance(part, str) and ends_with(module, part) for part in stated)
    if not isinstance(stated, str) or stated == "all-linear":
        return False
    try:
        return compiled(stated).fullmatch(module) is not None
    except ValueError:
        return False


def ends_with(module: str, part: str) -> bool:
    """Checks whether the last components of a name equal another name, as PEFT matches names.

    Args:
      module: The name of a module.
      part: The last component, or several.

    Returns:
      Whether they are equal.
    """
    return f".{module}".endswith(f".{part}")


def checked(config: Config, source: str) -> AdapterConfig:
    """Reads the content of `adapter_config.json`.

    Args:
      config: The content.
      source: The path of the adapter, for messages.

    Returns:
      The entries that affect the computation.

    Raises:
      CheckpointError: If an entry has another type, or an unsupported meaning. The message contains
        the key.
    """
    what = f"{source}: adapter config"
    try:
        read = AdapterConfig.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"] if part != "[key]")
        if first["type"] == "missing":
            raise CheckpointError(f"{what}: {key} is missing") from error
        cause = first.get("ctx", {}).get("error")
        wanted = cause or f"expected {expected(AdapterConfig, first)}"
        raise CheckpointError(f"{what}: {key}: {wanted}, got {kind(first['input'])}") from error
    for key, value in config.items():
        # A later version of peft may define unknown keys that affect the result. Null, false and
        # empty values count as switched off.
        if key not in AdapterConfig.model_fields and key not in _HARMLESS and value:
            raise CheckpointError(f"{what}: {key[:80]!r} is not supported, got {kind(value)}")
    start = read.init_lora_weights
    if not any(start is known or start == known for known in _STARTS):
        raise CheckpointError(
            f"{what}: init_lora_weights: {kind(start)} changes the base, or is unknown; "
            "convert the adapter to plain LoRA where it was trained"
        )
    return read


def _of_module(value: N, patterns: Mapping[Pattern, N] | None, module: str) -> N:
    """Returns the value of the first pattern that matches a module, or else the common value."""
    fitting = (v for pattern, v in (patterns or {}).items() if pattern.fullmatch(module))
    return next(fitting, value)
