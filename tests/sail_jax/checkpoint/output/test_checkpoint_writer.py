"""Outputs are written atomically, and interrupted work is continued to the same bytes."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sail_jax.checkpoint.formats import files, folders, orbax_folders, written
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import load_checkpoint
from sail_jax.checkpoint.output import journal, writer
from sail_jax.checkpoint.output.journal import digest
from sail_jax.checkpoint.output.writer import create, save_checkpoint

ARRAYS = {
    "a": np.arange(3000, dtype=np.float32).reshape(30, 100),
    "b": np.arange(5000, dtype=np.int16),
    "empty": np.zeros((0, 2), np.float32),
    "c": np.arange(2000, dtype=np.float64),
}
WANTED = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}


def _create(out, **how):
    how = {"fingerprint": "x", "shard_bytes": 15_000, "sync": False, **how}
    return create(out, how.pop("wanted", WANTED), **how)


def _write(out, names=ARRAYS, step=1500):
    for name in names:
        if name in out.finished:
            continue
        flat = ARRAYS[name].reshape(-1)
        for start in range(0, flat.size, step):
            out.write(name, flat[start : start + step], start)
        out.done(name)


def _refused(message, out, **how):
    with pytest.raises(CheckpointError, match=message):
        _create(out, **how)


def _make(out, **how):
    with _create(out, **how) as made:
        _write(made)
        made.commit()


def _bytes(path):
    if path.is_file():
        return path.read_bytes()
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def _names(folder):
    return sorted(p.name for p in folder.iterdir())


def _older(out):
    """An output with a record, of other tensors, with a folder in it."""
    with _create(out, wanted={"z": (np.float32, (700,))}, fingerprint="old", record=True) as old:
        old.write("z", np.arange(700, dtype=np.float32))
        old.done("z")
        (old.partial / "data" / "step").mkdir()
        (old.partial / "data" / "step" / "state").write_bytes(b"1234")
        old.commit()
    return _bytes(out)


PLACES = ("m", "m.safetensors", "m.npz", "m.msgpack")


@pytest.mark.parametrize("place", PLACES)
def test_work_left_by_an_exception_is_continued(tmp_path, place):
    _make(tmp_path / "whole" / place)
    with contextlib.suppress(ZeroDivisionError), _create(tmp_path / place) as out:
        _write(out, ["b", "empty"])
        out.write("a", ARRAYS["a"].reshape(-1)[:7], 0)
        raise ZeroDivisionError
    assert not (tmp_path / place).exists()
    _refused("same run; continue it with resume=True", tmp_path / place)
    for other in ({"fingerprint": "y"}, {"wanted": {**WANTED, "d": (np.float32, ())}}):
        _refused("unfinished work of another run", tmp_path / place, resume=True, **other)
    with _create(tmp_path / place, resume=True) as out:
        assert out.finished == {"b", "empty"}
        with pytest.raises(CheckpointError, match=r"2 tensors are unfinished: 'a', 'c'"):
            out.commit()
        _write(out)
        out.commit()
    assert _bytes(tmp_path / place) == _bytes(tmp_path / "whole" / place)
    assert _names(tmp_path) == sorted([place, "whole"])


# Processes that are started and forked many times do without the packages' own imports (jax).
BARE = f"""
    import importlib.util, sys, types
    for name in ("sail_jax", "sail_jax.checkpoint"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [
            {str(Path(writer.__file__).parents[3])!r} + "/" + name.replace(".", "/")
        ]
    sys.path.insert(0, {str(Path(__file__).parent)!r})
"""

KILLED = """
    import os, shutil, signal
    from pathlib import Path
    import test_checkpoint_writer as t

    CALLS = "pwrite write ftruncate posix_fallocate rename replace mkdir rmdir unlink fsync".split()

    def merge(out, sync):
        options = dict(force={force}, keep_old={keep})
        with t._create(out, resume=True, sync=sync, record=True, **options) as writer:
            t._write(writer)
            if writer.folder:
                writer.extra("config.json", b"{{}}")
            writer.commit()

    def killed_at(n, out):
        calls = 0
        def counted(call):
            def wrapper(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return wrapper
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        os.fsync = counted(lambda fd: None)  # it would not outlive this process, but takes time
        merge(out, True)

    def forked(work, *args):
        pid = os.fork()
        if not pid:
            try:
                work(*args)
                os._exit(0)
            except BaseException as exc:
                print(n, repr(exc))
                os._exit(1)
        return os.waitpid(pid, 0)[1]

    root, place = Path({root!r}), {place!r}
    old, whole = root / "old" / place, root / "whole" / place
    n = 0
    while True:
        n += 1
        folder = root / str(n)
        folder.mkdir()
        out = folder / place
        if {force}:
            shutil.copytree(old, out)
        status = forked(killed_at, n, out)
        if {force}:  # whole at any instant, under its name or beside it
            there = out if out.exists() else folder / f".{{place}}.partial" / "old"
            assert t._bytes(there) in (t._bytes(old), t._bytes(whole)), n
        if {keep}:  # never lost
            places = (out, folder / f".{{place}}.partial" / "old", folder / f"{{place}}.old")
            assert t._bytes(old) in [t._bytes(path) for path in places if path.exists()], n
        if status == 0:
            break
        assert status == signal.SIGKILL, status
        assert forked(merge, out, False) == 0, n
        if {keep}:
            assert t._bytes(folder / f"{{place}}.old") == t._bytes(old), n
            shutil.rmtree(folder / f"{{place}}.old")
        assert t._names(folder) == [place], (n, t._names(folder))
        assert t._bytes(out) == t._bytes(whole), n
        shutil.rmtree(folder)
    print("points", n - 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "force", "keep"),
    [
        *((place, False, False) for place in PLACES),
        ("m", True, False),
        ("m", True, True),
    ],
)
def test_killed_at_any_call_it_resumes_to_the_same_bytes(tmp_path, place, force, keep):
    with _create(tmp_path / "whole" / place, record=True) as out:
        _write(out)
        if out.folder:
            out.extra("config.json", b"{}")
        out.commit()
    if force:
        _older(tmp_path / "old" / place)
    code = BARE + KILLED.format(root=str(tmp_path), place=place, force=force, keep=keep)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        **{"capture_output": True, "text": True, "timeout": 120},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split("points")[1]) > 20


