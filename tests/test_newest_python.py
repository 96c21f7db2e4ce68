"""`.ci/python` finds the newest Python that runs, among commands and the versions of pyenv."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "python"
OWN = f"python3.{sys.version_info.minor}"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def found(folder):
    """Returns the output of the script without other commands on the path."""
    command = [str(shutil.which("bash")), str(SCRIPT)]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr.strip(), done.returncode


@pytest.mark.parametrize("place", ["bin", "kept/versions/3.x/bin"])
def test_a_python_that_runs_is_found(place, tmp_path):
    folder, own = tmp_path / "bin", tmp_path / place / OWN
    program(folder / "python3.20", "echo 'pyenv: python3.20: command not found' >&2; exit 127")
    program(folder / "python3.19", f'exec {sys.executable} "$@"')  # of another version
    program(folder / "pyenv", f"echo {tmp_path / 'kept'}")
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(os.path.realpath(sys.executable))
    assert found(folder) == (str(own), "", 0)


def test_no_python_is_an_error(tmp_path):
    program(tmp_path / OWN, "exit 1")
    program(tmp_path / "python3.10", f'exec {sys.executable} "$@"')
    assert found(tmp_path) == ("", "no Python from 3.11 on", 1)
