"""Adapters have the same meaning as in PEFT: every way of saving them, compared with the
definitions.
"""

import json
import re
import time

import adapter_cases
import ml_dtypes
import numpy as np
import pytest
from adapter_cases import EMBEDDING, HEAD, PREFIX, WIDTH, Builder
from fake_checkpoints import Array, Fake, held

from sail_jax.checkpoint.contents.kinds import factor_pair
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import open_checkpoint
from sail_jax.checkpoint.sources import unet_names
from sail_jax.checkpoint.sources.adapted import same
from sail_jax.checkpoint.sources.adapters import adapted, with_adapter
from sail_jax.checkpoint.sources.renamings import Names
from sail_jax.merging.tensors import read_whole, same_entries

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture
def written(tmp_path):
    """Writes a case, and opens base and adapter."""
    opened = []

    def write(case):
        built = adapter_cases.write(case, tmp_path)
        opened.extend(open_checkpoint(tmp_path / name) for name in ("base", "adapter"))
        return built, *opened

    yield write
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.parametrize("name", adapter_cases.CASES)
def test_an_adapted_model_is_what_peft_computes(name, written):
    """A product of rank 4, its sum, a norm and a quotient, in float32: 16 roundings of the
    largest entry at most."""
    case = adapter_cases.CASES[name]
    built, base, adapter = written(case)
    view = with_adapter(base, adapter)
    assert view.tensors.keys() == built.right.keys()
    for key, want in built.right.items():
        got = read_whole(view.tensors[key])
        assert view.tensors[key].name == key
        assert got.dtype == np.float32
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=16 * EPS * np.abs(want).max())
    config = view.extras["config.json"]
    config = json.loads(config if isinstance(config, bytes) else config.read_bytes())
    assert config == {**built.model, **case.says}


def opened(base, adapter, config=None, model=None, metadata=()):
    """The view of a base with its adapter, both in memory."""
    base, adapter = Fake("base", base), Fake("adapter", adapter)
    if model is not None:
        base.extras["config.json"] = json.dumps(model).encode()
    if config is not None:
        adapter.extras["adapter_config.json"] = json.dumps(config).encode()
    adapter.metadata = dict(metadata)
    return with_adapter(base, adapter)


def combined(built, **config):
    tensors = adapted(
        held(built.base), held(built.adapter), {**built.config, **config}, model=built.model
    )
    return {name: read_whole(x) for name, x in tensors.items()}


PIECES = ["plain", "DoRA", "GPT-2, DoRA", "convolution, DoRA", "experts", "stacked experts", "rows"]


@pytest.mark.parametrize("name", PIECES)
def test_pieces_have_the_bits_of_the_whole(name, monkeypatch):
    """Blocks of 100 entries, read in pieces of 77, from the last to the first."""
    monkeypatch.setattr("sail_jax.checkpoint.sources.adapted._BLOCK", 100)
    built = adapter_cases.build(adapter_cases.CASES[name])
    tensors = adapted(held(built.base), held(built.adapter), built.config, model=built.model)
    changed = [x for x in tensors.values() if not isinstance(x, Array)]
    assert changed
    for tensor in changed:
        want = read_whole(tensor).reshape(-1)
        got = np.empty_like(want)
        for start in reversed(range(0, want.size, 77)):
            tensor.read(got[start : start + 77], start)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["plain", "DoRA", "rows", "stacked experts"])
def test_a_sum_is_rounded_once(name):
    """On a base of bfloat16: the sum in float32, then one cast. It differs from the cast of the
    exact sum where that lies within a float32 error of the middle between two bfloat16, which
    moves an entry by one unit in its last place; for less than one entry in a hundred."""
    built = adapter_cases.build(adapter_cases.CASES[name])
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in built.base.items()}
    exact = Builder()
    case = adapter_cases.CASES[name]
    case.base(exact)
    exact.base = {name: x.astype(np.float32) for name, x in half.items()}
    case.build(exact)
    tensors = adapted(held(half), held(built.adapter), built.config, model=built.model)
    for key, want in exact.right.items():
        got = read_whole(tensors[key])
        assert got.dtype == ml_dtypes.bfloat16
        if f"{PREFIX}{key.removesuffix('weight')}base_layer.weight" in built.adapter:
            continue  # its change is added to what the adapter stores, in float32
        got, want = got.astype(np.float32), want.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.mean(got != want) < 0.01
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=0)


