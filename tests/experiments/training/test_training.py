"""The trainer: its laws, and exact continuation of a killed training."""

import dataclasses
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import chex
import jax
import jax.numpy as jnp
import many_devices
import numpy as np
import optax
import pytest
from cells import diagonal

from experiments.bench import training as bench
from experiments.lab.callbacks import CallbackError, JsonLines
from experiments.models import presets
from experiments.training import (
    Checkpoints,
    Optimizer,
    Schedule,
    Training,
    init,
    make_step,
    stateless,
    train,
)
from sail_jax.disk import RefusedError, StoreError

EPS = float(jnp.finfo(jnp.float32).eps)
INPUTS, UNITS, BATCH = 6, 8, 12


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    tree = {
        "hidden": {"kernel": rng.standard_normal((INPUTS, UNITS)), "bias": np.zeros(UNITS)},
        "norm": {"scale": np.ones(UNITS)},
        "out": {"kernel": rng.standard_normal((UNITS, 1)) / 3, "bias": np.zeros(1)},
    }
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)


def network(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    hidden = hidden * params["norm"]["scale"]
    return (hidden @ params["out"]["kernel"] + params["out"]["bias"])[:, 0]


def squared(params, batch, key):
    error = (network(params, batch["x"]) - batch["y"]).astype(jnp.float32)
    return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error))}


def noisy(params, batch, key):
    noise = 0.1 * jax.random.normal(key, batch["y"].shape)
    return squared(params, {**batch, "y": batch["y"] + noise}, key)


def running(params, mutable, batch, key):
    """Carries a running mean, as BatchNorm does."""
    value, metrics = squared(params, batch, key)
    mean = 0.9 * mutable["mean"] + 0.1 * batch["x"].astype(jnp.float32).mean(0)
    return value, metrics, {"mean": mean}


