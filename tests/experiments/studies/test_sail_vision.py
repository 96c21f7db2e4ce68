"""SAIL's vision experiment: parts compared with independent computations, errors, findings."""

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from tiny_runs import tiny_run

from experiments.data.augment import Augment, augment, pixels
from experiments.data.files import DataError
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.lab.store import direct
from experiments.models import presets
from experiments.studies.sail_vision import data as data_of
from experiments.studies.sail_vision import findings as told
from experiments.studies.sail_vision import starts, training
from experiments.training import sharding
from sail_jax.basis.change_basis import change_basis
from sail_jax.growth import permute

sv = registry.load("sail_vision")

EPS = float(jnp.finfo(jnp.float32).eps)
TINY = sv.presets["tiny"]


@pytest.fixture(scope="module")
def data():
    return data_of.load(TINY)


@pytest.fixture(scope="module")
def ran():
    return tiny_run("sail_vision").dataset


changed = jax.jit(augment, static_argnums=2)
IMAGES = np.random.default_rng(1).random((16, 6, 5, 3), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        Augment(area=0.3),
        Augment(shift=2),
        Augment(flip=0.5),
        Augment(brightness=0.5),
        Augment(contrast=0.5),
        Augment(saturation=0.5),
        Augment(grey=0.5),
        Augment(solarise=0.5),
        Augment(noise=0.1),
        Augment(cutout=3),
        training.RECIPES["byol"],
    ],
)
def test_augmentations_are_keyed_differ_between_images_and_stay_in_range(how):
    one, again, other = (changed(IMAGES, jax.random.key(k), how) for k in (0, 0, 1))
    assert one.shape == IMAGES.shape
    assert float(one.min()) >= 0
    assert float(one.max()) <= 1
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    same = changed(np.broadcast_to(IMAGES[:1], IMAGES.shape), jax.random.key(0), how)
    assert not np.array_equal(same, np.broadcast_to(same[:1], same.shape))


def test_no_change_is_none_and_bytes_are_pixels():
    np.testing.assert_array_equal(changed(IMAGES, jax.random.key(0), Augment()), IMAGES)
    stored = np.array([[0, 51, 255]], np.uint8)
    np.testing.assert_allclose(pixels(stored), [[0, 0.2, 1]], atol=EPS)


def test_a_shift_is_one_of_the_crops_of_the_padded_image():
    found = changed(IMAGES, jax.random.key(3), Augment(shift=1))
    for image, was in zip(np.asarray(found), np.asarray(IMAGES), strict=True):
        wide = np.pad(was, ((1, 1), (1, 1), (0, 0)))
        crops = [wide[i : i + 6, j : j + 5] for i in range(3) for j in range(3)]
        assert any(np.array_equal(image, crop) for crop in crops)


@pytest.mark.slow
def test_a_flip_happens_as_often_as_is_said_and_a_certain_one_always():
    many = np.broadcast_to(IMAGES[:1], (1000, *IMAGES.shape[1:]))
    found = np.asarray(changed(many, jax.random.key(0), Augment(flip=0.3)))
    share = (found == many[:, :, ::-1]).all(axis=(1, 2, 3)).mean()
    # null: Bernoulli(0.3), 1000 draws; |z| < 4
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 1000)
    always = changed(IMAGES, jax.random.key(0), Augment(flip=1.0))
    np.testing.assert_array_equal(always, IMAGES[:, :, ::-1])


def test_grey_has_equal_channels_and_a_crop_of_everything_is_the_image():
    grey = np.asarray(changed(IMAGES, jax.random.key(0), Augment(grey=1.0)))
    np.testing.assert_allclose(grey, np.repeat(grey[..., :1], 3, -1))
    np.testing.assert_allclose(grey[..., 0], IMAGES @ np.array([0.299, 0.587, 0.114]), atol=4 * EPS)


@pytest.mark.slow
def test_a_cutout_leaves_out_a_square():
    found = np.asarray(
        changed(np.ones((50, 9, 9, 1), np.float32), jax.random.key(0), Augment(cutout=3))
    )
    holes = (found == 0).sum(axis=(1, 2, 3))
    assert holes.max() == 9
    assert set(holes) <= {4, 6, 9}  # whole, at an edge, in a corner
    for image in found[..., 0]:
        rows, columns = (image == 0).any(1), (image == 0).any(0)
        assert (image == 0).sum() == rows.sum() * columns.sum()


