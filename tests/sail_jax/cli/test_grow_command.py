"""`sail-jax grow` and `grow_checkpoint`, from files to files, alone and within a recipe."""

import json
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import olmo2
import pytest
from known_networks import GOLDEN, model
from refusals import refused
from small_checkpoints import CONFIG, GEMMA, tensors

from sail_jax import methods
from sail_jax.architectures import files
from sail_jax.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from sail_jax.checkpoint.executor import peak
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.operations.growing import GrowRequest, grow_checkpoint
from sail_jax.checkpoint.operations.merging import MergeRequest, merge_recipe
from sail_jax.checkpoint.operations.running import planned
from sail_jax.checkpoint.planning.cards import render
from sail_jax.checkpoint.recipe.recipes import parse
from sail_jax.checkpoint.sources import agreement
from sail_jax.checkpoint.sources.agreement import wanted
from sail_jax.cli import main as cli
from sail_jax.cli.options import entry
from sail_jax.growth import Growth, networks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the checkpoints a and b, one network and another."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for seed, name in enumerate("ab"):
        extras = {n: folder / n for n in ("config.json", "tokenizer.json")}
        save_checkpoint(folder / name, tensors(seed), extras=extras)
    return folder


def bits(arrays):
    return {name: np.asarray(x).tobytes() for name, x in arrays.items()}


