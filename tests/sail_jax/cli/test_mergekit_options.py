"""Command lines for `mergekit-yaml` run here: each option is understood, or answered in a line."""

import json
import os
import re
import subprocess
import sys

import many_devices
import pytest
from safetensors import safe_open
from small_checkpoints import CONFIG, SHAPES, tensors

from sail_jax.checkpoint import RunOptions, load_checkpoint, merge_checkpoints, save_checkpoint
from sail_jax.cli import main as cli
from sail_jax.cli.commands import merge
from sail_jax.cli.options import Parser, UsageError

# Options in `mergekit-yaml --help` (0.1.5): a flag, and a value if it has one.
SETS = {
    "--allow-crimes": ("allow_crimes", True),
    "--no-allow-crimes": ("allow_crimes", False),
    "--random-seed 7": ("random_seed", 7),
    "--quiet": ("quiet", True),
    "--no-quiet": ("quiet", False),
    "--transformers-cache x": ("hub_cache", "x"),
    "--cuda": ("device", "cuda"),
    "--device cuda:1": ("device", "cuda:1"),
    "--gpu-rich": ("device", "cuda"),
    "-j 3": ("threads", 3),
    "--num-threads 3": ("threads", 3),
    "--out-shard-size 1B": ("shard_bytes", 10**9),
    "--out-shard-size 500m": ("shard_bytes", 500 * 10**6),
    "--out-shard-size 20k": ("shard_bytes", 20000),
    "--out-shard-size 123": ("shard_bytes", 123),
    "--copy-tokenizer": ("copy_tokenizer", True),
    "--no-copy-tokenizer": ("copy_tokenizer", False),
    "--write-model-card": ("write_model_card", True),
    "--no-write-model-card": ("write_model_card", False),
}
ANSWERED = (
    *("--trust-remote-code", "--lora-merge-cache x", "--lora-merge-dtype bfloat16", "-v", "-vv"),
    *("--low-cpu-memory", "--no-lazy-unpickle", "--read-to-gpu", "--multi-gpu", "--gpu-rich"),
    *("--async-write", "--write-threads 2"),
)
# Defaults, and the counterparts of options without effect.
SILENT = (
    *("--no-unsafe-truncate-embeddings", "--no-trust-remote-code", "--no-cuda"),
    *("--no-low-cpu-memory", "--lazy-unpickle", "--no-read-to-gpu", "--no-multi-gpu"),
    *("--no-async-write", "--clone-tensors", "--no-clone-tensors", "--safe-serialization"),
)
REFUSED = {
    "--unsafe-truncate-embeddings": r"tokenizer: \{source: base\}",
    "--no-safe-serialization": "pickles are never written",
    "--out-shard-size 500MB": "expected a whole number such as 1B",
    "--out-shard-size 1.5B": "expected a whole number such as 1B",
    "--random-seed -1": "expected an integer from 0",
    "-j 0": "expected a whole number >= 1",
}


def read(line):
    parser = Parser("merge")
    merge.add_arguments(parser)
    return parser.read(["recipe", *line.split(), "out"])


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").write_text("")


@pytest.mark.parametrize("line", SETS)
def test_an_option_with_a_meaning_sets_it(line):
    name, value = SETS[line]
    args = read(line)
    assert getattr(args, name) == value
    assert {**vars(args), name: None, "answers": {}} == {**vars(read("")), name: None}


@pytest.mark.parametrize("line", [*ANSWERED, *SILENT])
def test_an_option_without_one_changes_nothing_and_is_answered_once(line, capsys):
    args = read(f"{line} {line}")
    merge.mergekit.answering(lambda _: None)(args)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (line in ANSWERED)
    assert all(text.startswith(f"note: {line.split()[0][:2]}") for text in said)
    if line != "--gpu-rich":
        assert vars(args) | {"answers": {}} == vars(read(""))


@pytest.mark.parametrize("line", REFUSED)
def test_an_option_that_would_do_harm_is_refused_in_a_line(line):
    with pytest.raises(UsageError, match=REFUSED[line]):
        read(line)


