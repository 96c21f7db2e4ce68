"""Prediction of merges: the ranking, its reference, and the table shown by the command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_runs import tiny_run

from experiments.data import digits
from experiments.data.files import Pool
from experiments.data.registry import TextData
from experiments.lab import registry
from experiments.studies.merge_prediction import probes, ranking, run, tasks
from sail_jax import methods, probe
from sail_jax.cli import merge_odds

mp = registry.load("merge_prediction")

EACH = tasks.Examples(300, 160)
EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(scope="module")
def tiny():
    return tiny_run("merge_prediction").dataset


def test_spearman_is_scipys():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (40, 3)).astype(float), rng.standard_normal((40, 2))
    found = ranking.spearman(x, y)
    for i, j in np.ndindex(found.shape):
        expected = float(stats.spearmanr(x[:, j], y[:, i])[0])  # pyright: ignore[reportArgumentType]
        assert abs(found[i, j] - expected) < 1e-12  # ranks are exact, of some hundred operations
    assert ranking.spearman(np.ones((5, 1)), np.arange(5.0)[:, None]) == 0


@pytest.mark.soak
def test_intervals_cover_what_they_should():
    """For 100 samples of independent pairs in clusters of one, the number of 95 % intervals
    of a correlation that miss 0 is Binomial(100, 0.05), |z| < 4 (percentile intervals of 40
    are slightly short)."""
    rng, misses, n = np.random.default_rng(1), 0, 40
    for i in range(100):
        x, y = rng.standard_normal((2, n, 1))
        found = ranking.rank(
            x, y, np.arange(n), np.zeros(n, int), [np.ones(n, bool)], draws=200, seed=i
        )
        misses += not found.low[0, 0, 0] <= 0 <= found.high[0, 0, 0]
    assert abs(misses - 5) < 4 * np.sqrt(100 * 0.05 * 0.95)


def test_clusters_widen_intervals():
    """10 independent points, each repeated ten times: intervals of 10 points, not of 100."""
    rng = np.random.default_rng(2)
    x, y = (np.repeat(z, 10, 0) for z in rng.standard_normal((2, 10, 1)))
    every = [np.ones(100, bool)]
    wide, narrow = (
        ranking.rank(x, y, c, np.zeros(100, int), every, draws=300, seed=0)
        for c in (np.repeat(np.arange(10), 10), np.arange(100))
    )
    assert (wide.high - wide.low).item() > 2 * (narrow.high - narrow.low).item()


def test_every_merge_is_made_of_the_experts_it_says():
    config, family = mp.presets["default"], tasks.of_images(10)
    R, T, S = len(family.rates), len(family.tasks), len(config.steps)
    found = run._merges(config, family, 0)
    assert sum(len(m.base) for m, _ in found.values()) == 168
    for k, (merges, related) in found.items():
        assert merges.expert.shape == merges.task.shape == (len(related), k)
        base, rest = np.divmod(merges.expert, R * T * S)
        rate, rest = np.divmod(rest, T * S)
        task, step = np.divmod(rest, S)
        np.testing.assert_array_equal(task, merges.task)
        np.testing.assert_array_equal(
            np.asarray(config.steps)[step], merges.steps[:, None] + 0 * step
        )
        np.testing.assert_array_equal(
            np.asarray(family.rates)[rate], merges.rate[:, None] + 0 * rate
        )
        np.testing.assert_array_equal(base[:, 0], merges.base)
        np.testing.assert_array_equal((base == base[:, :1]).all(1), related)
        # equally long pre-training, all tasks different
        assert (base // config.bases == base[:, :1] // config.bases).all()
        assert all(len(set(row)) == k for row in task)
        assert related.any()
        assert not related.all()


@pytest.mark.slow
def test_experts_are_snapshots_of_one_run():
    """Experts with more steps continue from those with fewer."""
    family = tasks.of_images(10)
    data = tasks.rotations_and_classes(Pool(*digits.load()), 10, 1197, 0, family.tasks[:2], EACH)
    data = jax.tree.map(jnp.asarray, data)
    key = jax.random.key(0)
    base = tasks.pretrain(family, data.base, key, 5)
    both = tasks.tune(family, base, data.learn, 0.1, key, jnp.array([3, 7]))
    again = tasks.tune(family, base, data.learn, 0.1, key, jnp.array([7, 7]))
    for a, b, c in zip(*map(jax.tree.leaves, (both, again, base)), strict=True):
        np.testing.assert_array_equal(a[:, 1], b[:, 0])
        assert (a[:, 0] != c).any()
    still = tasks.pretrain(family, data.base, key, 0)
    first = family.net.init(jax.random.split(key)[0], data.base.inputs[:1])
    for a, b in zip(*map(jax.tree.leaves, (still, first)), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * EPS)


def test_tasks_of_text_are_ranges_of_what_they_say():
    data = tasks.quantiles_of_text(
        TextData().read(), 0, ("text 0-20", "text 80-100", "text 0-50"), EACH
    )
    low, high, half = data.learn.inputs.mean(-1)
    assert low.max() < high.min()
    assert low.max() < np.quantile(half, 0.6)
    np.testing.assert_array_equal(data.learn.inputs[..., 1:], data.learn.labels[..., :-1])
    np.testing.assert_allclose(data.points.sum(-1), 1, atol=10 * EPS)


@pytest.mark.soak
def test_outcomes_and_probes_are_of_the_merge(tiny):
    """The first merge, computed by hand."""
    config = mp.presets["tiny"]
    family, data = run.load("images", config)
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    trained = run._train(config, family, data, key)
    merges, _ = run._merges(config, family, 0)[2]
    merge = probes.at(merges, 0)
    models = [probes.at(trained["expert"], i) for i in merge.expert]
    base = probes.at(trained["base"], merge.base)
    few, held = (
        [jax.tree.map(lambda x, t=t, part=part: x[t, part], data.held_out) for t in merge.task]
        for part in (slice(probes.PROBED), slice(probes.PROBED, None))
    )
    loss, average = tasks.loss_of(family), methods.linear()(models)
    own = np.mean([loss(m, b) for m, b in zip(models, held, strict=True)])
    excess = np.mean([loss(average, b) for b in held]) - own
    found = tiny.isel(merge=0)
    slack = 100 * EPS * own  # means of 128 cross-entropies
    assert abs(float(found["own_loss"]) - own) < slack
    assert abs(float(found["result"].sel(outcome="averaging")) - excess) < slack
    clash = probe.interference(base, models).total
    value = found["value"]
    assert abs(float(value.sel(predictor="sign_conflict")) - float(clash.sign_conflict)) < 1e-6
    own = np.mean([loss(m, b) for m, b in zip(models, few, strict=True)])
    sample = np.mean([loss(average, b) for b in few]) - own
    assert abs(float(value.sel(predictor="sample")) - sample) < slack
    predicted = [
        probe.fine_tuning_sensitivity(loss, m, average, b, [1.0]).predicted[0]
        for m, b in zip(models, few, strict=True)
    ]
    # Hessian-vector products, compiled differently
    np.testing.assert_allclose(value.sel(predictor="taylor"), np.mean(predicted), rtol=1e-3)


@pytest.mark.slow
def test_the_dataset_is_whole(tiny):
    assert tiny.sizes["predictor"] == len(probes.PREDICTORS)
    assert np.isfinite(tiny["value"].values).all()
    assert (tiny["low"] <= tiny["high"]).all()
    assert (abs(tiny["rho"]) <= 1 + 1e-12).all()
    passes = tiny["passes"].sel(predictor=["sign_conflict", "sample", "top"]).values[:, 0]
    assert passes.tolist() == [0, 3, 96]


@pytest.mark.slow
def test_the_table_is_made_as_it_says(tiny):
    bands = merge_odds.measured(tiny)
    assert [b.below for b in bands] == [b.below for b in merge_odds.TABLE]
    assert sum(sum(b.merges) for b in bands) == tiny.sizes["merge"]
    for b in (*bands, *merge_odds.TABLE):
        for some in b[2:]:
            assert all(k <= n for k, n in zip(some, b.merges, strict=True))
    assert sum(sum(b.merges) for b in merge_odds.TABLE) == 336
    kept = tiny["kept"].sel(rule="averaging").values >= merge_odds.KEPT
    assert sum(sum(b.averaging) for b in bands) == kept.sum()


def test_the_verdict_reads_the_band_of_the_cosine():
    def said(cosine, **more):
        return "\n".join(
            merge_odds.verdict(
                {"models": ["a", "b"], "weights": {"cosine": cosine}, "differences": []}
                | {"pairs": [{"models": [0, 1], "equal": False}]}
                | more
            )
        )

    for band, cosine in zip(merge_odds.TABLE, (0.9999, 0.995, 0.95, 0.5), strict=True):
        assert f" {sum(band.merges)} earlier merges of small" in said(cosine)
    assert "sail-jax align" in said(0.01)
    assert "sail-jax align" not in said(0.5)
    assert "--data" in said(0.9999)
    data = {"losses": [1.0, 2.0], "average": 2.5}
    assert "1.0000 above the models' mean and above the worst model's" in said(0.9, data=data)
