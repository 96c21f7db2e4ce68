"""features-are-fate, Section 4 and Appendix C: ReLU features, their projections, their transfer.

Sizes are small (d = 10) so that every number comes from a network trained here, or from plain Monte
Carlo over inputs, which knows nothing of arc-cosine kernels.
"""

from collections.abc import Callable
from functools import cache, partial
from math import cos, degrees, hypot, log, log10, pi, sin, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim, Estimate, Simulate, generator
from theory.deep_linear.regressions import row
from theory.student_teacher import arc_cosine, networks, projection, transfer

D, M, TEACHER = 10, 60, 10


def _inputs(key: Array, quick: bool) -> Array:
    return jax.random.normal(key, (40_000 if quick else 400_000, D))


# --- Appendix C ---------------------------------------------------------------------------------

ANGLE = pi / 3
FEATURES = 5


def _overlap(length: float) -> Simulate:
    """E relu(w.x) relu(v.x) for |w| = length, |v| = 1 at an angle."""

    def simulate(key: Array, quick: bool) -> Estimate:
        x = generator(key).standard_normal((40_000 if quick else 400_000, 2))
        along, other = length * x[:, 0], x @ [cos(ANGLE), sin(ANGLE)]
        return Estimate.mean(np.maximum(along, 0) * np.maximum(other, 0))

    return simulate


def _overlap_exact(length: float) -> float:
    w, v = jnp.array([[length, 0.0]]), jnp.array([[cos(ANGLE), sin(ANGLE)]])
    return float(arc_cosine.gram(w, v)[0, 0])


@cache
def _space() -> tuple[Array, networks.Network]:
    """A few fixed neurons of any length, and a teacher partly outside their span."""
    w = jax.random.normal(jax.random.key(1), (FEATURES, D)) / sqrt(D)
    return w, networks.teacher(jax.random.key(2), TEACHER, D)


def _energy(inside: bool) -> Simulate:
    """E (P f)^2 or E (f - P f)^2, where P f is the least-squares fit to the same inputs."""

    def simulate(key: Array, quick: bool) -> Estimate:
        x = generator(key).standard_normal((40_000 if quick else 400_000, D))
        w, target = jax.tree.map(np.asarray, _space())
        phi, y = np.maximum(x @ w.T, 0), np.maximum(x @ target.w.T, 0) @ target.c / target.c.size
        image = phi @ np.linalg.solve(phi.T @ phi, phi.T @ y)
        return Estimate.mean((image if inside else y - image) ** 2)

    return simulate


def _top_mode() -> tuple[Array, Array]:
    """The largest Mercer eigenvalue of the neurons, and psi's coefficients."""
    values, psi = projection.mercer(_space()[0])
    return values[-1], psi[:, -1]


def _norm_of_mode(key: Array, quick: bool) -> Estimate:
    return Estimate.mean(
        (networks.features(_space()[0], _inputs(key, quick)) @ _top_mode()[1]) ** 2
    )


def _quotient(key: Array, quick: bool) -> Estimate:
    """<psi, T psi> = E k(x, x') psi(x) psi(x') over independent pairs."""
    w, _ = _space()
    left, right = (networks.features(w, _inputs(k, quick)) for k in jax.random.split(key))
    psi = _top_mode()[1]
    return Estimate.mean((left * right).mean(1) * (left @ psi) * (right @ psi))


ALPHAS = (1.0, -0.5, 0.3, 0.8)  # f = sum_j alpha_j k(., z_j)


def _points() -> Array:
    return jax.random.normal(jax.random.key(3), (len(ALPHAS), D))


def _native_norm(key: Array, quick: bool) -> Estimate:
    """alpha.k(z, z) alpha, kernel value by kernel value (148)."""
    del key, quick
    w, z = np.asarray(_space()[0]), np.asarray(_points())
    kernel = [[np.mean(np.maximum(w @ a, 0) * np.maximum(w @ b, 0)) for b in z] for a in z]
    return Estimate(float(np.array(ALPHAS) @ kernel @ np.array(ALPHAS)), tolerance=1e-9)


