"""features-are-fate, Section 4 and Appendix C: ReLU features, their projections, their transfer.

Sizes are small (d = 10) so that every number comes from a network trained here, or from plain Monte
Carlo over inputs, which knows nothing of arc-cosine kernels.
"""

from collections.abc import Callable
from functools import cache, partial
from math import log10, sqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array

from theory.claims import Claim, Estimate, Simulate
from theory.student_teacher import arc_cosine, networks, projection, transfer

PAPER = "features-are-fate"
D, M, TEACHER = 10, 60, 10


def _inputs(key: Array, quick: bool, d: int = D) -> Array:
    return jax.random.normal(key, (40_000 if quick else 400_000, d))


# --- Appendix C ---------------------------------------------------------------------------------

LONG = 2.5  # |w| in the first claim; the paper's formula has it unit


def _pair() -> tuple[Array, Array]:
    """Vectors of lengths LONG and 1 at 60 degrees."""
    w, v = jnp.zeros((1, 3)).at[0, 0].set(LONG), jnp.array([[0.5, sqrt(0.75), 0.0]])
    return w, v


def _overlap(key: Array, quick: bool) -> Estimate:
    x, (w, v) = _inputs(key, quick, 3), _pair()
    return Estimate.mean((networks.features(w, x) * networks.features(v, x))[:, 0])


def _unit_overlap(key: Array, quick: bool) -> Estimate:
    x, (w, v) = _inputs(key, quick, 3), _pair()
    return Estimate.mean((networks.features(w / LONG, x) * networks.features(v, x))[:, 0])


def _overlap_exact() -> float:
    return float(arc_cosine.gram(*_pair())[0, 0])


@cache
def _space() -> tuple[Array, networks.Network]:
    """Five fixed neurons of any length, and a teacher partly outside their span."""
    w = jax.random.normal(jax.random.key(1), (5, D)) / sqrt(D)
    return w, networks.teacher(jax.random.key(2), TEACHER, D)


@jax.jit
def _projected(w: Array, target: networks.Network) -> networks.Network:
    """P f as a network."""
    _, psi = projection.mercer(w)
    overlap = arc_cosine.gram(w, target.w) @ target.c / target.c.size
    return networks.Network(w.shape[0] * (psi @ (psi.T @ overlap)), w)


def _energy(inside: bool) -> Simulate:
    """E (P f)^2 or E (f - P f)^2 over inputs."""

    def simulate(key: Array, quick: bool) -> Estimate:
        x, (w, target) = _inputs(key, quick), _space()
        image = networks.predict(_projected(w, target), x)
        return Estimate.mean((image if inside else networks.predict(target, x) - image) ** 2)

    return simulate


def _top_mode() -> tuple[Array, Array]:
    """The largest Mercer eigenvalue of the five neurons, and psi's coefficients."""
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


def _native_norm(key: Array, quick: bool) -> Estimate:
    """alpha.k(z, z) alpha of f = sum_j alpha_j k(., z_j), by (148), over sum_l c_l^2 / lambda_l."""
    del quick
    z, alpha = jax.random.normal(key, (4, D)), jnp.array([1.0, -0.5, 0.3, 0.8])
    w, at = _space()[0], networks.features(_space()[0], z)
    values, psi = projection.mercer(w)
    c = psi.T @ arc_cosine.gram(w, w) @ (at.T @ alpha) / len(w)  # <psi_l, f>
    return Estimate(
        float(jnp.sum((at.T @ alpha) ** 2) / len(w) / jnp.sum(c**2 / values)), tolerance=1e-9
    )


# --- Section 4: pretraining ---------------------------------------------------------------------


@jax.jit
def _task(key: Array, mu: float) -> tuple[networks.Network, networks.Network, networks.Network]:
    """Target, its source and an untrained student."""
    key_target, key_source, key_student = jax.random.split(key, 3)
    target = networks.teacher(key_target, TEACHER, D)
    source = networks.ablate(key_source, target, mu)
    return target, source, networks.student(key_student, M, D)


def _pretrained(key: Array, mu: float) -> networks.Network:
    _, source, student = _task(key, mu)
    return networks.pretrain(student, source, 1.0, 2000, 0.0).network


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


def _fall(error: Callable[[networks.Network, networks.Network, Array], Array]) -> Simulate:
    """log10 of the fall of an error from time 500 to 5000, mean of several tasks at mu = 0.5."""

    def simulate(key: Array, quick: bool) -> Estimate:
        falls = []
        for k in jax.random.split(key, 3 if quick else 12):
            _, source, student = _task(k, 0.5)
            early = networks.pretrain(student, source, 1.0, 500, 0.0).network
            late = networks.pretrain(early, source, 1.0, 4500, 0.0).network
            x = jax.random.normal(k, (20, D))
            before, after = (error(run, source, x) for run in (early, late))
            falls.append(jnp.log10(after / before))
        return Estimate.mean(jnp.stack(falls))

    return simulate


