"""Image encoders with Hugging Face's names, their experts on images in folders, and merges."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from pictures import flaws
from PIL import Image

from experiments.data.files import DataError
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.models.backbones import encode, load_backbone
from experiments.studies.merging_scaling import experts
from experiments.studies.merging_scaling.config import TABLE_2
from sail_jax.checkpoint import save_checkpoint

ms = registry.load("merging_scaling")
SIDE, NAMES = 16, ("cifar10", "svhn", "dtd")
RNG = np.random.default_rng


def resnet(kind, widths=(4, 8)):
    """Tensors of a small ResNet by Hugging Face's names: two stages, the first of two blocks."""
    rng, tensors = RNG(0), {}

    def conv(name, inputs, outputs, size):
        kernel = rng.normal(size=(outputs, inputs, size, size)) / (inputs * size**2) ** 0.5
        tensors[f"{name}.convolution.weight"] = kernel
        norm = {"weight": 1 + rng.random(outputs), "bias": rng.normal(size=outputs)}
        norm |= {"running_mean": rng.normal(size=outputs), "running_var": 1 + rng.random(outputs)}
        for end, value in norm.items():
            tensors[f"{name}.normalization.{end}"] = value

    bottleneck = kind == "bottleneck"
    conv("resnet.embedder.embedder", 3, 4, 7)
    inputs = 4
    for s, (width, depth) in enumerate(zip(widths, (2, 1), strict=True)):
        for b in range(depth):
            at, inner = f"resnet.encoder.stages.{s}.layers.{b}", width // 4
            if inputs != width or (b == 0 and s > 0):
                conv(f"{at}.shortcut", inputs, width, 1)
            shapes = (
                [(inputs, inner, 1), (inner, inner, 3), (inner, width, 1)]
                if bottleneck
                else [(inputs, width, 3), (width, width, 3)]
            )
            for i, shape in enumerate(shapes):
                conv(f"{at}.layer.{i}", *shape)
            inputs = width
    tensors |= {"classifier.1.weight": np.zeros((5, inputs)), "classifier.1.bias": np.zeros(5)}
    config = {"model_type": "resnet", "layer_type": kind, "depths": [2, 1]}
    return config, {name: x.astype(np.float32) for name, x in tensors.items()}