def test_the_folder_of_the_hub_is_that_of_the_option_meanwhile(monkeypatch):
    for before in ("mine", None):
        monkeypatch.setenv("HF_HUB_CACHE", "mine")
        if before is None:
            monkeypatch.delenv("HF_HUB_CACHE")
        seen = []
        run = merge.mergekit.answering(lambda _: seen.append(os.environ["HF_HUB_CACHE"]))  # noqa: B023
        run(read("--transformers-cache its"))
        assert (seen, os.environ.get("HF_HUB_CACHE")) == (["its"], before)


def test_no_limit_of_a_shard_is_no_limit():
    assert read("--out-shard-size 0").shard_bytes > 2**60


@pytest.fixture
def models(tmp_path):
    """Two models with a tokenizer each, and a recipe that draws random numbers."""
    for seed, name in enumerate("ab"):
        save_checkpoint(name, tensors(seed), extras={"config.json": json.dumps(CONFIG).encode()})
        words = {"model": {"type": "WordLevel", "vocab": {"x": 0, "y": 1}, "unk_token": "x"}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(words))
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
        (tmp_path / name / "generation_config.json").write_text("{}")
    (tmp_path / "recipe").write_text(
        "merge_method: dare_linear\nbase_model: a\ndtype: float32\nseed: 1\n"
        "models: [{model: b, parameters: {weight: 1, density: 0.5}}]\n"
    )
    return tmp_path


def call(*argv):
    return cli.main(["merge", "recipe", *argv])


