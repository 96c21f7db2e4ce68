"""The command of the page "Add a command" is added as described, listed, shown in the help
and run."""

import re
from pathlib import Path

import numpy as np
import pytest

from sail_jax.checkpoint import save_checkpoint
from sail_jax.cli import commands, finder
from sail_jax.cli import main as cli

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_command.md"


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder that contains only the command, and replaces the package's folder."""
    ((place, code),) = re.findall(
        r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    monkeypatch.setattr(finder, "_HOME", tmp_path)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(file.parent)])
    return tmp_path


def test_the_file_alone_makes_a_command(scratch, capsys):
    assert cli.main(["--help"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == ["  norms       Norms of the largest tensors of a checkpoint."]
    assert cli.main(["norms", "--help"]) == 0
    assert "--most N" in capsys.readouterr().out
    norms = {"a": 3.0, "b": 5.0, "c": 4.0}
    save_checkpoint(scratch / "x.npz", {name: np.array([y], "f") for name, y in norms.items()})
    assert cli.main(["norms", str(scratch / "x.npz"), "--most", "2"]) == 0
    assert capsys.readouterr().out.split() == ["5", "b", "4", "c"]


def test_its_errors_are_one_line(scratch, capsys):
    assert cli.main(["norms", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("sail-jax: error: ")
    assert cli.main(["norms", "x", "--mist", "2"]) == 2
    assert "unknown option '--mist' (nearest: '--most')" in capsys.readouterr().err
    assert cli.main(["norm"]) == 2
    assert "unknown command 'norm' (nearest: 'norms')" in capsys.readouterr().err
