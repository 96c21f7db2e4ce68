"""Complex numbers: copied where all models agree, refused by name where they differ."""

import jax
import numpy as np
import pytest

from sail_jax import methods
from sail_jax.checkpoint import (
    RunOptions,
    average_checkpoints,
    load_checkpoint,
    merge_checkpoints,
    save_checkpoint,
)

TURNS = np.exp(1j * np.arange(3))


def models(turns):
    return [
        {"w": np.full(2, value, np.float32), "turns": x}
        for value, x in ((1.0, TURNS), (3.0, turns))
    ]


def merge(models, folder, **options):
    return {"merged": methods.linear()(models, **options)}


def merge_files(models, folder, **options):
    paths = [folder / f"{k}.npz" for k in range(2)]
    for path, model in zip(paths, models, strict=True):
        save_checkpoint(path, model)
    run = RunOptions(select=options.pop("select", None))
    merge_checkpoints(paths, out=folder / "out.npz", method="linear", run=run, **options)
    return {"merged": load_checkpoint(folder / "out.npz")}


def average_files(models, folder, **options):
    for step, model in enumerate(models):
        save_checkpoint(folder / "steps" / f"checkpoint-{step}", model, format="orbax")
    found = {}
    for write_as in ("params", "run"):
        out = folder / write_as
        run = RunOptions(select=options.get("select"))
        average_checkpoints(f"{folder}/steps@last:2", out, write_as=write_as, run=run)
        found[write_as] = load_checkpoint(out)
    return found


WAYS = [merge, merge_files, average_files]


@pytest.mark.parametrize("way", WAYS)
def test_copied_where_equal(way, tmp_path):
    for got in way(models(TURNS), tmp_path).values():
        assert got["w"].tolist() == [2, 2]
        assert got["turns"].dtype == np.complex128
        assert np.array_equal(got["turns"], TURNS)


@pytest.mark.parametrize(
    ("way", "given"), [*((way, {}) for way in WAYS), *((w, {"integers": "max"}) for w in WAYS[:2])]
)
def test_refused_where_they_differ(way, given, tmp_path):
    said = "turns'?: complex128 values differ between .*; complex numbers are not merged"
    with pytest.raises(ValueError, match=said) as info:
        way(models(TURNS.conj()), tmp_path, **given)
    assert "\n" not in str(info.value)
    assert not any((tmp_path / name).exists() for name in ("out.npz", "params", "run"))


def test_select_leaves_them_to_the_rest(tmp_path):
    got = merge(models(-TURNS), tmp_path, select="w", rest="first")["merged"]
    assert np.array_equal(got["turns"], TURNS)
    got = average_files(models(-TURNS), tmp_path, select="w")
    assert np.array_equal(got["run"]["turns"], -TURNS)
    assert set(got["params"]) == {"w"}


def test_traced_ones_are_refused():
    pair = [{"turns": np.ones(3, np.complex64)}] * 2
    with pytest.raises(TypeError, match=r"leaf 'turns': .* got complex64, which is traced"):
        jax.jit(methods.linear())(pair)
