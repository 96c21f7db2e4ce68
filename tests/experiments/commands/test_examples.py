import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from experiments.bench import _llama as llama
from experiments.data import example_checkpoints as examples
from sail_jax import disk
from sail_jax.checkpoint.formats.open import load_checkpoint
from sail_jax.cli.main import main

METHODS = {
    *("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "della", "della_linear"),
    *("breadcrumbs", "breadcrumbs_ties", "sce", "slerp", "nuslerp", "multislerp", "karcher"),
    *("model_stock", "nearswap", "arcee_fusion", "ram", "ramplus_tl", "passthrough"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "digits"
    return folder, examples.make(folder)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_models_know_their_tasks(made):
    _, grades = made
    assert grades["base"]["upright"] > 0.9
    for i, task in enumerate(examples.TASKS):
        best = max(grades, key=lambda model: grades[model][task])
        assert best == f"expert-{i}"
        assert grades[best][task] > 0.9


@pytest.mark.slow
def test_a_merge_is_better_on_average_than_every_expert(made, tmp_path):
    folder, grades = made
    experts = [load_checkpoint(folder / name) for name in examples.MODELS[1:]]
    soup = {name: np.mean([e[name] for e in experts], axis=0) for name in experts[0]}
    examples.save(tmp_path / "soup", soup)
    found = examples.evaluate(tmp_path / "soup")
    average = {name: np.mean(list(each.values())) for name, each in grades.items()}
    assert np.mean(list(found.values())) > max(average.values()) + 0.02


@pytest.mark.slow
def test_training_is_reproducible(made):
    folder, _ = made
    for name, tensors in zip(examples.MODELS, examples.train(0), strict=True):
        stored = load_checkpoint(folder / name)
        assert stored.keys() == tensors.keys()
        for path, value in tensors.items():
            np.testing.assert_array_equal(stored[path], value)


@pytest.mark.slow
def test_training_descends_along_the_gradient(made):
    """Three steps in NumPy equal those of automatic differentiation. Both are in float32, so sums
    of up to 128 terms differ by about 128 eps of the largest.
    """
    folder, _ = made
    start = load_checkpoint(folder / "base")
    learn, _ = examples._tasks(0)
    task = type(learn)(*(leaf[-1] for leaf in learn))  # not all digits belong to the last task
    assert not task.member.all()

    def loss(params, images, labels, member):
        x = images
        for layer in examples._LAYERS:
            x = x @ params[f"{layer}.kernel"] + params[f"{layer}.bias"]
            x = x if layer == "out" else jax.nn.relu(x)
        losses = -jax.nn.log_softmax(x)[jnp.arange(len(labels)), labels]
        return (losses * member).sum() / member.sum()

    slope = jax.jit(jax.grad(loss))
    params, memory = start, dict.fromkeys(start, 0)
    for batch in np.random.default_rng(1).integers(0, len(task.labels), (3, 128)):
        gradient = slope(params, *(leaf[batch] for leaf in task))
        memory = {name: 0.9 * memory[name] + gradient[name] for name in start}
        params = {name: params[name] - 0.05 * memory[name] for name in start}
    trained = examples._descend(start, task, np.random.default_rng(1), steps=3)
    for name, value in trained.items():
        moved, expected = value - start[name], np.asarray(params[name]) - start[name]
        assert np.abs(expected).max() > 1e-4
        # three updates of weights up to 1, each accurate to the last bit
        atol = (128 * np.abs(expected).max() + 3) * np.finfo(np.float32).eps
        np.testing.assert_allclose(moved, expected, rtol=0, atol=atol)


def test_there_is_a_recipe_for_every_method(made):
    folder, _ = made
    found = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("recipes/*.yaml")}
    assert found.keys() == METHODS
    known = {"merge_method", "base_model", "models", "parameters", "dtype"}
    for name, recipe in found.items():
        assert recipe["merge_method"] == name
        assert recipe.keys() <= known
        for model in (*(entry["model"] for entry in recipe["models"]), recipe.get("base_model")):
            assert model is None or (folder / model / "model.safetensors").is_file()


def test_the_folder_stands_beside_its_configuration(made):
    folder, _ = made
    config = json.loads((folder / "base" / "config.json").read_text())
    assert config["widths"] == list(examples.WIDTHS)
    assert config["inputs"] == examples.INPUTS


@pytest.fixture
def untrained(made, monkeypatch):
    """No training: the models of the fixture."""
    folder, _ = made
    models = [load_checkpoint(folder / name) for name in examples.MODELS]
    monkeypatch.setattr(examples, "train", lambda seed: models)
    return monkeypatch


def test_refuses_a_directory_that_holds_anything(tmp_path, monkeypatch):
    def never(seed):
        raise AssertionError("work was started")

    monkeypatch.setattr(examples, "train", never)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(disk.RefusedError, match="not empty"):
        examples.make(tmp_path)
    with pytest.raises(disk.RefusedError, match="not a directory"):
        examples.make(tmp_path / "mine.txt")
    assert contents(tmp_path) == {(tmp_path / "mine.txt").relative_to(tmp_path): b"mine"}


def test_force_replaces_examples_and_nothing_else(made, untrained, tmp_path):
    folder, _ = made
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "mine.txt").write_text("mine")
    (copy / "base" / "model.safetensors").write_bytes(b"damaged")
    examples.make(copy, force=True)
    assert (copy / "mine.txt").read_text() == "mine"
    for name in examples.MODELS:
        assert contents(copy / name) == contents(folder / name)


def test_a_failure_leaves_nothing_behind(untrained, tmp_path):
    save, saved = examples.save, []

    def fails(folder, tensors):
        saved.append(folder)
        if len(saved) == 3:
            raise disk.StoreError("disk full")
        save(folder, tensors)

    untrained.setattr(examples, "save", fails)
    with pytest.raises(disk.StoreError, match="disk full"):
        examples.make(tmp_path / "new")
    assert contents(tmp_path) == {}


def test_evaluates_the_examples_and_refuses_other_checkpoints(made, tmp_path, capsys):
    folder, grades = made
    assert main(["examples", str(folder), "--evaluate", str(folder / "base")]) == 0
    assert f"{grades['base']['upright']:.3f}" in capsys.readouterr().out
    tensors = load_checkpoint(folder / "base")
    odd = tmp_path / "odd"
    examples.save(odd, {**tensors, "extra": np.ones(3, np.float32)})
    with pytest.raises(disk.StoreError, match=r"extra is .*expected no such tensor"):
        examples.evaluate(odd)
    short = tmp_path / "short"
    examples.save(short, {**tensors, "out.kernel": tensors["out.kernel"][:5]})
    with pytest.raises(disk.StoreError, match=r"out.kernel is \(5, 10\), expected \(128, 10\)"):
        examples.evaluate(short)


def test_main_says_what_it_made(untrained, tmp_path, capsys):
    assert main(["examples", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*examples.MODELS, *examples.HELD_OUT))


def test_synthetic_checkpoints_are_safetensors_of_the_stated_spread(tmp_path):
    from safetensors import safe_open

    model = llama.Llama(32, 80, 2, 300, heads=4)
    folders = [tmp_path / name for name in ("base", "tuned")]
    llama.write(folders, model, dtype="float32")
    again = [tmp_path / "again" / folder.name for folder in folders]
    llama.write(again, model, dtype="float32")
    base, tuned = map(load_checkpoint, folders)
    with safe_open(folders[0] / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == base.keys() == model.shapes().keys()
    assert {name: array.shape for name, array in base.items()} == model.shapes()
    assert sum(array.size for array in base.values()) == model.parameters
    delta = np.concatenate([(tuned[n] - base[n]).ravel() for n in base])
    heavy = 1 + llama.TAIL * (llama.HEAVY**2 - 1)
    # The relative error of the variance of n draws is about sqrt(kurtosis / n): 4 standard errors,
    # kurtosis 51.
    error = 4 * (51 / delta.size) ** 0.5
    assert np.var(delta) / llama.DELTA**2 == pytest.approx(heavy, rel=error)
    for one, other in zip(folders, again, strict=True):
        assert contents(one) == contents(other)


@pytest.mark.slow
def test_networks_that_read_text(tmp_path, capsys):
    """A network without rows of its embedding is worse; other tokenizers leave fewer tokens."""
    assert main(["examples", str(tmp_path / "ex"), "--texts"]) == 0
    few, many = map(float, re.findall(r": ([\d.]+) bits per byte", capsys.readouterr().out))
    # The entropy of single bytes of such text is above 4.5 bits.
    assert many < few < 4.2
    paths = [str(tmp_path / name) for name in ("ex/few", "ex/many", "out")]
    assert main(["transplant", *paths, "--method", "zero", "--quiet"]) == 0
    assert main(["examples", str(tmp_path / "ex"), "--evaluate", paths[2]]) == 0
    assert float(re.findall(r": ([\d.]+) bits", capsys.readouterr().out)[0]) > few + 1
    assert main(["examples", str(tmp_path / "ex"), "--texts"]) == 2
    assert "not empty" in capsys.readouterr().err