def test_a_killed_orbax_conversion_is_made_again(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    wanted = {name: about for name, about in WANTED.items() if name != "empty"}

    def stop(path, arrays, entries):
        (path.with_name("data.orbax-checkpoint-tmp") / "d").mkdir(parents=True)
        path.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orbax_folders, "write_folder", stop)
        with _create(tmp_path / "o", wanted=wanted, format="orbax") as out:
            _write(out, wanted)
            with pytest.raises(KeyboardInterrupt):
                out.commit()
    assert not (tmp_path / "o").exists()
    with _create(tmp_path / "o", wanted=wanted, format="orbax", resume=True) as out:
        assert out.finished == set(wanted)
        out.commit()
    found = load_checkpoint(tmp_path / "o")
    for name in wanted:
        np.testing.assert_array_equal(found[name], ARRAYS[name])
    assert _names(tmp_path) == ["o"]


def test_an_interrupt_while_files_are_closed_closes_none_twice(tmp_path, monkeypatch):
    closed, last = [], 0

    def interrupted(fd):
        os.close(fd)
        closed.append(fd)
        if len(closed) == last:
            raise KeyboardInterrupt

    for module in (writer, journal, files):
        monkeypatch.setattr(module, "os", SimpleNamespace(**vars(os) | {"close": interrupted}))
    while len(closed) >= last:  # at no file, at the first that is closed, ..., beyond the last
        out = tmp_path / str(last)
        closed.clear()
        with contextlib.suppress(KeyboardInterrupt), _create(out) as made:
            _write(made)
            made.commit()
        assert _bytes(out) == _bytes(tmp_path / "0")
        last += 1
    assert last > 5  # files of tensors, the journal, the lock


@pytest.mark.parametrize("lost", [slice(4096, 8192), slice(-3, None), slice(100, 101)])
def test_bytes_that_changed_are_written_again(tmp_path, lost):
    with _create(tmp_path / "m.safetensors") as out:
        _write(out)
        file = out.partial / "data" / "m.safetensors"
    data = bytearray(file.read_bytes())
    end = len(data) - ARRAYS["c"].nbytes - ARRAYS["b"].nbytes
    part = data[end - ARRAYS["a"].nbytes : end]
    assert part == ARRAYS["a"].tobytes()
    part[lost] = bytes(b ^ 255 for b in part[lost])
    data[end - len(part) : end] = part
    file.write_bytes(data)
    with _create(tmp_path / "m.safetensors", resume=True) as out:
        assert out.finished == set(ARRAYS) - {"a"}
        _write(out)
        out.commit()
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "m.safetensors")["a"], ARRAYS["a"])


