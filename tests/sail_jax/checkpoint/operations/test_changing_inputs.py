"""Inputs that are written while they are read, or between a run and its resumption: the output uses
one version of each, or there is no output and the error contains the file.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from known_networks import GOLDEN, model

from sail_jax.checkpoint import RunOptions, load_checkpoint, merge_checkpoints, save_checkpoint
from sail_jax.checkpoint.formats.files import CheckpointError, File, sample
from sail_jax.checkpoint.operations import running
from sail_jax.checkpoint.operations.aligning import align_checkpoints
from sail_jax.checkpoint.operations.comparing import compare_checkpoints
from sail_jax.checkpoint.operations.growing import grow_checkpoint

NAME = "model.safetensors"


def merged(folder, **run):
    run = RunOptions(threads=1, **run)
    merge_checkpoints([folder / "a", folder / "b"], folder / "out", run=run)


def grown(folder, **run):
    run = RunOptions(threads=1, **run)
    grow_checkpoint(folder / "a", folder / "out", {"width": 2}, certify=False, run=run)


def aligned(folder, **run):
    run = RunOptions(threads=1, **run)
    align_checkpoints(folder / "b", folder / "a", folder / "out", certify=False, run=run)


def compared(folder):
    compare_checkpoints([folder / "a", folder / "b"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The files of a small network twice, as bytes."""
    folder, config = tmp_path_factory.mktemp("inputs"), GOLDEN["llama"]["config"]
    files = {}
    for name, factor in {"a": 1.0, "b": 2.0}.items():
        params = {k: factor * np.asarray(x) for k, x in model("llama").params.items()}
        extras = {"config.json": json.dumps(config).encode()}
        save_checkpoint(folder / name, params, extras=extras)
        files[name] = {p.name: p.read_bytes() for p in (folder / name).iterdir()}
    return files


@pytest.fixture
def laid(inputs, tmp_path):
    def lay(name):
        for side, files in inputs.items():
            (tmp_path / name / side).mkdir(parents=True)
            for file, data in files.items():
                (tmp_path / name / side / file).write_bytes(data)
        return tmp_path / name

    return lay


def negate(file, keep_time):
    """Negates every value in place, with the same size and optionally the same time."""
    before, data = file.stat(), np.frombuffer(file.read_bytes(), np.uint8).copy()
    data[8 + int(data[:8].view(np.uint64)[0]) + 3 :: 4] ^= 0x80
    with file.open("r+b") as stream:
        stream.write(data)
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def entries_read(monkeypatch, act=lambda: None, before=0):
    """The reads that are made from now on; acts once, before that one."""
    fill, reads = File.fill, []

    def counted(self, view, offset):
        reads.append(offset)
        if len(reads) == before:
            act()
        fill(self, view, offset)

    monkeypatch.setattr(File, "fill", counted)
    return reads


@pytest.mark.slow
@pytest.mark.parametrize("keep_time", [True, False])
@pytest.mark.parametrize("work", [compared, merged, grown, aligned])
def test_written_while_it_is_read(laid, monkeypatch, keep_time, work):
    with monkeypatch.context() as patch:
        reads = entries_read(patch)
        work(laid("whole"))
    assert len(reads) > 20
    for moment in range(len(reads) // 4, len(reads) + 1, len(reads) // 4):
        folder = laid(str(moment))
        file = folder / "a" / NAME
        with monkeypatch.context() as patch:
            entries_read(patch, lambda file=file: negate(file, keep_time), moment)
            with pytest.raises(CheckpointError) as error:
                work(folder)
        assert f"{file} was changed while it was read" in str(error.value)
        assert {p.name for p in folder.iterdir()} == {"a", "b"}


def replace(file):
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("act", [replace, Path.unlink])
def test_replaced_or_removed_while_it_is_read(laid, monkeypatch, act):
    folder = laid("one")
    entries_read(monkeypatch, lambda: act(folder / "a" / NAME), 20)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        merged(folder)
    assert not (folder / "out").exists()


def test_written_through_a_memory_map(laid, monkeypatch):
    """The system may update the time only later, so the values themselves are compared."""
    folder = laid("mapped")
    file = folder / "a" / NAME

    def write():
        negate(file, True)
        monkeypatch.setattr("sail_jax.checkpoint.formats.open._version", lambda about: 0)

    entries_read(monkeypatch, write, 20)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        merged(folder)


def interrupted(work, folder):
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(folder, progress=stop)


@pytest.mark.slow
@pytest.mark.parametrize("work", [merged, grown, aligned])
def test_changed_before_it_is_resumed(laid, work):
    folder = laid("one")
    interrupted(work, folder)
    negate(folder / "a" / NAME, keep_time=True)
    with pytest.raises(CheckpointError, match="an input has changed since"):
        work(folder, resume=True)


def test_an_upgrade_before_it_is_resumed(laid, monkeypatch):
    """Masks and ranks may have changed, so part of the output would be outdated."""
    folder = laid("one")
    interrupted(merged, folder)
    began = running.versions()
    monkeypatch.setattr(running, "versions", lambda: {**began, "jax": "9.9"})
    monkeypatch.setattr(running.random_bits, "STREAM", 0)
    message = (
        f"begun with jax {began['jax']}, random bits stream 1, and this is jax 9.9, "
        "random bits stream 0; "
    )
    with pytest.raises(CheckpointError, match=message):
        merged(folder, resume=True)
    assert not (folder / "out").exists()


def test_touched_links_and_rights_change_nothing(laid):
    """The effects of a backup on a file between two runs are not considered a change."""
    whole, folder = laid("whole"), laid("two")
    merged(whole)
    interrupted(merged, folder)
    (folder / "a" / NAME).chmod(0o600)
    os.link(folder / "a" / NAME, folder / "backup")
    merged(folder, resume=True)
    want = load_checkpoint(whole / "out")
    for name, array in load_checkpoint(folder / "out").items():
        assert array.tobytes() == want[name].tobytes()


def test_a_neighbour_may_change(laid, monkeypatch):
    """An example is a log next to the tensors, which is not read."""
    folder = laid("log")
    entries_read(monkeypatch, lambda: (folder / "a" / "train.log").write_text("x"), 20)
    merged(folder)


def test_samples_see_every_block_of_small_files_and_some_of_large(tmp_path):
    path = tmp_path / "x"
    rng = np.random.default_rng(0)
    for size in (0, 1, 4095, 4097, 1 << 20):
        data = rng.integers(0, 256, size, np.uint8)
        path.write_bytes(data.tobytes())
        before = sample(path, size)
        for at in rng.integers(0, size, 20 if size else 0):
            other = data.copy()
            other[at] ^= 1
            path.write_bytes(other.tobytes())
            assert sample(path, size) != before
    size = 5 << 20
    path.write_bytes(bytes(size))
    before = sample(path, size)
    for start in rng.integers(0, size - 24 * 1024, 20):  # 256 blocks: one begins in every 20 KiB
        data = np.zeros(size, np.uint8)
        data[start : start + 24 * 1024] = 1
        path.write_bytes(data.tobytes())
        assert sample(path, size) != before