def test_a_tie_holds_where_both_sides_end_equal():
    """For factors, whole tensors, or factors that add nothing."""
    built = adapter_cases.build(adapter_cases.CASES["tied, LoRA kept"])
    assert f"{HEAD}.weight" not in combined(built)
    # an alpha that is no power of 2: the two products are rounded differently
    assert f"{HEAD}.weight" not in combined(built, lora_alpha=7)
    built.adapter[f"{PREFIX}{HEAD}.lora_A.weight"][0, 0] += 1
    assert f"{HEAD}.weight" in combined(built)
    nothing = adapter_cases.build(adapter_cases.CASES["tied, LoRA on the embedding"])
    nothing.adapter[f"{PREFIX}{EMBEDDING}.lora_embedding_B"][...] = 0
    assert f"{HEAD}.weight" not in combined(nothing)
    # a head that is stored beside the embedding it is tied to stays its copy
    copied = adapter_cases.build(adapter_cases.CASES["tied, saved and kept"])
    copied.base[f"{HEAD}.weight"] = copied.base[f"{EMBEDDING}.weight"]
    both = combined(copied)
    np.testing.assert_array_equal(both[f"{HEAD}.weight"], both[f"{EMBEDDING}.weight"])
    np.testing.assert_array_equal(
        both[f"{HEAD}.weight"], copied.adapter[f"{PREFIX}{EMBEDDING}.weight"]
    )


def test_tensors_are_compared_up_to_the_first_difference():
    a = np.arange(100, dtype=np.float32)
    b = a.copy()
    assert same(Array("a", a), Array("b", b))
    b[15] = 0
    x, y = Array("a", a), Array("b", b)
    assert not same(x, y)
    assert not same_entries(x := Array("a", a), y := Array("b", b), piece=10)
    assert x.reads == y.reads == [(0, 10), (10, 10)]
    assert not same(Array("a", a), Array("a", a.reshape(10, 10)))
    # A copy has the same bits; values of another dtype are compared as numbers.
    nan = np.full(3, np.nan, np.float32)
    assert same(Array("a", nan), Array("b", nan.copy()))
    assert same(Array("a", a), Array("b", a.astype(np.float16)))
    assert not same(Array("a", a + 0.1), Array("b", a.astype(np.float16)))


def test_a_classifier_of_a_tied_family_has_no_head():
    """Its config says `tie_word_embeddings`, and LoRA on its embedding writes no head."""
    b = Builder()
    adapter_cases.classifier(b)
    b.lora(EMBEDDING, embedding=True)
    config = {**adapter_cases.DEFAULTS, "task_type": "SEQ_CLS"}
    got = adapted(held(b.base), held(b.adapter), config, model=b.model)
    assert got.keys() == b.base.keys()
    np.testing.assert_allclose(
        read_whole(got[f"{EMBEDDING}.weight"]), b.right[f"{EMBEDDING}.weight"], rtol=0, atol=1e-5
    )


def test_modules_of_a_saved_head_keep_their_names():
    """The keys contain the name of the adapter, or do not."""
    base = {"classifier.dense.weight": np.zeros((3, 3), np.float32)}
    one = np.ones((3, 3), np.float32)
    for infix in ("", ".modules_to_save", ".modules_to_save.default"):
        saved = {f"{PREFIX}classifier{infix}.dense.weight": one}
        config = adapter_cases.DEFAULTS | {"modules_to_save": ["classifier"]}
        got = adapted(held(base), held(saved), config)
        np.testing.assert_array_equal(read_whole(got["classifier.dense.weight"]), one)