def test_digest_tells_lost_swapped_and_changed_bytes():
    rng = np.random.default_rng(0)
    for size in (0, 1, 4095, 4096, 4097, 20_000):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        seen = {digest(data)}
        assert digest(data.copy()) in seen
        variants = [np.append(data, np.uint8(0))]
        if size > 8192:
            swapped = data.copy()
            swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
            variants.append(swapped)
        for at in rng.integers(0, size, 50 if size else 0):
            changed = data.copy()
            changed[at] ^= 1 << rng.integers(8)
            variants.append(changed)
        for page in range(0, size, 4096):
            zeros = data.copy()
            zeros[page : page + 4096] = 0
            variants.append(zeros)
        assert digest(data) not in {digest(variant) for variant in variants}


def test_what_is_not_whole_is_not_done(tmp_path):
    with _create(tmp_path / "m") as out:
        flat = ARRAYS["b"]
        out.write("b", flat[:10], 0)
        out.write("b", flat[20:], 20)
        with pytest.raises(CheckpointError, match="'b' is not whole: entries 10 to 20 of 5000"):
            out.done("b")
        out.write("b", flat[10:20], 10)
        out.done("b")
        with pytest.raises(CheckpointError, match="finished already"):
            out.write("b", flat[:1], 0)
        for args, message in (
            (("z", flat), "not a tensor of"),
            (("a", flat), "expected float32, got int16"),
            (("c", np.zeros(2001)), "entries 0 to 2001 of 2000"),
            (("c", np.zeros(1), -1), "entries -1 to 0 of 2000"),
        ):
            with pytest.raises(CheckpointError, match=message):
                out.write(*args)
        with pytest.raises(CheckpointError, match="not a tensor of this output"):
            out.done("z")
        out.abandon()
    assert _names(tmp_path) == []


def test_two_merges_to_one_output(tmp_path):
    with _create(tmp_path / "m") as out:
        _refused("being written by another process", tmp_path / "m", resume=True)
        _write(out)
        out.commit()
    _refused("exists already", tmp_path / "m")
    assert _names(tmp_path) == ["m"]


def test_an_output_of_ours_is_replaced_when_the_new_one_is_whole(tmp_path):
    out = tmp_path / "m"
    older = _older(out)
    _refused("exists already", out)
    with contextlib.suppress(ZeroDivisionError), _create(out, force=True) as new:
        _write(new, ["b"])
        raise ZeroDivisionError
    assert _bytes(out) == older
    with _create(out, force=True, resume=True, record=True) as new:
        assert new.finished == {"b"}
        _write(new)
        assert _bytes(out) == older
        new.commit()
    np.testing.assert_array_equal(load_checkpoint(out)["a"], ARRAYS["a"])
    assert not (out / "step").exists()
    assert _names(tmp_path) == ["m"]
    with _create(out, force=True, format="orbax", wanted={"z": (np.float32, (2,))}) as new:
        new.write("z", np.ones(2, np.float32))
        new.done("z")
        new.commit()
    assert load_checkpoint(out)["z"].tolist() == [1, 1]


def test_each_output_that_is_replaced_is_kept_on_request(tmp_path):
    older, kept = [_older(tmp_path / "m")], {"m", "m.old", "m.old-2"}
    for step in range(2):
        with _create(tmp_path / "m", force=True, keep_old=True, record=True) as new:
            _write(new)
            if new.folder:
                new.extra("step", str(step).encode())
            new.commit()
        older.append(_bytes(tmp_path / "m"))
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert [_bytes(tmp_path / name) for name in ("m.old", "m.old-2", "m")] == older


@pytest.mark.parametrize("at", [1, 2])
def test_the_old_output_has_its_name_again_if_the_new_one_never_gets_it(tmp_path, monkeypatch, at):
    out, calls = tmp_path / "m", []
    older = _older(out)

    def rename(a, b):
        calls.append(a)
        if len(calls) == at:
            raise KeyboardInterrupt
        os.rename(a, b)

    with _create(out, force=True) as new, monkeypatch.context() as patch:
        _write(new)
        patch.setattr(writer, "os", SimpleNamespace(**vars(os) | {"rename": rename}))
        with pytest.raises(KeyboardInterrupt):
            new.commit()
        assert out.exists() == (at == 1)
    assert _bytes(out) == older
    with _create(out, force=True, resume=True) as new:
        assert new.finished == {*ARRAYS}
        new.commit()
    assert _bytes(out).keys() != older.keys()
    assert _names(tmp_path) == ["m"]


