"""Results of operations are shown in one line, with their outputs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sail_jax.architectures import Rules
from sail_jax.checkpoint import (
    align_checkpoints,
    apply_adapter,
    average_checkpoints,
    compare_checkpoints,
    extract_adapter,
    grow_checkpoint,
    merge_adapters,
    merge_checkpoints,
    open_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.operations.results import Result

AXES = (("in.weight", "hidden x*"), ("out.weight", "y hidden*"))
RULES = Rules(AXES, {"x": "outer", "y": "outer", "hidden": "relu"})


def test_a_result_is_shown_in_one_line():
    done = Result(out=Path("out"), tensors=2, notes=("a note",), seconds=1.5, unchanged=False)
    assert repr(done) == "Result(out='out', tensors=2)"


@pytest.mark.slow
def test_so_is_what_each_operation_returns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name in "ab":
        shapes = {"in.weight": (3, 2), "out.weight": (2, 3)}
        tensors = {n: random.normal(size=shape).astype("f") for n, shape in shapes.items()}
        save_checkpoint(name, tensors)
        save_checkpoint(f"run/checkpoint-{ord(name)}", tensors)
    done = [
        merge_checkpoints(["a", "b"], "merged", weights=[1, 2]),
        average_checkpoints("run@last:2", "averaged"),
        grow_checkpoint("a", "grown", {"hidden": 4}, rules=RULES),
        align_checkpoints("a", "b", "aligned", spec=RULES),
        align_checkpoints("a", "b", None, spec=RULES),
        extract_adapter("a", "b", "lora", rank=1),
        merge_adapters(["lora", "lora"], "loras", rank=1),
        apply_adapter("a", "lora", "applied"),
    ]
    assert [repr(one) for one in done] == [
        "Merged(out='merged', tensors=2)",
        "AveragedRun(out='averaged', tensors=2)",
        "Grown(out='grown', tensors=2)",
        "AlignedCheckpoint(out='aligned', tensors=2)",
        "AlignedCheckpoint(out=None, tensors=2)",
        "Extracted(out='lora', tensors=4)",
        "MergedAdapters(out='loras', tensors=4)",
        "Applied(out='applied', tensors=2)",
    ]
    for one in done:
        if one.out is not None:
            with open_checkpoint(one.out) as written:
                assert len(written.tensors) == one.tensors
                assert repr(written) == f"Checkpoint({str(one.out)!r}, tensors={one.tensors})"
    compared = compare_checkpoints(["a", "b"], "merged")
    assert repr(compared) == "Comparison(models=['a', 'b'], base='merged', tensors=2)"
    again = merge_checkpoints(["a", "b"], "again.npz", weights=[1, 2])
    assert repr(dataclasses.replace(done[0], others=(again,))) == repr(done[0])


@pytest.mark.parametrize("kind", Result.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_result_has_that_line(kind):
    """Also results that are not created in this file: `dataclass` would give a different line."""
    assert kind.__repr__ is Result.__repr__
