"""Several documents in one file: ordered by dependency, resumable, no intermediate files."""

import os

import numpy as np
import pytest

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    load_checkpoint,
    merge_recipe,
    save_checkpoint,
)
from sail_jax.checkpoint.operations.merging import Prepared, previewed
from sail_jax.checkpoint.recipe.recipes import RecipeError, parse, parse_all
from sail_jax.cli import main as cli

LAST = "merge_method: linear\nmodels: [{model: second}, {model: first}]\nparameters: {weight: 1}\n"
SECOND = (
    "name: second\nmerge_method: linear\nmodels: [{model: B}, {model: first@v1}]\n"
    "parameters: {weight: 1}\n"
)
FIRST = (
    "name: first\nmerge_method: linear\nmodels: [{model: A}, {model: B}]\nparameters: {weight: 1}\n"
)
A, B = (np.arange(6, dtype=np.float32).reshape(2, 3) * k for k in (1, 8))
BETWEEN = ".out.documents"


@pytest.fixture
def folder(tmp_path):
    for name, x in {"A": A, "B": B}.items():
        save_checkpoint(tmp_path / name, {"w": x})
    return tmp_path


def text(folder, *documents):
    joined = "---\n".join(documents)
    return joined.replace("model: A", f"model: {folder}/A").replace(
        "model: B", f"model: {folder}/B"
    )


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("A", "B", "r.yaml"))


def test_each_comes_after_those_that_it_uses(folder):
    (folder / "first").mkdir()  # outputs take precedence over folders
    done = merge_recipe(text(folder, LAST, SECOND, FIRST), folder / "out")
    got = load_checkpoint(folder / "out")["w"]
    first = (A + B) / 2
    np.testing.assert_array_equal(got, ((B + first) / 2 + first) / 2)  # halves are exact
    assert left(folder) == ["first", "out"]
    assert [one.recipe.name for one in (*done.others, done)] == ["first", "second", None]
    assert done.out == folder / "out"
    assert (folder / "out" / "recipe.yaml").read_text() == text(folder, LAST, SECOND, FIRST)
    assert "- `first`" in (folder / "out" / "README.md").read_text()


def test_of_several_outcomes_each_has_its_folder(folder):
    third = SECOND.replace("second", "third").replace("model: B", "model: A")
    done = merge_recipe(text(folder, third, SECOND, FIRST), folder / "out")
    first = (A + B) / 2
    assert left(folder) == ["out"]
    assert left(folder / "out") == ["second", "third"]
    assert done.out.parent == folder / "out"
    np.testing.assert_array_equal(load_checkpoint(folder / "out" / "second")["w"], (B + first) / 2)
    np.testing.assert_array_equal(load_checkpoint(folder / "out" / "third")["w"], (A + first) / 2)
    with pytest.raises(CheckpointError, match=r"out.npz: expected a folder for 2 models"):
        merge_recipe(text(folder, third, SECOND, FIRST), folder / "out.npz")


def test_a_folder_of_several_outcomes_is_replaced_one_by_one(folder):
    out, forced = folder / "out", RunOptions(force=True)
    third = FIRST.replace("first", "third")
    merge_recipe(text(folder, FIRST, third.replace("third", "other")), out)
    before = (out / "first" / ".sail-jax").stat()
    recipe = text(folder, FIRST.replace("model: B", "model: A"), third)
    with pytest.raises(CheckpointError, match=r"out exists already; .*, or force=True replaces it"):
        merge_recipe(recipe, out)
    merge_recipe(recipe, out, run=forced)
    assert left(out) == ["first", "other", "third"]  # identified by its record
    np.testing.assert_array_equal(load_checkpoint(out / "first")["w"], A)
    assert not os.path.samestat(before, (out / "first" / ".sail-jax").stat())
    for name, reason in ((".DS_Store", "it is not a folder"), ("first/mine", "'mine' was added")):
        (out / name).write_text("mine")
        where = out / name.removesuffix("/mine")
        with pytest.raises(CheckpointError, match=f"{where} is not replaced, because {reason}"):
            merge_recipe(recipe, out, run=forced)
        with pytest.raises(CheckpointError, match=r"place for the output$"):
            merge_recipe(recipe, out)
        (out / name).unlink()
    reads = text(folder, FIRST, third.replace("model: A", f"model: {out}/third"))
    with pytest.raises(CheckpointError, match=r"third lies in the input .*third"):
        merge_recipe(reads, out, run=forced)
    np.testing.assert_array_equal(load_checkpoint(out / "first")["w"], A)
    with pytest.raises(CheckpointError, match=r"first is not replaced, because it is one output"):
        merge_recipe(recipe, out / "first", run=forced)
    assert left(folder) == ["out"]


