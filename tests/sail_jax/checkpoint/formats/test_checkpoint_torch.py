"""PyTorch's files, made by hand, are read without PyTorch; anything else is rejected."""

import collections
import json
import pickle
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from torch_files import KINDS, Call, FakeTorch, Storage, archive

from sail_jax.checkpoint.formats import torch_pickles
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint


@pytest.fixture
def fake(monkeypatch):
    return FakeTorch(monkeypatch)


def _load(path):
    return load_checkpoint(path, allow_pickle=True)


def refused(path, message):
    with pytest.raises(CheckpointError, match=message):
        _load(path)


FOUR = Storage("0", "Float", np.zeros(4, np.float32))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("protocol", [2, 4])
def test_every_type_of_entry(tmp_path, fake, compression, protocol):
    rng = np.random.default_rng(0)
    arrays = {kind: rng.integers(0, 2, (3, 5)).astype(dtype) for kind, dtype in KINDS.items()}
    storages = [Storage(str(i), kind, array) for i, (kind, array) in enumerate(arrays.items())]
    tree = collections.OrderedDict((s.kind, fake.tensor(s, s.array.shape)) for s in storages)
    tree._metadata = collections.OrderedDict(version=1)
    fake.save(tmp_path / "m.bin", tree, storages, compression, protocol)
    found = _load(tmp_path / "m.bin")
    assert list(found) == list(arrays)
    for kind, array in arrays.items():
        assert found[kind].dtype == array.dtype
        np.testing.assert_array_equal(found[kind], array)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_views_of_one_storage(tmp_path, fake, compression):
    data = np.arange(24, dtype=np.float32)
    storage = Storage("0", "Float", data)
    tree = {
        "tied": fake.tensor(storage, (4, 6)),
        "also": fake.tensor(storage, (4, 6)),
        "transposed": fake.tensor(storage, (6, 4), (1, 6)),
        "column": fake.tensor(storage, (4,), (6,), 2),
        "row": fake.tensor(storage, (1, 6), (99, 1), 6),
        "expanded": fake.tensor(storage, (2, 3), (0, 1), 3),
        "scalar": fake.tensor(storage, (), (), 23),
        "empty": fake.tensor(storage, (0, 5), (5, 1), 0),
        "parameter": Call(
            *(fake.utils._rebuild_parameter, fake.tensor(storage, (3,)), True),
            collections.OrderedDict(),
        ),
    }
    fake.save(tmp_path / "m.bin", tree, [storage], compression)
    grid = data.reshape(4, 6)
    expected = {
        **{"tied": grid, "also": grid, "transposed": grid.T, "column": grid[:, 2]},
        **{"row": grid[1:2], "expanded": np.stack([data[3:6]] * 2), "scalar": data[23]},
        **{"empty": np.zeros((0, 5), np.float32), "parameter": data[:3]},
    }
    found = _load(tmp_path / "m.bin")
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert found["tied"] is found["also"]
    assert not np.shares_memory(found["tied"], found["parameter"])
    with open_checkpoint(tmp_path / "m.bin", allow_pickle=True) as checkpoint:
        out = np.zeros(5, np.float32)
        checkpoint.tensors["transposed"].read(out, 3)
        np.testing.assert_array_equal(out, grid.T.reshape(-1)[3:8])


@pytest.mark.parametrize("name", [name for name in DTYPES if name.startswith("float8")])
def test_newer_types_by_untyped_storage(tmp_path, fake, name):
    raw = np.arange(8, dtype=np.uint8)
    storage = Storage("0", fake.storage.UntypedStorage, raw)
    dtype = type(name, (), {"__module__": "torch"})
    setattr(fake.torch, name, dtype)
    rebuild = fake.utils._rebuild_tensor_v3
    tree = {
        key: Call(rebuild, storage, 2, *shape, False, collections.OrderedDict(), dtype, None)
        for key, shape in {"w": ((2, 3), (3, 1)), "t": ((3, 2), (1, 3))}.items()
    }
    fake.save(tmp_path / "m.pt", tree, [storage])
    expected = raw[2:].view(DTYPES[name]).reshape(2, 3)
    found = _load(tmp_path / "m.pt")
    np.testing.assert_array_equal(found["w"], expected, strict=True)
    np.testing.assert_array_equal(found["t"], expected.T, strict=True)


