"""Adapters with the keys and entries that PEFT 0.21 writes, and the models that they represent.

Each case writes a folder `base` and a folder `adapter` with NumPy alone, and returns the tensors of
the adapted model in float64, from the definitions. `.ci/peers` gives the same folders to the real
programs, and checks that PEFT writes these keys, shapes and entries.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

RANK, ALPHA = 4, 8
WIDTH, ROWS, MORE = 32, 64, 67  # of the model, of its vocabulary, and of the vocabulary resized
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Q = "model.layers.{}.self_attn.q_proj"

# As LoraConfig writes them.
DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": "base", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": ALPHA, "lora_bias": False,
    "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": RANK,
    "rank_pattern": {}, "revision": None, "target_modules": None, "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


class Case(NamedTuple):
    """An adapter and its base.

    Attributes:
      what: A description in one sentence.
      base: Writes the tensors and the config of the base.
      config: The arguments of the LoraConfig.
      build: Adds the adapter's tensors.
      written: Entries that PEFT writes differently from the arguments.
      rows: The rows of the vocabulary while the adapter was trained.
      says: Differing entries in the adapted model's config.
    """

    what: str
    base: Callable[["Builder"], None]
    config: dict[str, Any]
    build: Callable[["Builder"], None]
    written: Mapping[str, Any] = MappingProxyType({})
    rows: int | None = None
    says: Mapping[str, Any] = MappingProxyType({})


class Built(NamedTuple):
    """The output of a case: the tensors of base and adapter, the adapted ones in float64,
    configs."""

    base: dict[str, np.ndarray]
    adapter: dict[str, np.ndarray]
    right: dict[str, np.ndarray]
    model: dict[str, Any]
    config: dict[str, Any]


class Builder:
    """Collects the tensors of a base, of its adapter, and of the adapted model."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.base: dict[str, np.ndarray] = {}
        self.model: dict[str, Any] = {}
        self.adapter: dict[str, np.ndarray] = {}
        self.right: dict[str, np.ndarray] = {}

    def normal(self, *shape: int, scale: float = 0.125) -> np.ndarray:
        return (self.random.normal(size=shape) * scale).astype(np.float32)

    def put(self, key: str, array: np.ndarray) -> np.ndarray:
        self.adapter[PREFIX + key] = array
        return array.astype(np.float64)

    def start(self, module: str, start: np.ndarray | None) -> np.ndarray:
        return (self.base[f"{module}.weight"] if start is None else start).astype(np.float64)

    def lora(
        self,
        module: str,
        *,
        start: np.ndarray | None = None,
        rank: int = RANK,
        scale: float = ALPHA / RANK,
        lies_in_out: bool = False,
        embedding: bool = False,
        dora: bool = False,
        bias: bool = False,
    ) -> None:
        """Factors of a matrix or a convolution, and the weight with their change."""
        w = self.start(module, start)
        flipped = lies_in_out or embedding
        out, *into = w.shape[::-1] if flipped else w.shape
        kind, end = ("lora_embedding_", "") if embedding else ("lora_", ".weight")
        a = self.put(f"{module}.{kind}A{end}", self.normal(rank, *into))
        b = self.put(f"{module}.{kind}B{end}", self.normal(out, rank, *(1 for _ in into[1:])))
        change = scale * np.tensordot(b.reshape(out, rank), a, 1)
        total = w + (change.T if flipped else change)
        if dora:
            units = total.T if flipped else total.reshape(out, -1)
            m = (1 + self.random.random(out)).astype(np.float32)
            self.put(f"{module}.lora_magnitude_vector", m.reshape(1, -1, 1, 1) if into[1:] else m)
            gain = m / np.linalg.norm(units, axis=1)
            total = total * (gain if flipped else gain.reshape(-1, *(1 for _ in into)))
        self.right[f"{module}.weight"] = total
        if bias:
            b = self.put(f"{module}.lora_B.bias", self.normal(out))
            before = self.right.get(f"{module}.bias", self.base[f"{module}.bias"])
            self.right[f"{module}.bias"] = before + scale * b

    def whole(self, name: str, array: np.ndarray, *keys: str) -> np.ndarray:
        """A whole tensor, under one or more keys."""
        for key in keys or (name,):
            self.put(key, array)
        self.right[name] = array.astype(np.float64)
        return array

    def rows(self, module: str, rows: list[int], start: np.ndarray | None = None) -> np.ndarray:
        """Adds single rows that were trained."""
        total = self.start(module, start)
        delta = self.normal(len(rows), total.shape[1])
        total[rows] = self.put(f"{module}.token_adapter.trainable_tokens_delta", delta)
        self.right[f"{module}.weight"] = total
        return delta

    def experts(self, w: np.ndarray, keys: str, *, transposed: bool = False) -> np.ndarray:
        """Factors of stacked experts [expert, ., .], expert by expert."""
        count, (out, into) = len(w), (w.shape[:0:-1] if transposed else w.shape[1:])
        a = self.put(f"{keys}.lora_A.weight", self.normal(count * RANK, into))
        b = self.put(f"{keys}.lora_B.weight", self.normal(out, RANK * count))
        total = w.astype(np.float64)
        for e in range(count):
            own = b[:, e::count] @ a[e * RANK : (e + 1) * RANK]
            total[e] += ALPHA / RANK * (own.T if transposed else own)
        return total


