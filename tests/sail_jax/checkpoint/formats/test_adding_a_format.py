"""The code of the page on adding a format runs, and the format is read, written and listed.

That the page as a whole is enough, `tests/test_additions.py` checks.
"""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sail_jax.checkpoint import CheckpointError, load_checkpoint, open_checkpoint, save_checkpoint
from sail_jax.checkpoint.formats.table import FORMATS, of_module
from sail_jax.checkpoint.operations.running import RunOptions

PAGE = Path(__file__).parents[4] / "docs" / "how_to" / "add_a_format.md"


@pytest.fixture
def page():
    """Adds the module and the row, and leaves the table as it was before the test."""
    before, text = dict(FORMATS), PAGE.read_text()
    tiny_files = ModuleType("tiny_files")
    blocks = re.findall(r"tiny_files\.py -->\n```python\n(.*?)^```", text, re.M | re.S)
    exec("\n".join(blocks), vars(tiny_files))
    (row,) = re.findall(r"^\+ +(of_module\(tiny_files, .*\)),$", text, re.M)
    FORMATS["tiny"] = eval(row, {"of_module": of_module, "tiny_files": tiny_files})
    yield
    FORMATS.clear()
    FORMATS.update(before)


def test_the_page_adds_a_format(page, tmp_path):
    want = {"a": np.float32([[1, 2], [3, 4]]), "b/c": np.zeros((0, 3), bool), "d": np.int64(7)}
    save_checkpoint(tmp_path / "x", want, format="tiny")
    (tmp_path / "x" / "config.json").write_text("{}")
    with open_checkpoint(tmp_path / "x") as opened:
        assert (opened.format, [*opened.extras]) == ("tiny", ["config.json"])
    for name, got in load_checkpoint(tmp_path / "x").items():
        np.testing.assert_array_equal(got, want[name], strict=True)
    with pytest.raises(CheckpointError, match="'tiny'; got 'none'"):
        RunOptions(format="none")
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"file of type .*\.tiny$"):
        open_checkpoint(tmp_path / "model.txt")
    (tmp_path / "x" / "other.tiny").write_bytes(b"")
    with open_checkpoint(tmp_path / "x") as opened:
        assert (opened.rivals, opened.others) == (("other.tiny",), ())
    save_checkpoint(tmp_path / "y.tiny", {"a": np.arange(6, dtype=np.float32)})
    whole = (tmp_path / "y.tiny").read_bytes()
    cut, kind = whole[:-1], whole.replace(b"float32", b"object_")
    length, text = b"\xff" * 8 + whole[8:], whole[:9] + b"\xff" + whole[10:]
    for damaged in (cut, kind, length, text):
        (tmp_path / "y.tiny").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"y\.tiny"):
            open_checkpoint(tmp_path / "y.tiny")