@pytest.mark.parametrize(
    "bad", [{"flip": 1.5}, {"area": 0.0}, {"shift": -1}, {"noise": -0.1}, {"contrast": -0.2}]
)
def test_impossible_augmentations_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
        Augment(**bad)


def test_sources_learn_disjoint_classes_which_make_up_the_whole(data):
    for one in data:
        first, second = (set(part.labels.tolist()) for part in one.parts)
        assert (first, second) == (set(range(7)), {7, 8, 9})
        assert sum(len(part.labels) for part in one.parts) == len(one.learn.labels)
        learn, test = (some.images.reshape(len(some.images), -1) for some in (one.learn, one.test))
        assert len(learn) + len(test) == 1797
    assert not np.array_equal(data[0].learn.labels, data[1].learn.labels)


def test_weights_are_shares_of_the_images_as_theorem_3_has_it_for_disjoint_parts(data):
    for one in data:
        sizes = np.array([len(part.labels) for part in one.parts])
        np.testing.assert_allclose(data_of.weights(one), sizes / sizes.sum(), rtol=1e-12)


def test_other_data_need_a_folder_and_what_is_there(tmp_path):
    config = varied(TINY, data={"name": "cifar-10"})
    with pytest.raises(
        DataError, match=r"data.folder must be the place of CIFAR-10.*digits, needs no"
    ):
        sv.run(config)
    with pytest.raises(DataError, match=r"CIFAR-10 .* is published at"):
        sv.run(varied(config, data={"folder": str(tmp_path)}))


def test_cifar_files_are_read(tmp_path):
    rng = np.random.default_rng(0)
    for k, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        records = rng.integers(0, 256, (40, 3073), np.uint8)
        records[:, 0] = (np.arange(40) + k) % 10
        records.tofile(tmp_path / name)
    config = varied(TINY, data={"name": "cifar-10", "folder": str(tmp_path)})
    first, *others = data_of.load(config)
    assert first.learn.images.shape == (200, 32, 32, 3)
    assert first.learn.images.dtype == np.uint8
    assert len(first.test.labels) == 40
    assert all(one is first for one in others)
    mean, _ = data_of.scale(first.learn.images)
    np.testing.assert_allclose(mean, first.learn.images.mean((0, 1, 2)) / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("budget.batch", {"budget": {"batch": 5000}}),
        ("probe.neighbours", {"probe": {"neighbours": 5000}}),
        ("statistics", {"statistics": 5000}),
    ],
)
def test_more_images_than_there_are_are_refused_by_name(field, changes):
    with pytest.raises(ValueError, match=f"^{field} must be at most"):
        sv.run(varied(TINY, **changes))


def test_top_counts_ranks():
    rng = np.random.default_rng(0)
    scores, labels = rng.random((50, 12)), rng.integers(0, 12, 50)
    order = np.argsort(-scores, axis=1)
    expected = {f"top{k}": (order[:, :k] == labels[:, None]).any(1).mean() for k in (1, 5)}
    assert training.top(scores, labels) == pytest.approx(expected)
    # equal scores for all classes are never correct
    assert training.top(np.zeros((4, 10)), np.arange(4)) == {"top1": 0.0, "top5": 0.0}


@pytest.mark.slow
def test_the_linear_probe_is_ridge_regression_and_minds_no_scale():
    from sklearn.linear_model import Ridge

    rng = np.random.default_rng(0)
    bank, seen = rng.normal(size=(40, 6)), rng.normal(size=(9, 6))
    labels = rng.integers(0, 3, 40)
    found = training.ridge(bank, labels, seen, 3, 0.1)
    mean, std = bank.mean(0), bank.std(0)
    model = Ridge(alpha=0.1 * 40).fit((bank - mean) / std, np.eye(3)[labels])
    np.testing.assert_allclose(found, model.predict((seen - mean) / std), atol=1e-10)
    scaled = training.ridge(bank * 1e3 + 5, labels, seen * 1e3 + 5, 3, 0.1)
    np.testing.assert_allclose(found, scaled, atol=1e-8)
    dead = [np.concatenate([x, np.full((len(x), 1), 2.0)], 1) for x in (bank, seen)]
    np.testing.assert_allclose(found, training.ridge(dead[0], labels, dead[1], 3, 0.1), atol=1e-10)


