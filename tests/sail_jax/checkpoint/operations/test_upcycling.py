"""Mixtures of experts in files: as in memory, certified, resumed, and refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import small_checkpoints
from small_checkpoints import CONFIG, save

from sail_jax.checkpoint import CheckpointError, RunOptions, load_checkpoint
from sail_jax.checkpoint.operations.running import planned
from sail_jax.checkpoint.operations.upcycling import UpcycleRequest, upcycle_checkpoint
from sail_jax.checkpoint.recipe import mixtures, recipes
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.checkpoint.sources.joined import Joined
from sail_jax.growth import upcycling
from sail_jax.merging import random_bits
from sail_jax.merging.engine import InMemory

ROUTER = "block_sparse_moe.router.layer.weight"
PROMPTS = "positive_prompts: [[{}, 5], [2]]"


@pytest.fixture
def models(tmp_path):
    """Three dense Llamas in bfloat16: their folders, and their tensors."""
    found = {k: small_checkpoints.tensors(k) for k in range(3)}
    return [save(tmp_path / str(k), x, CONFIG) for k, x in found.items()], found


def text(folders, mode="cheap_embed", more="", experts=(1, 2)):
    lines = [f"base_model: {folders[0]}", f"gate_mode: {mode}", more, "experts:"]
    for k in experts:
        lines += [f"- source_model: {folders[k]}", f"  {PROMPTS.format(k)}"]
    return "\n".join(lines)


def test_file_holds_what_is_made_in_memory(tmp_path, models):
    folders, found = models
    done = upcycle_checkpoint(text(folders), tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")
    table = found[0]["model.embed_tokens.weight"].astype(np.float64)
    sums = np.stack([table[k] + table[5] + table[2] for k in (1, 2)])
    rows = sums / np.linalg.norm(sums, axis=-1, keepdims=True)
    experts = [upcycling.Expert(1), upcycling.Expert(2)]
    wanted, config = upcycling.upcycle([*found.values()], CONFIG, experts, np.stack([rows, rows]))
    assert made.keys() == wanted.keys()
    for name, x in wanted.items():
        assert made[name].dtype == ml_dtypes.bfloat16
        assert np.array_equal(made[name], np.asarray(x)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert done.verdict.exact is None
    assert (tmp_path / "out" / "mergekit_moe_config.yml").read_text() == text(folders)


@pytest.mark.slow
def test_what_is_drawn_is_the_same_in_files_and_goes_on_where_it_stopped(tmp_path, models):
    folders, found = models
    mixture = mixtures.copies(folders[0], 2, drop=0.5, noise_scale=0.01, seed=3, gate_mode="zero")
    upcycle_checkpoint(mixture, tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")
    experts = [upcycling.Expert(0, 0.01, 1.0, 0.5)] * 2
    wanted, _ = upcycling.upcycle(
        [found[0]], CONFIG, experts, np.zeros((2, 2, 16)), key=random_bits.key(3)
    )
    assert all(np.array_equal(made[name], np.asarray(x)) for name, x in wanted.items())
    again = RunOptions(resume=True)
    assert upcycle_checkpoint(mixture, tmp_path / "out", run=again).unchanged
    other = mixture.model_copy(update={"seed": 4})
    with pytest.raises(ValueError, match="exists already"):
        upcycle_checkpoint(other, tmp_path / "out", run=again)


GRANITE = {
    **CONFIG, "model_type": "granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.3, "logits_scaling": 4.0,
}  # fmt: skip


@pytest.mark.soak
def test_stacked_experts_are_joined_while_they_are_written(tmp_path, models):
    """Experts are copied or drawn; copies of one network are certified."""
    _, found = models
    folders = [save(tmp_path / f"g{k}", x, GRANITE) for k, x in found.items()]
    given = text(folders).replace(PROMPTS.format(2), PROMPTS.format(2) + "\n  drop: 0.5")
    upcycle_checkpoint(given, tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")
    router = np.stack([made[f"model.layers.{i}.{ROUTER}"] for i in range(2)])
    experts = [upcycling.Expert(1), upcycling.Expert(2, drop=0.5)]
    wanted, config = upcycling.upcycle(
        [*found.values()], GRANITE, experts, router, key=random_bits.key(0)
    )
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[name], np.asarray(x)) for name, x in wanted.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    mixture = mixtures.copies(folders[0], 2, gate_mode="random")
    assert upcycle_checkpoint(mixture, tmp_path / "copies").verdict.exact


def test_joined_tensor_is_read_from_any_place():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(t) for n, t in ((5, "f4"), (3, "f2"), (4, "f4"))]
    parts = [InMemory.of("x", f"model {k}", x) for k, x in enumerate(arrays)]
    joined = Joined("stack", jax.ShapeDtypeStruct((3, 4), np.float32), parts)
    whole = np.concatenate(arrays, dtype=np.float32)
    for start in range(12):
        for size in range(13 - start):
            out = np.empty(size, np.float32)
            joined.read(out, start)
            assert np.array_equal(out, whole[start : start + size])
    with pytest.raises(
        ValueError, match="model 0 and model 1 and model 2: cannot read entries 4 to"
    ):
        joined.read(np.empty(9, np.float32), 4)


@pytest.mark.slow
def test_certificate_sees_whether_shares_add_up_to_1(tmp_path, monkeypatch):
    qwen = {**CONFIG, "model_type": "qwen3", "head_dim": 4}
    params = small_checkpoints.tensors(dtype=np.float32)
    for i in range(2):
        for name in ("q_norm", "k_norm"):
            params[f"model.layers.{i}.self_attn.{name}.weight"] = np.ones(4, np.float32)
    folder = save(tmp_path / "qwen", params, qwen)
    mixture = mixtures.copies(folder, 3, gate_mode="random")
    done = upcycle_checkpoint(mixture, tmp_path / "good")
    assert done.verdict.exact
    record = json.loads((tmp_path / "good" / "upcycling.json").read_text())
    assert record["agreement"][0]["preserved"]
    target = upcycling.TARGETS["qwen3_moe"]
    states = {**target.states, "norm_topk_prob": False}
    monkeypatch.setitem(upcycling.TARGETS, "qwen3_moe", target._replace(states=states))
    assert upcycle_checkpoint(mixture, tmp_path / "bad").verdict.exact is False


def qwen2(folder):
    params = small_checkpoints.tensors(dtype=np.float32)
    for i in range(2):
        for name, n in (("q", 16), ("k", 8), ("v", 8)):
            params[f"model.layers.{i}.self_attn.{name}_proj.bias"] = np.ones(n, np.float32)
    return save(folder, params, {**CONFIG, "model_type": "qwen2"})


@pytest.mark.slow
def test_shared_expert_of_copies_adds_nothing(tmp_path):
    folder = qwen2(tmp_path / "qwen2")
    mixture = mixtures.copies(folder, 2, gate_mode="random", drop=0.5)
    with planned(UpcycleRequest(mixture)) as ready:
        (shared,) = ready.about["shared_experts"]
        assert (shared["residual_scale"], shared["drop"]) == (0, 0)
        assert ready.plan.config["shared_expert_intermediate_size"] == 24
    given = text([folder, folder, folder], "zero")
    with pytest.raises(CheckpointError, match="shared_experts: Qwen MoE has one shared expert"):
        upcycle_checkpoint(given, tmp_path / "out")


@pytest.mark.slow
def test_copies_with_a_shared_expert_are_certified(tmp_path):
    mixture = mixtures.copies(qwen2(tmp_path / "qwen2"), 2, gate_mode="random")
    assert upcycle_checkpoint(mixture, tmp_path / "out").verdict.exact
    made = load_checkpoint(tmp_path / "out")
    assert not made["model.layers.1.mlp.shared_expert.down_proj.weight"].any()
    assert made["model.layers.1.mlp.shared_expert_gate.weight"].any()


def test_mixtral_has_no_shared_expert(models, tmp_path):
    folders, _ = models
    given = text(folders, "zero", more=f"shared_experts: [{{source_model: {folders[0]}}}]")
    with pytest.raises(CheckpointError, match="shared_experts: Mixtral has no shared expert"):
        upcycle_checkpoint(given, tmp_path / "out")


def test_dtype_that_is_asked_for_is_written_and_stated(tmp_path, models):
    mixture = mixtures.copies(models[0][0], 2, dtype="float16")
    upcycle_checkpoint(mixture, tmp_path / "out", certify=False)
    assert {x.dtype for x in load_checkpoint(tmp_path / "out").values()} == {np.dtype("float16")}
    bare = {**CONFIG, "torch_dtype": "bfloat16"}
    (models[0][0] / "config.json").write_text(json.dumps(bare))
    upcycle_checkpoint(mixture, tmp_path / "other", certify=False)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"


def test_prompt_that_does_not_fit_in_memory_is_refused(models, tmp_path):
    folders, _ = models
    long = text(folders, "hidden").replace("[2]", f"[{', '.join(['2'] * 5000)}]", 1)
    # 5000 (12 16 + 4 24 + 4 4 5000) numbers of 4 bytes: 1532 MiB, and the program.
    words = r"max_memory: running a prompt of 5000 tokens takes about \d+ MiB \(1532 MiB of it"
    with pytest.raises(CheckpointError, match=words):
        upcycle_checkpoint(long, tmp_path / "out", run=RunOptions(max_memory=10**9))
    assert not (tmp_path / "out").exists()


def test_plan_reads_no_tensor_unless_there_are_prompts(models, monkeypatch):
    monkeypatch.setattr("sail_jax.checkpoint.formats.files.StoredTensor.read", None)
    mixture = mixtures.parse(text(models[0], "uniform_random"))
    with planned(UpcycleRequest(mixture)) as ready:
        assert len(ready.works) == len(small_checkpoints.SHAPES) - 6 + 2 + 2 * 2 * 3


def test_experts_that_differ_cannot_be_certified(tmp_path, models):
    with pytest.raises(CheckpointError, match="certify: the experts differ from the base's own"):
        upcycle_checkpoint(text(models[0]), tmp_path / "out", certify=True)
    assert not (tmp_path / "out").exists()


def test_networks_that_do_not_fit_are_refused(tmp_path, models):
    folders, found = models
    save(tmp_path / "gpt2", found[1], {**CONFIG, "model_type": "gpt2"})
    save(tmp_path / "wide", {**found[1], "model.layers.0.mlp.up_proj.weight": np.ones((2, 2))})
    save(tmp_path / "bare", found[0])
    for name, message in (
        ("gpt2", "model_type is 'gpt2' in .*, but 'llama' in the base"),
        ("wide", r"experts\[0\]: 'model.layers.0.mlp.up_proj.weight' is \[2, 2\], expected"),
        ("missing", "missing"),
    ):
        given = text([folders[0], tmp_path / name], experts=(1,), more="experts_per_token: 1")
        with pytest.raises(ValueError, match=message):
            upcycle_checkpoint(given, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"a config\.json with its architecture is missing"):
        upcycle_checkpoint(mixtures.copies(tmp_path / "bare", 2), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"the token 20, but there are only 20 embeddings"):
        upcycle_checkpoint(text(folders).replace("[2]", "[20]"), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"lacks a tokenizer\.json: give prompts as lists"):
        upcycle_checkpoint(text(folders).replace("[2]", "words"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_is_the_tokens_of_the_base_s_tokenizer_after_its_first_token(tmp_path, models):
    """The rows are those of the same tokens as a list, without a limit that the file may state."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 1, "a": 2, "b": 3}, "a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.enable_truncation(1)
    folders, routers = models[0], []
    made.save(str(folders[0] / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}}
    (folders[0] / "tokenizer_config.json").write_text(json.dumps(config))
    for name, prompt in (("text", "b a"), ("list", "[1, 3, 2]")):
        upcycle_checkpoint(text(folders, "cheap_embed").replace("[2]", prompt), tmp_path / name)
        found = load_checkpoint(tmp_path / name)
        routers.append([x for key, x in sorted(found.items()) if ".gate.weight" in key])
    assert routers[0]
    for ours, theirs in zip(*routers, strict=True):
        np.testing.assert_array_equal(ours, theirs)


