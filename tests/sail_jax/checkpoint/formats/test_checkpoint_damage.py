"""Damaged, inconsistent and hostile checkpoints raise a one-line error that contains the file."""

import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile

import flax.serialization
import numpy as np
import pytest

from sail_jax import disk
from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import CheckpointError, LoadedTensor
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint
from sail_jax.checkpoint.output.writer import save_checkpoint

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int16),
    "c/d": np.ones((), np.float64),
}


def _entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def _raw(header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(_entry()).encode(),) * 2)
HEADERS = {
    "empty file": (b"", "truncated"),
    "no header": (b"\0" * 7, "truncated"),
    "giant length": (_raw({}, length=2**64 - 1), "claims 18446744073709551615 bytes"),
    "length beyond the file": (_raw({}, length=99), "claims 99 bytes"),
    "not an object": (_raw(b"[]"), "not a JSON object"),
    "not JSON": (_raw(b"{]"), "damaged"),
    "not Unicode": (_raw(b'{"\xff":1}'), "damaged"),
    "a surrogate": (_raw(b'{"\\ud800":1}'), "damaged"),
    "deep": (_raw(b'{"a":' + b"[" * 100_000), "damaged"),
    "NaN": (_raw(b'{"a":NaN}'), "NaN is not a number"),
    "giant number": (_raw(b'{"a":' + b"9" * 10_000 + b"}"), "damaged"),
    "twice": (_raw(TWICE), "the key 'a' is repeated"),
    "beyond the file": (_raw({"a": _entry(shape=(4,), offsets=(0, 16))}), "truncated"),
    "short of the file": (_raw({"a": _entry()}, b"\0" * 9), "truncated or damaged"),
    "negative": (_raw({"a": _entry(offsets=(-8, 0))}), "bytes -8 to 0"),
    "backwards": (_raw({"a": _entry(offsets=(8, 0))}), "bytes 8 to 0"),
    "giant offsets": (_raw({"a": _entry(offsets=(0, 2**70))}), "bytes 0 to"),
    "overlap": (
        _raw({"a": _entry(), "b": _entry(shape=(1,), offsets=(4, 8))}),
        "'b' overlaps the tensor before it",
    ),
    "same place": (_raw({"a": _entry(), "b": _entry()}), "'b' overlaps"),
    "gap": (_raw({"a": _entry(offsets=(4, 12))}, b"\0" * 12), "'a' leaves a gap"),
    "wrong size": (_raw({"a": _entry(shape=(3,))}), "'a' has 8 bytes, .* need 12"),
    "negative shape": (_raw({"a": _entry(shape=(-1, -2))}), "non-negative"),
    "giant shape": (_raw({"a": _entry(shape=(2**40, 2**40))}), "no array can have"),
    "giant empty": (_raw({"a": _entry(shape=(0, 2**70), offsets=(0, 0))}, b""), "no array"),
    "many axes": (_raw({"a": _entry(shape=(1,) * 99)}), "no array can have"),
    "boolean shape": (_raw({"a": _entry(shape=(True, 2))}), "non-negative"),
    "real shape": (_raw({"a": _entry(shape=(2.0,))}), "non-negative"),
    "real offsets": (_raw({"a": _entry(offsets=(0, 8.0))}), "damaged"),
    "unknown type": (_raw({"a": _entry("F4")}), "has the unsupported dtype 'F4'"),
    "unknown key": (_raw({"a": _entry(x=1)}), "is described by"),
    "no offsets": (
        _raw({"a": {"dtype": "F32", "shape": [2]}}),
        "without dtype, shape or offsets",
    ),
    "no description": (_raw({"a": 7}), "without dtype, shape or offsets"),
    "metadata of numbers": (_raw({"__metadata__": {"a": 1}, "a": _entry()}), "text by name"),
    "metadata with a surrogate": (
        _raw(b'{"__metadata__":{"x":"\\ud800"},"a":' + json.dumps(_entry()).encode() + b"}"),
        "damaged",
    ),
    "a name of several lines": (_raw({"a\r\n\x1b[1m": 7}), r"'a\\r\\n\\x1b\[1m' without dtype"),
    "metadata a text": (_raw({"__metadata__": "", "a": _entry()}), "text by name"),
    "metadata a list": (_raw({"__metadata__": [1], "a": _entry()}), "text by name"),
}


