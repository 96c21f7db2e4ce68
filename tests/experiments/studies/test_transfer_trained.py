"""`transfer_phase --train`: descent compared with the gradient flow that it discretises, networks
of width one with wide ones, and the study's findings on them.
"""

import functools
from functools import partial, reduce
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from experiments.lab import registry, store
from experiments.lab.config import varied
from experiments.lab.findings import corrected
from experiments.studies.transfer_phase import compared, findings, trained
from experiments.studies.transfer_phase.config import PRESETS
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import networks

TINY = PRESETS["tiny_networks"]
D, N = 12, 8


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def _sample():
    return problems.draw(jax.random.key(9), N, D, 0.8, 0.5)


def _gap(a, b):
    return float(jnp.linalg.norm(a - b))


# --- descent ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_descent_stops_at_the_first_loss_that_is_small_enough():
    s, start, until = _sample(), networks.narrow_weights(_sample().beta_s, 2), 1e-2
    stopped = networks.fine_tune(start, s.x, s.y, 0.01, 10_000, until)
    steps = int(stopped.steps)
    assert 0 < steps < 10_000
    for fewer, small in ((0, True), (1, False)):
        ended = networks.fine_tune(start, s.x, s.y, 0.01, steps - fewer)
        assert int(ended.steps) == steps - fewer
        assert (float(ended.loss) <= until) is small
        assert jax.tree.all(jax.tree.map(jnp.array_equal, ended.weights, stopped.weights)) is small


@pytest.mark.slow
def test_points_of_one_loop_stop_each_by_itself():
    s, start = _sample(), networks.narrow_weights(_sample().beta_s, 2)
    untils = jnp.array([1e-1, 1e-2, 1e-3])
    train = partial(networks.fine_tune, start, s.x, s.y, 0.01, 10_000)
    together = jax.vmap(train)(untils)
    for i, until in enumerate(untils):
        alone = train(until)
        assert int(together.steps[i]) == int(alone.steps)
        for a, b in zip(together.weights, alone.weights, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=0, atol=1e-12)  # other orders of summation


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_wide_balanced_networks_of_rank_one_take_the_steps_of_a_narrow_one(depth):
    """Equality is exact at any rate, until rounding errors grow."""
    s = _sample()
    narrow = networks.narrow_weights(2 * s.beta_s, depth)
    np.testing.assert_allclose(networks.predictor(narrow), 2 * s.beta_s, atol=1e-15)
    sizes = [float(jnp.linalg.norm(w)) for w in narrow]
    np.testing.assert_allclose(sizes, 2 ** (1 / depth), rtol=1e-15)  # balanced
    keys = jax.random.split(jax.random.key(1), depth - 1)
    v = [jnp.linalg.qr(jax.random.normal(key, (D, 1)))[0] for key in keys]
    between = [a @ w @ b.T for a, w, b in zip(v[:-1], narrow[1:-1], v[1:], strict=True)]
    wide = (narrow[0] @ v[0].T, *between, v[-1] @ narrow[-1])
    for train in (networks.fine_tune, networks.linear_transfer):
        ends = [networks.predictor(train(w, s.x, s.y, 0.02, 500).weights) for w in (narrow, wide)]
        np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_descent_leaves_its_flow_by_terms_of_first_order_in_the_rate(depth):
    """Half the rate gives half the gap; extrapolated to rate 0, the remainder is of second order,
    plus the error of the Runge-Kutta scheme, STEP^5 / 120 per step.
    """
    s, time = _sample(), 3.0
    narrow = networks.narrow_weights(s.beta_s, depth)
    flow = dl.fine_tuning_flow(s.x, s.y, s.beta_s, [time], depth)[0]
    betas = [
        networks.predictor(networks.fine_tune(narrow, s.x, s.y, rate, round(time / rate)).weights)
        for rate in (0.004, 0.002)
    ]
    gaps = [_gap(beta, flow) for beta in betas]
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.05)
    assert 1e-4 < gaps[0] < 0.004 * 10
    assert _gap(2 * betas[1] - betas[0], flow) < gaps[0] ** 2 * 10 + 1e-5


@pytest.mark.slow
def test_descent_of_the_last_layer_leaves_its_flow_by_terms_of_first_order_in_the_rate():
    """For any weights: what is trained is linear in the features that the other layers compute."""
    s, time = _sample(), 3.0
    weights = networks.gaussian_weights(jax.random.key(3), D, 3, 0.3)
    flow = trained._linear_flow(weights, s.x, s.y, jnp.array([time]))
    gaps = []
    for rate in (0.004, 0.002):
        ended = networks.linear_transfer(weights, s.x, s.y, rate, round(time / rate))
        assert jax.tree.all(jax.tree.map(jnp.array_equal, ended.weights[:2], weights[:2]))
        gaps.append(_gap(networks.predictor(ended.weights), flow))
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.02)
    assert gaps[0] < 0.004


