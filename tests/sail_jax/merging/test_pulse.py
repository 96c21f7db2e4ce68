"""A run without progress is reported, once for each pause."""

import threading
import time

import pytest

from sail_jax.merging import pulse as module
from sail_jax.merging.pulse import Pulse


def test_each_pause_is_reported_once(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    pulse, pauses = Pulse(), []
    reported = threading.Event()

    def report(pause):
        pauses.append(pause)
        reported.set()

    with pulse.watched(report):
        for count in (1, 2):
            pulse.beat()
            assert reported.wait(10)
            reported.clear()
            time.sleep(0.15)
            assert len(pauses) == count
    assert all(0.05 <= pause < 5 for pause in pauses)
    assert not [t for t in threading.enumerate() if t.name == "pulse"]


def test_progress_is_not_reported():
    pulse, pauses = Pulse(), []
    with pulse.watched(pauses.append):
        time.sleep(0.02)
        pulse.beat()
    assert pauses == []


def test_a_stopped_worker_ends_at_its_next_piece():
    pulse = Pulse()
    pulse.beat()
    pulse.stop()
    with pytest.raises(KeyboardInterrupt):
        pulse.beat()
