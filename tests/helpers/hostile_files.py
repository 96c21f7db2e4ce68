"""Files and texts whose parts are drawn from their grammar: mostly valid, some with one
invalid part. `fuzzing` mutates bytes and trees, which rarely reaches this depth."""

import collections
import io
import math
import os
import zipfile

import flax.serialization
import ml_dtypes
import numpy as np
import yaml
from torch_files import KINDS, Call, FakeTorch, Storage, archive

from sail_jax.checkpoint.formats.files import DTYPES
from sail_jax.checkpoint.output.writer import save_checkpoint

HUGE = (
    *(2**31 - 1, 2**31, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**40),
    *(-1, -2, -(2**31), -(2**63), True, 1.0, None, "1"),
)


def view(storage, shape, strides, offset):
    """The entries of a strided view, found one by one; None if it is no view of the storage, and
    ... where it has no entries, so that nothing shows, or too many."""
    numbers = (*shape, *strides, offset)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(strides):
        return None
    if len(shape) > 32 or max(numbers) >= 2**61 or not math.prod(shape):
        return ...
    if 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + offset > storage.size:
        return None
    if math.prod(shape) > 10_000:  # repeated without limit, so it may be rejected
        return ...
    places = [offset + sum(map(int.__mul__, strides, at)) for at in np.ndindex(*shape)]
    return storage[np.array(places, int)].reshape(shape)


def _swapped(array):
    return array.view(np.uint16).byteswap().view(array.dtype) if array.itemsize == 2 else (
        array.byteswap() if array.dtype.kind != "b" else array
    )  # fmt: skip


def torch_views(m, path, monkeypatch):
    """Writes views of storages, of which some overlap, repeat entries or reach too far.

    Returns the tensors, ... for those that may be refused or not; None if the file has to be."""
    fake, swap = FakeTorch(monkeypatch), m.often(0.2)
    kinds = [m.one(KINDS) for _ in range(m.one((1, 2, 3)))]
    storages, right = [], []
    for i, kind in enumerate(kinds):
        size = m.one((16, 0, 1, 2, 5, 37))
        data = bytes(m.randrange(256) for _ in range(size * np.dtype(KINDS[kind]).itemsize))
        data = bytes(x & 1 for x in data) if kind == "Bool" else data
        right.append(np.frombuffer(data, KINDS[kind]))
        storages.append(Storage(str(i), kind, _swapped(right[-1]) if swap else right[-1]))
    tree, wanted = (collections.OrderedDict() if m.often(0.5) else {}), {}
    for i in range(m.one((1, 2, 3))):
        at, axes = m.randrange(len(storages)), m.one((1, 0, 2, 3, 33))
        axes = m.one((axes, 1)) if axes > 3 else axes
        shape = [m.one((4, 0, 1, 2, 3)) for _ in range(axes)]
        strides = [math.prod(shape[j + 1 :]) for j in range(axes)]
        if m.often(0.7):
            strides = [m.one((0, 1, 2, 3, 5)) for _ in range(axes)]
        offset = m.one((0, 0, 1, 3))
        if m.often(0.15):
            part = m.one((shape, strides, []))
            part[:] = [m.one(HUGE) if m.often(0.5) else n for n in part]
            offset = offset if part else m.one(HUGE)
        strides = strides[1:] if m.often(0.02) else strides
        tensor = fake.tensor(storages[at], tuple(shape), tuple(strides), offset)
        if m.often(0.3):
            rebuild = fake.utils._rebuild_parameter
            tensor = Call(rebuild, tensor, True, collections.OrderedDict())
        tree[f"t{i}"], wanted[f"t{i}"] = tensor, view(right[at], shape, strides, offset)
    packed = zipfile.ZIP_DEFLATED if m.often(0.3) else zipfile.ZIP_STORED
    data = fake.pickled(tree, m.one((2, 3, 4, 5)))
    archive(path, data, storages, packed, byteorder="big" if swap else "little")
    return None if any(x is None for x in wanted.values()) else wanted


