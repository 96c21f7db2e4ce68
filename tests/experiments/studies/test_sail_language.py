"""SAIL's start for language models: parts compared with independent computations, errors, and
verdicts.
"""

import functools
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import many_devices
import numpy as np
import pytest
import xarray as xr
from benchmark_files import written
from small_tokenizers import tokenizer
from tiny_runs import tiny_run

from experiments.data import benchmarks, choices, gpt2_tokens, text, tokens
from experiments.data.files import DataError
from experiments.lab import registry, store
from experiments.lab.config import varied
from experiments.measures import choice_scores
from experiments.models import presets
from experiments.studies.sail_language import claims as told
from experiments.studies.sail_language import costs, data, ligo, parts, table_2
from experiments.studies.sail_language import run as study
from experiments.studies.sail_language.config import SOURCES, WAYS
from experiments.training import sharding
from experiments.training.sail_start import merged
from sail_jax.checkpoint import save_checkpoint
from sail_jax.drawing import style

sl = registry.load("sail_language")

EPS = float(jnp.finfo(jnp.float32).eps)
TINY = sl.presets["tiny"]
# all ways, on networks that can be narrower and shallower
SMALL = varied(
    TINY,
    ways=tuple(WAYS),
    weight={"retrain": (5, 10)},
    model={"layers": 2},
    source={"steps": 20, "series": (0.5, 0.9)},
    budget={"steps": 20},
    validation=16,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Equal configs use the same compiled steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "learners", functools.cache(parts.learners))
        yield


@pytest.fixture(scope="module")
def ran(_compiled_once):
    return tiny_run("sail_language").dataset


@pytest.fixture(scope="module")
def corpus():
    return data.load(TINY)


@pytest.fixture(scope="module")
def net():
    """A network without initial zeros and ones."""
    module = presets.build(TINY.network("target", text.VOCAB))
    shapes = jax.eval_shape(functools.partial(parts.initial, module), jax.random.key(0))
    rng = np.random.default_rng(0)
    drawn = lambda x: 0.3 * rng.standard_normal(x.shape, np.float32)  # noqa: E731
    return module, jax.tree.map(drawn, shapes)


# Scores of choices


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow
def test_scores_are_log_likelihoods_per_token(net):
    module, variables = net
    items = choices.generate(3, 8, 3)
    packed = choices.pack(items, text.encode, TINY.model.context)
    apply = jax.jit(functools.partial(module.apply, variables))
    found = choice_scores.normalised(apply, packed, batch_size=5)
    by_byte = choice_scores.normalised(apply, packed, by="byte", batch_size=5)
    for i, item in enumerate(items):
        for j, choice in enumerate(item.choices):
            context, rest = (text.encode(s.encode()) for s in (item.context, choice))
            line = np.concatenate([context, rest]).astype(int)[-TINY.model.context :]
            padded = np.zeros(
                (5, TINY.model.context - 1), int
            )  # attention is causal, so the end has no effect
            padded[0, : len(line) - 1] = line[:-1]
            logp = log_softmax(apply(padded)[0, : len(line) - 1])
            want = logp[np.arange(len(line) - 1), line[1:]][-len(rest) :].mean()
            # float32 forward passes of unlike lengths
            np.testing.assert_allclose(found[i, j], want, rtol=10 * EPS**0.5)
            np.testing.assert_allclose(by_byte[i, j], want, rtol=10 * EPS**0.5)
    wanted = np.mean(np.argmax(np.asarray(found), -1) == [item.answer for item in items])
    assert float(choice_scores.answered(apply, packed)) == pytest.approx(wanted)


@pytest.mark.slow
def test_length_is_normalised():
    """For a longer and a shorter choice of equal tokens, the sum alone would prefer the shorter
    one.
    """
    rate = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    apply = lambda x: jnp.broadcast_to(rate, (*x.shape, 3))  # noqa: E731
    one = choices.Packed(
        np.array([[[0, 1, 1, 1], [0, 2, 0, 0]]], np.int32),
        np.array([[[0, 1, 1, 1], [0, 1, 0, 0]]], bool),
        np.array([[3, 1]], np.int32),
        np.array([0], np.int32),
    )
    assert 3 * np.log(0.5) < np.log(0.3)
    assert float(choice_scores.answered(apply, one)) == 1
    # in other units: both choices of 3 bytes
    bytewise = one._replace(length=np.array([[3, 3]], np.int32))
    assert float(choice_scores.answered(apply, bytewise, by="byte")) == 0
    with pytest.raises(ValueError, match="by must be token or byte; got 'word'"):
        choice_scores.normalised(apply, one, by="word")