@pytest.mark.slow
def test_command_function_and_memory_agree(models, tmp_path, capsys):
    command = ["grow", models / "a", tmp_path / "out", "--width", "2x", "--seed", "5", "--quiet"]
    assert cli.main([*map(str, command), "--certify"]) == 0
    shown = capsys.readouterr().out
    assert "within rounding" in shown
    grow_checkpoint(models / "a", tmp_path / "py", {"width": 2}, seed=5, certify=False)
    want, made = networks.grow(tensors(0), CONFIG, {"width": 2}, "lemon", key=jax.random.key(5))
    assert bits(load_checkpoint(tmp_path / "out")) == bits(want)
    assert bits(load_checkpoint(tmp_path / "py")) == bits(want)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == made.config
    assert config["hidden_size"] == 32
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        models / "tokenizer.json"
    ).read_bytes()
    about = json.loads((tmp_path / "out" / "growth.json").read_text())
    assert about["exact"] is True
    said = "the function is preserved. Both networks were run on probe inputs by the forward pass"
    assert about["exactness"].startswith(said)
    assert shown.splitlines()[-1].endswith(about["exactness"])
    assert about["changes"]["hidden_size"] == [16, 32]
    single, double = about["agreement"]
    # the growth preserves the function: rounding of float32, and of bfloat16
    assert single["dtype"] == "float32"
    assert single["largest"] <= 10 * np.sqrt(jnp.finfo(jnp.float32).eps) * single["scale"]
    assert double["dtype"] == "bfloat16"
    assert double["preserved"]
    assert 0 < double["mean"] <= double["largest"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`lemon`, seed 5" in card
    assert "hidden_size: 16 to 32" in card


@pytest.mark.slow
def test_target_from_a_file_and_depth(models, tmp_path):
    whole = CONFIG | {"num_hidden_layers": 3, "hidden_size": 20, "head_dim": 4}
    (tmp_path / "to.json").write_text(json.dumps(whole))
    command = ["grow", models / "a", tmp_path / "out", "--to", tmp_path / "to.json", "--quiet"]
    more = ["--depth-method", "llama_pro", "--no-certify", "--format", "npz"]
    assert cli.main([*map(str, command), *more]) == 0
    got = load_checkpoint(tmp_path / "out")
    want, _ = networks.grow(
        tensors(0), CONFIG, whole, "lemon", key=jax.random.key(0), depth_method="llama_pro"
    )
    assert bits(got) == bits(want)
    assert got["model.layers.2.mlp.up_proj.weight"].shape == (24, 20)


@pytest.mark.slow
def test_plan_says_what_would_be_done_and_writes_nothing(models, tmp_path, capsys):
    assert (
        cli.main(
            ["grow", str(models / "a"), "--to", "hidden_size=20", "--to", "head_dim=4", "--plan"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "hidden_size: 16 to 20" in shown
    assert "peak memory: at most" in shown
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from sail_jax.cli import main as cli
from sail_jax.checkpoint.output import writer
done, left = writer.Writer.done, 7
def mortal(self, name):
    global left
    done(self, name)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
writer.Writer.done = mortal
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_it_resumes_to_the_same_bytes(models, tmp_path, capsys):
    command = ["grow", models / "a", tmp_path / "out", "--width", "2x", "--no-certify", "--quiet"]
    argv = [*map(str, command), "--threads", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *argv], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    assert "--resume" in refused(capsys, *argv)
    other = [word if word != "2x" else "3x" for word in argv]
    assert "another" in refused(capsys, *other, "--resume")
    assert "another" in refused(capsys, *argv, "--resume", "--seed", "1")
    assert cli.main([*argv, "--resume", "--max-memory", "1GB"]) == 0
    want, _ = networks.grow(tensors(0), CONFIG, {"width": 2}, "lemon", key=jax.random.key(0))
    assert bits(load_checkpoint(tmp_path / "out")) == bits(want)
    assert not list(tmp_path.glob(".out*"))


REFUSED = {
    "no target": ([], "give the target: either --to"),
    "two targets": (["--width", "2x", "--to", "hidden_size=32"], "give the target: either --to"),
    "no factor": (["--width", "twice"], "expected a factor such as 2x, got 'twice'"),
    "smaller": (["--to", "intermediate_size=12"], "growth was asked for"),
    "fewer layers": (["--depth", "0.5x"], "give depth_method='mean_depth'"),
    "no layers": (["--to", "num_hidden_layers=0"], "must become 1 layer or more, not 0"),
    "typo in an entry": (["--to", "hiden_size=32"], "nearest: 'hidden_size'"),
    "typo in a method": (["--width", "2x", "--method", "lemmon"], "lemon"),
    "typo in an option": (["--width", "2x", "--set", "snr=3"], "snr"),
    "an option without a value": (["--width", "2x", "--set", "snr"], "expected KEY=VALUE"),
    "heads that do not divide": (["--to", "num_attention_heads=7"], "num_attention_heads"),
    "no configuration": (["--to", "no/config.json"], "no/config.json"),
    "no table": (["--width", "2x", "--spec", "no.yaml"], "no.yaml is missing"),
    "memory": (["--width", "2x", "--max-memory", "10MB"], "--max-memory"),
    "not exact": (["--width", "2x", "--method", "interpolate", "--lossless"], "lossless"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line_and_leave_nothing(name, models, tmp_path, capsys):
    options, words = REFUSED[name]
    message = refused(capsys, "grow", models / "a", tmp_path / "out", *options)
    assert words in message
    assert not list(tmp_path.iterdir())


def test_other_refusals(models, tmp_path, capsys):
    assert "OUT is missing" in refused(capsys, "grow", models / "a", "--width", "2x")
    assert "does not exist" in refused(capsys, "grow", tmp_path / "c", "out", "--width", "2x")
    lacking = tensors(0)
    del lacking["model.layers.1.mlp.up_proj.weight"]
    save_checkpoint(tmp_path / "lacking", lacking)
    told = ["--width", "2x", "--config", models / "config.json"]
    message = refused(capsys, "grow", tmp_path / "lacking", tmp_path / "out", *told)
    assert "up_proj" in message
    message = refused(capsys, "grow", tmp_path / "lacking", tmp_path / "out", "--width", "2x")
    assert "config.json is missing" in message
    bad = tensors(0)
    bad["model.norm.weight"][3] = np.nan
    save_checkpoint(tmp_path / "bad", bad)
    command = ["grow", tmp_path / "bad", tmp_path / "out", *told, "--no-certify", "--quiet"]
    message = refused(capsys, *command)
    assert "NaN or infinity in model.norm.weight" in message
    assert not (tmp_path / "out").exists()
    assert cli.main([*map(str, command), "--allow-nonfinite", "--resume"]) == 0


@pytest.mark.slow
def test_an_unknown_network_grows_by_a_table(tmp_path, capsys):
    rng = np.random.default_rng(0)
    net = {"fc1.weight": (8, 3), "fc1.bias": (8,), "fc2.weight": (2, 8)}
    net = {name: rng.normal(size=shape).astype(np.float32) for name, shape in net.items()}
    save_checkpoint(tmp_path / "net", net)
    assert cli.main(["grow", str(tmp_path / "net"), "--draft"]) == 0
    table = tmp_path / "table.yaml"
    table.write_text(capsys.readouterr().out.replace("units8", "hidden"))
    text = table.read_text() + '  "hidden": "relu"\n'
    table.write_text(text)
    command = ["grow", tmp_path / "net", tmp_path / "out", "--to", "hidden=12", "--spec", table]
    assert cli.main([*map(str, command), "--quiet"]) == 0
    new = load_checkpoint(tmp_path / "out")
    assert new["fc1.weight"].shape == (12, 3)
    x = rng.normal(size=(5, 3))
    outputs = [
        np.maximum(x @ p["fc1.weight"].T + p["fc1.bias"], 0) @ p["fc2.weight"].T.astype(float)
        for p in (net, new)
    ]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5)  # some eps of sums of eight around 1
    for wrong, words in {
        text.replace("axes:", "axis:"): "nearest: 'axes'",
        text.replace("hidden*", "hidden**"): "cannot read",
        text.replace("fc1.bias", "fc1.bais"): "fc1.bais",
        text.replace('"hidden": "relu"', '"hiden": "relu"'): "hiden",
        text.replace('"relu"', '"rleu"'): "rleu",
        text.replace("axes:", 'settings: {d: " "}\naxes:'): "expected the names of spaces",
        # three units, and eight
        text.replace("units3*", "hidden*").replace('  "units3": "outer"\n', ""): "'hidden' has",
    }.items():
        table.write_text(wrong)
        message = refused(capsys, *command[:2], tmp_path / "x", *command[3:])
        assert words in message, message
        assert not (tmp_path / "x").exists()


CHAIN = """
merge_method: linear
models:
  - model: {models}/a
    grow: {{to: {{width: 2}}, method: fpi, seed: 1}}
    parameters: {{weight: 1}}
  - model: {models}/b
    grow: {{to: {{width: 2}}, method: fpi, seed: 2}}
    align: {{to: {{model: {models}/a, grow: {{to: {{width: 2}}, method: fpi, seed: 1}}}}}}
    parameters: {{weight: 1}}
out_dtype: float32
"""


@pytest.mark.slow
def test_a_recipe_grows_aligns_and_merges(models, tmp_path):
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.format(models=models))
    shown = []  # a plan that aligns computes: once is enough
    merge_recipe(path, tmp_path / "out", before=lambda ready: shown.append(render(ready.plan)))
    assert "grown by fpi" in shown[0]
    for k, name in enumerate("ab"):
        grow_checkpoint(
            models / name, tmp_path / name, {"width": 2}, "fpi", seed=k + 1, certify=False
        )
    command = ["align", tmp_path / "a", tmp_path / "b", tmp_path / "c", "--no-certify", "--quiet"]
    assert cli.main(list(map(str, command))) == 0
    want = methods.linear()(
        [
            {n: jnp.asarray(x, jnp.float32) for n, x in load_checkpoint(tmp_path / m).items()}
            for m in "ac"
        ]
    )
    got = load_checkpoint(tmp_path / "out")
    for name, x in got.items():  # means of two in float32
        np.testing.assert_allclose(x, want[name], rtol=2.0**-22, atol=0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 32
    # aligned, they are nearer to each other than as they were grown
    a, b, c = (load_checkpoint(tmp_path / m) for m in "abc")
    apart = lambda x, y: sum(np.square(x[n].astype(float) - y[n].astype(float)).sum() for n in x)  # noqa: E731
    assert apart(a, c) < apart(a, b)


RECIPES = {
    "typo beside model": ("{model: A, grwo: {to: {width: 2}}}", "nearest: 'grow'"),
    "typo in grow": ("{model: A, grow: {to: {width: 2}, metod: fpi}}", "nearest: 'method'"),
    "no target": ("{model: A, grow: {method: fpi}}", "needs 'to'"),
    "no method": ("{model: A, grow: {to: {width: 2}, method: lemmon}}", "expected one of"),
    "another method's option": (
        "{model: A, grow: {to: {width: 2}, method: fpi, snr_db: 3}}",
        "snr_db",
    ),
    "typo in align": ("{model: A, align: {to: A, famly: signed}}", "nearest: 'family'"),
    "smaller": ("{model: A, grow: {to: {hidden_size: 8}}}", "growth was asked for"),
    "twice": ("{model: {model: A, grow: {to: {width: 2}}}, grow: {to: {width: 2}}}", "already"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_read_strictly(name, models, tmp_path):
    text, words = RECIPES[name]
    recipe = f"merge_method: linear\nmodels:\n- {text}\nparameters: {{weight: 1}}\n"
    with pytest.raises(ValueError, match=r"recipe:3:\d+: models\[0\]") as raised:
        merge_recipe(recipe.replace(" A", f" {models}/a"), tmp_path / "out")
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_help_lists_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("grow", "align", "inspect"):
        assert f"\n  {command} " in shown
        assert cli.main([command, "--help"]) == 0
    assert cli.main(["grow", "--methods"]) == 0
    assert "Net2Net" in capsys.readouterr().out
    assert entry("a=[1, 2]") == ("a", [1, 2])


@pytest.mark.slow
def test_values_on_the_command_line_are_plain_yaml():
    """Numbers, text, lists and mappings; a date is a text, and nothing else is built."""
    assert entry("a=2020-09-09") == ("a", "2020-09-09")
    assert entry("a={b: [1, null]}") == ("a", {"b": [1, None]})
    for value in ("[" * 3000, "&a [*a]", "!!python/name:os.system", "!!int x", "2: [", "!!set {a}"):
        with pytest.raises(ArgumentTypeError, match=r"^a:"):
            entry(f"a={value}")


@pytest.mark.slow
def test_a_tied_head_gets_its_own(models, tmp_path):
    tied = {n: x for n, x in tensors(0).items() if n != "lm_head.weight"}
    config = json.dumps(CONFIG | {"tie_word_embeddings": True}).encode()
    save_checkpoint(tmp_path / "tied", tied, extras={"config.json": config})
    done = grow_checkpoint(tmp_path / "tied", tmp_path / "out", {"width": 2}, certify=True)
    with open_checkpoint(tmp_path / "out") as grown:
        new = json.loads((tmp_path / "out" / "config.json").read_text())
        assert ("lm_head.weight" in grown.tensors) == (not new["tie_word_embeddings"])
    assert (not done.growth.report.lost) == all(one.preserved for one in done.agreement)


@pytest.mark.slow
def test_a_fingerprint_covers_what_is_done_to_inputs(models):
    text = "merge_method: passthrough\nmodels:\n"
    text += "- {{model: {m}/a, grow: {{to: {{width: {w}}}, seed: {s}}}}}\n"
    marks = []
    for width, seed in ((2, 0), (2, 1), (3, 0), (2, 0)):
        recipe = parse(text.format(m=models, w=width, s=seed))
        with planned(MergeRequest(recipe)) as ready:
            marks.append(ready.fingerprint)
            needed = max(x.needs for t in ready.plan.treatments for x in t.models)
            assert peak(ready.works, ready.limits) > needed
    assert marks[0] == marks[3]
    assert len(set(marks)) == 3


GEMMA_SPEC = """
axes:
  model.embed_tokens.weight: {embed}
  model.norm.weight: diag(resid)
  "model.layers.{{i}}.norm.weight": diag(resid)
  "model.layers.{{i}}.mlp.{{gate,up}}.weight": hidden.{{i}} resid*
  "model.layers.{{i}}.mlp.down.weight": resid hidden.{{i}}*
{head}
spaces: {{resid: rmsnorm, "hidden.{{i}}": elementwise, vocab: outer}}
settings: {{hidden_size: resid, intermediate_size: "hidden.{{i}}", vocab_size: vocab}}
layers: {{num_hidden_layers: "model.layers.{{i}}."}}
"""
EMBED, TABLE = "vocab* resid", "vocab* resid | vocab resid*"
HEAD = "  lm_head.weight: vocab resid*"
SCALES = "scales: {model.embed_tokens.weight: resid^0.5}"
FORWARD = """
import jax, jax.numpy as jnp

def norm(x, gain, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (1 + gain)

def logits(t, config):
    eps, table = config["rms_norm_eps"], t["model.embed_tokens.weight"]
    x = table * config["hidden_size"] ** 0.5
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y = norm(x, t[layer + "norm.weight"], eps)
        gate, up, down = (t[f"{layer}mlp.{name}.weight"].T for name in ("gate", "up", "down"))
        x = x + jax.nn.gelu(y @ gate) * (y @ up) @ down
    return norm(x, t["model.norm.weight"], eps) @ t.get("lm_head.weight", table).T

def broken(t, config):
    return {}["lm_head"]

def constant(t, config):
    return jnp.ones(3)

number = 3
"""


@pytest.fixture
def gemma(tmp_path, monkeypatch):
    """The folders `untied` and `tied` and a forward pass `gem:logits`, in the working directory."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    for i in range(2):
        mlp = {"mlp.gate": (12, 8), "mlp.up": (12, 8), "mlp.down": (8, 12), "norm": (8,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in mlp.items()}
    net = {n: (0.3 * rng.normal(size=shape)).astype(np.float32) for n, shape in shapes.items()}
    head = {"lm_head.weight": rng.normal(size=(11, 8)).astype(np.float32)}
    for name, more in {"untied": head, "tied": {}}.items():
        config = GEMMA | {"tie_word_embeddings": not more}
        extras = {"config.json": json.dumps(config).encode()}
        save_checkpoint(tmp_path / name, net | more, extras=extras)
    (tmp_path / "gem.py").write_text(FORWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "gem", raising=False)
    return tmp_path


def grown_by(folder, capsys, name, *argv):
    """Returns the last line printed when a folder is grown, and growth.json."""
    capsys.readouterr()
    assert cli.main(["grow", name, "out", "--spec", "spec.yaml", "--quiet", *argv]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    about = json.loads((folder / "out" / "growth.json").read_text())
    assert last.endswith(about["exactness"])
    assert about["exactness"] in (folder / "out" / "README.md").read_text()
    return about


def spec_of(folder, embed, *more):
    (folder / "spec.yaml").write_text(GEMMA_SPEC.format(embed=embed, head="\n".join(more)))


@pytest.mark.slow
def test_without_a_run_nothing_is_called_exact(gemma, capsys):
    """Embeddings times the root of their width, which no axis shows (Gemma)."""
    spec_of(gemma, EMBED, HEAD)
    about = grown_by(gemma, capsys, "untied", "--width", "2x")
    assert about["exactness"] == "not run"
    assert about["exact"] is None
    assert cli.main(["grow", "untied", "--width", "2x", "--spec", "spec.yaml", "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "exactness: not run"


@pytest.mark.slow
def test_a_forward_pass_on_the_command_line_certifies(gemma, capsys):
    spec_of(gemma, EMBED, HEAD)
    run = ["--width", "2x", "--certify", "gem:logits"]
    error = refused(capsys, "grow", "untied", "x", "--spec", "spec.yaml", *run, "--lossless")
    assert "by gem:logits; the largest difference is" in error
    assert not (gemma / "x").exists()
    about = grown_by(gemma, capsys, "untied", *run)
    assert about["exact"] is False
    (compared,) = about["agreement"]
    # the residual stream is sqrt(2) too large before what layers add to it
    assert compared["largest"] > 0.1 * compared["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("width", ["2x", "1.5x"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_sizes_that_a_network_multiplies_by_are_named_in_a_spec(gemma, capsys, name, width):
    if name == "tied":
        spec_of(gemma, TABLE, HEAD, "optional: [lm_head.weight]", SCALES)
    else:
        spec_of(gemma, EMBED, HEAD, SCALES)
    about = grown_by(gemma, capsys, name, "--width", width, "--certify", "gem:logits")
    assert about["exact"] is True
    assert "lm_head.weight" in load_checkpoint(gemma / "out")
    config = json.loads((gemma / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


WRONG_FORWARDS = {
    "gem:broken": "no certificate: gem:broken raised KeyError: 'lm_head'",
    "gem:constant": "no certificate: the outputs of gem:constant do not change with the tensors",
    "gem:number": "gem:number is not a function, but int",
    "gem:missing": "AttributeError",
    "nowhere:logits": "ModuleNotFoundError",
    "gem": "expected MODULE:FUNCTION",
    "": "expected MODULE:FUNCTION",
}


@pytest.mark.parametrize("name", WRONG_FORWARDS)
def test_a_forward_pass_that_fails_is_said_before_anything_is_written(gemma, capsys, name):
    spec_of(gemma, EMBED, HEAD)
    command = ["grow", "untied", "x", "--spec", "spec.yaml", "--width", "2x", "--certify", name]
    assert WRONG_FORWARDS[name] in refused(capsys, *command)
    assert not (gemma / "x").exists()


def test_no_forward_pass_is_known(gemma, capsys):
    spec_of(gemma, EMBED, HEAD)
    command = ["grow", "untied", "x", "--spec", "spec.yaml", "--width", "2x", "--certify"]
    assert "--certify (MODULE:FUNCTION)" in refused(capsys, *command)


@pytest.fixture
def answered(tmp_path, monkeypatch, capsys):
    """An OLMo 2 called `olmo2` and the table of its own draft, answered: a gain is in no space."""
    extras = {"config.json": json.dumps(olmo2.CONFIG).encode()}
    save_checkpoint(tmp_path / "olmo2", olmo2.tensors(), extras=extras)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["grow", "olmo2", "--draft"]) == 0
    drafted, _, asked = capsys.readouterr().out.partition("open:")
    assert {f"self_attn.{x}_norm" for x in "qk"} <= set(re.findall(r"self_attn.\w+_norm", asked))
    assert '"head.{i}": "outer"' in drafted
    (tmp_path / "spec.yaml").write_text(drafted)
    return tmp_path


DEEPER = ["--depth", "2x", "--spec", "spec.yaml", "--quiet"]


@pytest.mark.slow
def test_an_answered_draft_that_was_not_run_is_not_called_lossless(answered, capsys):
    error = refused(capsys, "grow", "olmo2", "x", *DEEPER, "--lossless")
    assert "lossless growth is required, but the networks were not run: --certify" in error
    assert "--certify (MODULE:FUNCTION)" in error
    assert not (answered / "x").exists()
    about = grown_by(answered, capsys, "olmo2", "--depth", "2x")
    assert (about["exact"], about["exactness"]) == (None, "not run")
    card = (answered / "out" / "README.md").read_text()
    assert "Exactness: not run." in card
    assert "exact as" not in card


@pytest.mark.slow
def test_what_a_draft_calls_outer_is_left_and_the_run_agrees(answered, capsys):
    run = ["--certify", "olmo2:logits", "--lossless"]
    about = grown_by(answered, capsys, "olmo2", "--depth", "2x", *run)
    assert about["exact"] is True
    assert "run on probe inputs by olmo2:logits" in about["exactness"]
    new, old = load_checkpoint(answered / "out"), olmo2.tensors()
    for name in ("self_attn.q_proj", "self_attn.k_norm", "mlp.up_proj"):
        copied = (new[f"model.layers.{i}.{name}.weight"] for i in (0, 1))
        assert all(np.array_equal(x, old[f"model.layers.0.{name}.weight"]) for x in copied)
    config = json.loads((answered / "out" / "config.json").read_text())
    # a norm of zeros is zero, whatever its epsilon and gain: to the last bit
    np.testing.assert_array_equal(olmo2.logits(new, config), olmo2.logits(old, olmo2.CONFIG))


@pytest.mark.slow
def test_a_wrong_table_is_found_by_the_run_alone(answered, capsys):
    """The same table with heads and stream stated as in a Llama, which OLMo 2 is not."""
    table = (answered / "spec.yaml").read_text()
    for name, word in {"head.{i}": "odd", "group.{i}": "elementwise", "resid": "rmsnorm"}.items():
        table = table.replace(f'"{name}": "outer"', f'"{name}": "{word}"')
    (answered / "spec.yaml").write_text(table)
    run = ["--certify", "olmo2:logits"]
    error = refused(capsys, "grow", "olmo2", "x", *DEEPER, *run, "--lossless")
    assert "but the function is not preserved. Both networks were run on probe inputs" in error
    assert not (answered / "x").exists()
    about = grown_by(answered, capsys, "olmo2", "--depth", "2x", *run)
    assert about["exact"] is False
    assert not any(row["lost"] for row in about["spaces"])
    (compared,) = about["agreement"]
    assert compared["largest"] > 0.1 * compared["scale"]


@pytest.mark.slow
def test_large_networks_are_not_run_unless_asked(models, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "FITS", 0)
    grow = partial(grow_checkpoint, models / "a", tmp_path / "out", {"depth": 2})
    for certify in (None, False):
        with pytest.raises(CheckpointError, match=r"were not run: certify=True runs them at any"):
            grow(require_lossless=True, certify=certify)
    assert not (tmp_path / "out").exists()
    done = grow()
    assert done.verdict.exact is None
    assert str(done.verdict) == "not run"
    assert not done.growth.report.lost


LOSSLESS = """
merge_method: passthrough
models:
- model: {models}/a
  grow: {{to: {{depth: 2}}, require_lossless: {lossless}}}
"""


@pytest.mark.slow
def test_a_recipe_refuses_to_call_lossless_what_it_cannot_run(models, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "FITS", 0)
    with pytest.raises(ValueError, match="not run: a recipe runs known architectures up to 1 GiB"):
        merge_recipe(LOSSLESS.format(models=models, lossless="true"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with planned(MergeRequest(parse(LOSSLESS.format(models=models, lossless="false")))) as ready:
        assert any(note.endswith("grown; exactness: not run") for note in ready.plan.notes)


@pytest.mark.soak
def test_a_recipe_runs_what_is_to_be_lossless(models, tmp_path, monkeypatch):
    text = LOSSLESS.format(models=models, lossless="true")
    with planned(MergeRequest(parse(text))) as ready:
        said = [note for note in ready.plan.notes if "exactness" in note]
        assert len(said) == 1
        assert "exactness: the function is preserved. Both" in said[0]
    # a growth that moves the outputs though no axis shows it
    leaf = Growth.leaf
    monkeypatch.setattr(Growth, "leaf", lambda self, *at: 1.01 * leaf(self, *at))
    with pytest.raises(ValueError, match="lossless growth is required, but the function is not"):
        merge_recipe(text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_a_network_with_norms_after_the_sums_has_one_verdict(tmp_path, monkeypatch, capsys):
    """MiniLM is a BERT without a head."""
    config = GOLDEN["bert"]["config"] | {"architectures": ["BertModel"]}
    net = {n: x for n, x in model("bert").params.items() if not n.startswith("cls.")}
    save_checkpoint(tmp_path / "mini", net, extras={"config.json": json.dumps(config).encode()})
    monkeypatch.chdir(tmp_path)
    for options, said in ((["--no-certify"], "not run"), ([], "the function is not preserved")):
        assert cli.main(["grow", "mini", f"out{len(options)}", "--depth", "2x", *options]) == 0
        shown = capsys.readouterr().out
        assert "norms follow the sums, so a layer with zero output is not the identity" in shown
        assert shown.splitlines()[-1].partition("; exactness: ")[2].startswith(said)
        assert len(re.findall(r"\bpreserved\b", shown)) == (not options)
    assert "norms follow the sums" in refused(
        capsys, "grow", "mini", "x", "--depth", "2x", "--lossless"
    )


NOVEL = CONFIG | {"model_type": "novel"}


@pytest.mark.slow
def test_a_draft_is_read_once_it_is_answered_and_what_it_grows_loads(models, tmp_path, capsys):
    """The tensors of a Llama under another name: drafted, grown, and a Llama of its sizes again."""
    told = NOVEL | {"max_position_embeddings": 16}
    save_checkpoint(
        tmp_path / "novel", tensors(0), extras={"config.json": json.dumps(told).encode()}
    )
    assert cli.main(["grow", str(tmp_path / "novel"), "--draft"]) == 0
    drafted, table = capsys.readouterr().out, tmp_path / "table.yaml"
    table.write_text(drafted)
    command = ["grow", tmp_path / "novel", tmp_path / "out", "--width", "2x", "--spec", table]
    error = refused(capsys, *command)
    assert "2 of a draft's questions are open" in error
    assert f"{table}:" in error
    assert not (tmp_path / "out").exists()
    settings = 'settings:\n  "hidden_size": ["resid"]\n'
    table.write_text(drafted.partition("open:")[0].replace("settings:\n", settings))
    assert cli.main([*map(str, command), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].endswith("; exactness: not run")
    assert "(not stated, so treated as softmax)" in shown  # in the table of what the axes show lost
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    new = load_checkpoint(tmp_path / "out")
    known = networks.plan(tensors(0), CONFIG, {"width": 2}, key=jax.random.key(0))
    kept = {"model_type": "novel", "max_position_embeddings": 16}
    assert config | {"head_dim": 4} == known.config | kept  # which is hidden_size / heads
    assert {n: x.shape for n, x in new.items()} == {n: x.shape for n, x in known.leaves.items()}


def test_a_configuration_is_not_left_with_the_old_sizes(gemma, capsys):
    spec_of(gemma, EMBED, HEAD)
    table = gemma / "spec.yaml"
    lines = [x for x in table.read_text().splitlines() if not x.startswith(("settings", "layers"))]
    table.write_text("\n".join(lines))
    command = ["grow", "untied", "x", "--spec", "spec.yaml", "--to", "resid=16"]
    error = refused(capsys, *command)
    assert "'hidden_size': 8" in error
    assert "settings" in error
    assert not (gemma / "x").exists()


def test_a_table_of_no_axes_is_told_from_a_list(gemma, capsys):
    (gemma / "spec.yaml").write_text("axes: {}\nspaces: {}\n")
    error = refused(capsys, "grow", "untied", "x", "--spec", "spec.yaml", "--width", "2x")
    assert "spec.yaml:1:7: axes: expected 1 or more axes; got an empty mapping" in error


@pytest.mark.parametrize(("kind", "wrong"), [("whisperer", "mistral)"), ("unheard", "gpt2)")])
def test_an_unknown_architecture_leads_to_a_draft(gemma, capsys, kind, wrong):
    (gemma / "config.json").write_text(json.dumps(GEMMA | {"model_type": kind}))
    told = ["--config", "config.json", "--width", "2x"]
    error = refused(capsys, "grow", "untied", "x", *told)
    assert "--draft" in error
    assert "--spec" in error
    assert "nearest" not in error
    assert wrong not in error


@pytest.mark.parametrize("to", [5, None, [1], b"x", object(), "a" * 5000, "a\0b"])
def test_a_target_is_a_configuration_or_its_path(models, to):
    with pytest.raises(CheckpointError), planned(GrowRequest(models / "a", None, to)):
        pass


@pytest.mark.slow
def test_a_forward_pass_reads_what_it_expects(models, tmp_path):
    """A configuration that only running reads: said, and nothing is called exact; but an error of
    our own code is one, not a missing certificate."""
    odd = {"rope_theta": "1e4", "hidden_act": ["silu"], "rms_norm_eps": None, "vocab_size": None}
    for key, value in odd.items():
        out = tmp_path / key
        told = {"config": CONFIG | {key: value}}
        if value is None and key == "rms_norm_eps":  # not stated: the default
            assert grow_checkpoint(models / "a", out, {"width": 2}, **told).verdict.exact
            continue
        done = grow_checkpoint(models / "a", out, {"width": 2}, **told)
        assert f"{key!r}" in done.notes[-1]
        assert done.verdict.exact is None

    def fails():
        raise TypeError("of ours")

    with pytest.raises(TypeError, match="of ours"):
        wanted(None, 1, "a", fails)


@pytest.mark.slow
def test_a_tied_table_without_a_head_is_not_half_untied(gemma, capsys):
    spec_of(gemma, TABLE)
    command = ["grow", "tied", "x", "--spec", "spec.yaml", "--width", "2x"]
    assert "'lm_head.weight: vocab resid*'" in refused(capsys, *command)
    assert not (gemma / "x").exists()
    about = grown_by(gemma, capsys, "tied", *command[5:], "--set", "untie=false")
    assert about["exactness"] == "not run"
    assert any("the tied leaf" in row["lost"] for row in about["spaces"])
    assert "lm_head.weight" not in load_checkpoint(gemma / "out")
    config = json.loads((gemma / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["hidden_size"] == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scales: {model.norm.weight: resid}", "such as resid^0.5"),
        ("scales: {model.norm.weight: rseid^0.5}", "the axes lack the space 'rseid'"),
        ("scales: {model.nrom.weight: resid^0.5}", "not one of the patterns"),
        ("scales: {model.norm.weight: [1]}", "such as resid^0.5"),
    ],
)
def test_scales_are_read_strictly(gemma, capsys, text, words):
    spec_of(gemma, EMBED, HEAD, text)
    message = refused(capsys, "grow", "untied", "x", "--spec", "spec.yaml", "--width", "2x")
    assert words in message


def test_the_prefix_of_layers_has_a_place_for_their_number(gemma, capsys):
    spec_of(gemma, EMBED, HEAD)
    spec = gemma / "spec.yaml"
    spec.write_text(spec.read_text().replace('"model.layers.{i}."', '"model.layers.*."'))
    message = refused(capsys, "grow", "untied", "x", "--spec", "spec.yaml", "--width", "2x")
    assert "expected a prefix with {i}" in message


def test_a_recipe_names_no_code_to_run(models, tmp_path):
    recipe = (
        "merge_method: linear\nparameters: {weight: 1}\nmodels:\n"
        f"- {{model: {models}/a, grow: {{to: {{width: 2}}, certify: gem:logits}}}}\n"
    )
    with pytest.raises(ValueError, match="certify"):
        merge_recipe(recipe, tmp_path / "out")


def test_a_stream_without_a_space_is_named_and_not_the_input(tmp_path, capsys):
    """XGLM: positions that are computed are added to the embedding, so its table has no stream."""
    rng, d, hidden, vocab = np.random.default_rng(0), 8, 12, 20
    sizes = {"fc1": (hidden, d), "fc2": (d, hidden), "final_layer_norm": (d,)}
    sizes |= {f"self_attn.{k}": (d, d) for k in ("q_proj", "k_proj", "v_proj", "out_proj")}
    sizes |= {"self_attn_layer_norm": (d,)}
    found = {"model.embed_tokens.weight": (vocab, d)}
    found |= {f"model.layer_norm.{part}": (d,) for part in ("weight", "bias")}
    for i, (name, shape) in ((i, item) for i in range(2) for item in sizes.items()):
        found |= {
            f"model.layers.{i}.{name}.weight": shape,
            f"model.layers.{i}.{name}.bias": shape[:1],
        }
    net = {name: rng.normal(size=shape).astype(np.float32) for name, shape in found.items()}
    config = {"model_type": "xglm", "architectures": ["XGLMForCausalLM"], "d_model": d}
    config |= {"ffn_dim": hidden, "num_layers": 2, "attention_heads": 2, "vocab_size": vocab}
    about = json.dumps(config | {"tie_word_embeddings": True}).encode()
    save_checkpoint(tmp_path / "a", net, extras={"config.json": about})
    out = str(tmp_path / "out")
    assert cli.main(["grow", str(tmp_path / "a"), out, "--width", "2x"]) == 2
    said = capsys.readouterr().err
    assert "no space is known of all axes that 'd_model' counts" in said
    assert "of the input" not in said
    assert cli.main(["grow", str(tmp_path / "a"), out, "--depth", "2x"]) == 0
    shown = capsys.readouterr().out
    assert "no space is known that the layers write, so new layers change the function" in shown
    assert "norms follow" not in shown


@pytest.mark.slow
def test_a_network_that_would_not_run_is_not_written(tmp_path, monkeypatch, capsys):
    """A table without the axis of a gain, which then keeps the size of the smaller head."""
    table = files.read("qwen3")
    axes = {name: "_" if "k_norm" in name else text for name, text in table.axes.items()}
    monkeypatch.setattr(files, "read", {"qwen3": table._replace(axes=axes)}.__getitem__)
    extras = {"config.json": json.dumps(GOLDEN["qwen3"]["config"]).encode()}
    save_checkpoint(tmp_path / "a", model("qwen3").params, extras=extras)
    monkeypatch.chdir(tmp_path)
    error = refused(capsys, "grow", "a", "out", "--to", "head_dim=8")
    assert "the network runs before the change, but not after it: Incompatible shapes" in error
    assert not (tmp_path / "out").exists()
