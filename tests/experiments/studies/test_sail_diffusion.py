"""SiT, REPA and SAIL on digits: losses, samplers and measures compared with independent
computations.
"""

import re
import sys
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from PIL import Image
from tiny_runs import tiny_run

from experiments.data import latents
from experiments.data.files import DataError
from experiments.lab import registry, store
from experiments.lab.config import varied
from experiments.lab.findings import told
from experiments.measures import frechet
from experiments.models import presets
from experiments.studies.sail_diffusion import data, findings, networks, quality
from experiments.studies.sail_diffusion import run as study
from experiments.studies.sail_diffusion.findings import PRINTED
from experiments.studies.sail_diffusion.functions import Functions, Traced
from experiments.studies.sail_diffusion.networks import (
    WAYS,
    Networks,
    Projector,
    Way,
    align_loss,
    encoded,
    repa_loss,
    velocity_loss,
)
from experiments.studies.sail_diffusion.sampling import Sampler, integrate, interpolate, sample
from experiments.studies.sail_diffusion.training import Laboratory, unoptimised
from experiments.training import sharding
from experiments.training.fit import Fit
from sail_jax.cli import main as cli
from sail_jax.trees import leaf_paths

sd = registry.load("sail_diffusion")

EPS = float(np.finfo(np.float32).eps)
TINY = sd.presets["tiny"]


@pytest.fixture(scope="module")
def lab():
    return Laboratory(TINY, study.loaded(TINY))


def _drawn(rng, init, *args):
    """Random weights with the shapes of `init(*args)`, which would have to be compiled."""
    return jax.tree.map(
        lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), jax.eval_shape(init, *args)
    )


@pytest.mark.slow
def test_classifiers_of_a_repetition_draw_alone(lab, monkeypatch):
    drawn = []

    def trained(fit, start, batch, *_):
        drawn.append((batch(0)["labels"], jax.random.key_data(start.key)))
        raise StopIteration

    monkeypatch.setattr(Fit, "run", trained)
    for kind in ("measure", "encoder"):
        with pytest.raises(StopIteration):
            lab.classifier(kind, np.arange(100), 0, None)
    for one, other in zip(*drawn, strict=True):
        assert not np.array_equal(one, other)


@pytest.fixture(scope="module")
def loss(lab):
    """The jitted loss's value, terms and gradient, and what it is of: nothing zero or equal."""
    rng = np.random.default_rng(0)
    params = _drawn(rng, lab._init["sit"], jax.random.key(0))
    encoder = _drawn(rng, lab._init["encoder"], jax.random.key(1), jnp.zeros((1, 8, 8, 1)))
    x = rng.uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32)
    features = rng.normal(size=(4, 16, 32)).astype(np.float32)
    batch = {"x": x, "labels": np.arange(4), "features": features}

    @unoptimised
    def found(weights):
        def value(params):
            total, terms, _ = lab.networks.loss(
                params, {"weights": weights, "encoder": encoder}, batch, jax.random.key(2)
            )
            return total, terms

        (total, terms), grads = jax.value_and_grad(value, has_aux=True)(params)
        return total, terms, grads

    return lambda weights: jax.device_get(found(weights)), params, encoder, batch


def test_losses_by_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    cosine = np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    # means of at most 60 terms of order 1
    losses = jax.jit(lambda a, b: (repa_loss(a, b), align_loss(a, b), velocity_loss(a, b)))
    apart = np.mean((a - b) ** 2)
    found = [float(value) for value in losses(a, b)]
    assert found[0] == pytest.approx(-cosine.mean(), abs=60 * EPS)
    assert found[1:] == pytest.approx([apart, apart], rel=60 * EPS)
    norms = np.sum((a - b) ** 2, (1, 2))  # eq. (16), of each of the two examples
    assert float(align_loss(a, b, summed=True)) == pytest.approx(norms.mean(), rel=60 * EPS)
    assert float(losses(7 * b, b)[0]) == pytest.approx(-1, abs=60 * EPS)
    assert np.isfinite(jax.jit(jax.grad(repa_loss))(np.zeros_like(a), b)).all()