def _kernel_gain(key: Array, quick: bool) -> Estimate:
    """Distance of the plain kernels after pretraining over that before, mean of several tasks."""
    ratios = []
    for k in jax.random.split(key, 3 if quick else 8):
        _, source, student = _task(k, 0.5)
        x = jax.random.normal(k, (20, D))
        after = _plain_error(_pretrained(k, 0.5), source, x)
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
    """Least growth of |P_perp f_t|^2 / |f_t|^2 from mu = 0.2 to 0.5 to 0.8, of trained features."""
    growth = []
    for k in jax.random.split(key, 3 if quick else 8):
        target = _task(k, 0.2)[0]
        outside = jnp.stack(
            [projection.project(_pretrained(k, mu).w, target).outside for mu in (0.2, 0.5, 0.8)]
        )
        growth.append(jnp.diff(outside).min() / networks.inner(target, target))
    return Estimate.mean(jnp.stack(growth))


ROWS = 1200


@partial(jax.jit, static_argnums=3)
def _excess(key: Array, space: tuple[Array, networks.Network], n: int, draws: int) -> Array:
    """R_lt - |P_perp f|^2 of independent target sets of n <= ROWS samples; the other rows are zero
    and weigh nothing (one shape for every n)."""
    w, target = space
    outside = projection.project(w, target).outside

    def excess(key: Array) -> Array:
        x = jnp.where(jnp.arange(ROWS)[:, None] < n, jax.random.normal(key, (ROWS, D)), 0.0)
        fit = transfer.linear_transfer(w, x, networks.predict(target, x))
        return networks.risk(fit, target) - outside

    return jax.lax.map(excess, jax.random.split(key, draws))


def _least_excess(key: Array, quick: bool) -> Estimate:
    excess = _excess(key, _space(), 12, 400 if quick else 2000)
    return Estimate(float(excess.min()), tolerance=1e-12)


