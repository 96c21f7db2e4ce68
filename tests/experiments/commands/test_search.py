"""The command `search`: what it rejects and writes, and how it continues after an interrupt."""

import json
from pathlib import Path

import numpy as np
import pytest

from sail_jax.checkpoint import save_checkpoint
from sail_jax.cli import main as cli
from sail_jax.searching import Trial
from sail_jax.searching.journal import Journal

SCORE = "tests.experiments.commands.test_search:right"


def right(params, batch):
    return -((batch["x"] - params["w"]) ** 2).sum(-1)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two models on a line, and examples about its middle."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    for name, value in {"a": 0.0, "b": 1.0}.items():
        save_checkpoint(tmp_path / name, {"w": np.full(2, value, np.float32)})
    x = np.random.default_rng(0).normal(0.5, 0.3, (120, 2)).astype(np.float32)
    np.savez("x.npz", x=x)
    return ["a", "b", "--data", "x.npz", "--score", SCORE, "--methods", "weights", "--budget", "9"]


@pytest.mark.slow
def test_writes_an_answer_and_goes_on_after_an_interrupt(models, capsys):
    assert cli.main(["search", *models, "--out", "whole"]) == 0
    said = capsys.readouterr().out
    assert "It is better than every single model" in said
    assert "sail-jax merge whole/recipe.yaml OUT" in said
    record = json.loads(Path("whole/answer.json").read_text())
    assert record["is_merge"]
    assert record["search"]["seed"] == 0
    assert "jax" in record["versions"]
    assert Path("whole/answer.html").read_text().startswith("<!doctype html>")
    assert cli.main(["merge", "whole/recipe.yaml", "merged"]) == 0

    # Cut off in the middle of a line, as by a kill.
    Path("part").mkdir()
    lines = Path("whole/trials.jsonl").read_text().splitlines(keepends=True)
    Path("part/trials.jsonl").write_text("".join(lines[:7]) + lines[7][:30])
    assert cli.main(["search", *models, "--out", "part"]) == 2
    assert "--resume continues a search" in capsys.readouterr().err
    assert cli.main(["search", *models, "--out", "part", "--resume"]) == 0
    assert Path("part/trials.jsonl").read_text() == "".join(lines)
    for name in ("recipe.yaml", "answer.html", "answer.json"):
        assert Path("part", name).read_bytes() == Path("whole", name).read_bytes(), name

    changed = [*models[:-1], "12", "--out", "part", "--resume"]
    assert cli.main(["search", *changed]) == 2
    assert "holds a search with another budget: 9, not 12" in capsys.readouterr().err


@pytest.mark.soak
def test_trials_side_by_side_give_the_same_answer(models):
    for out, more in (("here", []), ("there", ["--on", "local:2"])):
        assert cli.main(["search", *models, "--out", out, *more]) == 0
    for name in ("trials.jsonl", "recipe.yaml", "answer.json"):
        assert Path("there", name).read_bytes() == Path("here", name).read_bytes(), name


def test_the_plan_writes_nothing(models, capsys):
    assert cli.main(["search", *models, "--out", "out", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "weights in ((0.0, 1.0), (0.0, 1.0))" in said
    assert "60 to choose a merge, 60 to judge it" in said
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_given_recipe_is_scored(models):
    """The recipe is the uniform soup, which every search tries."""
    parts = [{"model": name, "parameters": {"weight": 1.0}} for name in ("a", "b")]
    Path("mine.yaml").write_text(json.dumps({"merge_method": "linear", "models": parts}))
    assert cli.main(["search", "mine.yaml", *models, "--out", "whole"]) == 0
    scores = {"mine": {}, "uniform soup": {}}
    for line in Path("whole/trials.jsonl").read_text().splitlines()[1:]:
        trial = json.loads(line)
        scores.setdefault(trial["name"], {}).update(
            zip(trial["examples"], trial["scores"], strict=True)
        )
    both = scores["mine"].keys() & scores["uniform soup"].keys()
    assert len(both) > 9
    mine, soup = ([scores[name][k] for k in both] for name in ("mine", "uniform soup"))
    np.testing.assert_allclose(mine, soup, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "expected --data, --score or --command"),
        (["a", "b", "--score", SCORE, "--command", "x {checkpoint}"], "give only one of them"),
        (["a", "b", "--data", "x.npz", "--command", "x {checkpoint}"], "has its own examples"),
        (["a", "b", "--score", SCORE, "--resume"], "--resume needs --out"),
        (["a", "b", "--score", SCORE, "--groups", "w"], "--groups and --refine gradient need"),
        (["a", "b", "--data", "y.npz", "--score", SCORE], "y.npz"),
        (["a", "--data", "x.npz", "--score", SCORE], "two or more models"),
        (["a", "b", "--data", "x.npz"], "data: expected 'inputs' or 'tokens'"),
        (["a", "b", "--data", "x.npz", "--score", SCORE, "--methods", "tise"], "nearest: 'ties'"),
        (["a", "b", "--data", "x.jsonl", "--score", SCORE], "JSON lines need a tokenizer"),
        (["a", "b", "--command", "x"], r"expected {checkpoint} in it"),
    ],
)
def test_refusals(models, words, message, capsys):
    assert cli.main(["search", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_journal_keeps_what_is_whole(tmp_path):
    file, search = tmp_path / "trials.jsonl", {"seed": 0}
    journal = Journal(file, search)
    journal.begin()
    trial = Trial("a", {"weights": np.array([0.5, 1])}, np.arange(2), np.ones(2), np.ones(1))
    for _ in range(2):
        journal.add(trial)
    file.write_bytes(file.read_bytes()[:-5])
    again = Journal(file, search)
    again.resume()
    (kept,) = again.trials
    assert (kept.name, kept.options["weights"].tolist()) == ("a", [0.5, 1.0])
    np.testing.assert_array_equal(kept.scores, trial.scores)
    with pytest.raises(ValueError, match="holds a search with another seed: 0, not 1"):
        Journal(file, {"seed": 1}).resume()
