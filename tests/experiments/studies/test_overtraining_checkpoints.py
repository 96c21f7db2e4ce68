"""Noise and fine-tuning on checkpoints: what is read, adapters, the tiny series, given folders."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pictures import flaws
from small_tokenizers import tokenizer
from tiny_runs import tiny_run

from experiments.data import instructions, text
from experiments.data.files import DataError
from experiments.lab.config import varied
from experiments.models import presets
from experiments.models.pretrained import export, load_pretrained
from experiments.studies.overtraining_checkpoints import data, findings, measure, series
from experiments.studies.overtraining_checkpoints.adapters import LoRA
from experiments.studies.overtraining_checkpoints.config import PRESETS, Config
from experiments.studies.overtraining_checkpoints.plots import plot
from experiments.studies.overtraining_checkpoints.run import run
from sail_jax.checkpoint import save_checkpoint

TINY = PRESETS["tiny"]
EPS = float(np.finfo(np.float32).eps)
GPT = {"vocab": text.VOCAB, "context": 24, "layers": 2, "heads": 2, "width": 8, "head_dim": 4,
       "hidden": 12, "layer_norm_eps": 1e-5}  # fmt: skip
LLAMA = {"vocab": text.VOCAB, "context": 24, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1,
         "head_dim": 4, "hidden": 12}  # fmt: skip


def drawn(name, **sizes):
    """A network and numbers for its parameters."""
    net = presets.build(presets.config(name, **sizes))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(net.init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(0)
    return net, jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama-tiny", LLAMA | {"tied": False}), ("llama-tiny", LLAMA | {"norm": "layernorm"}),
     ("gpt-tiny", GPT | {"tied": True})],
)  # fmt: skip
def test_what_is_written_is_read_as_the_same_network(name, sizes, tmp_path):
    net, params = drawn(name, **sizes)
    tensors, config = export({"params": params}, net)
    extras = {"config.json": json.dumps(config).encode()}
    save_checkpoint(tmp_path / "c", tensors, extras=extras)
    loaded = load_pretrained(tmp_path / "c")
    assert presets.describe(loaded.module) == presets.describe(net)
    assert jax.tree.structure(loaded.variables["params"]) == jax.tree.structure(params)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b),
                        loaded.variables["params"], params)  # fmt: skip
    assert all(jax.tree.leaves(same))


def test_a_network_that_no_configuration_describes(tmp_path):
    net = presets.build(presets.config("llama-tiny", norm="layernorm", rms_norm_eps=1e-3))
    with pytest.raises(ValueError, match="no configuration of olmo"):
        export({}, net)


LINES = {
    "chosen": ({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"},
               ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d")),
    "messages": ({"messages": [{"role": "user", "content": "a"},
                               {"role": "assistant", "content": "b"}]},
                 ("<|user|>\na\n<|assistant|>\n", "b")),
    "alpaca": ({"instruction": "a", "input": "b", "output": "c"}, ("a\n\nb\n\n", "c")),
    "plain": ({"prompt": "a", "response": "b"}, ("a\n\n", "b")),
    "tokens": ({"prompt": [3, 1], "response": [2]}, ((3, 1), (2,))),
}  # fmt: skip
WRONG = {
    "no fields": ({"text": "a"}, "line 1: expected the fields prompt and response"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "answer of the assistant"),
    "a number": ({"prompt": "a", "response": 3}, "texts that are not empty, got '3'"),
    "no role": ({"messages": [{"content": "a"}]}, "a role and a content"),
}


@pytest.mark.parametrize("case", LINES)
def test_instructions_are_read(case, tmp_path):
    record, said = LINES[case]
    (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n\n")
    assert instructions.read(tmp_path / "d.jsonl") == (instructions.Instruction(*said),)


@pytest.mark.parametrize("case", WRONG)
def test_lines_that_are_none(case, tmp_path):
    record, says = WRONG[case]
    (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=says):
        instructions.read(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="empty"):
        instructions.read(_empty(tmp_path))


def _empty(folder):
    (folder / "e.jsonl").write_text("")
    return folder / "e.jsonl"


def test_responses_alone_are_learnt():
    examples = [instructions.Instruction("abc", "de"), instructions.Instruction("abcdefgh", "i")]
    tokens = [instructions.Instruction((97, 98, 99), (100, 101))]
    packed = instructions.pack(tokens, lambda b: np.zeros(0), 8, (1,))
    assert packed.tokens.tolist() == [[97, 98, 99, 100, 101, 1, 0, 0]]
    packed = instructions.pack(examples, lambda b: np.frombuffer(b, np.uint8), 8, (1,))
    assert packed.tokens.tolist() == [[97, 98, 99, 100, 101, 1, 0, 0]]  # the second does not fit
    assert packed.tokens[0, 1:][packed.scored[0]].tolist() == [100, 101, 1]
    longer = instructions.pack(examples, lambda b: np.frombuffer(b, np.uint8), 4, (1,))
    assert longer.tokens.tolist() == [[97, 98, 99, 100]]  # the response ends where the row does


@pytest.mark.slow
def test_adapters_begin_as_nothing_and_add_a_product():
    _, params = drawn("gpt-tiny", **GPT)
    lora = LoRA(rank=2, alpha=6.0)
    own = lora.start(params, jax.random.key(1))
    assert len(own) == 2 * 6  # q, k, v, o, in, out of each block
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), lora(params, own), params)
    assert all(jax.tree.leaves(same))
    name = "block_1.o.kernel"
    own[name]["B"] = jnp.ones_like(own[name]["B"])
    whole = lora(params, own)
    before = params["block_1"]["o"]["kernel"]
    change = 3.0 * np.asarray(own[name]["A"]).sum(1).reshape(*before.shape[:2], 1)
    after = whole["block_1"]["o"]["kernel"]
    np.testing.assert_allclose(after, before + change, atol=20 * EPS)
    with pytest.raises(ValueError, match=r"tune\.rank must be at most 8"):
        LoRA(rank=9, alpha=1.0).start(params, jax.random.key(1))


def saved(folder, net, params, **more):
    tensors, config = export({"params": params}, net)
    extras = {"config.json": json.dumps(config | more).encode()}
    save_checkpoint(folder, tensors, extras=extras)
    return str(folder)


@pytest.mark.soak
def test_noise_has_the_initial_weights_shape(tmp_path):
    net, params = drawn("gpt-tiny", **GPT)
    path = saved(tmp_path / "c", net, params, initializer_range=0.3)
    stated = measure.deviations(varied(TINY, deviation="stated"), net, path)
    assert float(stated["block_0"]["q"]["kernel"]) == np.float32(0.3)
    assert float(stated["block_0"]["out"]["kernel"]) == np.float32(0.3 / 2)  # 2 layers
    assert float(stated["ln"]["scale"]) == float(stated["block_0"]["q"]["bias"]) == 0
    own = measure.deviations(TINY, net, path)
    assert float(own["block_0"]["q"]["bias"]) == 0
    assert abs(float(own["position_embed"]) / 0.02 - 1) < 4 / np.sqrt(2 * 24 * 8)
    moved = measure._noisy(params, stated, jax.random.key(0), 0.5)
    apart = np.concatenate(
        [(moved["block_0"][k]["kernel"] - params["block_0"][k]["kernel"]).ravel() for k in "qkv"]
    )
    assert abs(apart.std() / 0.15 - 1) < 4 / np.sqrt(2 * apart.size)
    np.testing.assert_array_equal(moved["ln"]["scale"], params["ln"]["scale"])
    bare = saved(tmp_path / "b", net, params)
    with pytest.raises(ValueError, match="missing initializer_range"):
        measure.deviations(varied(TINY, deviation="stated"), net, bare)


def test_budgets_are_told_by_names_or_in_order():
    names = ["OLMo/step10000-tokens41B", "OLMo/step117850-tokens494B", "o/step738000-tokens3.1T"]
    config = Config(checkpoints=tuple(names))
    told, unit = data.budgets(config, names)
    assert (told.tolist(), unit) == ([41e9, 494e9, 3.1e12], "tokens")
    assert data.budgets(config, ["a", "b", "c"])[1] == "order"
    with pytest.raises(ValueError, match="from the first to the last"):
        data.budgets(config, names[::-1])
    given = varied(config, tokens=(1, 2, 3))
    assert data.budgets(given, names)[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoints": ("a", "b")}, "3 or more folders"),
        ({"checkpoints": ("a", "b", "c"), "tokens": (1, 2)}, "one number for each"),
        ({"tune": {"tasks": ("some.txt",)}}, "JSON lines"),
        ({"tune": {"epochs": 1, "warmup": 16}}, "more steps"),
        ({"series": {"budgets": (100, 4000)}}, "at least 10 steps"),
        ({"model": {"mup": 8}}, "model.mup must be None"),
        ({"memory": {"micro_batches": 3}}, "must divide"),
    ],
)
def test_configs_that_are_none(changes, says):
    with pytest.raises(ValueError, match=says):
        varied(Config(), **changes)


@pytest.mark.parametrize("name", ["paper", "paper_7b", "checkpoints"])
def test_what_needs_files_says_so(name):
    with pytest.raises(DataError, match="folders of 3 or more checkpoints") as error:
        run(PRESETS[name])
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_tiny_run_and_its_figures():
    found = tiny_run("overtraining_checkpoints").dataset
    assert found["tuned_base"].dims == ("task", "budget", "seed", "rate")
    # less noise changes the loss less; part of the task is learned
    more = abs(findings.increase(found)).mean(("budget", "seed"))
    assert float(more[0]) < float(more[-1])
    assert (found["tuned_test"].sel(rate=0.02) < found["before"]).all()
    far = found["tuned_distance"].mean(("task", "budget", "seed"))
    assert float(far[0]) < float(far[1])
    for figure in plot(found).values():
        assert not flaws(figure)
    assert len(findings.table(found)) == 4
    assert "3 checkpoints" in findings.summary(found)


@pytest.mark.soak
def test_given_checkpoints_adapters_and_benchmarks(tmp_path):
    """Folders, instructions and multiple-choice questions in files, as in the papers' presets."""
    rng, config = random.Random(0), TINY
    stacked = tiny_run("overtraining_checkpoints").stages["series of checkpoints"]
    shape = {"vocab": text.VOCAB, "context": 24, "width": 8, "layers": 1, "heads": 1,
             "head_dim": 8, "hidden": 16, "tied": True, "norm": "layernorm"}  # fmt: skip
    net = presets.build({"model_type": "flax_llama", **shape})
    paths = series.write(net, config.series.budgets, stacked, tmp_path)
    assert series.write(net, config.series.budgets, stacked, tmp_path) == paths
    other = jax.tree.map(lambda x: x + 1, stacked)
    with pytest.raises(ValueError, match="another network"):
        series.write(net, config.series.budgets, other, tmp_path)
    sums = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(60)]
    taught = [{"instruction": f"{a}+{b}=", "output": str(a + b)} for a, b in sums]
    asked = [
        {"question": f"{a}+1=", "choices": [str(a + 1), str(a + 3)], "answer": 0} for a, _ in sums
    ]
    for name, records in (("sums", taught), ("more", asked)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    given = varied(
        config,
        checkpoints=tuple(paths),
        tune={"tasks": (str(tmp_path / "sums.jsonl"),), "rank": 2},
        benchmarks={"files": (str(tmp_path / "more.jsonl"),), "items": 8, "shots": 1},
        memory={"together": 2, "micro_batches": 2},
    )
    found = run(given)
    assert found["budget"].values.tolist() == [1, 2, 3]  # 'tokens-1000' says no unit
    assert found.attrs["rank"] == 2
    assert found["tuned_answers"].dims == ("task", "budget", "seed", "rate", "benchmark")
    assert ((found["answers"] >= 0) & (found["answers"] <= 1)).all()
    assert (found["tuned_distance"] > 0).all()
    # the same checkpoints, read from folders of another name
    same = tiny_run("overtraining_checkpoints").dataset
    np.testing.assert_allclose(found["base"], same["base"], rtol=20 * EPS)
    for figure in plot(found).values():
        assert not flaws(figure)
    with pytest.raises(DataError, match=r"tune\.examples"):
        run(varied(given, tune={"examples": 400}))
    with pytest.raises(DataError, match=r"tune\.rank"):
        run(varied(given, tune={"rank": 9}))


@pytest.mark.soak
def test_files_as_the_presets_have_them(tmp_path):
    """Folders of GPT-2, a byte-pair tokenizer, a text in its tokens, and dialogues."""
    path, names = tokenizer(tmp_path, [("t", "h"), ("Ġ", "th")])
    vocab, rng = max(names) + 1, np.random.default_rng(0)
    folders = []
    for k, tokens in enumerate(("1B", "4B", "1T")):
        net, params = drawn("gpt-tiny", **GPT | {"vocab": vocab, "context": 40})
        params = jax.tree.map(lambda x, k=k: x / (10 + k), params)
        more = {"initializer_range": 0.02, "eos_token_id": 0}
        folders.append(saved(tmp_path / f"step{k}-tokens{tokens}", net, params, **more))
    for part in ("train", "val"):
        np.save(tmp_path / f"{part}.npy", rng.integers(0, vocab, 3000))
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": vocab}))
    said = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b the"}]}
    ]
    lines = "".join(json.dumps(record) + "\n" for record in said * 60)
    (tmp_path / "tulu.jsonl").write_text(lines)
    config = varied(
        PRESETS["checkpoints"],
        checkpoints=tuple(folders),
        data={"folder": str(tmp_path)},
        gammas=(0.1, 1.0),
        model={"context": 48},
        held_out=8,
        tune={"tasks": (str(tmp_path / "tulu.jsonl"),), "examples": 20, "batch": 4, "warmup": 1,
              "held_out": 5, "rates": (1e-4, 1e-2)},
    )  # fmt: skip
    with pytest.raises(DataError, match=r"model\.context must be at most 40"):
        run(config)
    config = varied(config, model={"context": 36})
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        run(config)
    with pytest.raises(DataError, match=r"tune\.tokenizer must be the one"):
        run(varied(config, tune={"tokenizer": None}))
    found = run(varied(config, tune={"tokenizer": str(path)}))
    assert found["budget"].values.tolist() == [1e9, 4e9, 1e12]
    assert findings.named(found) == ["1B", "4B", "1000B"]
    assert (found["tuned_test"].sel(rate=1e-2) < found["before"]).all()  # always the same answer
