"""`sail-jax merge` of checkpoints whose other files define the meaning of their tensors."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_checkpoints import CONFIG, tensors

from sail_jax.checkpoint import RunOptions, merge_checkpoints, save_checkpoint
from sail_jax.cli import main as cli

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder, seed, rows=20, tokens=None, dtype=np.float32, stored=None, **stated):
    """Writes a tiny Llama with a given number of rows, and a tokenizer of these tokens."""
    folder.mkdir(parents=True)
    own = tensors(seed, dtype=dtype)
    rng = np.random.default_rng(seed)
    own |= {n: rng.normal(size=(rows, 16)).astype(dtype) for n in (EMBEDDING, HEAD)}
    save_file(own | (stored or {}), folder / "model.safetensors", {"format": "pt"})
    config = CONFIG | {"vocab_size": rows} | stated
    (folder / "config.json").write_text(json.dumps(config))
    if tokens is not None:
        tokenizer(folder, tokens)
    return folder


def tokenizer(folder, tokens):
    """A tokenizer.json as the library tokenizers writes it: a core, and tokens added to it."""
    core = {t: i for t, i in tokens.items() if not t.startswith("<")}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {t: i for t, i in tokens.items() if t not in core}
    added = [{"id": i, "content": t, **plain, "special": True} for t, i in special.items()]
    document = {"version": "1.0", "added_tokens": added}
    document["model"] = {"type": "WordLevel", "vocab": core, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps(document))


@pytest.fixture
def run(tmp_path, capsys):
    """Merges models by a recipe: the exit code, what was printed, and the output."""

    def merge(*models, more="", out="out", options=(), method="linear"):
        listed = "".join(f"  - {{model: {m}, parameters: {{weight: 1}}}}\n" for m in models)
        (tmp_path / "r.yaml").write_text(f"merge_method: {method}\nmodels:\n{listed}{more}\n")
        code = cli.main(["merge", str(tmp_path / "r.yaml"), str(tmp_path / out), *options])
        return code, capsys.readouterr(), tmp_path / out

    return merge


CORE = {f"t{i}": i for i in range(16)}


def test_rows_of_other_tokens_are_refused_with_the_line_to_write(tmp_path, run):
    a = write(tmp_path / "a", 1, 18, CORE | {"<end>": 16, "<tool>": 17})
    b = write(tmp_path / "b", 2, 20, CORE | {"<start>": 16, "<end>": 17})
    code, printed, out = run(a, b)
    assert code == 2
    assert "2 rows would be merged with rows of other tokens" in printed.err
    assert ">' here, '<end>' in" in printed.err
    assert "tokenizer: {source: union}" in printed.err
    assert not out.exists()
    # The line that it shows is right: the mean of <end> is of rows 16 and 17.
    code, _, out = run(a, b, more="tokenizer: {source: union}")
    assert code == 0
    rows = [load_file(x / "model.safetensors")[EMBEDDING] for x in (a, b)]
    want = (rows[0][16].astype(float) + rows[1][17]) / 2
    got = load_file(out / "model.safetensors")[EMBEDDING]
    added = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    np.testing.assert_allclose(got[ids["<end>"]], want, rtol=0, atol=2.0**-22)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(got)


def test_other_cores_are_sent_to_the_base(tmp_path, run):
    a = write(tmp_path / "a", 1, 20, {f"t{i}": i for i in range(20)})
    b = write(tmp_path / "b", 2, 20, {f"t{i}": 19 - i for i in range(19)} | {"u": 0})
    code, printed, _ = run(a, b)
    assert code == 2
    assert "tokenizer: {source: base}" in printed.err
    assert run(a, b, more="tokenizer: {source: base}")[0] == 0


@pytest.mark.parametrize("broken", ["a", "b"])
def test_a_tokenizer_that_cannot_be_read_is_refused_where_rows_follow_tokens(tmp_path, run, broken):
    a, b = (write(tmp_path / n, s, 20, CORE) for n, s in (("a", 1), ("b", 2)))
    twice = {"model": {"vocab": {"x": 1, "y": 1}}, "added_tokens": []}
    (tmp_path / broken / "tokenizer.json").write_text(json.dumps(twice))
    code, printed, _ = run(a, b, more="tokenizer: {source: base}")
    assert code == 2
    assert "share the id 1" in printed.err
    code, printed, _ = run(a, b)
    assert code == 0
    assert "its tokenizer is not compared" in printed.err


def test_rows_of_equal_tokens_merge_without_a_word(tmp_path, run):
    a, b = (write(tmp_path / n, s, 20, CORE | {"<end>": 16}) for n, s in (("a", 1), ("b", 2)))
    code, printed, _ = run(a, b)
    assert code == 0
    assert "note" not in printed.err + printed.out
    assert "lost" not in printed.err + printed.out


def test_rows_that_one_tokenizer_alone_knows_are_said_and_lost_ones_too(tmp_path, run):
    base = write(tmp_path / "base", 0, 18, CORE | {"<end>": 16})
    tuned = write(tmp_path / "tuned", 1, 20, CORE | {"<end>": 16, "<a>": 17, "<b>": 18, "<c>": 19})
    code, printed, out = run(tuned, more=f"base_model: {base}", method="task_arithmetic")
    assert code == 0
    assert "1 token of" in printed.err
    assert (
        "such as '<a>', have rows that are merged, but are not in the output's tokenizer"
        in printed.err
    )
    assert "lost: 2 tokens of" in printed.err
    assert "'<b>', have rows beyond the 18 of the output" in printed.err
    assert "rows 18 to 19 of" in printed.err
    assert len(load_file(out / "model.safetensors")[EMBEDDING]) == 18


def test_an_output_that_its_tokenizer_exceeds_is_refused(tmp_path, run):
    """The longer one first: its tokenizer would come along with the shorter one's rows."""
    a = write(tmp_path / "a", 1, 20, CORE | {"<x>": 19})
    b = write(tmp_path / "b", 2, 18, CORE)
    code, printed, _ = run(a, b)
    assert code == 2
    assert "the tokenizer has the token '<x>' = 19" in printed.err
    assert "tokenizer: {source: base}" in printed.err
    code, _, out = run(a, b, more="tokenizer: {source: base}")
    assert code == 0
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 20