@pytest.mark.slow
def test_small_weights_join_the_rank_one_flow_that_start_of_growth_begins():
    """Two layers from scratch at times before, at and after they leave 0: the gap is O(alpha) +
    O(rate), with a tenth of alpha and of the rate a tenth."""
    s, gaps = _sample(), []
    for alpha, rate in ((1e-2, 2e-2), (1e-3, 2e-3)):
        weights = networks.gaussian_weights(jax.random.key(3), D, 2, alpha)
        start = networks.start_of_growth(weights, s.x, s.y)
        assert 0.1 * alpha**2 < _gap(start, 0) < 100 * alpha**2
        times = jnp.array([2.0, 4.0, 8.0])
        flow = dl.fine_tuning_flow(s.x, s.y, start, times, 2)
        ended = [networks.fine_tune(weights, s.x, s.y, rate, round(float(t) / rate)) for t in times]
        pairs = zip(ended, flow, strict=True)
        gaps.append([_gap(networks.predictor(e.weights), beta) for e, beta in pairs])
    first, second = np.array(gaps)
    assert (second < 0.02).all(), gaps
    assert (second < first / 5).all(), gaps


@pytest.mark.slow
def test_more_than_two_small_layers_have_no_start_of_growth():
    s, weights = _sample(), networks.gaussian_weights(jax.random.key(3), D, 3, 0.1)
    with pytest.raises(ValueError, match="expected one or two layers; got 3"):
        networks.start_of_growth(weights, s.x, s.y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: networks.gaussian_weights(jax.random.key(0), 3, 0, 0.1), "depth=0"),
        (lambda: networks.gaussian_weights(jax.random.key(0), 3, 2, 0.0), "alpha must be a pos"),
        (lambda: networks.narrow_weights(jnp.ones(3), 0), "depth must be at least 1; got 0"),
        (lambda: networks.least_invariant((jnp.ones(3),)), "need at least two layers; got 1"),
    ],
)
def test_networks_that_do_not_exist_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("n", [D, 3, 20])
def test_condensed_data_have_the_losses_of_the_first_samples(n):
    x, noise = jax.random.normal(jax.random.key(0), (20, D)), jnp.arange(20.0) / 10
    rows, kept = trained._condensed(x, noise, jnp.array(n))
    assert rows.shape == (D + 1, D)  # whatever n is
    for seed in range(3):
        beta, beta_t = jax.random.normal(jax.random.key(seed), (2, D))
        loss, condensed = (
            networks._training_loss((beta,), a, a @ beta_t + 0.3 * e)
            for a, e in ((x[:n], noise[:n]), (rows, kept))
        )
        np.testing.assert_allclose(condensed, loss, rtol=1e-12)


# --- findings -----------------------------------------------------------------------------------


def _made(off, flow_off, spread=0.2):
    """Networks of 8 draws, `off` from their estimators and `flow_off` from their flows, which are
    apart by `spread` from draw to draw."""
    rng, cells = np.random.default_rng(0), (2, 3, 1)
    theory = np.array([[0.5, 0.1, -0.5], [-0.2, -0.3, -0.4]])[..., None]
    estimator = theory + spread * rng.standard_normal((8, *cells))
    network = estimator + off * (1 + 0.1 * rng.standard_normal(estimator.shape))
    gains = np.stack([estimator, network - flow_off, network - flow_off / 2, network], 1)
    return xr.Dataset(
        {
            "risk": (
                ("network", "kind", "way", "cell_load", "cell_theta", "sigma"),
                np.stack([gains, 0 * gains], 2),
            ),
            "cell_theory": (("mode", "cell_load", "cell_theta", "sigma"), theory[None]),
            "cell_n": ("cell_load", [20, 60]),
            "region": [],
        },
        {
            "kind": list(compared.KINDS),
            "way": ["scratch", "linear"],
            "mode": ["linear"],
            "sigma": [0.2],
            "depth": [2.0],
            "cell_load": [0.5, 1.5],
            "cell_theta": np.linspace(0, pi / 2, 3),
        },
        {"trained_d": 40, "trained_layers": 2},
    )


@pytest.mark.parametrize(
    ("off", "flow_off", "verdicts"),
    [
        (0.01, 0.001, ("holds", "holds")),
        (0.01, 0.03, ("holds", "fails")),  # the flow is no better than the end of training
        (1.0, 0.001, ("fails", "holds")),  # stopped long before the end
        (0.01, np.nan, ("holds", "not tested")),
    ],
)
def test_claims_on_networks_can_fail(off, flow_off, verdicts):
    found = corrected(findings.findings(_made(off, flow_off)))
    by_claim = {
        part: finding.verdict
        for finding in found
        for part in ("stopping changes", "gradient flow")
        if part in finding.claim
    }
    assert tuple(by_claim.values()) == verdicts, found
    told = findings.summary(_made(off, flow_off))
    assert f"estimator and network {off:.2g} ±" in told
    assert not np.isfinite(flow_off) or "The largest is" in told