def not_opened(path, message, read=open_checkpoint):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def refused(path, data, message, read=open_checkpoint):
    """Checks that a file of these bytes raises a one-line error that contains the file."""
    path.write_bytes(data)
    assert str(path) in not_opened(path, message, read)


@pytest.mark.parametrize("fault", HEADERS)
def test_safetensors_headers(tmp_path, fault):
    refused(tmp_path / "m.safetensors", *HEADERS[fault])


def test_what_is_right_stays_right(tmp_path):
    """The unchanged template can be read, so the errors are caused by the faults."""
    (tmp_path / "m.safetensors").write_bytes(_raw({"a": _entry(), "__metadata__": {"x": "y"}}))
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "m.safetensors")["a"], [0, 0])


@pytest.fixture
def shards(tmp_path):
    save_checkpoint(tmp_path / "m", ARRAYS, shard_bytes=20, extras={"config.json": b"{}"})
    return tmp_path / "m"


def _index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(change(index)))


def _weights(change):
    return lambda index: {**index, "weight_map": change(index["weight_map"])}


INDEXES = {
    "no map": (lambda index: {}, "is missing or wrong"),
    "an empty map": (_weights(lambda w: {}), "is missing or wrong"),
    "a list": (lambda index: [], "expected a JSON object"),
    "numbers": (_weights(lambda w: {**w, "a": 7}), "is missing or wrong"),
    "parent": (_weights(lambda w: {**w, "a": "../x.safetensors"}), "not a plain file name"),
    "absolute": (_weights(lambda w: {**w, "a": "/etc/passwd"}), "not a plain file name"),
    "below": (_weights(lambda w: {**w, "a": "x/y.safetensors"}), "not a plain file name"),
    "dots": (_weights(lambda w: {**w, "a": ".."}), "not a plain file name"),
    "empty": (_weights(lambda w: {**w, "a": ""}), "not a plain file name"),
    "nul": (_weights(lambda w: {**w, "a": "x\0.safetensors"}), "not a plain file name"),
    "missing": (_weights(lambda w: {**w, "a": "x.safetensors"}), "x.safetensors: No such file"),
    "another format": (_weights(lambda w: {**w, "a": "config.json"}), "format is not read"),
    "a pickle": (_weights(lambda w: {**w, "a": "x.bin"}), "x.bin|No such file"),
    "too many": (
        _weights(lambda w: {**w, "z": w["a"]}),
        "-00001-of-00002.safetensors: 'z' is missing, which the index places there",
    ),
    "too few": (
        _weights(lambda w: {n: f for n, f in w.items() if n != "a"} | {"z": w["a"]}),
        "'z' is missing, which the index places there",
    ),
    "swapped": (
        _weights(lambda w: {**w, "a": w["b"], "b": w["a"]}),
        "'a' is missing, which the index places there",
    ),
}


@pytest.mark.parametrize("fault", INDEXES)
def test_indexes(shards, fault):
    change, message = INDEXES[fault]
    _index(shards, change)
    not_opened(shards, message)


def test_shards_that_disagree_with_their_index(shards):
    first = shards / "model-00001-of-00002.safetensors"
    save_checkpoint(shards / "x.safetensors", {**ARRAYS})
    os.replace(shards / "x.safetensors", first)
    not_opened(shards, r"00001-of-00002.* 'b' is missing in the index")
    (shards / "model.safetensors.index.json").unlink()
    not_opened(shards, r"'b' is also in .*00001")


def test_shards_that_are_missing(shards):
    """Tests an index without an entry for it, and no index."""
    first = shards / "model-00001-of-00002.safetensors"
    lost = r"model.* has 1 of the 2 files model-\*-of-00002\.safetensors"
    _index(shards, _weights(lambda w: {n: file for n, file in w.items() if file != first.name}))
    not_opened(shards, lost.replace("model.*", "index.json"))
    (shards / "model.safetensors.index.json").unlink()
    assert set(load_checkpoint(shards)) == set(ARRAYS)
    assert set(load_checkpoint(first)) == {"a"}
    first.unlink()
    not_opened(shards, lost.replace("model.*", "m"))