def _behind_its_back(path, at=-1):
    """Changes one byte, and preserves the file's time."""
    about, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def _linked(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to("../elsewhere")


def _pipe(path):
    """Creates a pipe: opening it for reading waits forever."""
    path.unlink()
    os.mkfifo(path)
    os.utime(path, (0, 0))


WAYS = {
    "'notes' was added": lambda out: (out / "notes").write_text("mine"),
    "'step/notes' was added": lambda out: (out / "step" / "notes").write_text("mine"),
    "'empty' was added": lambda out: (out / "empty").mkdir(),
    "'step/state' in it was changed": lambda out: (out / "step" / "state").write_text("4321"),
    "'step/state' was removed": lambda out: (out / "step" / "state").unlink(),
    "'step' was removed": lambda out: (out / "step" / "state").unlink() or (out / "step").rmdir(),
    "'model.safetensors' in it was changed": lambda out: _behind_its_back(
        out / "model.safetensors"
    ),
    "'step/state' in it was changed ": lambda out: os.utime(out / "step" / "state", (2**32, 2**32)),
    "'model.safetensors' in it was changed ": lambda out: _linked(out / "model.safetensors"),
    "'step/state' in it was changed  ": lambda out: _pipe(out / "step" / "state"),
    "its record .* is damaged": lambda out: _behind_its_back(out / written.RECORD, 40),
    "it lacks sail-jax's record": lambda out: (out / written.RECORD).unlink(),
    "it lacks sail-jax's record ": lambda out: _linked(out / written.RECORD),
    "it is a link": lambda out: _linked(out),
    "it is not a folder": lambda out: _linked(out) or out.unlink() or out.write_bytes(b"mine"),
}


@pytest.mark.parametrize("said", WAYS)
def test_what_is_not_ours_or_was_changed_is_left_alone(tmp_path, said):
    out = tmp_path / "in" / "m"
    _older(out)
    WAYS[said](out)
    before = _bytes(tmp_path)
    _refused(rf"m is not replaced, because {said.strip()}", out, force=True)
    assert _bytes(tmp_path) == before
    assert not out.with_name(".m.partial").exists()


@pytest.mark.parametrize("closed", ["m", "step"])
def test_what_this_user_may_not_remove_is_left_alone(tmp_path, monkeypatch, closed):
    """Detected before any work, and not when the old output is removed."""
    older = _older(tmp_path / "m")
    access = lambda path, mode: Path(path).name != closed  # noqa: E731
    monkeypatch.setattr(written.os, "access", access)
    _refused(rf"{closed} may not be changed by this user", tmp_path / "m", force=True)
    assert _bytes(tmp_path / "m") == older


def test_what_changes_while_the_new_output_is_written_is_left_alone(tmp_path):
    older = _older(tmp_path / "m")
    with _create(tmp_path / "m", force=True) as new:
        _write(new)
        (tmp_path / "m" / "notes").write_text("mine")
        with pytest.raises(CheckpointError, match="'notes' was added"):
            new.commit()
    assert _bytes(tmp_path / "m") == older | {Path("notes"): b"mine"}


def _moved(path, victim):
    """A file or folder is moved elsewhere and replaced by a link."""
    path.rename(victim / "moved")
    path.symlink_to(victim / "moved")


SHARD = "data/model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda p, victim: _moved(p / SHARD, victim), "00003.safetensors is a link"),
        (lambda p, victim: (p / SHARD).unlink() or (p / SHARD).hardlink_to(victim / "file"),
         r"00003.safetensors has a second name \(a hard link\)"),
        (lambda p, victim: (p / "extras/config.json").symlink_to(victim / "file"),
         "config.json is a link"),
        (lambda p, victim: _moved(p / "data", victim), "data is a link"),
        (lambda p, victim: _moved(p, victim), ".m.partial is a link"),
        (lambda p, victim: _moved(p / "journal", victim), "journal is a link"),
        (lambda p, victim: p.chmod(0o777), ".m.partial can be written to by all users"),
    ],
)  # fmt: skip
def test_what_is_planted_beside_an_output_is_not_taken(tmp_path, plant, says):
    """Resuming would write through the link, into another user's file."""
    place, victim = tmp_path / "m", tmp_path / "victim"
    with _create(place) as out:
        _write(out, ["a"])
    victim.mkdir()
    (victim / "file").write_bytes(b"precious")
    plant(out.partial, victim)
    before = _bytes(victim)
    with pytest.raises(CheckpointError, match=f"{says}.*; remove .*/.m.partial") as error:
        _create(place, resume=True)
    assert "\n" not in str(error.value)
    assert _bytes(victim) == before