@pytest.mark.parametrize("token", ["<image>", "word"])
def test_only_added_tokens_may_lack_a_row_as_in_the_input(tmp_path, run, token):
    """Gemma 3's text models have an added token for images beyond their embedding."""
    a, b = (write(tmp_path / n, s, 20, CORE | {token: 20}) for n, s in (("a", 1), ("b", 2)))
    code, printed, _ = run(a, b)
    assert (code == 0) == (token == "<image>")
    assert f"the tokenizer has the token '{token}' = 20" in printed.err
    assert ("the output contradicts itself" in printed.err) == (token == "<image>")


def test_other_architectures_need_allow_crimes(tmp_path, run):
    a, b = write(tmp_path / "a", 1), write(tmp_path / "b", 2, model_type="mistral")
    code, printed, _ = run(a, b)
    assert code == 2
    assert "the architecture 'mistral'" in printed.err
    assert "--allow-crimes" in printed.err
    code, printed, _ = run(a, b, options=["--allow-crimes"])
    assert code == 0
    assert "note:" in printed.err
    assert "the architecture 'mistral'" in printed.err
    merged = merge_checkpoints([a, b], tmp_path / "py", run=RunOptions(allow_crimes=True))
    assert any("'mistral'" in note for note in merged.plan.notes)


def test_other_meanings_of_equal_shapes_take_a_line_each(tmp_path, run):
    a = write(tmp_path / "a", 1, hidden_act="silu", rope_theta=1e4, eos_token_id=1)
    b = write(
        tmp_path / "b", 2, hidden_act="gelu", rms_norm_eps=1e-5, rope_theta=5e5,
        num_attention_heads=8, head_dim=2, eos_token_id=7, num_key_value_heads=4,
    )  # fmt: skip
    code, printed, _ = run(a, b)
    assert code == 0
    lines = [line for line in printed.err.splitlines() if "the output has the latter" in line]
    for entry in ("hidden_act is 'gelu'", "rms_norm_eps is 1e-05", "rope_theta is 500000.0"):
        assert sum(entry in line for line in lines) == 1, entry
    assert any("num_attention_heads is 8" in line for line in lines)
    assert "eos_token_id" not in printed.err