def test_a_member_of_two_names(tmp_path):
    """The name in the archive's directory differs from that in the member's header."""
    _npz(tmp_path / "m.npz", a=_npy(np.zeros(2)))
    data = (tmp_path / "m.npz").read_bytes()
    data = b"b.npy".join(data.rsplit(b"a.npy", 1))
    refused(tmp_path / "m.npz", data, r"'b\.npy' has another name where its bytes lie")


def test_an_extension_that_flax_does_not_write(tmp_path):
    """An array with a damaged type is not silently skipped."""
    file = tmp_path / "m.msgpack"
    save_checkpoint(file, ARRAYS)
    data = file.read_bytes()
    for kind, named in ((0, "an array"), (2, "a complex number"), (4, "an array"), (233, "an arr")):
        changed = data.replace(b"\x01\x93", bytes([kind, 0x93]), 1)
        refused(file, changed, f"'a' is not {named}")
    file.write_bytes(flax.serialization.msgpack_serialize({"z": 1 + 2j, "x": np.float32(3)}))
    assert load_checkpoint(file) == {"x": 3, "z": 1 + 2j}


def test_truncated_while_open(shards):
    file = shards / "model-00001-of-00002.safetensors"
    with open_checkpoint(shards) as checkpoint:
        os.truncate(file, file.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"00001-of-00002.* is truncated"):
            checkpoint.tensors["a"].read(np.zeros(6, np.float32))


def test_links(shards, tmp_path):
    file = shards / "model-00001-of-00002.safetensors"
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(file, tmp_path / "elsewhere" / "x")
    file.symlink_to(moved)
    not_opened(shards, "a link that leads out of the checkpoint's folder")
    file.unlink()
    shutil.move(moved, shards / "within")
    file.symlink_to("within")
    assert set(load_checkpoint(shards)) == set(ARRAYS)
    (shards / "tokenizer.json").symlink_to("/etc/passwd")
    not_opened(shards, r"tokenizer\.json is a link that leads out")
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(CheckpointError):
        open_checkpoint(shards)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    not_opened(tmp_path / "m.safetensors", "not a plain file")
    not_opened(tmp_path / "x", "does not exist")
    (tmp_path / "e").mkdir()
    not_opened(tmp_path / "e", r"holds no checkpoint .*: found nothing")
    (tmp_path / "e/readme.txt").write_text("x")
    not_opened(tmp_path / "e", r"found readme\.txt")
    not_opened(tmp_path / "e/readme.txt", "expected a folder or a file of type")


def test_which_file_of_a_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for i, name in enumerate(("x.npz", "flax_model.msgpack", "one.safetensors")):
        save_checkpoint(folder / name, {"w": np.full(2, float(i))})
        assert load_checkpoint(folder)["w"][0] == i
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert load_checkpoint(folder, allow_pickle=True)["w"][0] == 2
    save_checkpoint(folder / "two.safetensors", {"v": np.zeros(2)})
    assert set(load_checkpoint(folder)) == {"w", "v"}
    save_checkpoint(folder / "model.safetensors", {"z": np.zeros(2)})
    assert set(load_checkpoint(folder)) == {"z"}
    only = tmp_path / "only"
    only.mkdir()
    (only / "pytorch_model.bin").write_bytes(b"")
    not_opened(only, "read only with allow_pickle=True")
    for name in ("a.npz", "b.npz"):
        save_checkpoint(tmp_path / "two" / name, {"w": np.zeros(1)})
    not_opened(tmp_path / "two", r"several checkpoints: choose one of a\.npz, b\.npz")


def _npz(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)


