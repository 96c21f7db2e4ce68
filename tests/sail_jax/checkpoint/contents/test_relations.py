"""Statements of files about tensors: contradictions are found, and corrected in outputs."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sail_jax.checkpoint.contents import relations
from sail_jax.checkpoint.contents.relations import (
    contradictions,
    contradictions_of,
    following,
)
from sail_jax.checkpoint.contents.vocabulary import Vocabulary
from sail_jax.checkpoint.formats.open import open_checkpoint
from sail_jax.layer_entries import moved

RECORDED = json.loads(
    (Path(__file__).parents[3] / "helpers" / "architectures.json").read_text("utf-8")
)


def likes(shapes, dtype="float32"):
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return {n: SimpleNamespace(name=n, shape=tuple(s), dtype=dtype) for n, s in shapes.items()}


@pytest.mark.parametrize("family", RECORDED)
def test_what_transformers_wrote_contradicts_nothing(family):
    # The record leaves the names of ViT's three labels out.
    labels = {"id2label": LABELS} if family == "vit" else {}
    recorded = RECORDED[family]
    assert contradictions(recorded["config"] | labels, likes(recorded["shapes"])) == ()


def llama(**changed):
    """A Llama of 64 tokens, 32 units, 4 heads of 8 (2 of keys), 48 hidden units and 2 layers."""
    shapes = {"model.embed_tokens.weight": (64, 32), "lm_head.weight": (64, 32)}
    for i in range(2):
        x = f"model.layers.{i}."
        shapes |= {x + "self_attn.q_proj.weight": (32, 32), x + "self_attn.k_proj.weight": (16, 32)}
        shapes |= {x + "self_attn.v_proj.weight": (16, 32), x + "self_attn.o_proj.weight": (32, 32)}
        shapes |= {x + "mlp.up_proj.weight": (48, 32), x + "mlp.down_proj.weight": (32, 48)}
    stated = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "dtype": "float32",
    }  # fmt: skip
    return stated | changed, likes(shapes)


def bert(**changed):
    """A BERT classifier of 3 labels, 16 positions and 2 kinds of segments."""
    shapes = {
        "bert.embeddings.word_embeddings.weight": (20, 8),
        "bert.embeddings.position_embeddings.weight": (16, 8),
        "bert.embeddings.token_type_embeddings.weight": (2, 8),
        "bert.encoder.layer.0.intermediate.dense.weight": (12, 8),
        "classifier.weight": (3, 8),
    }
    stated = {
        "architectures": ["BertForSequenceClassification"], "vocab_size": 20, "hidden_size": 8,
        "max_position_embeddings": 16, "type_vocab_size": 2, "num_hidden_layers": 1,
        "intermediate_size": 12, "id2label": {str(i): f"L{i}" for i in range(3)},
        "label2id": {f"L{i}": i for i in range(3)},
    }  # fmt: skip
    return stated | changed, likes(shapes)


def mixtral(**changed):
    shapes = {f"model.layers.0.block_sparse_moe.experts.{j}.w1.weight": (4, 4) for j in range(8)}
    return {"num_local_experts": 8} | changed, likes(shapes)


LABELS = {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
# A contradiction to the tensors, the entry that is found, and the value in an output; None if the
# correct value is unknown.
CASES = [
    (llama, {"vocab_size": 60}, "vocab_size", 64),
    (llama, {"hidden_size": 40, "head_dim": None}, "hidden_size", None),
    (llama, {"num_hidden_layers": 3}, "num_hidden_layers", 2),
    (llama, {"layer_types": ["full_attention"] * 3}, "layer_types", None),
    (llama, {"num_attention_heads": 16}, "num_attention_heads 16 and head_dim 8", None),
    (llama, {"num_key_value_heads": 1}, "num_key_value_heads 1 and head_dim 8", None),
    (llama, {"head_dim": 4}, "num_key_value_heads 2 and head_dim 4", None),
    (llama, {"intermediate_size": 50}, "intermediate_size", None),
    (llama, {"tie_word_embeddings": True}, "tie_word_embeddings", False),
    (llama, {"attention_bias": True}, "attention_bias", False),
    (llama, {"mlp_bias": True}, "mlp_bias", False),
    (llama, {"dtype": "bfloat16"}, "dtype", "float32"),
    (llama, {"torch_dtype": "torch.float16", "dtype": None}, "torch_dtype", "float32"),
    (llama, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config", ...),
    (bert, {"max_position_embeddings": 24}, "max_position_embeddings", 16),
    (bert, {"type_vocab_size": 1}, "type_vocab_size", 2),
    (bert, {"intermediate_size": 8}, "intermediate_size", None),
    (bert, {"num_hidden_layers": 2}, "num_hidden_layers", 1),
    (bert, {"id2label": {"0": "a", "1": "b"}}, "id2label", LABELS),
    (bert, {"id2label": None}, "num_labels", None),
    (mixtral, {"num_local_experts": 4}, "num_local_experts", 8),
]


@pytest.mark.parametrize("make", [llama, bert, mixtral])
def test_what_agrees_is_not_found(make):
    stated, tensors = make()
    assert contradictions(stated, tensors) == ()
    assert following(stated, tensors) == (stated, ())


@pytest.mark.parametrize(("make", "change", "key", "right"), CASES)
def test_each_contradiction_is_found_and_mended_where_tensors_tell(make, change, key, right):
    stated, tensors = make(**change)
    found = [x.key for x in contradictions(stated, tensors)]
    assert key in found
    config, left = following(stated, tensors)
    if right is None and key != "num_labels":
        assert key in [x.key for x in left]
        return
    assert left == ()
    if right is ...:
        assert key not in config
    elif key == "num_labels":
        assert len(config["id2label"]) == 3
    else:
        assert config[key] == right


def test_without_any_one_relation_a_case_is_missed(monkeypatch):
    for relation in relations.RELATIONS:
        rest = tuple(r for r in relations.RELATIONS if r is not relation)
        with monkeypatch.context() as patch:
            patch.setattr(relations, "RELATIONS", rest)
            found = [[x.key for x in contradictions(*make(**more))] for make, more, _, _ in CASES]
        missed = [key for keys, (_, _, key, _) in zip(found, CASES, strict=True) if key not in keys]
        assert missed, relation.__doc__


def test_entries_of_a_text_tower_are_mended_where_they_stand():
    stated, tensors = llama(vocab_size=60)
    config, left = following({"text_config": stated, "vocab_size": 60}, tensors)
    assert (config["text_config"]["vocab_size"], config["vocab_size"], left) == (64, 64, ())
    config, _ = following({"text_config": stated}, tensors)
    assert "vocab_size" not in config


def test_a_tokenizer_beyond_the_rows_is_found():
    stated, tensors = llama()
    vocabulary = Vocabulary({"a": 3, "<end>": 64}, {}, None, "")
    (found,) = contradictions(stated, tensors, vocabulary)
    assert str(found) == (
        "the tokenizer has the token '<end>' = 64, but 'model.embed_tokens.weight' has 64 rows"
    )
    assert contradictions(stated, tensors, Vocabulary({"a": 63}, {}, None, "")) == ()


def test_of_a_stored_head_only_values_of_its_own_contradict_a_tie(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    table = rng.normal(size=(5, 4)).astype(np.float32)
    for name, head in {"copy": table.copy(), "own": table + np.eye(5, 4, dtype=np.float32)}.items():
        (tmp_path / name).mkdir()
        tensors = {"model.embed_tokens.weight": table, "lm_head.weight": head}
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"tie_word_embeddings": true}')
        with open_checkpoint(tmp_path / name) as checkpoint:
            found = [x.key for x in contradictions_of(checkpoint)]
        assert found == ([] if name == "copy" else ["tie_word_embeddings"])


KEYS = [
    *dict.fromkeys(key.split()[0] for _, _, key, _ in CASES), "head_dim", "architectures",
    "model_type", "text_config", "label2id", "n_positions", "unpadded_vocab_size",
]  # fmt: skip
VALUES = [None, True, False, 0, -1, 64, 10**30, float("nan"), -0.5, "", "llama", "x" * 500]


def anything(rng, depth=0):
    """A JSON value of any kind."""
    kind = rng.randrange(4 if depth < 3 else 2)
    if kind == 2:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(rng.randrange(5))}
    return rng.choice(VALUES)


@pytest.mark.slow
def test_configurations_of_any_kind_are_looked_at_without_a_traceback():
    rng = random.Random(0)
    names = [*llama()[1], *bert()[1], *mixtral()[1], "", "a/b", "lm_head.bias"]
    for _ in range(500):
        chosen = rng.sample(names, rng.randrange(len(names)))
        sizes = {n: [rng.choice([0, 1, 32, 64]) for _ in range(rng.randrange(4))] for n in chosen}
        stated = {rng.choice(KEYS): anything(rng) for _ in range(rng.randrange(12))}
        config, left = following(stated, likes(sizes))
        assert all(str(found) for found in left)
        # Corrected entries remain correct, and nothing else is found afterwards.
        assert following(config, likes(sizes))[0] == config or "nan" in repr(config)


TWICE = [0, 1, 2, 3, 2, 3]
WINDOWS = ("sliding", "full", "sliding")
MOVED = {  # entries of four layers, and those of TWICE
    "a list": ({"no_rope_layers": [1, 1, 0, 1]}, {"no_rope_layers": [1, 1, 0, 1, 0, 1]}),
    "an unknown list": ({"x_per_layer": [*"abcd"]}, {"x_per_layer": [*"abcdcd"]}),
    "a list by chance": ({"eos_token_id": [1, 2, 3, 4]}, {}),
    "types": (
        {"attention_layers": [*"glgl"], "attention_types": [[["g", "l"], 2]]},
        {"attention_layers": [*"glglgl"], "attention_types": [[[*"glglgl"], 1]]},
    ),
    "a text": ({"hybrid_override_pattern": "M*M-"}, {"hybrid_override_pattern": "M*M-M-"}),
    "numbers": ({"cross_attention_layers": [0, 3]}, {"cross_attention_layers": [0, 3, 5]}),
    "numbers from 1": ({"ple_layer_ids": [1, 4]}, {"ple_layer_ids": [1, 4, 6]}),
    "the first layers": ({"first_k_dense_replace": 2}, {}),
    "all layers but one": ({"first_k_dense_replace": 4}, {"first_k_dense_replace": 6}),
    "from one to another": (
        {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1},
        {"moe_layer_end_index": 5},
    ),
    "a period": ({"attn_layer_period": 2, "attn_layer_offset": 1}, {}),
    "a period and exceptions": (
        {"mlp_only_layers": [3], "decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 2, 3, 4, 5], "decoder_sparse_step": 1},
    ),
    "a window": (
        {"max_window_layers": 3, "use_sliding_window": True, "sliding_window": 8},
        {"layer_types": [f"{x}_attention" for x in (*3 * ["full"], *WINDOWS)]},
    ),
    "an interval": (
        {"no_rope_layer_interval": 4}, {"no_rope_layers": [1, 1, 1, 0, 1, 0]}
    ),
    "a pattern": ({"sliding_window_pattern": 2}, {}),
    "shared keys": ({"num_kv_shared_layers": 2}, {"num_kv_shared_layers": 4}),
    "sources of keys": (
        {"kv_source_layers": [0, 0, 2, 2]}, {"kv_source_layers": [0, 0, 2, 2, 4, 4]}
    ),
    "a number that a list replaces": (
        {"mlp_layer_types": [*"dsss"], "first_k_dense_replace": 1}, {"mlp_layer_types": [*"dsssss"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_entries_of_layers_follow_the_layers(case):
    config, changed = MOVED[case]
    assert moved(config, 4, TWICE) == config | changed
    assert moved(config, 4, range(4)) == config


LOST = {  # entries that cannot state the layers in an order: those, and the order
    "first_k_dense_replace": ({"first_k_dense_replace": 1}, [0, 1, 0, 1]),
    "moe_layer_end_index": ({"moe_layer_start_index": 0, "moe_layer_end_index": 1}, [0, 2, 1]),
    "expert_layer_period": ({"expert_layer_period": 2, "expert_layer_offset": 1}, [0, 1, 1, 2]),
    "layer_group_size": ({"layer_group_size": 4}, TWICE),
    "num_kv_shared_layers": ({"num_kv_shared_layers": 2}, [0, 2, 2, 3]),
    "kv_source_layers": ({"kv_source_layers": [0, 0, 2, 2]}, [0, 1, 3]),
    "scale_attn_by_inverse_layer_idx": ({"scale_attn_by_inverse_layer_idx": True}, TWICE),
    "hidden_size_per_layer_input": ({"hidden_size_per_layer_input": 8}, TWICE),
}


@pytest.mark.parametrize("entry", LOST)
def test_an_entry_that_cannot_state_the_new_order_is_named(entry):
    config, order = LOST[entry]
    with pytest.raises(ValueError, match=f"^config.json cannot state .*'{entry}' "):
        moved(config, 4, order)
    off = {"scale_attn_by_inverse_layer_idx": False, "hidden_size_per_layer_input": 0}
    off = {key: value for key, value in off.items() if key in config}
    assert moved(off, 4, order) == off
