"""Sweeps of a merge's hyperparameters: networks compared with NumPy, the testbed with theory."""

import jax
import numpy as np
import pytest
from tiny_runs import tiny_run

from experiments.data import image_tasks
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.merging_scaling import networks, testbed
from experiments.studies.merging_scaling.config import LAWS
from experiments.studies.merging_scaling.findings import (
    SAYS,
    exponent,
    exponent_and_error,
    findings,
    measured,
    summary,
)
from experiments.studies.merging_scaling.testbed import quadratics
from theory.merging import Constants, Training, constants, exact, excess_risk_bound

ms = registry.load("merging_scaling")

TINY = ms.presets["tiny"]


@pytest.fixture(scope="module")
def ran():
    return tiny_run("merging_scaling")


def test_too_many_samples_are_refused_by_task():
    config = varied(TINY, pool=40, swept={"samples": (5, 10, 35)})
    with pytest.raises(
        ValueError, match=r"^swept.samples must be at most \d+, .*classes 0-4.*got 35$"
    ):
        ms.run(config)


def test_one_thing_varies_at_a_time():
    centre = TINY.at()
    assert centre == {"steps": 20, "batch": 8, "rate": 0.2, "samples": 10, "tasks": 2}
    for law in LAWS:
        other = TINY.at(law, 3)
        assert {name for name in centre if other[name] != centre[name]} == {law}


@pytest.mark.slow
def test_the_centre_is_the_same_point_of_every_law(ran):
    middle = ran[0].isel(point=1)
    for name in ("loss", "accuracy", "train_loss", "stability", "testbed_exact_excess"):
        for law in LAWS[1:]:
            # a jit with other shapes may round differently
            np.testing.assert_allclose(middle[name].sel(law=law), middle[name][0], rtol=1e-5)


def _forward(params, x):
    layers = params["params"]
    for name in sorted(layers):
        x = x @ layers[name]["kernel"] + layers[name]["bias"]
        x = x if name == "out" else np.maximum(x, 0)
    return x


