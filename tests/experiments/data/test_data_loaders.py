"""Loaders of the papers' data, on tiny files of the true formats, and on damaged, swapped and
hostile ones.
"""

import base64
import gzip
import io
import json
import os
import pickle
import re
import shutil
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from itertools import pairwise

import jax
import numpy as np
import pytest
from PIL import Image

from experiments.data import (
    bpe,
    choices,
    cifar,
    classes,
    documents,
    idx,
    image_folders,
    latents,
    stream,
    tokens,
)
from experiments.data.files import DataError, Images
from experiments.data.registry import LatentData, TextData

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (3, 5, 4), np.uint8)
PLANES = RNG.integers(0, 256, (5, 3, 32, 32), np.uint8)
COLOURS = RNG.integers(0, 256, (4, 6, 6, 3), np.uint8)
LATENTS = RNG.standard_normal((3, 4, 2, 2)).astype(np.float32)
WNIDS = ("n02", "n01")


def idx3(images=PIXELS):
    return b"\0\0\x08\x03" + struct.pack(">III", *images.shape) + images.tobytes()


def idx1(labels=(7, 0, 9)):
    return b"\0\0\x08\x01" + struct.pack(">I", len(labels)) + bytes(labels)


def npy(array, descr=None, order=False):
    head = {"descr": descr or array.dtype.str, "fortran_order": order, "shape": array.shape}
    text = (repr(head) + "\n").encode()
    data = array.tobytes("F" if order else "C")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def png(pixels, width=None):
    """A PNG of 8-bit RGB, by its specification."""

    def chunk(kind, data):
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    high, wide = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    about = struct.pack(">IIBBBBB", width or wide, width or high, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", about), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def npz(**arrays):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", npy(array))
    return out.getvalue()


def cifar10(k):
    return bytes([k]) + PLANES[k % 5].tobytes()


CIFAR100 = b"".join(
    bytes([c, f]) + PLANES[k].tobytes() for k, (c, f) in enumerate([(4, 0), (19, 99)])
)
IDS = np.arange(40, dtype=np.uint16) * 7 % 50
HELLASWAG = {"ind": 1, "ctx": "A man", "endings": ["sits.", "stands.", "is", "was"], "label": "2"}
LABELS = np.array([0, 9, 2])

# The content of a valid folder, and its reader.
SETS = {
    "mnist": (
        {"train-images-idx3-ubyte": idx3(), "train-labels-idx1-ubyte": idx1()},
        idx.load,
    ),
    "mnist.gz": (
        {
            "t10k-images-idx3-ubyte.gz": gzip.compress(idx3()),
            "t10k-labels.idx1-ubyte.gz": gzip.compress(idx1()),
        },
        lambda folder: idx.load(folder, "fashion", "test"),
    ),
    "emnist": (
        {
            "emnist-letters-test-images-idx3-ubyte": idx3(),
            "emnist-letters-test-labels-idx1-ubyte": idx1((1, 26, 5)),
        },
        lambda folder: idx.load(folder, "emnist-letters", "test"),
    ),
    "cifar-10": (
        {f"data_batch_{k}.bin": cifar10(k) for k in range(1, 6)}
        | {"batches.meta.txt": "\n".join("abcdefghij").encode() + b"\n\n"},
        cifar.load,
    ),
    "cifar-100": (
        {"test.bin": CIFAR100},
        lambda folder: cifar.load(folder, "cifar-100", "test", "coarse"),
    ),
    "tiny train": (
        {
            "wnids.txt": "\n".join(WNIDS).encode(),
            **{f"train/{w}/images/{w}_{k}.JPEG": jpeg(COLOURS[k]) for w in WNIDS for k in (0, 1)},
            "train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t5\t5\n",
        },
        lambda folder: image_folders.tiny_imagenet(folder, side=6),
    ),
    "tiny val": (
        {
            "wnids.txt": "\n".join(WNIDS).encode(),
            "val/val_annotations.txt": b"val_1.png\tn02\t0\t0\t5\t5\nval_0.png\tn01\t0\t0\t5\t5\n",
            "val/images/val_0.png": png(COLOURS[0]),
            "val/images/val_1.png": png(COLOURS[1]),
        },
        lambda folder: image_folders.tiny_imagenet(folder, "val", 6),
    ),
    "folders": (
        {"cat/1.png": png(COLOURS[0]), "cat/note.txt": b"", "ant/x.jpg": jpeg(COLOURS[1][:, :4])},
        lambda folder: image_folders.load(folder, 4),
    ),
    "tokens": (
        {
            "train.bin": IDS.astype("<u2").tobytes(),
            "val.bin": IDS[:9].astype("<u2").tobytes(),
            "meta.json": b'{"vocab_size": 50}',
        },
        tokens.load,
    ),
    "tokens.npy": (
        {
            "train.npy": npy(IDS.astype(">u4")),
            "val.npy": npy(IDS[:9].astype(np.int32)),
            "meta.pkl": pickle.dumps({"itos": {0: "vocab"}, "vocab_size": 50}),
        },
        tokens.load,
    ),
    "latents": (
        {"z.npy": npy(LATENTS, order=True), "labels.npy": npy(LABELS)},
        lambda folder: latents.load(folder / "z.npy", classes=10),
    ),
    "latents.npz": (
        {"z.npz": npz(latents=LATENTS.astype(np.float16), labels=LABELS.astype(np.uint8))},
        lambda folder: latents.load(folder / "z.npz", classes=10),
    ),
    "choices": (
        {"q.jsonl": b"\n".join([json.dumps(HELLASWAG).encode()] * 2)},
        lambda folder: choices.read(folder / "q.jsonl"),
    ),
    "classes": (
        {"mr.jsonl": b'{"text": "a", "label": 0}\n{"text": "b", "label": 1}'},
        lambda folder: classes.read(folder / "mr.jsonl"),
    ),
    "documents": (
        {"t.jsonl": b'{"text": "a"}\n{"question": "b", "answer": "c"}'},
        lambda folder: documents.read(folder / "t.jsonl"),
    ),
    "bpe": (
        {"bpe.json": b""},  # written by `made`
        lambda folder: bpe.load(folder / "bpe.json"),
    ),
}