# --- bases


def llama(b: Builder, tied: bool = False, **more: Any) -> None:
    d, f, kv = WIDTH, 48, 16
    b.base["model.embed_tokens.weight"] = b.normal(ROWS, d)
    for i in range(2):
        p = f"model.layers.{i}."
        shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
        b.base |= {f"{p}self_attn.{k}_proj.weight": b.normal(*s) for k, s in shapes.items()}
        b.base |= {f"{p}mlp.{k}_proj.weight": b.normal(f, d) for k in ("gate", "up")}
        b.base[p + "mlp.down_proj.weight"] = b.normal(d, f)
        b.base |= {f"{p}{k}_layernorm.weight": np.ones(d, "f") for k in ("input", "post_attention")}
    b.base["model.norm.weight"] = np.ones(d, np.float32)
    if not tied:
        b.base["lm_head.weight"] = b.normal(ROWS, d)
    b.model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d,
        "intermediate_size": f, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": ROWS, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    } | more  # fmt: skip


def tied(b: Builder) -> None:
    llama(b, tied=True)


def classifier(b: Builder) -> None:
    llama(b, tied=True, architectures=["LlamaForSequenceClassification"], pad_token_id=0)
    b.base["score.weight"] = b.normal(2, WIDTH)


def gpt2(b: Builder, prefix: str = "transformer.") -> None:
    """Without the prefix, as in files on the Hub that were saved without the head."""
    d = WIDTH
    p = prefix
    b.base = {f"{p}wte.weight": b.normal(ROWS, d), f"{p}wpe.weight": b.normal(64, d)}
    for i in range(2):
        shapes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 4 * d)}
        for k, s in (shapes | {"mlp.c_proj": (4 * d, d)}).items():
            b.base[f"{p}h.{i}.{k}.weight"] = b.normal(*s)
            b.base[f"{p}h.{i}.{k}.bias"] = b.normal(s[1])
        for k in ("ln_1", "ln_2"):
            b.base[f"{p}h.{i}.{k}.weight"] = np.ones(d, np.float32)
            b.base[f"{p}h.{i}.{k}.bias"] = b.normal(d)
    b.base |= {f"{p}ln_f.weight": np.ones(d, np.float32), f"{p}ln_f.bias": b.normal(d)}
    b.model = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": d, "n_layer": 2,
        "n_head": 4, "n_positions": 64, "vocab_size": ROWS, "tie_word_embeddings": True,
        "activation_function": "gelu_new", "dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip


def gpt2_of_the_hub(b: Builder) -> None:
    gpt2(b, prefix="")
    del b.model["tie_word_embeddings"]