def test_the_velocity_is_the_time_derivative_of_the_interpolant():
    x, noise = jnp.float32([[1.0, -2.0], [0.5, 3.0]]), jnp.float32([[0.0, 1.0], [2.0, -1.0]])
    at = lambda t: interpolate(x, noise, t)[0]  # noqa: E731
    t = jnp.float32([0.25, 0.75])
    _, derivative = jax.jvp(at, (t,), (jnp.ones(2),))
    np.testing.assert_allclose(interpolate(x, noise, t)[1], derivative, atol=4 * EPS)
    np.testing.assert_array_equal(at(jnp.zeros(2)), x)
    np.testing.assert_array_equal(at(jnp.ones(2)), noise)


MEAN, SPREAD = 0.7, 0.3


def normal_velocity(x, t):
    """E[e - x | x_t] for data of N(MEAN, SPREAD^2)."""
    apart = (x - (1 - t) * MEAN) / ((1 - t) ** 2 * SPREAD**2 + t**2)
    return t * apart - MEAN - (1 - t) * SPREAD**2 * apart


@pytest.mark.slow
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2)])
def test_the_flow_of_a_normal_distribution(method, order):
    """It maps noise e to MEAN + SPREAD e; doubling the steps divides the error by 2^order."""
    noise = jnp.linspace(-2, 2, 21)
    error = [
        np.abs(
            integrate(normal_velocity, noise, Sampler(method, steps)) - MEAN - SPREAD * noise
        ).max()
        for steps in (32, 64)
    ]
    assert error[1] < 0.03
    # the next order is at most a fifth of the leading one at these steps
    assert error[0] / error[1] == pytest.approx(2**order, rel=0.2)


@pytest.mark.soak
def test_the_diffusion_of_a_normal_distribution():
    n = 40_000
    first, later = jax.random.split(jax.random.key(0))
    noise = jax.random.normal(first, (n,))
    x = np.asarray(integrate(normal_velocity, noise, Sampler("sde", 256), later), float)
    # null: N(MEAN, SPREAD^2) up to Euler's O(dt) bias of about dt; z = 4
    dt = 1 / 256
    assert abs(x.mean() - MEAN) < 4 * SPREAD / n**0.5 + dt
    assert abs(x.std() - SPREAD) < 4 * SPREAD / (2 * n) ** 0.5 + dt
    other = integrate(normal_velocity, noise, Sampler("sde", 256), jax.random.key(9))
    # it draws its own noise: samples of one start are almost independent (z = 4)
    assert abs(np.corrcoef(x, other)[0, 1]) < 0.1


@pytest.mark.slow
def test_guidance_moves_away_from_no_class(lab, loss):
    params = loss[1]["sit"]
    net, key = lab.networks.sit, jax.random.key(3)
    made = lambda label, guidance: np.asarray(  # noqa: E731
        sample(net, params, np.full(3, label), key, (8, 8, 1), Sampler("euler", 1, guidance))
    )
    one, two, none = made(1, 1.0), made(1, 2.0), made(10, 1.0)
    assert np.abs(one - none).max() > 0.01
    # one Euler step is linear in the velocity
    np.testing.assert_allclose(two - one, one - none, atol=1e3 * EPS)
    # two programs, which round differently
    np.testing.assert_allclose(made(10, 2.0), none, atol=1e3 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_the_terms_of_a_way_add_up(lab, loss, name):
    weights = lab.networks.weights(WAYS[name], 0.5, 0.25)
    total, terms, grads = loss[0](weights)
    way = WAYS[name]
    want = terms["velocity"] + 0.5 * way.repa * terms["repa"] + 0.25 * way.align * terms["align"]
    assert float(total) == pytest.approx(float(want), rel=8 * EPS)
    for term, counts in (("repa", way.repa), ("align", way.align)):
        assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(grads[term])) == counts


