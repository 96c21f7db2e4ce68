"""Cross-task linearity on digits: laws of the measurements, the run, and errors."""

import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pictures import flaws
from tiny_runs import tiny_run

from experiments.data.files import DataError
from experiments.data.registry import ImagePool
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.studies.cross_task_linearity import answers, models, parts
from experiments.studies.cross_task_linearity.config import Network
from experiments.studies.cross_task_linearity.models import Batch
from experiments.studies.cross_task_linearity.runs import Runs
from theory.linearity import product_gap

ctl = registry.load("cross_task_linearity")

EPS = float(jnp.finfo(jnp.float32).eps)
SOFTMAX, ONE, TWO = MLP((), 10), MLP((12,), 10), MLP((12, 9), 10)
POOL = ImagePool().pool(0)


@pytest.fixture(scope="module")
def digits():
    index = models.split(POOL.labels, 10, 0, 2, learn=6, test=5)
    return jax.tree.map(lambda x: x[0], models.pick(POOL, "rotate 45", index.test))


def _init(model, seed):
    """No bias, scale or statistic at its initial zeros and ones."""
    rng = np.random.default_rng(seed)
    params = models.init(model, (8, 8, 1), jax.random.key_data(jax.random.key(seed)))
    return jax.tree.map(lambda x: x + 0.1 * rng.random(x.shape, np.float32), params)


@pytest.fixture(scope="module")
def ran():
    return tiny_run("cross_task_linearity").dataset


@pytest.mark.slow
def test_a_network_linear_in_its_parameters_has_no_gap(digits):
    a, b = (_init(SOFTMAX, seed) for seed in (0, 1))
    found = parts.linearity(SOFTMAX, "", (0.25, 0.5, 0.75), a, b, digits)
    # three sums of 64 terms in float32
    assert np.max(found["gap"]) < 64 * EPS
    np.testing.assert_allclose(found["coefficient"], 1, atol=64 * EPS)
    assert np.min(found["baseline"]) > 0.01
    tuned = jax.tree.map(lambda x, y: np.stack([x, y, x - y])[None], a, b)
    both = parts.averaging(SOFTMAX, tuned, jax.tree.map(lambda x: x[None], digits))
    np.testing.assert_array_equal(both["average"], both["ensemble"])


@pytest.mark.slow
def test_two_linear_layers_have_the_gap_of_their_product(digits):
    """With weights and pixels >= 0 no ReLU clips; gap -a (1 - a) dW1 dW2 (theory.linearity)."""
    a, b = (jax.tree.map(abs, _init(ONE, seed)) for seed in (0, 1))
    a, b = (jax.tree.map(lambda x: x * (x.ndim > 1), p) for p in (a, b))
    kernels = [[p["params"][n]["kernel"].T for n in ("hidden_0", "out")] for p in (a, b)]
    stacked = [jnp.stack(layer) for layer in zip(*kernels, strict=True)]
    alpha = 0.3
    (gap,) = product_gap(tuple(stacked), jnp.array([alpha, 1 - alpha]))
    want = digits.images.reshape(-1, 64) @ np.asarray(gap).T
    ends = [models.network(ONE)(p, digits)[0] for p in (a, b)]
    right = alpha * ends[0] + (1 - alpha) * ends[1]
    relative = np.sqrt(np.sum(want**2) / np.sum(right**2))
    found = parts.linearity(ONE, "", (alpha,), a, b, digits)["gap"]
    np.testing.assert_allclose(found[-1, 0], relative, rtol=1e-3)
    assert found[0, 0] < 64 * EPS  # the first layer is linear in its own weights


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weights", "activations"])
def test_a_permuted_copy_is_aligned_and_has_no_barrier(digits, how):
    a = _init(TWO, 0)
    a["params"]["out"] = jax.tree.map(lambda x: 20 * x, a["params"]["out"])  # sure of its classes
    digits = digits._replace(labels=np.asarray(models.network(TWO)(a, digits)[0].argmax(1)))
    order = [np.random.default_rng(3).permutation(n) for n in TWO.widths]
    p = a["params"]
    b = {
        "hidden_0": {k: v[..., order[0]] for k, v in p["hidden_0"].items()},
        "hidden_1": {
            "kernel": p["hidden_1"]["kernel"][order[0]][:, order[1]],
            "bias": p["hidden_1"]["bias"][order[1]],
        },
        "out": {"kernel": p["out"]["kernel"][order[1]], "bias": p["out"]["bias"]},
    }
    b = {"params": b}
    apart = parts.halfway(TWO, "", a, b, digits)
    assert apart["barrier"] > 0.01
    assert apart["gap"][-1] > 0.1
    back = models.aligned(TWO, how, a, b, digits)
    jax.tree.map(np.testing.assert_array_equal, back, a)
    found = parts.halfway(TWO, "", a, back, digits)
    assert found["barrier"] < 10 * EPS  # a mean of losses near ln 10
    assert found["gap"].max() < 10 * EPS
    assert found["middle"] == found["ends"]