def _native_norm_of_modes() -> float:
    """sum_l c_l^2 / lambda_l, c_l = <psi_l, f> (151)."""
    w, alpha = _space()[0], jnp.array(ALPHAS)
    values, psi = projection.mercer(w)
    f = networks.features(w, _points()).T @ alpha / FEATURES  # of the neurons
    c = psi.T @ arc_cosine.gram(w, w) @ f
    return float(jnp.sum(c**2 / values))


# --- Section 4: pretraining ---------------------------------------------------------------------

MU, EARLY, LATE = 0.5, 500, 5000
LONG, POINTS = 2000, 20
MUS = (0.2, 0.5, 0.8)


@jax.jit
def _task(key: Array, mu: float) -> tuple[networks.Network, networks.Network, networks.Network]:
    """Target, its source and an untrained student."""
    key_target, key_source, key_student = jax.random.split(key, 3)
    target = networks.teacher(key_target, TEACHER, D)
    source = networks.ablate(key_source, target, mu)
    return target, source, networks.student(key_student, M, D)


def _pretrained(key: Array, mu: float) -> networks.Network:
    _, source, student = _task(key, mu)
    return networks.pretrain(student, source, 1.0, LONG, 0.0).network


@jax.jit
def _weighted(network: networks.Network, x: Array) -> Array:
    """(1/m) sum_i c_i relu(w_i.x) relu(w_i.x')."""
    phi = networks.features(network.w, x)
    return (phi * network.c) @ phi.T / network.c.size


def _distance(a: Array, b: Array) -> Array:
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def _error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    """E(f - f_s)^2."""
    del x
    return networks.risk(run, source)


@jax.jit
def _plain_error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    """Relative Frobenius distance of the kernel matrices."""
    return _distance(networks.kernel(run.w, x), networks.kernel(source.w, x))


@jax.jit
def _weighted_error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    return _distance(_weighted(run, x), _weighted(source, x))


def _fall(
    error: Callable[[networks.Network, networks.Network, Array], Array], tasks: int = 12
) -> Simulate:
    """log10 of the fall of an error from time EARLY to LATE, mean of several tasks."""

    def simulate(key: Array, quick: bool) -> Estimate:
        falls = []
        for k in jax.random.split(key, 3 if quick else tasks):
            _, source, student = _task(k, MU)
            early = networks.pretrain(student, source, 1.0, EARLY, 0.0).network
            late = networks.pretrain(early, source, 1.0, LATE - EARLY, 0.0).network
            x = jax.random.normal(k, (POINTS, D))
            before, after = (error(run, source, x) for run in (early, late))
            falls.append(jnp.log10(after / before))
        return Estimate.mean(jnp.stack(falls))

    return simulate


def _kernel_gain(key: Array, quick: bool) -> Estimate:
    """Distance of the plain kernels after pretraining over that before, mean of several tasks."""
    ratios = []
    for k in jax.random.split(key, 3 if quick else 12):
        _, source, student = _task(k, MU)
        x = jax.random.normal(k, (POINTS, D))
        after = _plain_error(_pretrained(k, MU), source, x)
        ratios.append(after / _plain_error(student, source, x))
    return Estimate.mean(jnp.stack(ratios))


# --- Section 4: transfer ------------------------------------------------------------------------


@jax.jit
def _ideal(key: Array, mu: float) -> Array:
    """|P_perp f_t|^2 / |f_t|^2 with the source teacher's own neurons."""
    target, source, _ = _task(key, mu)
    return projection.project(source.w, target).outside / networks.inner(target, target)


def _monotone(key: Array, quick: bool) -> Estimate:
    del quick
    steps = [_ideal(key, mu / TEACHER) for mu in range(0, TEACHER, 2)]
    return Estimate(float(jnp.diff(jnp.stack(steps)).min()), tolerance=1e-12)