@pytest.mark.soak
def test_the_terms_by_hand(lab, loss):
    """The target of REPA is of the data; that of eq. (16) of the noised latents or the data."""
    found, params, encoder, batch = loss
    terms = {
        clean: found(lab.networks.weights(WAYS[name], 1, 1))[1]
        for clean, name in ((False, "sail"), (True, "sail_clean"))
    }
    in_t, in_noise, in_drop = jax.random.split(jax.random.key(2), 3)
    t = np.asarray(jax.random.uniform(in_t, (4,)))
    noise = np.asarray(jax.random.normal(in_noise, (4, 8, 8, 1)))
    share = t[:, None, None, None]
    z = (1 - share) * batch["x"] + share * noise
    dropped = np.asarray(jax.random.bernoulli(in_drop, TINY.class_drop, (4,)))
    labels = np.where(dropped, 10, batch["labels"])
    net = lab.networks.sit
    velocity, kept = unoptimised(partial(net.apply, capture_intermediates=True, mutable=True))(
        {"params": params["sit"]}, z, t, labels
    )
    hidden = kept["intermediates"]["block_0"]["__call__"][0]
    project = lambda which: np.asarray(  # noqa: E731
        lab.networks.projector.apply({"params": params[which]}, hidden)
    )
    answers, noised = encoded(lab.encoder, encoder, z)
    head = encoder["params"]["head"]
    np.testing.assert_allclose(
        noised.mean(1) @ head["kernel"] + head["bias"], answers, atol=1e3 * EPS
    )
    # float32 networks of a few layers, at values of order 1
    close = {"rel": 1e4 * EPS}
    want = np.mean((np.asarray(velocity) - (noise - batch["x"])) ** 2)
    assert float(terms[False]["velocity"]) == pytest.approx(want, **close)
    for clean, target in ((False, np.asarray(noised)), (True, batch["features"])):
        want = np.mean((project("align") - target) ** 2)
        assert float(terms[clean]["align"]) == pytest.approx(want, **close)
        want = repa_loss(project("repa"), batch["features"])
        assert float(terms[clean]["repa"]) == pytest.approx(float(want), **close)


@pytest.mark.slow
def test_the_alignment_phase_leaves_later_blocks_and_the_head(lab, loss):
    _, _, grads = loss[0](lab.networks.weights(Way(align=True), 0, 1, velocity=0))
    moved = {
        path
        for path, leaf in zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True)
        if np.any(leaf != 0)
    }
    tops = {"/".join(path.split("/")[:2]) for path in moved if path.startswith("sit")}
    assert tops == {f"sit/{name}" for name in ("patch_embed", "time_in", "time_out", "block_0")} | {
        "sit/label_embed"
    }
    assert not any(path.startswith("repa") for path in moved)
    assert any(path.startswith("align") for path in moved)