def test_rope_of_either_style_of_configuration_is_one_meaning(tmp_path, run):
    """transformers 5 states under rope_parameters what its older versions stated at the top."""
    a = write(tmp_path / "a", 1, rope_theta=5e5, rope_scaling=None)
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    code, printed, _ = run(a, write(tmp_path / "b", 2, **new))
    assert (code, "rope" in printed.err) == (0, False)
    new["rope_parameters"]["rope_theta"] = 1e4
    code, printed, _ = run(a, write(tmp_path / "c", 3, **new), out="o2")
    assert (code, "rope_theta is 10000.0" in printed.err) == (0, True)


def test_a_stale_quantization_config_is_left_out(tmp_path, run):
    about = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    a, b = write(tmp_path / "a", 1, quantization_config=about), write(tmp_path / "b", 2)
    code, printed, out = run(a, b)
    assert code == 0
    assert "quantization_config is left out" in printed.err
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


COUNTED = "bn.num_batches_tracked"


@pytest.mark.parametrize("integers", [None, "first", "last", "max", "refuse"])
@pytest.mark.parametrize("suffix", ["", ".npz", "-orbax"])
def test_integers_that_differ_follow_one_rule(tmp_path, run, integers, suffix):
    """In every format: the counters of batch norm, and steps and random keys of training."""
    for name, (count, step) in {"a": (11, 100), "b": (7, 200)}.items():
        state = {"w": np.full(4, count, np.float32), COUNTED: np.int64(count)}
        state |= {"step": np.int32(step), "key": np.array([step, count], np.uint32)}
        out = tmp_path / f"{name}{suffix}"
        save_checkpoint(out, state, format="orbax" if suffix == "-orbax" else None)
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    more = f"integers: {integers}" if integers else ""
    code, printed, out = run(*paths, more=more, out="out.npz")
    if integers == "refuse":
        assert code != 0
        assert "values differ between" in printed.err
        assert "integers: first, last or max" in printed.err
        assert not out.exists()
        return
    assert code == 0
    whose = {"max": "the largest", "last": "the last model's"}.get(integers, "the first model's")
    assert f"differ: {whose} are used" in printed.err
    got = np.load(out)
    want = {"last": (7, 200, [200, 7]), "max": (11, 200, [200, 11])}
    count, step, key = want.get(str(integers), (11, 100, [100, 11]))
    assert (got[COUNTED], got["step"], got["key"].tolist()) == (count, step, key)
    assert got["w"].tolist() == [9.0] * 4


def test_equal_integers_take_no_line(tmp_path, run):
    stored = {COUNTED: np.array(5)}
    a, b = (write(tmp_path / n, s, stored=stored) for n, s in (("a", 1), ("b", 2)))
    code, printed, _ = run(a, b)
    assert (code, "integers" in printed.err) == (0, False)


def test_a_written_dtype_that_nobody_chose_is_said_and_stated(tmp_path, run):
    a = write(tmp_path / "a", 1, dtype=ml_dtypes.float8_e4m3fn, torch_dtype="float32")
    b = write(tmp_path / "b", 2, torch_dtype="float32")
    code, printed, out = run(a, b)
    assert code == 0
    assert "the output dtype is float8_e4m3fn, as in" in printed.err
    assert "dtype: float32 keeps more" in printed.err
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float8_e4m3fn"
    code, printed, out = run(a, b, out="wide", more="dtype: float32")
    assert "written in" not in printed.err
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_which_of_two_sets_of_weights_is_read_is_said(tmp_path, run):
    a, b = write(tmp_path / "a", 1), write(tmp_path / "b", 2)
    other = {n: x + 1 for n, x in load_file(a / "model.safetensors").items()}
    save_file(other, a / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (a / "model.safetensors.index.json").write_text(json.dumps(index))
    code, printed, _ = run(a, b)
    assert code == 0
    assert "model-00001-of-00001.safetensors, model.safetensors.index.json not read" in printed.err
    assert "model.safetensors is" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["merge", "grow", "average"])