def test_an_embedding_of_encoder_and_decoder_is_refused():
    base = {"shared.weight": np.zeros((9, 4), np.float32)}
    at = f"{PREFIX}shared.lora_embedding_"
    factors = {f"{at}A": np.ones((4, 9), np.float32), f"{at}B": np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"'shared.weight' is shared by modules"):
        adapted(held(base), held(factors), adapter_cases.DEFAULTS)


def test_trained_rows_and_a_change_of_the_tied_head_are_refused():
    b = Builder()
    adapter_cases.tied(b)
    adapter_cases.rows(b)
    b.lora(HEAD, start=b.base[f"{EMBEDDING}.weight"])
    config = adapter_cases.DEFAULTS | {"trainable_token_indices": [1, 5, 9]}
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has trained rows"):
        adapted(held(b.base), held(b.adapter), config, model=b.model)


def tokenizer(folder, *files):
    for file in files:
        (folder / file).write_text(json.dumps({"from": folder.name}))


def test_the_tokenizer_of_the_adapter_is_carried(tmp_path):
    """A whole tokenizer replaces the base's files; a template alone is added to them."""
    adapter_cases.write(adapter_cases.CASES["resized"], tmp_path)
    tokenizer(tmp_path / "base", "vocab.json", "merges.txt", "tokenizer_config.json")
    tokenizer(tmp_path / "base", "generation_config.json", "chat_template.jinja")

    def carried():
        base, adapter = (open_checkpoint(tmp_path / name) for name in ("base", "adapter"))
        with base, adapter:
            extras = with_adapter(base, adapter).extras
        return {k: x.parent.name for k, x in extras.items() if not isinstance(x, bytes)}

    before = carried()
    assert set(before.values()) == {"base"}
    tokenizer(tmp_path / "adapter", "chat_template.jinja")
    assert carried() == before | {"chat_template.jinja": "adapter"}
    tokenizer(tmp_path / "adapter", "tokenizer.json", "tokenizer_config.json")
    assert carried() == {
        "generation_config.json": "base",
        "chat_template.jinja": "adapter",
        "tokenizer.json": "adapter",
        "tokenizer_config.json": "adapter",
    }


def test_the_text_tower_of_a_configuration_follows():
    """For `vocab_size` and `tie_word_embeddings` under text_config, as in Gemma 3."""
    b = Builder()
    adapter_cases.tied(b)
    adapter_cases.resized(b)
    text = {"vocab_size": 64, "tie_word_embeddings": True}
    model = {"model_type": "gemma3", "text_config": text, "vocab_size": 64}
    view = opened(b.base, b.adapter, adapter_cases.DEFAULTS, model)
    config = view.extras["config.json"]
    assert isinstance(config, bytes)
    assert json.loads(config) == {
        "model_type": "gemma3",
        "vocab_size": 67,
        "text_config": {"vocab_size": 67, "tie_word_embeddings": False},
    }


def test_keys_may_come_in_any_order():
    built = adapter_cases.build(adapter_cases.CASES["experts"])
    keys = sorted(built.adapter, key=lambda key: key[::-1])
    shuffled = built._replace(adapter={key: built.adapter[key] for key in keys})
    for name, got in combined(shuffled).items():
        np.testing.assert_array_equal(got, combined(built)[name])


def test_long_names_take_no_time():
    long = {f"{PREFIX}x{'.base_layer' * 200_000}.lora_A": np.ones((2, 2), np.float32)}
    began = time.process_time()
    with pytest.raises(CheckpointError, match="is not a factor A or B"):
        adapted({}, held(long), adapter_cases.DEFAULTS)
    base = {"mlp.experts." * 20_000: np.ones(2, np.float32)}
    assert Names(base, model_of("Qwen3MoeForCausalLM", "qwen3_moe")).find(next(iter(base)))
    assert factor_pair({"down." * 20_000 + "x": np.ones((2, 8))}) is None
    assert time.process_time() - began < 1


