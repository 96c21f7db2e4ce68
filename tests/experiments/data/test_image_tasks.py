"""Tasks made from labelled images, and the studies that use them with any data set."""

import struct

import numpy as np
import pytest

from experiments.data import digits
from experiments.data.files import DataError, Pool
from experiments.data.image_tasks import of, parse, pick, split
from experiments.data.registry import ImagePool
from experiments.lab import registry
from experiments.lab.config import varied

POOL = Pool(*digits.load())
SIDE = 12  # pixels of the images in files


@pytest.mark.parametrize(
    ("name", "angle", "classes"),
    [
        ("upright", 0, None),
        ("rotate 20", 20, None),
        ("rotate -135", -135, None),
        ("rotate +7", 7, None),
        ("rotate 22.5", 22.5, None),
        ("classes 0-4", 0, range(5)),
        ("classes 8-9", 0, range(8, 10)),
    ],
)
def test_task_names(name, angle, classes):
    assert parse(name) == (angle, classes)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "rotate",
        "rotate 1e3",
        "rotate  20",
        "classes 4-4",
        "classes 5-2",
        "rotate 1.",
        "digits 1-2",
        "x",
    ],
)
def test_unknown_tasks_are_named(name):
    with pytest.raises(ValueError, match=f"unknown task '{name}'"):
        parse(name)


def test_a_rotation_turns_the_images_anticlockwise():
    upright, turned = of(POOL), of(POOL, "rotate 90")
    expected = np.rot90(upright.images.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    # linear interpolation at the nodes: rounding of float32 coordinates of size 8
    np.testing.assert_allclose(turned.images, expected, atol=1e-5)
    np.testing.assert_array_equal(turned.labels, upright.labels)
    assert upright.images.dtype == np.float32
    assert (upright.images.min(), upright.images.max()) == (0, 1)
    assert len(upright.images) == digits.EXAMPLES


def test_classes_choose_members_only():
    task = of(POOL, "classes 0-4")
    np.testing.assert_array_equal(task.member, task.labels <= 4)
    np.testing.assert_array_equal(task.images, of(POOL).images)


def test_splits_are_partitions_and_depend_on_seed_and_replicate():
    parts = split(1, 3, examples=1797, train=1000, validation=300)
    whole = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(np.sort(whole, axis=1), np.tile(np.arange(1797), (3, 1)))
    assert [part.shape[1] for part in parts] == [1000, 300, 497]
    assert len({row.tobytes() for row in whole}) == 3
    again = np.concatenate(split(1, 3, examples=1797, train=1000, validation=300), axis=1)
    np.testing.assert_array_equal(whole, again)
    other = np.concatenate(split(2, 3, examples=1797, train=1000, validation=300), axis=1)
    assert (whole != other).any()


def test_a_split_without_members_of_a_task_is_refused():
    ones = np.flatnonzero(of(POOL).labels == 1)[None]
    tasks = [of(POOL, "classes 0-4"), of(POOL, "classes 5-9")]
    assert pick(tasks[:1], ones).images.shape == (1, 1, ones.size, 64)
    with pytest.raises(ValueError, match="tasks: a split has no images of one task"):
        pick(tasks, ones)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files as Fashion-MNIST's publisher has them, of smaller images: a class is a bright column
    under noise."""
    path, rng = tmp_path_factory.mktemp("fashion"), np.random.default_rng(0)
    for name, count in (("train", 400), ("t10k", 100)):
        labels = np.arange(count) % 10
        images = rng.integers(0, 100, (count, SIDE, SIDE))
        images[np.arange(count), :, labels] += 150
        for stem, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            data = head + array.astype(np.uint8).tobytes()
            (path / f"{name}-{stem}-ubyte").write_bytes(data)
    return str(path)


def test_a_pool_is_all_images_or_some_of_them(folder):
    pool = ImagePool("fashion", folder).pool(0)
    assert pool.images.shape == (500, SIDE, SIDE, 1)
    assert pool.images.dtype == np.float32
    assert 0 <= pool.images.min() < pool.images.max() <= 1
    some = [ImagePool("fashion", folder, examples=40).pool(seed) for seed in (3, 3, 4)]
    rows = [{x.tobytes() for x in part.images} for part in some]
    assert rows[0] == rows[1] != rows[2]
    assert len(rows[0]) == 40
    assert rows[0] < {x.tobytes() for x in pool.images}
    for image, label in zip(some[0].images, some[0].labels, strict=True):
        assert image.sum(0)[:10, 0].argmax() == label
    with pytest.raises(DataError, match=r"data.examples must be at most 500; got 501"):
        ImagePool("fashion", folder, examples=501).pool(0)


STUDIES = {
    "merge_digits": {"train": 300, "validation": 100},
    "merging_scaling": {"pretraining": {"images": 200}, "pool": 200},
    "cross_task_linearity": {"parts": ("rotated", "split_classes")},
    "growth_training": {"methods": ("msg", "ligo")},
    "merge_prediction": {"train": 300, "learn": 100, "held_out": 64},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name == "merge_digits" else "soak"))
        for name in STUDIES
    ],
)
def test_studies_learn_from_any_images(name, folder):
    study = registry.load(name)
    data = {"name": "fashion", "folder": folder}
    dataset = study.run(varied(study.presets["tiny"], data=data, **STUDIES[name]))
    assert study.summary(dataset)


@pytest.mark.parametrize("name", STUDIES)
def test_images_in_files_need_a_folder(name):
    study = registry.load(name)
    with pytest.raises(DataError, match=r"data.folder must be the place of Fashion-MNIST"):
        study.run(varied(study.presets["tiny"], data={"name": "fashion"}, **STUDIES[name]))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("merge_digits", {"validation": 497}, "validation must be below 497, .* got 497"),
        ("merge_digits", {"tasks": ("upright", "classes 5-10")}, "tasks must be of the classes 0"),
        ("merging_scaling", {"tasks": ("upright", "classes 5-10")}, "tasks must be of the classes"),
        ("cross_task_linearity", {"test": 163}, "test must be at most 174 - learn; got 163"),
        ("growth_training", {"held_out": 1797}, "held_out must be below 1797, to leave images"),
        ("merge_prediction", {"train": 1797}, "train must be below 1797, to leave images"),
        (
            "growth_training",
            {"task": "text", "data": {"examples": 9}},
            "data must be left out if",
        ),
    ],
)
def test_what_digits_do_not_have_is_refused_at_once(name, change, message):
    change = {"train": 1300} | change if name == "merge_digits" else change
    with pytest.raises(ValueError, match=message):
        varied(registry.load(name).presets["tiny"], **change)


def test_what_files_do_not_have_is_refused_when_they_are_read(folder):
    study = registry.load("merge_digits")
    data = {"name": "fashion", "folder": folder}
    config = varied(study.presets["tiny"], data=data, train=300, validation=200)
    with pytest.raises(DataError, match=r"validation must be below 200, .* got 200"):
        study.run(config)
    study = registry.load("cross_task_linearity")
    with pytest.raises(DataError, match=r"test must be at most 50 - learn; got 39"):
        study.run(varied(study.presets["tiny"], data=data, test=39))
    study = registry.load("merge_prediction")
    with pytest.raises(DataError, match=r"learn must be at most \d+, for 'classes 0-4'; got 300"):
        study.run(varied(study.presets["tiny"], data=data, train=300))