def made(folder, name):
    files, load = SETS[name]
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    if name == "bpe":
        bpe.save(folder / "bpe.json", bpe.train(b"the theory of the thing", 5))
    return lambda: load(folder)


def same_images(found, images, labels, names):
    np.testing.assert_array_equal(found.images, images)
    np.testing.assert_array_equal(found.labels, labels)
    assert found.images.dtype == np.uint8
    assert found.labels.dtype == np.int32
    assert found.names == tuple(names)


@pytest.mark.parametrize("name", ["mnist", "mnist.gz"])
def test_idx(tmp_path, name):
    same_images(made(tmp_path, name)(), PIXELS[..., None], [7, 0, 9], "0123456789")


def test_emnist_is_upright_and_counts_from_zero(tmp_path):
    upright = PIXELS.transpose(0, 2, 1)[..., None]
    same_images(made(tmp_path, "emnist")(), upright, [0, 25, 4], map(str, range(1, 27)))


def test_cifar(tmp_path):
    expected = np.stack([PLANES[k % 5].transpose(1, 2, 0) for k in range(1, 6)])
    same_images(made(tmp_path, "cifar-10")(), expected, [1, 2, 3, 4, 5], "abcdefghij")
    names = [str(k) for k in range(100)]
    expected = PLANES[:2].transpose(0, 2, 3, 1)
    same_images(made(tmp_path, "cifar-100")(), expected, [4, 19], names[:20])
    fine = cifar.load(tmp_path, "cifar-100", "test")
    same_images(fine, expected, [0, 99], names)


def test_tiny_imagenet(tmp_path):
    found = made(tmp_path, "tiny train")()
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(jpeg(COLOURS[k])))) for k in (0, 1, 0, 1)])
    same_images(found, decoded, [0, 0, 1, 1], ["n01", "n02"])
    same_images(made(tmp_path, "tiny val")(), COLOURS[:2], [0, 1], ["n01", "n02"])


def test_class_folders_are_cropped_and_made_one_size(tmp_path):
    found = made(tmp_path, "folders")()
    assert found.images.shape == (2, 4, 4, 3)
    assert (found.labels.tolist(), found.names) == ([0, 1], ("ant", "cat"))
    middle = np.asarray(Image.open(io.BytesIO(jpeg(COLOURS[1][:, :4]))))[1:5]
    np.testing.assert_array_equal(found.images[0], middle)


def test_a_token_is_below_the_size_of_the_vocabulary(tmp_path):
    np.save(tmp_path / "text.npy", np.arange(5))
    assert tokens.read(tmp_path / "text.npy", 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="has the token 4; the vocabulary has 4, 0 to 3"):
        tokens.read(tmp_path / "text.npy", 4)


@pytest.mark.parametrize("name", ["tokens", "tokens.npy"])
def test_tokens(tmp_path, name):
    found = made(tmp_path, name)()
    np.testing.assert_array_equal(found.train, IDS)
    np.testing.assert_array_equal(found.held_out, IDS[:9])
    assert found.vocab == 50


@pytest.mark.parametrize(("name", "dtype"), [("latents", np.float32), ("latents.npz", np.float16)])
def test_latents(tmp_path, name, dtype):
    found = made(tmp_path, name)()
    np.testing.assert_array_equal(found.latents, LATENTS.astype(dtype))
    assert (found.latents.dtype, found.labels.dtype) == (dtype, np.int32)
    assert found.labels.tolist() == LABELS.tolist()


def test_texts_by_name(tmp_path):
    assert TextData().read().vocab == 97
    made(tmp_path, "tokens")
    for name in ("tokens", "c4"):
        assert TextData(name, str(tmp_path)).read().vocab == 50
    with pytest.raises(DataError, match="a vocabulary of 50, expected 50257"):
        TextData("openwebtext", str(tmp_path)).read()
    (tmp_path / "meta.json").unlink()
    assert TextData("openwebtext", str(tmp_path)).read().vocab == 50257
    assert TextData("tokens", str(tmp_path), 60).read().vocab == 60
    for name in ("openwebtext", "c4", "tokens"):
        with pytest.raises(DataError, match=r"data.folder must be .* .published at .* needs no"):
            TextData(name).read()