@pytest.mark.slow
def test_continuations_hold_the_true_one_once_and_are_answered_by_who_knows_it():
    blocks = np.arange(60, dtype=np.int32).reshape(10, 6)
    packed = choice_scores.continuations(blocks, context=4, items=10, choices=3, seed=0)
    for item, answer in zip(packed.tokens, packed.answer, strict=True):
        assert (item[:, :4] == item[0, :4]).all()
        true = item[0, 3] + np.arange(1, 3)
        assert [(row[4:] == true).all() for row in item] == [j == answer for j in range(3)]
        assert len({tuple(row) for row in item}) == 3
    assert len({tuple(item[0, :4]) for item in packed.tokens}) == 10
    after = lambda x: 50.0 * jax.nn.one_hot(x + 1, 61)  # noqa: E731
    assert float(choice_scores.answered(after, packed)) == 1
    with pytest.raises(ValueError, match="items, choices, context must be 1 to 10"):
        choice_scores.continuations(blocks, context=6, items=10, choices=3, seed=0)


# GPT-2's tokens


def test_tokens_of_gpt2_by_hand(tmp_path):
    path, names = tokenizer(tmp_path, [("t", "h"), ("Ġ", "th"), ("th", "e"), ("Ġth", "e")])
    encode = gpt2_tokens.load(path)
    spelt = lambda s: [names[k] for k in encode(s.encode()).tolist()]  # noqa: E731
    assert spelt("the the") == ["the", "Ġthe"]
    assert spelt("th ét") == ["th", "Ġ", "Ã", "©", "t"]
    assert spelt("the  th\n") == ["the", "Ġ", "Ġth", "Ċ"]
    back = {c: b for b, c in gpt2_tokens.byte_table().items()}
    line = "x = {'a': 1, 'b': ½}  # naïve – 日本\t\n\n  don't we'll"
    joined = "".join(names[k] for k in encode(line.encode()).tolist())
    assert bytes(back[c] for c in joined).decode() == line
    assert list(gpt2_tokens.words("we'll go  on!! 12a\n\n b")) == [
        "we", "'ll", " go", " ", " on", "!!", " 12", "a", "\n\n", " b",
    ]  # fmt: skip


def test_a_merge_of_unknown_tokens_is_refused(tmp_path):
    path, _ = tokenizer(tmp_path, [("t", "h")])
    record = json.loads(path.read_text())
    del record["model"]["vocab"]["th"]
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"merge 0 is 't h'; expected two known tokens"):
        gpt2_tokens.load(path)


# Data


