"""Tables in files: the allowed content, and the requirements on each."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sail_jax import architectures
from sail_jax.architectures.files import model_types, read, written
from sail_jax.basis.axes import parse_axes, path_pattern
from sail_jax.basis.spaces import NONLINEARITIES

TYPES = model_types()
FILES = Path(architectures.__file__).parent / "tables"


def test_many_architectures_have_a_table():
    assert len(TYPES) >= 45
    assert {"llama", "gemma2", "mixtral", "gpt_neox", "bert", "vit"} <= {*TYPES}


@pytest.mark.parametrize("name", TYPES)
def test_a_file_is_sound(name):
    """Its texts can be parsed, and do not refer to anything that is missing in its axes."""
    table = read(name)
    assert written(table) == FILES.joinpath(f"{name}.json").read_text("utf-8")
    texts = [*table.axes.values(), *table.tied.values()]
    texts += [text for own in table.classes.values() for text in own.values()]
    axes = [parse_axes(re.sub(r"[{}]", "", text)) for text in texts]
    named = {f.space for own in axes for axis in own for f in axis}
    for known in (table.spaces, table.sizes, table.ends):
        assert {re.sub(r"[{}]", "", space) for space in known} <= named
    assert all(word in NONLINEARITIES for text in table.spaces.values() for word in text.split())
    for pattern in (*table.axes, *table.layers.values()):
        path_pattern(pattern)
    assert {*table.optional, *table.head, *table.tied, *table.folds} <= {*table.axes}
    assert {name for name, _ in table.scales.values()} <= {*table.spaces}


def test_sizes_of_entries_and_of_what_is_not_stated():
    table = read("llama")
    config = {"num_attention_heads": 6, "hidden_size": 24, "architectures": ["LlamaModel"]}
    assert table.rules(config).sizes == {"head.{i}": 6, "group.{i}": 1, "qk.{i}": 4, "v.{i}": 4}
    stated = config | {"num_key_value_heads": 2, "head_dim": 5}
    assert table.rules(stated).sizes == {"head.{i}": 2, "group.{i}": 3, "qk.{i}": 5, "v.{i}": 5}


@pytest.mark.parametrize("kind", ["cohere", "cohere2"])
@pytest.mark.parametrize(("heads", "keys"), [(96, 8), (64, 64), (32, 8), (6, 3), (4, 1)])
def test_cohere_has_as_many_heads_as_are_stated(kind, heads, keys):
    """Its scales of queries and keys, which show how many heads there are, are optional."""
    config = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": keys}
    sizes = {"head.{i}": keys, "group.{i}": heads // keys, "qk.{i}": 8, "v.{i}": 8}
    assert read(kind).rules(config).sizes == sizes


def test_an_activation_decides_what_can_be_scaled():
    spaces = {
        act: read("opt").rules({"activation_function": act}).spaces["hidden.{i}"]
        for act in ("relu", "gelu", "an activation that is new")
    }
    assert spaces.pop("relu") == "relu"
    assert {*spaces.values()} == {"elementwise"}


def test_a_table_holds_for_the_settings_that_were_traced():
    config = {"model_type": "gpt_bigcode", "multi_query": False}
    with pytest.raises(ValueError, match=r"'multi_query' is False, .* holds for True"):
        architectures.of(config)
    assert architectures.of(config | {"multi_query": True}).name == "gpt_bigcode"


def test_gemma_multiplies_embeddings_by_the_root_of_its_width():
    table = read("gemma2")
    assert table.scales == {"{model.,}embed_tokens.weight": ("resid", 0.5)}
    assert read("llama").scales == {}


def test_experts_have_spaces_of_their_own():
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 2, "hidden_size": 4,
    }  # fmt: skip
    mlp, heads = "model.layers.0.block_sparse_moe.", "model.layers.0.self_attn."
    shapes = {
        "model.embed_tokens.weight": (5, 4), "lm_head.weight": (5, 4), "model.norm.weight": (4,),
        f"{mlp}gate.weight": (3, 4), f"{heads}q_proj.weight": (4, 4),
        f"{heads}k_proj.weight": (2, 4), f"{heads}v_proj.weight": (2, 4),
        f"{heads}o_proj.weight": (4, 4), "model.layers.0.input_layernorm.weight": (4,),
        "model.layers.0.post_attention_layernorm.weight": (4,),
    }  # fmt: skip
    for e in range(3):
        shapes |= {f"{mlp}experts.{e}.w{k}.weight": (4, 6) if k == 2 else (6, 4) for k in (1, 2, 3)}
    like = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in shapes.items()}
    spec = architectures.of(config).rules(config).spec(like)
    assert [spec.space(f"hidden.0.{e}").size for e in range(3)] == [6, 6, 6]