def test_images_of_folders_are_decoded_when_they_are_asked_for(tmp_path):
    loaded = made(tmp_path, "folders")()
    found = LatentData("image-folders", folder=str(tmp_path), side=4).read(2)
    assert found.latents.shape == (2, 4, 4, 3)
    np.testing.assert_array_equal(found.labels, loaded.labels)
    order = np.array([[1, 0], [0, 0]])
    for images in (found.latents, found.latents.reader(), found.latents.reader(2)):
        pixels = images(order) if callable(images) else images[order]
        np.testing.assert_array_equal(pixels, loaded.images[order])
    with pytest.raises(DataError, match=r"has 2 classes; expected at most 1"):
        LatentData("image-folders", folder=str(tmp_path), side=4).read(1)
    (tmp_path / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1.png is neither a JPEG nor a PNG, or damaged"):
        found.latents[order]


def test_latents_by_name(tmp_path):
    own = LatentData().read(10)
    assert own.latents.shape == (1797, 1, 8, 8)
    shown = own.scale * own.latents + own.bias
    assert (shown.min(), shown.max(), own.features) == (-1, 1, None)
    made(tmp_path, "latents")
    np.save(tmp_path / "f.npy", np.ones((3, 4, 5), np.float16))
    file, features = str(tmp_path / "z.npy"), str(tmp_path / "f.npy")
    found = LatentData("latents", file, features=features).read(10)
    assert (found.scale, found.bias) == (latents.SCALE, 0)
    assert found.features is not None
    assert found.features.shape == (3, 4, 5)
    with pytest.raises(DataError, match=r"data.file must be .* .published at .* needs no"):
        LatentData("latents").read(10)
    with pytest.raises(DataError, match="the digits have 10 classes, the network 1000"):
        LatentData().read(1000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: TextData("pyton"), "name: no text is called 'pyton' .nearest: 'python'"),
        (lambda: TextData(folder="x"), "folder must not be given for python; got x"),
        (lambda: TextData(vocab=9), "vocab must not be given for python; got 9"),
        (lambda: TextData("tokens", vocab=0), "vocab must be at least 1; got 0"),
        (lambda: LatentData("latent"), "name: no latents are called 'latent'"),
        (lambda: LatentData(features="f"), "features must not be given for digits; got f"),
        (
            lambda: LatentData("image-folders").read(9),
            "data.folder must be the place of a folder of",
        ),
    ],
)
def test_what_data_are_not_is_refused(data, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        data()


ARC = {"question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}}
STEM = {
    "stem": "Why?",
    "choices": [{"text": t, "label": n} for n, t in zip("123", "xyz", strict=True)],
}
COPA = {"premise": "It rained.", "choice1": "The sky", "choice2": "I got", "question": "effect"}
SCIQ = {"question": "Q", "distractor1": "a", "distractor2": "b", "distractor3": "c"}
QUESTIONS = {
    "hellaswag": (HELLASWAG, ("A man", (" sits.", " stands.", " is", " was"), 2)),
    "arc": ({**ARC, "answerKey": "C"}, ("Why?", (" x", " y", " z"), 2)),
    "arc stem": ({"question": STEM, "answerKey": "2"}, ("Why?", (" x", " y", " z"), 1)),
    "piqa": ({"goal": "To", "sol1": "do", "sol2": " be", "label": 1}, ("To", (" do", " be"), 1)),
    "copa": ({**COPA, "label": 0}, ("It rained therefore", (" the sky", " i got"), 0)),
    "winogrande": (
        {"sentence": "It is _ day", "option1": "a", "option2": "no", "answer": "2"},
        ("It is", (" a day", " no day"), 1),
    ),
    "winogrande first": (
        {"sentence": "_ is it", "option1": "a", "option2": "no", "answer": "1"},
        ("\n", (" a is it", " no is it"), 0),
    ),
    "sciq": ({**SCIQ, "correct_answer": "r"}, ("Q", (" r", " a", " b", " c"), 0)),
    "plain": ({"context": "é", "options": ["u", "v"], "answer": "B"}, ("é", (" u", " v"), 1)),
    "siqa": (
        {"context": "A ran.", "question": "Why?", **dict.fromkeys(("answerB", "answerC"), "b")}
        | {"answerA": "a", "label": "3"},
        ("A ran. Why?", (" a", " b", " b"), 2),
    ),
    "index": ({"query": "q", "choices": ["u", "v"], "gold": 0}, ("q", (" u", " v"), 0)),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_spellings_of_questions(tmp_path, name):
    record, expected = QUESTIONS[name]
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(record) + "\n\n", encoding="utf-8")
    assert choices.read(path) == (expected,)


SIGNS = (" negative", " positive")
CLASSES = {
    "subj.jsonl": ({"text": "a", "label": 1, "label_text": "subjective"}, None),
    "mr-train.jsonl": ({"text": "a ", "label": 1}, ("a\nLabel:", SIGNS, 1)),
    "x.jsonl": (
        {"passage": "p", "question": "q", "answer": False},
        ("p\nq\nLabel:", (" no", " yes"), 0),
    ),
    "rte.jsonl": (
        {"premise": "p", "hypothesis": "h", "label": 1},
        ("p\nh\nLabel:", (" entailment", " not entailment"), 1),
    ),
    "t.jsonl": (
        {"text": "a", "coarse_label": 5, "fine_label": 40},
        ("a\nLabel:", tuple(f" {word}" for word in classes._TREC), 5),
    ),
    "q.jsonl": (HELLASWAG, ("A man", (" sits.", " stands.", " is", " was"), 2)),
}


@pytest.mark.parametrize("name", CLASSES)
def test_spellings_of_classes(tmp_path, name):
    record, expected = CLASSES[name]
    path = tmp_path / name
    path.write_text(json.dumps(record) + "\n")
    if expected is None:  # the words are those of the file, in alphabetical order
        path.write_text(json.dumps(record) + "\n" + json.dumps({**record, "label_text": "a_b"}))
        read = classes.read(path)
        assert [item.answer for item in read] == [1, 0]
        assert {item.choices for item in read} == {(" a b", " subjective")}
    else:
        assert classes.read(path) == (expected,)


def test_texts_are_one_field_or_a_question_with_its_answer(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    records = [{"question": "1 + 1?", "answer": "two\n#### 2"}, {"content": "x = 1\n"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert documents.read(path) == ("1 + 1?\ntwo\n#### 2", "x = 1\n")
    assert not classes.holds(path)
    with pytest.raises(DataError, match=r"texts\[1\] has 1 tokens; expected 2 or more"):
        documents.pack(["ab", "c"], _bytes, 4)


def test_answers_in_a_file_of_their_own(tmp_path):
    path, answers = tmp_path / "q.jsonl", tmp_path / "labels.lst"
    path.write_text('{"goal": "g", "sol1": "a", "sol2": "b", "answer": 0}\n' * 3)
    answers.write_text("1\n0\n1\n")
    assert [item.answer for item in choices.read(path, answers)] == [1, 0, 1]
    answers.write_text("1\n0\n")
    with pytest.raises(DataError, match=r"labels\.lst has 2 answers"):
        choices.read(path, answers)


# Each fault: the data set, the change of its files, and the message.
def put(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def cut(file, count=1):
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - count)


def swap(one, other):
    def change(folder):
        both = (folder / one).read_bytes(), (folder / other).read_bytes()
        (folder / other).write_bytes(both[0])
        (folder / one).write_bytes(both[1])

    return change


def remove(file):
    return lambda folder: (shutil.rmtree if (folder / file).is_dir() else os.remove)(folder / file)


def link(file):
    def change(folder):
        outside = folder.parent / "outside"
        shutil.move(folder / file, outside)
        (folder / file).symlink_to(outside)

    return change


def question(**fields):
    record = {key: value for key, value in (HELLASWAG | fields).items() if value is not None}
    return put("q.jsonl", json.dumps(record).encode())


def sealed(merges):
    """The record of merges, with a checksum that is right."""

    def change(folder):
        from sail_jax import disk

        record = {"format": disk.FORMAT, "schema": "byte-level BPE", "merges": merges}
        disk.write_record(folder / "bpe.json", record)

    return change


X, Y = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
XZ, YZ = "t10k-images-idx3-ubyte.gz", "t10k-labels.idx1-ubyte.gz"
BOMB = b"\0\0\x08\x03" + struct.pack(">III", 2**16, 2**8, 2**8)
IMAGE = "train/n01/images/n01_1.JPEG"
NAN = np.where(np.arange(3)[:, None, None, None] == 1, np.float32("nan"), LATENTS)
OBJECTS = npy(np.zeros(2, np.int64), descr="|O")
FAULTS = {
    "images missing": ("mnist", remove(X), "missing: MNIST is published at yann.* digits"),
    "images empty": ("mnist", put(X, b""), "is empty; expected images"),
    "images none": (
        "mnist",
        put(X, idx3(PIXELS[:0])),
        r"is empty: its header has the shape \[0, 5, 4\]",
    ),
    "images cut": ("mnist", cut(X), "truncated or damaged: .* 76 bytes, and the file has 75"),
    "header cut": ("mnist", put(X, idx3()[:9]), "ends within its header"),
    "images long": ("mnist", put(X, idx3() + b"\0"), "76 bytes, and the file has 77"),
    "images of reals": ("mnist", put(X, b"\0\0\x0d\3" + idx3()[4:]), "idx type 13; expected 8"),
    "images of text": ("mnist", put(X, b"<html>"), "not an idx file: it begins with b'<htm'"),
    "images a zip": ("mnist", put(X, gzip.compress(idx3())), "compressed; .* ending .gz"),
    "giant header": ("mnist", put(X, BOMB), "truncated or damaged"),
    "idx swapped": ("mnist", swap(X, Y), "images, of 3, are expected: .* swapped"),
    "labels are images": ("mnist", put(Y, idx3()), "labels, of 1, are expected: .* swapped"),
    "other split": ("mnist", put(Y, idx1((1, 2))), "2 labels for 3 examples"),
    "other classes": ("mnist", put(Y, idx1((1, 2, 10))), "label 10; expected 0 to 9, of 10"),
    "below the first": (
        "emnist",
        put("emnist-letters-test-labels-idx1-ubyte", idx1((1, 0, 2))),
        "label 0; expected 1 to 26",
    ),
    "gz cut": ("mnist.gz", cut(XZ, 9), "is damaged"),
    "gz plain": ("mnist.gz", put(XZ, idx3()), "cannot read .*gz"),
    "gz bomb": (
        "mnist.gz",
        put(XZ, gzip.compress(BOMB)),
        "4294967312 bytes, and of .* packed bytes .* at most",
    ),
    "gz long": ("mnist.gz", put(YZ, gzip.compress(idx1() + b"\0")), "data follow the"),
    "gz short": ("mnist.gz", put(YZ, gzip.compress(idx1()[:-1])), "holds 2 of 3 bytes"),
    "batch missing": (
        "cifar-10",
        remove("data_batch_4.bin"),
        "missing: CIFAR-10 .*Toronto.*digits",
    ),
    "batch empty": ("cifar-10", put("data_batch_2.bin", b""), "is empty; expected records of 3073"),
    "batch cut": ("cifar-10", cut("data_batch_3.bin"), "3072 bytes are not a multiple"),
    "batch of another": (
        "cifar-10",
        put("data_batch_1.bin", CIFAR100),
        "fits records of CIFAR-100",
    ),
    "batch mislabelled": ("cifar-10", put("data_batch_1.bin", cifar10(77)), "fine label 77"),
    "batch linked": ("cifar-10", link("data_batch_1.bin"), "a link that leads out"),
    "names": ("cifar-10", put("batches.meta.txt", b"a\nb\n"), "names 2 classes in 2 lines; .* 10"),
    "names repeated": ("cifar-10", put("batches.meta.txt", b"a\n" * 10), "names 1 classes in 10"),
    "coarse": (
        "cifar-100",
        put("test.bin", b"".join(bytes([c, 7]) + PLANES[0].tobytes() for c in (1, 2))),
        "mislabelled: the fine class 7 lies in 2 coarse",
    ),
    "columns swapped": (
        "cifar-100",
        put("test.bin", bytes([99, 3]) + PLANES[0].tobytes()),
        "coarse label 99; expected 0 to 19",
    ),
    "no classes": ("tiny train", put("wnids.txt", b"\n"), "has 0 classes"),
    "classes twice": ("tiny train", put("wnids.txt", b"n01\nn01\nn02"), "3 classes, 2 of them"),
    "no list": ("tiny train", remove("wnids.txt"), "missing: Tiny-ImageNet.*CS231n"),
    "no train": ("tiny train", remove("train"), "missing: Tiny-ImageNet"),
    "a class less": ("tiny train", put("wnids.txt", b"n01"), "'n02' is only in the folder"),
    "a class more": ("tiny train", put("wnids.txt", b"n01\nn02\nn3"), "'n3' is only in the list"),
    "class of links": ("tiny train", put("wnids.txt", b"n01\nn02\n.."), "'..' is only in the list"),
    "image linked": ("tiny train", link(IMAGE), "a link that leads out"),
    "class linked": ("tiny train", link("train/n01"), "a link that leads out"),
    "image of another": (
        "tiny train",
        lambda folder: shutil.move(folder / IMAGE, folder / "train/n02/images/n01_9.JPEG"),
        "n01_9.JPEG is mislabelled",
    ),
    "image cut": ("tiny train", cut(IMAGE, 300), r"n01_1\.JPEG"),
    "image empty": ("tiny train", put(IMAGE, b""), "has 0 bytes"),
    "image of text": ("tiny train", put(IMAGE, b"<html>" * 99), "neither a JPEG nor a PNG"),
    "image larger": ("tiny train", put(IMAGE, jpeg(PLANES[0, 0])), "has 32x32 pixels; .* 6x6"),
    "image bomb": ("tiny train", put(IMAGE, png(COLOURS[0], 60_000)), "more than 67108864 pixels"),
    "image large": ("tiny train", put(IMAGE, png(COLOURS[0], 9_000)), "9000x9000, more than"),
    "image with a line in its name": (
        "tiny train",
        lambda folder: shutil.move(folder / IMAGE, folder / "train/n01/images/n01_1\n.JPEG"),
        r"'n01_1\\n.JPEG' is not a plain file name",
    ),
    "image is a folder": (
        "tiny train",
        lambda folder: (os.remove(folder / IMAGE), os.mkdir(folder / IMAGE)),
        "not a plain file",
    ),
    "no annotations": ("tiny val", remove("val/val_annotations.txt"), "missing: Tiny-ImageNet"),
    "other class": (
        "tiny val",
        put("val/val_annotations.txt", b"val_0.png\tn03\n"),
        "line 1: expected an image and one of 2 classes",
    ),
    "twice": (
        "tiny val",
        put("val/val_annotations.txt", b"val_0.png\tn01\nval_0.png\tn02\n"),
        "line 2: 'val_0.png' is labelled twice",
    ),
    "unlabelled": (
        "tiny val",
        put("val/val_annotations.txt", b"val_0.png\tn01\n"),
        "'val_1.png' is not labelled",
    ),
    "elsewhere": (
        "tiny val",
        put("val/val_annotations.txt", b"../../x.png\tn01\n"),
        "images: '../../x.png' is labelled but not there",
    ),
    "no folders": (
        "folders",
        lambda folder: [shutil.rmtree(folder / name) for name in ("cat", "ant")],
        "is empty; expected a folder of images for each class",
    ),
    "class empty": ("folders", remove("ant/x.jpg"), "is empty; expected images"),
    "16 bits": (
        "folders",
        lambda folder: Image.fromarray(COLOURS[..., 0].astype(np.uint16)[0]).save(
            folder / "ant/y.png"
        ),
        "pixels of mode I;16",
    ),
    "tokens missing": (
        "tokens",
        remove("val.bin"),
        "val.bin is missing: .*OpenWebText.*standard library",
    ),
    "tokens empty": ("tokens", put("train.bin", b""), "is empty"),
    "tokens cut": ("tokens", cut("train.bin"), "79 bytes are not a multiple"),
    "tokens of another": ("tokens", put("train.bin", b"\xff\0" * 9), "the token 255; .* has 50"),
    "tokens a .npy": ("tokens", put("val.bin", npy(IDS)), "is a .npy; expected"),
    "tokens linked": ("tokens", link("train.bin"), "a link that leads out"),
    "meta without": ("tokens", put("meta.json", b"{}"), "positive vocab_size, got None"),
    "meta of truth": ("tokens", put("meta.json", b'{"vocab_size": true}'), "got True"),
    "meta damaged": ("tokens", put("meta.json", b'{"vocab_size": 1'), "meta.json is damaged"),
    "no meta": ("tokens", remove("meta.json"), "give the size of the vocabulary"),
    "meta of another": ("tokens.npy", put("meta.pkl", pickle.dumps({"size": 5})), "got None"),
    "meta cut": ("tokens.npy", cut("meta.pkl", 4), r"meta\.pkl"),
    "npy of objects": ("tokens.npy", put("train.npy", OBJECTS), "holds object; expected"),
    "npy of reals": ("tokens.npy", put("train.npy", npy(np.zeros(4))), "holds float64"),
    "npy of rows": ("tokens.npy", put("train.npy", npy(IDS.reshape(4, 10))), r"uint16\[4, 10\]"),
    "npy without": ("tokens.npy", put("train.npy", IDS.tobytes()), "train.npy is damaged"),
    "npy cut": ("tokens.npy", cut("train.npy"), "needs .* bytes, the file has"),
    "npy below": ("tokens.npy", put("train.npy", npy(np.array([1, -1]))), "the token -1"),
    "latents missing": ("latents", remove("z.npy"), "missing: the latents .*image-net.*digits"),
    "labels missing": ("latents", remove("labels.npy"), "labels.npy is missing"),
    "latents swapped": (
        "latents",
        swap("z.npy", "labels.npy"),
        "int64.3. where latents .* swapped",
    ),
    "latents labels": ("latents", put("labels.npy", npy(LATENTS)), "where labels, .* swapped"),
    "latents fewer": ("latents", put("z.npy", npy(LATENTS[:2])), "3 labels for 2 examples"),
    "latents infinite": ("latents", put("z.npy", npy(NAN)), "latent 1 is not finite"),
    "latents empty": ("latents", put("z.npy", npy(LATENTS[:0])), "is empty"),
    "latents class": (
        "latents",
        put("labels.npy", npy(np.array([0, 1, 10]))),
        "label 10; expected",
    ),
    "npz of others": ("latents.npz", put("z.npz", npz(z=LATENTS)), "no 'latents'; it holds 'z'"),
    "npz cut": ("latents.npz", cut("z.npz", 30), "z.npz"),
    "npz missing": ("latents.npz", remove("z.npz"), "missing: the latents"),
    "questions missing": ("choices", remove("q.jsonl"), "missing: multiple choice.*generate"),
    "questions empty": ("choices", put("q.jsonl", b"\n\n"), "is empty; expected a question"),
    "questions cut": ("choices", cut("q.jsonl"), "line 2 is damaged"),
    "a list": ("choices", put("q.jsonl", b"[1]"), "line 1 .*expected a JSON object"),
    "repeated": ("choices", put("q.jsonl", b'{"a":1,"a":2}'), "the key 'a' is repeated"),
    "long line": ("choices", put("q.jsonl", b" " * (1 << 20) + b"{}"), "line 1: longer than"),
    "other fields": (
        "choices",
        put("q.jsonl", b'{"text":"a"}'),
        "expected the fields .* got 'text'",
    ),
    "fields of two lines": ("choices", put("q.jsonl", b'{"a\\nb":1}'), r"got 'a\\nb'"),
    "no answer": ("choices", question(label=None), "expected one of the fields answer"),
    "answer beyond": (
        "choices",
        question(label=4),
        "its answer is '4'; .* '0, 1, 2, 3'",
    ),
    "answer unknown": ("choices", question(label=""), "mislabelled: its answer is ''"),
    "answer true": ("choices", question(label=True), "mislabelled: its answer is 'True'"),
    "one choice": ("choices", question(endings=["a"]), "2 to 64 choices, got 1"),
    "choices a text": ("choices", question(endings="ab"), "choices, got str"),
    "choice a number": ("choices", question(endings=["a", 1, "b"]), "texts .* got '1'"),
    "choice empty": ("choices", question(endings=["a", " ", "b"]), "not empty, got ' '"),
    "choice surrogate": ("choices", question(endings=["a", "\ud800", "b"]), "not Unicode"),
    "context empty": ("choices", question(ctx=""), "not empty, got ''"),
    "classes missing": ("classes", remove("mr.jsonl"), "missing: texts with classes.*SetFit/subj"),
    "classes none": ("classes", put("mr.jsonl", b"\n"), "is empty; expected a text and its class"),
    "classes other": (
        "classes",
        put("mr.jsonl", b'{"a": 1}'),
        "expected text and label .* got 'a'",
    ),
    "class beyond": ("classes", put("mr.jsonl", b'{"text": "a", "label": 2}'), "mislabelled"),
    "class missing": (
        "classes",
        put("mr.jsonl", b'{"text": "a", "label": 0}\n{"text": "a"}'),
        "line 2: expected a label, a text or a number; got 'None'",
    ),
    "class alone": (
        "classes",
        put("mr.jsonl", b'{"text": "a", "label_text": "x"}'),
        "expected 2 to 64 classes, got 1",
    ),
    "classes of two kinds": (
        "classes",
        put("mr.jsonl", b'{"text": "a", "label": 0}\n{"text": "a", "label": "x"}'),
        "labels that are all texts or all numbers; got both",
    ),
    "text empty": ("classes", put("mr.jsonl", b'{"text": " ", "label": 0}'), "not empty, got ' '"),
    "texts missing": ("documents", remove("t.jsonl"), "missing: texts in JSON lines.*GSM8k"),
    "texts none": ("documents", put("t.jsonl", b""), "is empty; expected a text in JSON"),
    "texts other": (
        "documents",
        put("t.jsonl", b'{"question": "b"}'),
        "expected text, content, or",
    ),
    "texts number": ("documents", put("t.jsonl", b'{"text": 1}'), "not empty, got '1'"),
    "bpe missing": ("bpe", remove("bpe.json"), "bpe.json is missing"),
    "bpe edited": ("bpe", put("bpe.json", b'{"format": 1}'), "checksum does not match"),
    "bpe of text": ("bpe", sealed(["ab"]), "merge 0 is 'ab'; expected two earlier"),
    "bpe of later": ("bpe", sealed([[0, 256]]), r"merge 0 is \[0, 256\]"),
    "bpe of truth": ("bpe", sealed([[True, 1]]), "merge 0 is .True, 1."),
    "bpe twice": ("bpe", sealed([[1, 2], [1, 2]]), "a merge twice"),
    "bpe bomb": ("bpe", sealed([[255 + k, 255 + k] for k in range(99)]), "merge 5 has 64 bytes"),
}


def explained(error, folder):
    """Checks that a message is one line of bounded length with a file of the folder."""
    text = str(error)
    return str(folder) in text and "\n" not in text and len(text) < 600 + 2 * len(str(folder))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path, fault):
    name, change, message = FAULTS[fault]
    folder = tmp_path / "data"
    load = made(folder, name)
    load()
    change(folder)
    with pytest.raises(DataError, match=message) as caught:
        load()
    assert explained(caught.value, folder)


def sound(found):
    """Checks the properties of every result."""
    if isinstance(found, Images):
        n = len(found.images)
        assert n > 0
        assert found.labels.shape == (n,)
        assert found.images.dtype == np.uint8
        assert found.images.ndim == 4
        assert 0 <= found.labels.min() <= found.labels.max() < len(found.names)
    elif isinstance(found, tokens.Tokens):
        assert max(found.train.max(), found.held_out.max()) < found.vocab
    elif isinstance(found, latents.Latents):
        assert np.isfinite(found.latents).all()
        assert found.labels.shape == found.latents.shape[:1]
        assert 0 <= found.labels.min() <= found.labels.max() < 10
    elif isinstance(found, bpe.Bpe):
        assert bpe.decode(found, bpe.encode(found, b"the theory")) == b"the theory"
    else:
        for item in found:
            if isinstance(item, str):
                assert item.strip()
                continue
            assert 0 <= item.answer < len(item.choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_damaged_bytes_are_refused_or_harmless(tmp_path, name):
    """100 changes: bits flipped (often near the beginning), cut off, put in, overwritten."""
    folder = tmp_path / "data"
    load = made(folder, name)
    sound(load())
    rng = np.random.default_rng(len(name))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    refused = 0
    for _ in range(100):
        path = files[rng.integers(len(files))]
        whole = path.read_bytes()
        data = bytearray(whole)
        at = int(rng.integers(min(len(data), rng.choice([32, 200, 1 << 20])) or 1))
        change = rng.integers(4)
        if change == 0:
            data[at : at + 1] = [data[at] ^ 1 << rng.integers(8)] if data else []
        elif change == 1:
            del data[at:]
        elif change == 2:
            data[at:at] = rng.bytes(rng.integers(1, 9))
        else:
            data[at : at + 4] = [0xFF] * 4
        path.write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sound(load())
        except ValueError as error:
            assert explained(error, folder), str(error)  # noqa: PT017
            refused += 1
        finally:
            path.write_bytes(whole)
    assert refused > 10
    sound(load())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: idx.load(p, "minst"), "name, split: expected one of mnist, .* got 'minst'"),
        (lambda p: cifar.load(p, "cifar-10", "val"), "train or test; got .* and 'val'"),
        (lambda p: cifar.load(p, labels="coarse"), "labels: cifar-10 has fine; got 'coarse'"),
        (lambda p: image_folders.tiny_imagenet(p, "test"), "the test images have no labels"),
        (lambda p: tokens.read(p / "train.bin", 0), "vocab must be at least 1; got 0"),
        (lambda p: tokens.read(p / "train.bin", 1 << 17), "16-bit tokens cannot come from"),
        (lambda p: tokens.load(p / "none"), "train.bin is missing: a tokenised text"),
        (lambda p: tokens.load(p, 51), "has a vocabulary of 50, expected 51"),
        (lambda p: tokens.blocks(IDS, 40), "context must be from 1 to 39 tokens; got 40"),
        (lambda p: tokens.split(IDS, 1.0), "held_out must leave tokens on both sides"),
        (lambda p: stream.indices(-1, examples=1, size=1, seed=0), "step must be at least 0"),
        (
            lambda p: tokens.batch(IDS, 0, seed=0, size=1, context=4, chosen=np.array([9])),
            "chosen must be blocks from 0 to 8; got 9 to 9",
        ),
        (lambda p: latents.load(p / "z.npz", p / "l.npy"), "labels: .*holds its own"),
        (lambda p: choices.generate(0, 1, 9), "2 to 8; got 0, 1, 9"),
        (lambda p: bpe.train(b"", -1), "merges must be from 0"),
        (lambda p: bpe.decode(bpe.train(b"", 0), np.array([256])), "from 0 to 255; got 256"),
        (lambda p: choices.pack(choices.generate(0, 1), _bytes, 3), r"items\[0\]: choice"),
    ],
)
def test_bad_arguments_are_named(tmp_path, call, message):
    made(tmp_path, "tokens")
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_an_archive_unpacks_to_a_limit(tmp_path, monkeypatch):
    load = made(tmp_path, "mnist.gz")
    monkeypatch.setattr(idx, "MAX_UNPACKED", 76)
    load()
    monkeypatch.setattr(idx, "MAX_UNPACKED", 75)
    with pytest.raises(DataError, match=r"76 bytes, and of \d+ packed bytes 75 at most"):
        load()


def test_a_pickle_is_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    load = made(tmp_path, "tokens.npy")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"trap": Trap(), "vocab_size": 50}))
    assert load().vocab == 50
    (tmp_path / "train.npy").write_bytes(npy(np.zeros(1), "|O")[:-8] + pickle.dumps(Trap()))
    with pytest.raises(DataError):
        load()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("n", [*range(1, 34), 1000, 4097])
