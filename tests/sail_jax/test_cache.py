"""The shared cache of commands: entries are written atomically, and its size is bounded."""

import os

import pytest

from sail_jax import disk


@pytest.fixture
def kept(tmp_path):
    return disk.Cache(tmp_path, 1000)


def test_an_entry_is_what_was_put(kept, tmp_path):
    assert kept.get("a") is None
    for data in (b"", b"one", b"two"):
        kept.put("a", data)
        assert kept.get("a") == data
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("harm", ["cut", "empty", "flipped", "longer", "another"])
def test_a_damaged_entry_is_removed(harm, kept, tmp_path):
    kept.put("a", b"content")
    kept.put("b", b"other content")
    path = tmp_path / "a"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-1], "empty": b"", "flipped": whole[:-1] + b"T", "longer": whole + b"t",
            "another": b"content",
        }[harm]
    )  # fmt: skip
    assert kept.get("a") is None
    assert not path.exists()
    assert kept.get("b") == b"other content"
    kept.put("a", b"content")
    assert kept.get("a") == b"content"


def test_a_writer_that_fails_leaves_the_old_entry(kept, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    kept.put("a", b"old")
    for name in ("replace", "unlink"):
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, name, fail)
            kept.put("a", b"new" if name == "replace" else b"old")
    assert kept.get("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_was_longest_out_of_use_gives_way(kept, tmp_path):
    size = 100 - len(kept_seal(b""))
    (tmp_path / "old" / "version").mkdir(parents=True)
    (tmp_path / "old" / "version" / "x-cache").write_bytes(bytes(500))
    os.utime(tmp_path / "old" / "version" / "x-cache", (0, 0))
    for i in range(9):
        kept.put(f"{i}", bytes([i]) * size)
        os.utime(tmp_path / f"{i}", (1 + i, 1 + i))
        assert total(tmp_path) <= 1000
        assert kept.get("0") is not None  # which is thereby in use
    assert not (tmp_path / "old" / "version" / "x-cache").exists()
    disk.Cache(tmp_path, 500).put("new", b"")
    assert total(tmp_path) <= 500
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"0", "8", "new"} <= left
    assert not {"1", "2", "3"} & left
    kept.put("large", bytes(1001))
    assert kept.get("large") is None
    assert kept.get("0") is not None


def kept_seal(data):
    return disk.hashlib.sha256(data).digest()


def total(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