def moe(b: Builder) -> None:
    """Qwen3's experts: one by one in files, stacked in memory."""
    d, f, experts = WIDTH, 24, 3
    llama(b)
    for i in range(2):
        p = f"model.layers.{i}."
        for name in [name for name in b.base if name.startswith(f"{p}mlp.")]:
            del b.base[name]
        b.base |= {f"{p}self_attn.{k}_norm.weight": np.ones(8, np.float32) for k in "qk"}
        b.base[f"{p}mlp.gate.weight"] = b.normal(experts, d)
        for e in range(experts):
            for k, s in {"gate": (f, d), "up": (f, d), "down": (d, f)}.items():
                b.base[f"{p}mlp.experts.{e}.{k}_proj.weight"] = b.normal(*s)
    b.model |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "moe_intermediate_size": f, "num_experts": experts, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def mixtral(b: Builder) -> None:
    """The same experts under Mixtral's names."""
    moe(b)
    for name in list(b.base):
        if "_norm.weight" in name and "self_attn" in name:
            del b.base[name]
        elif ".mlp." in name:
            new = name.replace(".mlp.", ".block_sparse_moe.")
            for k, w in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
                new = new.replace(k, w)
            b.base[new] = b.base.pop(name)
    b.model |= {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "intermediate_size": 24, "num_local_experts": 3,
    }  # fmt: skip


def gpt_oss(b: Builder) -> None:
    """Experts stacked in files, too, as [expert, in, out]; those of `down_proj` are square."""
    d, experts = WIDTH, 3
    llama(b)
    for i in range(2):
        p = f"model.layers.{i}."
        for name in [name for name in b.base if name.startswith(f"{p}mlp.")]:
            del b.base[name]
        sizes = {"q": d, "k": 16, "v": 16, "o": d}
        b.base |= {f"{p}self_attn.{k}_proj.bias": b.normal(n) for k, n in sizes.items()}
        b.base[f"{p}self_attn.sinks"] = b.normal(4)
        b.base[f"{p}mlp.router.weight"] = b.normal(experts, d)
        b.base[f"{p}mlp.router.bias"] = b.normal(experts)
        b.base[f"{p}mlp.experts.gate_up_proj"] = b.normal(experts, d, 2 * d)
        b.base[f"{p}mlp.experts.gate_up_proj_bias"] = b.normal(experts, 2 * d)
        b.base[f"{p}mlp.experts.down_proj"] = b.normal(experts, d, d)
        b.base[f"{p}mlp.experts.down_proj_bias"] = b.normal(experts, d)
    b.model |= {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": d,
        "num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
    }  # fmt: skip


def vit(b: Builder) -> None:
    d, f = WIDTH, 48
    p = "vit.embeddings."
    b.base = {
        f"{p}cls_token": b.normal(1, 1, d), f"{p}position_embeddings": b.normal(1, 5, d),
        f"{p}patch_embeddings.projection.weight": b.normal(d, 3, 4, 4),
        f"{p}patch_embeddings.projection.bias": b.normal(d),
    }  # fmt: skip
    layer = "vit.encoder.layer.0."
    shapes = {f"attention.attention.{k}": (d, d) for k in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (d, d), "intermediate.dense": (f, d)}
    for k, s in (shapes | {"output.dense": (d, f)}).items():
        b.base[f"{layer}{k}.weight"], b.base[f"{layer}{k}.bias"] = b.normal(*s), b.normal(s[0])
    for k in (f"{layer}layernorm_before", f"{layer}layernorm_after", "vit.layernorm"):
        b.base[f"{k}.weight"], b.base[f"{k}.bias"] = np.ones(d, np.float32), b.normal(d)
    b.base |= {"classifier.weight": b.normal(2, d), "classifier.bias": b.normal(2)}
    b.model = {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": d,
        "intermediate_size": f, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8,
        "patch_size": 4, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
        "dtype": "float32",
    }  # fmt: skip


# --- adapters


def q(b: Builder, **more: Any) -> None:
    for i in range(2):
        b.lora(Q.format(i), **more)


LINEAR = [
    f"model.layers.{i}.{module}_proj"
    for i in range(2)
    for module in (
        *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
        *("mlp.gate", "mlp.up", "mlp.down"),
    )
]


def on_all_linear(b: Builder) -> None:
    for module in LINEAR:
        b.lora(module)


def on_embedding_and_head(b: Builder) -> None:
    q(b)
    for module in (EMBEDDING, HEAD):
        b.put(f"{module}.base_layer.weight", b.base[f"{module}.weight"])
        b.lora(module, embedding=module == EMBEDDING)


def patterns(b: Builder) -> None:
    b.lora(Q.format(0), rank=2, scale=16 / np.sqrt(2))
    b.lora(Q.format(1), scale=ALPHA / np.sqrt(RANK))