def test_every_epoch_takes_each_example_once(n):
    size = 7 if n < 100 else 331
    stop = -(-3 * n // size)
    seen = np.concatenate([stream.indices(s, examples=n, size=size, seed=5) for s in range(stop)])
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(seen[epoch * n : (epoch + 1) * n]), np.arange(n))
    if n >= 1000:
        assert not np.array_equal(seen[:n], seen[n : 2 * n])
        # If the order is random, its correlation with the place is N(0, 1/(n-1)), as is that of
        # neighbours, and that of one epoch with the next.
        z = np.sqrt(n - 1) * np.array(
            [
                np.corrcoef(seen[:n], np.arange(n))[0, 1],
                np.corrcoef(seen[: n - 1], seen[1:n])[0, 1],
                np.corrcoef(seen[:n], seen[n : 2 * n])[0, 1],
            ]
        )
        assert np.all(np.abs(z) < 4)


@pytest.mark.slow
def test_orders_are_uniform_over_seeds():
    n, seeds = 7, 1500
    where = np.array([stream.permuted(np.arange(n), n, [seed, 0]) for seed in range(seeds)])
    counts = np.stack([np.bincount(column, minlength=n) for column in where.T])
    # Under a uniform permutation each count is binomial(seeds, 1/n).
    z = (counts - seeds / n) / np.sqrt(seeds / n * (1 - 1 / n))
    assert np.abs(z).max() < 4


