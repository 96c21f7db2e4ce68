"""Where to start between two models: the sources, the ends of the line, mapped sweeps compared with
single runs, predictions on lines with known answers, and errors.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xarray as xr
from pictures import flaws
from tiny_runs import tiny_run

from experiments.data import spirals, text
from experiments.data.files import DataError
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.models.mlp import MLP
from experiments.studies.proximal_gamma import training as gpt
from experiments.studies.proximal_spirals import training as mlp
from experiments.studies.shared import gamma_sweep as line
from sail_jax import proximal
from sail_jax.distances import Distance

EPS = float(jnp.finfo(jnp.float32).eps)
ps, pg = registry.load("proximal_spirals"), registry.load("proximal_gamma")
SPIRALS, GAMMA = ps.presets["tiny"], pg.presets["tiny"]
RNG = np.random.default_rng


def at(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


# The data


@pytest.mark.parametrize("how", spirals.SOURCES)
def test_sources_of_spirals(how):
    points = spirals.spirals(RNG(0), 200, turns=1.0, noise=0.02)
    one, two = spirals.sources(RNG(1), points, how, 80)
    assert len(set(one) | set(two)) == 160
    radius = np.hypot(*points.x.T)
    if how == "classes":
        assert set(points.y[one]) == {0}
        assert set(points.y[two]) == {1}
    elif how == "radii":
        assert radius[one].max() <= radius[two].min()
        assert set(points.y[one]) == set(points.y[two]) == {0, 1}
    else:  # null: equal means; the standard error of a difference of means of 80
        gap = radius[one].mean() - radius[two].mean()
        assert abs(gap) < 4 * radius.std() * (2 / 80) ** 0.5


def test_spirals_are_turned_into_each_other_by_half_a_turn():
    points = spirals.spirals(RNG(0), 400, turns=1.5, noise=0.0)
    radius = np.hypot(*points.x.T)
    phase = np.arctan2(points.x[:, 1], points.x[:, 0]) - 2 * np.pi * 1.5 * radius
    turned = np.exp(1j * (phase - np.pi * points.y))
    np.testing.assert_allclose(turned, 1, atol=1e3 * EPS)  # angles near the centre lose digits


def test_spirals_are_uniform_over_the_area():
    """null: the square of the radius is uniform, of variance 1 / 12."""
    points = spirals.spirals(RNG(0), 400, turns=1.5, noise=0.0)
    square = (points.x.astype(float) ** 2).sum(1)
    assert abs(square.mean() - 1 / 2) < 4 * (1 / 12 / 400) ** 0.5


def test_parts_by_mean_are_a_partition_into_thirds():
    some = RNG(0).integers(0, 97, (1000, 8)).astype(np.uint8)
    mean = some.mean(1)
    parts = text.by_mean(some, np.percentile(mean, (33, 66)))
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert mean[parts[0]].max() < mean[parts[1]].min()
    assert mean[parts[1]].max() < mean[parts[2]].min()
    ties = (mean[:, None] == np.percentile(mean, (33, 66))).sum(0).max()
    for part, share in zip(parts, (330, 330, 340), strict=True):
        assert abs(len(part) - share) <= 1 + ties
    alike = np.ones((5, 3), np.uint8)
    assert [len(p) for p in text.by_mean(alike, np.array([1.0, 1.0]))] == [0, 5, 0]


def test_blocks_are_the_text_in_order():
    tokens = np.arange(20, dtype=np.uint8)
    np.testing.assert_array_equal(text.blocks(tokens, 6).ravel(), tokens[:18])


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_overlaps_are_what_they_are_called(alpha, beta):
    parts = np.arange(48), np.arange(48, 96), np.arange(96, 192)
    count = 48  # halves and quarters of it are whole
    one, two = text.overlapping(RNG(0), parts, count, alpha=alpha, beta=beta)
    for some, own, other in ((one, 0, 1), (two, 1, 0)):
        assert len(set(some)) == count
        assert np.isin(some, parts[2]).sum() == beta * count
        # only the shared part of the other source
        assert np.isin(some, parts[other]).sum() == alpha * (1 - beta) * count / 2
        assert np.isin(some, parts[own]).sum() == (1 - alpha / 2) * (1 - beta) * count
    assert len(set(one) & set(two)) == alpha * count


# The line


def test_the_lowest_point_of_a_parabola_is_found_off_the_grid():
    gamma = np.linspace(-1, 2, 31)
    for vertex in (-0.93, 0.123, 0.5, 1.88):
        # the second difference on the grid multiplies rounding errors by 1/h^2 = 100
        assert line.lowest(gamma, 3 + 2 * (gamma - vertex) ** 2) == pytest.approx(vertex, abs=1e-12)
    np.testing.assert_array_equal(line.lowest(gamma, np.stack([gamma, -gamma])), [-1, 2])
    holes = np.where(gamma < 0, np.nan, (gamma - 1) ** 2)
    assert line.lowest(gamma, holes) == pytest.approx(1, abs=1e-12)
    assert np.isnan(line.lowest(gamma, np.full(31, np.nan)))


def test_weights_of_sources_that_are_alike_are_undefined():
    def found(between, error):
        values = dict(zip(line.PAIRS, (4.0, 1.0, between), strict=True))
        return {pair: Distance(value, error) for pair, value in values.items()}

    assert line.weight(found(3.0, 1.0), squared=True) == 0  # (1 + 3 - 4) / 6
    assert line.weight(found(3.0, np.nan), squared=False) == -1 / 3  # (1 + 9 - 16) / 18
    assert np.isnan(line.weight(found(1.9, 1.0), squared=True))
    assert np.isnan(line.weight(found(-1.0, 0.1), squared=True))


def test_a_barrier_is_told_from_a_valley():
    def case(middle):
        loss = np.array([[0.0, middle, 0.1]] * 3) + 0.01 * np.arange(3)[:, None]
        return xr.Dataset(
            {
                "end_excess": (("seed", "end"), loss),
                "best": ("seed", np.array([0.0, 1.0, 0.1])),
            },
            {"end": list(line.ENDS), "gamma": np.linspace(-1, 2, 31)},
        )

    assert line.barrier(case(0.5))
    assert "2 of 3 seeds below" in line.stated_best(case(0.5))
    one_side = case(0.5).assign(best=("seed", np.array([0.0, 0.1, 0.2])))
    assert line.stated_best(one_side) == "+0.10 ± 0.06 (a barrier at 1/2)"
    assert line.is_known(one_side)
    assert not line.is_known(case(0.5))
    assert not line.barrier(case(0.05))
    # At an end of the grid the best is not known, however well the seeds agree.
    for best, count in (([2.0, 2.0, 2.0], 3), ([-1.0, -0.9, -0.9], 1), ([1.9, 1.9, 1.9], 0)):
        at = case(0.05).assign(best=("seed", np.array(best)))
        assert line.is_known(at) is (count == 0)
        assert (f"({count} of 3 seeds at an end of the grid)" in line.stated_best(at)) is (
            count > 0
        )


# Two spirals


@pytest.fixture(scope="module")
def two_spirals():
    data = mlp.load(SPIRALS, "radii")
    first = jax.tree.map(lambda leaf: leaf[:, [0, 0]], mlp.initial(SPIRALS))
    return data, first, mlp.sweep(SPIRALS, first, data)


@pytest.mark.slow
def test_the_ends_of_the_line_are_the_models(two_spirals):
    """At gamma = 1 and 0 (both on the grid), before training."""
    data, _, found = two_spirals
    gamma = SPIRALS.gamma.values().tolist()
    for which, end in ((0, 1.0), (1, 0.0)):
        for seed in range(SPIRALS.replicates):
            model, train = at(found["models"], seed, which), at(data.train, seed)
            logits = MLP((SPIRALS.hidden,), 2).apply(model, train.x)
            own = optax.softmax_cross_entropy_with_integer_labels(logits, train.y).mean()
            np.testing.assert_allclose(
                found["loss"][seed, gamma.index(end), 0], own, rtol=10 * EPS**0.5
            )


@pytest.mark.slow
def test_the_mapped_sweep_is_single_runs_by_after_training(two_spirals):
    """Null: the loss after all epochs is what `proximal.after_training` has of one gamma at a time,
    trained on the same minibatches; float32, some 40 steps of Adam."""
    data, _, found = two_spirals
    train = at(data.train, 1)
    models = [at(found["models"], 1, i) for i in range(2)]
    after = proximal.after_training(
        models,
        lambda params, some: mlp.loss(SPIRALS, params, some),
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[data.order[1]], train),
        train,
        optimizer=optax.adam(SPIRALS.training.rate),
    )
    for k in (0, 3, 6):
        gamma = SPIRALS.gamma.values()[k]
        single = after(jnp.array([gamma, 1 - gamma]))
        np.testing.assert_allclose(found["loss"][1, k, -1], single, rtol=10 * EPS**0.5)


@pytest.mark.slow
def test_eq_3_descends_and_knows_dead_units(two_spirals):
    """It is finite, although the root in Adam has no derivative at the zero gradients of dead
    units, and its loss is not larger than at the start, 1/2.
    """
    data, _, found = two_spirals
    config = varied(SPIRALS, loss_steps=20)
    dead = jax.tree.map(lambda leaf: leaf, found["models"])
    dead["params"]["hidden_0"]["bias"] = dead["params"]["hidden_0"]["bias"].at[..., 0].set(-100)
    gamma = mlp.gamma_by_loss(config, data, dead)
    assert np.isfinite(gamma).all()
    steps = config.loss_epochs * config.data.points // config.training.batch
    for seed in range(config.replicates):
        train = at(data.train, seed)
        after = proximal.after_training(
            [at(dead, seed, i) for i in range(2)],
            lambda params, some: mlp.loss(config, params, some),
            jax.tree.map(
                lambda leaf, t=train, s=seed: jnp.asarray(leaf)[data.order[s, :steps]], train
            ),
            train,
            optimizer=optax.adam(config.training.rate),
        )
        start, end = (after(jnp.array([g, 1 - g])) for g in (0.5, float(gamma[seed])))
        assert end <= start + 10 * EPS**0.5


@pytest.mark.soak
def test_symmetric_sources_have_equal_weights():
    """Each spiral is the rotated other one, so every distance of the laws gives 1/2. Null of the
    estimates: mean 1/2 over seeds, z < 4."""
    config = varied(
        SPIRALS, data={"points": 200, "test": 400}, training={"batch": 20}, replicates=6
    )
    found = mlp.apart(config, mlp.load(config, "classes"))
    mean, error = found["weight"].mean(0), found["weight"].std(0, ddof=1) / 6**0.5
    assert (np.abs(mean - 0.5) < 4 * error).all()
    assert (error < 0.1).all()


# Text


@pytest.mark.slow
def test_distances_of_texts_are_symmetric_and_order_the_parts():
    _, data = gpt.load(GAMMA)
    one, two, target = (data.blocks[part[:: len(part) // 60][:60]] for part in data.parts)
    found, turned = (gpt.measured(*pair, target, text.VOCAB) for pair in ((one, two), (two, one)))
    assert set(found) == set(gpt.DISTANCES)
    for name in found:
        for pair, back in zip(line.PAIRS, ("2-target", "1-target", "1-2"), strict=True):
            # float32 sums of 60^2 kernels in another order; bandwidths alike
            np.testing.assert_allclose(found[name][pair], turned[name][back], rtol=1e3 * EPS)
        values = {pair: float(d.value) for pair, d in found[name].items()}
        assert values["1-target"] > max(values["2-target"], values["1-2"])
        # hence the target lies beyond the second model: eq. 11 is below 1/2, the printed one above
        assert line.weight(found[name], squared=gpt.DISTANCES[name][0]) < 0.5


def test_parts_on_a_line_are_extrapolated():
    """W_1 of ordered laws is the gap of means, so that eq. 11 is -(m_t - m_2) / (m_2 - m_1)."""
    low, high, target = (np.full((5, 4), c, np.uint8) for c in (10, 20, 35))
    found = line.distances(gpt.distances.wasserstein, *(x.mean(1) for x in (low, high, target)))
    assert line.weight(found, squared=False) == pytest.approx(-1.5)


@pytest.fixture(scope="module")
def texts():
    _, data = gpt.load(GAMMA)
    parts = gpt.parts(data, gpt.sources(GAMMA, data, 0.0, 0.0))
    first = jax.tree.map(lambda leaf: leaf[:, [0, 0, 0]], gpt.initial(GAMMA))
    learned = gpt.learn(GAMMA, first, data, *parts)
    return data, learned, gpt.tune(GAMMA, GAMMA.looks[-1], learned["model"], data)["loss"]


@pytest.mark.slow
def test_texts_start_at_the_losses_of_the_models(texts):
    _, learned, loss = texts
    gamma = GAMMA.gamma.values().tolist()
    for which, end in ((0, 1.0), (1, 0.0)):
        own = learned["loss"][:, which, -1]  # training.steps are the last look
        np.testing.assert_allclose(loss[:, gamma.index(end), 0], own, rtol=10 * EPS**0.5)


@pytest.mark.soak
def test_the_mapped_sweep_of_texts_is_single_runs(texts):
    data, learned, loss = texts
    one, two = (at(learned["model"], 1, i) for i in range(2))
    target = jnp.asarray(data.parts[2])

    @jax.jit
    def single(gamma):
        params = line.on_line(one, two, gamma)
        measure = lambda params: gpt.held_out_loss(GAMMA, jnp.asarray(data.held_out), params)  # noqa: E731
        key = gpt._keys(GAMMA)[1, 5]
        part = target, jnp.asarray(len(target))
        blocks = jnp.asarray(data.blocks)
        return gpt.trained(GAMMA, params, blocks, part, key, GAMMA.looks[-1], measure)[1]

    for k in (1, 5):
        gamma = jnp.asarray(GAMMA.gamma.values()[k], jnp.float32)
        np.testing.assert_allclose(loss[1, k], single(gamma), rtol=10 * EPS**0.5)


def test_held_out_blocks_are_like_the_target_and_not_learned_from():
    _, data = gpt.load(GAMMA)
    means = data.blocks[data.parts[2]].mean(1)
    assert data.held_out.mean(1).min() >= means.min()


def test_the_text_has_blocks_enough_for_every_preset():
    for config in (preset for preset in pg.presets.values() if preset.data.name == "python"):
        _, data = gpt.load(config)
        for alpha, beta in ((0.0, 1.0), (1.0, 0.0)):
            assert gpt.sources(config, data, alpha, beta).shape[1] == 2


# Texts from files

VOCAB = 40
SMALL = varied(
    GAMMA,
    overlaps={"alphas": (0.0,), "betas": (0.0,), "steps": 2},
    looks=(0, 2),
    gamma={"points": 3},
    blocks={"length": 8, "of_text": 90, "source": 10, "distance": 10, "held_out": 4},
    training={"steps": 2, "warmup": 1},
    tsne=6,
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two texts as nanoGPT prepares them; the second has no token of the first's lower half."""
    folders = []
    for name, least in (("web", 0), ("wiki", VOCAB // 2)):
        folder = tmp_path_factory.mktemp(name)
        for part, length in (("train", 1000), ("val", 300)):
            RNG(least).integers(least, VOCAB, length).astype("<u2").tofile(folder / f"{part}.bin")
        (folder / "meta.json").write_text(f'{{"vocab_size": {VOCAB}}}')
        folders.append(str(folder))
    return folders


def test_a_target_of_another_text_is_all_of_it(corpora):
    web, wiki = ({"name": "tokens", "folder": folder} for folder in corpora)
    config, data = gpt.load(varied(SMALL, data=web))
    assert (config.vocab, config.network().vocab) == (VOCAB, VOCAB)
    assert sorted(np.concatenate(data.parts)) == list(range(90))
    _, other = gpt.load(varied(SMALL, data=web, target_data=wiki))
    np.testing.assert_array_equal(other.blocks[:90], data.blocks)
    for mine, its in zip(data.parts[:2], other.parts[:2], strict=True):
        np.testing.assert_array_equal(mine, its)
    assert other.parts[2].tolist() == list(range(90, 180))
    assert min(other.blocks[90:].min(), other.held_out.min()) == VOCAB // 2
    with pytest.raises(DataError, match=f"target_data must have the {VOCAB} tokens .* got 97$"):
        gpt.load(varied(SMALL, data=web, target_data={"name": "python"}))


def test_of_texts_from_files_some_blocks_are_drawn(corpora):
    data = {"name": "tokens", "folder": corpora[0]}
    whole = gpt.load(varied(SMALL, data=data, blocks={"of_text": None}))[1].blocks
    some = gpt.load(varied(SMALL, data=data, blocks={"of_text": 60}))[1].blocks
    assert (len(whole), len(some)) == (125, 60)
    rows = {row.tobytes(): i for i, row in enumerate(whole)}
    places = [rows[row.tobytes()] for row in some]
    assert places == sorted(set(places))


@pytest.mark.soak
def test_a_run_on_another_text_has_a_map_and_names_the_texts(corpora):
    web, wiki = ({"name": "tokens", "folder": folder} for folder in corpora)
    dataset = pg.run(varied(SMALL, data=web, target_data=wiki))
    assert dataset["map"].shape == (3, 6, 2)
    assert np.isfinite(dataset["map"]).all()
    assert np.isfinite(dataset["loss"]).all()
    figures = pg.plot(dataset)
    assert flaws(figures["map"]) == []
    assert "tokenised text" in pg.findings(dataset)[0].here


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "paper",
            {},
            r"^data.folder must be the place of OpenWebText .*data.name = python, needs no",
        ),
        (
            "paper_wikitext",
            {"data": {"name": "tokens", "vocab": None}},
            r"^target_data.folder must be the place of WikiText-103 .*target_data.name = same",
        ),
    ],
)
def test_presets_of_the_paper_say_which_files_they_need(name, given, message, corpora):
    if given:
        given["data"]["folder"] = corpora[0]
        given["blocks"] = {"length": 8}
    with pytest.raises(DataError, match=message):
        gpt.load(varied(pg.presets[name], **given))