def _npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_npy(np.array([1, "x"], object)), "Python objects, which are never unpickled"),
        (_npy(np.array(["x"])), "it has the unsupported dtype"),
        (_npy(np.zeros(2, [("x", "f4")])), "unsupported dtype"),
        (_npy(np.zeros(2, "V1")), "unsupported dtype"),
        (_npy(np.zeros(2))[:-1], "does not fill its"),
        (_npy(np.zeros(2)).replace(b"(2,)", b"(9,)"), "does not fill its"),
        (_npy(np.zeros(2)).replace(b"(2,)", b"(-2,)"), "damaged|non-negative"),
        (_npy(np.zeros(2)).replace(b"{", b"["), "damaged"),
        (b"\x93NUMPY\x03\x00", "version"),
        (b"", "damaged"),
    ],
)
def test_npz_members(tmp_path, data, message):
    _npz(tmp_path / "m.npz", a=data)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m.npz")


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    """A member that unpacks to more or less than stated, or states more than is possible."""
    array = np.zeros(1 << 20, np.uint8)
    _npz(tmp_path / "m.npz", a=_npy(array))
    raw = (tmp_path / "m.npz").read_bytes()
    size = struct.pack("<I", len(_npy(array)))
    assert raw.count(size) == 2
    bomb = raw.replace(size, struct.pack("<I", 2**32 - 9))
    refused(tmp_path / "m.npz", bomb, "cannot unpack to 4294967287 bytes")
    for told in (len(_npy(array)) // 2, len(_npy(array)) + 1):
        shape = told - 128
        lying = _npy(array).replace(b"(1048576,)", f"({shape},)".encode().ljust(10))
        _npz(tmp_path / "m.npz", a=lying)
        raw = (tmp_path / "m.npz").read_bytes()
        raw = raw.replace(struct.pack("<I", len(lying)), struct.pack("<I", told))
        refused(tmp_path / "m.npz", raw, "unpacks to", load_checkpoint)


def test_a_giant_configuration_is_not_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    assert config_of({"config.json": tmp_path / "config.json"}) == {}
    os.truncate(tmp_path / "config.json", 1 << 40)  # a sparse file, without blocks on disk
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON: .* has 10995"):
        config_of({"config.json": tmp_path / "config.json"})


def test_members_in_the_same_bytes(tmp_path):
    """A member that the directory lists under two names, and one that overlaps the next."""
    _npz(tmp_path / "m.npz", a=_npy(np.zeros(9)), b=_npy(np.zeros(9)))
    raw = (tmp_path / "m.npz").read_bytes()
    at = raw.rindex(b"PK\1\2") + 42  # the start of b according to the directory
    both = r"'a\.npy' and 'b.npy' lie in the same bytes"
    refused(tmp_path / "m.npz", raw[:at] + bytes(4) + raw[at + 4 :], both)
    size = raw.index(b"PK\1\2") + 20  # of a, packed
    grown = struct.pack("<I", struct.unpack("<I", raw[size : size + 4])[0] + 1)
    refused(tmp_path / "m.npz", raw[:size] + grown + raw[size + 4 :], both)


def test_a_directory_that_lost_a_member(tmp_path):
    """The directory has no checksum: without its first entry, it would be a smaller checkpoint."""
    save_checkpoint(tmp_path / "m.npz", ARRAYS)
    raw = (tmp_path / "m.npz").read_bytes()
    first = raw.index(b"PK\1\2")
    second = raw.index(b"PK\1\2", first + 1)
    for kept, count in ((raw[second:-22], 2), (b"", 0)):
        sizes = struct.pack("<HHII", count, count, len(kept), first)
        end = b"PK\5\6" + bytes(4) + sizes + bytes(2)
        data = raw[:first] + kept + end
        refused(tmp_path / "m.npz", data, r"the bytes 0 to \d+ belong to no member")


@pytest.mark.slow
def test_a_packed_tensor_takes_the_memory_that_it_says(tmp_path):
    """64 MB, plus some MB for the unpacked blocks."""
    np.savez_compressed(tmp_path / "m.npz", a=np.zeros(16 << 20, ">f4"))
    with open_checkpoint(tmp_path / "m.npz") as checkpoint:
        tensor = checkpoint.tensors["a"]
        tracemalloc.start()
        tensor.read(np.empty(1, tensor.dtype))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert tensor.needs == 64 << 20 <= peak < tensor.needs + (8 << 20)


@pytest.mark.slow
def test_msgpack_of_many_values_and_of_long_paths(tmp_path):
    file = tmp_path / "m.msgpack"
    many = b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 20) + b"\1" * (1 << 20)
    shape = b"\xdd" + struct.pack(">I", 999) + b"\1" * 999
    blob = b"\x81\xa1a\xc8" + struct.pack(">H", len(shape)) + b"\1" + shape
    for data in (many, blob):
        refused(file, data, "more than 1048576 keys and values")
    long = b"\x81\xda\x0f\xff" + b"k" * 4095 + b"\x81\xa1a\1"
    with pytest.raises(CheckpointError, match="a path has more than 4096 characters: 'kkk"):
        file.write_bytes(long) and open_checkpoint(file)
    file.write_bytes(b"\x81\xa1a\xdd" + struct.pack(">I", 1 << 10) + b"\1" * (1 << 10))
    assert load_checkpoint(file) == {f"a/{i}": 1 for i in range(1 << 10)}
    count = (1 << 16) + 1
    data = b"\x81\xa1a\xdd" + struct.pack(">I", count) + b"\1" * count
    refused(file, data, "more than 65536 plain numbers")