def test_big_endian(tmp_path, fake):
    storage = Storage("0", "Float", np.arange(4, dtype=">f4"))
    tree = {"w": fake.tensor(storage, (4,)), "t": fake.tensor(storage, (2,), (2,))}
    fake.save(tmp_path / "m.bin", tree, [storage], byteorder="big")
    np.testing.assert_array_equal(_load(tmp_path / "m.bin")["w"], np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(_load(tmp_path / "m.bin")["t"], np.float32([0, 2]))


def test_nested_checkpoints_and_shards(tmp_path, fake):
    a, b = (Storage("0", "Float", np.full(2, x, np.float32)) for x in (1.0, 2.0))
    tree = {"model": {"w": fake.tensor(a, (2,))}, "step": 7, "name": "x", "rates": [0.1, None]}
    fake.save(tmp_path / "nested.pt", tree, [a])
    assert list(_load(tmp_path / "nested.pt")) == ["model.w"]
    (tmp_path / "nested.pt").rename(tmp_path / "nested.pth.tar")
    assert list(_load(tmp_path / "nested.pth.tar")) == ["model.w"]
    fake.save(tmp_path / "trainer.pt", {"state_dict": tree["model"], "x": (True, -5)}, [a])
    assert list(_load(tmp_path / "trainer.pt")) == ["w"]
    folder = tmp_path / "m"
    folder.mkdir()
    fake.save(folder / "pytorch_model-1.bin", {"a": fake.tensor(a, (2,))}, [a])
    fake.save(folder / "pytorch_model-2.bin", {"b": fake.tensor(b, (2,))}, [b])
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = _load(folder)
    np.testing.assert_array_equal(found["b"], b.array)
    with pytest.raises(CheckpointError, match="PyTorch pickle, which is read only with"):
        open_checkpoint(folder)


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def _evil():
    import os

    glob = "c{}\n{}\n".format
    ordered, entry = b"ccollections\nOrderedDict\n", b"\x80\x02}X\x01\x00\x00\x00a%ss.".__mod__
    return {
        "os.system": pickle.dumps({"w": Evil(os.system, "touch pwned")}, 2),
        "eval": pickle.dumps({"w": Evil(eval, "1")}, 2),
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        "inst": b"\x80\x02(S'touch pwned'\nios\nsystem\n.",
        "obj": b"\x80\x02(" + glob("os", "system").encode() + b"S'x'\no.",
        "newobj": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
        "extension": b"\x80\x02\x82\x01.",
        "called twice": b"\x80\x02ccollections\nOrderedDict\n)R)R.",
        "global as data": b"\x80\x02ccollections\nOrderedDict\n.",
        "state of a global": b"\x80\x02ccollections\nOrderedDict\n}b.",
        "wrong arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02tR.",
        "giant memo": b"\x80\x02}r\xff\xff\xff\x7f]r\xfe\xff\xff\x7f.",
        "giant bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
        "giant bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        "holds itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        "tuple key": b"\x80\x02})K\x01s.",
        "a key nested deep": b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",
        "a key that doubles": b"\x80\x02})%sK\x01s."
        % b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)),
        "a long size": entry(glob("torch", "Size").encode() + b"](" + b"K\x01" * 65 + b"e\x85R"),
        "state of a function": entry(ordered + b"}X\x0c\x00\x00\x00__defaults__)sb"),
        "slots of a function": entry(ordered + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b"),
        "items of a function": entry(ordered + b"K\x00K\x01s"),
        "a function of no arguments": entry(ordered + b"]\x85R"),
        "a negative length": b"\x80\x02T\xff\xff\xff\xff.",
        "empty": b"",
        "no end": b"\x80\x02}",
        "underflow": b"\x80\x02s.",
        "no mark": b"\x80\x02}u.",
        "a list": b"\x80\x02].",
    }