@pytest.mark.parametrize("whose", ["partial", "inside"])
def test_unfinished_work_of_another_user_is_not_taken(tmp_path, monkeypatch, whose):
    with _create(tmp_path / "m") as out:
        _write(out, ["a"])
    if whose == "partial":
        monkeypatch.setattr("sail_jax.disk._USER", lambda: os.geteuid() + 1)
    else:
        lstat = os.lstat
        other = SimpleNamespace(st_mode=0o100600, st_uid=os.geteuid() + 1)
        patched = lambda path: other if str(path).endswith("journal") else lstat(path)  # noqa: E731
        monkeypatch.setattr(os, "lstat", patched)
    _refused("belongs to another user, which no run leaves", tmp_path / "m", resume=True)


def test_an_output_has_the_usual_rights(tmp_path):
    """Its temporary folder is private to this user, which must not affect the output."""
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "file").write_text("")
    with _create(tmp_path / "m") as out:
        assert out.partial.stat().st_mode & 0o777 == 0o700
        out.extra("config.json", b"{}")
        _write(out)
        out.commit()
    folder, file = (path.stat().st_mode for path in (tmp_path / "usual", tmp_path / "usual/file"))
    assert (tmp_path / "m").stat().st_mode == folder
    assert {p.stat().st_mode for p in (tmp_path / "m").iterdir()} == {file}


def test_work_of_another_version_is_not_continued(tmp_path):
    """The output would be a mixture of two versions."""
    place, began = tmp_path / "m", {"sail-jax": "1.0", "jax": "0.10.1", "numpy": "2.0"}
    with _create(place, versions=began) as out:
        _write(out, ["a"])
    now = {"sail-jax": "1.1", "jax": "0.10.2", "numpy": "2.0"}
    message = "begun with sail-jax 1.0, jax 0.10.1, and this is sail-jax 1.1, jax 0.10.2; values"
    _refused(message, place, versions=now, resume=True)
    one = "begun with device of a version that is not noted, "
    _refused(one, place, versions={**began, "device": "cpu"}, resume=True)
    several = "begun with device, os of versions that are not noted, and this is device cpu, os 1;"
    _refused(several, place, versions={**began, "device": "cpu", "os": "1"}, resume=True)
    with _create(place, versions=began, resume=True) as out:
        assert out.finished == {"a"}


@pytest.mark.parametrize("place", PLACES)
def test_a_finished_output_is_compared_and_stays(tmp_path, place):
    place = tmp_path / place
    _make(place)
    before = _bytes(place)
    with _create(place, resume=True) as out:
        assert out.unchanged
        with pytest.raises(CheckpointError, match="4 tensors are unfinished"):
            out.commit()
        _write(out)
        out.commit()
    with _create(place, resume=True) as out:
        other = ARRAYS["c"].copy()
        other[-1] += 1
        with pytest.raises(CheckpointError, match="exists already with a different 'c'"):
            out.write("c", other)
    kinds = ({**WANTED, "d": (np.float32, ())}, {**WANTED, "c": (np.int64, ARRAYS["c"].shape)})
    for other in kinds:
        _refused("exists already", place, resume=True, wanted=other)
    if place.is_dir():
        for other in ({"format": "npz"}, {"format": "orbax"}, {"shard_bytes": 99}):
            _refused("exists already", place, resume=True, **other)
    assert _bytes(place) == before
    assert _names(tmp_path) == [place.name]