def _decay(key: Array, quick: bool) -> Estimate:
    """Order of the mean excess in n, from n = ROWS / 4 to ROWS."""
    draws = 400 if quick else 2000
    means, errors = [], []
    for k, n in zip(jax.random.split(key), (ROWS // 4, ROWS), strict=True):
        excess = Estimate.mean(_excess(k, _space(), n, draws))
        assert excess.stderr is not None
        means.append(excess.value)
        errors.append(excess.stderr / excess.value)
    order = jnp.log(means[1] / means[0]) / jnp.log(4.0)
    return Estimate(float(order), stderr=float(jnp.hypot(*errors) / jnp.log(4.0)))


PRETRAINING = f"d={D}, m={M}, m*={TEACHER}, μ=0.5, from time 500 to 5000"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        f"{PAPER}/eq153-unit/exact",
        "E σ(w·x) σ(v·x) = [√(1-u²) + u(π - arccos u)]/2π, u the cosine, |w|=|v|=1",
        f"{PAPER} eqs. (152), (153), p. 27, for the unit vectors of Sec. 4, p. 11",
        "60°",
        lambda: _overlap_exact() / LONG,
        _unit_overlap,
    ),
    Claim(
        f"{PAPER}/eq153-lengths/ours",
        "E σ(w·x) σ(v·x) = |w||v| [√(1-u²) + u(π - arccos u)]/2π, u the cosine",
        f"{PAPER} eqs. (152), (153), p. 27, for any lengths",
        f"|w|={LONG}, |v|=1, 60°",
        _overlap_exact,
        _overlap,
    ),
    Claim(
        f"{PAPER}/eq157/reading",
        "Mercer eigenfunctions ψ = Σ_i z_i σ(w_i·x)/√(mλ²) have norm 1: E ψ²",
        f"{PAPER} eq. (157), p. 27",
        f"d={D}, m=5, the largest eigenvalue",
        lambda: 1.0,
        _norm_of_mode,
        note="the printed sum runs over l instead of i",
    ),
    Claim(
        f"{PAPER}/eq150/printed",
        "T ψ = λ ψ, with λ² the eigenvalue of K: ⟨ψ, T ψ⟩",
        f"{PAPER} eq. (150), p. 26",
        f"d={D}, m=5, the largest eigenvalue",
        lambda: float(jnp.sqrt(_top_mode()[0])),
        _quotient,
        note="contradicts (151) and (157), which have λ²",
    ),
    Claim(
        f"{PAPER}/eq150/corrected",
        "T ψ = λ² ψ, with λ² the eigenvalue of K: ⟨ψ, T ψ⟩",
        f"{PAPER} eq. (150), p. 26, corrected",
        f"d={D}, m=5, the largest eigenvalue",
        lambda: float(_top_mode()[0]),
        _quotient,
    ),
    Claim(
        f"{PAPER}/eq151/exact",
        "|f|²_k = Σ_l c_l²/λ_l², with λ_l² the eigenvalue: (148) over it",
        f"{PAPER} eqs. (148), (151), p. 26",
        f"d={D}, m=5, f of four points",
        lambda: 1.0,
        _native_norm,
    ),
    Claim(
        f"{PAPER}/eq158/exact",
        "|P f|² = c*ᵀK̃ᵀK⁻¹K̃c*/m*",
        f"{PAPER} eq. (158), p. 27",
        f"d={D}, m=5, m*={TEACHER}",
        lambda: float(projection.project(*_space()).inside),
        _energy(inside=True),
    ),
    Claim(
        f"{PAPER}/eq159/exact",
        "|P⊥ f|² = |f|² - |P f|²",
        f"{PAPER} eq. (159), p. 27",
        f"d={D}, m=5, m*={TEACHER}",
        lambda: float(projection.project(*_space()).outside),
        _energy(inside=False),
    ),
    Claim(
        f"{PAPER}/S4-recovery/reading",
        "a wide network learns the source function: E(f - f_s)² falls as 1/t or faster",
        f"{PAPER} Sec. 4, p. 12",
        PRETRAINING,
        lambda: -1.0,
        _fall(_error),
        relation="<=",
        note="log10 of the fall over a decade of time; seen: .5 of it, from few tasks",
        effect=0.5,
    ),
    Claim(
        f"{PAPER}/F4ab-plain/ours",
        "the distance of Σ σ(w_i·x)σ(w_i·x')/m from the source teacher's kernel does not halve",
        f"{PAPER} Sec. 4, Fig. 4(a, b), pp. 11-12",
        PRETRAINING,
        lambda: -log10(2),
        _fall(_plain_error),
        relation=">=",
        note="log10 of the fall over a decade of time; it stalls: neurons of small or negative c "
        "keep other directions",
    ),
    Claim(
        f"{PAPER}/F4ab-weighted/ours",
        "Σ c_i σ(w_i·x)σ(w_i·x')/m tends to the source teacher's kernel: the distance halves or "
        "better",
        f"{PAPER} Sec. 4, Fig. 4(a, b), pp. 11-12, corrected",
        PRETRAINING,
        lambda: -log10(2),
        _fall(_weighted_error),
        relation="<=",
        note="log10 of the fall over a decade of time; features count by their output weight; "
        "seen: .6 of it, from few tasks",
        effect=0.6,
    ),
    Claim(
        f"{PAPER}/F4ab-gain/reading",
        "pretraining brings the kernel to half its initial distance from the source's, or nearer",
        f"{PAPER} Sec. 4, Fig. 4(a, b), pp. 11-12",
        f"d={D}, m={M}, m*={TEACHER}, μ=0.5, 20 inputs, time 2000, several tasks",
        lambda: 0.5,
        _kernel_gain,
        relation="<=",
        note="seen: .12, from few tasks",
        effect=0.12,
    ),
    Claim(
        f"{PAPER}/F4d-ideal/reading",
        "|P⊥ f_t|² increases with μ, features of the source teacher: least increment",
        f"{PAPER} Sec. 4, Fig. 4(d), pp. 11-12",
        f"d={D}, m*={TEACHER}, μ=0, 0.2, ..., 0.8, nested sources",
        lambda: 0.0,
        _monotone,
        relation=">=",
        note="tolerance: rounding",
    ),
    Claim(
        f"{PAPER}/F4d-trained/reading",
        "|P⊥ f_t|²/|f_t|² increases with μ, pretrained features: mean least increment",
        f"{PAPER} Sec. 4, Fig. 4(d), pp. 11-12",
        f"d={D}, m={M}, m*={TEACHER}, μ=0.2, 0.5, 0.8, time 2000, several tasks",
        lambda: 0.0,
        _monotone_trained,
        relation=">=",
    ),
    Claim(
        f"{PAPER}/eq21-floor/reading",
        "R_lt ≥ |P⊥ f_t|² for every sample: least difference",
        f"{PAPER} eq. (21), p. 12",
        f"d={D}, m=5, m*={TEACHER}, n=12",
        lambda: 0.0,
        _least_excess,
        relation=">=",
        note="tolerance: rounding",
    ),
    Claim(
        f"{PAPER}/eq21-order/ours",
        "E R_lt = |P⊥ f_t|² + C(n), C(n) ~ 1/n: order of C in n",
        f"{PAPER} eq. (21), p. 12",
        f"d={D}, m=5, m*={TEACHER}, n={ROWS // 4} and {ROWS}",
        lambda: -1.0,
        _decay,
        note="the next term of C, of relative size m/n, shifts the order by less than 0.01; seen: "
        ".12, which tells 1/n from 1/√n",
        effect=0.12,
    ),
)
