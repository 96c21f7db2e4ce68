"""Files and folders that others may have prepared: nothing is written through them."""

import os
from pathlib import Path

import pytest

from sail_jax import disk


def test_a_planted_temporary_file_is_not_written_through(tmp_path):
    """Its name can be guessed, and /tmp is a folder that all can write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".report.json.{os.getpid()}.part", f".probe.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(victim)
    disk.write_atomic(tmp_path / "report.json", b"{}")
    disk.probe(tmp_path)
    assert victim.read_text() == "precious"
    assert (tmp_path / "report.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "victim"]


def test_a_folder_of_others_keeps_nothing_for_commands(tmp_path, monkeypatch):
    """Files in it affect the results, and programs in it are executed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = disk.cache("kernels/1", 1)
    assert cached is not None
    folder = cached.folder
    assert folder == tmp_path / "sail-jax" / "kernels" / "1"
    for level in (folder, folder.parent, folder.parent.parent):
        assert level.stat().st_mode & 0o077 == 0
        level.chmod(0o777)
        assert disk.cache("kernels/1", 1) is None
        level.chmod(0o700)
    assert (again := disk.cache("kernels/1", 1))
    assert again.folder == folder
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_USER", lambda: os.geteuid() + 1)
        assert disk.cache("kernels/1", 1) is None
    # A user may keep it on another disk.
    folder.parent.parent.rename(tmp_path / "elsewhere")
    (tmp_path / "sail-jax").symlink_to(tmp_path / "elsewhere")
    assert (again := disk.cache("kernels/1", 1))
    assert again.folder == folder


def test_a_file_system_without_rights_is_taken_as_it_is(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    assert disk.foreign(tmp_path) == "can be written to by all users"
    assert tmp_path.stat().st_mode & 0o777 == 0o777
    monkeypatch.setattr(os, "chmod", lambda path, mode: None)  # as on exFAT
    assert disk.foreign(tmp_path) == ""


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("/nowhere")])
def test_what_is_no_plain_file_is_found_at_any_depth(tmp_path, make):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("")
    assert disk.stranger(tmp_path) == ""
    make(tmp_path / "a" / "b" / "x")
    assert disk.stranger(tmp_path).startswith(f"{tmp_path}/a/b/x is ")
