"""Recipes as they are published, from files to files, against NumPy in float64."""

import json

import adapter_cases
import numpy as np
import pytest
import small_checkpoints
from small_checkpoints import CONFIG, SHAPES

from sail_jax.checkpoint import RunOptions, load_checkpoint, merge_recipe, save_checkpoint
from sail_jax.checkpoint.recipe.recipes import RecipeError
from sail_jax.cli import main as cli

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the float32 checkpoints base, a and b."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for seed, name in enumerate(("base", "a", "b")):
        extras = {"config.json": folder / "config.json"}
        save_checkpoint(folder / name, of(seed), extras=extras)
    return folder


def of(seed):
    return small_checkpoints.tensors(seed, dtype=np.float32)


def merged(models, text, out, **run):
    for name in ("base", "a", "b"):
        text = text.replace(name.upper(), str(models / name))
    return merge_recipe(text, out, run=RunOptions(**run))


@pytest.mark.slow
def test_karcher_counts_the_base_and_no_weights(tmp_path):
    rng = np.random.default_rng(0)
    vectors = dict(zip("cab", rng.normal(size=(3, 12)).astype(np.float32), strict=True))
    for name, vector in vectors.items():
        save_checkpoint(tmp_path / name, {"w": vector})
    text = f"""
    merge_method: karcher
    base_model: {tmp_path}/c
    models:
    - {{model: {tmp_path}/a, parameters: {{weight: 3}}}}
    - {{model: {tmp_path}/b, parameters: {{weight: 1}}}}
    parameters: {{max_iter: 60, tol: 1e-7}}
    """
    done = merge_recipe(text, tmp_path / "out")
    assert "weight has no effect under karcher; compat: paper reads it" in done.plan.notes
    got = load_checkpoint(done.out)["w"].astype(float)
    norms = {name: np.linalg.norm(vector.astype(float)) for name, vector in vectors.items()}
    np.testing.assert_allclose(np.linalg.norm(got), np.mean([*norms.values()]), rtol=8 * EPS)
    u = got / np.linalg.norm(got)

    def slope(weights):
        """Computes the slope of the sum of weight times squared angle on the sphere: 0 at
        its minimum."""
        total = np.zeros_like(u)
        for name, weight in weights.items():
            unit = vectors[name].astype(float) / norms[name]
            across = unit - (unit @ u) * u
            total += weight * np.arccos(unit @ u) * across / np.linalg.norm(across)
        return np.linalg.norm(total) / sum(weights.values())

    assert slope({"a": 1, "b": 1, "c": 1}) < 32 * EPS
    assert slope({"a": 3, "b": 1, "c": 1}) > 0.1
    assert slope({"a": 1, "b": 1}) > 0.1


@pytest.mark.parametrize("base", ["base", "base+adapter"])
def test_task_arithmetic_of_one_adapter(tmp_path, base):
    built = adapter_cases.write(adapter_cases.CASES["plain"], tmp_path)
    path = str(tmp_path / "base")
    both = f"{path}+{tmp_path / 'adapter'}"
    done = merge_recipe(
        f"merge_method: task_arithmetic\nbase_model: {both if '+' in base else path}\n"
        f"models: [{{model: '{both}', parameters: {{weight: 0.5}}}}]\n"
        "parameters: {normalize: false}\n",
        tmp_path / "out",
    )
    got = load_checkpoint(done.out)
    # The base with its adapter is written unchanged.
    share = 1.0 if "+" in base else 0.5
    assert got.keys() == built.right.keys()
    for name, right in built.right.items():
        start = built.base[name].astype(float) if name in built.base else right
        want = start + share * (right - start)
        np.testing.assert_allclose(got[name], want, rtol=0, atol=8 * EPS * np.abs(want).max())
    assert ("weight of the base has no effect under task_arithmetic" in done.plan.notes) == (
        "+" in base
    )
    assert not done.plan.losses


def test_slices_without_layers_give_what_lies_outside_of_layers(models, tmp_path):
    text = """
    merge_method: passthrough
    slices:
    - sources: [{model: A, layer_range: [0, 0]}]
    - sources: [{model: BASE, layer_range: [0, 2]}]
    - sources: [{model: BASE, layer_range: [1, 2]}]
    - sources: [{model: B, layer_range: [7, 7]}]
    """
    got = load_checkpoint(merged(models, text, tmp_path / "out").out)
    assert got.keys() == small_checkpoints.shapes(3).keys()
    for name, x in got.items():
        seed = {"model.embed_tokens.weight": 1, "model.norm.weight": 2, "lm_head.weight": 2}
        source = name.replace("layers.2.", "layers.1.")
        assert x.tobytes() == of(seed.get(name, 0))[source].tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 3


def test_an_unlisted_base_joins_a_linear_merge_if_it_has_a_weight(models, tmp_path):
    text = "merge_method: linear\nbase_model: BASE\nmodels: [{model: A, PA}, {model: B}]\nPB"
    text = text.replace("PB", "parameters: {weight: 1}")
    got = load_checkpoint(
        merged(models, text.replace("PA", "parameters: {weight: 2}"), tmp_path / "1").out
    )
    alone = (
        "merge_method: linear\nbase_model: BASE\n"
        "models: [{model: A, parameters: {weight: 2}}, {model: B, parameters: {weight: 1}}]"
    )
    two = load_checkpoint(merged(models, alone, tmp_path / "2").out)
    for name in SHAPES:
        base, a, b = (of(seed)[name].astype(float) for seed in range(3))
        for found, want in ((got, (base + 2 * a + b) / 4), (two, (2 * a + b) / 3)):
            np.testing.assert_allclose(found[name], want, rtol=0, atol=4 * EPS * 4)


def test_revisions_of_what_lies_here_are_noted_and_strict_refuses(models, tmp_path, capsys):
    text = "merge_method: passthrough\nmodels: [{model: A@main}]\n"
    done = merged(models, text, tmp_path / "out")
    said = f"revision main has no effect: {models}/a lies on this disk"
    assert said in done.plan.notes
    assert (
        load_checkpoint(done.out)["lm_head.weight"].tobytes() == of(1)["lm_head.weight"].tobytes()
    )
    with pytest.raises(RecipeError, match=r"2:10: models\[0\]: revision main has no effect"):
        merged(models, text, tmp_path / "strict", strict=True)
    path = tmp_path / "r.yaml"
    path.write_text(
        f"merge_method: passthrough\nmodels: [{{model: {models}/a}}]\nint8_mask: true\n"
    )
    assert cli.main(["merge", str(path), str(tmp_path / "strict"), "--strict"]) == 2
    assert "r.yaml:3:1: int8_mask: int8_mask has no effect at the top" in capsys.readouterr().err
    assert not (tmp_path / "strict").exists()
    assert cli.main(["merge", str(path), str(tmp_path / "again")]) == 0
    assert "note: int8_mask has no effect at the top; it belongs in para" in capsys.readouterr().err
