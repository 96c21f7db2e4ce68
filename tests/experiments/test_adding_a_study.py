"""The pages on adding a study, a benchmark and a data set: their files are put in place and run."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from experiments.lab import registry
from sail_jax.cli import main as cli

PAGES = Path(__file__).parents[2] / "docs" / "how_to"
FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", re.M | re.S)


def put(page, root, monkeypatch):
    """Writes the files of a page below a folder, where Python finds them beside the package's."""
    for name, code in FILE.findall((PAGES / page).read_text()):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    for folder in ("studies", "bench", "data"):
        package = importlib.import_module(f"experiments.{folder}")
        own = str(root / "experiments" / folder)
        monkeypatch.setattr(package, "__path__", [*package.__path__, own])
    before = set(sys.modules)
    yield root / "experiments"
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The study's folder is the only one: what finds studies finds it by its name."""
    for experiments in put("add_a_study.md", tmp_path, monkeypatch):
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
