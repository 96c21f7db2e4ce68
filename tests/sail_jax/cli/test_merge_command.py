"""`sail-jax merge` and `merge_checkpoints`, from files to files, whole and interrupted."""

import json
import random
import signal
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest
from refusals import refused

from sail_jax import Merge, chain, methods, reductions, transforms
from sail_jax.checkpoint import (
    RunOptions,
    align_checkpoints,
    grow_checkpoint,
    load_checkpoint,
    merge_checkpoints,
    save_checkpoint,
)
from sail_jax.cli import main as cli
from sail_jax.cli.options import natural, size
from sail_jax.merging.combining import from_function

SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    **{
        f"model.layers.{i}.{name}.weight": shape
        for i in range(2)
        for name, shape in {
            "self_attn.q_proj": (16, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
            "input_layernorm": (16,),
        }.items()
    },
    "model.norm.weight": (16,),
    "lm_head.weight": (40, 16),
}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 40, "hidden_size": 16}


def tensors(seed, spread=0.02):
    base, own = np.random.default_rng(0), np.random.default_rng(seed)
    draw = lambda rng, shape, scale: scale * rng.normal(size=shape)  # noqa: E731
    return {
        name: (draw(base, shape, 1.0) + (seed > 0) * draw(own, shape, spread)).astype(
            ml_dtypes.bfloat16
        )
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the checkpoints base, a, b and c."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for seed, name in enumerate(("base", "a", "b", "c")):
        extras = {"config.json": folder / "config.json"}
        save_checkpoint(folder / name, tensors(seed), extras=extras)
    return folder


def recipe(folder, text, name="recipe.yaml"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def ties(models, folder, **top):
    lines = "".join(f"{key}: {value}\n" for key, value in top.items())
    return recipe(
        folder,
        f"merge_method: ties\nbase_model: {models}/base\nmodels:\n"
        + "".join(
            f"  - {{model: {models}/{m}, parameters: {{weight: 1, density: 0.4}}}}\n" for m in "abc"
        )
        + f"dtype: bfloat16\n{lines}",
    )


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.slow
def test_command_and_function_and_pytrees_agree(models, tmp_path, capsys):
    assert cli.main(["merge", ties(models, tmp_path, scope="tree"), str(tmp_path / "out")]) == 0
    assert f"out: {len(SHAPES)} tensors in" in capsys.readouterr().out
    merge_checkpoints(
        [models / m for m in "abc"], tmp_path / "py", base=models / "base", method="ties",
        density=0.4, scope="tree", compat="mergekit", out_dtype="bfloat16",
    )  # fmt: skip
    got, py = load_checkpoint(tmp_path / "out"), load_checkpoint(tmp_path / "py")
    want = methods.ties(density=0.4, scope="tree", compat="mergekit")(
        [tensors(k) for k in (1, 2, 3)], tensors(0)
    )
    for name in SHAPES:
        assert got[name].tobytes() == py[name].tobytes()
        apart = np.abs(got[name].astype(float) - np.asarray(want[name]).astype(float))
        # sums of three in float32 that fall to either side of a bfloat16 boundary
        assert (apart <= 2.0**-7 * np.abs(got[name].astype(float))).all()
        assert (apart > 0).mean() < 0.02
    carried = json.loads((tmp_path / "out" / "config.json").read_text())
    assert carried["num_hidden_layers"] == 2
    assert "ties" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "recipe.yaml").exists()


def test_safetensors_library_reads_the_output(models, tmp_path):
    from safetensors.numpy import load_file

    merge_checkpoints([models / "a", models / "b"], tmp_path / "out", out_dtype="float32")
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = methods.linear()(
        [{k: v.astype(np.float32) for k, v in tensors(s).items()} for s in (1, 2)]
    )
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6)


def test_options_of_a_run_have_a_record_of_their_own(models, tmp_path):
    a, out = models / "a", tmp_path / "out"
    for operation in (
        lambda **given: merge_checkpoints([a], out, **given),
        lambda **given: grow_checkpoint(a, out, {"width": 2}, **given),
        lambda **given: align_checkpoints(a, a, out, **given),
    ):
        with pytest.raises(TypeError, match=r"pass run=RunOptions\(max_memory=...\)"):
            operation(max_memory=1 << 30)


@pytest.mark.parametrize("format", ["orbax", "npz", "msgpack", "safetensors"])
def test_every_output_format_holds_the_same(models, tmp_path, format):
    merge_checkpoints(
        [models / "a", models / "b"],
        tmp_path / "out",
        run=RunOptions(format=format, shard_bytes=999),
    )
    merge_checkpoints([models / "a", models / "b"], tmp_path / "plain")
    got, want = load_checkpoint(tmp_path / "out"), load_checkpoint(tmp_path / "plain")
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].tobytes() == want[name].tobytes()