def resized(b: Builder, *keys: str) -> None:
    q(b)
    for module in (EMBEDDING, HEAD):
        b.whole(f"{module}.weight", b.normal(MORE, WIDTH), *(f"{module}.{key}" for key in keys))


def resized_and_saved(b: Builder) -> None:
    resized(b, "weight", "modules_to_save.weight")
    for module in (EMBEDDING, HEAD):
        b.put(f"{module}.original_module.weight", b.normal(MORE, WIDTH))


def resized_with_factors(b: Builder) -> None:
    q(b)
    for module in (EMBEDDING, HEAD):
        found = b.normal(MORE, WIDTH)
        b.put(f"{module}.base_layer.weight", found)
        b.lora(module, start=found, embedding=module == EMBEDDING)


def resized_and_tied(b: Builder) -> None:
    q(b)
    b.whole(f"{EMBEDDING}.weight", b.normal(MORE, WIDTH), f"{EMBEDDING}.weight", f"{HEAD}.weight")


def resized_and_tied_with_factors(b: Builder) -> None:
    q(b)
    found = b.normal(MORE, WIDTH)
    b.put(f"{EMBEDDING}.base_layer.weight", found)
    b.lora(EMBEDDING, start=found, embedding=True)
    b.right[f"{HEAD}.weight"] = found.astype(np.float64)


def saved_head(b: Builder) -> None:
    q(b)
    b.whole(f"{HEAD}.weight", b.normal(ROWS, WIDTH))


def saved_embedding(b: Builder) -> None:
    q(b)
    b.whole(f"{EMBEDDING}.weight", b.normal(ROWS, WIDTH))
    b.right[f"{HEAD}.weight"] = b.start(EMBEDDING, None)


def saved_both(b: Builder) -> None:
    q(b)
    b.whole(f"{EMBEDDING}.weight", b.normal(ROWS, WIDTH))
    b.whole(f"{HEAD}.weight", b.normal(ROWS, WIDTH))


def saved_and_kept_tied(b: Builder) -> None:
    q(b)
    b.whole(f"{EMBEDDING}.weight", b.normal(ROWS, WIDTH), f"{EMBEDDING}.weight", f"{HEAD}.weight")


def on_the_tied_head(b: Builder) -> None:
    found = b.base[f"{EMBEDDING}.weight"]
    b.put(f"{HEAD}.base_layer.weight", found)
    b.lora(HEAD, start=found)


def on_the_tied_embedding(b: Builder) -> None:
    found = b.base[f"{EMBEDDING}.weight"]
    b.put(f"{EMBEDDING}.base_layer.weight", found)
    b.lora(EMBEDDING, embedding=True)
    b.right[f"{HEAD}.weight"] = found.astype(np.float64)


def on_both_tied(b: Builder) -> None:
    on_the_tied_embedding(b)
    on_the_tied_head(b)


def kept_tied(b: Builder) -> None:
    q(b)
    found = b.base[f"{EMBEDDING}.weight"]
    b.lora(EMBEDDING, embedding=True)
    a, second = (b.adapter[f"{PREFIX}{EMBEDDING}.lora_embedding_{side}"] for side in "AB")
    for module in (EMBEDDING, HEAD):
        b.put(f"{module}.base_layer.weight", found)
    b.put(f"{HEAD}.lora_A.weight", np.ascontiguousarray(second.T))
    b.put(f"{HEAD}.lora_B.weight", np.ascontiguousarray(a.T))


def rows(b: Builder) -> None:
    q(b)
    b.rows(EMBEDDING, [1, 5, 9])


def rows_of_both(b: Builder) -> None:
    q(b)
    b.rows(EMBEDDING, [1, 5])
    b.rows(HEAD, [2], b.base.get(f"{HEAD}.weight", b.base[f"{EMBEDDING}.weight"]))


def rows_of_the_head(b: Builder) -> None:
    q(b)
    b.rows(HEAD, [2], b.base[f"{EMBEDDING}.weight"])


def rows_after_resizing(b: Builder) -> None:
    q(b)
    found = b.normal(MORE, WIDTH)
    b.put(f"{EMBEDDING}.token_adapter.base_layer.weight", found)
    b.rows(EMBEDDING, [64, 65, 66], found)
    b.whole(f"{HEAD}.weight", b.normal(MORE, WIDTH))


