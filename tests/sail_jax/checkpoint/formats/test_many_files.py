"""Checkpoints in more files than a process may have open, and in more tensors than are usual."""

import contextlib
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sail_jax import architectures, disk
from sail_jax.basis.axes import Patterns, path_pattern
from sail_jax.checkpoint.formats import files, folders
from sail_jax.checkpoint.formats.files import CheckpointError, File
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint
from sail_jax.checkpoint.output.writer import create, save_checkpoint


@pytest.fixture
def few():
    """The process may open only ten more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def shards(tmp_path):
    arrays = {f"w{i}": np.full(4, i, np.float32) for i in range(40)}
    save_checkpoint(tmp_path / "m", arrays, shard_bytes=16)
    return tmp_path / "m"


def read(tensor):
    out = np.zeros(4, np.float32)
    tensor.read(out)
    return out.tolist()


def test_more_shards_than_files_may_be_open(shards, few):
    with open_checkpoint(shards) as checkpoint:
        for _ in range(2):
            for i in range(40):
                assert read(checkpoint.tensors[f"w{i}"]) == [i] * 4
        checkpoint.check_unchanged()
    with pytest.raises(CheckpointError, match="was closed"):
        read(checkpoint.tensors["w0"])


def test_threads_share_few_files(shards, monkeypatch):
    monkeypatch.setattr(files, "OPEN", pool := files.Pool(3))
    wrong = []
    with open_checkpoint(shards) as checkpoint:

        def work(seed):
            for i in np.random.default_rng(seed).integers(0, 40, 150).tolist():
                if read(checkpoint.tensors[f"w{i}"]) != [i] * 4:
                    wrong.append(i)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        assert len(pool._free) <= 3
        assert not pool._used
    assert not wrong
    assert not pool._free


def test_a_file_is_opened_again_only_as_it_was(shards, monkeypatch):
    monkeypatch.setattr(files, "OPEN", files.Pool(0))
    with open_checkpoint(shards) as checkpoint:
        path = checkpoint.tensors["w3"].source
        os.link(path, f"{path}.old")
        data = (shards / path).read_bytes()
        os.unlink(path)
        (shards / path).write_bytes(data)
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            read(checkpoint.tensors["w3"])


def test_too_many_open_files_name_the_remedy(shards, few):
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(shards, os.O_RDONLY))
        with pytest.raises(CheckpointError, match=r"Too many open files \(`ulimit -n` shows"):
            File(shards / "model-00001-of-00040.safetensors")
        with pytest.raises(disk.StoreError, match="`ulimit -n` shows the limit of open files"):
            disk.write_atomic(shards / "x", b"")
    finally:
        for fd in taken:
            os.close(fd)


def test_an_output_in_more_shards_than_files_may_be_open(tmp_path, few):
    arrays = {f"w{i}": np.full(4, i, np.float32) for i in range(100)}
    with create(
        *(tmp_path / "m", {n: (x.dtype, x.shape) for n, x in arrays.items()}),
        fingerprint="x",
        shard_bytes=16,
        sync=False,
    ) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
            writer.done(name)
        writer.commit()
    found = load_checkpoint(tmp_path / "m")
    assert {n: x.tolist() for n, x in found.items()} == {n: x.tolist() for n, x in arrays.items()}


def test_files_are_flushed_wherever_they_are_open(tmp_path, monkeypatch):
    """A file is flushed because of what was written to it, not because of its former descriptor."""
    monkeypatch.setattr(files, "OPEN", files.Pool(0))
    monkeypatch.setattr(folders, "FLUSH", 16)
    flushed, done = [], threading.Event()

    def flush(fd):
        flushed.append(os.stat(fd).st_ino)
        done.set()

    monkeypatch.setattr(folders, "_flush", flush)
    wanted = {n: (np.dtype(np.uint8), (16,)) for n in "ab"}
    with create(tmp_path / "m", wanted, fingerprint="x", shard_bytes=16) as writer:
        for name, start in (("a", 0), ("b", 0), ("a", 8)):
            assert not flushed
            writer.write(name, np.zeros(8, np.uint8), start)
        assert done.wait(20)
        first, _ = sorted((writer.partial / "data").glob("*.safetensors"))
        assert flushed == [first.stat().st_ino]


def test_a_file_that_was_replaced_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "OPEN", files.Pool(0))
    with create(tmp_path / "m", {"w": (np.uint8, (4,))}, fingerprint="x") as writer:
        path = writer.partial / "data" / "model.safetensors"
        os.rename(path, tmp_path / "other")
        path.write_bytes((tmp_path / "other").read_bytes())
        with pytest.raises(CheckpointError, match=r"model\.safetensors was replaced meanwhile"):
            writer.write("w", np.ones(4, np.uint8))


def test_many_patterns_match_what_each_does():
    rng, found = np.random.default_rng(0), 0
    parts = ["a", "b", "/", ".", "*", "{i}", "{a,b}", "**", "{a.b,c}"]
    for _ in range(300):
        texts = ["".join(rng.choice(parts, rng.integers(1, 5))) for _ in range(4)]
        # Patterns with many wildcards are rejected.
        texts = [text for text in texts if text.count("*") + text.count("{") < 3]
        patterns = Patterns(texts)
        for _ in range(4):
            path = "".join(rng.choice(list("ab/."), rng.integers(0, 6)))
            each = [(k, path_pattern(text).fullmatch(path)) for k, text in enumerate(texts)]
            want = [(k, match.groupdict()) for k, match in each if match]
            assert patterns.matches(path) == want
            found += len(want)
    assert found > 100


def test_a_draft_takes_time_in_proportion_to_its_tensors():
    """Four times as many tensors of one module took 16 times as long, and many minutes in all."""
    import cProfile

    def calls(n):
        params = {f"a{k}": np.broadcast_to(np.float32(0), (4, 4)) for k in range(n)}
        profile = cProfile.Profile()
        profile.runcall(architectures.draft, params)
        return sum(entry.callcount for entry in profile.getstats())

    calls(10)
    assert calls(800) < 6 * calls(200)