def test_batches_are_blocks_with_what_follows(tmp_path):
    text = made(tmp_path, "tokens")().train
    count = tokens.blocks(text, 6)
    assert count == 6
    found = [tokens.batch(text, step, seed=1, size=4, context=6) for step in range(3)]
    blocks = np.concatenate([batch.inputs for batch in found])
    expected = IDS[:36].reshape(6, 6)
    for epoch in (blocks[:6], blocks[6:]):
        assert sorted(map(tuple, epoch)) == sorted(map(tuple, expected))
    after = {tuple(IDS[6 * k : 6 * k + 6]): IDS[6 * k + 6] for k in range(6)}
    for batch in found:
        assert batch.inputs.dtype == batch.targets.dtype == np.int32
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert [after[tuple(row)] for row in batch.inputs] == batch.targets[:, -1].tolist()
    np.testing.assert_array_equal(
        tokens.batch(text, 2, seed=1, size=4, context=6).inputs, found[2].inputs
    )
    part = tokens.batch(text, 0, seed=1, size=9, context=6, chosen=np.array([1, 4])).inputs
    assert set(map(tuple, part)) == set(map(tuple, expected[[1, 4]]))


def test_block_means_match_a_loop(monkeypatch):
    expected = [np.mean([int(t) for t in IDS[6 * k : 6 * k + 6]]) for k in range(6)]
    monkeypatch.setattr(tokens, "CHUNK", 12)  # two blocks at a time
    np.testing.assert_allclose(tokens.block_means(IDS, 6), expected, rtol=1e-15)


