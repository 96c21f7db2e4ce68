"""A notebook shows what the pages say, in a fresh kernel."""

import json

import numpy as np
import pytest
import xarray as xr
from cells import soak

import experiments
from experiments.lab.running import tidy
from experiments.lab.store import RESULT


@pytest.fixture(scope="module")
def result():
    return experiments.run("ridge_transfer", preset="tiny", seed=1)


@pytest.mark.slow
def test_a_table_has_a_row_for_each_entry(result):
    table = result.to_dataframe(["ridge", "exact"])
    assert len(table) == result.dataset["exact"].size
    row = table[(table["case"] == 1) & (table["step"] == 2)]
    assert row["exact"].item() == float(result.dataset["exact"][1, 2])
    with pytest.raises(ValueError, match=r"same axes.*; got ridge: case, step; .*; \.\.\.$"):
        result.to_dataframe()
    with pytest.raises(ValueError, match=r"variable: expected one of .*; got 'exakt'"):
        result.to_dataframe("exakt")
    whole = xr.Dataset({"a": ("x", [1, 2]), "b": ("x", [3, 4])})
    assert tidy(whole).columns.tolist() == ["x", "a", "b"]


def test_a_table_of_unrelated_axes_is_not_built():
    """Their product would have 10^18 rows."""
    large = np.broadcast_to(np.float32(0), 10**9)
    with pytest.raises(ValueError, match="variables of the same axes"):
        tidy(xr.Dataset({"a": ("x", large), "b": ("y", large)}))


@pytest.mark.slow
def test_figures_are_saved_for_print(result, tmp_path):
    result.save(tmp_path, formats=("svg", "pdf"), width="single")
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"config.json", RESULT, "ridge.svg", "ridge.pdf"}
    with pytest.raises(ValueError, match="formats: expected one of"):
        result.save(tmp_path / "other", formats=("pdv",))
    assert not (tmp_path / "other").exists()
    assert result.draw(width="double")["ridge"].get_size_inches()[0] == 7.2


CELLS = {
    "import experiments; from theory import deep_linear\n"
    "result = experiments.run('ridge_transfer', preset='tiny', seed=1); result": "text/html",
    "result.figures['ridge']": "image/png",
    "deep_linear.phase_diagram('linear', sigma=.2, loads=[.2, .5], thetas=[.1, 1])": "image/png",
    "from sail_jax import methods; methods.ties(density=.2)": "text/html",
    "deep_linear.advise(n=20, d=100, theta=.5, sigma=.2)": "text/html",
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inline", *soak("agg")])
def test_a_notebook_shows_results_and_figures(backend, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    first = "" if backend == "agg" else "%matplotlib inline\n"
    cells = [nbformat.v4.new_code_cell(first + source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    for cell, kind in zip(notebook.cells, CELLS.values(), strict=True):
        assert [kind in output.get("data", {}) for output in cell.outputs] == [True], json.dumps(
            cell
        )[:2000]