def _monotone_trained(key: Array, quick: bool) -> Estimate:
    """Least growth of |P_perp f_t|^2 / |f_t|^2 from mu to mu in MUS, of trained features."""
    growth = []
    for k in jax.random.split(key, 3 if quick else 8):
        target = _task(k, MUS[0])[0]
        outside = jnp.stack(
            [projection.project(_pretrained(k, mu).w, target).outside for mu in MUS]
        )
        growth.append(jnp.diff(outside).min() / networks.inner(target, target))
    return Estimate.mean(jnp.stack(growth))


ROWS = 1200


@partial(jax.jit, static_argnums=2)
def _risks(key: Array, n: int, draws: int) -> Array:
    """R_lt of independent target sets of n <= ROWS samples; the other rows are zero and weigh
    nothing (one shape for every n)."""
    w, target = _space()

    def risk(key: Array) -> Array:
        x = jnp.where(jnp.arange(ROWS)[:, None] < n, jax.random.normal(key, (ROWS, D)), 0.0)
        return networks.risk(transfer.linear_transfer(w, x, networks.predict(target, x)), target)

    return jax.lax.map(risk, jax.random.split(key, draws))


def _outside() -> Array:
    return projection.project(*_space()).outside


def _least_risk(key: Array, quick: bool) -> Estimate:
    return Estimate(float(_risks(key, FEW, 400 if quick else 2000).min()), tolerance=1e-12)