BAD = {
    "circle": ([LAST, SECOND, FIRST.replace("model: A", "model: second")], "r:10:1|r:5:1",
               "documents need each other: (first needs second|second needs first) needs"),
    "itself": ([LAST, SECOND, FIRST.replace("model: A", "model: first")], "r:10:1",
               "each other: first needs first"),
    "one name twice": ([LAST, FIRST, FIRST], "r:10:7", "another document is called 'first'"),
    "two without a name": ([FIRST, LAST.replace("second", "first"), LAST.replace("second", "A")],
                           "r:6:1", "needs a name"),
    "one without a name": ([LAST.replace("second", "first"), SECOND, FIRST], "r:1:1",
                           "needs a name, since this and 'second' are both outputs"),
    "a path": ([FIRST.replace("first", "'../first'"), LAST], "r:1:7", "a name for a folder"),
    "hidden": ([FIRST.replace("first", ".first"), LAST], "r:1:7", "a name for a folder"),
    "a file": ([FIRST.replace("first", "first.npz"), LAST], "r:1:7", "a name for a folder"),
    "no mapping": ([FIRST, "[1, 2]\n"], "r:6:1", "expected a recipe"),
    "a mistake": ([FIRST, LAST + "dype: float32\n"], "r:9:1", "nearest: 'dtype'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_file_of_documents(case):
    documents, where, what = BAD[case]
    with pytest.raises(RecipeError, match=f"^({where}).*{what}"):
        parse_all("---\n".join(documents), "r")


def test_one_document_is_a_recipe_as_ever():
    (recipe,) = parse_all(FIRST + "---\n")
    assert recipe.modules == parse(FIRST).modules
    with pytest.raises(RecipeError, match="recipe:6:1: another document; expected one"):
        parse(FIRST + "---\n" + LAST)


def test_an_interrupt_leaves_what_is_done_and_resume_goes_on(folder):
    recipes = parse_all(text(folder, LAST, SECOND, FIRST))
    seen = []

    def stop(ready):
        seen.append(ready.recipe.name)
        if ready.recipe.name == "second":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_recipe(recipes, folder / "out", before=stop)
    assert seen == ["first", "second"]
    assert left(folder) == [BETWEEN]
    written = folder / BETWEEN / "models" / "first" / "model.safetensors"
    before = written.stat()
    with pytest.raises(CheckpointError, match="continue them with resume=True, or remove it"):
        merge_recipe(recipes, folder / "out")
    during, merged = [], []
    run = RunOptions(resume=True, progress=lambda done, total, tensor: merged.append(tensor))
    done = merge_recipe(
        recipes, folder / "out", run=run,
        before=lambda ready: during.append(written.stat()),
    )  # fmt: skip
    assert [os.path.samestat(before, now) for now in during] == [True] * 3
    assert {now.st_mtime_ns for now in during} == {before.st_mtime_ns}
    assert [one.unchanged for one in (*done.others, done)] == [True, False, False]
    assert merged == ["w"] * 2  # nothing of the first is computed again
    assert left(folder) == ["out"]
    whole = merge_recipe(recipes, folder / "whole")
    same = [(path / "model.safetensors").read_bytes() for path in (done.out, whole.out)]
    assert same[0] == same[1]


def test_resume_trusts_no_record_of_other_inputs_or_recipes(folder):
    def stop(ready):
        if ready.recipe.name is None:
            raise InterruptedError

    for change in ("input", "recipe"):
        out = folder / change
        recipe = text(folder, FIRST, LAST.replace("second", "first").replace("first}]", "A}]"))
        with pytest.raises(InterruptedError):
            merge_recipe(recipe, out, before=stop)
        if change == "input":
            save_checkpoint(folder / "new", {"w": 2 * A})
            (folder / "new" / "model.safetensors").replace(folder / "A" / "model.safetensors")
        else:
            recipe = recipe.replace("weight: 1", "weight: [1, 1]").replace("A}", "B}", 1)
        with pytest.raises(CheckpointError, match=rf"{change}\.documents"):
            merge_recipe(recipe, out, run=RunOptions(resume=True))
        assert not out.exists()


def test_a_mistake_in_the_last_is_found_before_anything_is_written(folder):
    save_checkpoint(folder / "other", {"w": A[:1]})
    last = LAST.replace("model: second", f"model: {folder}/other")
    with pytest.raises(RecipeError, match=r"w has shape \[1, 3\] in .* and \[2, 3\] in first"):
        merge_recipe(text(folder, FIRST, last), folder / "out")
    assert left(folder) == ["other"]
    (folder / BETWEEN / "models").mkdir(parents=True)
    (folder / BETWEEN / "models" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds a file that no run leaves \(precious\)"):
        merge_recipe(text(folder, FIRST, SECOND), folder / "out", run=RunOptions(resume=True))
    assert (folder / BETWEEN / "models" / "precious").read_text() == "x"


def test_the_command_plans_and_merges_all(folder, capsys):
    recipe = folder / "r.yaml"
    recipe.write_text(text(folder, LAST, SECOND, FIRST))
    assert cli.main(["merge", str(recipe), "--plan"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("document")] == [
        "document 1, first",
        "document 2, second, which uses first",
        "document 3, the last one, which uses second, first",
    ]
    assert "model     first: 1 tensors, 24 B" in said
    assert left(folder) == []
    assert cli.main(["merge", str(recipe), str(folder / "out"), "--quiet"]) == 0
    said = capsys.readouterr()
    assert "first, intermediate: 1 tensors in " in said.out
    assert f"{folder}/out: 1 tensors in " in said.out
    assert "lost: " not in said.err  # one document's text for readers does not affect the next
    assert "second: note: revision v1 has no effect: first is another document" in said.err
    assert left(folder) == ["out"]


@pytest.mark.slow
def test_each_has_its_report(folder, monkeypatch, capsys):
    from sail_jax.cli import merge_report

    monkeypatch.setattr(merge_report, "write", lambda folder, *about: [folder / "report.json"])
    (folder / "r.yaml").write_text(text(folder, FIRST, LAST.replace("second", "first")))
    argv = [
        "merge",
        str(folder / "r.yaml"),
        str(folder / "out"),
        "--report",
        str(folder / "report"),
    ]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out.splitlines()
    reports = [line for line in said if line.endswith("report.json")]
    assert reports == [f"{folder}/report/first/report.json", f"{folder}/report/report.json"]


@pytest.mark.slow
def test_what_needs_values_of_another_is_planned_once_they_are_there(folder, monkeypatch):
    """An example is an alignment, whose own tests take long."""

    def reads(reference, *others, **options):
        reference.tensors["w"].read(np.empty(6, np.float32))
        raise ValueError("read")

    monkeypatch.setattr("sail_jax.checkpoint.sources.aligned.align_maps", reads)
    (folder / "B" / "config.json").write_text('{"model_type": "llama"}')
    aligned = SECOND.replace("{model: B}", "{model: B, align: {to: first}}")
    documents = parse_all(text(folder, FIRST, aligned, LAST))
    with previewed(documents) as (first, *others):
        assert isinstance(first, Prepared)
        assert [str(other) for other in others] == [
            "values of first are needed, which must be merged first",
            "second is not planned yet",
        ]
    with pytest.raises(RecipeError, match="read"):
        merge_recipe(documents, folder / "out")
    assert load_checkpoint(folder / BETWEEN / "models" / "first")["w"].shape == (2, 3)