_DESCRIPTIONS = (
    *("<f4", "|b1", "|u1", "|i1", "<u2", ">u2", ">i4", "<i8", ">u8", "<f2", ">f2", ">f4", "<f8"),
    *(">f8", "<c8", ">c8", "<c16", "|V2", "|V1", "<M8[s]", "<U3", "|S4", "|O", "|V0", "<U0"),
)
_ODD = (
    *("[('a','<f4')]", "('<f4',(2,))", "'<f4,<f4'", "None", "{}", "'\\x00'", "'=f4'", "'f'"),
    *("float", "'<f4" + "[0]" * 500 + "'", "'<f40'", "('V',2**31)", "(" * 200, "'(2,)f4'"),
)


def npz_members(m):
    """Returns the bytes of an archive of arrays, whose headers may state a wrong type,
    shape or length."""
    buffer = io.BytesIO()
    packed = zipfile.ZIP_DEFLATED if m.often(0.4) else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", packed) as file:
        for i in range(m.one((1, 2, 3))):
            descr = m.one(_DESCRIPTIONS)
            shape = tuple(m.one((3, 0, 1, 2)) for _ in range(m.one((1, 0, 2, 3))))
            count = math.prod(shape) * (8 if descr == "|O" else np.dtype(descr).itemsize)
            data = bytes(m.randrange(2 if descr == "|b1" else 256) for _ in range(count))
            stated, said = shape, repr(descr)
            if m.often(0.15):
                stated = m.one(((*shape[:-1], m.one(HUGE)), [*shape], shape[:-1], m.one(HUGE)))
            if m.often(0.05):
                said = m.one(_ODD)
            order = m.one(HUGE) if m.often(0.03) else m.often(0.3)
            head = f"{{'descr': {said}, 'fortran_order': {order}, 'shape': {stated}, }}"
            if m.often(0.03):
                head = m.one(("{", "[]", "{'a': 1}", "(" * 5000, "9" * 9000, "", "#"))
            text = head.encode("latin-1", "replace") + b" " * m.one((0, 3, 60)) + b"\n"
            version = m.one((1, 2, 3, 0, 255)) if m.often(0.2) else 1
            length = m.one((0, 1, 65535, len(text) - 1)) if m.often(0.05) else len(text)
            data = b"\x93NUMPY" + bytes([version, 0]) + length.to_bytes(
                2 if version == 1 else 4, "little") + text + data  # fmt: skip
            data = data[:-1] if m.often(0.03) else data + b"x" * m.often(0.03)
            name = m.one((f"a{i}", f"ä{i}", f"../x{i}", f"/abs{i}", f"a\\b{i}", f"x\0{i}"))
            name += m.one(("", ".NPY", ".npy/")) if m.often(0.02) else ".npy"
            file.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def msgpack_tree(m, depth=0):
    """Makes a tree in flax's form, with keys that have a meaning for its reader."""
    if m.identity:
        return {"a": np.ones(3, np.float32)}
    if depth == 0 or (depth < 4 and m.often(0.45)):
        keys = ("a", "b", "0", "1", "", "a/b", "__msgpack_chunked_array__", "shape", "chunks", "é")
        items = [(m.one(keys), msgpack_tree(m, depth + 1)) for _ in range(m.randint(0, 3))]
        return [x for _, x in items] if depth and m.often(0.3) else dict(items)
    if m.often(0.5):
        dtype, shape = m.one(DTYPES.values()), tuple(m.randrange(4) for _ in range(m.randrange(3)))
        top = 2 if dtype.kind == "b" else 256
        data = bytes(m.randrange(top) for _ in range(math.prod(shape) * dtype.itemsize))
        return np.frombuffer(data, dtype).reshape(shape)
    return m.one(
        (3, -1, 2**63, 2**64 - 1, -(2**63), 1.5, True, None, "x", b"abc", 1 + 2j, float("nan"),
         np.float32(3), np.int8(2), "", 0, ml_dtypes.bfloat16(1))
    )  # fmt: skip


def msgpack_bytes(tree):
    """Returns the bytes that flax writes for a tree; None if flax rejects it."""
    try:
        return flax.serialization.msgpack_serialize(tree)
    except Exception:
        return None


INSIDE = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}


