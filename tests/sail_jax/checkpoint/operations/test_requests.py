"""Requests: the Python functions pass on every argument, and a plan writes nothing."""

import dataclasses
import inspect
import sys

import numpy as np
import pytest

from sail_jax.checkpoint import CheckpointError, save_checkpoint
from sail_jax.checkpoint.operations import (
    adapting,
    aligning,
    averaging,
    converting,
    growing,
    upcycling,
)
from sail_jax.checkpoint.operations.running import carried_out, planned

FUNCTIONS = {
    averaging.average_checkpoints: averaging.AverageRequest,
    growing.grow_checkpoint: growing.GrowRequest,
    aligning.align_checkpoints: aligning.AlignRequest,
    converting.convert_checkpoint: converting.ConvertRequest,
    upcycling.upcycle_checkpoint: upcycling.UpcycleRequest,
    adapting.extract_adapter: adapting.ExtractRequest,
    adapting.merge_adapters: adapting.MergeAdaptersRequest,
    adapting.apply_adapter: adapting.ApplyRequest,
}


@pytest.mark.parametrize(("function", "kind"), FUNCTIONS.items(), ids=lambda x: x.__name__)
def test_a_function_hands_on_each_argument_by_its_name(function, kind, monkeypatch):
    made = []
    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, "carried_out", lambda request, *_: made.append(request))
    fields = {field.name: field for field in dataclasses.fields(kind)}
    takes = inspect.signature(function).parameters
    fields.pop("found", None)  # by an earlier plan
    assert fields.keys() == takes.keys() - {"run", "before"}
    given = {name: object() for name in fields if name != "options"}
    function(**given, **({"own": 1} if "options" in fields else {}))
    (request,) = made
    for name, value in given.items():
        assert getattr(request, name) is value
        default = fields[name].default
        # A plan alone needs no output, but the function does.
        if default is not dataclasses.MISSING and (name, default) != ("out", None):
            assert takes[name].default == default
    assert getattr(request, "options", {"own": 1}) == {"own": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.out = "elsewhere"


def test_a_plan_writes_nothing_and_minds_no_output(tmp_path):
    for name in ("run/checkpoint-1", "run/checkpoint-2"):
        save_checkpoint(tmp_path / name, {"w": np.ones(2, np.float32)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    before = sorted(tmp_path.rglob("*"))
    request = averaging.AverageRequest(tmp_path / "run", tmp_path / "out")
    with planned(request) as ready:
        assert [work.name for work in ready.works] == ["w"]
    with pytest.raises(CheckpointError, match="out"):
        carried_out(request)
    assert sorted(tmp_path.rglob("*")) == before
