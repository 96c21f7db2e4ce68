"""How commands print names chosen by others, and errors for invalid paths."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import SUPPRESS

import adapter_cases
import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoints import CONFIG, tensors

from experiments.pages import gallery
from sail_jax import methods
from sail_jax.checkpoint import load_checkpoint, merge_checkpoints, save_checkpoint
from sail_jax.checkpoint.executor import MergeError
from sail_jax.checkpoint.planning import cards
from sail_jax.cli import dispatch
from sail_jax.cli import main as cli
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import LONGEST, fitted

EVIL = "red \x1b[31m\x07\x9b2J\u202e\u2028\r\n<img src=x onerror=alert(1)> `code` ![x](http://y)"
LONG = "n" * 5000
NOT_UTF8 = os.fsdecode(b"out\xff")


def recipe(models):
    listed = "".join(f"- model: {model}\n" for model in models)
    return f"merge_method: linear\nparameters: {{weight: 1}}\nmodels:\n{listed}"


@pytest.fixture
def call(capsys):
    def call(*argv):
        capsys.readouterr()
        code = cli.main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in (out + err).split("\n"))
        errors = [line for line in err.split("\n") if line.startswith("sail-jax: error: ")]
        assert len(errors) == (code != 0), (code, err)
        assert all(len(line) <= LONGEST for line in errors)
        return code, out, err

    return call


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Two models `a` and `b`, one without tensors, a recipe of each, a link to itself."""
    folder = tmp_path_factory.mktemp("stock")
    for seed, name in enumerate("ab"):
        extras = {"config.json": json.dumps(CONFIG).encode()}
        save_checkpoint(folder / name, tensors(seed), extras=extras)
    save_checkpoint(folder / "none", {})
    (folder / "r.yaml").write_text(recipe("ab"))
    (folder / "none.yaml").write_text(recipe(["none", "a"]))
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture
def folder(stock, monkeypatch):
    """The same folder as working directory, restored afterwards."""
    monkeypatch.chdir(stock)
    before = sorted(os.listdir(stock))
    yield stock
    assert sorted(os.listdir(stock)) == before


