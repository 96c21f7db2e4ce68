"""Makes mixtures of experts from dense networks: the source of each tensor, and its changes.

A mixture consists of the attention, norms and embeddings of one dense network, with experts in
place of its feed-forward parts. A router selects some experts for each token. An expert is the
feed-forward part of a dense network: the same network, or another one that was fine-tuned from it.

    y = sum_e s_e(x) expert_e(x),    s = the k largest of softmax(router x), divided by their sum

Qwen2-MoE adds a shared expert, which every token uses, with a separate weight:

    y + sigmoid(g x) shared(x)

The shared expert of Granite has weight 1.

The weights s add up to 1. Equal experts therefore give y = expert(x) for any router, and the
mixture computes the same function as the dense network. This requires that a shared expert adds
nothing: either its last layer is zero, or its weight is known and the other experts are scaled to
the rest. The weight is 1/2 if g is zero.

In training, only the router distinguishes equal experts. Noise breaks this symmetry. So does
drop-upcycling, which draws new values for a fraction of the hidden units of each expert.

Unchanged tensors are not copied. A plan (`plan`) lists them, and the mixture refers to them, in
memory (`upcycle`) and in files.

References:
  Komatsuzaki et al., Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints, 2022
  (arXiv 2212.05055). Nakamura et al., Drop-Upcycling: Training Sparse Mixture of Experts with
  Partial Re-initialization, 2025 (arXiv 2502.19261).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, UInt

from sail_jax import architectures
from sail_jax.architectures.table import count, stated
from sail_jax.checks import integer, nearest, one_of, static
from sail_jax.configurations import Config, class_of
from sail_jax.trees import some_paths

Tree = Mapping[str, Any]
"""The tensors of a network by name: arrays, or objects with a shape and a dtype."""


class Target(NamedTuple):
    """A kind of mixture, and the names of its parts.

    Attributes:
      label: Its common name, as in mergekit's files.
      sources: The model types of its dense networks.
      prefix: The start of its class names.
      router: The name of the router within a layer.
      expert: The names of the experts' tensors within a layer, with the dense parts in each tensor,
        concatenated along rows. A tensor whose name contains `{e}` (the number of the expert)
        stores one expert. Any other tensor stores all experts, stacked.
      count: The entry of the configuration that states the number of experts.
      states: Further entries of the configuration. A string is the name of an entry of the dense
        network. A mapping contains a value for each source.
      shared: Like `expert`, for the shared expert; empty without one.
      share: The name of the tensor that computes the weight of the shared expert; empty if it is 1.
    """

    label: str
    sources: tuple[str, ...]
    prefix: str
    router: str
    expert: Mapping[str, tuple[str, ...]]
    count: str
    states: Mapping[str, Any]
    shared: Mapping[str, tuple[str, ...]] = {}
    share: str = ""


_DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_DOWN = "mlp.down_proj"


def _within(folder: str) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of an expert with separate tensors, with the names of dense parts."""
    return {name.replace("mlp.", folder): (name,) for name in _DENSE}


def _granite(folder: str) -> dict[str, tuple[str, ...]]:
    """Returns the two tensors of Granite's experts; one joins both weights that read the stream."""
    return {f"{folder}input_linear": _DENSE[:2], f"{folder}output_linear": _DENSE[2:]}


_GRANITE = Target(
    "Granite MoE",
    ("granite",),
    "GraniteMoe",
    "block_sparse_moe.router.layer",
    _granite("block_sparse_moe."),
    "num_local_experts",
    {},
)

