"""The display of progress counts bytes, or what a command names."""

import time

import pytest

from sail_jax.cli import progress


@pytest.mark.parametrize(
    ("unit", "total", "says"),
    [("bytes", 4 * 10**9, "   25% of 4.0 GB  a\n"), ("points", 4, "   25% of 4 points  a\n")],
)
def test_without_a_terminal_a_line_comes_every_ten_seconds(unit, total, says, monkeypatch, capsys):
    times = iter((0.0, 1.0, 11.0, 11.0, 12.0))  # read again when a line is printed
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with progress.Meter(unit=unit) as meter:
        for _ in range(3):
            meter(total // 4, total, "a")
    assert capsys.readouterr().err == says


def test_a_bar_of_other_units_has_no_bytes():
    names = {
        unit: [type(column).__name__ for column in progress._bar(unit).columns]
        for unit in ("bytes", "points")
    }
    assert {"DownloadColumn", "TransferSpeedColumn"} <= {*names["bytes"]}
    assert names["points"] == [
        "BarColumn", "MofNCompleteColumn", "TimeRemainingColumn", "TextColumn"
    ]  # fmt: skip