def model_of(kind, family, **more):
    return {"architectures": [kind], "model_type": family, **more}


NEOX = model_of("GPTNeoXForCausalLM", "gpt_neox", tie_word_embeddings=False)
MIXTRAL = model_of("MixtralForCausalLM", "mixtral", num_hidden_layers=1)
# The class and model type, a name in memory, and the name in files.
RENAMED = [
    (NEOX, "lm_head.weight", "embed_out.weight"),
    (NEOX, "embed_out.weight", "embed_out.weight"),
    (MIXTRAL, "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
    (
        model_of("BertForMaskedLM", "bert"),
        "bert.embeddings.LayerNorm.bias",
        "bert.embeddings.LayerNorm.beta",
    ),
    (
        model_of("LlavaForConditionalGeneration", "llava"),
        "model.language_model.layers.0.q.weight",
        "language_model.model.layers.0.q.weight",
    ),
    (
        model_of("ViTForImageClassification", "vit"),
        "vit.layers.0.attention.q_proj.weight",
        "vit.encoder.layer.0.attention.attention.query.weight",
    ),
    # An adapter of the model without its head, and a base without it.
    (model_of("LlamaForCausalLM", "llama"), "layers.0.q.weight", "model.layers.0.q.weight"),
    (model_of("LlamaForCausalLM", "llama"), "model.layers.0.q.weight", "layers.0.q.weight"),
]


@pytest.mark.parametrize(("model", "memory", "file"), RENAMED)
def test_a_whole_tensor_reaches_the_file_s_name(model, memory, file):
    base, new = np.zeros((3, 2), np.float32), np.ones((3, 2), np.float32)
    module = memory.rpartition(".")[0]
    saved = {**adapter_cases.DEFAULTS, "modules_to_save": [module.rpartition(".")[2]]}
    got = adapted(held({file: base}), held({PREFIX + memory: new}), saved, model=model)
    assert got.keys() == {file}
    np.testing.assert_array_equal(read_whole(got[file]), new)


def test_factors_and_rows_reach_the_file_s_name():
    base = {"gpt_neox.embed_in.weight": np.zeros((5, 3), "f"), "embed_out.weight": np.ones((5, 3))}
    factors = {
        f"{PREFIX}lm_head.lora_A.weight": np.ones((adapter_cases.RANK, 3), np.float32),
        f"{PREFIX}lm_head.lora_B.weight": np.ones((5, adapter_cases.RANK), np.float32),
    }
    got = adapted(held(base), held(factors), adapter_cases.DEFAULTS, model=NEOX)
    np.testing.assert_array_equal(read_whole(got["embed_out.weight"]), np.full((5, 3), 9.0))
    rows = {f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta": np.zeros((1, 3), np.float32)}
    config = {**adapter_cases.DEFAULTS, "trainable_token_indices": {"lm_head": [4]}}
    got = adapted(held(base), held(rows), config, model=NEOX)
    assert got.keys() == base.keys()
    np.testing.assert_array_equal(read_whole(got["embed_out.weight"]).sum(1), [3, 3, 3, 3, 0])


EXPERTS = "model.layers.0.block_sparse_moe.experts."


def test_whole_stacked_experts_are_stored_one_by_one():
    """Eleven experts: the order is that of their numbers, not of the letters."""
    base = {
        f"{EXPERTS}{e}.{w}.weight": np.zeros((2, 3), "f") for e in range(11) for w in ("w1", "w3")
    }
    stack = np.arange(11 * 4 * 3, dtype=np.float32).reshape(11, 4, 3)
    saved = {f"{PREFIX}model.layers.0.mlp.experts.gate_up_proj": stack}
    config = {**adapter_cases.DEFAULTS, "modules_to_save": ["experts"]}
    got = adapted(held(base), held(saved), config, model=MIXTRAL)
    assert got.keys() == base.keys()
    for e in range(11):
        for i, w in enumerate(("w1", "w3")):
            piece = read_whole(got[f"{EXPERTS}{e}.{w}.weight"])
            np.testing.assert_array_equal(piece, stack[e, 2 * i : 2 * i + 2])
    with pytest.raises(CheckpointError, match=r"gate_up_proj' of shape \(11, 4, 3\), got"):
        adapted(held(base), held({k: x[1:] for k, x in saved.items()}), config, model=MIXTRAL)


def test_what_is_split_at_loading_is_refused_by_name():
    model = model_of("HrmTextModel", "hrm_text")
    base = {"layers.0.mlp.gate_up_proj.weight": np.zeros((6, 2), np.float32)}
    config = {**adapter_cases.DEFAULTS, "modules_to_save": ["gate_proj", "up_proj"]}
    for name in ("gate_proj", "up_proj"):
        saved = {f"{PREFIX}layers.0.mlp.{name}.weight": np.ones((3, 2), np.float32)}
        with pytest.raises(CheckpointError, match=rf"{name}.weight' is made at .*gate_up_proj"):
            adapted(held(base), held(saved), config, model=model)


BERT = {"bert.pooler.dense.weight": np.zeros((2, 2), np.float32)}
HEAD_OF_BERT = {f"{PREFIX}classifier.weight": np.ones((3, 2), np.float32)}


def with_head(kind, **config):
    config = {**adapter_cases.DEFAULTS, "task_type": "SEQ_CLS", **config}
    return adapted(held(BERT), held(HEAD_OF_BERT), config, model=model_of(kind, "bert"))


def test_a_new_head_needs_a_class_that_reads_it():
    saved = {"modules_to_save": ["classifier", "score"]}
    got = with_head("BertForSequenceClassification", **saved)
    np.testing.assert_array_equal(read_whole(got["classifier.weight"]), np.ones((3, 2)))
    for kind in ("BertModel", "BertForMaskedLM", "BertForQuestionAnswering"):
        with pytest.raises(CheckpointError, match=f"'classifier.weight' is not.*, and {kind} does"):
            with_head(kind, **saved)
    typo = {f"{PREFIX}bert.pooler.dens.weight": np.ones((2, 2), np.float32)}
    config = {**adapter_cases.DEFAULTS, "modules_to_save": ["dens"]}
    model = model_of("BertForSequenceClassification", "bert")
    with pytest.raises(CheckpointError, match=r"'bert.pooler.dens.weight' is not in the base"):
        adapted(held(BERT), held(typo), config, model=model)


def asked(layers=(0, 1), also=(), **config):
    """An adapter with factors of q_proj in some layers; returns the notes."""
    b = Builder()
    adapter_cases.llama(b)
    b.base["model.layers.2.self_attn.q_proj.weight"] = b.normal(WIDTH, WIDTH)  # not loaded
    b.base["vision.layers.0.q_proj.weight"] = b.normal(WIDTH, WIDTH)
    for module in (*map(adapter_cases.Q.format, layers), *also):
        b.lora(module)
    return opened(b.base, b.adapter, {**adapter_cases.DEFAULTS, **config}, b.model).notes


MISSING = [
    ({"target_modules": ["q_proj", "k_proj"]}, "model.layers.0.self_attn.k_proj, model.layers.1"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ({"target_parameters": ["mlp.up_proj.weight"]}, "model.layers.0.mlp.up_proj.weight"),
]


@pytest.mark.parametrize(("config", "names"), MISSING)
def test_factors_that_the_config_asks_for_and_are_missing_are_named(config, names):
    with pytest.raises(CheckpointError, match=f"asks for factors of {re.escape(names)}"):
        asked(**config)


def test_factors_that_may_be_missing_are_noted():
    vision = "its adapter has no factors for vision.layers.0.q_proj (1 in all)"
    assert asked(target_modules=["q_proj"]) == (vision,)
    assert asked(target_modules=["self_attn.q_proj"]) == ()
    assert asked(target_modules=["q_proj"], exclude_modules=["vision.layers.0.q_proj"]) == ()
    assert asked(target_modules="all-linear") == asked(target_modules=None) == ()
    (note,) = asked(layers=[0], target_modules=["self_attn.q_proj"])
    assert "model.layers.1.self_attn.q_proj (1 in all)" in note
    one = {"target_modules": ["self_attn.q_proj"], "layers_to_transform": [0]}
    assert asked(layers=[0], **one) == ()
    (note,) = asked(target_modules=r".*layers\.\d+\.self_attn\.[qk]_proj")
    assert "self_attn.k_proj, model.layers.1.self_attn.k_proj (2 in all)" in note


UNET = "down_blocks.0.attentions.0.transformer_blocks.0.attn1."
FLAT = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
A, B = np.arange(6, dtype="f").reshape(2, 3), np.arange(8, dtype="f").reshape(4, 2) + 1
KOHYA = {f"{FLAT}.lora_down.weight": A, f"{FLAT}.lora_up.weight": B}
# For each program: the stored tensors, the config, and the factor on the product.
FORMATS = {
    "kohya": (KOHYA, None, 1.0),
    "kohya, alpha": ({**KOHYA, f"{FLAT}.alpha": np.array(1.0, "f")}, None, 0.5),
    "diffusers": (
        {f"unet.{UNET}to_q.lora.down.weight": A, f"unet.{UNET}to_q.lora.up.weight": B}, None, 1.0
    ),
    "diffusers, processors": (
        {
            f"unet.{UNET}processor.to_q_lora.down.weight": A,
            f"unet.{UNET}processor.to_q_lora.up.weight": B,
        }, None, 1.0,
    ),
    "diffusers with PEFT": (
        {f"unet.{UNET}to_q.lora_A.weight": A, f"unet.{UNET}to_q.lora_B.weight": B}, None, 1.0
    ),
    "MLX": (
        {f"{UNET}to_q.lora_a": A.T.copy(), f"{UNET}to_q.lora_b": B.T.copy()},
        {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 20.0}}, 20.0,
    ),
}  # fmt: skip


def read_as_adapter(factors, config=None, prefix="", metadata=()):
    base = {f"{prefix}{UNET}{x}.weight": np.zeros((4, 3), "f") for x in ("to_q", "to_k")}
    view = opened(base, factors, config, metadata=metadata)
    return {name: read_whole(x) for name, x in view.tensors.items()}, view.notes


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("program", FORMATS)
def test_factors_of_other_programs_are_read(program, prefix):
    factors, config, scale = FORMATS[program]
    got, notes = read_as_adapter(factors, config, prefix)
    assert notes == ()
    np.testing.assert_allclose(got[f"{prefix}{UNET}to_q.weight"], scale * B @ A, rtol=4 * EPS)
    assert not got[f"{prefix}{UNET}to_k.weight"].any()


MEGATRON = "model.decoder.layers.0."
NEMO = {
    "the layer": ("mlp.linear_fc1.adapter", "mlp.linear_fc1"),
    "attention": ("self_attention.adapter_layer.lora_kqv_adapter", "self_attention.linear_qkv"),
    "its output": (
        "self_attention.adapter_layer.lora_dense_attention_adapter", "self_attention.linear_proj"
    ),
    "without the core": ("mlp.adapter_layer.lora_4htoh_adapter", "mlp.dense_4h_to_h"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NEMO)
def test_factors_of_nemo_are_read_in_its_own_names(kind):
    stem, layer = (MEGATRON + x for x in NEMO[kind])
    factors = {f"{stem}.linear_in.weight": A, f"{stem}.linear_out.weight": B}
    view = opened({f"{layer}.weight": np.ones((4, 3), "f")}, factors)
    np.testing.assert_allclose(read_whole(view.tensors[f"{layer}.weight"]), 1 + B @ A, rtol=4 * EPS)
    assert "its adapter's file does not state alpha" in view.notes[0]
    with pytest.raises(CheckpointError, match="is not in the base"):
        opened({"other.weight": np.ones((4, 3), "f")}, factors)


def test_an_unknown_adapter_of_nemo_is_refused():
    key = f"{MEGATRON}self_attention.adapter_layer.lora_unfused_kqv_adapter.linear_"
    with pytest.raises(CheckpointError, match=r"lora_unfused_kqv_adapter' is not one of NeMo's"):
        read_as_adapter({f"{key}in.weight": A, f"{key}out.weight": B})


# Names in diffusers and in the original program: SDXL (three levels).
TWO_NAMES = {
    "conv_in": "input_blocks.0.0",
    "down_blocks.0.resnets.0.conv1": "input_blocks.1.0.in_layers.2",
    "down_blocks.0.resnets.1.conv2": "input_blocks.2.0.out_layers.3",
    "down_blocks.0.resnets.1.conv1": "input_blocks.2.0.in_layers.2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.resnets.0.conv_shortcut": "input_blocks.4.0.skip_connection",
    "down_blocks.1.attentions.0.proj_in": "input_blocks.4.1.proj_in",
    "down_blocks.2.attentions.1.transformer_blocks.9.attn2.to_k":
        "input_blocks.8.1.transformer_blocks.9.attn2.to_k",
    "mid_block.resnets.1.time_emb_proj": "middle_block.2.emb_layers.1",
    "mid_block.attentions.0.proj_out": "middle_block.1.proj_out",
    "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.2":
        "output_blocks.2.1.transformer_blocks.0.ff.net.2",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
    "up_blocks.2.resnets.2.conv1": "output_blocks.8.0.in_layers.2",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_out": "out.2",
}  # fmt: skip


@pytest.mark.parametrize("before", ["", "model.diffusion_model."])
def test_modules_of_a_unet_have_the_names_of_two_programs(before):
    got = unet_names.other_names(before + name for name in TWO_NAMES)
    assert {original: got[original] for original in TWO_NAMES.values()} == {
        original: before + name for name, original in TWO_NAMES.items()
    }
    got = unet_names.other_names(before + original for original in TWO_NAMES.values())
    assert got == {name: before + original for name, original in TWO_NAMES.items()}
    assert unet_names.other_names(["model.layers.0.mlp"]) == {}


def test_kohya_names_of_the_other_program_reach_the_same_weight():
    down = "down_blocks.1.attentions.0.proj_in"
    base = {f"{name}.weight": np.zeros((4, 3), "f") for name in TWO_NAMES}
    flat = "lora_unet_" + TWO_NAMES[down].replace(".", "_")
    view = opened(base, {f"{flat}.lora_down.weight": A, f"{flat}.lora_up.weight": B})
    np.testing.assert_allclose(read_whole(view.tensors[f"{down}.weight"]), B @ A, rtol=4 * EPS)


def test_factors_of_another_model_in_the_same_file_are_noted():
    text = {k.replace("lora_unet_down", "lora_te_layers"): x for k, x in KOHYA.items()}
    _, (note,) = read_as_adapter(KOHYA | text)
    assert note.startswith("its adapter's factors for lora_te (1 modules)")
    lost = {k.replace("to_q", "to_v"): x for k, x in KOHYA.items()}
    with pytest.raises(CheckpointError, match=r"to_v' is not in the base"):
        read_as_adapter(KOHYA | lost)
    with pytest.raises(CheckpointError, match=r"is not in the base"):
        read_as_adapter(text)


def test_other_layouts_are_refused_by_the_pair():
    other = {f"{UNET}to_q.lora_in.weight": A, f"{UNET}to_q.lora_out.weight": B}
    with pytest.raises(CheckpointError, match=r"lora_in.weight and .*lora_out.weight\) in a"):
        read_as_adapter(other)
    mid = {f"{FLAT}.lora_mid.weight": A}
    with pytest.raises(CheckpointError, match=r"lora_mid.weight' is not a factor"):
        read_as_adapter(KOHYA | mid)
    with pytest.raises(CheckpointError, match="one of the two factors"):
        read_as_adapter(dict(list(KOHYA.items())[:1]))
    with pytest.raises(CheckpointError, match=r"adapters with x\.hada_w1_a are not"):
        read_as_adapter({"x.hada_w1_a": A, "x.hada_w1_b": B})
    factors = FORMATS["diffusers"][0]
    stated = {"unet.r": 2, "unet.lora_alpha": 8}
    got, _ = read_as_adapter(factors, metadata={"lora_adapter_metadata": json.dumps(stated)})
    np.testing.assert_allclose(got[f"{UNET}to_q.weight"], 4 * B @ A, rtol=4 * EPS)
    stated["unet.use_dora"] = True
    with pytest.raises(CheckpointError, match="states use_dora"):
        read_as_adapter(factors, metadata={"lora_adapter_metadata": json.dumps(stated)})


def masked_bert(tensors, **config):
    """A tied BERT with an adapter; returns the tensors."""
    base = {
        "bert.embeddings.word_embeddings.weight": np.ones((3, 2), np.float32),
        "cls.predictions.bias": np.zeros(3, np.float32),
    }
    model = model_of("BertForMaskedLM", "bert", tie_word_embeddings=True)
    config = {**adapter_cases.DEFAULTS, **config}
    got = adapted(held(base), held(tensors), config, model=model)
    return {name: read_whole(x) for name, x in got.items()}


def test_an_untied_head_keeps_its_bias():
    """BERT's head has the tied bias, for which a model with an untied head uses a separate name."""
    decoder = {f"{PREFIX}cls.predictions.decoder.weight": np.full((3, 2), 2, np.float32)}
    got = masked_bert(decoder, modules_to_save=["decoder"])
    np.testing.assert_array_equal(got["cls.predictions.decoder.bias"], np.zeros(3))
    name = "bert.embeddings.word_embeddings.weight"
    embedding = {PREFIX + name: np.full((3, 2), 2, np.float32)}
    got = masked_bert(embedding, modules_to_save=["word_embeddings"])
    np.testing.assert_array_equal(got[name], np.full((3, 2), 2))
    np.testing.assert_array_equal(got["cls.predictions.decoder.weight"], np.ones((3, 2)))
    biases = {f"{PREFIX}cls.predictions.{x}bias": np.ones(3, np.float32) for x in ("", "decoder.")}
    got = masked_bert(biases, bias="all")
    np.testing.assert_array_equal(got["cls.predictions.bias"], np.ones(3))
    assert "cls.predictions.decoder.bias" not in got
    biases[f"{PREFIX}cls.predictions.bias"] *= 2
    with pytest.raises(CheckpointError, match="are the same weight, but differ"):
        masked_bert(biases, bias="all")


def test_modules_to_save_match_the_letters_at_the_end_of_a_name():
    """As in PEFT: "norm" includes input_layernorm."""
    base = {f"layers.0.{x}.weight": np.zeros(2, np.float32) for x in ("input_layernorm", "normed")}
    saved = {f"{PREFIX}layers.0.input_layernorm.weight": np.ones(2, np.float32)}
    config = {**adapter_cases.DEFAULTS, "modules_to_save": ["norm"]}
    got = adapted(held(base), held(saved), config)
    np.testing.assert_array_equal(read_whole(got["layers.0.input_layernorm.weight"]), [1, 1])
    other = {f"{PREFIX}layers.0.normed.weight": np.ones(2, np.float32)}
    with pytest.raises(CheckpointError, match=r"normed.weight': it is not a factor"):
        adapted(held(base), held(other), config)