def _decay(key: Array, quick: bool) -> Estimate:
    """Order of the mean excess in n, from n = ROWS / 4 to ROWS."""
    means, errors = [], []
    for k, n in zip(jax.random.split(key), (ROWS // 4, ROWS), strict=True):
        excess = Estimate.mean(_risks(k, n, 400 if quick else 2000) - _outside())
        assert excess.stderr is not None
        means.append(excess.value)
        errors.append(excess.stderr / excess.value)
    order = log(means[1] / means[0]) / log(4.0)
    return Estimate(order, stderr=hypot(*errors) / log(4.0))


FEW = 12
PRETRAINING = f"d={D}, m={M}, m*={TEACHER}, μ={MU}, from time {EARLY} to {LATE}"


def _kernel_claims() -> list[Claim]:
    at = f"d={D}, m={FEATURES}"
    long = 2.5
    mode = f"{at}, the largest eigenvalue"
    lengths = (
        ("unit/exact", "", "for the unit vectors of Sec. 4, p. 11", 1.0),
        ("lengths/ours", "|w||v| ", "for any lengths", long),
    )
    return [
        *(
            row(
                f"eq153-{name}",
                f"E σ(w·x) σ(v·x) = {factor}[√(1-u²) + u(π - arccos u)]/2π, u the cosine",
                f"eqs. (152), (153), p. 27, {which}",
                f"|w|={length:g}, |v|=1, {degrees(ANGLE):.0f}°",
                partial(_overlap_exact, length),
                _overlap(length),
            )
            for name, factor, which, length in lengths
        ),
        row(
            "eq157/reading",
            "Mercer eigenfunctions ψ = Σ_i z_i σ(w_i·x)/√(mλ²) have norm 1: E ψ²",
            "eq. (157), p. 27",
            mode,
            1.0,
            _norm_of_mode,
            note="the printed sum runs over l instead of i",
        ),
        *(
            row(
                f"eq150/{status}",
                f"T ψ = {symbol} ψ, with λ² the eigenvalue of K: ⟨ψ, T ψ⟩",
                "eq. (150), p. 26",
                mode,
                lambda power=power: _top_mode()[0] ** power,
                _quotient,
                note="(151) and (157) have λ²",
            )
            for status, symbol, power in (("printed", "λ", 0.5), ("corrected", "λ²", 1.0))
        ),
        row(
            "eq151/exact",
            "|f|²_k = Σ_l c_l²/λ_l², with λ_l² the eigenvalue, is (148), α·k(z, z)α",
            "eqs. (148), (151), p. 26",
            f"{at}, f of {len(ALPHAS)} points",
            _native_norm_of_modes,
            _native_norm,
        ),
        row(
            "eq158/exact",
            "|P f|² = c*ᵀK̃ᵀK⁻¹K̃c*/m*",
            "eq. (158), p. 27",
            f"{at}, m*={TEACHER}",
            lambda: projection.project(*_space()).inside,
            _energy(inside=True),
        ),
        row(
            "eq159/exact",
            "|P⊥ f|² = c*ᵀK*c*/m* - c*ᵀK̃ᵀK⁻¹K̃c*/m*",
            "eq. (159), p. 27",
            f"{at}, m*={TEACHER}",
            _outside,
            _energy(inside=False),
        ),
    ]


def _pretraining_claims() -> list[Claim]:
    section, figure = "Sec. 4, p. 12", "Sec. 4 and Fig. 4(a, b), pp. 11-12"
    decade = "log10 of the fall over a decade of time"
    return [
        row(
            "S4-recovery/reading",
            "a wide network learns the source function: E(f - f_s)² falls as 1/t or faster",
            section,
            PRETRAINING,
            -1.0,
            _fall(_error),
            relation="<=",
            note=f"{decade}; seen: .5 of it, from few tasks",
            effect=0.5,
        ),
        row(
            "F4ab-plain/ours",
            "the distance of Σ σ(w_i·x)σ(w_i·x')/m from the source teacher's kernel does not halve",
            figure,
            PRETRAINING,
            -log10(2),
            _fall(_plain_error),
            relation=">=",
            note=f"{decade}; it stalls: neurons of small or negative c keep other directions; "
            "seen: .1",
            effect=0.1,
        ),
        row(
            "F4ab-weighted/ours",
            "the distance of Σ c_i σ(w_i·x)σ(w_i·x')/m from the source teacher's kernel halves",
            figure,
            PRETRAINING,
            -log10(2),
            _fall(_weighted_error, 24),
            relation="<=",
            note=f"{decade}; features count by their output weight; seen: .6 of it, from few tasks",
            effect=0.6,
        ),
        row(
            "F4ab-gain/reading",
            "pretraining brings the kernel to half its initial distance from the source or nearer",
            figure,
            f"d={D}, m={M}, m*={TEACHER}, μ={MU}, {POINTS} inputs, time {LONG}, several tasks",
            0.5,
            _kernel_gain,
            relation="<=",
            note="seen: .2, from few tasks",
            effect=0.2,
        ),
    ]


def _transfer_claims() -> list[Claim]:
    figure, risk = "Sec. 4, p. 12, and Fig. 4(d), p. 11", "eq. (21), p. 12"
    at = f"d={D}, m={FEATURES}, m*={TEACHER}"
    return [
        row(
            "F4d-ideal/reading",
            "|P⊥ f_t|²/|f_t|² increases with μ, features of the source teacher: least increment",
            figure,
            f"d={D}, m*={TEACHER}, μ=0, 0.2, ..., 0.8, nested sources, an inequality for all draws",
            0.0,
            _monotone,
            relation=">=",
            note="tolerance: rounding",
        ),
        row(
            "F4d-trained/reading",
            "|P⊥ f_t|²/|f_t|² increases with μ, pretrained features: mean least increment",
            figure,
            f"d={D}, m={M}, m*={TEACHER}, μ in {MUS}, time {LONG}, several tasks",
            0.0,
            _monotone_trained,
            relation=">=",
        ),
        row(
            "eq21-floor/reading",
            "|P⊥ f_t|² is irreducible: R_lt ≥ |P⊥ f_t|² for every sample, here the least of 2000",
            risk,
            f"{at}, n={FEW}",
            _outside,
            _least_risk,
            relation=">=",
            note="tolerance: rounding",
        ),
        row(
            "eq21-order/ours",
            "E R_lt = |P⊥ f_t|² + C(n), C(n) ~ 1/n as for linear networks: order of C in n",
            risk,
            f"{at}, n={ROWS // 4} and {ROWS}",
            -1.0,
            _decay,
            note="the next term of C, of relative size m/n, shifts the order by less than 0.01; "
            "seen: .12, which tells 1/n from 1/√n",
            effect=0.12,
        ),
    ]


CLAIMS: tuple[Claim, ...] = (*_kernel_claims(), *_pretraining_claims(), *_transfer_claims())
