"""The benchmark of accelerators, which also runs on a CPU."""

import importlib
import json

import pytest

from experiments.bench import accelerator
from experiments.lab import registry
from sail_jax.cli.main import main
from sail_jax.cli.options import Parser


def test_every_command_can_be_asked_for():
    for words in (words for preset in accelerator.PRESETS.values() for words in preset.values()):
        command, name, *args = words.split()
        if command == "run":
            assert args == ["--preset", "tiny"]
            assert "tiny" in registry.load(name).presets
            continue
        module = importlib.import_module(f"experiments.bench.{name}")
        parser = Parser(f"bench {name}")
        module.options(parser)
        assert parser.read(args)


def run(folder):
    code = main(["bench", "accelerator", "--preset", "tiny", "--out", str(folder)])
    return code, json.loads((folder / "accelerator.json").read_text())


@pytest.mark.slow
def test_merges_are_compared_with_a_copy(tmp_path, monkeypatch, capfd):
    words = "bench merge --device --size tiny --methods linear --repeat 2"
    monkeypatch.setattr(accelerator, "PRESETS", {"tiny": {"merge": words}})
    monkeypatch.setattr(accelerator, "LEAST", 1e9)
    code, record = run(tmp_path)
    assert code == 0
    assert record["schema"] == "sail-jax bench accelerator 1"
    took = record["took"]["merge"]
    assert 0 < took["compiling"] < took["seconds"]
    (device,) = json.loads((tmp_path / "merge.json").read_text())["device_memory"]
    (linear,) = device["methods"].values()
    assert record["below"] == {"linear": linear["of_copy"]}
    # a base and three models are read, and one is written
    rate = 2 * device["parameters"] * 5 / linear["seconds"]
    assert linear["of_copy"] == pytest.approx(rate / device["copy_bytes_per_second"])
    assert "copying" in capfd.readouterr().out


@pytest.mark.slow
def test_a_failure_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "PRESETS", {"tiny": {"study": "run nothing --preset tiny"}})
    code, record = run(tmp_path)
    assert code == 1
    assert record["took"]["study"]["code"] == 2
    assert record["below"] == {}


@pytest.mark.soak
def test_the_smallest_preset_runs_on_a_cpu(tmp_path):
    code, record = run(tmp_path)
    assert code == 0
    assert record["took"].keys() == accelerator.PRESETS["tiny"].keys()
    assert (tmp_path / "transfer_phase" / "result.nc").exists()
