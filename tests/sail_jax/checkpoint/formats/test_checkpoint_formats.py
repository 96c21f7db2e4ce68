"""Checkpoints written in any format are read back bit for bit, here and by the format's own
library.
"""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from sail_jax.checkpoint.formats import msgpack_files
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint
from sail_jax.checkpoint.formats.table import FORMATS, layouts, suffixes
from sail_jax.checkpoint.operations.merging import merge_checkpoints
from sail_jax.checkpoint.operations.running import RunOptions
from sail_jax.checkpoint.output.writer import create, save_checkpoint

WRITTEN = ["safetensors", "orbax", "msgpack", "npz"]
SHAPES = {"scalar": (), "empty": (0, 3), "row": (5,), "deep/er/cube": (2, 3, 4)}
PLACES = ("folder", "shards", "one.safetensors", "one.npz", "one.msgpack")


def _arrays(dtype, shapes=SHAPES, seed=0):
    """Arrays of random bits, NaN and infinities included; booleans are 0 or 1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    high = 2 if dtype.kind == "b" else 256
    return {
        name: rng.integers(0, high, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        .view(dtype)
        .reshape(shape)
        for name, shape in shapes.items()
    }


def _same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def _save(place, path, arrays, **how):
    save_checkpoint(path / place, arrays, shard_bytes=64 if place == "shards" else 10**9, **how)
    return path / place


@pytest.mark.parametrize("place", PLACES)
def test_round_trip(tmp_path, place):
    arrays = {}
    for dtype in DTYPES:
        arrays |= {f"{dtype}/{name}": x for name, x in _arrays(dtype).items()}
    if place in ("folder", "shards", "one.safetensors"):
        with pytest.raises(CheckpointError, match="cannot hold complex128"):
            _save(place, tmp_path, arrays)
        assert not list(tmp_path.iterdir())
        arrays = {name: x for name, x in arrays.items() if x.dtype != np.complex128}
    _same(load_checkpoint(_save(place, tmp_path, arrays)), arrays)


@pytest.mark.parametrize("place", PLACES)
def test_parts_are_read_where_they_lie(tmp_path, place):
    arrays = _arrays("bfloat16", {"a": (7, 11), "b": (13,)})
    with open_checkpoint(_save(place, tmp_path, arrays)) as checkpoint:
        for name, array in arrays.items():
            tensor = checkpoint.tensors[name]
            assert tensor.name == name
            for start, count in ((0, 1), (3, 9), (array.size - 2, 2), (array.size, 0)):
                out = np.zeros(count, array.dtype)
                tensor.read(out, start)
                assert out.tobytes() == array.reshape(-1)[start : start + count].tobytes()
            for out, start in (
                (np.zeros(2, array.dtype), array.size - 1),
                (np.zeros(2, array.dtype), -1),
                (np.zeros(2, np.float32), 0),
                (np.zeros((2, 2), array.dtype), 0),
                (np.zeros(4, array.dtype)[::2], 0),
            ):
                with pytest.raises(ValueError, match=name):
                    tensor.read(out, start)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensors["a"].read(np.zeros(1, array.dtype))


def test_safetensors_reads_ours_and_we_read_theirs(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    arrays = _arrays("float32", {"w": (3, 4), "s": ()}) | _arrays("int8", {"b": (3,)})
    save_checkpoint(tmp_path / "ours.safetensors", arrays, metadata={"by": "us"})
    found = load_file(tmp_path / "ours.safetensors")
    _same({name: found[name] for name in arrays}, arrays)
    with safe_open(tmp_path / "ours.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
        assert np.isnan(file.get_tensor("w")).sum() == np.isnan(arrays["w"]).sum()
    save_file(arrays, tmp_path / "theirs.safetensors", {"by": "them"})
    with open_checkpoint(tmp_path / "theirs.safetensors") as checkpoint:
        assert checkpoint.metadata == {"by": "them"}
    found = load_checkpoint(tmp_path / "theirs.safetensors")
    _same({name: found[name] for name in arrays}, arrays)


def test_shards_and_their_index(tmp_path):
    arrays = _arrays("float32", {"a": (4,), "big": (40,), "b": (4,), "c": (3,), "d": (2,)})
    save_checkpoint(tmp_path / "m", arrays, shard_bytes=35, extras={"config.json": b"{}"})
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    shard = "model-0000{}-of-00004.safetensors".format
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in arrays.values())}
    assert index["weight_map"] == dict(
        zip(arrays, (shard(1), shard(2), shard(3), shard(3), shard(4)), strict=True)
    )
    for name in set(index["weight_map"].values()):
        raw = (tmp_path / "m" / name).read_bytes()
        assert int.from_bytes(raw[:8], "little") % 8 == 0
    with open_checkpoint(tmp_path / "m") as checkpoint:
        assert list(checkpoint.tensors) == list(arrays)
        assert set(checkpoint.extras) == {"config.json"}
    _same(load_checkpoint(tmp_path / "m/model.safetensors.index.json"), arrays)


def test_numpy_reads_ours_and_we_read_theirs(tmp_path):
    arrays = _arrays("float64", {"a/b": (3, 4), "s": ()}) | _arrays("int16", {"c": (3,)})
    save_checkpoint(tmp_path / "ours.npz", arrays, metadata={"by": "us"})
    with np.load(tmp_path / "ours.npz", allow_pickle=False) as found:
        _same(dict(found), arrays)
    with open_checkpoint(tmp_path / "ours.npz") as checkpoint:
        assert checkpoint.metadata == {"by": "us"}
    theirs = arrays | {
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "big_endian": np.arange(5, dtype=">i4"),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
    }
    expected = theirs | {"big_endian": np.arange(5, dtype="<i4")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "theirs.npz", **theirs)
        _same(load_checkpoint(tmp_path / "theirs.npz"), expected)
        with open_checkpoint(tmp_path / "theirs.npz") as checkpoint:
            out = np.zeros(5, np.float64)
            checkpoint.tensors["fortran"].read(out, 2)
            np.testing.assert_array_equal(out, np.arange(2.0, 7.0))


@pytest.mark.parametrize("chunk", [2**30, 40])
def test_msgpack_is_flax_byte_for_byte(tmp_path, monkeypatch, chunk):
    flax = pytest.importorskip("flax.serialization")
    monkeypatch.setattr(msgpack_files, "CHUNK", chunk)
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", chunk)
    wide = {f"layer_{i}/kernel": (i,) for i in range(1, 20)}
    arrays = _arrays("float32", {**SHAPES, "long": (300, 300), **wide})
    save_checkpoint(tmp_path / "ours.msgpack", arrays)
    _same(load_checkpoint(tmp_path / "ours.msgpack"), arrays)
    tree = {}
    for name, array in arrays.items():
        *above, last = name.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    theirs = flax.msgpack_serialize(tree, in_place=True)
    assert (tmp_path / "ours.msgpack").read_bytes() == theirs
    numbers = {"step": 7, "far": 2**64 - 1, "back": -3, "rate": 0.5, "on": True, "c": 1j}
    state = {"params": [np.ones(3), np.float32(2)], "name": "x", "z": None, **numbers}
    (tmp_path / "theirs.msgpack").write_bytes(flax.msgpack_serialize(state))
    expected = {"params/0": np.ones(3), "params/1": np.float32(2)}
    expected |= {name: np.asarray(number) for name, number in numbers.items()}
    _same(
        dict(sorted(load_checkpoint(tmp_path / "theirs.msgpack").items())),
        dict(sorted(expected.items())),
    )


def test_a_chunked_tensor_is_read_across_its_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(msgpack_files, "CHUNK", 40)
    array = np.arange(50, dtype=np.float32).reshape(5, 10)
    save_checkpoint(tmp_path / "m.msgpack", {"a": array})
    with open_checkpoint(tmp_path / "m.msgpack") as checkpoint:
        for start in range(50):
            out = np.zeros(min(23, 50 - start), np.float32)
            checkpoint.tensors["a"].read(out, start)
            np.testing.assert_array_equal(out, array.reshape(-1)[start : start + 23])


def test_chunks_in_a_list_stay_apart_as_in_flax(tmp_path, monkeypatch):
    flax = pytest.importorskip("flax.serialization")
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", 8)
    chunks = flax.msgpack_restore(flax.msgpack_serialize({"a": np.arange(4.0)}, in_place=True))
    assert chunks["a"].shape == (4,)  # put together, where it is in dictionaries alone
    halves = {"0": np.arange(2.0), "1": np.arange(2.0, 4.0)}
    divided = {"__msgpack_chunked_array__": True, "shape": {"0": 4}, "chunks": halves}
    data = flax.msgpack_serialize({"b": [divided]})
    (tmp_path / "m.msgpack").write_bytes(data)
    assert flax.msgpack_restore(data)["b"][0].keys() == divided.keys()
    expected = {"b/0/__msgpack_chunked_array__": np.asarray(True)}
    expected |= {f"b/0/chunks/{key}": half for key, half in halves.items()}
    _same(load_checkpoint(tmp_path / "m.msgpack"), expected | {"b/0/shape/0": np.asarray(4)})


def test_orbax_reads_ours(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    arrays = _arrays("int8", {"odd": (3,)})  # what follows lies at an odd place of the stage
    arrays |= _arrays("bfloat16", {"a/b": (3, 4), "model.layers.0.weight": (5,), "s": ()})
    save_checkpoint(tmp_path / "o", arrays, format="orbax", extras={"README.md": b"hello"})
    loaded = load_checkpoint(tmp_path / "o")
    _same({name: loaded[name] for name in arrays}, arrays)
    assert set(loaded) == set(arrays)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((tmp_path / "o").absolute())
    assert set(found) == {"a", "model.layers.0.weight", "s", "odd"}
    assert np.asarray(found["a"]["b"]).tobytes() == arrays["a/b"].tobytes()
    assert (tmp_path / "o/README.md").read_bytes() == b"hello"
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


@pytest.mark.parametrize(
    ("names", "format", "message"),
    [
        (["a", "a/b"], "msgpack", "'a/b' lies below 'a'"),
        (["a/b", "a"], "msgpack", "'a' is a tensor, and others lie below it"),
        (["a.b", "a/b"], "orbax", "the same path to orbax"),
        ([""], "safetensors", "not a valid name"),
        (["\udc80"], "safetensors", "expected a name and a dtype"),
        (["a\0"], "npz", "not a valid name"),
    ],
)
def test_names_a_format_cannot_hold(tmp_path, names, format, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "x", dict.fromkeys(names, np.ones(1)), format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "how", "message"),
    [
        ("x.npz", {"format": "safetensors"}, "cannot hold the format safetensors"),
        ("x", {"format": "gguf"}, "expected one of"),
        ("x", {"shard_bytes": 0}, "shard_bytes"),
        ("x.msgpack", {"metadata": {"a": "b"}}, "cannot store metadata"),
        ("x.npz", {"metadata": {"a": "b" * 70_000}}, "does not fit"),
    ],
)
def test_impossible_outputs(tmp_path, out, how, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / out, {"a": np.ones(1)}, **how)
    assert not list(tmp_path.iterdir())


def test_the_bytes_do_not_depend_on_the_order_or_the_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    arrays = _arrays("float16", {f"t{i}": (37 * (i % 5), 11) for i in range(23)})
    wanted = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    for place in ("a", "b", "a.npz", "b.npz", "a.msgpack", "b.msgpack"):
        jobs = [(n, s) for n, a in arrays.items() for s in range(0, a.size, 97)]
        workers = 1
        if place.startswith("b"):
            np.random.default_rng(1).shuffle(jobs)
            workers = 4
        with create(tmp_path / place, wanted, fingerprint="x", shard_bytes=5000) as out:

            def write(job, out=out):
                name, start = job
                out.write(name, arrays[name].reshape(-1)[start : start + 97], start)

            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(write, jobs))
                list(pool.map(out.done, sorted(arrays, reverse=place == "b")))
            out.commit()
        _same(load_checkpoint(tmp_path / place), arrays)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    for end in ("npz", "msgpack"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_dtypes_that_numpy_lacks_are_named_where_it_would_read_the_output(tmp_path, dtype):
    save_checkpoint(tmp_path / "a", {"w": np.ones(2, dtype)})
    said = {}
    for out in ("out.npz", "out.msgpack"):
        done = merge_checkpoints([tmp_path / "a"], tmp_path / out, method="passthrough")
        said[out] = [note for note in done.notes if "np.load returns raw bytes" in note]
    assert [len(notes) for notes in said.values()] == [int(dtype is not np.float16), 0]
    assert np.load(tmp_path / "out.npz")["w"].dtype.kind == ("V" if said["out.npz"] else "f")


def test_every_format_has_one_row():
    assert list(layouts()) == WRITTEN
    assert len(suffixes()) == sum(len(format.files) for format in FORMATS.values())
    for name, format in FORMATS.items():
        assert format.name == name
        assert bool(format.files) == (format.read_file is not None)
    with pytest.raises(CheckpointError, match=f"{str(WRITTEN)[1:-1]}; got 'bin'"):
        RunOptions(format="bin")