@pytest.mark.slow
def test_the_measuring_classifier_answers_from_its_pooled_features(lab):
    net = lab.measure
    rng = np.random.default_rng(0)
    variables = _drawn(rng, lab._init["measure"], jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    # variances are not negative
    variables["batch_stats"] = jax.tree.map(np.abs, variables["batch_stats"])
    x = rng.normal(size=(32, 8, 8, 1)).astype(np.float32)
    seen = jax.device_get(quality.look(net, variables, x))
    head = variables["params"]["head"]
    logits = seen.pooled @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(seen.log_probabilities, jax.nn.log_softmax(logits), atol=1e2 * EPS)
    assert seen.spatial.shape == (32, 4 * 4 * quality.SPATIAL)
    first = np.asarray(seen.spatial).reshape(32, 16, quality.SPATIAL)
    np.testing.assert_allclose(first.mean(1), seen.pooled[:, : quality.SPATIAL], atol=1e2 * EPS)


def test_precision_and_recall_by_brute_force():
    rng = np.random.default_rng(0)
    real, made = rng.normal(size=(60, 3)), 0.7 * rng.normal(size=(50, 3)) + 0.8
    log_p = np.log(rng.dirichlet(np.ones(4), 50))

    def covered(points, centres):
        radius = [np.sort(np.linalg.norm(centres - c, axis=1))[3] for c in centres]
        near = [
            any(np.linalg.norm(p - c) <= r for c, r in zip(centres, radius, strict=True))
            for p in points
        ]
        return np.mean(near)

    seen = quality.Seen(made, made[:, :2], log_p)
    found = quality.scores(seen, quality.reference(quality.Seen(real, real[:, :2], log_p)))
    assert found.keys() == quality.MEASURES.keys()
    assert found["precision"] == pytest.approx(covered(made, real))
    assert found["recall"] == pytest.approx(covered(real, made))
    assert 0 < found["recall"] < found["precision"] < 1
    p = np.exp(log_p)
    divergence = [np.sum(q * np.log(q / p.mean(0))) for q in p]
    assert found["inception"] == pytest.approx(np.exp(np.mean(divergence)))


def test_splits_and_batches():
    images = study.loaded(TINY)
    split = data.split(0, 1, len(images.labels), 901)
    assert len(split.learn) == 896
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(1797))
    batch = data.batch(images, np.array([5, 7]))
    np.testing.assert_array_equal(batch["x"][..., 0], 2 * images.latents[[5, 7], 0] - 1)
    drawn = [data.draw(split.learn, (0, 1), step, 50) for step in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    assert set(drawn[2]) <= set(split.learn)


@pytest.mark.slow
def test_the_tiny_run():
    dataset, stages = tiny_run("sail_diffusion")
    assert dict(dataset["fd"].sizes) == {"way": 3, "seed": 2, "step": 9}
    for name in (*quality.MEASURES, "velocity_loss", "repa_loss", "start_loss", "samples"):
        assert np.isfinite(dataset[name]).all(), name
    # one noise and one untrained network for all ways; SAIL's alignment leaves the velocity at zero
    start = dataset["fd"].isel(step=0)
    np.testing.assert_array_equal(start, start.sel(way="sit").broadcast_like(start))
    assert (dataset["fd_real"] < dataset["fd"].min(["way", "step"])).all()
    assert list(dataset["align_steps"]) == [0, 0, TINY.alignment.steps]
    assert (dataset["saved_sit"].sel(way="sit") == 0).all()
    steps = dataset["steps_repa"].sel(way="sail")  # REPA's, to a level that both reach
    assert (dataset["saved_repa"].sel(way="sail") <= steps - TINY.alignment.steps).all()
    # the alignment phase ends below where it begins, and training goes on from its weights
    assert (dataset["start_loss"].isel(start_step=-1) < dataset["start_loss"][..., 0]).all()
    aligned = dataset["align_loss"].isel(logged=0)
    assert (aligned.sel(way="sail") < aligned.sel(way="repa")).all()
    made = stages["sail, seed 0"]["weights"]["block_0"]["q"]["kernel"]
    assert made.shape == (32, 4, 8)


def test_bad_data_is_named_before_anything_is_computed(tmp_path):
    stored, labels = tmp_path / "z.npy", tmp_path / "labels.npy"
    features, wrong = tmp_path / "f.npy", tmp_path / "short.npy"
    np.save(stored, np.zeros((6, 1, 8, 8), np.float16))
    np.save(labels, np.arange(6, dtype=np.uint8))
    np.save(features, np.zeros((6, 9, 4), np.float16))
    np.save(wrong, np.zeros((5, 16, 4), np.float16))
    clean = varied(TINY, ways=("sit", "repa", "sail_clean"))
    of = {"name": "latents", "file": str(stored)}
    for change, message in (
        ({"held_out": 1740}, "held_out, samples: 1740 and 64 of the 1797 images"),
        (
            {"model": "sit-b/2"},
            "data.name: the digits have 10 classes, the network 1000; 'latents' ",
        ),
        ({"data": {**of, "file": "nowhere.npy"}}, "nowhere.npy is missing: the latents of Image"),
        ({"data": of, "model": "sit-b/2", "budget": {"batch": 256}}, "sit-b/2 takes [4, 32, 32], "),
        ({"data": {**of, "features": "none.npy"}}, "none.npy is missing: the features of"),
        ({"data": {**of, "features": str(wrong)}}, "where features [6, patch, d]"),
        ({"data": {**of, "features": str(features)}}, "sit-tiny has 16 patches"),
        ({"data": of}, "held_out, samples: 1600 and 64 of the 6 images"),
    ):
        config = varied(clean, **change)
        with pytest.raises(ValueError, match=re.escape(message)):
            sd.run(config, lambda *_, **__: pytest.fail("a stage began"))
    np.save(labels, np.full(6, 10, np.uint8))
    with pytest.raises(DataError, match="label"):
        study.loaded(varied(clean, data=of))
    with pytest.raises(
        ValueError, match=r"data.file must be the place of the latents .* digits, needs"
    ):
        sd.run(sd.presets["paper"])
    with pytest.raises(
        ValueError, match=r"data.folder must be the place of a folder of images .* needs"
    ):
        sd.run(sd.presets["paper_images"])


def test_batches_that_the_devices_do_not_divide_are_refused(monkeypatch):
    three = sharding.Layout(SimpleNamespace(size=3), "data")  # type: ignore[arg-type]
    alone = sharding.Layout(None, "no")
    monkeypatch.setattr(sharding, "layout", {"data": three, "no": alone}.get)
    with pytest.raises(
        ValueError, match=r"budget.batch must be a multiple of the 3 devices .*; got 16"
    ):
        study.loaded(TINY)
    study.loaded(varied(TINY, shard="no"))


def test_the_paper_s_table_3():
    paper = sd.presets["paper"]
    assert (paper.optimizer.rate, paper.optimizer.weight_decay) == (1e-4, 0.01)
    assert (paper.budget.batch, paper.budget.steps) == (256, 400_000)
    assert (paper.optimizer.clip, paper.optimizer.decay) == (1.0, "constant")
    assert (paper.alignment.repa_weight, paper.alignment.weight) == (0.5, 0.5)
    assert latents.SCALE == 0.18215
    assert [paper.every * k for k in (1, 2, 4, 8)] == [50_000, 100_000, 200_000, 400_000]
    assert PRINTED[1 / 8][0] == (78.2, 67.6)
    letter = sd.presets["paper_eq16"]
    assert varied(letter, ways=paper.ways, alignment={"summed": False}) == paper


def made_up(sail, repa, sit):
    """A run with given measures of each way at each step, with a spread over seeds."""
    spread = np.array([-0.1, 0.0, 0.1])[:, None] * np.ones(9)
    values = np.stack([np.broadcast_to(x, 9) + spread for x in (sit, repa, sail)])
    dims = ("way", "seed", "step")
    coords = {"way": ["sit", "repa", "sail"], "seed": range(3), "step": np.arange(0, 81, 10)}
    saved = xr.DataArray(np.full((3, 3), 7.0) + spread[:, :3].T, dims=dims[:2])
    measured = dict.fromkeys(("fd", "sfd", "inception", "precision"), (dims, values))
    real = {"fd_real": ("seed", np.ones(3))}
    return xr.Dataset(
        {**measured, **real, "saved_repa": saved, "align_steps": ("way", [0, 0, 5])},
        coords,
        {"steps": 80},
    )


def test_findings_of_made_up_runs():
    falling = np.linspace(9, 1, 9)
    better, worse = (
        sd.findings(made_up(falling + shift, falling, falling + 2)) for shift in (-0.5, 0.5)
    )
    by = lambda found, words: [f.verdict for f in found if words in f.claim]  # noqa: E731
    assert by(better, "SAIL has a better Fréchet") == ["holds"] * 4
    assert by(worse, "SAIL has a better Fréchet") == ["fails"] * 4
    # worse early, as printed, better later; a higher score is better, which a lower distance is not
    assert by(better, "SAIL has a worse spatial") == ["fails"] * 2
    assert by(worse, "SAIL has a worse spatial") == ["holds"] * 2
    assert by(better, "SAIL has a better spatial") == ["holds"] * 2
    assert by(better, "inception score than REPA") == ["fails"]
    assert by(worse, "precision than REPA") == ["holds"]
    assert by(better, "REPA's loss gives SiT a better Fréchet") == ["holds"]
    assert by(better, "after half of the training") == ["holds", "holds", "fails"]
    assert by(better, "saves steps") == ["holds"]
    noise = np.array([1.0, -1.2, 0.3])[:, None]
    unsure = made_up(falling, falling, falling)
    unsure["fd"].loc[{"way": "sail"}] += noise
    assert by(sd.findings(unsure), "SAIL has a better Fréchet") == ["undecided"] * 4
    without = sd.findings(made_up(falling, falling, falling).sel(way=["sit", "repa"]))
    assert set(by(without, "SAIL")) == {"not tested"}
    made = made_up(falling - 0.5, falling, falling + 2)
    text = told(sd.findings(made))
    assert "HOLDS: SAIL has a better Fréchet distance than REPA after an eighth" in text
    assert "FID 78.2 -> 67.6 after 50K steps, SiT-B/2" in text
    assert "of 80 steps, +12 ± 0 if they are not counted" in text
    assert "sit 3.00 ± 0.06, repa 1.00 ± 0.06, sail 0.50 ± 0.06" in sd.summary(made)


def test_the_summary_counts_verdicts_after_correction():
    """Margins of p = .01 to .04 in a run of many claims decide none of them."""
    falling = np.linspace(9, 1, 9)
    made = made_up(falling, falling, falling)
    for measure in ("fd", "sfd", "inception", "precision"):
        made[measure].loc[{"way": "sail"}] += np.array([0.9, 1.2, 1.5])[:, None]
    alone, judged = ([f.verdict for f in fn(made)] for fn in (findings.findings, sd.findings))
    assert judged.count("undecided") > alone.count("undecided")
    assert f"{judged.count('undecided')} undecided" in sd.summary(made)


@pytest.mark.slow
def test_features_by_path_need_no_encoder():
    """The projector has their size, and eq. (16) uses the features of the data."""
    sit = presets.build(presets.config("sit-tiny"))
    networks = Networks(sit, Projector(8, 5), None, 1, 0.0)
    batch = {"x": (2, 8, 8, 1), "labels": (2,), "features": (2, 16, 5)}
    batch = {k: jnp.zeros(shape, int if k == "labels" else float) for k, shape in batch.items()}
    weights = {"weights": networks.weights(WAYS["sail_clean"], 0.5, 0.5)}

    def loss(key):
        params = networks.init(key, (8, 8, 1))
        return params, networks.loss(params, weights, batch, key)

    params, (total, _, carried) = jax.eval_shape(loss, jax.random.key(0))
    assert (total.shape, total.dtype) == ((), jnp.float32)
    assert carried.keys() == {"weights"}
    for name in ("repa", "align"):
        assert params[name]["hidden_0"]["kernel"].shape == (32, 8)
        assert params[name]["out"]["kernel"].shape == (8, 5)


def pooled(x):
    """Latents of 8 x 8 of images of 16 x 16."""
    return jnp.mean(jnp.reshape(x, (len(x), 8, 2, 8, 2, 3)), (2, 4, 5))[..., None]


class Patches(nn.Module):
    """Features of the patches of 2 x 2 of such latents."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(x.reshape(len(x), 4, 2, 4, 2).swapaxes(2, 3).reshape(len(x), 16, 4))


def enlarged(x):
    return np.repeat(np.repeat(np.repeat(x, 2, 1), 2, 2), 3, 3)


def quadrants(images):
    """Replaces Inception by means of quadrants, channels of two pixels, and two classes."""
    assert images.shape[1:] == (16, 16, 3)
    flat = images.reshape(len(images), 2, 8, 2, 8, 3).mean((2, 4, 5)).reshape(-1, 4)
    return flat, images[:, :2, 0].reshape(len(images), 6), flat[:, :2]


WEIGHTS = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
PARAMS = {"params": {"Dense_0": {"kernel": WEIGHTS, "bias": WEIGHTS[0]}}}
GIVEN = {
    "encode": pooled,
    "features": partial(Patches().apply, PARAMS),
    "decode": enlarged,
    "measure": quadrants,
}


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    """Images of two classes in folders, dark on the left; and the config of a run on them."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for k in range(2):
        (root / f"class{k}").mkdir()
        for i in range(8):
            pixels = rng.integers(0, 100, (16, 16, 3))
            pixels[:, 8:] += 100 + 50 * k
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"class{k}" / f"{i}.png")
    return varied(
        TINY,
        data={"name": "image-folders", "folder": str(root), "side": 16},
        changes={"flip": 1.0},
        functions=GIVEN,
        alignment={"steps": 2},
        budget={"steps": 8, "batch": 4, "save_every": 8},
        held_out=8,
        samples=8,
        sample_batch=8,
        sampler={"method": "euler", "steps": 1},
    )