@pytest.mark.parametrize(
    ("invariant", "apart", "verdicts"),
    [(-3.0, 0.01, ("holds", "holds")), (3.0, 1.0, ("fails", "fails"))],
)
def test_claims_on_initial_weights_can_fail(invariant, apart, verdicts):
    dataset, rng = _made(0.01, 0.001), np.random.default_rng(1)
    spread = 1 + 0.1 * rng.standard_normal((8, 2))
    dataset["invariant"] = (("network", "start"), spread * [invariant, 40.0])
    dataset = dataset.assign_coords(start=list(trained.STARTS))
    network = dataset.risk.sel(kind="network", drop=True)
    dataset["orthogonal_risk"] = network + apart * (dataset.way == "scratch")
    found = corrected(list(findings._of_starts(dataset)))
    assert tuple(finding.verdict for finding in found) == verdicts, found


@pytest.mark.slow
def test_networks_that_end_elsewhere_are_found_to_hurt_where_they_should_help():
    found = [f for f in findings.findings(_made(-1.0, 0.0)) if "helps" in f.claim]
    assert {f.claim.rsplit("(")[-1]: f.verdict for f in found} == {
        "same sign)": "fails",
        "agreement)": "fails",
    }


# --- the study ----------------------------------------------------------------------------------


def _trained(**changes):
    return trained.trained(varied(TINY, **changes), store.direct)


@pytest.mark.soak
def test_the_study_keeps_the_protocol_with_networks(tmp_path):
    """All draws share one program; resumed after the first draw it gives the same, bit for bit; the
    figures draw and say what they show."""
    jax.clear_caches()  # other tests train with the same shapes
    study = registry.load("transfer_phase")
    before = trained._train._cache_size()
    dataset = study.run(TINY)
    assert trained._train._cache_size() == before + 1

    def stopping(stage):
        def stopped(stage_name, compute, **options):
            if stage_name == "networks 2/3":
                raise KeyboardInterrupt
            return stage(stage_name, compute, **options)

        return stopped

    with store.Run.open(tmp_path, study.name, TINY) as run, pytest.raises(KeyboardInterrupt):
        study.run(TINY, stopping(run.stage))
    with store.Run.open(tmp_path, study.name, TINY, resume=True) as run:
        run.finish(study.run(TINY, run.stage))
        stored = store.load_result(tmp_path, run.record)
    assert stored.equals(dataset)
    assert study.summary(stored) == study.summary(dataset)
    figures = study.plot(stored)
    for name in ("linear_transfer", "fine_tuning"):
        assert {f"{name}_trained", f"{name}_trained_noiseless"} < figures.keys()
    assert len({finding.claim for finding in study.findings(stored)}) == 27
    # normal weights break eq. (22), orthogonal ones of the same norm alpha sqrt(d) satisfy it
    assert (stored.invariant.sel(start="normal") < 0).all()
    np.testing.assert_allclose(stored.invariant.sel(start="orthogonal"), TINY.networks.d)


def _plainly(weights, x, y, rate, steps, until, frozen=False):
    """Gradient descent of both layers in NumPy, from its definition."""
    first, last = (np.array(w) for w in weights)
    for _ in range(steps):
        missing = x @ (first @ last) - y
        if missing @ missing / (2 * len(x)) <= until:
            break
        gradient = x.T @ missing / len(x)
        pulled = first.T @ gradient
        if not frozen:
            first = first - rate * np.outer(gradient, last)
        last = last - rate * pulled
    return first, last


