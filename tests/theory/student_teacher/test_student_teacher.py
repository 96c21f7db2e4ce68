"""ReLU student and teacher: closed forms against quadrature, simulation and finite differences."""

from math import pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from theory import problems
from theory import student_teacher as st
from theory.student_teacher import arc_cosine, projection

Z_MAX = 4.0  # fixed seeds; two-sided 6e-5 under the null
EPS = np.finfo(np.float64).eps


pytestmark = pytest.mark.usefixtures("float64")


def pair(phi, norm_w=1.0, norm_v=1.0):
    """Two vectors in a rotated plane of R^5 at angle phi."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    w, v = norm_w * q[0], norm_v * (np.cos(phi) * q[0] + np.sin(phi) * q[1])
    return jnp.asarray(w)[None], jnp.asarray(v)[None]


def polar(phi, power):
    """E[relu^power relu^power] by quadrature: a radial moment times an angular integral."""
    angular = integrate.quad(
        lambda t: (np.cos(t) * np.cos(t - phi)) ** power, phi - pi / 2, pi / 2, epsabs=1e-14
    )[0]
    return angular / (2 * pi) * {0: 1.0, 1: 2.0}[power]


@pytest.mark.parametrize("phi", [0.0, 1e-6, 0.3, pi / 2, 2.5, pi - 1e-3, pi])
@pytest.mark.parametrize("norms", [(1.0, 1.0), (2.5, 0.3)])
def test_overlaps_against_quadrature(phi, norms):
    """Error model: cosine within 8 eps, hence the unit overlap within 4 eps of 1/2; the angle, and
    with it the co-activation, within sqrt(2 * 8 eps)."""
    w, v = pair(phi, *norms)
    scale = norms[0] * norms[1]
    assert abs(st.gram(w, v)[0, 0] - scale * polar(phi, 1)) < 10 * EPS * scale
    assert abs(st.coactivation(w, v)[0, 0] - polar(phi, 0)) < sqrt(16 * EPS)
    assert problems.angle(w, v)[0] == pytest.approx(phi, abs=8 * EPS)
    assert st.relu_mean(w)[0] == pytest.approx(norms[0] / sqrt(2 * pi), rel=8 * EPS)


@pytest.mark.parametrize("phi", [0.0, 1e-9, 1e-5, 0.7, pi / 2, 3.0, pi - 1e-6, pi])
def test_gradient_is_the_closed_form_to_rounding(phi):
    """Error model: 20 eps |v|, at coinciding and opposite neurons too (the exact angle is known
    here; the code sees it through a rounded cosine)."""
    w, v = pair(phi, 2.0, 3.0)
    found = jax.grad(lambda w: st.gram(w, v)[0, 0])(w)
    exact = (3 * np.sin(phi) * w / 2 + (pi - phi) * v) / (2 * pi)
    np.testing.assert_allclose(found, exact, atol=20 * EPS * 3)


@pytest.mark.slow
def test_gradient_against_finite_differences_and_on_the_diagonal():
    w, v = jax.random.normal(jax.random.key(0), (2, 3, 4))
    check_grads(st.gram, (w, v), order=1)
    check_grads(lambda w: st.gram(w, w).sum(), (w,), order=1)
    # sum_ij E relu_i relu_j over equal neurons: 9 |w|^2 / 2 for three copies; gradient 3 w each
    same = jnp.stack([w[0]] * 3)
    copies = jax.grad(lambda w: st.gram(w, w).sum())(same)
    np.testing.assert_allclose(copies, 3 * same, rtol=10 * EPS)


@pytest.mark.slow
def test_zero_neurons():
    """The value is 0, and the derivative is the central one, w.v / 4 in direction w."""
    v = jax.random.normal(jax.random.key(1), (2, 4))
    zero, direction, h = jnp.zeros((1, 4)), jnp.ones((1, 4)), 1e-3
    assert not st.gram(zero, v).any()
    assert not st.coactivation(zero, v).any()
    slope = (st.gram(h * direction, v) - st.gram(-h * direction, v)) / (2 * h)
    found = jax.jvp(lambda w: st.gram(w, v), (zero,), (direction,))[1]
    np.testing.assert_allclose(found, slope, atol=1e-12)  # K is linear along each half-line
    assert np.isfinite(jax.grad(lambda w: st.gram(w, w).sum())(zero)).all()


@pytest.mark.slow
def test_gram_transforms_and_keeps_float32():
    w = jax.random.normal(jax.random.key(2), (3, 4, 5))
    batched = jax.jit(jax.vmap(st.gram))(w, w)
    np.testing.assert_allclose(batched[1], st.gram(w[1], w[1]), rtol=100 * EPS)
    single = st.gram(w[0].astype(jnp.float32), w[0].astype(jnp.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, batched[0], rtol=0, atol=10 * 6e-8 * float(single.max()))


# --- networks -----------------------------------------------------------------------------------


def nets(d=6, m=7, k=5):
    f = st.Network(jnp.linspace(-1, 2, m), jax.random.normal(jax.random.key(3), (m, d)))
    return f, st.teacher(jax.random.key(4), k, d)


@pytest.mark.slow
def test_risk_and_variance_against_simulation():
    """Null: sample means over 1e5 inputs have the closed forms as expectation."""
    f, g = nets()
    x = jax.random.normal(jax.random.key(5), (100_000, 6))
    values, difference = st.predict(f, x), st.predict(f, x) - st.predict(g, x)
    for sample, exact in (
        (difference**2, st.risk(f, g)),
        ((values - values.mean()) ** 2, st.variance(f)),
    ):
        z = (sample.mean() - exact) / sample.std() * sqrt(x.shape[0])
        assert abs(z) < Z_MAX


@pytest.mark.slow
def test_ablation_is_eq_19_and_nested():
    _, g = nets(k=10)
    key, x = jax.random.key(6), jax.random.normal(jax.random.key(7), (9, 6))
    few, many = st.ablate(key, g, 0.7), st.ablate(key, g, 0.2)
    alive = [set(np.flatnonzero(np.asarray(f.c)).tolist()) for f in (few, many)]
    assert [len(a) for a in alive] == [3, 8]
    assert alive[0] < alive[1]
    w = g.w[jnp.array(sorted(alive[0]))]
    np.testing.assert_allclose(st.predict(few, x), jax.nn.relu(x @ w.T).mean(1), rtol=1e-14)
    np.testing.assert_allclose(st.kernel(few.w, x), st.kernel(w, x), rtol=1e-14)
    np.testing.assert_allclose(st.project(few.w, g).outside, st.project(w, g).outside, rtol=1e-10)
    traced = jax.jit(st.ablate)(key, g, 0.7)
    np.testing.assert_allclose(traced.c, few.c, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrain", "scratch"])
def test_descent_stops_resumes_and_stays_on_the_sphere(kind):
    source = st.teacher(jax.random.key(8), 4, 5)
    start = st.student(jax.random.key(9), 12, 5)
    x = jax.random.normal(jax.random.key(10), (15, 5))
    data = (source,) if kind == "pretrain" else (x, st.predict(source, x))
    train = getattr(st, kind)
    whole = train(start, *data, 1.0, 200, 0.0)
    half = train(start, *data, 1.0, 100, 0.0)
    resumed = train(half, *data, 1.0, 100, 0.0)
    assert (int(half.steps), int(resumed.steps)) == (100, 200)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(jnp.linalg.norm(whole.network.w, axis=1), 1, rtol=1e-14)
    early = train(start, *data, 1.0, 200, 1e-3)
    before = train(start, *data, 1.0, int(early.steps) - 1, 1e-3)
    assert float(early.loss) <= 1e-3 < float(before.loss)
    if kind == "pretrain":
        # rounding: eps |f|^2
        assert float(whole.loss) == pytest.approx(
            float(st.risk(whole.network, source)) / 2, abs=4 * EPS
        )
    else:
        residual = st.predict(source, x) - st.predict(whole.network, x)
        assert float(whole.loss) == pytest.approx(float(np.mean(residual**2)) / 2, rel=1e-10)


@pytest.mark.slow
def test_rate_one_is_already_gradient_flow():
    """Descent at rates 1 and 1/4 to the same time: a first-order method, so a quarter of the step
    leaves a quarter of the error, and both are small."""
    source = st.teacher(jax.random.key(8), 4, 5)
    start = st.student(jax.random.key(9), 12, 5)
    runs = [st.pretrain(start, source, 1 / k, 100 * k, 0.0).network for k in (1, 4, 16)]
    gaps = [float(st.risk(run, runs[2])) ** 0.5 for run in runs[:2]]
    norm = float(st.inner(source, source)) ** 0.5
    assert gaps[0] < 0.01 * norm
    # (1 - 1/16) / (1/4 - 1/16) = 5 for a first-order error
    assert gaps[0] / gaps[1] == pytest.approx(5, rel=0.2)


# --- projection and transfer --------------------------------------------------------------------


@pytest.mark.slow
def test_projection_is_least_squares_of_the_population():
    """Against an independent least squares of many samples: exact up to O(m/n) of |P_perp f|^2."""
    f, g = nets(m=4)
    n = 100_000
    x = jax.random.normal(jax.random.key(11), (n, 6))
    phi, y = np.asarray(st.features(f.w, x)), np.asarray(st.predict(g, x))
    residual = (y - phi @ np.linalg.lstsq(phi, y)[0]) ** 2
    found = st.project(f.w, g)
    assert int(found.rank) == 4
    z = (residual.mean() - float(found.outside)) / residual.std() * sqrt(n)
    assert abs(z) < Z_MAX
    assert float(found.inside + found.outside) == pytest.approx(
        float(st.inner(g, g)), rel=1e-14, abs=0
    )


def test_a_teacher_lies_in_its_own_span():
    _, g = nets()
    found = st.project(g.w, g)
    assert abs(float(found.outside)) < 10 * EPS
    assert float(found.inside) == pytest.approx(float(st.inner(g, g)), rel=10 * EPS, abs=0)


@pytest.mark.slow
def test_projection_edge_cases():
    f, g = nets()
    once, twice = st.project(f.w, g), st.project(jnp.concatenate([f.w, 2 * f.w]), g)
    assert int(twice.rank) == int(once.rank) == 7  # repeated neurons add nothing
    np.testing.assert_allclose(twice.outside, once.outside, rtol=1e-8)
    assert float(st.project(jnp.zeros((2, 6)), g).inside) == 0
    values, psi = st.mercer(f.w)
    inner = psi.T @ st.gram(f.w, f.w) @ psi
    np.testing.assert_allclose(inner, np.eye(7), atol=1e-12)
    np.testing.assert_allclose(projection.operator(f.w, psi), psi * values, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 40])
def test_linear_transfer_is_the_least_norm_fit(n):
    f, g = nets(m=12)
    x = jax.random.normal(jax.random.key(12), (n, 6))
    y = st.predict(g, x)
    phi = np.asarray(st.features(f.w, x)) / 12
    fit = st.linear_transfer(f.w, x, y)
    # normal equations lose the condition number (below 1e3 here) squared
    np.testing.assert_allclose(fit.c, np.linalg.pinv(phi) @ np.asarray(y), rtol=1e-7, atol=1e-8)
    assert float(st.risk(fit, g)) >= float(st.project(f.w, g).outside)


@pytest.mark.slow
def test_linear_transfer_recovers_a_target_it_can_express():
    _, g = nets()
    x = jax.random.normal(jax.random.key(13), (30, 6))
    fit = st.linear_transfer(jnp.concatenate([g.w, -g.w]), x, st.predict(g, x))
    assert abs(float(st.risk(fit, g))) < 1e-12


@pytest.mark.slow
def test_power_law_fit_covers_the_truth():
    """Null: 95 % intervals cover the exponent in 95 % of 400 repetitions (binomial, |z| < 4)."""
    rng, n = np.random.default_rng(0), np.array([20, 40, 80, 160, 320])
    covered = []
    for _ in range(400):
        nu = rng.normal(1.2, 0.1, size=(5, 1))
        law = st.fit_power_law(n, 3 * n**-nu * np.exp(0.1 * rng.normal(size=(5, 5))))
        covered.append(law.exponent.low < 1.2 < law.exponent.high)
    assert abs(np.mean(covered) - 0.95) < Z_MAX * sqrt(0.95 * 0.05 / 400)


def test_exact_power_law_boundary_and_crossing():
    n = np.array([10.0, 30.0, 100.0, 1000.0])
    law = st.fit_power_law(n, np.stack([2 * n**-1.5, 3 * n**-1.5]))
    np.testing.assert_allclose(law.exponents, 1.5, rtol=1e-12)
    np.testing.assert_allclose(law.curvature.mean, 0, atol=1e-12)
    np.testing.assert_allclose(law(n), sqrt(6) * n**-1.5, rtol=1e-12)
    edge = st.boundary(law, np.array([[2e-3, 2e-1], [3e-3, 3e-1]]))
    np.testing.assert_allclose(edge, [[100, 100 ** (1 / 3)]] * 2, rtol=1e-9)
    assert st.crossing(n, np.array([-1, 1, 0.5, -0.5])) == pytest.approx(sqrt(100 * 1000))
    assert np.isnan(st.crossing(n, -n))
    values = np.random.default_rng(1).normal(size=6)
    expected = values.mean() + stats.sem(values) * np.array(stats.t(5).interval(0.9))
    np.testing.assert_allclose(st.interval(values, 0.9)[1:], expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, g: st.teacher(jax.random.key(0), 0, 3), "need m >= 1"),
        (lambda f, g: st.ablate(jax.random.key(0), g, 0.3), "mu must be a fraction"),
        (lambda f, g: st.ablate(jax.random.key(0), g, 1.0), "mu must be a fraction"),
        (lambda f, g: st.pretrain(f, g, 0.0, 5, 0.0), "rate must be"),
        (lambda f, g: st.pretrain(f, g, 1.0, -1, 0.0), "steps must be"),
        (lambda f, g: st.pretrain(f, g, 1.0, 5, np.nan), "tolerance must be"),
        (lambda f, g: st.project(f.w, g, 1.0), "cutoff must be"),
        (lambda f, g: st.linear_transfer(f.w, f.w, f.c, -1.0), "cutoff must be"),
        (lambda f, g: st.fit_power_law([1, 2], np.ones((2, 2))), "at least 3 different sizes"),
        (lambda f, g: st.fit_power_law([1, 2, 3], np.ones((1, 3))), "risks must have shape"),
        (lambda f, g: st.fit_power_law([1, 2, 3], np.zeros((2, 3))), "risks must be finite"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*nets())


def test_angles_need_no_third_axis():
    """The Gram route never builds an array of m k d numbers."""
    m, k, d = 30, 40, 50
    shapes = jax.make_jaxpr(jax.grad(lambda w, v: arc_cosine.gram(w, v).sum(), (0, 1)))(
        jnp.ones((m, d)), jnp.ones((k, d))
    )
    sizes = [v.aval.size for e in shapes.jaxpr.eqns for v in e.outvars]
    assert max(sizes) <= k * d
