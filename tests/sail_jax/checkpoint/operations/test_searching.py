"""Searches over checkpoints: in folders by functions and commands, recipes, and errors."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sail_jax.checkpoint import load_checkpoint, merge_recipe, save_checkpoint
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.operations.searching import (
    by_command,
    by_function,
    models_of,
    recipe_of,
    search_checkpoints,
)
from sail_jax.searching import Arm, arms

TARGET = np.array([0.3, 0.6], np.float32)
NOISE = np.random.default_rng(0).normal(0, 0.05, (60, 2)).astype(np.float32)

SCRIPT = """
import json, struct, sys
data = open(sys.argv[1] + "/model.safetensors", "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8 : 8 + size])
start, end = header["w"]["data_offsets"]
w = struct.unpack("<2f", data[8 + size + start : 8 + size + end])
print("starting")
for k in reversed(range(40)):
    x = (0.3 + 0.01 * (k % 5), 0.6 - 0.01 * (k % 3))
    score = -sum((a - b) ** 2 for a, b in zip(w, x))
    print(json.dumps({"example": k, "score": score, "task": "even" if k % 2 == 0 else "odd"}))
"""


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    paths = []
    for name, value in {"base": [0.0, 0.0], "a": [0.6, 0.0], "b": [0.0, 1.2]}.items():
        tensor = np.array(value, np.float32)
        save_checkpoint(tmp_path / name, {"w": tensor}, extras={"config.json": b"{}"})
        paths.append(str(tmp_path / name))
    return paths


def score(path: str) -> np.ndarray:
    return -((load_checkpoint(path)["w"] - TARGET - NOISE) ** 2).sum(-1)


@pytest.mark.slow
def test_folders_are_scored_and_removed(models, tmp_path):
    """The uniform soup is the planted optimum; every candidate folder is removed at the end."""
    base, *tuned = models
    seen: list[str] = []

    def watched(path: str) -> np.ndarray:
        seen.append(path)
        return score(path)

    work = tmp_path / "work"
    work.mkdir()
    outcome = search_checkpoints(
        tuned, base, scorer=by_function(watched), candidates=["linear", "ties"], budget=14,
        folder=work,
    )  # fmt: skip
    assert outcome.is_merge
    assert np.abs(score_of(outcome, tuned, base) - TARGET).max() < 0.05
    assert list(work.iterdir()) == []
    assert not any(Path(path).exists() for path in seen if "candidate" in path)
    # Each candidate is scored once, though two parts of its scores are used.
    assert len(seen) == len({*tuned, base}) + sum("candidate" in path for path in seen)
    assert all(len(t.examples) in (outcome.searched, outcome.judged) for t in outcome.trials)


def score_of(outcome: Any, tuned: list[str], base: str) -> np.ndarray:
    """The weights that the recommended recipe merges to."""
    text = recipe_of(outcome.arm, outcome.options, tuned, base)
    out = Path(tuned[0]).parent / "recommended"
    merge_recipe(text, out)
    return load_checkpoint(out)["w"]


def test_a_command_prints_scores_of_tasks(models, tmp_path):
    base, *tuned = models
    script = tmp_path / "score it.py"
    script.write_text(SCRIPT)
    scorer = by_command(f"{sys.executable} -S '{script}' {{checkpoint}}")
    outcome = search_checkpoints(tuned, base, scorer=scorer, candidates=["linear"], budget=8)
    assert outcome.is_merge
    assert outcome.tasks == ("even", "odd")
    assert outcome.searched + outcome.judged == 40


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("", "printed no line such as"),
        ('{"example": 1, "score": "x"}', "expected a number as score of '1'"),
        ('{"example": 1, "score": true}', "expected a number"),
        ('{"example": 1, "score": 1}\n{"example": 1, "score": 2}', "scored example '1' twice"),
        ('{"example": 1, "score": 1, "task": "a"}\n{"example": 2, "score": 2}', "some examples"),
        ("[" * 99999, "printed no line"),
    ],
)
def test_what_a_command_may_not_print(tmp_path, printed, message):
    file = tmp_path / "printed"
    file.write_text(printed)
    with pytest.raises(CheckpointError, match=message):
        by_command("cat {checkpoint}")(file)


def test_commands_that_fail(tmp_path):
    with pytest.raises(ValueError, match=r"expected \{checkpoint\} in it"):
        by_command("true")
    with pytest.raises(CheckpointError, match="false ended with 1"):
        by_command("false {checkpoint}")(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        by_command("no-such-program-here {checkpoint}")(tmp_path)


def test_other_examples_are_refused(models):
    base, *tuned = models

    def changing(path: str) -> np.ndarray:
        return np.zeros(10 if path == tuned[0] else 11)

    with pytest.raises(CheckpointError, match="expected the 10 examples of the first model"):
        search_checkpoints(tuned, base, scorer=by_function(changing), candidates=["linear"])


@pytest.mark.slow
def test_a_recipe_makes_the_same_merge(models, tmp_path):
    """The recipe gives the same merge as the one scored by the search, bit for bit."""
    base, *tuned = models
    for arm in arms(2, True, ["ties", "dare_ties", "weights", "tsv_m"], seed=7):
        options = arm.spread(1, np.random.default_rng(0))[0]
        merge, weights = arm.merge(options)
        loaded = [load_checkpoint(path) for path in (*tuned, base)]
        expected = merge(loaded[:2], loaded[2], weights=weights)["w"]
        text = recipe_of(arm, options, tuned, base, seed=7)
        merge_recipe(text, tmp_path / arm.name)
        np.testing.assert_array_equal(load_checkpoint(tmp_path / arm.name)["w"], expected)
    with pytest.raises(ValueError, match="a recipe cannot have scales of groups"):
        recipe_of(Arm("g", arm.make, {}, {}, ("w",)), {"scales": [1.0]}, tuned, base)


def test_models_of_recipes(tmp_path):
    def written(name: str, base: str | None, *models: str) -> Path:
        recipe = {"merge_method": "linear", "models": [
            {"model": m, "parameters": {"weight": 1}} for m in models
        ]}  # fmt: skip
        if base:
            recipe |= {"merge_method": "ties", "base_model": base}
        (tmp_path / name).write_text(yaml.safe_dump(recipe))
        return tmp_path / name

    one, two = written("1.yaml", "base", "a", "b"), written("2.yaml", None, "b", "c")
    assert models_of([one, two]) == (["a", "b", "c"], "base")
    with pytest.raises(ValueError, match="recipes: expected one base, got base, other"):
        models_of([one, written("3.yaml", "other", "a", "b")])


def test_json_scores_keep_their_order():
    """Examples are sorted, so the order in which the command prints them has no effect."""
    from sail_jax.checkpoint.operations.searching import _read_scores

    lines = [json.dumps({"example": f"{k}", "score": k}) for k in (3, 1, 2)]
    found = _read_scores("\n".join(["noise", *lines]), "x")
    assert (found.examples, found.scores.tolist()) == (("1", "2", "3"), [1.0, 2.0, 3.0])