def test_an_empty_folder_is_taken_and_nothing_else(tmp_path):
    (tmp_path / "m").mkdir()
    with _create(tmp_path / "m") as out:
        _write(out)
        (tmp_path / "m" / "mine").write_text("precious")
        with pytest.raises(CheckpointError, match="has appeared meanwhile"):
            out.commit()
        (tmp_path / "m" / "mine").unlink()
        out.commit()
    (tmp_path / ".n.partial").mkdir()
    (tmp_path / ".n.partial" / "mine").write_text("precious")
    _refused("holds a file that no run leaves", tmp_path / "n")
    assert (tmp_path / ".n.partial" / "mine").read_text() == "precious"


def test_a_finished_output_that_was_removed_is_made_again(tmp_path):
    with _create(tmp_path / "m") as out:
        _write(out)
        out._remove = lambda: None  # killed before the tidying up
        out.commit()
    assert _names(tmp_path) == [".m.partial", "m"]
    with _create(tmp_path / "m", resume=True) as out:
        assert out.finished == set(ARRAYS)
        out._remove = lambda: None
        out.commit()
    before = _bytes(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    _make(tmp_path / "m")
    assert _bytes(tmp_path / "m") == before
    assert _names(tmp_path) == ["elsewhere", "m"]


@pytest.mark.parametrize("name", ["", ".hidden", "../x", "a/b", "a\0", "model.npz"])
def test_extras_are_plain_files(tmp_path, name):
    with _create(tmp_path / "m", format="npz") as out:
        with pytest.raises(CheckpointError, match=r"plain file name|file of tensors"):
            out.extra(name, b"")
        out.abandon()
    with _create(tmp_path / "m.npz") as out:
        with pytest.raises(CheckpointError, match="is one file"):
            out.extra("config.json", b"")
        out.abandon()


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_found_out_before_anything_is_computed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _full)
        with pytest.raises(CheckpointError, match=r"No space left.*; free some space and") as e:
            _create(tmp_path / "m")
        assert "kept" not in str(e.value)
    assert _names(tmp_path) == []
    huge = {"a": (np.float32, (2**50,))}
    _refused(r"No space .*needs 4503599\.6 GB more, .* GB more", tmp_path / "m", wanted=huge)
    assert _names(tmp_path) == []
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=100))
    _refused(r"needs [\d.]+ kB more, [\d.]+ kB more than are", tmp_path / "m")
    assert _names(tmp_path) == []