def rows_after_resizing_tied(b: Builder) -> None:
    q(b)
    found = b.normal(MORE, WIDTH)
    delta = b.rows(EMBEDDING, [64, 65, 66], found)
    for module in (EMBEDDING, HEAD):
        b.put(f"{module}.token_adapter.base_layer.weight", found)
        b.put(f"{module}.token_adapter.trainable_tokens_delta", delta)


def dora(b: Builder) -> None:
    q(b, dora=True)
    b.put(f"{EMBEDDING}.base_layer.weight", b.base[f"{EMBEDDING}.weight"])
    b.lora(EMBEDDING, embedding=True, dora=True)


def in_gpt2(b: Builder, **more: Any) -> None:
    for i in range(2):
        for k in ("attn.c_attn", "attn.c_proj", "mlp.c_proj"):
            b.lora(f"transformer.h.{i}.{k}", lies_in_out=True, **more)


def in_gpt2_of_the_hub(b: Builder) -> None:
    """PEFT names modules of the model with its head; the base's files have no prefix."""
    named = {f"transformer.{name}": x for name, x in b.base.items()}
    b.base, files = named, b.base
    in_gpt2(b)
    b.base = files
    b.right = {name.removeprefix("transformer."): x for name, x in b.right.items()}


def in_gpt2_with_the_head(b: Builder) -> None:
    in_gpt2(b)
    found = b.base["transformer.wte.weight"]
    b.put("lm_head.base_layer.weight", found)
    b.lora("lm_head", start=found)


def on_the_head_of_the_hub(b: Builder) -> None:
    found = b.base["wte.weight"]
    b.put("lm_head.base_layer.weight", found)
    b.lora("lm_head", start=found)


def biases(b: Builder) -> None:
    for i in range(2):
        p = f"transformer.h.{i}."
        b.whole(f"{p}attn.c_attn.bias", b.normal(3 * WIDTH), f"{p}attn.c_attn.base_layer.bias")
        b.lora(f"{p}attn.c_attn", lies_in_out=True, bias=True)
        for k in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"):
            b.whole(f"{p}{k}.bias", b.normal(len(b.base[f"{p}{k}.bias"])))
    b.whole("transformer.ln_f.bias", b.normal(WIDTH))