@pytest.mark.slow
def test_plan_reads_and_writes_nothing(models, tmp_path, capsys):
    before = sorted(tmp_path.parent.rglob("*"))
    path = ties(models, tmp_path)
    assert cli.main(["merge", path, "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "in 1 pass," in shown  # every tensor is a single piece
    assert "model.layers.{0-1}.mlp.up_proj.weight" in shown
    assert "peak memory: at most" in shown
    new = set(tmp_path.parent.rglob("*")) - set(before)
    assert new <= {tmp_path, tmp_path / "recipe.yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "400MiB", "2GiB"])
def test_bytes_do_not_depend_on_memory_or_threads(models, tmp_path, limit):
    path = ties(models, tmp_path)
    options = ["--max-memory", limit] if limit else ["--threads", "3"]
    assert cli.main(["merge", path, str(tmp_path / "out"), *options]) == 0
    assert cli.main(["merge", path, str(tmp_path / "again"), "--threads", "1"]) == 0
    first, second = contents(tmp_path / "out"), contents(tmp_path / "again")
    assert first["model.safetensors"] == second["model.safetensors"]


@pytest.mark.slow
def test_float64_beside_float32_shares_a_threshold_over_the_tree(tmp_path):
    """As in memory with 64 bits: one scale of magnitudes for both."""
    rng = np.random.default_rng(0)
    draw = lambda: {"b": rng.normal(size=300).astype(np.float32), "d": rng.normal(size=(40, 50))}  # noqa: E731
    trees = [draw() for _ in range(3)]
    for name, tree in zip(("base", "a", "b"), trees, strict=True):
        save_checkpoint(tmp_path / name, tree)
    pair = [tmp_path / "a", tmp_path / "b"]
    merge_checkpoints(pair, tmp_path / "out", base=tmp_path / "base", method="ties", density=0.3)
    got = load_checkpoint(tmp_path / "out")
    with jax.enable_x64(True):
        want = methods.ties(density=0.3)(trees[1:], trees[0])
    for name in got:  # 16 ulp of float32 values below 4
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=16 * 2.0**-23 * 4)


KILLED = """
import os, signal, sys
from sail_jax.cli import main as cli
from sail_jax.checkpoint.output import writer
left = int(sys.argv[1])
def mortal(name):
    method = getattr(writer.Writer, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*args, **kwargs)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(writer.Writer, name, call)
for name in ("write", "done", "extra", "commit"):
    mortal(name)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.soak
def test_killed_at_random_points_it_resumes_to_the_same_bytes(models, tmp_path):
    path = ties(models, tmp_path, scope="tree")
    assert cli.main(["merge", path, str(tmp_path / "whole")]) == 0
    want = contents(tmp_path / "whole")["model.safetensors"]
    steps = 2 * (2 * len(SHAPES) + 3 + 1)  # before and after each write, done, extra and commit
    for k, left in enumerate(random.Random(0).sample(range(1, steps + 1), 6)):
        out = tmp_path / f"out{k}"
        command = [sys.executable, "-c", KILLED, str(left), "merge", path, str(out), "--threads=1"]
        killed = subprocess.run(command, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not out.exists() or contents(out)["model.safetensors"] == want
        assert cli.main(["merge", path, str(out), "--resume"]) == 0
        assert contents(out)["model.safetensors"] == want
        assert not list(tmp_path.glob(".out*"))


def test_refusals_are_one_line_and_leave_nothing(models, tmp_path, capsys):
    out = tmp_path / "out"
    path = ties(models, tmp_path)
    assert "no.yaml is missing" in refused(capsys, "merge", tmp_path / "no.yaml", out)
    wrong = recipe(tmp_path, f"merge_method: tise\nmodels: [{{model: {models}/a}}]\n", "w.yaml")
    assert "ties" in refused(capsys, "merge", wrong, out)
    unknown = recipe(tmp_path, f"merge_method: linear\nmodles: [{{model: {models}/a}}]\n", "u.yaml")
    assert "models" in refused(capsys, "merge", unknown, out)
    assert "OUT is missing" in refused(capsys, "merge", path)
    assert "100 MiB" in refused(capsys, "merge", path, out, "--max-memory", "100MiB")
    assert "expected a size" in refused(capsys, "merge", path, out, "--max-memory", "lots")
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
    out.mkdir()
    (out / "precious").write_text("x")
    assert "exists" in refused(capsys, "merge", path, out)
    assert contents(out) == {"precious": b"x"}


def test_nan_is_named_and_allowed_on_request(models, tmp_path, capsys):
    bad = tensors(1)
    bad["model.norm.weight"][3] = np.nan
    save_checkpoint(tmp_path / "bad", bad)
    path = recipe(
        tmp_path,
        f"merge_method: linear\nmodels:\n  - {{model: {tmp_path}/bad, parameters: {{weight: 1}}}}\n"
        f"  - {{model: {models}/b, parameters: {{weight: 1}}}}\n",
    )
    message = refused(capsys, "merge", path, tmp_path / "out")
    assert "model.norm.weight" in message
    assert "--allow-nonfinite" in message
    assert not (tmp_path / "out").exists()
    assert cli.main(["merge", path, str(tmp_path / "out"), "--allow-nonfinite", "--resume"]) == 0
    assert np.isnan(load_checkpoint(tmp_path / "out")["model.norm.weight"].astype(float)).sum() == 1


def test_sizes():
    assert size("2GB") == 2 * 10**9
    assert size("512MiB") == 512 << 20
    assert size("1.5GiB") == 3 << 29
    for text in ("", "-1GB", "1 parsec", "0", "9" * 400):
        with pytest.raises(Exception, match="expected a size"):
            size(text)


def test_natural_numbers_start_at_one():
    assert natural("1") == 1
    for text in ("0", "-1", "1.5"):
        with pytest.raises(Exception, match="expected a whole number >= 1"):
            natural(text)


@pytest.mark.slow
def test_a_merge_as_a_value_writes_what_its_name_and_options_do(models, tmp_path):
    pair, base = [models / "a", models / "b"], models / "base"
    for name, options in (("ties", {"density": 0.3}), ("slerp", {"t": 0.3})):
        about = {"base": base} if name == "ties" else {}
        merge_checkpoints(pair, tmp_path / f"{name} named", method=name, **about, **options)
        value = methods.get(name)(**options)
        merge_checkpoints(pair, tmp_path / f"{name} made", method=value, **about)
        one, other = (contents(tmp_path / f"{name} {how}") for how in ("named", "made"))
        assert one["model.safetensors"] == other["model.safetensors"]


@pytest.mark.slow
def test_ones_own_merge_writes_what_it_gives_in_memory(models, tmp_path):
    halves = from_function(lambda delta, weight: (delta / 2, weight))
    mine = Merge(chain(halves, transforms.trim(0.3), transforms.elect()), reductions.weighted_mean)
    pair, out = [models / "a", models / "b"], tmp_path / "out"
    merge_checkpoints(pair, out, base=models / "base", method=mine, weights=[1.0, 2.0])
    got, want = load_checkpoint(out), mine([tensors(1), tensors(2)], tensors(0), weights=[1.0, 2.0])
    for name in SHAPES:
        assert got[name].tobytes() == np.asarray(want[name]).tobytes()


IDENTITIES = """
import jax
from sail_jax import Merge, methods, transforms
from sail_jax.merging.combining import from_function
key = jax.random.key(3)
merges = [
    methods.ties(), methods.ties(density=0.3), methods.ties(scope="tensor"), methods.ties(scale=2),
    methods.dare_ties(key=key), methods.dare_ties(key=jax.random.key(4)), methods.karcher(),
    Merge(from_function(lambda delta, weight: (delta / 2, weight))),
    Merge(from_function(lambda delta, weight: (delta / 3, weight))),
    Merge(from_function(lambda delta, weight: ((lambda x: x / 3)(delta), weight))),
]
found = [merge.identity for merge in merges]
print("\\n".join(found))
"""


@pytest.mark.slow
def test_identity_is_of_what_is_done_in_every_process(capsys):
    """The identity by which a resumed merge is recognised."""
    command = [sys.executable, "-c", IDENTITIES]
    other = subprocess.run(command, capture_output=True, text=True)
    exec(IDENTITIES, {"__name__": "__main__"})
    found = capsys.readouterr().out
    assert found == other.stdout, other.stderr
    assert len(set(found.split())) == 10


def test_methods_are_listed_with_what_they_ask_for(capsys):
    assert cli.main(["merge", "--methods"]) == 0
    shown = capsys.readouterr().out
    entries = {block.partition(":")[0]: block for block in shown.split("\n\n")}
    assert entries.keys() == methods.METHODS.keys() - {"fisher", "regmean"}
    assert "1 model; a base; 1 pass, in pieces" in entries["expo"]
    assert "parameters: weight, density=1.0, scale=1.0" in entries["ties"]
    assert "seed: 0" in entries["dare_ties"]
    assert "seed" not in entries["ties"]
    assert cli.main(["merge"]) == 2
    assert "RECIPE is missing" in capsys.readouterr().err