@pytest.mark.parametrize("name", _evil())
def test_hostile_pickles_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    archive(tmp_path / "m.bin", _evil()[name])
    refused(tmp_path / "m.bin", r"m\.bin (is refused: the pickle uses|is damaged)")
    assert not (tmp_path / "pwned").exists()


def test_the_forbidden_name_is_told(tmp_path):
    archive(tmp_path / "m.bin", _evil()["os.system"])
    refused(tmp_path / "m.bin", r"the pickle uses '(posix|os)\.system'")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((5,), (1,), 0),
        ((2, 2), (3, 1), 0),
        ((1,), (1,), 4),
        ((2,), (2**61,), 0),
        ((2**40,), (1,), 0),
    ],
)
def test_views_beyond_the_storage(tmp_path, fake, shape, strides, offset):
    fake.save(tmp_path / "m.bin", {"w": fake.tensor(FOUR, shape, strides, offset)}, [FOUR])
    refused(tmp_path / "m.bin", "'w' reaches beyond the 16 bytes of its storage")


@pytest.mark.parametrize(("shape", "strides"), [((-1,), (1,)), ((2,), (-1,)), ((2,), (1, 1))])
def test_impossible_views(tmp_path, fake, shape, strides):
    fake.save(tmp_path / "m.bin", {"w": fake.tensor(FOUR, shape, strides)}, [FOUR])
    refused(tmp_path / "m.bin", "impossible offset, shape or stride")


def test_views_that_repeat_what_is_stored(tmp_path, fake):
    """Views may repeat entries like an expanded mask, but not fill the memory: 2 EiB from 4
    bytes, and windows of 4 KB that each start one entry later."""
    storage = Storage("0", "Float", np.zeros(2048, np.float32))
    fake.save(tmp_path / "m.bin", {"w": fake.tensor(storage, (1 << 20, 2), (0, 1))}, [storage])
    assert _load(tmp_path / "m.bin")["w"].shape == (1 << 20, 2)
    for shape, strides in (((2**29, 2**30), (0, 0)), ((1024, 1024, 1024), (1, 1, 0))):
        fake.save(tmp_path / "m.bin", {"w": fake.tensor(storage, shape, strides)}, [storage])
        refused(tmp_path / "m.bin", r"'w' repeats .* bytes until they are [0-9]{10}")


@pytest.mark.parametrize("strides", [None, (1, 2)])
def test_many_views_of_one_storage(tmp_path, fake, strides, monkeypatch):
    """A layer that is used 48 times is read; 10^5 views of a small file may fill any memory."""
    monkeypatch.setattr(torch_pickles, "_REPEATED", 0)
    storage = Storage("0", "Float", np.arange(4096, dtype=np.float32))
    for n in (48, 1000):
        tree = {f"w{k}": fake.tensor(storage, (2, 2000), strides, k % 96) for k in range(n)}
        fake.save(tmp_path / "m.bin", tree, [storage])
        if n == 48:
            assert _load(tmp_path / "m.bin")["w47"].flat[0] == 47
    refused(tmp_path / "m.bin", r"m\.bin: its tensors are views of 16\.4 kB and")