def shards(folder):
    """Makes `folder/in` with a shard for each array of `INSIDE`, and around it what no index may
    reach: files of the same names and other values. Returns names for an index to use."""
    inside, outside = folder / "in", folder / "outside"
    for i, (name, array) in enumerate(INSIDE.items()):
        save_checkpoint(inside / f"s{i}.safetensors", {name: array})
        save_checkpoint(outside / f"s{i}.safetensors", {name: array + 7})
    links = {
        "ok": "s0.safetensors", "out": "../outside/s0.safetensors", "loop": "loop.safetensors",
        "zero": "/dev/zero", "nothing": "nowhere",
    }  # fmt: skip
    for name, target in links.items():
        (inside / f"{name}.safetensors").symlink_to(target)
    (inside / "up").symlink_to("..")
    (inside / "folder.safetensors").mkdir()
    os.mkfifo(inside / "pipe.safetensors")
    return (
        *("s0.safetensors", "s1.safetensors", *(f"{name}.safetensors" for name in links)),
        *("folder.safetensors", "pipe.safetensors", "../outside/s0.safetensors", "..", ".", ""),
        *(f"{outside}/s0.safetensors", "up/outside/s0.safetensors", "./s0.safetensors"),
        *("S0.safetensors", "s0.safetensors\0", "s0.safetensors\n", " s0.safetensors", "s0"),
        *("model.safetensors.index.json", "..\\outside\\s0.safetensors", "\ud800.safetensors"),
        *("~/s0.safetensors", "file:///dev/zero", "n" * 300 + ".safetensors", "ｓ0.safetensors"),
    )


_ALIKE = {
    "a": "аɑ", "e": "еｅ", "o": "οо", "i": "іı", "l": "ⅼI1", "_": "＿‗", "-": "‐−",
    ":": "：꞉", " ": "\u00a0\u200b",
}  # fmt: skip
_NUMBERS = (
    *("1e999", ".inf", "-.inf", ".nan", "0x" + "f" * 300, "0b1", "1_000", "9" * 4301, "1:30:00"),
    *("1e-400", "+1", "--1", "0.1.2", "1e", "٣", "²", "1,5", "0777", "089", "_1", "0x", "~", "yes"),
)
_TAGS = (
    *("!!python/object/apply:os.system ['id']", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]"),
    *("!!int 'x'", "!!float y", "!!bool maybe", "!x y", "!!str 3", "!!null x", "!!merge <<"),
    *("!!float {}", "!!int []", "!!seq {}", "!!map []", "! x"),
)
_WORDS = (
    *("&a ", "*a ", "<<: ", "? ", "| ", "%YAML 9.9\n---\n", "---\n", "...\n", "\ufeff", "\u2028"),
    *("\x85", "\x07", "\ud800", "{" * 50, "- " * 60, "[", "'", '"', "#", "@", "`", "\\", "\0"),
)


def recipe_text(m, trees):
    """Makes a recipe in YAML with unusual letters, numbers, tags, nested aliases, or endings."""
    text = yaml.safe_dump(m.one(trees), sort_keys=False)
    for _ in range(0 if m.identity else m.one((1, 1, 2, 4))):
        lines = text.split("\n")
        at, n = m.randrange(len(lines)), m.randint(2, 30)
        key = lines[at].partition(":")[0]
        match m.randrange(9):
            case 0:
                places = [i for i, c in enumerate(text) if c in _ALIKE]
                i = m.one(places)
                text = text[:i] + m.one(_ALIKE[text[i]]) + text[i + 1 :]
            case 1 | 2:
                lines[at] = f"{key}: {m.one(_NUMBERS if m.often(0.5) else _TAGS)}"
                text = "\n".join(lines)
            case 3:
                bomb = ["x0: &a0 [lol, lol]"]
                bomb += [f"x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, n)]
                text = "\n".join([*bomb, text.replace("linear", f"*a{n - 1}", m.randint(0, 1))])
            case 4:
                bomb = ["x0: &m0 {k: 1}"]
                bomb += [
                    f"x{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 6)}], k: 1}}"
                    for i in range(1, n)
                ]
                text = "\n".join([*bomb, text])
            case 5:
                lines[at:at] = m.one(([lines[at]], ["\t"], [f"{key}: &r [*r]"]))
                text = "\n".join(lines)
            case 6:
                i = m.randint(0, len(text))
                text = text[:i] + m.one(_WORDS) + text[i:]
            case 7:
                text = text.replace("\n", "\r\n") if m.often(0.5) else text.replace("  ", "\t")
            case _:
                text = m.bytes_of(text.encode(errors="replace")).decode(errors="replace")
    if m.often(0.5):
        return text
    return text.encode(m.one(("utf-8", "utf-8", "utf-8", "utf-16", "utf-32")), "replace")