@pytest.mark.slow
def test_aligned_networks_compute_what_they_did(digits):
    a, b = (_init(TWO, seed) for seed in (0, 1))
    out = models.network(TWO)(b, digits)[0]
    for how in ("weights", "activations"):
        moved = models.aligned(TWO, how, a, b, digits)
        np.testing.assert_allclose(models.network(TWO)(moved, digits)[0], out, atol=100 * EPS)


@pytest.mark.slow
def test_quantiles_are_of_what_the_probe_means(digits):
    """For copies of one digit, all quantiles equal the mean of the probe."""
    a, b = (_init(TWO, seed) for seed in (0, 1))
    for n in (0, 33):
        same = Batch(*(np.repeat(x[n : n + 1], 2, 0) for x in digits))
        line = parts.linearity(TWO, "", (0.5,), a, b, same)
        found = parts.distribution(TWO, "", 0.5, a, b, same)
        wide = lambda x: np.repeat(np.reshape(x, (-1, 1)), len(parts.QUANTILES), 1)  # noqa: E731
        for name in ("turn", "coefficient", "baseline"):
            np.testing.assert_allclose(found[name], wide(line[name]), atol=100 * EPS)
    spread = parts.distribution(TWO, "", 0.5, a, b, digits)["turn"]
    assert (np.diff(spread, axis=1) > 0).all()


@pytest.mark.slow
def test_features_of_a_model_in_itself_change_nothing(digits):
    base, a = (_init(TWO, seed) for seed in (0, 1))
    lead = lambda tree, n: jax.tree.map(lambda x: np.stack([x] * n)[None], tree)  # noqa: E731
    single = jax.tree.map(lambda x: x[None], (base, digits))
    found = parts.stitching(TWO, single[0], lead(a, 2), lead(digits, 2), single[1], (0.25, 1e-9))
    plain = found["plain"]
    np.testing.assert_array_equal(plain["stitched"], plain["own"][..., None] * np.ones(2))
    added = found["addition"]
    # for two equal models, averaged features, averaged weights and the model itself agree
    for name in ("weights", "single"):
        np.testing.assert_array_equal(added["features"], added[name])
    least = found["negation"]["features_task"][:, :, 1]
    np.testing.assert_array_equal(least, found["base"]["task"][..., None] * np.ones(2))


def test_no_preset_tunes_on_what_theorem_1_is_tested_on():
    assert {preset.theorem.tuned_on for preset in ctl.presets.values()} == {"learn"}


@pytest.mark.soak
def test_theorem_1_without_remainder_holds_and_is_second_order(digits):
    """A convex loss of close models: the gap is of second order along the line and bounded by the
    norm of the Hessian; the remainder is a hundredth of it.
    """
    a = _init(SOFTMAX, 0)
    b = parts.moved(a, _init(SOFTMAX, 1), 0.02)
    tuned = jax.tree.map(lambda x, y: np.stack([x, y])[None], a, b)
    one = jax.tree.map(lambda x: np.asarray(x)[None], (a, digits))
    keys = np.asarray(jax.random.key_data(jax.random.key(0)))[None]
    with jax.enable_x64(True):
        found = parts.theorem(SOFTMAX, one[0], _wide(tuned), _wide(one[1]), keys, 30)
    np.testing.assert_allclose(found["gap"], found["along_in_middle"], rtol=0.01)
    assert (found["gap"] < found["norm_on_segment"]).all()
    distance = sum(np.sum((x - y) ** 2) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    np.testing.assert_allclose(found["distance"], distance, rtol=1e-4)
    np.testing.assert_allclose(found["main_term"], found["norm"] * distance / 8, rtol=1e-4)


def _wide(tree):
    return jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, tree)


@pytest.mark.soak
def test_r_squared_of_what_follows_the_main_term_and_of_independent_factors():
    rng = np.random.default_rng(0)
    shape = (400, 3)
    norm = np.repeat(rng.gamma(4, size=(400, 1)), 3, 1)  # squared coefficient of variation 1/4
    distance = rng.gamma(2, size=shape)  # 1/2
    found = dict.fromkeys(answers.PREDICTORS, norm * distance / 8)
    found |= {"norm": norm, "distance": distance, "gap": norm * distance / 8}
    told = answers.r_squared(found, 0)
    r = dict(zip(answers.PREDICTORS, told["r_squared"][1], strict=True))
    assert r["main_term"] == pytest.approx(1)
    low, high = (told[f"r_squared_{end}"][1] for end in ("low", "high"))
    assert (low - 10 * EPS <= told["r_squared"][1]).all()
    assert (told["r_squared"][1] <= high + 10 * EPS).all()
    # null: the closed form, at most 4 bootstrap deviations (a quarter of the 95 % interval) away
    for name, value in zip(answers.FACTORS, told["independent"][1], strict=True):
        i = answers.PREDICTORS.index(name)
        assert abs(r[name] - value) <= (high[i] - low[i]) + 10 * EPS
    assert r["distance"] > r["norm"]