def test_names_with_control_characters_are_printed_escaped_and_errors_shortened(
    call, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        save_checkpoint(name, {EVIL: np.ones((2, 3), np.float32), LONG: np.ones(3, np.float32)})
    save_checkpoint("c", {EVIL: np.full((2, 3), np.nan, np.float32)})
    save_checkpoint("d", {EVIL: np.ones((3, 2), np.float32)})
    for name, models in {"r.yaml": "ab", "nan.yaml": "cc", "shape.yaml": "cd"}.items():
        (tmp_path / name).write_text(recipe(models))
    for argv in (["merge", "r.yaml", "--plan", "--full"], ["inspect", "a"], ["inspect", "a", "b"]):
        code, out, _ = call(*argv)
        assert code == 0
        assert "\\x1b[31m" in out or argv == ["inspect", "a", "b"]
    for argv in (
        ["merge", "nan.yaml", "out"], ["merge", "shape.yaml", "out"], ["inspect", "c", "d"],
        ["align", "a", "b", "out", "--spaces", EVIL], [EVIL], ["merge", f"--{LONG}"],
        ["merge", "r.yaml", "out", "--threads", LONG], ["grow", "a", "out", "--to", EVIL],
        ["run", EVIL], ["run", "ledger", f"--{EVIL}"], ["bench", LONG], ["data", EVIL],
    ):  # fmt: skip
        assert call(*argv)[0] in (1, 2)


def test_a_shortened_message_keeps_both_ends_and_what_stands_between_long_names():
    line = fitted(f"cannot read '{LONG}' of '{LONG}.safetensors': repair it")
    assert len(line) <= LONGEST
    for part in ("cannot read 'nnn", "nnn' of 'nnn", "nnn.safetensors': repair it"):
        assert part in line
    assert len(fitted("word " * 1000)) == LONGEST
    assert fitted("a sentence of ours, as it is") == "a sentence of ours, as it is"


def test_an_unknown_option_names_options_of_groups_and_no_former_ones():
    parser = Parser("go")
    for option, about in (("--see", ""), ("--old-steps", SUPPRESS), ("--data.steps", "Steps.")):
        parser.add_argument(option, help=about)
    with pytest.raises(UsageError, match=r"'--steps' \(nearest: '--data.steps'\)$"):
        parser.read(["--steps", "-5"])


REFUSED = {
    "a recipe that is missing": (["merge", "no.yaml", "out"], "no.yaml is missing"),
    "too little memory": (["merge", "r.yaml", "out", "--max-memory", "1MB"], "--max-memory: "),
    "too little to grow": (["grow", "a", "out", "--width=2x", "--max-memory=1MB"], "program alone"),
    "no tensors": (["merge", "none.yaml", "out"], "none is a checkpoint without tensors"),
    "no tensors to grow": (["grow", "none", "out", "--width", "2x"], "without tensors"),
    "no tensors to align": (["align", "a", "none", "out"], "without tensors"),
    "a long folder of runs": (["report", LONG], "File name too long"),
    "a long page": (["report", "a", "--out", LONG], "File name too long"),
    "a long configuration": (
        ["align", "a", "b", "out", "--config", LONG],
        "expected a config.json",
    ),
    "a long table": (["align", "a", "b", "out", "--spec", LONG], "is missing"),
    "a long recipe": (["merge", LONG, "out"], "is missing"),
    "a long checkpoint": (["inspect", LONG], "File name too long"),
    "a long target": (["grow", "a", "out", "--to", LONG], "expected a config.json"),
    "a long record": (["inspect", "a", "--json", LONG], "File name too long"),
    "a long folder of a report": (["merge", "r.yaml", "out", "--report", LONG], "too long"),
    "a long run": (["run", "ledger", "--preset", "tiny", "--out", LONG], "File name too long"),
    "a long stored run": (["plot", LONG], "File name too long"),
    "long examples": (["examples", LONG], "File name too long"),
    "an average without an output": (
        ["average", "a", "b"],
        "b exists already; choose another place for the output. The last path is the output: if b",
    ),
    "merged adapters without an output": (["lora", "merge", "a", "b"], "The last path is the"),
    "a run that is a loop": (["run", "ledger", "--preset", "tiny", "--out", "loop"], "loop: "),
}
OUTPUTS = {LONG: "too long", "loop": "exists already", "loop/x": "loop/x", NOT_UTF8: "in UTF-8"}
OUTPUTS |= {"": "expected a name", "r.yaml/x": "r.yaml/x", LONG[:250]: "too long"}
COMMANDS = (["merge", "r.yaml"], ["grow", "--width=2x", "a"], ["align", "a", "b"])
REFUSED |= {
    " ".join([command[0], *more, ascii(out[:9]), str(len(out))]): ([*command, out, *more], says)
    for command in COMMANDS
    for out, says in OUTPUTS.items()
    for more in ([], ["--resume"])
}


@pytest.mark.parametrize("argv", REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_any_work(argv, folder, call, monkeypatch):
    """Exit code 2, as for all usage errors, and no files are left behind."""

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("sail_jax.checkpoint.formats.files.StoredTensor.read", read)
    words, says = REFUSED[argv]
    code, _, err = call(*words)
    assert code == 2, err
    assert says in err


def test_an_input_whose_path_is_no_utf8_is_read(stock, tmp_path, call):
    path, out = tmp_path / NOT_UTF8, tmp_path / "out"
    shutil.copytree(stock / "a", path)
    assert call("grow", path, out, "--width", "2x", "--no-certify")[0] == 0
    assert "out\\udcff" in (out / "README.md").read_text()


@pytest.mark.soak
def test_what_reads_the_output_may_stop(folder):
    """`sail-jax ... | head`: the pipe is closed before anything is written."""
    code = "import sys; from sail_jax.cli.main import main; sys.stdin.read(); sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "inspect", "a"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert err == ""
    assert process.returncode == 1


def test_no_markup_of_others_is_left_in_a_card(folder):
    about = {
        "options": {EVIL: EVIL}, "spaces": [{"space": EVIL, "lost": EVIL}], "exactness": EVIL,
        "source": f"``{EVIL}`", "method": "lemon", "seed": 0, "changes": {EVIL: (EVIL, EVIL)},
        "agreement": [], "notes": [EVIL],
    }  # fmt: skip
    card = cards.growth_card(about, EVIL, transformers=False)
    front = card.index("\n# ")
    code = 0
    for line in card[front:].splitlines():
        assert line.isprintable()
        # The text without code, in which markup is shown literally.
        rest, spans = _without_code(line)
        code += spans
        for mark in "<[`":
            assert rest.replace("\\" + mark, "").count(mark) == 0, line
    assert code == 3  # the source, the method, the space


def _without_code(line):
    """A line of Markdown without its code spans (CommonMark 6.1), and how many there were."""
    rest, spans, at = "", 0, 0
    while at < len(line):
        if line[at] == "\\":
            rest += line[at : at + 2]
            at += 2
        elif line[at] != "`":
            rest += line[at]
            at += 1
        else:
            end = at
            while end < len(line) and line[end] == "`":
                end += 1
            ticks, close = line[at:end], end
            while True:
                close = line.find(ticks, close)
                assert close >= 0, line
                stop = close + len(ticks)
                if line[close - 1] != "`" and line[stop : stop + 1] != "`":
                    break
                close = stop
            spans, at = spans + 1, stop
    return rest, spans


def test_a_report_of_the_whole_disk_is_refused(tmp_path, call, monkeypatch):
    monkeypatch.setattr(gallery, "FOLDERS", 20)
    for i in range(20):
        (tmp_path / f"{i}").mkdir()
    code, _, err = call("report", tmp_path)
    assert code == 2
    assert "more than 20 folders" in err
    assert not (tmp_path / "report.html").exists()


def test_a_merge_without_a_base_speaks_of_none():
    ones, zeros = ({"n": np.full(2, k, np.int32)} for k in (1, 0))
    with pytest.warns(UserWarning, match=r"leaf 'n'.* differ .*; using the values of model 0"):
        methods.linear()([ones, zeros])
    with pytest.warns(UserWarning, match="differ .*; using the values of the base"):
        methods.task_arithmetic()([zeros], ones)


def test_a_name_with_an_end_of_line_takes_one_line_of_a_table(tmp_path, call):
    two = tmp_path / "two"
    save_checkpoint(two, {"w\nexact: yes": np.ones((2, 2), np.float32)})
    assert any("w\\nexact: yes" in line for line in call("inspect", two)[1].splitlines())
    assert list(load_checkpoint(two)) == ["w\nexact: yes"]


def adapted(folder, **entries):
    """A base, an adapter with entries of its own, and a recipe of the two and of the adapter."""
    case = adapter_cases.CASES["plain"]
    adapter_cases.write(case, folder)
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    for name, models in {"both": ["base+adapter"], "alone": ["base", "adapter"]}.items():
        (folder / f"{name}.yaml").write_text(recipe(models))


FLAGS = {
    "an entry that is not supported": ({"use_qalora": True}, "adapter config: 'use_qalora' is not"),
    "an entry like an argument": ({"resume=True": 1}, "config: 'resume=True' is not supported"),
    "a value like an argument": (
        {"init_lora_weights": "allow_nonfinite=True"}, "weights: 'allow_nonfinite=True' changes"
    ),
    "a pattern like an argument": ({"rank_pattern": {"max_memory": 0}}, "pattern.max_memory: exp"),
    "a module like an argument": (
        {"target_parameters": ["config=..."], "rank_pattern": {"q_proj": 3}}, "its config has 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_what_a_file_says_is_never_rewritten_as_a_flag(case, tmp_path, call, monkeypatch):
    entries, says = FLAGS[case]
    monkeypatch.chdir(tmp_path)
    adapted(tmp_path, **entries)
    code, _, err = call("merge", "both.yaml", "out")
    assert code == 2
    assert says in err
    assert "--" not in err


@pytest.mark.parametrize("name", ["resume=True", "a resume=True b", "max_memory", "rules=..."])
def test_names_of_files_are_never_rewritten_as_flags(name, tmp_path, call, monkeypatch):
    """In the message that names an option, the option alone is spelled as one."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / name, {name: np.full((2, 3), np.nan, np.float32)})
    (tmp_path / "r.yaml").write_text(recipe([f"'{name}'"]))
    _, _, err = call("merge", "r.yaml", "out")
    assert f"NaN or infinity in {name} in {name}/model.safetensors; use --allow-nonfinite" in err
    (tmp_path / "r.yaml").write_text(recipe(["'without resume=True'"]))
    assert "without resume=True does not exist" in call("merge", "r.yaml", "out")[2]


def test_the_library_names_arguments_after_a_command_was_run(tmp_path, call):
    save_checkpoint(tmp_path / "a", {"w": np.full(3, np.nan, np.float32)})
    (tmp_path / "r.yaml").write_text(recipe([tmp_path / "a"]))
    assert "--allow-nonfinite" in call("merge", tmp_path / "r.yaml", tmp_path / "out")[2]
    with pytest.raises(MergeError, match="use allow_nonfinite=True to merge regardless"):
        merge_checkpoints([tmp_path / "a"], tmp_path / "other", method=methods.linear())


def test_an_adapter_is_no_model_and_is_merged_with_its_base(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapted(tmp_path)
    code, _, err = call("merge", "alone.yaml", "out")
    assert code == 2
    assert "error: adapter is an adapter of 'base', not a model: " in err
    assert "Write base+adapter, as in base+adapter" in err
    assert call("merge", "both.yaml", "out")[0] == 0
    right = adapter_cases.build(adapter_cases.CASES["plain"]).right
    for name, got in load_checkpoint("out").items():
        want = right[name]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.slow
def test_summaries_cards_and_reports_name_an_input_with_its_adapter(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    adapted(tmp_path / "models")
    # The revision of a folder on this disk has no effect, and belongs to the name.
    text = recipe(["models/base@v1+models/adapter", "models/base@v2"]) + "base_model: models/base\n"
    (tmp_path / "r.yaml").write_text(text.replace("linear", "ties"))
    code, out, _ = call("merge", "r.yaml", "out", "--report", "report")
    assert code == 0
    assert "merged by ties: base@v1+adapter, base@v2 on base\n" in out
    assert "`models/base@v1+models/adapter`" in (tmp_path / "out" / "README.md").read_text()
    report = (tmp_path / "report" / "report.html").read_text()
    assert "A · base@v1+adapter" in report
    assert "B · base@v2" in report


def test_a_plan_lists_what_else_an_adapter_changes(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter_cases.write(adapter_cases.CASES["resized, tied, factors"], tmp_path)
    (tmp_path / "adapter" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "r.yaml").write_text(recipe(["base+adapter"]))
    code, out, _ = call("merge", "r.yaml", "--plan")
    assert code == 0
    words = " ".join(out.split())
    assert "base+adapter: vocab_size is 67 with its adapter, 64 without" in words
    assert "base+adapter: tie_word_embeddings is False with its adapter, True without" in words
    assert "base+adapter: its tokenizer's files are the adapter's" in words


@pytest.mark.parametrize("argv", ["grow adapter out --width 2x", "align base adapter out"])
def test_an_adapter_is_neither_grown_nor_aligned(argv, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapted(tmp_path)
    assert "adapter is an adapter of 'base', not a model" in call(*argv.split())[2]


FINISHED = [
    (COMMANDS[0], "out"), (COMMANDS[0], "out.npz"), (COMMANDS[1], "out"),
    pytest.param(COMMANDS[2], "out", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), FINISHED)
def test_resumed_after_it_finished_it_says_so_and_succeeds(command, name, folder, tmp_path, call):
    """A loop that retries until success ends, and the output is the same."""
    out = tmp_path / name
    more = ["--no-certify"] * (command[0] != "merge")
    assert call(*command, out, *more, "--resume")[0] == 0
    before = {path: path.stat() for path in [out, *out.rglob("*")]}
    assert call(*command, out, *more)[0] == 2
    code, said, _ = call(*command, out, *more, "--resume")
    assert code == 0
    assert f"{out}: already finished" in said
    assert {path: path.stat() for path in before}.keys() == before.keys()
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in before.items())
    if name == "out":  # one bit of the last entry of the last tensor
        data = bytearray((out / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (out / "model.safetensors").write_bytes(data)
        code, _, err = call(*command, out, *more, "--resume")
        assert code == 2
        assert re.search("exists already with a different '", err)
    save_checkpoint(tmp_path / "elsewhere", {"w": np.ones(3, np.float32)})
    assert "exists already" in call(*command, tmp_path / "elsewhere", *more, "--resume")[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "elsewhere"])


@pytest.mark.slow
def test_a_finished_run_resumed_says_so_and_succeeds(tmp_path, call):
    argv = ["run", "ledger", "--preset", "tiny", "--out", tmp_path / "run", "--resume"]
    assert "finished before" not in call(*argv)[2]
    assert "finished before" in call(*argv)[2]


def _array_of_a_petabyte(*_):
    jnp.zeros(1 << 48).block_until_ready()


def _no_memory(*_):
    raise MemoryError


@pytest.mark.parametrize("command", [_array_of_a_petabyte, _no_memory])
def test_memory_that_does_not_suffice_is_an_error_in_one_line(call, monkeypatch, command):
    monkeypatch.setattr(dispatch, "_dispatch", command)
    code, _, error = call("list")
    assert code == 1
    assert error.startswith("sail-jax: error: memory does not suffice: ")
    assert "out of memory" not in error.lower()


def test_other_errors_of_a_program_keep_their_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("INTERNAL: a defect")

    monkeypatch.setattr(dispatch, "_dispatch", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["list"])