def _errors(config):
    """Computes the differences of the risks of one cell from those of the plain loop, from scratch
    and after transfer.
    """
    dataset = trained.trained(config, store.direct)
    nets, n = config.networks, config.trained_counts()
    d, budget = nets.d, (nets.rate, nets.steps, nets.loss)
    key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 1), nets.draws)[0]
    key_x, key_noise, key_source, key_target = jax.random.split(key, 4)
    x = np.array(jax.random.normal(key_x, (n[-1], d)))[: n[2]]
    noise = np.array(jax.random.normal(key_noise, (n[-1],)))[: n[2]]
    angle = float(dataset.cell_theta[1])
    beta_s, beta_t = np.eye(d)[0], np.cos(angle) * np.eye(d)[0] + np.sin(angle) * np.eye(d)[1]
    small, source = (
        networks.gaussian_weights(k, d, 2, nets.alpha) for k in (key_target, key_source)
    )
    # |beta - beta_s|^2 / 2, as rows sqrt(d) e_i have it
    pretrained = _plainly(source, np.sqrt(d) * np.eye(d), np.sqrt(d) * beta_s, *budget)
    data = x, x @ beta_t + config.sigmas[-1] * noise
    ends = {
        "scratch": _plainly(small, *data, *budget),
        "linear": _plainly(pretrained, *data, *budget, frozen=True),
        "fine_tuning": _plainly(pretrained, *data, *budget),
    }
    found = dataset.risk.isel(network=0, cell_load=2, cell_theta=1, sigma=-1).sel(kind="network")
    return {
        way: abs(float(found.sel(way=way)) - float(np.sum((first @ last - beta_t) ** 2)))
        for way, (first, last) in ends.items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("alpha", [1e-5, 1e-2])
def test_networks_are_those_of_the_plain_loop(alpha):
    """In the directions in which small weights move, and in all of them where they are large."""
    config = varied(TINY, networks={"draws": 2, "alpha": alpha, "orthogonal": False})
    few = 4 * alpha**2 * config.networks.d <= trained.NEGLIGIBLE
    assert few is (alpha < 1e-3)
    assert max(_errors(config).values()) < (1e-6 if few else 1e-12)


@pytest.mark.soak
def test_networks_in_other_directions_are_not(monkeypatch):
    """The comparison detects a subspace in which weights do not move."""

    def elsewhere(weights, problem):
        spanning = jnp.stack([weights[1], jnp.ones_like(weights[1])], -1)
        return jnp.linalg.qr(spanning)[0].T

    monkeypatch.setattr(trained.directions, "moving", elsewhere)
    # Another number of steps, so that nothing compiled before is used.
    config = varied(TINY, networks={"draws": 2, "alpha": 1e-5, "orthogonal": False, "steps": 1001})
    assert _errors(config)["scratch"] > 1e-5


@functools.cache
def _sizes(**changes):
    """Computes the sizes of the parts, averaged over all points, at a fixed time."""
    nets = {"rate": 0.01, "steps": 2000, "loss": 0.0, "alpha": 1e-4, **changes}
    parts = compared.parts(compared.gains(_trained(networks=nets)))
    return {name: float(abs(part).mean()) for name, part in parts.items()}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("learning rate", {"rate": 0.005, "steps": 4000}),
        pytest.param("initial size α", {"alpha": 5e-5}, marks=pytest.mark.soak),
    ],
)
def test_half_of_what_a_part_is_due_to_halves_it(part, change):
    whole, halved = _sizes(), _sizes(**change)
    assert whole[part] / halved[part] == pytest.approx(2, abs=0.1)
    # smaller weights leave 0 later
    assert halved["stopping time"] == pytest.approx(whole["stopping time"], rel=0.05)


@pytest.mark.soak
def test_estimators_and_flows_are_those_of_the_data_themselves():
    """Computes the kinds of one network from its unreduced rows."""
    config = varied(TINY, networks={"draws": 2})
    dataset = _trained(networks={"draws": 2})
    key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), 1), 2)[0]
    key_x, key_noise, key_source, _ = jax.random.split(key, 4)
    ns, d = config.trained_counts(), config.networks.d
    x = jax.random.normal(key_x, (ns[-1], d))
    noise = jax.random.normal(key_noise, (ns[-1],))
    source = networks.gaussian_weights(key_source, d, 2, config.networks.alpha)
    beta_s, _ = problems.tasks(d, 0.0)
    nets = config.networks
    pretrained = networks.pretrain(source, beta_s, nets.rate, nets.steps, nets.loss)
    for i, n in enumerate(ns):
        beta_t = problems.tasks(d, pi / 4)[1]
        y = x[:n] @ beta_t + 0.2 * noise[:n]
        at = dataset.isel(network=0, cell_load=i, cell_theta=1, sigma=1)
        found = at.risk.sel(kind=["estimator", "flow"], way=list(at.way.values))
        steps = at.steps.values
        beta_0 = networks.predictor(pretrained.weights)
        features = reduce(jnp.matmul, networks.narrow_weights(beta_0, 2)[:-1])
        assert features.shape == (d, 1)
        estimated = [
            dl.scratch_fit(x[:n], y),
            dl.linear_transfer_fit(x[:n], y, beta_s),
            dl.fine_tuning_limit(x[:n], y, beta_s, 2),
        ]
        flow = dl.fine_tuning_flow(x[:n], y, beta_0, [float(steps[2] * nets.rate)], 2)[0]
        expected = [float(problems.risk(beta, beta_t)) for beta in estimated]
        np.testing.assert_allclose(found.sel(kind="estimator"), expected, rtol=1e-8)
        flowed = float(found.sel(kind="flow", way="fine_tuning"))
        assert flowed == pytest.approx(float(problems.risk(flow, beta_t)), abs=1e-6)
