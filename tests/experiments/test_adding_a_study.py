"""The pages on adding a study, a benchmark and a data set: their files are created and run."""

import contextlib
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from experiments.commands import bench
from experiments.data import registry as data_sets
from experiments.lab import registry
from sail_jax.cli import main as cli

PAGES = Path(__file__).parents[2] / "docs" / "how_to"
FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", re.M | re.S)


@contextlib.contextmanager
def put(page, root, monkeypatch):
    """Writes the files of a page below a folder, where Python finds them beside the package's."""
    files = FILE.findall((PAGES / page).read_text())
    for name, code in files:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    for folder in ("studies", "bench", "data"):
        package = importlib.import_module(f"experiments.{folder}")
        own = str(root / "experiments" / folder)
        monkeypatch.setattr(package, "__path__", [*package.__path__, own])
    yield root / "experiments"
    for name, _ in files:
        sys.modules.pop(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Makes the study's folder the only one, so that it is found by its name."""
    with put("add_a_study.md", tmp_path, monkeypatch) as experiments:
        monkeypatch.setattr(registry, "FOLDER", experiments / "studies")
        registry.studies.cache_clear()
        yield registry.load("sample_mean")
        registry.studies.cache_clear()


@pytest.mark.slow
def test_the_study_of_the_page_runs(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "sample_mean", "--preset", "tiny", "--draws", "400"]) == 0
    out = capsys.readouterr().out
    assert "the mean square at n = 8" in out
    dataset = xr.load_dataset("results/sample_mean/result.nc")
    mean, error = dataset.squared.mean("draw"), dataset.squared.std("draw") / 20
    np.testing.assert_array_less(abs(mean - [1 / 2, 1 / 8]), 4 * error)
    assert Path("results/sample_mean/error.png").stat().st_size > 1000


def test_the_options_of_the_page_s_study_are_its_fields(study, capsys):
    assert cli.main(["run", "sample_mean", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--draws INT" in out
    assert "Samples of each size. (default: 4000)" in out
    assert study.question.startswith("How far does the mean")


def test_the_benchmark_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with put("add_a_benchmark.md", tmp_path, monkeypatch) as experiments:
        monkeypatch.setattr(bench, "FOLDER", experiments / "bench")
        options = "--size", "1000", "--repeats", "2", "--json", "record.json"
        assert cli.main(["bench", "sorting", *options]) == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["sort", "jax", "numpy"]
    assert table[2].split()[-1] == "1.00"
    record = json.loads(Path("record.json").read_text())
    assert record["schema"] == "sail-jax bench sorting 1"
    assert 0 < record["numpy"]["min"] <= record["numpy"]["seconds"] <= record["numpy"]["max"]


@pytest.mark.slow  # it asks every study whether it takes the data
def test_the_data_set_of_the_page_is_read(tmp_path, monkeypatch, capsys):
    for split, count in (("train", 5), ("test", 2)):
        np.save(tmp_path / f"{split}_images.npy", np.zeros((count, 6, 6, 1), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(count) % 2)
    with put("add_a_data_set.md", tmp_path, monkeypatch):
        declared = data_sets._declared("IMAGES")
        assert declared.keys() == {*data_sets.IMAGES, "shapes"}
        monkeypatch.setitem(data_sets.IMAGES, "shapes", declared["shapes"])
        assert cli.main(["data", "shapes", "--folder", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("5 images of 6 x 6 x 1 to learn from, 2 to test on, 2 classes\n")
        assert "sail-jax run growth_training --preset digits_mlp --data.name shapes" in out
        np.save(tmp_path / "test_labels.npy", np.array([0, 2]))
        assert cli.main(["data", "shapes", "--folder", str(tmp_path)]) == 2
        assert "test_labels.npy has the label 2; expected 0 to 1" in capsys.readouterr().err
