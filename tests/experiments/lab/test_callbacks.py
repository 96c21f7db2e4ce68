"""Callbacks receive each row once, and their errors lose no work."""

import json
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

import experiments
from experiments.lab import callbacks, registry, store
from experiments.lab.callbacks import CallbackError, JsonLines, TensorBoard, logged
from experiments.lab.config import Seed, config
from sail_jax.cli import main as cli
from sail_jax.disk import RefusedError, StoreError

ROOT = Path(__file__).parents[3]


@config
class Config:
    """A study of two trainings."""

    seed: Seed = 0
    """Seed."""


class Fake(SimpleNamespace):
    """A study of a stage with two trainings and one stage without."""

    name, question = "fake", "How many?"
    presets = {"default": Config(), "tiny": Config()}  # noqa: RUF012
    plot = staticmethod(lambda dataset: {})
    findings = staticmethod(lambda dataset: [])
    summary = staticmethod(lambda dataset: "done")

    def run(self, config, stage=store.direct):
        sources = stage("sources, seed 0", self.sources, folder=True)
        end = stage("end 1/1", lambda: {"sum": sources["loss"].sum(), "bad": np.array([np.nan])})
        return xr.Dataset({"sum": end["sum"]})

    def sources(self, folder):
        for name in ("one", "two"):
            directory = None if folder is None else folder / name
            report = callbacks.training(JsonLines(None), None, directory)
            for t in (0, 5):
                report(t, {"loss": 1.0 / (t + 1), "0/error": 0.25})
            report.check()
        return {"loss": np.array([1.0, 3.0]), "w": {"kernel": np.ones(2)}, "word": "a"}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(registry, "load", lambda name: Fake())


class Heard(list):
    def __call__(self, step, scalars):
        self.append((step, dict(scalars)))


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def completed(path, callback=None, resume=False):
    with store.Run.open(path, "fake", Config(), resume=resume) as run:
        return store.complete(run, Fake(), Config(), callback=callback)


def named(rows):
    return [(step, *row.items()) for step, row in rows if "stage" not in row]


@pytest.mark.slow
def test_a_study_reports_its_trainings_and_stages(study, tmp_path):
    def expected(one, two):
        return [
            (t, (f"{series}/loss", 1 / (t + 1)), (f"{series}/0/error", 0.25))
            for series in (f"sources, seed 0{one}", f"sources, seed 0{two}")
            for t in (0, 5)
        ]

    heard = Heard()
    experiments.run("fake", callback=heard)
    assert named(heard) == expected("", "/2")
    stages = [(step, row) for step, row in heard if "stage" in row]
    assert [step for step, _ in stages] == [0, 1]
    assert [[*row] for _, row in stages] == [["stage", "seconds", x] for x in ("loss", "sum")]
    assert (stages[0][1]["loss"], stages[1][1]["stage"]) == (2.0, "end 1/1")
    heard = Heard()
    completed(tmp_path / "run", heard)
    assert named(heard) == expected("/one", "/two")
    found = [(row.pop("step"), row) for row in lines(tmp_path / "run")]
    assert found == [(step, row) for step, row in heard if "stage" in row]


def test_a_resumed_run_has_one_line_for_each_stage(tmp_path):
    """The process dies before the last stage; then before the line of a stage."""
    whole = tmp_path / "run"

    def failing(step, row):
        if row.get("stage") == "end 1/1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        completed(whole, failing)
    before, heard = lines(whole), Heard()
    assert [row["stage"] for row in before] == ["sources, seed 0", "end 1/1"]
    (whole / "metrics.jsonl").write_text(json.dumps(before[0]) + '\n{"step": 1, "st')
    completed(whole, heard, resume=True)
    # The end was read back, so its duration is not known.
    assert lines(whole) == [before[0], {"step": 1, "stage": "end 1/1", "sum": 4.0}]
    assert heard == [(1, {"stage": "end 1/1", "sum": 4.0})]


def test_an_error_of_a_callback_names_it_and_loses_no_stage(tmp_path):
    def failing(step, row):
        if "stage" in row:
            raise ValueError("no network")

    name = r"test_callbacks:.*failing failed at step 0 \(ValueError: no network\)"
    with pytest.raises(CallbackError, match=name):
        completed(tmp_path / "run", failing)
    assert len([*(tmp_path / "run/stages").glob("*.npz")]) == 1
    completed(tmp_path / "run", resume=True)
    assert [row["step"] for row in lines(tmp_path / "run")] == [0, 1]