def test_shards_beside_the_index_and_what_is_no_file_are_named(tmp_path, run, capsys, command):
    a = write(tmp_path / "a", 1)
    stored = load_file(a / "model.safetensors")
    (a / "model.safetensors").rename(a / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}
    (a / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(stored, a / "model-00002-of-00001.safetensors")
    os.mkfifo(a / "added_tokens.json")
    (a / "chat_template.json").symlink_to("/dev/zero")
    if command == "merge":
        printed = run(a)[1]
    else:
        more = ("--depth", "2x") if command == "grow" else (str(tmp_path / "out"),)
        first = [str(a)] if command == "average" else [str(a), str(tmp_path / "out")]
        assert cli.main([command, *first, *more]) == 0
        printed = capsys.readouterr()
    words = " ".join((printed.out + printed.err).split())
    assert "model-00002-of-00001.safetensors not read: model.safetensors.index.json with 1" in words
    assert "added_tokens.json, chat_template.json are no plain files and count as missing" in words


def test_what_the_plan_lists_as_lost_the_run_prints(tmp_path, run):
    a = write(tmp_path / "a", 1)
    extra = {f"extra.{i}.weight": np.ones(2, np.float32) for i in range(3)}
    b = write(tmp_path / "b", 2, rows=23, stored=extra)
    stored = load_file(b / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, b / "model.safetensors")
    (a / "modeling_own.py").write_text("")
    (a / "1_Pooling").mkdir()
    more = "extra: ignore\nmissing: skip"
    code, planned, _ = run(a, b, more=more, options=["--plan"])
    assert code == 0
    lost = [line for line in planned.out.splitlines() if line.startswith("lost:")]
    code, printed, out = run(a, b, more=more)
    assert [line for line in printed.err.splitlines() if line.startswith("lost:")] == lost
    said = "\n".join(lost)
    assert "3 tensors of" in said
    assert "rows 20 to 22 of" in said
    assert "model.norm.weight: " in said
    assert "not carried: 1_Pooling, modeling_own.py" in said
    assert said.count("\n") == 3
    card = (out / "README.md").read_text()
    assert "Lost:" in card
    assert "modeling_own.py" in card


def test_more_than_five_lines_are_counted(tmp_path, run):
    stated = {f"entry_{i}": i for i in range(8)}
    a = write(tmp_path / "a", 1, **stated)
    b = write(tmp_path / "b", 2, **{k: v + 1 for k, v in stated.items()})
    code, printed, _ = run(a, b)
    assert code == 0
    lines = [line for line in printed.err.splitlines() if line.startswith("note:")]
    assert len(lines) == 6
    assert lines[-1] == "note: and 3 more; --plan lists them"


def test_a_config_that_nothing_can_mend_is_refused(tmp_path, run):
    a, b = (write(tmp_path / n, s, num_key_value_heads=4) for n, s in (("a", 1), ("b", 2)))
    code, printed, _ = run(a, b)
    assert code == 2
    assert "would contradict itself: config.json states num_key_value_heads 4" in printed.err
    code, printed, _ = run(a, b, options=["--allow-crimes"])
    assert code == 0
    assert "the output contradicts itself" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["grow", "align"])
def test_what_align_and_grow_write_follows_its_tensors_too(tmp_path, capsys, command):
    about = {"quantization_config": {"quant_method": "bitsandbytes"}, "torch_dtype": "float16"}
    a, b = write(tmp_path / "a", 1), write(tmp_path / "b", 2, **about)
    inputs, more = ([a, b], []) if command == "align" else ([b], ["--depth", "2x", "--no-certify"])
    code = cli.main([command, *map(str, inputs), str(tmp_path / "out"), *more])
    assert code == 0, capsys.readouterr().err
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["torch_dtype"] == "float32"
    assert "quantization_config" not in stated


def test_inspect_prints_what_tensors_contradict(tmp_path, capsys):
    a = write(tmp_path / "a", 1, tokens=CORE | {"<end>": 20})
    b = write(tmp_path / "b", 2, vocab_size=19)
    assert cli.main(["inspect", str(a)]) == 0
    assert "note: the tokenizer has the token '<end>' = 20" in capsys.readouterr().out
    assert cli.main(["inspect", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert f"contradicts: {a}: the tokenizer has the token '<end>' = 20" in out
    assert f"contradicts: {b}: config.json states vocab_size 19" in out
    (a / "tokenizer.json").write_text("{")
    assert cli.main(["inspect", str(a)]) == 0
    assert "note: the tokenizer was not compared" in capsys.readouterr().out
