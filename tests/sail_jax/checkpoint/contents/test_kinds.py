"""Folders without a model are distinguished from models by names and files."""

import json
import re

import adapter_cases
import numpy as np
import pytest
from small_checkpoints import CONFIG, save, tensors

from sail_jax.checkpoint import save_checkpoint
from sail_jax.checkpoint.contents.kinds import check_model, factor_pair, not_a_model
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import open_checkpoint

MODEL = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
AT = "model.layers.0.self_attn.q_proj"


def names(*keys):
    return dict.fromkeys(keys)


def config(**entries):
    return {"adapter_config.json": json.dumps(entries).encode()}


NO_MODELS = {
    "LoRA": names(f"base_model.model.{AT}.lora_A.weight", f"base_model.model.{AT}.lora_B.weight"),
    "LoRA and whole modules": names(
        f"base_model.model.{AT}.lora_A.weight", "base_model.model.score.weight"
    ),
    "of an embedding": names("base_model.model.wte.lora_embedding_A"),
    "DoRA": names(f"{AT}.lora_A.default.weight", f"{AT}.lora_magnitude_vector"),
    "kohya's": names("lora_te_a.lora_down.weight", "lora_te_a.lora_up.weight", "lora_te_a.alpha"),
    "LoHa": names(f"{AT}.hada_w1_a", f"{AT}.hada_w2_b", f"{AT}.alpha"),
    "LoKr": names(f"{AT}.lokr_w1", f"{AT}.lokr_w2_a"),
    "IA3": names(f"base_model.model.{AT}.ia3_l"),
    "VeRA": names(f"{AT}.vera_lambda_b", f"{AT}.vera_lambda_d"),
    "OFT": names(f"{AT}.oft_r"),
    "a prompt": names("prompt_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_MODELS)
def test_adapters_are_no_models(kind):
    """Adapters are recognised by their names alone, and by their config."""
    assert not_a_model(NO_MODELS[kind], {}, "x").startswith("is an adapter, not a model: ")
    about = config(base_model_name_or_path="org/base\x1b")
    said = not_a_model(NO_MODELS[kind], about, "some/adapter")
    assert said.startswith("is an adapter of 'org/base\\x1b', not a model: ")
    assert said.endswith(r"Write base+adapter, as in org/base\x1b+some/adapter")


def test_what_an_adapter_names_as_its_base_is_shown_if_it_is_text():
    for base in (None, 5, "", ["x"]):
        said = not_a_model(NO_MODELS["LoRA"], config(base_model_name_or_path=base), "x")
        assert said.endswith("as in BASE+x")
    assert (
        len(not_a_model(NO_MODELS["LoRA"], config(base_model_name_or_path="n" * 9999), "x")) < 600
    )


UNMERGED = {
    "beside base layers": names(
        *MODEL, f"{AT}.base_layer.weight", f"{AT}.lora_A.default.weight", f"{AT}.lora_B.x.weight"
    ),
    "beside weights": names(*MODEL, f"{AT}.lora_A.weight", f"{AT}.lora_B.weight"),
    "IA3 beside weights": names(*MODEL, f"{AT}.ia3_l"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNMERGED)
def test_models_with_an_adapter_that_is_not_merged(kind):
    said = not_a_model(UNMERGED[kind], {"config.json": b"{}"})
    assert re.search(rf"an unmerged adapter \({AT}\.(lora_A|ia3_l).*merge_and_unload", said)


STATES = {
    "of torch": names("state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step"),
    "with momentum": names("state.0.momentum_buffer", "state.1.momentum_buffer"),
    "of optax": names("0/count", "0/mu/dense/kernel", "0/nu/dense/kernel"),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_of_optimisers(kind):
    assert not_a_model(STATES[kind], {}).startswith("holds the state of an optimiser (")


MODELS = {
    "plain": names(*MODEL),
    "its own factors": names(*MODEL, "model.layers.0.att.lora_A", "model.layers.0.att.lora_B"),
    "a mean and a deviation": names("encoder/mu/kernel", "encoder/logvar/kernel"),
    "mu and nu of its own": names("mu/kernel", "nu/kernel", "head/kernel"),
    "a step": names("step", "w"),
    "a training state": names("params/w", "opt_state/0/mu/w", "opt_state/0/nu/w"),
    "an alpha": names("alpha"),
    "nothing": {},
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_models(kind):
    assert not_a_model(MODELS[kind], {}) == ""
    # An adapter's config may have been left in a folder of a merged model.
    left = config(peft_type="LORA") | {"config.json": b"{}"}
    assert not_a_model(MODELS[kind], left) == ""


def test_every_adapter_that_peft_writes_is_found(tmp_path):
    for i, case in enumerate(adapter_cases.CASES.values()):
        adapter_cases.write(case, tmp_path / str(i))
        with open_checkpoint(tmp_path / str(i) / "base") as base:
            check_model(base)
        with open_checkpoint(tmp_path / str(i) / "adapter") as adapter:
            with pytest.raises(CheckpointError, match="adapter is an adapter of 'base'"):
                check_model(adapter)
            assert not_a_model(adapter.tensors, {}).startswith("is an adapter, not a model")


def test_a_checkpoint_of_ours_is_a_model(tmp_path):
    save(tmp_path / "a", tensors(0), CONFIG)
    save_checkpoint(tmp_path / "b.npz", {"w": np.ones(2, np.float32)})
    for name in ("a", "b.npz"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            check_model(checkpoint)


def arrays(**shapes):
    return {name.replace("__", "."): np.zeros(shape) for name, shape in shapes.items()}


PAIRED = {
    "diffusers": arrays(to_q__lora__down__weight=(2, 8), to_q__lora__up__weight=(6, 2)),
    "NeMo": arrays(q__adapter__linear_in__weight=(2, 8), q__adapter__linear_out__weight=(6, 2)),
    "MLX": arrays(q__lora_a=(8, 2), q__lora_b=(2, 6)),
    "a part of a path": arrays(unet__down__0__q__down=(2, 8), unet__down__0__q__up=(6, 2)),
    "x@A": arrays(layers__0__q__A=(2, 8), layers__0__q__B=(6, 2), layers__0__q__alpha=()),
}
UNPAIRED = {
    "no common rank": arrays(layers__0__down__weight=(2, 8), layers__0__up__weight=(6, 3)),
    "a rank that is none": arrays(layers__0__down__weight=(8, 8), layers__0__up__weight=(8, 8)),
    "with other matrices": arrays(
        mlp__down__weight=(2, 8), mlp__up__weight=(8, 2), mlp__q__weight=(2, 2)
    ),
    "with biases": arrays(
        mlp__down__weight=(2, 8), mlp__up__weight=(8, 2), mlp__down__bias=(2,), mlp__up__bias=(8,)
    ),
    "at the top": arrays(A=(2, 8), B=(6, 2)),
}


@pytest.mark.parametrize("kind", PAIRED)
def test_factors_are_known_by_pairs_and_shapes(kind):
    assert re.match(r"holds factors of low rank|is an adapter", not_a_model(PAIRED[kind], {}))
    first, second = factor_pair(PAIRED[kind])
    assert {first, second} == {name for name in PAIRED[kind] if not name.endswith("alpha")}


@pytest.mark.parametrize("kind", UNPAIRED)
def test_other_pairs_of_names_are_no_factors(kind):
    assert factor_pair(UNPAIRED[kind]) is None
    assert not_a_model(UNPAIRED[kind], {}) == ""
