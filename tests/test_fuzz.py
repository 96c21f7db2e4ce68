"""Whatever is read, mutated: the right answer or an error of the documented kind, in bounded time
and memory.

`pytest tests/test_fuzz.py --fuzz N` tries N inputs for each target, `-rP` shows what became of
them; a failure names its seed, which `-k TARGET --fuzz 1 --fuzz-seed S` tries alone.
"""

import collections
import contextlib
import io
import json
import math
import shutil
import zipfile

import flax.serialization
import numpy as np
import pytest
import safetensors.numpy
from fuzzing import Mutations, Wrong, called, fuzz, little_memory, refused, told

from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.checkpoint.formats.files import CheckpointError
from tests.test_checkpoint_torch import FakeTorch, Storage, archive

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int16),
    "c/d": np.ones((), np.float64),
}


def _same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _loaded(path):
    """What is read of a checkpoint; None if it is refused."""
    try:
        return load_checkpoint(path, allow_pickle=True)
    except CheckpointError as error:
        refused(error)
        return None


def _agrees(got, data, peer):
    """Wrong unless the format's own library reads the same of these bytes; if it refuses them and
    those of the tensors are as they were, unless what is read is what was written."""
    try:
        want = peer(data)
    except Exception:
        if not all(x.tobytes() in data for x in ARRAYS.values()):
            return
        want = ARRAYS
    if got.keys() != want.keys() or not all(_same(got[name], want[name]) for name in got):
        raise Wrong(f"expected {want}, read as {got}")


def _flat(node, at=()):
    if isinstance(node, dict):
        return {k: x for key, part in node.items() for k, x in _flat(part, (*at, key)).items()}
    return {"/".join(map(str, at)): node} if isinstance(node, np.ndarray | np.generic) else {}


def _npz(data):
    with np.load(io.BytesIO(data)) as file:
        return {name: file[name] for name in file.files}


PEERS = {
    "safetensors": safetensors.numpy.load,
    "npz": _npz,
    "msgpack": lambda data: _flat(flax.serialization.msgpack_restore(data)),
}


def _of_format(name, *, packed=False):
    """A file of one format, its structure mutated or all of it."""

    def make(folder, monkeypatch):
        path = folder / f"model.{name}"
        save_checkpoint(path, ARRAYS)
        if packed:
            np.savez_compressed(path, allow_pickle=False, **ARRAYS)
        data = path.read_bytes()

        def attempt(mutations):
            mutated = mutations.bytes_of(data)
            path.write_bytes(mutated)
            got = _loaded(path)
            if got is not None:
                _agrees(got, mutated, PEERS[name])
            return got is not None

        return attempt

    return make


def _safetensors_header(folder, monkeypatch):
    path = folder / "model.safetensors"
    save_checkpoint(path, ARRAYS)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])

    def attempt(mutations):
        text = mutations.json_of(header)
        mutated = len(text).to_bytes(8, "little") + text + data[end:]
        path.write_bytes(mutated)
        got = _loaded(path)
        if got is not None:
            _agrees(got, mutated, safetensors.numpy.load)
        return got is not None

    return attempt


def _safetensors_index(folder, monkeypatch):
    save_checkpoint(folder, ARRAYS, shard_bytes=20)
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())

    def attempt(mutations):
        index.write_bytes(mutations.json_of(tree))
        got = _loaded(folder)
        if got is not None:
            _agrees(got, b"", lambda _: ARRAYS)
        return got is not None

    return attempt


def _chunked_msgpack(folder, monkeypatch):
    """Arrays in chunks, as flax writes those above 2^30 bytes."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 8)
    data = flax.serialization.msgpack_serialize({"a": ARRAYS["a"], "b": ARRAYS["b"]})
    path = folder / "m.msgpack"

    def attempt(mutations):
        mutated = mutations.bytes_of(data)
        path.write_bytes(mutated)
        got = _loaded(path)
        if got is not None:
            _agrees(got, mutated, PEERS["msgpack"])
        return got is not None

    return attempt


def _orbax(folder, monkeypatch):
    """Orbax keeps checksums: of what it reads nothing may differ from what was written, but names,
    which have none."""
    save_checkpoint(folder / "right", ARRAYS, format="orbax")
    path = folder / "mutated"

    def attempt(mutations):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "right", path)
        file = mutations.one(sorted(x for x in path.rglob("*") if x.is_file()))
        file.write_bytes(mutations.bytes_of(file.read_bytes()))
        got = _loaded(path)
        for name in () if got is None else got.keys() & ARRAYS.keys():
            if not _same(got[name], ARRAYS[name]):
                raise Wrong(f"{file.name}: {ARRAYS[name]!r} was written, read as {got[name]!r}")
        return got is not None

    return attempt


def _torch(folder, monkeypatch):
    """A pickle in its archive: what is read of the one storage as float32 is of its values."""
    fake = FakeTorch(monkeypatch)
    storage = Storage("0", "Float", np.arange(24, dtype=np.float32))
    tree = collections.OrderedDict(a=fake.tensor(storage, (4, 6)), b=fake.tensor(storage, (3,)))
    data, path = fake.pickled(tree), folder / "m.bin"

    def attempt(mutations):
        whole = mutations.often(0.3)
        kind = zipfile.ZIP_DEFLATED if mutations.often(0.3) else zipfile.ZIP_STORED
        archive(path, data if whole else mutations.bytes_of(data, 2), [storage], kind)
        if whole:
            path.write_bytes(mutations.bytes_of(path.read_bytes()))
        got = _loaded(path)
        for name, x in ({} if got is None or whole else got).items():
            if x.dtype == np.float32 and not np.isin(x, storage.array).all():
                raise Wrong(f"{name} is read as {x!r}")
        return got is not None

    return attempt


READERS = {
    "safetensors": (_of_format("safetensors"), 1000),
    "safetensors header": (_safetensors_header, 1000),
    "safetensors index": (_safetensors_index, 500),
    "npz": (_of_format("npz"), 500),
    "packed npz": (_of_format("npz", packed=True), 500),
    "msgpack": (_of_format("msgpack"), 1000),
    "chunked msgpack": (_chunked_msgpack, 500),
    "torch": (_torch, 500),
    "orbax": (_orbax, 5),
}
THREADED = {"orbax"}


@pytest.fixture
def tried(request, tmp_path, monkeypatch):
    """Tries a target, and fails with what it did wrong."""

    def tried(name, make, few):
        folder = tmp_path / "work"
        folder.mkdir()
        monkeypatch.chdir(folder)
        attempt = make(folder, monkeypatch)
        options = request.config.option
        count = few if options.fuzz is None else options.fuzz
        with contextlib.nullcontext() if name in THREADED else little_memory():
            tally = fuzz(name, attempt, range(options.fuzz_seed, options.fuzz_seed + count))
        print(tally)
        assert not tally.faults, f"{tally}\n{told(tally.faults)}"
        assert tally.refused or count < 100

    return tried


@pytest.mark.parametrize("name", READERS)
def test_readers(name, tried):
    tried(name, *READERS[name])