def _loss_and_accuracy(params, images, labels):
    logits = _forward(params, images.astype(float))
    top = logits.max(1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return -logp[np.arange(len(labels)), labels].mean(), (logits.argmax(1) == labels).mean()


def _split(config, replicates):
    """Returns the images and their division."""
    pool = config.data.pool(config.seed)
    sizes = {"train": config.pretraining.images, "validation": config.pool}
    how = {"examples": len(pool.labels), **sizes}
    return pool, image_tasks.split(config.seed, replicates, **how)


@pytest.mark.slow
def test_averages_are_graded_as_numpy_does(ran):
    """At the centre: losses of float32 networks to 1e-4, accuracies up to one near-tied digit."""
    dataset, stages = ran
    merged = stages["networks by steps and by tasks"]["steps1"]["merged"]
    exam = networks.examine(TINY, *_split(TINY, TINY.replicates))
    n, count = TINY.at()["samples"], TINY.at()["tasks"]
    at = dataset.sel(law="steps", merge="average").isel(point=1)
    for r in range(TINY.replicates):
        params = jax.tree.map(lambda x, r=r: np.asarray(x[r], float), merged)
        seen, test = [], []
        for i in range(count):
            seen.append(_loss_and_accuracy(params, exam.images[r, i, :n], exam.labels[r, i, :n]))
            own = exam.test.member[r, i]
            part = exam.test.images[r, i][own], exam.test.labels[r, i][own]
            test.append(_loss_and_accuracy(params, *part))
        assert float(at["train_loss"][r]) == pytest.approx(np.mean(seen, 0)[0], rel=1e-4)
        assert float(at["loss"][r]) == pytest.approx(np.mean(test, 0)[0], rel=1e-4)
        assert abs(float(at["accuracy"][r]) - np.mean(test, 0)[1]) < 1.5 / 200


def test_tasks_differ_by_replicate_and_nothing_leaks():
    """Pools and tests share no digit, no expert uses the twins' sample, and each replicate merges
    tasks in a different order.
    """
    config = varied(TINY, tasks=("upright", "classes 0-4", "classes 5-9"))
    exam = networks.examine(varied(config, replicates=6), *_split(config, 6))
    assert exam.images.shape == (6, 3, max(config.swept.samples) + 1, 64)
    kinds = {tuple((labels.max(1) < 5) | (2 * (labels.min(1) > 4))) for labels in exam.labels}
    assert len(kinds) > 1
    for images, test in zip(exam.images, exam.test.images, strict=True):
        for own, other in zip(images, test, strict=True):
            assert not {x.tobytes() for x in own} & {x.tobytes() for x in other}
            assert len({x.tobytes() for x in own}) == len(own)


@pytest.mark.slow
def test_twins_differ_by_the_replaced_sample_only():
    """Full batches would draw it in every step; here a twin moves iff the first sample was drawn,
    and longer runs, which contain shorter ones, end where those go on from."""
    config = TINY
    images = np.random.default_rng(0).random((2, 1, 21, 64), np.float32)
    labels = np.tile(np.arange(21) % 10, (2, 1, 1))
    params = networks.MLP(config.widths, 10).init(jax.random.key(0), images[0, 0, :1])
    base = jax.tree.map(lambda x: np.stack([x, x]), params)
    keys, marks = jax.random.split(jax.random.key(1), 2), np.array([5, 10])

    def moved(samples, labels):
        experts, twins = networks.finetune(
            config, 4, marks, base, images, labels, samples, 0.2, keys
        )
        kernel = experts["params"]["out"]["kernel"]
        return kernel, np.abs(kernel - twins["params"]["out"]["kernel"]).max((1, 3, 4))

    kernel, away = moved(3, labels)
    assert (away > 0).all()  # the chance that 20 draws of 3 miss the first is 3e-4
    assert (np.abs(kernel[:, :, 1] - kernel[:, :, 0]).max((1, 2, 3)) > 0).all()
    # the same sample on both sides, so the difference is exactly 0
    images[:, :, -1], labels[:, :, -1] = images[:, :, 0], labels[:, :, 0]
    assert (moved(3, labels)[1] == 0).all()


@pytest.mark.slow
def test_the_testbed_is_the_theory_s(ran):
    dataset = ran[0]
    for law in LAWS:
        at = dataset.sel(law=law)
        for i, value in enumerate(TINY.values(law)):
            bed = quadratics(TINY, law, value)
            known, one = constants(bed), at.isel(point=i)
            expected = {
                "bound_excess": excess_risk_bound(known, bed.training).excess,
                "corrected_excess": excess_risk_bound(known, bed.training, form="corrected").excess,
                "exact_stability": exact(bed).stability,
            }
            for name, found in expected.items():
                # float32, sums of a hundred terms
                assert float(one[f"testbed_{name}"]) == pytest.approx(float(found), rel=1e-4)


@pytest.mark.slow
def test_simulated_points_lie_about_the_exact_ones():
    """|z| < 4 where the distribution is nearly normal: excess, and stability in large batches."""
    bed = quadratics(TINY, "batch", 8)
    config, found = varied(TINY, quadratics={"runs": 2000}), exact(bed)
    drawn = testbed.simulated(config, bed, jax.random.key(0))
    for name in ("excess", "stability"):
        error = drawn[f"simulated_{name}_error"]
        assert error > 0
        assert abs(drawn[f"simulated_{name}"] - float(getattr(found, name))) < 4 * error


@pytest.mark.slow
def test_bounds_of_networks_are_theorems_1_and_3(ran):
    dataset, stages = ran
    known = Constants(*(float(stages["constants of a run"][k]) for k in Constants._fields))
    s = TINY.at("batch", 16)
    found = excess_risk_bound(known, Training.of(10, 20, 16, 0.2, tasks=2))
    assert s["tasks"] == 2
    at = dataset.sel(law="batch").isel(point=-1)
    assert float(at["network_bound_excess"]) == pytest.approx(float(found.excess), rel=1e-5)
    # 16 rate^2 K (sigma^2 + 3 b zeta^2) / n
    stability = 16 * 0.2**2 * 20 * (known.variance + 3 * 16 * known.heterogeneity) / 10
    assert float(at["network_bound_stability"]) == pytest.approx(stability, rel=1e-5)


def test_exponents():
    """Exponents of exact powers and of noise: the jackknife gives the standard error of a
    mean's slope."""
    x = np.array([1.0, 3.0, 10.0])
    assert exponent(x, 5 * x**1.5) == pytest.approx(1.5)
    rng = np.random.default_rng(0)
    draws = [
        exponent_and_error(x, (x**2)[:, None] * rng.lognormal(0, 0.1, (3, 8))) for _ in range(400)
    ]
    slopes, errors = np.transpose(draws)
    assert abs(slopes.mean() - 2) < 4 * slopes.std() / 20
    # of the error of a standard deviation of 400 draws, 1/sqrt(800), four: 14 %
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(slopes.std(), rel=0.14)
    assert not np.isfinite(exponent_and_error(x, np.zeros((3, 2)))[1])


@pytest.mark.slow
def test_findings_follow_the_numbers(ran):
    """A dataset in which the paper is right, and one in which it is not."""
    dataset = ran[0].copy(deep=True)
    rng = np.random.default_rng(0)
    for law in LAWS:
        at, x = {"law": law}, dataset["value"].sel(law=law).values
        noise = np.exp(0.01 * rng.standard_normal((3, 2)))
        dataset["stability"].loc[at] = (
            dataset["network_bound_stability"].sel(at).values[:, None] * noise
        )
        dataset["testbed_exact_stability"].loc[at] = dataset["testbed_bound_stability"].sel(at)
        sign = SAYS[law] or 1
        dataset["testbed_exact_excess"].loc[at] = x ** float(sign)
        dataset["loss"].loc[at] = (x ** float(sign))[:, None, None] * noise[:, :, None]
    for one in measured(dataset):
        assert one["network"] == pytest.approx(one["network_bound"], abs=0.1)
        assert one["testbed_exact"] == pytest.approx(one["testbed_bound"])
    assert len(summary(dataset).splitlines()) == len(LAWS) + 2
    assert {f.verdict for f in findings(dataset)} == {"holds"}
    dataset["testbed_exact_stability"] = 1 / dataset["testbed_exact_stability"]
    dataset["loss"] = 1 / dataset["loss"]
    by_claim = {f.claim: f.verdict for f in findings(dataset)}
    assert len(by_claim) == 4 * 2 + len(LAWS)
    for claim, verdict in by_claim.items():
        if claim.startswith("the test loss"):
            assert verdict == "fails"
        elif claim.startswith("the excess"):
            assert verdict == "holds"
    stability = [v for claim, v in by_claim.items() if claim.startswith("stability")]
    assert stability.count("fails") >= 4  # all whose exponent is not 0


@pytest.mark.slow
def test_networks_learn(ran):
    """More steps lower the training loss; the base has the largest."""
    mean = ran[0]["train_loss"].sel(law="steps", merge="average").mean("replicate").values
    assert mean[-1] < mean[0]