def of_experts(
    b: Builder, files: str = "mlp", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> None:
    """Adapts gate_up_proj inside and down_proj around it."""
    q(b)
    for i in range(2):
        p, at = f"model.layers.{i}.mlp.experts", f"model.layers.{i}.{files}.experts"
        gate, up, down = ([f"{at}.{e}.{name}.weight" for e in range(3)] for name in names)
        stacks = [np.stack([b.base[name] for name in part]) for part in (gate, up, down)]
        both = b.experts(np.concatenate(stacks[:2], 1), f"{p}.base_layer")
        b.right |= dict(zip(down, b.experts(stacks[2], p), strict=True))
        for part, changed in zip((gate, up), np.split(both, 2, 1), strict=True):
            b.right |= dict(zip(part, changed, strict=True))


def of_stacked_experts(b: Builder) -> None:
    q(b)
    for i in range(2):
        p = f"model.layers.{i}.mlp.experts"
        for k, keys in {"gate_up_proj": f"{p}.base_layer", "down_proj": p}.items():
            b.right[f"{p}.{k}"] = b.experts(b.base[f"{p}.{k}"], keys, transposed=True)


def classified(b: Builder) -> None:
    q(b)
    b.whole("score.weight", b.normal(2, WIDTH))


CONVOLUTION = "vit.embeddings.patch_embeddings.projection"


def convolution(b: Builder, **more: Any) -> None:
    b.lora(CONVOLUTION, **more)
    for k in ("weight", "bias"):
        b.whole(f"classifier.{k}", b.normal(*b.base[f"classifier.{k}"].shape))


_Q = {"target_modules": ["q_proj"]}
_BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
_RESIZED, _UNTIED = {"vocab_size": MORE}, {"tie_word_embeddings": False}
_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
_CONV1D = {"fan_in_fan_out": True}
_IMAGES = {"task_type": None, "modules_to_save": ["classifier"]}
# Without a task, PEFT notes the model's class.
_VIT = {
    "auto_mapping": {
        "base_model_class": "ViTForImageClassification",
        "parent_library": "transformers.models.vit.modeling_vit",
    }
}

CASES = {
    "plain": Case("LoRA on q_proj", llama, _Q, q),
    "patterns": Case(
        "ranks and alphas of single modules, with rsLoRA", llama,
        _Q | {"use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 2},
              "alpha_pattern": {"0.self_attn.q_proj": 16}}, patterns,
    ),
    "all linear layers": Case(
        "target_modules all-linear, on a tied base", tied, {"target_modules": "all-linear"},
        on_all_linear, written={"target_modules": LINEAR},
    ),
    "embedding and head": Case(
        "LoRA on embed_tokens, lm_head and q_proj, saved with their base layers", llama,
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, on_embedding_and_head,
    ),
    "resized": Case(
        "a vocabulary of 67 rows on a base of 64, embeddings saved along", llama, _Q, resized,
        rows=MORE, says=_RESIZED,
    ),
    "resized, modules_to_save": Case(
        "the same with modules_to_save, under three keys each", llama, _Q | _BOTH,
        resized_and_saved, rows=MORE, says=_RESIZED,
    ),
    "resized, factors": Case(
        "LoRA on the resized embedding and head", llama,
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, resized_with_factors,
        rows=MORE, says=_RESIZED,
    ),
    "resized, tied": Case(
        "a resized vocabulary of a tied base", tied, _Q, resized_and_tied, rows=MORE,
        says=_RESIZED,
    ),
    "resized, tied, factors": Case(
        "LoRA on the resized embedding of a tied base", tied,
        {"target_modules": ["q_proj", "embed_tokens"]}, resized_and_tied_with_factors, rows=MORE,
        says=_RESIZED | _UNTIED,
    ),
    "tied, head saved": Case(
        "modules_to_save of a tied head", tied, _Q | {"modules_to_save": ["lm_head"]},
        saved_head, says=_UNTIED,
    ),
    "tied, embedding saved": Case(
        "modules_to_save of a tied embedding", tied, _Q | {"modules_to_save": ["embed_tokens"]},
        saved_embedding, says=_UNTIED,
    ),
    "tied, both saved": Case(
        "modules_to_save of both sides of a tie, trained apart", tied, _Q | _BOTH, saved_both,
        says=_UNTIED,
    ),
    "tied, saved and kept": Case(
        "modules_to_save with ensure_weight_tying", tied,
        _Q | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        saved_and_kept_tied,
        written={"modules_to_save": ["embed_tokens", "model.embed_tokens"]},
    ),
    "tied, LoRA on the head": Case(
        "LoRA on a tied head", tied, {"target_modules": ["lm_head"]}, on_the_tied_head,
        says=_UNTIED,
    ),
    "tied, LoRA on the embedding": Case(
        "LoRA on a tied embedding", tied, {"target_modules": ["embed_tokens"]},
        on_the_tied_embedding, says=_UNTIED,
    ),
    "tied, LoRA on both": Case(
        "LoRA on both sides of a tie, trained apart", tied,
        {"target_modules": ["embed_tokens", "lm_head"]}, on_both_tied, says=_UNTIED,
    ),
    "tied, LoRA kept": Case(
        "LoRA on a tied embedding with ensure_weight_tying", tied,
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, kept_tied,
        written={"target_modules": ["q_proj", "embed_tokens", "model.embed_tokens"]},
    ),
    "rows": Case(
        "three trained rows of the embedding", llama, _Q | {"trainable_token_indices": [1, 5, 9]},
        rows,
    ),
    "rows, tied": Case(
        "three trained rows of a tied embedding", tied,
        _Q | {"trainable_token_indices": [1, 5, 9]}, rows,
    ),
    "rows of both": Case(
        "trained rows of embedding and head", llama,
        _Q | {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2]}}, rows_of_both,
    ),
    "rows of both, tied": Case(
        "other trained rows on the two sides of a tie", tied,
        _Q | {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2]}}, rows_of_both,
        says=_UNTIED,
    ),
    "rows of the head, tied": Case(
        "a trained row of a tied head", tied, _Q | {"trainable_token_indices": {"lm_head": [2]}},
        rows_of_the_head, says=_UNTIED,
    ),
    "rows, resized": Case(
        "the new rows of a resized embedding", llama,
        _Q | {"trainable_token_indices": [64, 65, 66]}, rows_after_resizing, rows=MORE,
        says=_RESIZED,
    ),
    "rows, resized, tied": Case(
        "the new rows of a resized embedding of a tied base", tied,
        _Q | {"trainable_token_indices": [64, 65, 66]}, rows_after_resizing_tied, rows=MORE,
        says=_RESIZED,
    ),
    "DoRA": Case(
        "DoRA on q_proj and the embedding", llama,
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}, dora,
    ),
    "GPT-2": Case(
        "LoRA on GPT-2's Conv1D, square ones too", gpt2, {"target_modules": ["c_attn", "c_proj"]},
        in_gpt2, written=_CONV1D,
    ),
    "GPT-2 of the hub": Case(
        "the same on a base whose names lack the prefix", gpt2_of_the_hub,
        {"target_modules": ["c_attn", "c_proj"]}, in_gpt2_of_the_hub, written=_CONV1D,
    ),
    "GPT-2, head": Case(
        "LoRA on GPT-2's Conv1D and its tied head", gpt2,
        {"target_modules": ["c_attn", "c_proj", "lm_head"]}, in_gpt2_with_the_head,
        written={"fan_in_fan_out": False}, says=_UNTIED,
    ),
    "GPT-2 of the hub, head": Case(
        "LoRA on the tied head of a base whose names lack the prefix", gpt2_of_the_hub,
        {"target_modules": ["lm_head"]}, on_the_head_of_the_hub, says=_UNTIED,
    ),
    "GPT-2, DoRA": Case(
        "DoRA on GPT-2's Conv1D", gpt2,
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
        lambda b: in_gpt2(b, dora=True), written=_CONV1D,
    ),
    "biases": Case(
        "lora_bias, and all biases trained", gpt2,
        {"target_modules": ["c_attn"], "lora_bias": True, "bias": "all"}, biases, written=_CONV1D,
    ),
    "experts": Case(
        "target_parameters of Qwen3-MoE, whose files have the experts one by one", moe,
        _Q | _EXPERTS, of_experts,
    ),
    "experts of Mixtral": Case(
        "the same of Mixtral, whose files have other names", mixtral, _Q | _EXPERTS,
        lambda b: of_experts(b, "block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "stacked experts": Case(
        "target_parameters of GPT-OSS, whose files have the experts stacked", gpt_oss,
        _Q | _EXPERTS, of_stacked_experts,
    ),
    "a parameter": Case(
        "target_parameters of a matrix", llama,
        {"target_modules": [], "target_parameters": ["q_proj.weight"]}, q,
    ),
    "classifier": Case(
        "LoRA on q_proj of a classifier with its head saved", classifier,
        _Q | {"task_type": "SEQ_CLS"}, classified,
        written={"modules_to_save": ["classifier", "score"]},
    ),
    "convolution": Case(
        "LoRA on ViT's convolution, with the classifier saved", vit,
        _IMAGES | {"target_modules": ["projection"]}, convolution, written=_VIT,
    ),
    "convolution, DoRA": Case(
        "DoRA on ViT's convolution", vit,
        _IMAGES | {"target_modules": ["projection"], "use_dora": True},
        lambda b: convolution(b, dora=True), written=_VIT,
    ),
}  # fmt: skip


def build(case: Case) -> Built:
    """Makes the tensors and configs of a case."""
    b = Builder()
    case.base(b)
    case.build(b)
    right = {name: x.astype(np.float64) for name, x in b.base.items()} | b.right
    return Built(b.base, b.adapter, right, b.model, {**DEFAULTS, **case.config, **case.written})


def write(case: Case, folder: Path) -> Built:
    """Writes `base` and `adapter` below a folder."""
    built = build(case)
    for name, file, tensors, config in (
        ("base", "model", built.base, ("config.json", built.model)),
        ("adapter", "adapter_model", built.adapter, ("adapter_config.json", built.config)),
    ):
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / f"{file}.safetensors", {"format": "pt"})
        (folder / name / config[0]).write_text(json.dumps(config[1], indent=2))
    return built