def test_parts_are_by_mean_token(corpus):
    line, n = corpus.train, TINY.model.context
    blocks = len(line[: (len(line) - 1) // n * n]) // n
    means = np.asarray(line[: blocks * n], float).reshape(blocks, n).mean(1)
    low, high = np.percentile(means, (33, 66))
    for part, holds in zip(
        corpus.parts, (means < low, (means >= low) & (means <= high), means > high), strict=True
    ):
        np.testing.assert_array_equal(part, np.flatnonzero(holds))
    for some, count in ((corpus.validation, TINY.validation), (corpus.held_out, TINY.held_out)):
        assert some.inputs.shape == (count, n)
        assert (some.inputs.mean(1) > high).all()
        np.testing.assert_array_equal(some.inputs[:, 1:], some.targets[:, :-1])
    assert (corpus.own.inputs.mean(1) < low).all()
    both = np.concatenate([corpus.validation.inputs, corpus.held_out.inputs])
    kept = text.load().held_out.tobytes()
    assert all(row.astype(np.uint8).tobytes() in kept for row in both)


def test_eq_11_is_what_the_means_of_blocks_say(corpus):
    """In one dimension, eq. 11 is the position of the target's mean: < 0 if D_t is beyond D_2."""
    config = varied(TINY, weight={"distance": "w1", "blocks": 200})
    weight = data.weight(config, corpus, 0)
    one, two = data.sources(config, corpus, 0)
    means = tokens.block_means(corpus.train, config.model.context)
    mean = [means[part].mean() for part in (one, two, corpus.parts[2])]
    d1, d2, d12 = mean[2] - mean[0], mean[2] - mean[1], mean[1] - mean[0]
    assert mean[0] < mean[1] < mean[2]  # so the distances of ordered parts are those of their means
    want = (d2**2 + d12**2 - d1**2) / (2 * d12**2)
    # 200 blocks: the means' standard errors, propagated; |z| < 4
    spread = [means[part].std() / 200**0.5 for part in (one, two, corpus.parts[2])]
    error = float(np.hypot(spread[2], np.hypot(*spread[:2]) * max(1, abs(want)))) / d12
    assert abs(weight - want) < 4 * error
    assert weight < 0
    same = varied(config, source={"alpha": 1.0})
    assert np.isnan(data.weight(same, corpus, 0))


def test_eq_11_and_equal_texts_fall_back_to_the_mean():
    models = {"one": {"w": np.float32(1)}, "two": {"w": np.float32(2)}}
    none: Any = None
    for gamma, value in ((np.nan, 1.5), (0.25, 1.75), (-1.0, 3.0)):
        chosen = {"distance": gamma}
        found = parts.started(TINY, "distance", none, none, models, chosen, 0)
        assert float(found["w"]) == value


# Losses and starts


@pytest.mark.slow
def test_the_loss_and_its_line(net, corpus):
    module, variables = net
    batch = corpus.held_out
    logp = log_softmax(jax.jit(module.apply)(variables, batch.inputs))
    want = -np.take_along_axis(logp, batch.targets[..., None].astype(int), -1).mean()
    found = parts.held_out_loss(module, variables, batch, 3)
    np.testing.assert_allclose(found, want, rtol=10 * EPS**0.5)  # float32 forward passes
    other = jax.tree.map(lambda x: x[::-1] if x.ndim == 1 else 0.9 * x, variables)
    gamma = np.array([-0.5, 0.0, 1.0])
    along = parts.along(module, variables, other, jnp.asarray(gamma), batch, 3)
    for g, value in zip(gamma, along, strict=True):
        mixed = jax.tree.map(lambda a, b, g=g: g * a + (1 - g) * b, variables, other)
        want = parts.held_out_loss(module, mixed, batch, 3)
        np.testing.assert_allclose(value, want, rtol=10 * EPS**0.5)


@pytest.mark.soak
def test_all_ways_begin_where_they_should():
    """With sources of every shape: LiGO and the grown pair have the target's shape, the soups are
    on SAIL's line, and the best of the line is no worse on validation text than either soup."""
    corpus = data.load(SMALL)
    use, rng = parts.learners(SMALL, text.VOCAB), np.random.default_rng(0)
    drawn = lambda x: 0.3 * rng.standard_normal(x.shape, np.float32)  # noqa: E731
    found = {}
    for name in SOURCES:
        shapes = jax.eval_shape(functools.partial(parts.initial, use[name].net), jax.random.key(0))
        found[name] = jax.tree.map(drawn, shapes)
    target, chosen = use["target"], parts.choose(SMALL, use["target"], corpus, found, 0)
    chosen["retrained"] = 0.5
    starts = {
        way: parts.started(SMALL, way, target, corpus, found, chosen, 0) for way in SMALL.ways
    }
    like = jax.tree.map(jnp.shape, starts["scratch"])
    assert all(jax.tree.map(jnp.shape, start) == like for start in starts.values())
    loss = {w: parts.held_out_loss(target.net, m, corpus.validation, 8) for w, m in starts.items()}
    line = chosen["sweep loss"][0]
    np.testing.assert_allclose(loss["sweep"], line.min(), rtol=10 * EPS**0.5)
    np.testing.assert_allclose(loss["grown"], chosen["grown loss"][0].min(), rtol=10 * EPS**0.5)
    gamma = list(SMALL.gamma())
    for way in ("uniform", "retrained"):
        np.testing.assert_allclose(loss[way], line[gamma.index(0.5)], rtol=10 * EPS**0.5)
    ends = [line[gamma.index(g)] for g in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(loss["greedy"], min(ends), rtol=10 * EPS**0.5)
    cost = costs.costs(SMALL, use)
    # XLA counts a forward and a backward pass: between 2 and 4 times the forward one, and Adam's
    forward = cost.validation / SMALL.validation * SMALL.budget.batch
    adam = 40 * sum(np.size(x) for x in jax.tree.leaves(starts["scratch"]))
    assert 2 * forward < cost.step["target"] < 4 * forward + adam
    assert cost.step["narrow"] < cost.step["target"] > cost.step["shallow"]


# The run


@pytest.mark.slow
def test_the_tiny_run(ran):
    assert ran["loss"].dims == ("way", "seed", "step")
    for name in ("loss", "gamma_loss", "series_loss", "accuracy", "saved"):
        assert np.isfinite(ran[name]).all(), name
    assert ((ran["accuracy"] >= 0) & (ran["accuracy"] <= 1)).all()
    swept = ran["gamma_loss"].sel(pair="sweep", text="validation")
    np.testing.assert_array_equal(
        ran["gamma_swept"].sel(pair="sweep"), ran["gamma"][swept.argmin("gamma")]
    )
    # step 0 of a way on the line is the line's loss there
    held = ran["gamma_loss"].sel(pair="sweep", text="held out")
    for way, gamma in (("uniform", 0.5), ("sweep", ran["gamma_swept"].sel(pair="sweep"))):
        np.testing.assert_allclose(
            ran["loss"].sel(way=way, step=0), held.sel(gamma=gamma), rtol=10 * EPS**0.5
        )
    # costs: two sources of 40 steps, and 7 losses on 8 blocks of a step's 4
    assert ran["source_cost"].sel(way="sweep") == 2 * TINY.source.steps
    assert 7 * 2 / 4 < ran["ahead"].sel(way="sweep") < 7 * 2 / 2
    assert ran["ahead"].sel(way="uniform") == 0


@pytest.mark.slow
def test_figures_and_answers_come_from_the_dataset(ran):
    figures = sl.plot(ran)
    assert list(figures) == ["perplexity", "gamma", "saved", "answers", "series"]
    assert all(style.png(figure)[:4] == b"\x89PNG" for figure in figures.values())
    said = sl.summary(ran)
    assert all(WAYS[way] in said for way in TINY.ways)
    untested = {one.claim for one in sl.findings(ran) if one.verdict == "not tested"}
    assert "After training, SAIL's loss is lower than LiGO's" in untested
    assert len(untested) == 6


def made_up(ran, **final):
    """A run of all ways of Table 2 with given last losses and answers for each way."""
    missing = ran.sel(way="scratch").assign_coords(way="ligo").expand_dims("way")
    full = [v for v in ran.data_vars if "way" in ran[v].dims]
    found = ran.copy(deep=True)
    found = xr.concat([found[full], missing[full]], "way").assign(
        {v: ran[v] for v in ran.data_vars if v not in full}
    )
    noise = np.array([-0.01, 0.0, 0.01])
    for k, way in enumerate(told.COLUMNS):
        at = {"way": way}
        found["loss"].loc[{**at, "step": int(ran["step"][-1])}] = final.get(way, 3.0) + noise
        found["accuracy"].loc[at] = 0.2 + final.get("order", 1) * 0.1 * k
    return found.assign_attrs(ran.attrs)


@pytest.mark.slow
def test_verdicts_follow_the_numbers(ran):
    by_claim = lambda ds: {f.claim: f.verdict for f in sl.findings(ds)}  # noqa: E731
    good = by_claim(made_up(ran, sweep=2.0))
    assert good["After training, SAIL's loss is lower than LiGO's"] == "holds"
    assert good["After training, SAIL's loss is lower than from scratch"] == "holds"
    assert good["SAIL answers more questions than scratch, LiGO and either soup"] == "holds"
    assert good["Methods rank as in Table 2 (Kendall's τ above 0)"] == "holds"
    bad = by_claim(made_up(ran, sweep=4.0, order=-0.2))
    assert bad["After training, SAIL's loss is lower than LiGO's"] == "fails"
    assert bad["SAIL answers more questions than scratch, LiGO and either soup"] == "fails"
    assert bad["Methods rank as in Table 2 (Kendall's τ above 0)"] == "fails"
    even = made_up(ran)
    even["loss"].loc[{"way": "ligo", "step": int(ran["step"][-1])}] = [3.1, 2.9, 3.0]
    assert by_claim(even)["After training, SAIL's loss is lower than LiGO's"] == "undecided"


@pytest.mark.slow
def test_nearness_of_gamma_is_judged_by_the_lines_lowest_point(ran):
    near = ran.copy(deep=True)
    gamma, best = near["gamma"].values, np.array([0.5, 0.4, 0.45])
    near["gamma_loss"].loc[{"pair": "sweep", "text": "held out"}] = (gamma - best[:, None]) ** 2
    name = "γ by eq. 11 is within 0.2 of the sweep's optimum"
    for shift, verdict in ((0.05, "holds"), (1.0, "fails"), (np.nan, "undecided")):
        near["gamma_distance"] = ("seed", best + shift)
        assert {f.claim: f.verdict for f in sl.findings(near)}[name] == verdict


@pytest.mark.soak
def test_a_killed_training_goes_on_in_its_stage(tmp_path, ran):
    """A training stopped in the middle and resumed gives the same result as without the stop."""
    seen = []
    real = parts.held_out_loss

    def failing(*args):
        # at the second evaluation of a training that keeps checkpoints, however many came before
        seen.extend((tmp_path / "work").glob("*"))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args)

    patch = pytest.MonkeyPatch()
    patch.setattr(parts, "held_out_loss", failing)
    run = store.Run.open(tmp_path, "sail_language", TINY)
    with run, pytest.raises(KeyboardInterrupt):
        sl.run(TINY, run.stage)
    patch.undo()
    assert list((tmp_path / "work").iterdir())
    with store.Run.open(tmp_path, "sail_language", TINY, resume=True) as run:
        found = sl.run(TINY, run.stage)
    assert found.identical(ran)
    assert len(np.unique(found["loss"].sel(way="scratch", step=0))) == TINY.replicates
    assert not (tmp_path / "work").exists()


_SPREAD = """
import sys, jax, numpy as np
from experiments.lab import registry
from experiments.lab.config import varied
from experiments.studies.sail_language import data
from experiments.studies.sail_language import parts

assert len(jax.devices()) == 2
sl = registry.load("sail_language")
config = varied(sl.presets["tiny"], shard="full")
corpus, key = data.load(config), parts.keys(config, 0)
use = parts.learner(config, config.network("target", 97), config.budget.steps)
start = parts.initial(use.net, key["scratch"])
lesson = parts.on_target(config, use, corpus, 0)
look = lambda m: {"held_out": float(parts.held_out_loss(use.net, m, corpus.held_out, 8))}
what = lesson.batch, lesson.key, (config.budget.steps,), None, look
np.save(sys.argv[1], parts.trained(use, start, *what)[1]["held_out"])
"""


@pytest.mark.soak
def test_two_devices_agree_with_one(ran, tmp_path):
    """Training from scratch, with distributed batches and weights."""
    path = tmp_path / "loss.npy"
    command = [sys.executable, "-c", _SPREAD, str(path)]
    subprocess.run(command, env=many_devices.environment(2), check=True)
    alone = ran["loss"].sel(way="scratch", seed=0)
    # sums in another order, 40 steps on
    np.testing.assert_allclose(np.load(path), alone, rtol=10 * EPS**0.5)


@pytest.mark.soak
def test_eq_3_is_the_loss_after_training_from_each_gamma(corpus, monkeypatch):
    """Compares the loop with single trainings, then checks its findings."""
    config = varied(
        TINY,
        ways=("scratch", "distance", "sweep", "retrained"),
        weight={"gammas": 4, "retrain": (10, 20)},
    )
    compiled = parts.learners(TINY, text.VOCAB)
    use = {name: learner._replace(config=config) for name, learner in compiled.items()}
    monkeypatch.setattr(parts, "learners", lambda *_: use)
    names = []

    def stage(name, compute, *, folder=False):
        names.append(name)
        return store.direct(name, compute, folder=folder)

    found, target = sl.run(config, stage), use["target"]
    assert len(names) == len(set(names)) == 3 * (2 + 4 + 4)
    sources = parts.learn_sources(config, use, corpus, 1, None)
    lesson = parts.on_target(config, target, corpus, 1)
    batch, key = lesson.batch, lesson.key

    def look(variables):
        exams = {"validation": corpus.validation, "held out": corpus.held_out}
        return {
            n: float(parts.held_out_loss(target.net, variables, e, 8)) for n, e in exams.items()
        }

    for gamma in (-1.0, 1.0):
        start = merged([sources["one"], sources["two"]], np.array([gamma, 1 - gamma]))
        _, seen = parts.trained(target, start, batch, key, (20,), None, look)
        for name, values in seen.items():
            ours = found["retrained_loss"].sel(seed=1, text=name, gamma=gamma)
            np.testing.assert_allclose(ours, values[1:], rtol=10 * EPS**0.5)
    losses = found["retrained_loss"].sel(text="validation")
    best = found["gamma"].values[losses.argmin("gamma")]
    np.testing.assert_array_equal(found["gamma_retrained"], best)
    # the training that follows starts at that gamma
    before = found["gamma_loss"].sel(pair="sweep", text="held out")
    first = before.sel(gamma=found["gamma_retrained"].isel(look=-1))
    start = found["loss"].sel(way="retrained", step=0)
    np.testing.assert_allclose(start, first, rtol=10 * EPS**0.5)
    # 4 gammas of 20 steps, and 2 times 4 losses on 8 blocks, where a step has 4 of them
    assert 4 * 20 < found["ahead"].sel(way="retrained") < 4 * (20 + 2 * 2)
    assert "after steps of retraining" in sl.summary(found)
    judged = {one.claim: one.verdict for one in sl.findings(found)}
    assert all(judged[one.claim] != "not tested" for one in told.retrained(found))
    drawn = sl.plot(found)
    assert style.png(drawn["retrained"])[:4] == b"\x89PNG"
    # the statements follow from the numbers: the gamma of eq. 11 is compared with the best ones
    at = found["gamma_distance"].values[:, None]
    near = found.copy(deep=True)
    near["retrained_loss"].loc[{"look": 20, "text": "held out"}] = (found["gamma"].values - at) ** 2
    name = "γ by eq. 11 is within 0.2 of the optimum after retraining"
    assert {one.claim: one.verdict for one in told.retrained(near)}[name] == "holds"


# Refusals


def test_questions_for_a_text_of_files_need_its_tokenizer():
    for asked in ({"file": "q"}, {"tasks": ("piqa",)}):
        with pytest.raises(ValueError, match=r"questions\.tokenizer must be the one that made"):
            varied(TINY, data={"name": "tokens", "folder": "x"}, questions=asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 10**6}, "held_out, validation: 1000000"),
        ({"source": {"blocks": 10**6}}, "count must leave each part enough blocks"),
        (
            {"data": {"name": "tokens", "folder": "nowhere"}},
            "nowhere.* is missing: a tokenised text .* published at .* offline",
        ),
        (
            {"data": {"name": "openwebtext"}},
            "data.folder must be the place of OpenWebText .* .published at .* needs no",
        ),
        ({"model": {"context": 10**7}}, "model.context must be below"),
        ({"checkpoints": ("a",)}, "checkpoints must be two or more folders"),
        (
            {"checkpoints": ("a", "b")},
            "data.folder: give the folder of a text in the checkpoints' tokens",
        ),
    ],
)
def test_what_only_the_data_tell_is_refused_before_training(changes, message, monkeypatch):
    monkeypatch.setattr(parts, "learners", lambda *_: pytest.fail("compute was spent"))
    with pytest.raises(DataError, match=message):
        sl.run(varied(TINY, **changes))