def batch(step):
    rng = np.random.default_rng([7, step])
    x = rng.standard_normal((BATCH, INPUTS), np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def optimizer(**fields):
    return Optimizer(Schedule(0.01, 40, warmup=5), **fields)


def taken(training, steps, loss=None, mutable=None, params=None, **how):
    """The state, and the metrics of each step."""
    loss = stateless(squared) if loss is None else loss
    step = make_step(loss, training, **how)
    state, seen = init(training, params or parameters(), jax.random.key(1), mutable), []
    for t in range(steps):
        state, metrics, _ = step(state, batch(t))
        seen.append(metrics)
    return state, seen


def norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


SGD = optimizer(rule="sgd", clip=1.0, weight_decay=0.1, nesterov=True)
ADAMW = optimizer(rule="adamw", clip=1.0, weight_decay=0.1, b2=0.95)


# schedules and optimisers


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_a_schedule_at_its_knots(decay, warmup):
    rate = Schedule(2.0, 24, warmup=warmup, decay=decay, floor=0.1)
    end, middle = (2.0, 2.0) if decay == "constant" else (0.2, 1.1)
    found = [float(rate(t)) for t in (0, warmup, (24 + warmup) // 2, 24, 1000)]
    np.testing.assert_allclose(found, [2 / (warmup + 1), 2, middle, end, end], rtol=8 * EPS)
    rates = np.array([rate(t) for t in range(25)])
    assert (np.diff(rates[: warmup + 1]) > 0).all()
    assert (np.diff(rates[warmup:]) <= 0).all()


def test_a_schedule_is_stable_before_it_falls():
    """Warm-up, stable, decay: of 20 steps 4 rise and the last 5 fall in a line."""
    rate = Schedule(2.0, 20, warmup=4, decay="wsd", floor=0.5, cooldown=0.25)
    found = [float(rate(t)) for t in (0, 4, 15, 16, 19, 20, 99)]
    np.testing.assert_allclose(found, [0.4, 2, 2, 1.8, 1.2, 1, 1], rtol=8 * EPS)
    no_warmup_left = Schedule(2.0, 4, warmup=3, decay="wsd", cooldown=1.0)
    np.testing.assert_allclose([no_warmup_left(t) for t in (3, 4)], [2, 0], atol=8 * EPS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(1.0, 5, cooldown=0.0), "cooldown must be greater than 0; got 0"),
        (lambda: Schedule(0.0, 5), "peak must be greater than 0; got 0.0"),
        (lambda: Schedule(1.0, 5, warmup=5), "steps must exceed warmup = 5; got 5"),
        (lambda: Schedule(1.0, 5, warmup=-1), "warmup must be at least 0; got -1"),
        (lambda: Schedule(1.0, 5, floor=2.0), "floor must be at most 1; got 2.0"),
        (lambda: Schedule(1.0, 5, decay="step"), "decay must be one of cosine, linear, constant"),  # type: ignore
        (lambda: optimizer(rule="lion"), "rule must be one of adamw, adam, sgd; got lion"),
        (lambda: optimizer(b2=1.0), "b2 must be less than 1; got 1.0"),
        (lambda: optimizer(clip=0.0), "clip must be greater than 0; got 0.0"),
        (lambda: optimizer(weight_decay=float("nan")), "weight_decay must be"),
        (lambda: Training(optimizer(), micro_batches=0), "micro_batches must be at least 1"),
        (lambda: Training(optimizer(), ema=1.0), "ema must be less than 1; got 1.0"),
        (lambda: Training(optimizer(), compute="float16"), "compute must be one of"),  # type: ignore
        (
            lambda: optimizer(weight_decay=0.1, undecayed=("*",)).decayed(parameters()),
            "leaves nothing for weight_decay",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_weight_decay_leaves_out_biases_norms_and_embeddings():
    params = {
        "token_embed": {"embedding": 1.0},
        "position_embed": 1.0,
        "block_0": {"ln_1": {"scale": 1.0, "bias": 1.0}, "q": {"kernel": 1.0, "bias": 1.0}},
        "final_norm": {"weight": 1.0},
        "unembed": {"kernel": 1.0},
    }
    decayed = optimizer().decayed(params)
    left = {"q": {"kernel": True, "bias": False}, "ln_1": {"scale": False, "bias": False}}
    assert decayed == {
        "token_embed": {"embedding": False},
        "position_embed": False,
        "block_0": left,
        "final_norm": {"weight": False},
        "unembed": {"kernel": True},
    }


@pytest.mark.slow
def test_only_what_is_decayed_shrinks_and_by_the_rate():
    rule = optimizer(weight_decay=0.5)
    state, seen = taken(Training(rule), 1, stateless(lambda p, b, k: (jnp.float32(0), {})))
    shrunk = 1 - 0.5 * float(seen[0]["rate"])
    expected = jax.tree.map(
        lambda p, mask: p * shrunk if mask else p, parameters(), rule.decayed(parameters())
    )
    chex.assert_trees_all_close(state.params, expected, rtol=4 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        ("adamw", lambda rate, mask: optax.adamw(rate, weight_decay=0.1, mask=mask)),
        ("adam", lambda rate, mask: optax.adam(rate)),
        ("sgd", lambda rate, mask: optax.sgd(rate, 0.9)),
    ],
)
def test_a_rule_is_that_of_optax(rule, reference):
    ours = optimizer(rule=rule, weight_decay=0.1 if rule == "adamw" else 0.0)
    theirs = reference(ours.schedule, ours.decayed)
    state, _ = taken(Training(ours), 3)

    @jax.jit
    def their_step(params, kept, batch):
        grads = jax.grad(lambda p: squared(p, batch, None)[0])(params)
        update, kept = theirs.update(grads, kept, params)
        return optax.apply_updates(params, update), kept

    params = parameters()
    kept = theirs.init(params)
    for t in range(3):
        params, kept = their_step(params, kept, batch(t))
    chex.assert_trees_all_close(state.params, params, atol=10 * EPS, rtol=100 * EPS)


@pytest.mark.slow
def test_clipping_bounds_the_update_but_not_the_metric():
    rule = optimizer(rule="sgd", momentum=0.0, clip=1e-3)
    state, seen = taken(Training(rule), 1)
    moved = norm(jax.tree.map(np.subtract, state.params, parameters()))
    grads = jax.jit(jax.grad(lambda p: squared(p, batch(0), None)[0]))(parameters())
    # a difference of numbers near 1 is known to a few eps
    assert moved == pytest.approx(1e-3 * float(seen[0]["rate"]), abs=4 * EPS)
    assert float(seen[0]["grad_norm"]) == pytest.approx(norm(grads), rel=1e-5)


# the step


@pytest.mark.parametrize(
    "rule",
    [pytest.param(SGD, id="sgd"), pytest.param(ADAMW, id="adamw", marks=pytest.mark.slow)],
)
def test_accumulation_equals_the_big_batch(rule):
    whole, seen = taken(Training(rule), 3)
    parts, seen_parts = taken(Training(rule, micro_batches=4), 3)
    # means in another order: a few eps of gradients of order 1, over 3 steps; Adam divides them by
    # their own size, and a small one has lost as many digits as it is smaller than its terms
    chex.assert_trees_all_close(whole.params, parts.params, atol=10 * EPS**0.5 * 0.01)
    for a, b in zip(seen, seen_parts, strict=True):
        chex.assert_trees_all_close(a, b, rtol=200 * EPS)


def test_a_micro_batch_more_than_examples_is_refused():
    with pytest.raises(ValueError, match=r"micro_batches: 5 does not divide x of shape \[12, 6\]"):
        taken(Training(optimizer(), micro_batches=5), 1)


def test_the_average_in_closed_form():
    training = Training(optimizer(rule="sgd"), ema=0.8)
    step = make_step(stateless(squared), training, donate=False)
    states = [init(training, parameters(), jax.random.key(0))]
    for t in range(4):
        states.append(step(states[-1], batch(t))[0])
    weights = [0.8**4, *(0.2 * 0.8 ** (4 - t) for t in range(1, 5))]
    params = [jax.device_get(state.params) for state in states]
    expected = jax.tree.map(lambda *p: sum(w * x for w, x in zip(weights, p, strict=True)), *params)
    chex.assert_trees_all_close(states[-1].ema, expected, rtol=10 * EPS, atol=10 * EPS)
    assert not np.allclose(states[-1].ema["out"]["kernel"], states[-1].params["out"]["kernel"])


@pytest.mark.slow
def test_computing_in_bfloat16_is_close_and_keeps_float32():
    types = []

    def spied(params, batch, key):
        types.append((params["out"]["kernel"].dtype.name, batch["x"].dtype.name))
        return squared(params, batch, key)

    _, seen = taken(Training(optimizer()), 3)
    half, seen_half = taken(Training(optimizer(), compute="bfloat16"), 3, stateless(spied))
    assert set(types) == {("bfloat16", "bfloat16")}
    for leaf in jax.tree.leaves((half.params, half.opt_state[1].mu)):
        assert leaf.dtype == jnp.float32
    # bfloat16 has 8 bits, so rounding is 2^-8; the loss is a mean of squares of a few such sums
    for a, b in zip(seen, seen_half, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=10 * 2**-8)
        assert float(a["loss"]) != float(b["loss"])


def test_a_loss_in_bfloat16_is_refused():
    def loss(params, batch, key):
        return network(params, batch["x"]).mean(), {}

    with pytest.raises(TypeError, match="the loss must be a float32 number, got bfloat16"):
        taken(Training(optimizer(), compute="bfloat16"), 1, stateless(loss))


def test_parameters_that_are_not_float32_are_refused():
    with pytest.raises(TypeError, match="params/w: expected float32, got bfloat16"):
        init(Training(optimizer()), {"w": jnp.ones(2, jnp.bfloat16)}, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_mutable_state_is_carried_through_micro_batches(parts):
    training = Training(optimizer(), micro_batches=parts)
    state, _ = taken(training, 2, running, {"mean": jnp.zeros(INPUTS)})
    mean = np.zeros(INPUTS)
    for t in range(2):
        for i in range(parts):
            mean = 0.9 * mean + 0.1 * batch(t)["x"][i::parts].mean(0)
    np.testing.assert_allclose(state.mutable["mean"], mean, atol=20 * EPS)


@pytest.mark.slow
def test_the_step_is_compiled_once_and_the_key_differs_by_step():
    traced = []

    def spied(params, batch, key):
        traced.append(1)
        return noisy(params, batch, key)

    training = Training(optimizer(), micro_batches=2, ema=0.9)
    step = make_step(stateless(spied), training)
    state, losses, counts = init(training, parameters(), jax.random.key(1)), [], []
    for _ in range(3):
        state = state._replace(params=parameters())
        state, metrics, _ = step(state, batch(0))
        losses.append(float(metrics["loss"]))
        counts.append(len(traced))
    assert len(set(counts)) == 1
    assert len(set(losses)) == 3


# the loop


@dataclasses.dataclass(frozen=True)
class Whole:
    training: Training
    seed: int = 1


TRAINING = Training(ADAMW, micro_batches=2, compute="bfloat16", ema=0.9)
STEPS = 12


def bfloat_noisy(params, mutable, batch, key):
    value, metrics = noisy(params, batch, key)
    mean = 0.9 * mutable["mean"] + 0.1 * batch["x"].astype(jnp.float32).mean(0)
    return value, metrics, {"mean": mean}


stepped = functools.cache(functools.partial(make_step, bfloat_noisy))


def learn(directory=None, steps=STEPS, batch=batch, training=TRAINING, state=None, **how):
    """Runs a training that uses all parts of the state."""
    state = state or init(training, parameters(), jax.random.key(1), {"mean": jnp.zeros(INPUTS)})
    options = {"save_every": 3, "log_every": 1, "evaluate_every": 4, "say": None, **how}
    options.setdefault("evaluate", lambda state: {"norm": norm(state.params)})
    return train(
        stepped(training),
        state,
        batch,
        steps,
        directory=directory,
        config=Whole(training),
        **options,
    )


def plain(state):
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


@pytest.fixture(scope="module")
def whole():
    return learn()


def same(found, whole):
    chex.assert_trees_all_equal(plain(found.state), plain(whole.state))
    assert found.rows == whole.rows


class DiedError(Exception):
    pass


def dying(at):
    def made(step):
        if step == at:
            raise DiedError
        return batch(step)

    return made


@pytest.mark.slow
def test_the_rows_are_of_every_step_and_fall(whole):
    losses = [row["loss"] for row in whole.rows if "loss" in row]
    assert len(losses) == STEPS
    assert [row["step"] for row in whole.rows if "norm" in row] == [0, 4, 8, 12]
    assert 0 <= whole.input_share <= 1 - whole.step_share <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("at", "stored"), [(2, None), (8, 6)])
def test_resuming_equals_never_having_stopped(tmp_path, whole, at, stored):
    with pytest.raises(DiedError):
        learn(tmp_path, batch=dying(at))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')  # torn
    said = []
    same(learn(tmp_path, say=said.append), whole)
    if stored is not None:
        assert said[0] == f"  resumed at step {stored} of 12"
    assert (stored is None) == ("resumed" not in said[0])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == whole.rows
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "9"]
    same(learn(tmp_path), whole)  # a second time, nothing is left to do


@pytest.mark.slow
def test_a_later_state_begins_a_folder_of_its_own(tmp_path, whole):
    later = learn(steps=4).state
    with pytest.raises(DiedError):
        learn(tmp_path, state=later, batch=dying(10))
    found = learn(tmp_path, state=later)
    chex.assert_trees_all_equal(plain(found.state), plain(whole.state))
    assert found.rows == [row for row in whole.rows if row["step"] >= 4]


# lets processes that are started here import this file and its dependencies
FOLDERS = ":".join(map(os.path.dirname, (__file__, many_devices.__file__)))

KILLED = """
    import sys, time
    sys.path[:0] = sys.argv[1].split(":")
    from test_training import batch, learn

    def slow(step):
        time.sleep(0.2 if step > 5 else 0)
        return batch(step)

    learn(sys.argv[2], batch=slow)
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed_to_the_same_end(tmp_path, whole):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), FOLDERS, tmp_path]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not (tmp_path / "checkpoints" / "3").exists() and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1].decode()[-2000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not (tmp_path / "checkpoints" / "12").exists()
    said = []
    same(learn(tmp_path, say=said.append), whole)
    assert said[0].startswith("  resumed at step ")


@pytest.fixture
def interruptible():
    """If the tests run in the background, the shell ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_stores_the_state_and_says_how_to_go_on(tmp_path, whole):
    def pressed(step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(step)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"of 12, which .* holds: run the same command"):
        learn(tmp_path, batch=pressed, save_every=100)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    same(learn(tmp_path, save_every=100), whole)


def test_an_error_of_a_callback_stores_the_state_and_names_it(tmp_path, whole):
    heard = []

    def failing(step, row):
        heard.append({"step": step, **row})
        if step == 5:
            raise OSError("no network")

    with pytest.raises(CallbackError, match=r":.*failing failed at step 5 \(OSError") as caught:
        learn(tmp_path, save_every=100, callback=failing)
    # Two steps were in flight.
    assert caught.value.__notes__[0].startswith("stopped before step 8 of 12")
    assert heard == whole.rows[: len(heard)]
    found = learn(tmp_path, save_every=100, callback=lambda step, row: heard.append(row))
    same(found, whole)
    assert len(heard) == 8 + 6  # rows of steps 0 to 5, then of 8 and later


def test_a_metric_of_replicates_has_an_entry_for_each():
    def loss(params, batch, key):
        errors = (params["w"] - batch) ** 2
        return errors.mean(), {"error": errors.mean(0)}

    training = Training(optimizer(rule="sgd"))
    state = init(training, {"w": jnp.zeros((1, 2))}, jax.random.key(0))
    rows = train(
        make_step(stateless(loss), training), state, lambda t: np.float32([[1, 2]]), 1
    ).rows
    assert [*rows[0]] == ["step", "0/error", "1/error", "grad_norm", "loss", "rate"]
    assert (rows[0]["0/error"], rows[0]["1/error"], rows[0]["loss"]) == (1.0, 4.0, 2.5)


@pytest.mark.slow
def test_an_evaluation_is_broken_off_and_the_state_before_it_stored(tmp_path):
    def evaluate(state):
        if int(state.step) == 6 and not asked:
            asked.append(6)
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the evaluation went on")
        return {"norm": float(state.step)}

    asked, how = [], {"evaluate": evaluate, "evaluate_every": 3, "save_every": 100}
    with pytest.raises(KeyboardInterrupt, match="stopped before step 6 of 12"):
        learn(tmp_path / "stopped", **how)
    assert asked == [6]
    same(learn(tmp_path / "stopped", **how), learn(tmp_path / "whole", **how))


def test_another_config_is_refused_by_the_name_of_its_entry(tmp_path):
    learn(tmp_path, steps=2)
    other = dataclasses.replace(TRAINING, ema=0.5)
    with pytest.raises(RefusedError, match=r"another training \(training.ema was 0.9, now 0.5\)"):
        learn(tmp_path, steps=4, training=other)


def test_another_network_is_refused_by_the_name_of_its_leaf(tmp_path):
    state = init(TRAINING, parameters(), jax.random.key(0))
    with Checkpoints(tmp_path, TRAINING) as kept:
        kept.save(state)
        wider = state._replace(params={**state.params, "norm": {"scale": jnp.ones(9)}})
        with pytest.raises(RefusedError, match=r"params/norm/scale was .float32\[8\]., now"):
            kept.restore(wider)


@pytest.mark.parametrize(
    ("how", "file"),
    diagonal(["flip", "cut", "remove"], ["manifest.json", "arrays/_METADATA", "arrays/d"]),
)
def test_damage_is_refused_in_one_sentence(tmp_path, how, file):
    state = init(TRAINING, parameters(), jax.random.key(0))
    with Checkpoints(tmp_path, TRAINING) as kept:
        kept.save(state)
        kept.save(state._replace(step=jnp.int32(5)))
    target = tmp_path / "5" / file
    if target.is_dir():
        target = sorted(target.iterdir())[0]
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "remove":
        target.unlink()
    else:
        target.write_bytes(data if how == "flip" else data[: len(data) // 2])
    with pytest.raises(StoreError, match=r"[^\n]*remove .*5 to continue from step 0$"):
        Checkpoints(tmp_path, TRAINING).restore(state)


@pytest.mark.slow
def test_only_the_latest_are_kept_and_leftovers_go(tmp_path):
    state = init(TRAINING, parameters(), jax.random.key(0))
    (tmp_path / ".7.part").mkdir()
    with Checkpoints(tmp_path, TRAINING, keep=2) as kept:
        for step in (1, 2, 3, 3):
            kept.save(state._replace(step=jnp.int32(step)))
        found = kept.restore(state)
        assert kept.steps() == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    chex.assert_trees_all_equal(plain(found), plain(state._replace(step=jnp.int32(3))))


@pytest.mark.slow
def test_what_is_saved_is_the_state_of_then(tmp_path):
    """The next step reuses the buffers of the state that is being written."""
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = init(Training(optimizer()), {"w": jnp.zeros((512, 512))}, jax.random.key(0))
    with Checkpoints(tmp_path, TRAINING) as kept:
        for t in range(1, 4):
            state = state._replace(params=bump(state.params), step=jnp.int32(t))
            kept.save(state)
            for _ in range(3):
                state = state._replace(params=bump(state.params))
            found = kept.restore(state)
            assert found is not None
            assert np.unique(found.params["w"]).tolist() == [4 * t - 3]


def poisoned(step):
    made = batch(step)
    if step == 5:
        made["x"][3, 2] = np.inf
    return made


@pytest.mark.parametrize("log_every", [1, 4, 100])
def test_the_step_and_the_leaf_that_are_not_finite_are_named(tmp_path, log_every):
    with pytest.raises(FloatingPointError, match=r"^step 5: batch/x is not .*; step 3 is stored"):
        learn(tmp_path, batch=poisoned, log_every=log_every)
    found = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert found == ["3"]


def test_an_evaluation_that_is_not_finite_is_named(tmp_path):
    for folder in (tmp_path, None):
        with pytest.raises(FloatingPointError, match=r"^step 0: the metric 'gap' is nan$"):
            learn(folder, evaluate=lambda state: {"gap": math.nan}, evaluate_every=3)


@pytest.mark.slow
def test_a_gradient_and_a_parameter_that_are_not_finite_are_named():
    def root(params, batch, key):  # finite, and its derivative is not
        value, metrics = squared(params, batch, key)
        return value + jnp.sqrt(0 * params["out"]["bias"][0]), metrics

    training = Training(optimizer())
    step = make_step(stateless(root), training)
    start = init(training, parameters(), jax.random.key(0))
    options = {"say": None, "log_every": 1}
    with pytest.raises(FloatingPointError, match=r"^step 0: gradient/out/bias is not finite"):
        train(step, start, batch, 5, **options)
    spoilt = parameters()
    spoilt["norm"]["scale"] = spoilt["norm"]["scale"].at[1].set(jnp.nan)
    start = init(training, spoilt, jax.random.key(0))
    with pytest.raises(FloatingPointError, match=r"^step 0: params/norm/scale is not finite"):
        train(step, start, batch, 5, **options)


@pytest.mark.slow
def test_the_input_is_seen_to_be_the_bottleneck_when_it_is():
    def slow(step):
        time.sleep(0.1)
        return batch(step)

    training = Training(optimizer())
    step = make_step(stateless(squared), training)
    start = init(training, parameters(), jax.random.key(0))
    said = []
    found = train(step, start, slow, 8, say=said.append, log_every=1, say_every=0.0)
    assert found.input_share > 0.5 > found.step_share
    assert all(word in said[-1] for word in ("loss", "steps/s", "left", "waiting for input"))
    assert not start.params["norm"]["scale"].is_deleted()


def test_a_damaged_row_is_named_and_a_torn_one_is_not_missed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.0}\n{"ste')
    assert JsonLines(path, 1).rows == [{"step": 0, "loss": 1.5}]
    assert path.read_bytes() == b'{"step": 0, "loss": 1.5}\n'
    path.write_bytes(b'{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(StoreError, match=r"metrics.jsonl is damaged in line 2"):
        JsonLines(path, 3)
    path.unlink()
    assert JsonLines(path, 0).rows == []
    path.unlink()
    with pytest.raises(StoreError, match=r"metrics.jsonl is missing: put it back"):
        JsonLines(path, 3)


# beyond one device

SHARDED = """
    import jax, numpy as np, sys
    sys.path[:0] = sys.argv[1].split(":")
    directory, processes, rank, port = sys.argv[2], *map(int, sys.argv[3:])
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    from functools import cache, partial
    from jax.experimental import multihost_utils
    from test_training import *
    from experiments.training import sharding

    training = Training(optimizer(rule="sgd", weight_decay=0.1, clip=1.0), micro_batches=3, ema=0.9)
    start = init(training, parameters(), jax.random.key(1), {"mean": jnp.zeros(INPUTS)})
    mesh = sharding.mesh()
    assert mesh.size == 4 * processes
    split = partial(sharding.fully_sharded, least=1)

    def tell(kernel):
        # the collectives write lines of their own, and parts of lines, to standard output
        with open(f"{directory}/specs.{rank}", "a") as file:
            print(tuple(kernel.sharding.spec), file=file)

    def doubled(step):
        return {k: np.concatenate([x, x[::-1] + 1]) for k, x in batch(step).items()}

    @cache
    def laid(rule):
        shardings = rule(mesh, start)
        return shardings, make_step(bfloat_noisy, training, shardings)

    def run(rule, directory=None, steps=4):
        shardings, step = laid(rule)
        return train(step, sharding.place(start, shardings), doubled, steps, say=None, log_every=1,
                     place=partial(sharding.split, mesh), directory=directory,
                     config=Whole(training))

    def gathered(state):
        state = state._replace(key=jax.random.key_data(state.key))
        return multihost_utils.process_allgather(state, tiled=True)

    single = train(make_step(bfloat_noisy, training), start, doubled, 4, say=None, log_every=1)
    for rule in (sharding.replicated, split) if processes == 1 else (split,):
        found = run(rule)
        # a mean over 24 in another order is within 24 eps; SGD adds 4 such, of gradients clipped to
        # a norm of 1, with momentum at most 4 times over
        chex.assert_trees_all_close(gathered(found.state), plain(single.state), atol=384 * EPS)
        for a, b in zip(found.rows, single.rows, strict=True):
            chex.assert_trees_all_close(a, b, rtol=384 * EPS)
        for tree in (found.state.params, found.state.opt_state[2].trace):
            tell(tree["hidden"]["kernel"])
    with pytest.raises(ValueError, match=f"x: 6 examples cannot be shared evenly by {mesh.size}"):
        sharding.split(mesh, {"x": np.ones((6, 2))})
    run(split, directory, 2)
    again = run(split, directory)
    chex.assert_trees_all_equal(gathered(again.state), gathered(found.state))
    tell(again.state.params["hidden"]["kernel"])
"""


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
def test_many_devices_learn_what_one_does(tmp_path, processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SHARDED), FOLDERS, tmp_path]
            + [str(number) for number in (processes, rank, port)],
            env=many_devices.environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    whole, part = "()", "(None, 'data')"
    for rank, (process, (_, err)) in enumerate(zip(started, ended, strict=True)):
        assert process.returncode == 0, err[-3000:]
        lines = (tmp_path / f"specs.{rank}").read_text().splitlines()
        assert lines == [whole] * 2 * (processes == 1) + [part] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-small", "llama-tiny"])
def test_the_model_s_operations_are_those_xla_counts(name):
    """The count leaves out what is not a product of matrices, and all of softmax and norms: some
    percent at this width."""
    sizes = {"vocab": 500, "context": 64, "width": 256, "layers": 2, "hidden": 1024}
    config = presets.config(name, **sizes, heads=4, head_dim=64)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jax.eval_shape(presets.build(config).init, jax.random.key(0), tokens)["params"]
    counted = bench._counted(config, 2, "float32", params)
    assert counted / (2 * 64 * bench.per_token(config, params, 64)) == pytest.approx(1, abs=0.06)