@pytest.mark.slow
def test_the_command_line_of_notebooks_runs(models, capsys):
    line = "--copy-tokenizer --allow-crimes --out-shard-size 4k --lazy-unpickle --trust-remote-code"
    assert call("out", *line.split()) == 0
    err = capsys.readouterr().err
    assert err.count("note: --trust-remote-code has no effect") == 1
    shards = sorted((models / "out").glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:  # bytes of tensors, as mergekit's writer counts them
        with safe_open(shard, "numpy") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 4000 or len(sizes) == 1
    assert (models / "out" / "tokenizer.json").exists()


@pytest.mark.slow
def test_no_tokenizer_no_card_and_the_seed_of_the_command_line(models, capsys):
    assert call("out", "--no-copy-tokenizer", "--no-write-model-card", "--random-seed", "5") == 0
    said = "note: --random-seed 5 replaces seed 1 of the recipe"
    assert said in capsys.readouterr().err
    names = {path.name for path in (models / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", ".sail-jax"}
    for seed in (5, 1):
        merge_checkpoints(
            ["b"], f"seed-{seed}", base="a", method="dare_linear", density=0.5, seed=seed,
            compat="mergekit", dtype="float32",
        )  # fmt: skip
    got, five, one = (load_checkpoint(name) for name in ("out", "seed-5", "seed-1"))
    assert all((got[name] == five[name]).all() for name in SHAPES)
    assert any((got[name] != one[name]).any() for name in SHAPES)
    assert call("carded", "--random-seed", "5") == 0
    assert "seed 5)" in (models / "carded" / "README.md").read_text()
    assert "--random-seed 5" in (models / "carded" / "recipe.yaml").read_text()


def test_a_tokenizer_that_the_recipe_asks_for_is_written_regardless(models, capsys):
    recipe = models / "recipe"
    text = recipe.read_text()
    recipe.write_text(f"{text}chat_template: chatml\n")
    assert call("out", "--no-copy-tokenizer") == 0
    assert "note: chat_template is not written, as no tokenizer is" in capsys.readouterr().err
    recipe.write_text(f"{text}tokenizer: {{source: union}}\n")
    assert call("other", "--no-copy-tokenizer") == 0
    assert (models / "other" / "tokenizer.json").exists()


def test_a_device_that_is_not_there_is_refused_in_a_line(models, capsys):
    for name in ("cuda:0", "cpu:9999", "cpu:-1", "banana", "a b", "", "cpu:"):
        assert call("out", f"--device={name}") == 2
        err = capsys.readouterr().err
        assert re.search(rf"error: no device {re.escape(name)}: JAX has cpu:0.* JAX_PLATFORMS", err)
    assert call("out", "--device", "cpu") == 0


@pytest.mark.soak
def test_the_device_that_is_named_computes(models):
    code = """
        import jax, sys
        from sail_jax.cli.main import main
        made, put = set(), jax.device_put
        def noted(x, *args, **options):
            y = put(x, *args, **options)
            made.update(d.id for a in jax.tree.leaves(y) for d in a.devices())
            return y
        jax.device_put = noted
        assert main(["merge", "recipe", "out", "--device", "cpu:1", "--quiet"]) == 0
        print(made)
        assert jax.numpy.ones(1).devices() == {jax.devices()[0]}
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())],
        env=many_devices.environment(2), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{1}"


def test_an_output_is_replaced_on_demand(models, capsys):
    assert call("out") == 0
    first = load_checkpoint("out")
    assert call("out") == 2
    assert "exists already; choose another place for the output, or --force" in (
        capsys.readouterr().err
    )
    assert call("out", "--force", "--random-seed", "9") == 0
    second = load_checkpoint("out")
    assert any((first[name] != second[name]).any() for name in SHAPES)
    (models / "out" / "notes").write_text("mine")
    capsys.readouterr()
    assert call("out", "--force") == 2
    assert "out is not replaced, because 'notes' was added to it" in capsys.readouterr().err
    assert call("a", "--force") == 2
    assert "a is not replaced, because it lacks sail-jax's record" in capsys.readouterr().err
    (models / "recipe").write_text("merge_method: passthrough\nmodels: [{model: out}]\n")
    (models / "out" / "notes").unlink()
    assert call("out", "--force") == 2
    assert "lies in the input" in capsys.readouterr().err
    after = load_checkpoint("out")
    assert all((after[name] == second[name]).all() for name in SHAPES)


@pytest.mark.slow
def test_force_and_resume_compare_what_is_finished(models, capsys):
    assert call("out") == 0
    before = (models / "out" / ".sail-jax").stat()
    for change, same in ((), True), (("--random-seed", "9"), False), (("--random-seed", "9"), True):
        capsys.readouterr()
        assert call("out", "--force", "--resume", *change) == 0
        now = (models / "out" / ".sail-jax").stat()
        assert os.path.samestat(now, before) == same
        assert ("out: already finished" in capsys.readouterr().out) == same
        before = now
    # Equal tensors, and another recipe beside them.
    with open(models / "recipe", "a") as recipe:
        recipe.write("# mine\n")
    assert call("out", "--force", "--resume", "--random-seed", "9") == 0
    assert (models / "out" / "recipe.yaml").read_text().endswith("# mine\n")
    assert sorted(path.name for path in models.iterdir()) == ["a", "b", "out", "recipe"]


def test_an_input_within_what_is_replaced_is_refused(models):
    merge_checkpoints(["a", "b"], "out")
    for step, name in enumerate("ab"):
        save_checkpoint(f"run/checkpoint-{step}", load_checkpoint(name))
    assert cli.main(["average", "run", "averaged", "--as", "run"]) == 0
    (inside,) = [path for path in (models / "averaged").iterdir() if path.is_dir()]
    with pytest.raises(ValueError, match=rf"the input .*{inside.name} lies in averaged"):
        merge_checkpoints([f"averaged/{inside.name}", "b"], "averaged", run=RunOptions(force=True))


def test_a_card_names_models_and_no_folder_of_this_machine(models):
    for place in ("one/last", "two/last", "run/400"):
        save_checkpoint(models / place, tensors(len(place)))
    listed = ["'X/one/last'", "X/two/last", "X/a", "one/last", "X/run/400"]
    text = "".join(f"- model: {name}\n" for name in listed).replace("X", str(models))
    (models / "recipe").write_text(
        f"# of {models}/one/last, found in {models.parent}\nmerge_method: linear\n"
        f"parameters: {{weight: 1}}\nmodels:\n{text}"
    )
    assert call("out") == 0
    card = (models / "out" / "README.md").read_text()
    assert str(models) not in card
    assert f"/{models.parent.name}" not in card
    short = ["one/last", "two/last", "a", "one/last", "run/400"]
    assert re.findall("^- `(.*)`$", card, re.M) == short
    assert re.findall("model: '?([^'\n]*)", card) == short
    assert "# of one/last, found in" in card