@pytest.mark.slow
def test_images_are_flipped_and_then_encoded_for_training(pictured, monkeypatch):
    lab = Laboratory(pictured, images := study.loaded(pictured))
    batch = data.batch(images, np.array([3, 9]))
    assert batch["x"].dtype == np.uint8
    encoded_ = latents.SCALE * np.asarray(pooled(batch["x"] / np.float32(255)))
    assert (encoded_[:, :, :4].mean((1, 2, 3)) < encoded_[:, :, 4:].mean((1, 2, 3))).all()
    # sums of a dozen numbers, of order 1
    close = {"rtol": 0, "atol": 12 * EPS}
    np.testing.assert_allclose(lab._x(np.array([3, 9])), encoded_, **close)
    shown = []
    monkeypatch.setattr(networks, "interpolate", lambda x, *_: shown.append(x) or 1 / 0)
    mutable = {"given": lab.networks.given.arrays}
    with pytest.raises(ZeroDivisionError):
        lab.networks.loss({}, mutable, batch, jax.random.key(0))
    np.testing.assert_allclose(shown[0], encoded_[:, :, ::-1], **close)
    # f_P gets the latents of the autoencoder
    np.testing.assert_allclose(
        lab.networks.features(mutable, encoded_),
        GIVEN["features"](encoded_ / latents.SCALE),
        rtol=12 * EPS,
    )