@pytest.mark.slow
def test_the_network_of_the_paper():
    """6 layers of 384 units (Sec. 4.3): 12 x 384^2 weights a layer, embeddings counted once."""
    config = pg.presets["paper"]
    shapes = jax.eval_shape(gpt.initial, varied(config, replicates=2))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes)) // 6
    layers, embedded = 6 * 12 * 384**2, (50257 + config.blocks.length - 1) * 384
    assert abs(count - layers - embedded) < 0.01 * layers  # biases and norms


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spirals.spirals(RNG(0), 3, turns=1, noise=0), "n must be even"),
        (
            lambda: spirals.sources(RNG(0), spirals.spirals(RNG(0), 4, turns=1, noise=0), "all", 1),
            "sources must be one of classes, radii, random; got 'all'",
        ),
        (lambda: text.blocks(np.zeros(3, np.uint8), 4), "length must be from 1 to 3 tokens; got 4"),
        (
            lambda: text.by_mean(np.ones((2, 2), np.uint8), np.array([2.0, 1.0])),
            "two increasing numbers; got 2.0, 1.0",
        ),
        (
            lambda: text.overlapping(RNG(0), (np.arange(5),) * 3, 4, alpha=2, beta=0),
            r"alpha must be in \[0, 1\]; got 2",
        ),
        (
            lambda: text.overlapping(RNG(0), (np.arange(5),) * 3, 4, alpha=0, beta=1),
            "need 8 of 5",
        ),
        (
            lambda: gpt.load(varied(GAMMA, blocks={"held_out": 10**6})),
            "blocks.held_out must be at most .* only so many blocks of 16 tokens",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_the_published_number_is_told_apart_from_the_printed_formula():
    """Section 4.4's formula is the weight of model 2; on the published value they add up to 1."""
    d = 4.0, 1.0, 2.6  # squares
    one, two = (proximal.pair_weight(*d, squared=True, model=m) for m in (1, 2))
    assert one + two == pytest.approx(1)
    answer = pg.summary(tiny_run("proximal_gamma").dataset)
    assert re.search(r"published -0.1244 .* would have given \+1.1244", answer)