def test_neighbours_vote_by_cosine():
    rng = np.random.default_rng(0)
    bank, seen = rng.normal(size=(30, 4)), rng.normal(size=(7, 4))
    labels = rng.integers(0, 3, 30)
    found = training.neighbours(bank, labels, seen, 3, 5)
    for x, scores in zip(seen, found, strict=True):
        cosine = bank @ x / np.linalg.norm(bank, axis=1) / np.linalg.norm(x)
        near = np.argsort(-cosine)[:5]
        expected = np.bincount(labels[near], np.exp((cosine[near] - 1) / 0.07), 3)
        np.testing.assert_allclose(scores, expected, rtol=1e-9)


SMALL = {"model_type": "flax_resnet", "widths": [2, 4], "inner": [2, 4], "blocks": [1, 2]}
SMALL |= {"outputs": 10, "stem": "small"}


def shapes(sizes):
    init = lambda: presets.build(sizes).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))  # noqa: E731
    return jax.eval_shape(init)


def randomised(sizes):
    """A ResNet without initial zeros and ones, and with positive variances."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.2 + 0.3 * rng.random(x.shape, np.float32), shapes(sizes))


@partial(jax.jit, static_argnums=0)
def predicted(net, variables, images) -> jax.Array:
    return net.apply(variables, images)


@pytest.mark.slow
def test_features_are_what_the_classifier_reads():
    net, variables = training.resnet(SMALL), randomised(SMALL)
    images = np.random.default_rng(1).random((3, 8, 8, 1), np.float32)
    stats = variables["batch_stats"]
    features = jax.jit(training.features, static_argnums=(0, 4))
    found, same = jax.device_get(features(net, variables["params"], stats, images, False))
    head = variables["params"]["head"]
    logits = predicted(net, variables, images)
    np.testing.assert_allclose(found @ head["kernel"] + head["bias"], logits, rtol=100 * EPS)
    jax.tree.map(np.testing.assert_array_equal, same, stats)


GROWN = varied(
    TINY,
    large={"blocks": (2,)},
    source={"width": 2},
    transformation="pad",
    maps={"steps": 2},
)


@pytest.fixture(scope="module")
def grown(data):
    """Returns the large network of `GROWN`, two sources for it, and its data."""
    learner = training.Learner(GROWN, GROWN.network(large=True), "supervised", 1, data[0])
    pair = [randomised(GROWN.network(large=False))] * 2
    pair[1] = jax.tree.map(lambda x: x[..., ::-1] * 1.5, pair[1])
    return learner, {"supervised": pair}, data[0]


@pytest.mark.slow
def test_renewed_statistics_are_the_batch_s_own(grown):
    learner, _, one = grown
    variables = randomised(GROWN.network(large=True))
    # variances of a mixture may be negative
    stats = jax.tree.map(lambda x: x - 2.0, variables["batch_stats"])
    images = one.learn.images[: GROWN.statistics]
    new = learner.renewed({**variables, "batch_stats": stats}, images)
    assert all(np.all(x["var"] >= 0) for x in jax.tree.leaves(new["batch_stats"], is_leaf=_norm))
    seen = learner.seen(jnp.asarray(images))
    logits = predicted(learner.net, new, seen)
    applied = jax.jit(training.applied, static_argnums=0)
    by_batch, _ = applied(learner.net, new["params"], new["batch_stats"], seen)
    np.testing.assert_allclose(logits, by_batch, atol=10 * EPS**0.5)  # float32 forward passes
    jax.tree.map(np.testing.assert_array_equal, new["params"], variables["params"])


def _norm(x):
    return isinstance(x, dict) and "var" in x


def test_depth_repeats_the_last_block_of_a_stage():
    variables = randomised(SMALL)
    deep = starts.deepened(variables, SMALL, [2, 3])
    for collection, new in (("params", deep["params"]), ("batch_stats", deep["batch_stats"])):
        was = variables[collection]
        assert new["stage0_block1"] is was["stage0_block0"]
        assert new["stage1_block2"] is was["stage1_block1"]
        assert new["stage1_block0"] is was["stage1_block0"]
    like = shapes({**SMALL, "blocks": [2, 3]})
    assert jax.tree.map(jnp.shape, deep) == jax.tree.map(jnp.shape, like)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "uniform_soup",
        "first",
        "sail",
        "net2net",
    ],
)
def test_starts_are_sums_of_the_transformed_sources(way, grown):
    learner, sources, one = grown
    keys = jax.random.split(jax.random.key(0))
    found = starts.start(way, learner, sources, one, tuple(keys))
    weights = {"uniform_soup": (0.5, 0.5), "first": (1, 0)}.get(way, tuple(data_of.weights(one)))
    method = "net2net" if way == "net2net" else "pad"
    small, large = GROWN.network(large=False), GROWN.network(large=True)
    moved = [starts.transformed(v, small, large, method, keys[1]) for v in sources["supervised"]]
    expected = jax.tree.map(lambda a, b: weights[0] * a + weights[1] * b, *moved)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=10 * EPS),
        found["params"],
        expected["params"],
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_ligo_learns_maps_on_the_target(grown):
    learner, sources, one = grown
    keys = tuple(jax.random.split(jax.random.key(0)))
    found = starts.start("ligo", learner, sources, one, keys)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(
        jnp.shape, shapes(GROWN.network(large=True))
    )
    assert np.isfinite(learner.measure(found, one)["test_loss"])


@pytest.mark.slow
def test_function_preserving_growth_of_one_source_keeps_its_predictions(grown):
    """net2net widens without changing the function."""
    small, large = ({**GROWN.network(large=wide), "blocks": [2]} for wide in (False, True))
    variables = randomised(small)
    wide = starts.transformed(variables, small, large, "net2net", jax.random.key(0))
    images = np.random.default_rng(1).random((4, 8, 8, 1), np.float32)
    pairs = ((small, variables), (large, wide))
    a, b = (predicted(training.resnet(sizes), v, images) for sizes, v in pairs)
    np.testing.assert_allclose(a, b, atol=10 * EPS**0.5)  # float32 forward passes


@pytest.mark.slow
def test_alignment_undoes_a_permutation_of_units():
    sizes = GROWN.network(large=True)
    variables = randomised(sizes)
    spec = starts.rules(sizes, variables)
    turned = change_basis(variables, spec, {"stage.0": permute(np.array([2, 0, 3, 1]))})
    assert not np.array_equal(
        turned["params"]["stem"]["kernel"], variables["params"]["stem"]["kernel"]
    )
    _, back = starts.aligned(sizes, [variables, turned])
    jax.tree.map(np.testing.assert_array_equal, back, variables)


def test_a_batch_that_devices_do_not_divide_is_refused_before_training(monkeypatch):
    three = sharding.Layout(cast(Any, SimpleNamespace(size=3)), "data")
    monkeypatch.setattr(sharding, "layout", lambda _: three)
    stage = lambda *_, **__: pytest.fail("trained")  # noqa: E731
    with pytest.raises(ValueError, match=r"^budget.batch must be a multiple of the 3 devices"):
        sv.run(TINY, stage)


@pytest.mark.slow
def test_the_tiny_run_is_whole_and_finite(ran):
    for paradigm in ("supervised", "byol"):
        assert tuple(ran[f"{paradigm}_way"].values) == TINY.ways(paradigm)
        for name in (*training.MEASURES[paradigm], "train_loss", "saved"):
            assert np.isfinite(ran[f"{paradigm}_{name}"]).all(), name
        top1, top5 = (ran[f"{paradigm}_{name}"] for name in ("top1", "top5"))
        assert ((top1 >= 0) & (top1 <= top5) & (top5 <= 1)).all()
        assert (ran[f"{paradigm}_flops"] > 0).all()
    assert ran["step"].values.tolist() == [0, 4, 8]


@pytest.mark.slow
def test_seeds_share_data_and_start_between_ways_and_differ_among_themselves(ran):
    loss = ran["supervised_test_loss"].sel(supervised_way="scratch")
    assert len(np.unique(loss.values[:, 0])) == TINY.replicates


@pytest.mark.soak
def test_parts_of_a_run_are_the_same_alone_and_after_a_training_broke_off(
    ran, tmp_path, monkeypatch
):
    few = varied(TINY, supervised=("scratch", "sail"), byol=(), budget={"save_every": 3})
    folders = {}

    def stage(name, compute, *, folder=False):
        assert folder
        at = folders.setdefault(name, tmp_path / str(len(folders)))
        at.mkdir(exist_ok=True)
        return direct(name, lambda: compute(at))

    measure, calls = training.Learner.measure, []

    def breaking(*args):
        calls.append(args)
        if len(calls) == 23:  # of 18 for the sources; at step 4 of the second seed from scratch
            raise RuntimeError("broken off")
        return measure(*args)

    monkeypatch.setattr(training.Learner, "measure", breaking)
    with pytest.raises(RuntimeError, match="broken off"):
        sv.run(few, stage)
    left = tmp_path / "1" / "1" / "checkpoints"
    assert [at.name for at in left.iterdir() if at.name.isdigit()] == ["3"]
    assert len(folders) == 2
    again = sv.run(few, stage)
    expected = ran.sel(supervised_way=["scratch", "sail"])
    for name in ("supervised_test_loss", "supervised_train_loss"):
        np.testing.assert_array_equal(again[name], expected[name])
    assert "byol_top1" not in again
    # BYOL's 6, 3 comparisons with what was left out, 1 of both paradigms
    assert [one.verdict for one in sv.findings(again)].count("not tested") == 10


def made_up(gain, paradigm="supervised", rival=-0.05):
    """Curves that rise by 0.1 a step, SAIL's `gain` (one per seed) above those from scratch."""
    ways = ["scratch", "sail", "first", "second", "pad"]
    rise = np.array([0.1, 0.2, 0.3, 0.4])
    shift = np.array([[0.0] * 3, gain, [-0.1] * 3, [-0.1] * 3, np.add(gain, rival)])
    top1 = rise + shift[..., None]
    dims = (f"{paradigm}_way", "seed")
    names = ("saved", "scratch_steps", "compute", "scratch_compute")
    return xr.Dataset(
        {f"{paradigm}_top1": ((*dims, "step"), top1)}
        | {f"{paradigm}_{name}": (dims, 100 * shift) for name in names}
        | {f"{paradigm}_{name}": (dims[0], [0] * 5) for name in ("ahead", "sources_compute")},
        {f"{paradigm}_way": ways, "seed": range(3), "step": range(4)},
        {"paradigms": paradigm, "steps": 3},
    )