@pytest.mark.slow
def test_digits_that_change_have_no_kept_features():
    config = varied(TINY, changes={"flip": 1.0})
    lab = Laboratory(config, images := study.loaded(config))
    assert not lab.keeps
    found = lab._x(np.array([5]), jax.random.key(0))
    # (x - bias) / scale and back rounds twice
    np.testing.assert_allclose(found, data.batch(images, np.array([5]))["x"][:, :, ::-1], atol=EPS)


def test_bound_arrays_are_handed_over_and_other_values_are_not():
    def scaled(weights, x, *, twice):
        return weights["a"] * x * (2 if twice else 1)

    traced = Traced(Functions(features=partial(scaled, {"a": np.float32([3.0])}, twice=True)))
    assert [x.tolist() for x in traced.arrays] == [[3.0]]
    assert traced.bind([5.0])["features"](7.0) == 70
    assert store.config_record(varied(TINY, functions={"features": GIVEN["features"]}))[
        "functions"
    ] == {"encode": None, "features": f"{__name__}:Patches.apply", "decode": None, "measure": None}


def failing(x):
    raise KeyError("no weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encode": None}, "functions.encode must be given for data.name image-folders: "),
        ({"encode": failing}, "functions.encode raised KeyError: 'no weights'"),
        (
            {"encode": lambda x: x},
            "functions.encode must return floating-point numbers [2, 8, 8, 1]; got float32[2, 16,",
        ),
        (
            {"features": lambda x: x},
            "functions.features must return floating-point numbers [2, 16, d]; got float32[2, 8,",
        ),
        ({"decode": lambda x: x[0]}, "functions.decode must return floating-point numbers [2, hei"),
        ({"measure": failing}, "functions.measure raised KeyError"),
        ({"decode": lambda x: enlarged(x) + np.inf}, "functions.decode returned numbers that are"),
        (
            {"measure": lambda x: (*quadrants(x)[:2], np.full((2, 3), np.nan))},
            "functions.measure returned numbers that are not finite",
        ),
        ({"measure": lambda x: x}, "functions.measure must return a tuple of features, spatial fe"),
        (
            {"measure": lambda x: (*quadrants(x)[:2], np.arange(2))},
            "functions.measure must return floating-point numbers [2, class]; got int32[2]",
        ),
    ],
)
def test_functions_that_do_not_fit_are_named_before_anything_is_computed(pictured, change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        sd.run(varied(pictured, functions=change), lambda *_, **__: pytest.fail("a stage began"))


def test_functions_are_named_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_encoder", raising=False)
    (tmp_path / "my_encoder.py").write_text("def features(latents):\n    return latents\n")
    run = ["run", "sail_diffusion", "--preset", "tiny", "--functions.features"]
    assert cli.main([*run, "my_encoder:features"]) != 0
    assert "functions.features must return floating-point numbers [2, 16, d]" in (
        capsys.readouterr().err
    )
    assert cli.main([*run, "my_encoder:nothing"]) == 2
    assert "argument --functions.features: my_encoder:nothing: Attr" in capsys.readouterr().err


def test_functions_measure_images_and_decoded_samples(pictured):
    lab = Laboratory(pictured, images := study.loaded(pictured))
    index = np.arange(3, 14)  # two chunks, the second of which is padded
    pictures = images.latents[index] / np.float32(255)
    for name, want in zip(quality.Seen._fields, quadrants(pictures), strict=True):
        want = jax.nn.log_softmax(want) if name == "log_probabilities" else want
        np.testing.assert_allclose(getattr(lab.see(None, index), name), want, atol=64 * EPS)
    np.testing.assert_array_equal(lab.shown(index), pictures)
    z = np.random.default_rng(1).normal(size=(8, 8, 8, 1)).astype(np.float32)
    # scaled and back
    found = lab._look(None, latents.SCALE * z).pooled
    np.testing.assert_allclose(found, quadrants(enlarged(z))[0], atol=64 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "calls"), [(("sail",), 2), (("sail_clean",), 1)])