def test_packed_views_in_order_unpack_once(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(torch_pickles, "_REPEATED", 0)
    data = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    storage, opened = Storage("0", "Float", data), []
    whole = zipfile.ZipFile.open
    monkeypatch.setattr(
        zipfile.ZipFile,
        "open",
        lambda *args, **more: opened.append(args[1]) or whole(*args, **more),
    )
    for order in (range(500), range(499, -1, -1)):
        tree = {f"w{k}": fake.tensor(storage, (4,), (1,), 4 * k) for k in order}
        fake.save(tmp_path / "m.bin", tree, [storage], zipfile.ZIP_DEFLATED)
        if order[0] == 0:
            opened.clear()
            found = _load(tmp_path / "m.bin")
            assert np.array_equal(np.concatenate([*found.values()]), data)
            assert opened.count("archive/data/0") == 1
    refused(tmp_path / "m.bin", r"views of 8\.0 kB and would need 2\.0 MB of reads")


@pytest.mark.slow
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_view_takes_the_memory_that_it_says(tmp_path, fake, compression):
    """A column of 8 MB in a storage of 32 MB, plus some MB for the unpacked blocks."""
    storage = Storage("0", "Float", np.zeros(8 << 20, np.float32))
    tree = {"w": fake.tensor(storage, (1024, 2), (2048, 1), 4 << 20)}
    fake.save(tmp_path / "m.bin", tree, [storage], compression)
    with open_checkpoint(tmp_path / "m.bin", allow_pickle=True) as checkpoint:
        tensor = checkpoint.tensors["w"]
        tracemalloc.start()
        tensor.read(np.empty(1, np.float32))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (1023 * 2048 + 2) * 4 == tensor.needs <= peak < tensor.needs + (8 << 20)


def test_functions_of_many_arguments_and_long_paths(tmp_path, fake):
    tensor = fake.tensor(FOUR, (4,))
    for extra in (8, 16):
        parameter = Call(fake.utils._rebuild_parameter, tensor, *range(extra))
        fake.save(tmp_path / "m.bin", {"w": parameter}, [FOUR])
        if extra == 8:
            assert list(_load(tmp_path / "m.bin")) == ["w"]
    refused(tmp_path / "m.bin", "called with wrong arguments")
    fake.save(tmp_path / "m.bin", {"k" * 4000: {"k" * 96: tensor}}, [FOUR])
    refused(tmp_path / "m.bin", "a path has more than 4096 characters")


def test_names_that_are_no_text(tmp_path, fake):
    fake.save(tmp_path / "m.bin", {"\udc80": fake.tensor(FOUR, (4,))}, [FOUR])
    refused(tmp_path / "m.bin", r"m\.bin is damaged: .*surrogates not allowed")


def test_what_is_no_checkpoint_of_today(tmp_path, fake):
    storage = Storage("7", "Float", np.zeros(4, np.float32))
    fake.save(tmp_path / "m.bin", {"w": fake.tensor(storage, (4,))}, [])
    refused(tmp_path / "m.bin", "the bytes of 'w' are missing")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))
    refused(tmp_path / "old.bin", r"before 1\.6 is not supported")
    fake.save(tmp_path / "m.bin", {}, [], zipfile.ZIP_DEFLATED, byteorder="b" * 99)
    data, packed = (tmp_path / "m.bin").read_bytes(), zlib.compress(b"b" * 99, wbits=-15)
    (tmp_path / "m.bin").write_bytes(data.replace(packed, b"\xff" * len(packed)))
    refused(tmp_path / "m.bin", r"what 'archive/byteorder' unpacks to is damaged")
    with zipfile.ZipFile(tmp_path / "zip.bin", "w") as file:
        file.writestr("x", "y")
    refused(tmp_path / "zip.bin", r"holds no data\.pkl")


@pytest.mark.parametrize("unit", [b"]", b"}\x94", b"(", b"\x95" + bytes(8)])
def test_a_small_pickle_does_not_fill_the_memory(tmp_path, monkeypatch, unit):
    """Lists, memo entries, marks and frames take 70 bytes each, but compress to almost none."""
    monkeypatch.setattr(torch_pickles._Stream, "left", 10_000)
    archive(tmp_path / "m.bin", b"\x80\x04}" + unit * 100_000, (), zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    refused(tmp_path / "m.bin", r"m\.bin is damaged: its pickle has more than 83886")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