def naive_bpe(text, merges):
    """The definition: counts every pair of every word again after each merge."""
    words = [tuple(word) for word in bpe._WORD.findall(text)]
    out = []
    for token in range(256, 256 + merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        out.append(list(best))
        for k, word in enumerate(words):
            new, i = [], 0
            while i < len(word):
                both = word[i : i + 2] == best
                new.append(token if both else word[i])
                i += 1 + both
            words[k] = tuple(new)
    return out, [token for word in words for token in word]


BYTES = RNG.bytes(3000)
TEXTS = {
    "text": (__doc__ or "").encode() * 3 + b"aaaa aaa aaaaa abab ababab\n\n\n  x = 1234\n" * 4,
    "utf-8": "Größe naïve Größe 語語 größer\t\r\n".encode() * 5,
    "bytes": BYTES,
    "one": b"a" * 500,
    "space": b" \n" * 200 + b" " * 99,
    "nothing": b"",
}


@pytest.mark.parametrize("name", TEXTS)
def test_bpe_is_its_definition_and_round_trips(tmp_path, name):
    text = TEXTS[name]
    assert b"".join(bpe._WORD.findall(text)) == text
    code = bpe.train(text, 40)
    merges, encoded = naive_bpe(text, 40)
    assert code.merges.tolist() == merges
    assert bpe.encode(code, text).tolist() == encoded
    bpe.save(tmp_path / "a.json", code)
    again = bpe.load(tmp_path / "a.json")
    np.testing.assert_array_equal(again.merges, code.merges)
    assert (again.merges.dtype, again.vocab) == (np.int32, 256 + len(merges))
    for other in (text, BYTES, bytes(range(256)) * 2, b"", b" " * 1000 + b"z"):
        ids = bpe.encode(again, other)
        assert ids.dtype == np.uint16
        assert bpe.decode(again, ids) == other


@pytest.mark.slow
def test_bpe_of_many_words():
    words = [base64.b32encode(RNG.bytes(n)).rstrip(b"=") for n in RNG.integers(1, 5, 30_000)]
    text = b" ".join(words[k] for k in RNG.zipf(1.3, 60_000) % len(words))[:300_000]
    code = bpe.train(text, 500)
    assert code.vocab == 756
    assert len(bpe.encode(code, text)) < 0.75 * len(text)
    assert bpe.decode(code, bpe.encode(code, text)) == text


def test_generated_questions_are_right():
    items = choices.generate(3, 1200)
    assert items == choices.generate(3, 1200) != choices.generate(4, 1200)
    for item in items:
        assert len(set(item.choices)) == 4
        if item.context.endswith("="):
            right = eval(item.context[:-1])
        else:
            terms = [int(term) for term in re.findall(r"\d+", item.context)]
            assert len(set(np.diff(terms))) == 1
            right = 2 * terms[-1] - terms[-2]
        assert item.choices[item.answer] == f" {right}"
    # Each place is binomial(1200, 1/4).
    z = (np.bincount([item.answer for item in items], minlength=4) - 300) / np.sqrt(1200 * 3 / 16)
    assert np.abs(z).max() < 4


def _bytes(text):
    return np.frombuffer(text, np.uint8)


@pytest.mark.slow
def test_packed_questions_are_scored_by_hand():
    items = [choices.Item("abc", (" d", " éf"), 1), choices.Item("z", (" x", " y", " w"), 2)]
    packed = choices.pack(items, _bytes, 5)
    assert bytes(packed.tokens[0, 0].tolist()) == b"abc d"
    assert (
        bytes(packed.tokens[0, 1].tolist()) == "c éf".encode()
    )  # two bytes of context are truncated
    assert packed.scored[0].astype(int).tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0] * 5]
    assert packed.length.tolist() == [[2, 4, 0], [2, 2, 2]]
    assert packed.answer.tolist() == [1, 2]
    log = np.broadcast_to(-np.arange(1.0, 6.0, dtype=np.float32), packed.scored.shape)
    expected = np.array([[-4.5, -3.5, -np.inf], [-2.5, -2.5, -2.5]])
    np.testing.assert_array_equal(choices.scores(log, packed.scored), expected)
    np.testing.assert_array_equal(
        jax.jit(choices.scores)(log, packed.scored, 2 * packed.length), expected / 2
    )
    assert choices.accuracy(choices.scores(log, packed.scored), packed.answer) == 0.5
    hidden = np.where(packed.scored, log, np.nan)  # tokens that are not scored have no influence
    np.testing.assert_array_equal(choices.scores(hidden, packed.scored), expected)