def test_splits_are_stratified_and_disjoint():
    index = models.split(POOL.labels, 10, 0, 3, learn=20, test=10)
    for part in index:
        labels = models.pick(POOL, "upright", part).labels.reshape(3, 10, -1)
        assert (labels == np.arange(10)[:, None]).all()
    for learn, test in zip(*index, strict=True):
        assert len(np.union1d(learn, test)) == 300
    assert models.pick(POOL, "classes 4-5", index.test).labels.shape == (3, 20)
    batch = models.pick(POOL, "upright", index.learn)
    random = models.shuffled(batch, 0)
    np.testing.assert_array_equal(np.sort(random.labels), np.sort(batch.labels))
    assert (random.labels != batch.labels).mean() > 0.5


@pytest.mark.slow
def test_padding_is_never_drawn_and_digits_are_learned():
    index = models.split(POOL.labels, 10, 0, 1, learn=50, test=50)
    learn, test = (jax.tree.map(lambda x: x[0], models.pick(POOL, "classes 0-1", x)) for x in index)
    padded = Batch(*(np.concatenate([x, np.full_like(x, 9)]) for x in learn))
    start, key = _init(TWO, 0), jax.random.key_data(jax.random.key(1))
    how = Network(widths=TWO.widths, steps=60, batch=32, rate=0.05, momentum=0.9)
    found = [models.train(TWO, start, x, 100, key, 0.05, how) for x in (learn, padded)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert models.accuracy(TWO, found[0], test) > 0.9


@pytest.mark.slow
def test_batch_norm_forgets_its_statistics_or_has_them_interpolated(digits):
    net = ResNet((4,), 1, 10)
    a, b = (_init(net, seed) for seed in (0, 1))
    mixed = {"params": a["params"], "batch_stats": b["batch_stats"]}
    by_batch, running = (models.network(net, how) for how in ("batch", "interpolated"))
    (one, shown), (two, _) = (by_batch(p, digits) for p in (a, mixed))
    np.testing.assert_array_equal(one, two)
    assert list(shown) == ["stage0_block0"]
    assert not np.allclose(running(a, digits)[0], running(mixed, digits)[0])


def test_tasks_and_random_labels_are_trained_in_one_shape():
    some = {"parts": ("random_labels",), "memorise": 3, "resnet": {"steps": 1, "batch": 4}}
    config = varied(ctl.presets["tiny"], **some)
    runs = Runs(config)
    keys = runs.keys("random_labels", 2)
    assert keys.shape == (3, 2, 2)
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 6
    data = runs.data("classes 4-5", "classes 6-7")
    assert data.learn.images.shape == (3, 2, 2 * config.learn, 8, 8, 1)


@pytest.mark.soak
def test_the_run_measures_what_it_says(ran):
    assert np.isfinite(ran["rotated_turn"]).all()
    assert list(ran["layer"].values) == ["hidden 1", "hidden 2", "output"]
    # the first layer is nearest to linear: one matrix before the ReLU
    gap = ran["rotated_gap"].mean(["replicate", "pair", "alpha"])
    assert gap[0] < gap[-1]
    # own weights: f(theta + 0) = f(theta); members of all sizes
    np.testing.assert_array_equal(ran["size"], [2, 2, 2, 3])
    for end in (0, -1):
        values = [ran[f"line_{name}"].isel(weight=end) for name in ("average", "ensemble", "chord")]
        np.testing.assert_allclose(values[0], values[1], atol=EPS)
        np.testing.assert_allclose(values[0], values[2], atol=10 * EPS)
    # f(t - s tau) - 2 f(t) + f(t + s tau) of equation 4 is -2 times the gap of equation 3
    assert (ran["reflection_gap"] > ran["midpoint_gap"]).all()


@pytest.mark.soak
def test_the_run_of_all_parts_measures_what_it_says(ran):
    assert ran["theorem_gap"].shape == (3, 2, 3)
    assert (ran["r_squared_low"] <= ran["r_squared_high"]).all()
    for name in ("Theorem 1", "Random labels"):
        assert name in ctl.summary(ran)


@pytest.mark.soak
def test_a_run_is_repeatable_and_the_seed_matters(ran):
    some = varied(ctl.presets["tiny"], parts=("arithmetic",))
    again = ctl.run(some)
    for name in again.data_vars:
        np.testing.assert_array_equal(again[name], ran[name])
    other = ctl.run(varied(some, seed=1))
    assert not np.allclose(other["addition_gap"], again["addition_gap"])
    said = ctl.summary(again)
    assert said.count("Equation") == 3
    # for the parts that ran
    assert list(ctl.plot(again)) == ["arithmetic"]
    assert "Theorem 1" not in said
    assert "Random labels" not in said


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """Files in the format of MNIST, with smaller images and unequal numbers per class."""
    path, rng = tmp_path_factory.mktemp("mnist"), np.random.default_rng(0)
    for name, count in (("train", 63), ("t10k", 31)):
        images, labels = rng.integers(0, 256, (count, 6, 6)), np.arange(count) % 10
        for stem, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (path / f"{name}-{stem}-ubyte").write_bytes(head + array.astype(np.uint8).tobytes())
    return str(path)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Files in the formats of CIFAR-100 and CIFAR-10, with 8 and 4 images per class."""
    path, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    batches = {f"data_batch_{k}": 2 for k in range(1, 6)} | {"test_batch": 4}
    for classes, files in ((100, {"train": 8, "test": 4}), (10, batches)):
        for name, each in files.items():
            fine = np.tile(np.arange(classes), each)
            labels = [fine] if classes == 10 else [fine // 5, fine]
            pixels = rng.integers(0, 256, (3072, len(fine)))
            records = np.concatenate([*(x[None] for x in labels), pixels]).T
            (path / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
    return str(path)


PAPER = [name for name in ctl.presets if name.startswith("paper")]


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_of_the_paper_says_which_files_it_needs(name):
    told = (
        r"^data.folder must be the place of (MNIST|CIFAR-10*) .*; the default, data.name = digits,"
    )
    with pytest.raises(DataError, match=told):
        ctl.run(ctl.presets[name])


def test_the_paper_s_settings_of_rotated_mnist():
    paper = ctl.presets["paper_mnist"]
    assert paper.angles == (22.5, 45, 67.5, 90)
    assert (paper.mlp.batch, paper.mlp.rate, paper.mlp.momentum) == (64, 0.1, 0)
    assert paper.mlp.steps == math.ceil(60_000 / 64)


def test_of_many_models_sets_of_two_three_and_all_are_averaged():
    weights = parts.subsets(ctl.presets["paper_averaging"].members)
    sizes = (weights > 0).sum(1)
    assert {k: int((sizes == k).sum()) for k in set(sizes)} == {2: 190, 3: 1140, 20: 1}
    np.testing.assert_allclose(weights.sum(1), 1)
    assert len(parts.subsets(parts.FEW)) == 2**parts.FEW - parts.FEW - 1


def test_the_publisher_s_split_is_kept(mnist):
    data = {"name": "mnist", "folder": mnist}
    runs = Runs(varied(ctl.presets["paper_mnist"], data=data, mlp={"widths": (4,)}))
    learn, test = runs.data(*runs.tasks)
    assert (learn.images.shape, test.labels.shape) == ((3, 4, 63, 6, 6, 1), (3, 4, 31))
    assert runs.tasks[0] == "rotate 22.5"
    upright = runs.data("upright").learn
    np.testing.assert_array_equal(upright.images[0, 0], ImagePool(**data).pool(0).images[:63])
    with pytest.raises(DataError, match=r"^splits must have equally many images; 'classes 5-9'"):
        runs.data("classes 0-4", "classes 5-9")


# The ResNets take minutes.
@pytest.mark.soak
@pytest.mark.parametrize("name", PAPER)
def test_a_preset_of_the_paper_runs_on_files_of_its_formats(name, mnist, cifar):
    preset = ctl.presets[name]
    small: dict = {
        "data": {"folder": mnist if preset.data.name == "mnist" else cifar},
        "mlp": {"widths": (4, 4, 4), "steps": 2},
        "resnet": {"widths": (4, 4, 4), "steps": 2, "batch": 4},
        "memorise": 1,
        "line_points": 3,
        "theorem": {"checkpoints": 2, "steps": 2, "members": 2, "lanczos_steps": 3},
    }
    if preset.learn is not None:
        small |= {"learn": 8, "test": 4}
        small["resnet"] |= {"widths": (4,), "blocks": 1}
    dataset = ctl.run(varied(preset, **small))
    assert all(np.isfinite(values).all() for values in dataset.data_vars.values())
    assert ctl.summary(dataset)
    figures = ctl.plot(dataset)
    assert list(figures) == list(preset.parts)
    assert [flaw for figure in figures.values() for flaw in flaws(figure)] == []