def test_a_disk_full_midway_keeps_what_is_finished(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with _create(tmp_path / "m") as out:
        _write(out, ["a"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _full)
            message = "cannot write 'b' to .*No space left.*finished tensors are kept.*resume=True"
            with pytest.raises(CheckpointError, match=message):
                _write(out, ["b"])
            with pytest.raises(CheckpointError, match="No space left") as error:
                save_checkpoint(tmp_path / "array.npz", {"a": np.ones(3)})
            assert "kept" not in str(error.value)
    with _create(tmp_path / "m", resume=True) as out:
        assert out.finished == {"a"}
        _write(out)
        monkeypatch.setattr(os, "fsync", _full)
        out._sync = True
        with pytest.raises(CheckpointError, match="No space left"):
            out.commit()
        monkeypatch.undo()
        out.commit()
    assert set(load_checkpoint(tmp_path / "m")) == set(ARRAYS)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_written_is_sent_to_the_disk_meanwhile(tmp_path, monkeypatch, fails):
    """The system reports a failed write once, to the first caller, so it must not be lost."""
    flushed = threading.Event()

    def flush(fd):
        flushed.set()
        if fails:
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(folders, "FLUSH", 1000)
    monkeypatch.setattr(folders, "_flush", flush)
    with _create(tmp_path / "m", sync=True) as out:
        _write(out)
        assert flushed.wait(20)  # not only at the end
        if fails:
            with pytest.raises(CheckpointError, match=r"cannot write .*m.*broken"):
                out.commit()
        else:
            out.commit()
    assert (tmp_path / "m").exists() != fails


def test_a_journal_line_that_is_cut_short_spoils_no_other(tmp_path, monkeypatch):
    with _create(tmp_path / "m") as out:
        _write(out, ["a"])
        write = os.write
        cut = iter([5])
        with monkeypatch.context() as patch:
            patch.setattr(
                *(journal.os, "write"),
                lambda fd, data: write(fd, data[: next(cut, None)]),
            )
            with pytest.raises(CheckpointError, match="the disk is full"):
                _write(out, ["b"])
        _write(out, ["c"])
    with _create(tmp_path / "m", resume=True) as out:
        assert out.finished == {"a", "c"}
        out.abandon()


@pytest.mark.slow
def test_mutated_journals_never_change_the_output(tmp_path, monkeypatch):
    """120 mutations: refused with one sentence, or resumed to the right bytes."""
    _make(tmp_path / "whole")
    whole, rng = _bytes(tmp_path / "whole"), np.random.default_rng(0)
    with _create(tmp_path / "m") as out:
        _write(out, ["a", "b"])
        partial = out.partial
    kept = {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    outcomes, messages = set(), []
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for _ in range(120):
        for path, data in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (partial / "extras").mkdir(exist_ok=True)
        data = bytearray(kept[partial / "journal"])
        match rng.integers(4):
            case 0:
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            case 1:
                del data[rng.integers(len(data)) :]
            case 2:
                at = rng.integers(len(data))
                data[at:at] = rng.integers(0, 256, 9, dtype=np.uint8).tobytes()
            case 3:
                data += data[rng.integers(len(data)) :]
        (partial / "journal").write_bytes(data)
        try:
            with _create(tmp_path / "m", resume=True) as out:
                outcomes.add(len(out.finished))
                _write(out)
                out.commit()
        except CheckpointError as exc:
            outcomes.add("refused")
            messages.append(str(exc))
            continue
        assert _bytes(tmp_path / "m") == whole
        for path in (tmp_path / "m").iterdir():
            path.unlink()
        (tmp_path / "m").rmdir()
    assert outcomes == {0, 1, 2, "refused"}
    assert not any("\n" in message for message in messages)


def test_a_forged_journal_is_not_believed(tmp_path):
    """Lines with correct checksums, and with pieces that overlap, are huge, or are misplaced."""
    with _create(tmp_path / "m") as out:
        partial = out.partial
    head = (partial / "journal").read_bytes()
    for pieces in ([[0, 2**63, 1]], [[0, 0, 0]] * 9, [[0, 3000, 0]], [[5, 3000, 0]], [[-1, 1, 1]]):
        line = journal._line({"name": "a", "pieces": pieces})
        strangers = journal._line({"name": "zz", "pieces": []}) + journal._line({"x": 1})
        (partial / "journal").write_bytes(head + line + strangers)
        with _create(tmp_path / "m", resume=True) as out:
            assert not out.finished


def test_save_leaves_nothing_behind_when_it_fails(tmp_path):
    with pytest.raises(CheckpointError, match="plain file name"):
        save_checkpoint(tmp_path / "m", ARRAYS, extras={"../x": b""})
    assert _names(tmp_path) == []
    with pytest.raises(CheckpointError, match="holds object"):
        save_checkpoint(tmp_path / "m", {"a": np.array([None])})
    assert _names(tmp_path) == []


@pytest.mark.slow
def test_killed_while_it_writes_at_random_moments(tmp_path):
    """The real signal from outside, while several threads write; then the same bytes."""
    code = textwrap.dedent(BARE) + textwrap.dedent(f"""
        import threading
        from pathlib import Path
        import numpy as np
        from sail_jax.checkpoint.output.writer import create
        wanted = {{f"t{{i}}": (np.float32, (1 << 19,)) for i in range(40)}}
        with create(Path({str(tmp_path / "m")!r}), wanted, fingerprint="x", shard_bytes=30_000_000,
                    resume=True, sync=False) as out:
            print("go", flush=True)
            def work(k):
                for i in range(k, 40, 2):
                    if f"t{{i}}" not in out.finished:
                        flat = np.arange(1 << 19, dtype=np.float32) + i
                        for start in range(0, flat.size, 1 << 17):
                            out.write(f"t{{i}}", flat[start : start + (1 << 17)], start)
                        out.done(f"t{{i}}")
            threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
            [t.start() for t in threads]; [t.join() for t in threads]
            out.commit()
    """)
    rng, killed = np.random.default_rng(0), 0
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        try:
            child.wait(float(rng.uniform(0.005, 0.03)))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            killed += 1
        child.stdout.close()
        if (tmp_path / "m").exists():
            break
    if not (tmp_path / "m").exists() or (tmp_path / ".m.partial").exists():
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert killed
    found = load_checkpoint(tmp_path / "m")
    for i in range(40):
        np.testing.assert_array_equal(found[f"t{i}"], np.arange(1 << 19, dtype=np.float32) + i)