def test_batches_that_devices_do_not_divide_are_refused(monkeypatch):
    three = sharding.Layout(SimpleNamespace(size=3), "data")  # type: ignore[arg-type]
    monkeypatch.setattr(study, "layout", lambda shard: three)
    monkeypatch.setattr(parts, "learners", lambda *_: pytest.fail("compute was spent"))
    with pytest.raises(
        ValueError, match=r"budget.batch must be a multiple of the 3 devices.* got 4"
    ):
        sl.run(TINY)


# Checkpoints on disk


def gpt2(folder, seed, layers=2):
    """A tiny random GPT-2 in Hugging Face's layout."""
    rng = np.random.default_rng(seed)
    w, vocab, positions = 8, 300, 16
    shapes = {"wte.weight": (vocab, w), "wpe.weight": (positions, w)}
    for i in range(layers):
        block = {"attn.c_attn": (w, 3 * w), "attn.c_proj": (w, w)}
        block |= {"mlp.c_fc": (w, 4 * w), "mlp.c_proj": (4 * w, w)}
        for name, shape in block.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.weight": (w,), f"h.{i}.{name}.bias": (w,)}
    shapes |= {"ln_f.weight": (w,), "ln_f.bias": (w,)}
    folder.mkdir()
    arrays = {n: 0.3 * rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    save_checkpoint(folder, arrays)
    sizes = {"vocab_size": vocab, "n_positions": positions, "n_embd": w, "n_head": 2}
    record = {"model_type": "gpt2", "n_layer": layers, **sizes}
    (folder / "config.json").write_text(json.dumps(record))
    return str(folder)


@pytest.fixture
def on_disk(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    path, _ = tokenizer(tmp_path, [("Ġ", "t")])
    encode = gpt2_tokens.load(path)
    line = encode(b"the tide turns at ten, they told the two. " * 60).astype("<u2")
    for part in ("train", "val"):
        line.tofile(folder / f"{part}.bin")
    asked = tmp_path / "asked.jsonl"
    rows = [{"question": "the tide", "choices": ["turns", "t"], "answer": 0}] * 5
    asked.write_text("\n".join(map(json.dumps, rows)))
    return varied(
        sl.presets["checkpoints"],
        replicates=3,
        checkpoints=tuple(gpt2(tmp_path / f"model {k}", k, 2 - k // 2) for k in range(3)),
        data={"folder": str(folder), "vocab": 257},
        model={"context": 12},
        weight={"gammas": 7},
        validation=4,
        held_out=8,
        questions={"items": 8, "ending": 4, "file": str(asked), "tokenizer": str(path)},
    )


@pytest.mark.soak
def test_checkpoints_on_disk_are_merged_and_judged(on_disk):
    """Three checkpoints, of which the last is shallower and is grown."""
    found = sl.run(on_disk)
    assert found["loss"].shape == (on_disk.replicates, 3 + 3)
    assert np.isfinite(found["loss"]).all()
    assert list(found["task"].values) == ["continuation", "file"]
    loss = found["gamma_loss"].sel(text="held out")
    first = found["loss"].sel(model="checkpoint 1")
    np.testing.assert_allclose(loss.sel(gamma=1.0), first, rtol=10 * EPS**0.5)
    chosen = loss.sel(gamma=found["gamma_swept"])
    np.testing.assert_allclose(found["loss"].sel(model="sweep"), chosen, rtol=10 * EPS**0.5)
    assert len(sl.findings(found)) == 3
    assert sl.summary(found).endswith(".")
    (rows,) = sl.tables(found)
    assert [row[0] for row in rows[1:]] == list(found["model"].values)
    (figure,) = sl.plot(found).values()
    assert style.png(figure)[:4] == b"\x89PNG"


@pytest.fixture
def trained_on(on_disk, tmp_path):
    """The same checkpoints, from which training continues; the benchmarks are evaluated."""
    return varied(
        on_disk,
        retrain=True,
        ways=(*told.COLUMNS, "retrained"),
        smaller=gpt2(tmp_path / "smaller", 3, 1),
        budget={"steps": 2, "batch": 4, "every": 1},
        optimizer={"warmup": 1},
        maps={"steps": 2},
        weight={"gammas": 3, "retrain": (1, 2)},
        questions={"file": None, "tasks": ("piqa", "copa"), "folder": str(written(tmp_path / "b"))},
        micro_batches=2,
    )


@pytest.mark.soak
def test_training_goes_on_from_checkpoints(trained_on, monkeypatch):
    """The columns of Table 2: starts are correct, and the findings follow from the numbers.

    LiGO, which takes long to compile, has a separate test.
    """
    grown = []

    def grow(small, large, variables, batches, rate, key):
        grown.append((small.layers, large.layers, batches.inputs.shape, rate))
        return parts.initial(large, key)

    monkeypatch.setattr(ligo, "grow", grow)
    found = sl.run(trained_on)
    assert found["trained_loss"].dims == ("way", "seed", "step")
    for name in ("trained_loss", "trained_accuracy", "answer_loss", "retrained_loss", "saved"):
        assert np.isfinite(found[name]).all(), name
    # the merges are measured before, and so are the same without training
    for way, model in (("uniform", "uniform"), ("greedy", "greedy"), ("sweep", "sweep")):
        start = found.sel(way=way, step=0)
        merge = found.sel(model=model)
        np.testing.assert_allclose(start["trained_loss"], merge["loss"], rtol=10 * EPS**0.5)
        np.testing.assert_array_equal(start["trained_accuracy"], merge["accuracy"])
    assert (found["chance"] == [0.25, 0.5, 0.5]).all()
    # three networks in soups: five losses on 4 blocks of a step's 4, a third of a step each
    assert 5 / 4 < found["ahead"].sel(way="greedy") < 5 / 2
    assert trained_on.maps.steps == found["ahead"].sel(way="ligo")
    assert grown == 3 * [(1, 2, (2, 4, 12), trained_on.maps.rate)]
    text = np.fromfile(f"{trained_on.data.folder}/train.bin", "<u2")
    assert found.attrs["epochs"] == 2 * 4 / ((len(text) - 1) // 12)
    claims = {one.claim for one in sl.findings(found)}
    assert "Methods rank as in Table 2 (Kendall's τ above 0)" in claims
    assert not any(one.verdict == "not tested" for one in sl.findings(found))
    (rows,) = sl.tables(found)
    assert [row[0] for row in rows[1:3]] == ["from scratch", "LiGO"]
    assert len(rows) == 1 + len(trained_on.ways)
    assert rows[-2][-2].endswith(" % (printed 61.9)")
    assert "Trained for 2 steps" in sl.summary(found)
    figures = sl.plot(found)
    assert list(figures) == ["checkpoints", "training", "table_2", "retrained"]
    for name in ("training", "table_2", "retrained"):
        assert style.png(figures[name])[:4] == b"\x89PNG"


@pytest.mark.slow
def test_answers_and_their_loss_are_those_of_the_scores(net):
    module, variables = net
    packed = benchmarks.per_token(choices.pack(choices.generate(3, 8, 3), text.encode, 16))
    right, nats = table_2.asked(module, variables, packed, 4)
    apply = jax.jit(functools.partial(module.apply, variables))
    scores = np.asarray(choice_scores.normalised(apply, packed))
    own = scores[np.arange(8), packed.answer]
    assert float(right) == np.mean(scores.argmax(-1) == packed.answer)
    np.testing.assert_allclose(nats, -own.mean(), rtol=10 * EPS**0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smaller": None}, "smaller must be the folder of a checkpoint for LiGO"),
        ({"ways": ("scratch", "sweep")}, "smaller must be .* and only then"),
        ({"questions": {"folder": None}}, r"questions.folder: give the folder of piqa.jsonl, copa"),
        ({"questions": {"folder": "nowhere"}}, r"piqa.jsonl is missing: multiple choice in JSON"),
    ],
)
def test_what_training_from_checkpoints_needs(trained_on, changes, message, monkeypatch):
    monkeypatch.setattr(parts, "held_out_loss", lambda *_: pytest.fail("compute was spent"))
    with pytest.raises(DataError, match=message):
        sl.run(varied(trained_on, **changes))


@pytest.mark.slow
def test_what_ligo_cannot_grow_is_named():
    sizes = presets.config("gpt-tiny")
    large = presets.build(sizes)
    for changes, message in (
        ({"vocab": 9}, "smaller must have the vocab of the checkpoints, 256; got 9"),
        ({}, "smaller must be smaller in a size, and larger in none; got equal sizes"),
        ({"layers": 1, "width": 64}, "smaller must be smaller .* got width 64 to 32"),
    ):
        with pytest.raises(ValueError, match=message):
            ligo.check(presets.build({**sizes, **changes}), large)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("flax_gpt", marks=pytest.mark.soak),
        pytest.param("flax_llama", marks=pytest.mark.soak),
    ],
)
def test_ligo_grows_width_and_depth_and_learns(kind):
    """After learning, the grown network is better than with the initial maps."""
    small = {"model_type": kind, "vocab": 8, "context": 8, "head_dim": 4, "hidden": 8, "tied": True}
    if kind == "flax_llama":
        small["norm"] = "layernorm"  # OLMo's
    small |= {"width": 8, "layers": 1, "heads": 1}
    large = presets.build({**small, "width": 12, "layers": 2, "heads": 2})
    net = presets.build(small)
    ligo.check(net, large)
    row = np.arange(9) % 8
    rows = np.broadcast_to(row, (40, 2, 9))
    batches = tokens.Batch(rows[..., :-1], rows[..., 1:])
    variables = parts.initial(net, jax.random.key(0))
    grown = ligo.grow(net, large, variables, batches, 3e-2, jax.random.key(1))
    like = jax.eval_shape(functools.partial(parts.initial, large), jax.random.key(0))
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, like)
    one = jax.tree.map(lambda x: x[0], batches)
    still = ligo.grow(net, large, variables, batches, 0.0, jax.random.key(1))
    first, last = (float(parts.next_token_loss(large, v, one)) for v in (still, grown))
    assert last < first - 0.1  # nats: of about log 8 = 2.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"vocab": 301}}, "the checkpoint's vocabulary has 300 tokens, the data's 301"),
        (
            {"model": {"context": 17}},
            "sequences of 17 were requested, but the checkpoint has positions for",
        ),
        ({"held_out": 10**5}, "held_out must be at most"),
        (
            {"questions": {"file": "none.jsonl"}},
            r"none.jsonl.* is missing: multiple choice in JSON lines",
        ),
    ],
)
def test_what_checkpoints_do_not_fit(on_disk, changes, message):
    with pytest.raises(DataError, match=message):
        sl.run(varied(on_disk, **changes))
