"""Benchmarks of growing costs and of memory caps: fits, verdicts and stored rows."""

import contextlib
import importlib
import io
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiments.bench import _merge_caps as caps
from experiments.bench import _merge_recipes as recipes
from experiments.bench import _scale_axes as axes
from experiments.bench import all as every
from experiments.bench import scale
from experiments.bench._fits import power
from experiments.bench._measuring import Rows, Sample, process
from sail_jax import methods
from sail_jax.cli.main import main
from sail_jax.cli.options import Parser
from sail_jax.disk import RefusedError


def test_exponents_and_intervals_are_those_of_regression():
    x = np.asarray([1e6, 3e6, 1e7, 5e7, 2e8])
    cost = 0.7 + 2e-6 * x**0.9 * np.asarray([1.1, 0.9, 1.05, 0.97, 1.0])
    law = power(x.tolist(), cost.tolist(), 0.7)
    kept = cost >= 1.4
    assert law is not None
    assert law.points == kept.sum() == 4  # those below twice the start carry little information
    other: Any = stats.linregress(np.log(x[kept]), np.log(cost[kept] - 0.7))
    np.testing.assert_allclose(law.exponent, other.slope, rtol=1e-9)
    np.testing.assert_allclose(law.half, other.stderr * stats.t.ppf(0.975, 2), rtol=1e-9)
    np.testing.assert_allclose(law.factor, np.exp(other.intercept), rtol=1e-9)


def test_no_exponent_of_two_points():
    assert power([1, 2], [1, 2]) is None
    assert power([2, 2, 2], [1, 2, 3]) is None


def row(size, cpu, start=False, axis="parameters", **more):
    key = {"axis": axis, "series": "linear", "size": size, "start": start}
    return {**key, "cpu_seconds": cpu, "seconds": cpu, "peak_bytes": 1, "bytes": 8 * size, **more}


def test_time_for_a_byte_is_what_is_above_the_start():
    rows = [row(1, 1.0, True), row(10**8, 9.0), row(5 * 10**8, 6.0), row(10**9, 12.0)]
    # (12 - 1) / 1e9 over (6 - 1) / 5e8; the smallest one is not large enough to count.
    assert scale.per_byte(rows)["linear"] == pytest.approx(0.1)
    assert scale.per_byte(rows[:3]) == {}


def test_rows_of_an_interrupted_run_are_not_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = Rows(path)
    assert first.add(lambda: {"cost": 1}, size=2) == {"size": 2, "cost": 1}
    path.write_text(path.read_text() + '{"size": 3, "co')
    again = Rows(path, resume=True)
    assert again.has(size=2)
    assert not again.has(size=3)
    assert again.add(lambda: {"cost": 9}, size=2)["cost"] == 1
    assert again.add(lambda: {"cost": 9}, size=3)["cost"] == 9
    assert [json.loads(line) for line in path.read_text().splitlines()] == again.all
    assert not Rows(path).has(size=2)  # without `resume`, everything is measured again


def test_processes_are_measured(tmp_path):
    words = [sys.executable, "-I", "-S", "-c"]
    code = "import time\nwhile time.process_time() < 0.15: pass\nraise SystemExit(3)"
    sample = process([*words, code], tmp_path / "log")
    assert sample.status == 3
    assert 0.15 <= sample.cpu < 0.15 + sample.seconds


@pytest.mark.parametrize(
    ("kind", "peak", "status", "said"),
    [
        ("kept", 99, 0, ""),
        ("over", 101, 0, ""),
        ("over", 101, 1, "exit 1: out of luck"),
        ("refused", 101, RefusedError.code, "exit 2: --max-memory: a.weight needs 7 MiB (330 MiB"),
        ("failed", 99, RefusedError.code, "exit 2: another reason"),
        ("failed", 99, 1, "exit 1: --max-memory: a.weight needs 7 MiB"),
        ("stopped", 99, -24, "exit -24: silent"),
    ],
)
def test_a_cap_is_kept_refused_or_passed(kind, peak, status, said):
    assert caps._kind(Sample(1.0, peak, said, 1.0, status), 100) == kind


def test_caps_are_tried_on_every_method_of_recipes():
    beside = {
        "fisher",
        "regmean",
    }  # these require statistics of data, which a recipe cannot contain
    assert {job.method for job in recipes.JOBS.values()} == methods.METHODS.keys() - beside


def test_what_the_page_is_made_of_can_be_asked_for():
    for words in (words for preset in every.PRESETS.values() for words in preset.values()):
        name, *args = words.split()
        module = importlib.import_module(f"experiments.bench.{name}")
        parser = Parser(f"bench {name}")
        module.options(parser)
        assert parser.read(args)


@pytest.fixture
def ran(monkeypatch):
    """Runs the commands of benchmarks in this process, which has imported everything."""
    commands = []

    def run(command, log, env=None, most=0):
        if command[1:3] == ["-I", "-S"]:  # a copy of the files
            copied = subprocess.run(command, capture_output=True, text=True)
            return Sample(1.0, 10, copied.stderr, 1.0, copied.returncode)
        assert command[1:3] == ["-m", "sail_jax.cli"]
        commands.append(command[3])
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(command[3:])
        return Sample(1.0, 10, said.getvalue() if code else "", 1.0, code)

    monkeypatch.setattr(axes, "process", run)
    return commands


@pytest.mark.soak
def test_checkpoints_of_every_size_are_merged_and_removed(ran, tmp_path):
    def measured(resume):
        bench = axes.Bench(tmp_path, Rows(tmp_path / "rows.jsonl", resume), 1, tiny=True)
        for name in ("parameters", "shards"):
            axes.AXES[name].measure(bench, axes.AXES[name].sizes["tiny"])
        return bench.rows.all

    rows = measured(False)
    assert not [row["failure"] for row in rows if "failure" in row]
    assert len(ran) == 3 * 2 + 2 * 3  # two methods; two models are cut, and merged
    assert {row["size"] for row in rows if row["axis"] == "shards"} == {1, 10}
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl", "recipes"}
    ran.clear()
    assert measured(True) == rows
    assert not ran


@pytest.mark.slow
def test_the_least_memory_is_tried(ran, tmp_path):
    bench = axes.Bench(tmp_path, Rows(tmp_path / "rows.jsonl"), 1, tiny=True)
    axes.AXES["memory"].measure(bench, ("300MB", "least"))
    (row,) = bench.rows.all
    assert ran == ["merge", "merge"]
    assert row["size"] > 330 << 20
    assert "failure" not in row