def test_a_callback_is_checked_before_any_work():
    with pytest.raises(TypeError, match=r"callback: expected a function, called as callback\(step"):
        logged(store.direct, None, lambda step: None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(value, tmp_path):
    keep = JsonLines(tmp_path / "metrics.jsonl")
    keep(3, {"loss": 1.0, "word": "inf"})
    with pytest.raises(FloatingPointError, match="step 4: the metric 'loss' is"):
        keep(4, {"loss": value})
    assert lines(tmp_path) == [{"step": 3, "loss": 1.0, "word": "inf"}]


def events(folder):
    """Reads the events of a folder in the order in which TensorBoard reads them."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    record = pytest.importorskip("tensorboardX.record_writer")
    found = []
    for file in sorted(folder.glob("*tfevents*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body, checks = data[12 : 12 + length], (data[8:12], data[12 + length : 16 + length])
            for part, check in zip((data[:8], body), checks, strict=True):
                assert struct.unpack("<I", check) == (record.masked_crc32c(part),)
            found.append(proto.Event.FromString(body))
            data = data[16 + length :]
    return found


def test_tensorboard_gets_a_run_for_each_series(tmp_path):
    pytest.importorskip("tensorboardX")
    write = TensorBoard(tmp_path)
    write(0, {"stage": "a", "sum": 2.5})
    for t in (5, 6):
        write(t, {"a/../b 1/2/loss": t / 4, "a/../b 1/2/0/error": 1.0, "a/../b 1/2/rate": 0.5})
    TensorBoard(str(tmp_path))(6, {"a/../b 1/2/loss": 2.0})  # continued
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "a, .., b 1, 2",
        "a, .., b 1, 2, 0",
    }
    version, start, row = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == start.session_log.START
    assert [(value.tag, value.simple_value) for value in row.summary.value] == [("sum", 2.5)]
    series = events(tmp_path / "a, .., b 1, 2")
    starts = [event.step for event in series if event.HasField("session_log")]
    assert starts == [5, 6]  # TensorBoard hides later events of earlier files
    rows = [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in series
        if event.HasField("summary")
    ]
    assert rows == [
        (5, {"loss": 1.25, "rate": 0.5}), (6, {"loss": 1.5, "rate": 0.5}), (6, {"loss": 2.0})
    ]  # fmt: skip


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", None)
    with pytest.raises(RefusedError, match=r"pip install 'sail-jax\[tensorboard\]'"):
        TensorBoard(tmp_path / "none")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        completed(tmp_path / "run", TensorBoard(tmp_path / "file"))


def test_the_command_passes_metrics_on(study, tmp_path, monkeypatch, capsys):
    heard = Heard()
    monkeypatch.setitem(sys.modules, "my_logs", SimpleNamespace(log=heard, number=1))
    command = ["run", "fake", "--preset", "tiny", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--log", "my_logs:log"]) == 0
    assert [step for step, _ in heard] == [0, 5, 0, 5, 0, 1]
    for word, why in {
        "tensorbord": r"expected tensorboard or MODULE:FUNCTION, got 'tensorbord' \(nearest: 'tens",
        "my_logs:number": "is not a function",
    }.items():
        assert cli.main([*command, "--log", word]) == 2
        assert re.search(why, capsys.readouterr().err.replace("\n", " "))


def test_the_page_passes_metrics_to_wandb(study, monkeypatch):
    """The lines of the page, with a fake package."""
    page = (ROOT / "docs/how_to/experiments.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.S) if "import wandb" in c]
    wandb, sent = SimpleNamespace(), []
    wandb.init = lambda project: sent.append(project)
    wandb.define_metric = lambda name, step_metric: sent.append((name, step_metric))
    wandb.log = sent.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    exec(code, {"experiments": experiments})
    assert sent[1] == ("*", "step")
    assert sent[2] == {"step": 0, "sources, seed 0/loss": 1.0, "sources, seed 0/0/error": 0.25}
    assert [row["stage"] for row in sent[2:] if "stage" in row] == ["sources, seed 0", "end 1/1"]