def test_steps_ahead_delay_what_is_averaged_along_training():
    made = made_up([0.1, 0.1, 0.1])
    np.testing.assert_allclose(told.along(made, "supervised", "sail"), [35.0] * 3)
    made["supervised_ahead"][1] = 2
    # 20, 20 (not yet begun), 20 and 30
    np.testing.assert_allclose(told.along(made, "supervised", "sail"), [22.5] * 3)


def verdicts(dataset):
    return [one.verdict for one in sv.findings(dataset)]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        ([0.1, 0.11, 0.09], "holds"),
        ([-0.2, -0.21, -0.19], "fails"),
        ([0.1, -0.11, 0.02], "undecided"),
    ],
)
def test_claims_hold_fail_or_stay_undecided(gain, expected):
    found = verdicts(made_up(gain))
    assert found[:3] == [expected] * 3
    assert found[5] == expected  # against each source alone
    assert found[6:] == ["not tested"] * 7  # BYOL, and the comparison with it
    assert verdicts(made_up(gain, "byol"))[6:9] == [expected] * 3


def test_the_rival_is_the_strongest_one():
    found = sv.findings(made_up([0.1, 0.11, 0.09], rival=0.05))[3]
    assert found.verdict == "fails"
    assert re.search(r"-5\.00 ± 0\.00 points above the best of them, pad", found.here)
    # without competitors there is no finding
    few = made_up([0.1, 0.11, 0.09]).isel(supervised_way=slice(2))
    assert verdicts(few)[3:6] == ["not tested"] * 3
    assert told.summary(few).endswith("by start: sail 50.0 ± 0.6, scratch 40.0 ± 0.0.")