def test_features_are_computed_in_the_step(pictured, monkeypatch, ways, calls):
    """Features of the data, and of noised latents if a way requires them."""
    config = varied(pictured, ways=("sit", "repa", *ways))
    lab = Laboratory(config, images := study.loaded(config))
    batch, seen = data.batch(images, np.arange(4)), []
    plain = Networks.features
    monkeypatch.setattr(Networks, "features", lambda *args: seen.append(plain(*args)) or seen[-1])

    def loss(key):
        params = lab.networks.init(key, lab.shape)
        given = [jnp.asarray(x) for x in lab.networks.given.arrays]
        mutable = {"given": given, "weights": lab.networks.weights(WAYS[ways[0]], 0.5, 0.5)}
        return lab.networks.loss(params, mutable, batch, key)[0]

    assert jax.eval_shape(loss, jax.random.key(0)).shape == ()
    assert [x.shape for x in seen] == [(4, 16, 5)] * calls


@pytest.mark.soak
def test_a_run_on_images_with_functions_alone(pictured):
    """Only SiTs are trained, and the measures are those of the function."""
    stages = []

    def stage(name, compute, *, folder=False):
        stages.append(name)
        return store.direct(name, compute, folder=folder)

    dataset = sd.run(pictured, stage)
    assert stages == [f"{way}, seed {k}" for k in (0, 1) for way in ("align", *pictured.ways)]
    for name in (*quality.MEASURES, "velocity_loss", "repa_loss", "align_loss", "start_loss"):
        assert np.isfinite(dataset[name]).all(), name
    assert dataset["samples"].shape[1:] == dataset["images"].shape == (8, 16, 16)
    pictures = study.loaded(pictured).latents[np.arange(16)] / np.float32(255)
    split = data.split(pictured.seed, 0, 16, 8)
    learn, real = (frechet.fit(quadrants(pictures[part])[0]) for part in split)
    # float32 sums of 64 pixels, squared
    assert float(dataset["fd_real"][0]) == pytest.approx(frechet.distance(learn, real), rel=1e-3)