E1 = "{source_model: a, positive_prompts: [[1]]}"
E2 = "{source_model: b, positive_prompts: [[2]]}"
FILES = {
    "no experts": ("experts: []", "expected 1 or more"),
    "no base": (None, "a mixture needs 'base_model', which is missing"),
    "k above the experts": (
        f"experts_per_token: 3\nexperts: [{E1}, {E2}]",
        "experts_per_token is 3, but there are only 2 experts",
    ),
    "k of 0": (f"experts_per_token: 0\nexperts: [{E1}, {E2}]", "greater than or equal to 1"),
    "an unknown mode": (f"gate_mode: cheap\nexperts: [{E1}, {E2}]", "expected one of hidden"),
    "no prompts": (
        f"experts: [{E1}, {{source_model: b}}]",
        "an expert needs positive_prompts if gate_mode is hidden",
    ),
    "prompts that are one": (f"experts: [{E1}, {E1}]", "all experts have the same prompts"),
    "an empty prompt": (
        f"experts: [{E1}, {{source_model: b, positive_prompts: [[]]}}]",
        "expected a text or a list of tokens",
    ),
    "a token below 0": (
        f"experts: [{E1}, {{source_model: b, positive_prompts: [[-1]]}}]",
        "expected a text or a list of tokens",
    ),
    "shared experts": (
        f"experts: [{E1}, {E2}]\nshared_experts: [{E1}, {E2}]",
        "a mixture has one shared expert at most: DeepSeek's several are not made yet",
    ),
    "a shared expert without prompts": (
        f"experts: [{E1}, {E2}]\nshared_experts: [{{source_model: c}}]",
        "an expert needs positive_prompts if gate_mode is hidden",
    ),
    "noise below 0": (
        f"experts: [{E1}, {{source_model: b, positive_prompts: [[2]], noise_scale: -1}}]",
        "expected greater than or equal to 0",
    ),
    "a wrong word": (
        f"expert: 1\nexperts: [{E1}, {E2}]",
        "unknown key 'expert' in a mixture",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_say_no_mixture_are_refused_with_their_place(case):
    body, message = FILES[case]
    given = f"base_model: a\n{body}" if body else f"experts: [{E1}, {E2}]"
    with pytest.raises(RecipeError) as error:
        mixtures.parse(given, "moe.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("moe.yaml:")


def test_words_without_effect_are_noted_and_refused_if_strict(tmp_path):
    other = "{source_model: b, positive_prompts: [x], t: 1}"
    text = f"base_model: a\nlicense: mit\nexperts: [{E1}, {other}]"
    mixture = mixtures.parse(text, "moe.yaml")
    said = ["license has no effect in a mixture", "t has no effect in an expert"]
    assert [note.text.partition(";")[0] for note in mixture.notes] == said
    with pytest.raises(RecipeError, match=r"^moe.yaml:2:1: license: license has no effect"):
        upcycle_checkpoint(mixture, tmp_path / "out", run=RunOptions(strict=True))
    with pytest.raises(RecipeError, match="license has no effect"):
        mixtures.copies("a", 2, license="mit")


def test_merge_names_the_command_for_files_of_mergekit_moe():
    with pytest.raises(RecipeError, match="a file of mergekit-moe is for sail-jax upcycle"):
        recipes.parse("base_model: a\ngate_mode: hidden\nexperts: []")