def test_text_of_any_length_is_not_read(tmp_path):
    """A file of zeros is valid text, and takes no space on the disk if it is sparse."""
    file = tmp_path / "m.msgpack"
    file.write_bytes(b"\x81\xa1a\xdb" + struct.pack(">I", 2**32 - 99))
    os.truncate(file, 8 + 2**32 - 99)
    not_opened(file, "damaged: it has more than 100000000 bytes of text")


def test_what_does_not_fit_into_memory_is_named(tmp_path):
    file, size = tmp_path / "m.safetensors", 1 << 43
    file.write_bytes(_raw({"a": _entry(shape=(size // 4,), offsets=(0, size))}, b""))
    os.truncate(file, file.stat().st_size + size)
    with pytest.raises(CheckpointError, match=r"'a' does not fit into memory: .*TiB"):
        load_checkpoint(file)


def test_json_of_many_parts_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_PARTS", 99)
    for text in (b'{"a":[' + b"{}," * 99 + b"3]}", b'{"a":[' + b'"",' * 99 + b"3]}"):
        with pytest.raises(ValueError, match=r"config\.json: .* more than 99 parts"):
            config_of({"config.json": text})
        refused(tmp_path / "m.safetensors", _raw(text, b""), "more than 99 parts")


def test_what_fails_for_memory_is_not_called_damaged():
    def load():
        raise MemoryError

    tensor = LoadedTensor("w", np.dtype("f4"), (1,), "m.npz", load)
    with pytest.raises(CheckpointError, match=r"m\.npz: 'w' does not fit into memory$"):
        tensor.form()


@pytest.mark.parametrize("depth", [100, 101, 500])
def test_json_is_not_nested_too_deep(tmp_path, depth):
    """`json` reads a thousand levels, for which `repr` fails in a message."""
    text = b'{"a":' * depth + b"1" + b"}" * depth
    if depth == 100:
        assert config_of({"config.json": text})["a"]
        return
    with pytest.raises(ValueError, match=r"config\.json: .* nested more than 100 deep"):
        config_of({"config.json": text})
    refused(tmp_path / "m.safetensors", _raw(text, b""), "nested more than 100 deep")


def test_damaged_orbax(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    # Too large for OCDBT to store inline, and incompressible.
    large = np.random.default_rng(0).standard_normal(3000)
    save_checkpoint(tmp_path / "o", {"a": large}, format="orbax")
    with open_checkpoint(tmp_path / "o") as checkpoint:
        shutil.rmtree(tmp_path / "o/d")
        with pytest.raises(CheckpointError, match=r"cannot read .*o: 'a'"):
            checkpoint.tensors["a"].read(np.zeros(3000))
    (tmp_path / "o/_METADATA").write_text("{")
    not_opened(tmp_path / "o", "_METADATA is damaged")
    for item in ("params", "opt"):
        save_checkpoint(tmp_path / "many" / item, ARRAYS, format="orbax")
    not_opened(tmp_path / "many", "several orbax items: choose one of opt, params")