def saved(folder, config, tensors):
    save_checkpoint(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _slow(tensors, name, x, stride):
    """Computes a convolution and BatchNorm, window by window."""
    w = tensors[f"{name}.convolution.weight"].astype(float)
    size = w.shape[-1]
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2))
    rows = [
        [
            (w * x[:, i : i + size, j : j + size]).sum((1, 2, 3))
            for j in range(0, x.shape[2] - size + 1, stride)
        ]
        for i in range(0, x.shape[1] - size + 1, stride)
    ]
    y = np.moveaxis(np.array(rows), -1, 0)
    at = {e: tensors[f"{name}.normalization.{e}"][:, None, None] for e in
          ("weight", "bias", "running_mean", "running_var")}  # fmt: skip
    y = (y - at["running_mean"]) / np.sqrt(at["running_var"] + 1e-5)
    return y * at["weight"] + at["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_a_resnet_computes_what_hugging_face_s_does(kind, tmp_path):
    config, tensors = resnet(kind)
    backbone = load_backbone(saved(tmp_path / "net", config, tensors))
    assert len(backbone.params) + len(backbone.statistics) == len(tensors) - 2  # without its head
    images = RNG(1).integers(0, 256, (2, SIDE, SIDE, 3)).astype(np.uint8)
    run = jax.jit(partial(encode, backbone))
    found, _ = run(backbone.params, backbone.statistics, images)
    for image, features in zip(images, found, strict=True):
        x = np.moveaxis((image / 255 - backbone.mean) / backbone.std, -1, 0)
        x = np.maximum(_slow(tensors, "resnet.embedder.embedder", x, 2), 0)
        x = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        half = range(0, x.shape[1] - 2, 2)
        x = np.array([[x[:, i : i + 3, j : j + 3].max((1, 2)) for j in half] for i in half])
        x = np.moveaxis(x, -1, 0)
        for s, b in ((0, 0), (0, 1), (1, 0)):
            at, y = f"resnet.encoder.stages.{s}.layers.{b}", x
            count, halving = (3, 1) if kind == "bottleneck" else (2, 0)
            for i in range(count):
                y = _slow(tensors, f"{at}.layer.{i}", y, 1 + (s == 1 and i == halving))
                y = np.maximum(y, 0) if i < count - 1 else y
            if f"{at}.shortcut.convolution.weight" in tensors:
                x = _slow(tensors, f"{at}.shortcut", x, 1 + s)
            x = np.maximum(x + y, 0)
        np.testing.assert_allclose(features, x.mean((1, 2)), rtol=1e-4)


@pytest.mark.slow
def test_running_statistics_follow_the_images(tmp_path):
    config, tensors = resnet("basic")
    backbone = load_backbone(saved(tmp_path / "net", config, tensors))
    images = RNG(1).integers(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)
    _, new = encode(backbone, backbone.params, backbone.statistics, images, train=True)
    assert set(new) == set(backbone.statistics)
    stem = "resnet.embedder.embedder"
    plain = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1 - 1e-5}
    ends = {f"{stem}.normalization.{end}": np.full(4, value) for end, value in plain.items()}
    pixels = np.moveaxis((images / 255 - backbone.mean) / backbone.std, -1, 1)
    seen = np.stack([_slow(tensors | ends, stem, x, 2) for x in pixels])
    found = seen.mean((0, 2, 3)), seen.var((0, 2, 3), ddof=1)
    for end, value in zip(("running_mean", "running_var"), found, strict=True):
        name = f"{stem}.normalization.{end}"
        np.testing.assert_allclose(new[name], 0.9 * tensors[name] + 0.1 * value, rtol=1e-4)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three tasks of images in folders, one colour per class, and a checkpoint."""
    root, rng = tmp_path_factory.mktemp("tasks"), RNG(0)
    for k, name in enumerate(NAMES):
        for split, count in (("train", 6), ("test", 3)):
            for c in range(2 + (k == 2)):
                home = root / name / split / f"class{c}"
                home.mkdir(parents=True)
                for i in range(count):
                    pixels = rng.integers(0, 80, (SIDE, SIDE + k, 3))
                    pixels[..., (c + k) % 3] += 150
                    Image.fromarray(pixels.astype(np.uint8)).save(home / f"{i}.png")
    return str(root), str(saved(root.parent / "net", *resnet("basic")))


def small(files, preset="paper_resnet18", **more):
    folder, checkpoint = files
    return varied(
        ms.presets[preset],
        merging={"ada_steps": 2},
        experts={
            "checkpoint": checkpoint,
            "data": {"folder": folder, "names": NAMES, "side": SIDE, "test": 7},
            "groups": 2,
            "group": (),
            "swept": {
                "steps": (1, 2), "batch": (4,), "rate": (0.01,), "ratio": (0.5, 1.0),
                "tasks": (2, 3),
            },
            "centre": {"steps": 2, "batch": 4, "rate": 0.01, "tasks": 2},
            **more,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("paper_resnet18", marks=pytest.mark.soak),
        pytest.param("paper_vit", marks=pytest.mark.soak),
    ],
)
def test_experts_are_tuned_merged_and_set_beside_table_2(files, preset):
    fixed = preset == "paper_vit"
    dataset = ms.run(small(files, preset, group=NAMES[1:] if fixed else ()))
    merges = len(ms.presets[preset].experts.merges)
    assert dataset["loss"].shape == (5, 2, 2, merges)
    # one batch, one rate; of three tasks one group of three; the one group where N is not swept
    missing = (2 * 2 + 1 + fixed * 6) * merges
    assert int(np.isnan(dataset["loss"]).sum()) == missing
    centre = [("steps", 1), ("batch", 0), ("rate", 0), ("ratio", 1), ("tasks", 0)]
    found = [dataset["loss"].sel(law=law).isel(point=k).values for law, k in centre]
    same = 4 if fixed else 5
    np.testing.assert_array_equal(found[:same], [found[0]] * same)
    # all three tasks: of 6, 6 and 7 images, which count alike
    right = 19 * dataset["accuracy"].sel(law="tasks").isel(point=1, replicate=0)
    np.testing.assert_allclose(right, np.round(right), atol=1e-5)
    (rows,) = ms.tables(dataset)
    assert [row[0] for row in rows[1:]] == list(NAMES)
    printed = [
        f"{TABLE_2[name][0]:.4f}" if preset == "paper_resnet18" else "none" for name in NAMES
    ]
    assert [row[2] for row in rows[1:]] == printed
    assert len(ms.findings(dataset)) == 4
    assert "Experts alone" in ms.summary(dataset)
    assert [flaw for figure in ms.plot(dataset).values() for flaw in flaws(figure)] == []


@pytest.mark.slow
def test_averages_are_of_the_experts_of_a_group(files, monkeypatch):
    monkeypatch.setattr(experts, "CHUNK", 3)  # three parts, the last one padded
    config = small(files)
    backbone, tasks = experts.load(config)
    assert [(len(task.learn.paths), len(task.labels), task.classes) for task in tasks] == [
        (12, 6, 2), (12, 6, 2), (18, 7, 3)
    ]  # fmt: skip
    judge = experts.Judge(config, backbone, tasks)
    flat = np.asarray(jax.flatten_util.ravel_pytree(judge.base)[0])
    two = [{"body": flat + 1}, {"body": flat - 3}]
    found = judge.merged("average", two, (0, 2))
    np.testing.assert_allclose(jax.flatten_util.ravel_pytree(found)[0], flat - 1, atol=1e-5)
    head = np.zeros(sum(np.size(x) for x in experts._head(backbone, tasks[2])), np.float32)
    loss, accuracy = judge.grade(judge.base, head, 2)
    assert loss == pytest.approx(np.log(3), rel=1e-5)
    assert accuracy == pytest.approx((tasks[2].labels == 0).mean())


def test_groups_are_different_and_all_where_there_are_few():
    config = ms.presets["paper_resnet50"]
    for count in config.experts.swept.tasks:
        drawn = experts.groups(config, count)
        assert len(set(drawn)) == 15
        assert all(len(set(group)) == count for group in drawn)
    assert experts.groups(config, 20) == [tuple(range(20))]


@pytest.mark.parametrize("name", [name for name in ms.presets if name.startswith("paper")])
def test_presets_of_the_paper_say_which_files_they_need(name, files):
    with pytest.raises(DataError, match=r"^experts.checkpoint must name the folder of \w+/.*net.*"):
        ms.run(ms.presets[name])
    with pytest.raises(
        DataError, match=r"^experts.data.folder must be the place of images of .*svhn"
    ):
        ms.run(varied(ms.presets[name], experts={"checkpoint": files[1]}))


def test_what_cannot_be_used_is_named(files, tmp_path):
    with pytest.raises(DataError, match=r"cars.* is missing: images of 3 tasks is published at"):
        experts.load(small(files, data={"folder": files[0], "names": (*NAMES[:2], "cars")}))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(DataError, match="model_type resnet, vit, clip; got 'bert'"):
        experts.load(small(files, checkpoint=str(tmp_path)))
    with pytest.raises(ValueError, match=r"^experts.centre.steps must be one of \(1, 2\); got 3$"):
        small(files, centre={"steps": 3, "batch": 4, "rate": 0.01, "tasks": 2})
    with pytest.raises(ValueError, match=r"^experts.swept.tasks must be at most .* 2; got"):
        small(files, data={"names": ("svhn", "dtd")})
    with pytest.raises(
        ValueError, match=r"^experts.group must be different tasks of .* got \('cars'"
    ):
        small(files, group=("cars", NAMES[0]))
    with pytest.raises(ValueError, match=r"experts.group must be centre.tasks = 2 tasks"):
        small(files, group=NAMES[:1])