TARGETS = {
    "mixtral": Target(
        "Mixtral",
        ("llama", "mistral"),
        "Mixtral",
        "block_sparse_moe.gate",
        {f"block_sparse_moe.experts.{{e}}.{new}": (old,)
         for new, old in zip(("w1", "w3", "w2"), _DENSE, strict=True)},
        "num_local_experts",
        {},
    ),
    "qwen3_moe": Target(
        "Qwen3 MoE",
        ("qwen3",),
        "Qwen3Moe",
        "mlp.gate",
        _within("mlp.experts.{e}."),
        "num_experts",
        {"moe_intermediate_size": "intermediate_size", "norm_topk_prob": True,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen2_moe": Target(
        "Qwen MoE",
        ("qwen2", "llama"),
        "Qwen2Moe",
        "mlp.gate",
        _within("mlp.experts.{e}."),
        "num_experts",
        {"moe_intermediate_size": "intermediate_size", "norm_topk_prob": True,
         "shared_expert_intermediate_size": "intermediate_size",
         "qkv_bias": {"qwen2": True, "llama": False},
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        _within("mlp.shared_expert."),
        "mlp.shared_expert_gate",
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE._replace(
        label="Granite MoE shared",
        prefix="GraniteMoeShared",
        states={"shared_intermediate_size": "intermediate_size"},
        shared=_granite("shared_mlp."),
    ),
}  # fmt: skip
"""The kinds of mixtures by model type."""

# The defaults of dense networks for missing entries. Mixtures have other defaults, so these are
# written explicitly.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "granite": {},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
_SHARED = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


class Expert(NamedTuple):
    """An expert: the feed-forward part of a network, with changes.

    Attributes:
      model: The number of the network, from 0. Network 0 also provides the rest of the mixture.
      noise: The standard deviation of normal noise on its weights.
      residual: The factor on its last layer, after the noise.
      drop: The fraction of its hidden units with newly drawn weights.
    """

    model: int = 0
    noise: float = 0.0
    residual: float = 1.0
    drop: float = 0.0


@dataclass(frozen=True)
class Edit:
    """The change of one weight of an expert. Weights of the same shape share a compiled program.

    Attributes:
      noise: As the attribute of `Expert`.
      residual: As the attribute of `Expert`; 1 for a weight outside the last layer.
      drop: As the attribute of `Expert`.
      axis: The axis of hidden units.
    """

    noise: float
    residual: float
    drop: float
    axis: int

    def __call__(
        self, drawn: tuple[Key[Array, ""] | None, UInt[Array, "3"]], x: Float[Array, "n m"]
    ) -> Float[Array, "n m"]:
        """Changes a weight; `drawn` has a key and the numbers of layer, expert and weight."""
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.drop or self.noise:
            key, (layer, expert, weight) = drawn
            assert key is not None, "`plan` asks for a key"
            of_expert = jax.random.fold_in(jax.random.fold_in(key, layer), expert)
            of_weight = jax.random.fold_in(of_expert, weight)
            if self.drop:
                units = y.shape[self.axis]
                # The three weights of an expert use the same key, and therefore replace the same
                # units.
                order = jax.random.permutation(of_expert, units)
                y = redrawn(y, order, round(self.drop * units), of_weight, self.axis)
            if self.noise:
                noise = jax.random.normal(jax.random.fold_in(of_weight, 1), y.shape, y.dtype)
                y = y + self.noise * noise
        return (y * self.residual).astype(x.dtype)


def redrawn(
    x: Float[Array, "n m"], order: UInt[Array, "units"], few: int, key: Key[Array, ""], axis: int
) -> Float[Array, "n m"]:
    """Draws new entries for some units of a weight from a normal distribution.

    Its mean and standard deviation are those of the replaced entries. `order` numbers the units
    along `axis`, and the first `few` units are replaced. Only these are drawn.
    """
    if not few:
        return x
    mask = jnp.broadcast_to(jnp.expand_dims(order < few, 1 - axis), x.shape)
    mean, std = jnp.mean(x, where=mask), jnp.std(x, where=mask)
    shape = (few, x.shape[1]) if axis == 0 else (x.shape[0], few)
    drawn = mean + std * jax.random.normal(key, shape, x.dtype)
    return jnp.where(mask, jnp.take(drawn, jnp.minimum(order, few - 1), axis), x)


class Part(NamedTuple):
    """A tensor of a mixture: its source and its change.

    Attributes:
      like: Its shape and dtype.
      source: The number of a network and the name of its tensor; None for a router.
      function: `function(operands, array)` computes the tensor; None if the source is unchanged.
      operands: A pytree of arrays that differ between tensors with the same function. For a router,
        its rows.
    """

    like: jax.ShapeDtypeStruct
    source: tuple[int, str] | None
    function: Callable[..., Array] | None = None
    operands: Any = ()

    def of(self, models: Sequence[Tree]) -> Any:
        """Returns the tensor for these networks: one of their arrays, or a computed one."""
        if self.source is None:
            return self.operands
        model, name = self.source
        if self.function is None:
            return models[model][name]
        # Tensors with equal functions share the program.
        return jax.jit(self.function)(self.operands, jnp.asarray(models[model][name]))


class Joined(NamedTuple):
    """A tensor of a mixture that consists of several parts.

    Attributes:
      like: Its shape and dtype.
      parts: The parts, in the order of their entries.
    """

    like: jax.ShapeDtypeStruct
    parts: tuple[Part, ...]

    def of(self, models: Sequence[Tree]) -> Any:
        """Returns the tensor for these networks, a new array."""
        arrays = [part.of(models) for part in self.parts]
        # JAX would convert float64 to float32.
        own = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
        flat = [x.astype(self.like.dtype).reshape(-1) for x in arrays]
        return own.concatenate(flat).reshape(self.like.shape)


class Plan(NamedTuple):
    """A planned mixture, complete except for its values.

    Attributes:
      config: Its configuration.
      parts: Its tensors by name.
      alike: Whether the mixture computes the same function as the dense network. Every expert is
        then the base's feed-forward part, and a shared expert adds nothing.
    """

    config: Config
    parts: Mapping[str, Part | Joined]
    alike: bool


def target_of(model_type: str, named: str | None = None) -> str:
    """Chooses the kind of mixture for dense networks.

    Args:
      model_type: The model type of the dense networks.
      named: A model type of mixtures, or the start of a label, case-insensitive. None for the first
        suitable kind.

    Returns:
      A key of `TARGETS`.

    Raises:
      ValueError: If no kind is suitable.

    >>> target_of("mistral"), target_of("qwen3", "Qwen3 MoE")
    ('mixtral', 'qwen3_moe')
    """
    said = (named or "").lower()
    able = [
        kind
        for kind, target in TARGETS.items()
        if said == kind or target.label.lower().startswith(said)
    ]
    if not able:
        labels = [target.label for target in TARGETS.values()]
        raise ValueError(f"architecture: no mixture is called {named!r}{nearest(said, labels)}")
    for kind in able:
        if model_type in TARGETS[kind].sources:
            return kind
    known = "; ".join(f"{TARGETS[kind].label} of {_list(TARGETS[kind].sources)}" for kind in able)
    raise ValueError(f"no mixture is made of networks of the type {model_type!r} (known: {known})")


def _list(words: Sequence[str]) -> str:
    return " or ".join(words)


def mixture_config(config: Config, kind: str, experts: int, used: int) -> dict[str, Any]:
    """Makes the configuration of a mixture.

    Args:
      config: The configuration of the dense network.
      kind: A key of `TARGETS`.
      experts: The number of experts.
      used: The number of experts that each token uses.

    Returns:
      The configuration. It contains the defaults of the dense network, because mixtures have other
      defaults.

    Raises:
      ValueError: If the mixture does not support the configuration.
    """
    target, own, known = TARGETS[kind], str(config.get("model_type")), stated(config)
    kinds = known.get("layer_types", ())
    if known.get("use_sliding_window") or (
        not isinstance(kinds, list | tuple) or "sliding_attention" in kinds
    ):
        raise ValueError(f"{target.label} does not support the sliding-window layers of {own}")
    out = {**_SHARED, **_DEFAULTS[own], **config}
    rope = {**known.get("rope_parameters", {}), **known.get("rope_scaling", {})}
    if "rope_theta" not in {**rope, **known}:
        out["rope_theta"] = 10000.0
    if out.get("num_key_value_heads") is None:
        out["num_key_value_heads"] = count(config, "num_attention_heads")
    for entry, value in target.states.items():
        value = value[own] if isinstance(value, Mapping) else value
        out[entry] = count(config, value) if isinstance(value, str) else value
    out |= {target.count: experts, "num_experts_per_tok": used, "model_type": kind}
    # Mixtures do not read Qwen3's list of layer kinds.
    out.pop("layer_types", None)
    task = re.search(r"(For\w+|Model)$", class_of(config) or "ForCausalLM")
    out["architectures"] = [target.prefix + (task[0] if task else "ForCausalLM")]
    return out


def plan(
    models: Sequence[Tree],
    config: Config,
    experts: Sequence[Expert],
    router: Float[ArrayLike, "layer expert width"],
    *,
    used: int = 2,
    kind: str | None = None,
    shared: Expert | None = None,
    key: Key[Array, ""] | None = None,
) -> Plan:
    """Plans a mixture of experts from the names, shapes and dtypes of dense networks.

    Args:
      models: The dense networks. The first is the base, which provides everything except the
        experts. Only the feed-forward parts of the others are read.
      config: The configuration of the base.
      experts: The experts, in order.
      router: The rows of the routers, `(layer, expert, width)`. Each expert has one row. A last row
        computes the weight of a shared expert, if it is not 1.
      used: The number of experts that each token uses.
      kind: A key of `TARGETS`; by default the first that is made of such networks.
      shared: The expert that every token uses, for a kind of mixtures that has one.
      key: A PRNG key, for noise and for weights that are drawn anew.

    Returns:
      The plan.

    Raises:
      ValueError: If a tensor is missing, has another shape, or does not belong in the mixture. If a
        token uses more experts than exist, or a number is out of range.
      TypeError: If something is drawn without a key.
    """
    base = models[0]
    all_of = [*experts, *([shared] if shared else [])]
    _check(experts, all_of, used, len(models))
    kind = target_of(str(config.get("model_type")), kind)
    target, layers = TARGETS[kind], _layers(base)
    if bool(target.shared) != bool(shared):
        has = "has one shared expert, got none" if target.shared else "has no shared expert"
        raise ValueError(f"shared_experts: {target.label} {has}")
    new = mixture_config(config, kind, len(experts), used)
    rows = np.asarray(router, np.float32)
    wanted = (len(layers), len(experts) + bool(target.share), count(config, "hidden_size"))
    if rows.shape != wanted:
        raise ValueError(
            f"router: expected an array {list(wanted)} of layers, experts and the width, got "
            f"{list(rows.shape)}"
        )
    if key is None and any(expert.noise or expert.drop for expert in all_of):
        raise TypeError("key: expected a PRNG key, for random draws, got None")
    changed = {name for names in layers.values() for name in names.values()}
    parts: dict[str, Part | Joined]
    parts = {name: Part(_like(x), (0, name)) for name, x in base.items() if name not in changed}
    for layer, (prefix, names) in enumerate(layers.items()):
        like = _like(base[names[_DOWN]])
        own = rows[layer].astype(like.dtype)
        ends = {target.router: own[: len(experts)], target.share: own[len(experts) :]}
        for name, x in ends.items():
            if name:
                parts[f"{prefix}{name}.weight"] = Part(_like(x), None, operands=x)
        found: dict[str, list[Part]] = {}
        for e, expert in enumerate(all_of):
            made = {}
            for place, (dense, name) in enumerate(names.items()):
                source = _source(models, expert, e, name, _like(base[name]))
                drawn = key, np.array([layer, e, place], np.uint32)
                made[dense] = _edited(expert, dense, name, source, drawn)
            for name, held in (target.expert if e < len(experts) else target.shared).items():
                path = f"{prefix}{name.format(e=e)}.weight"
                found.setdefault(path, []).extend(made[dense] for dense in held)
        stacked = {f"{prefix}{name}.weight" for name in target.expert}
        for path, held in found.items():
            parts[path] = _joined(held, len(experts) if path in stacked else 0)
    try:
        architectures.of(new).rules(new).spec({name: part.like for name, part in parts.items()})
    except ValueError as error:
        raise ValueError(f"the tensors do not fit {target.label}: {error}") from error
    share = rows[:, len(experts) :] if target.share else None
    return Plan(new, parts, _alike(experts, shared, share))


def upcycle(
    models: Sequence[Mapping[str, Array]],
    config: Config,
    experts: Sequence[Expert],
    router: Float[ArrayLike, "layer expert width"],
    *,
    used: int = 2,
    kind: str | None = None,
    shared: Expert | None = None,
    key: Key[Array, ""] | None = None,
) -> tuple[dict[str, Array], Config]:
    """Makes a mixture of experts from dense networks, in memory.

    Args:
      models: The dense networks, arrays by name, the base first.
      config: The configuration of the base.
      experts: The experts.
      router: The rows of the routers, `(layer, expert, width)`, as for `plan`.
      used: The number of experts that each token uses.
      kind: A key of `TARGETS`; by default the first that is made of such networks.
      shared: The expert that every token uses, for a kind of mixtures that has one.
      key: A PRNG key, for noise and for weights that are drawn anew.

    Returns:
      The tensors of the mixture by name, and its configuration. Unchanged tensors are the arrays in
      `models`.

    Raises:
      ValueError: As `plan` does.
      TypeError: As `plan` does.

    References:
      Komatsuzaki et al., Sparse Upcycling, 2022 (arXiv 2212.05055).
    """
    planned = plan(models, config, experts, router, used=used, kind=kind, shared=shared, key=key)
    return {name: part.of(models) for name, part in planned.parts.items()}, planned.config


def _joined(parts: Sequence[Part], stacked: int) -> Part | Joined:
    """Joins parts along rows into one tensor; `stacked` counts experts, 0 without a stack."""
    rows = sum(part.like.shape[0] for part in parts)
    width = parts[0].like.shape[1]
    shape = (stacked, rows // stacked, width) if stacked else (rows, width)
    if shape == parts[0].like.shape:
        return parts[0]
    dtypes = {np.dtype(part.like.dtype) for part in parts}
    # Several dtypes are joined in the dtype to which all of them promote.
    wide = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    dtype = dtypes.pop() if len(dtypes) == 1 else wide
    return Joined(jax.ShapeDtypeStruct(shape, dtype), tuple(parts))


def _alike(
    experts: Sequence[Expert],
    shared: Expert | None,
    share: Float[np.ndarray, "layer 1 width"] | None,
) -> bool:
    """Checks whether the experts, with the shared expert, equal the base's feed-forward part.

    `share` is the tensor for the weight of the shared expert; None if it is 1.
    """
    # A shared expert with zero output adds nothing. If the gate is zero, its weight is sigmoid(0) =
    # 1/2.
    if shared is None or shared.residual == 0:
        return all(expert == Expert() for expert in experts)
    own = Expert(residual=1 - shared.residual * (1.0 if share is None else 0.5))
    return (
        not (share is not None and share.any())
        and shared == Expert(residual=shared.residual)
        and all(expert == own for expert in experts)
    )


def _check(experts: Sequence[Expert], all_of: Sequence[Expert], used: int, models: int) -> None:
    """Checks the numbers of a mixture; `all_of` includes the shared expert."""
    if not experts:
        raise ValueError("experts: expected at least one, got none")
    if integer("experts_per_token", used) > len(experts):
        raise ValueError(
            f"experts_per_token: expected at most {len(experts)}, the number of experts, got {used}"
        )
    for e, expert in enumerate(all_of):
        one_of(f"experts[{e}].model", expert.model, range(models))
        at = f"experts[{e}]."
        static(at + "noise", expert.noise, lambda x: 0 <= x < 1e6, "a number from 0")
        static(at + "residual", expert.residual, np.isfinite, "a finite number")
        static(at + "drop", expert.drop, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def _layers(base: Tree) -> dict[str, dict[str, str]]:
    """Returns the names of the feed-forward weights by kind, for each layer's prefix in order."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in base:
        match = re.fullmatch(r"((?:.*\.)?layers\.(\d{1,9})\.)(mlp\.\w+)\.weight", name)
        if match and match[3] in _DENSE:
            found.setdefault((int(match[2]), match[1]), {})[match[3]] = name
    if not found:
        raise ValueError(f"no dense feed-forward part is in {some_paths(list(base))}")
    for (number, prefix), names in found.items():
        if lost := [kind for kind in _DENSE if kind not in names]:
            raise ValueError(f"layer {number} has no tensor {prefix + lost[0]}.weight")
    # The order does not depend on the order of tensors, because it numbers the draws.
    return {at[1]: {kind: found[at][kind] for kind in _DENSE} for at in sorted(found)}


def _source(
    models: Sequence[Tree], expert: Expert, e: int, name: str, like: jax.ShapeDtypeStruct
) -> tuple[tuple[int, str], jax.ShapeDtypeStruct]:
    """Finds a weight of an expert, and checks its shape and dtype against the base."""
    model = models[expert.model]
    if name not in model:
        raise ValueError(f"experts[{e}]: the tensor {name!r} is missing{nearest(name, model)}")
    own = _like(model[name])
    if own.shape != like.shape:
        raise ValueError(
            f"experts[{e}]: {name!r} is {list(own.shape)}, expected {list(like.shape)} as in the "
            "base"
        )
    return (expert.model, name), own


def _edited(
    expert: Expert, dense: str, name: str,
    source: tuple[tuple[int, str], jax.ShapeDtypeStruct], drawn: Any,
) -> Part:  # fmt: skip
    """Makes a part of the mixture from a weight of an expert."""
    place, like = source
    residual = float(expert.residual) if dense == _DOWN else 1.0
    edit = Edit(float(expert.noise), residual, float(expert.drop), int(dense == _DOWN))
    if edit == Edit(0.0, 1.0, 0.0, edit.axis):
        return Part(like, place)
    return Part(like, place, edit, drawn)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
