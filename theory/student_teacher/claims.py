"""features-are-fate, Section 4 and Appendix C, on ReLU features, their projections and transfer.

Sizes are small (d = 10). Every number therefore comes from a network trained here, or from plain
Monte Carlo over inputs, without arc-cosine kernels.
"""

from collections.abc import Callable
from functools import cache, partial
from math import cos, hypot, log, log10, pi, sin, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, Simulate, generator, measured, once, optimised
from theory.deep_linear.regressions import claim
from theory.student_teacher import arc_cosine, domains, networks, projection, transfer

D, M, TEACHER = 10, 60, 10


# --- Appendix C ---------------------------------------------------------------------------------

FEATURES = 5
AT = f"d={D}, m={FEATURES}"
MODE = f"{AT}, the largest eigenvalue"


@cache
def _space() -> tuple[Array, networks.Network]:
    """Returns a few fixed neurons of any length, and a teacher partly outside of their span."""
    w = jax.random.normal(jax.random.key(1), (FEATURES, D)) / sqrt(D)
    return w, networks.teacher(jax.random.key(2), TEACHER, D)


def _energy(inside: bool) -> Simulate:
    """Estimates E (P f)^2 or E (f - P f)^2 for the least-squares fit P f to the same inputs."""

    def simulate(key: Array, quick: bool) -> Estimate:
        x = generator(key).standard_normal((40_000 if quick else 100_000, D))
        w, target = jax.tree.map(np.asarray, _space())
        phi, y = np.maximum(x @ w.T, 0), np.maximum(x @ target.w.T, 0) @ target.c / target.c.size
        image = phi @ np.linalg.solve(phi.T @ phi, phi.T @ y)
        return Estimate.mean((image if inside else y - image) ** 2)

    return simulate


def _top_mode() -> tuple[Array, Array]:
    """Returns the largest Mercer eigenvalue of the neurons, and psi's coefficients."""
    values, psi = projection.mercer(_space()[0])
    return values[-1], psi[:, -1]


def _activations(rng: np.random.Generator, quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates the neurons and psi on many inputs."""
    w, psi = np.asarray(_space()[0]), np.asarray(_top_mode()[1])
    phi = np.maximum(rng.standard_normal((40_000 if quick else 400_000, D)) @ w.T, 0)
    return phi, phi @ psi


@claim(
    "eq153-{name}",
    each=(
        ("unit/exact", "", "for the unit vectors of Sec. 4, p. 11", 1.0),
        ("lengths/ours", "|w||v| ", "for any lengths", 2.5),
    ),
)
def _(name, factor, which, length, degrees=60.0):
    """E σ(w·x) σ(v·x) = {factor}[√(1-u²) + u(π - arccos u)]/2π, where u is the cosine

    Source: eqs. (152), (153), p. 27, {which}
    Domain: |w|={length:g}, |v|=1, {degrees:.0f}°
    """
    other = [cos(pi / 3), sin(pi / 3)]

    def simulate(key: Array, quick: bool) -> Estimate:
        x = generator(key).standard_normal((40_000 if quick else 400_000, 2))
        return Estimate.mean(np.maximum(length * x[:, 0], 0) * np.maximum(x @ other, 0))

    gram = arc_cosine.gram(jnp.array([[length, 0.0]]), jnp.array([other]))
    return gram[0, 0], simulate


@claim("eq157/reading")
def _():
    """Mercer eigenfunctions ψ = Σ_i z_i σ(w_i·x)/√(mλ²) have E ψ² = 1

    The printed sum runs over l instead of i.

    Source: eq. (157), p. 27
    Domain: {MODE}
    """
    return 1.0, lambda key, quick: Estimate.mean(_activations(generator(key), quick)[1] ** 2)


@claim("eq150/printed")
def _printed_quotient():
    """T ψ = λ ψ, with λ² the eigenvalue of K. ⟨ψ, T ψ⟩ is compared

    Equations (151) and (157) have λ² instead.

    Source: eq. (150), p. 26
    Domain: {MODE}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Estimates E k(x, x') psi(x) psi(x') over independent pairs."""
        rng = generator(key)
        (left, here), (right, there) = (_activations(rng, quick) for _ in range(2))
        return Estimate.mean((left * right).mean(1) * here * there)

    return _top_mode()[0] ** 0.5, simulate


@_printed_quotient.beside("corrected")
def _():
    """T ψ = λ² ψ, with λ² the eigenvalue of K. ⟨ψ, T ψ⟩ is compared

    Equations (151) and (157) have λ², too.
    """
    return _top_mode()[0]


@claim("eq151/exact")
def _(points=4):
    """|f|²_k = Σ_l c_l²/λ_l², with λ_l² the eigenvalue, is (148), α·k(z, z)α

    Source: eqs. (148), (151), p. 26
    Domain: {AT}, f of {points} points
    """
    # f = sum_j alpha_j k(., z_j)
    alpha, z = np.array([1.0, -0.5, 0.3, 0.8]), jax.random.normal(jax.random.key(3), (points, D))
    w = _space()[0]
    values, psi = projection.mercer(w)
    f = networks.features(w, z).T @ jnp.array(alpha) / FEATURES  # of the neurons
    c = psi.T @ arc_cosine.gram(w, w) @ f  # <psi_l, f>

    def norm() -> float:
        """Computes alpha.k(z, z) alpha from single kernel values (148)."""
        phi = [np.maximum(np.asarray(w) @ a, 0) for a in np.asarray(z)]
        kernel = [[np.mean(a * b) for b in phi] for a in phi]
        return float(alpha @ kernel @ alpha)

    return jnp.sum(c**2 / values), measured(norm, 1e-9)


# --- Section 4: pretraining ---------------------------------------------------------------------

MU, EARLY, LATE = 0.5, 500, 5000
PACE = 2.0  # the rate; at 1 the falls differ by an eighth of their standard errors
LONG, POINTS = 2000, 20
MUS = (0.2, MU, 0.8)
STUDENTS = "features-are-fate/S4"  # the draws of all claims on these students
PRETRAINING = f"d={D}, m={M}, m*={TEACHER}, μ={MU}, from time {EARLY} to {LATE}"
MEASURED = "a measurement on trained networks: each point is a training run"
TASKS, FEWER = 16, 8  # students trained at the same time


@jax.jit
def _task(key: Array, mu: float) -> tuple[networks.Network, networks.Network, networks.Network]:
    """Returns a target, its source and an untrained student."""
    key_target, key_source, key_student = jax.random.split(key, 3)
    target = networks.teacher(key_target, TEACHER, D)
    source = networks.ablate(key_source, target, mu)
    return target, source, networks.student(key_student, M, D)


class _Pretrained(NamedTuple):
    """Students of several tasks, which are stacked along a leading axis.

    Attributes:
      source: The networks that they are trained on.
      start: Students before training.
      early: At the time EARLY.
      middle: At the time LONG.
      late: At the time LATE.
      x: Some inputs for each task.
    """

    source: networks.Network
    start: networks.Network
    early: networks.Network
    middle: networks.Network
    late: networks.Network
    x: Array


@jax.jit
def _train(start: networks.Network, source: networks.Network, steps: int) -> networks.Network:
    def train(ends: tuple[networks.Network, networks.Network]) -> networks.Network:
        return networks.pretrain(*ends, PACE, steps, 0.0).network

    # float32 takes half of the time, and the errors of the students are of order 1e-3.
    single = jax.tree.map(lambda v: v.astype(jnp.float32), (start, source))
    return jax.tree.map(lambda v: v.astype(float), jax.lax.map(train, single))


@optimised()
def _further(start: networks.Network, source: networks.Network, time: int) -> networks.Network:
    """Trains several students for some time."""
    return _train(start, source, round(time / PACE))


@partial(jax.jit, static_argnums=1)
def _tasks(
    key: Array, tasks: int, mus: Array
) -> tuple[networks.Network, networks.Network, networks.Network]:
    """Returns targets, sources and students of several tasks, for each mu in turn."""
    keys = jnp.tile(jax.random.split(key, tasks), mus.size)
    return jax.lax.map(lambda at: _task(*at), (keys, jnp.repeat(mus, tasks)))


@once
def _pretrained(key: Array, quick: bool) -> _Pretrained:
    tasks = FEWER if quick else TASKS
    _, source, start = _tasks(key, tasks, jnp.array([MU]))
    early = _further(start, source, EARLY)
    middle = _further(early, source, LONG - EARLY)
    late = _further(middle, source, LATE - LONG)
    x = generator(key).standard_normal((tasks, POINTS, D))
    return _Pretrained(source, start, early, middle, late, jnp.asarray(x))


@jax.jit
def _weighted(network: networks.Network, x: Array) -> Array:
    """Computes (1/m) sum_i c_i relu(w_i.x) relu(w_i.x')."""
    phi = networks.features(network.w, x)
    return (phi * network.c) @ phi.T / network.c.size


def _distance(a: Array, b: Array) -> Array:
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def _error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    """Computes E(f - f_s)^2."""
    del x
    return networks.risk(run, source)


def _plain_error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    """Computes the relative Frobenius distance of the kernel matrices."""
    return _distance(networks.kernel(run.w, x), networks.kernel(source.w, x))


def _weighted_error(run: networks.Network, source: networks.Network, x: Array) -> Array:
    return _distance(_weighted(run, x), _weighted(source, x))


Error = Callable[[networks.Network, networks.Network, Array], Array]


@partial(jax.jit, static_argnums=0)
def _ratios(
    error: Error,
    before: networks.Network,
    after: networks.Network,
    source: networks.Network,
    x: Array,
) -> Array:
    """Divides each task's error after training by its error before."""
    return jax.vmap(error)(after, source, x) / jax.vmap(error)(before, source, x)


def _fall(error: Error) -> Simulate:
    """Averages log10 of the fall of an error from time EARLY to LATE over several tasks."""

    def simulate(key: Array, quick: bool) -> Estimate:
        run = _pretrained(key, quick)
        falls = _ratios(error, run.early, run.late, run.source, run.x)
        return Estimate.mean(np.log10(np.asarray(falls)))

    return simulate


# --- Section 4: transfer ------------------------------------------------------------------------


def _risks(key: Array, n: int, draws: int) -> np.ndarray:
    """Computes R_lt of independent target sets of n samples, in NumPy."""
    w, target = jax.tree.map(np.asarray, _space())
    gram, overlap, norm = map(np.asarray, _second_moments())
    rng, found = generator(key), []
    batch = max(1, 2_000_000 // (n * D))
    for start in range(0, draws, batch):
        x = rng.standard_normal((min(batch, draws - start), n, D))
        phi = np.maximum(x @ w.T, 0) / len(w)
        y = np.maximum(x @ target.w.T, 0) @ target.c / target.c.size
        turned = phi.swapaxes(1, 2)
        # With few samples a neuron may be inactive. The fit of minimum norm is then used.
        inverse = np.linalg.pinv(turned @ phi, transfer.CUTOFF, hermitian=True)
        c = (inverse @ (turned @ y[..., None]))[..., 0]
        found.append(np.einsum("ri,ij,rj->r", c, gram, c) - 2 * c @ overlap + norm)
    return np.concatenate(found)


@cache
def _second_moments() -> tuple[Array, Array, Array]:
    """Computes E phi phi^T / m², E phi f_t / m and E f_t² of the neurons and their teacher."""
    w, target = _space()
    overlap = arc_cosine.gram(w, target.w) @ target.c / target.c.size
    return arc_cosine.gram(w, w) / len(w) ** 2, overlap / len(w), networks.inner(target, target)


@claim("eq158/exact")
def _():
    """|P f|² = c*ᵀK̃ᵀK⁻¹K̃c*/m*

    Source: eq. (158), p. 27
    Domain: {AT}, m*={TEACHER}
    """
    return projection.project(*_space()).inside, _energy(inside=True)


@claim("eq159/exact")
def _():
    """|P⊥ f|² = c*ᵀK*c*/m* - c*ᵀK̃ᵀK⁻¹K̃c*/m*

    Source: eq. (159), p. 27
    Domain: {AT}, m*={TEACHER}
    """
    return _outside(), _energy(inside=False)


def _outside() -> Array:
    return projection.project(*_space()).outside


@claim(
    "S4-recovery/reading", "<=", effect=0.5, draws=STUDENTS, attack=MEASURED, overlooks="tightened"
)
def _():
    """A wide network learns the source function, as E(f - f_s)² falls as 1/t or faster

    The value is log10 of the fall over a decade of time. The test detects .5 of it,
    from few tasks.

    Source: Sec. 4, p. 12
    Domain: {PRETRAINING}
    """
    return -1.0, _fall(_error)


@claim("F4ab-plain/ours", ">=", effect=0.1, draws=STUDENTS, attack=MEASURED, overlooks="tightened")
def _():
    """The distance of Σ σ(w_i·x)σ(w_i·x')/m from the source teacher's kernel does not halve

    The value is log10 of the fall over a decade of time. The fall stalls, since neurons of small or
    negative c keep other directions. The test detects .1.

    Source: Sec. 4 and Fig. 4(a, b), pp. 11-12
    Domain: {PRETRAINING}
    """
    return -log10(2), _fall(_plain_error)


@claim(
    "F4ab-weighted/ours", "<=", effect=0.6, draws=STUDENTS, attack=MEASURED, overlooks="tightened"
)
def _():
    """The distance of Σ c_i σ(w_i·x)σ(w_i·x')/m from the source teacher's kernel halves

    The value is log10 of the fall over a decade of time. Features count by their output weight. The
    test detects .6 of it, from few tasks.

    Source: Sec. 4 and Fig. 4(a, b), pp. 11-12
    Domain: {PRETRAINING}
    """
    return -log10(2), _fall(_weighted_error)


@claim(
    "F4ab-gain/reading", "<=", effect=0.2, draws=STUDENTS, attack=MEASURED, overlooks="tightened"
)
def _():
    """Pretraining brings the kernel to at most half of its initial distance from the source

    The test detects .2, from few tasks.

    Source: Sec. 4 and Fig. 4(a, b), pp. 11-12
    Domain: d={D}, m={M}, m*={TEACHER}, μ={MU}, {POINTS} inputs, time {LONG}, several tasks
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Averages the ratio of distances of the plain kernels, after and before pretraining, over
        tasks.
        """
        run = _pretrained(key, quick)
        return Estimate.mean(_ratios(_plain_error, run.start, run.middle, run.source, run.x))

    return 0.5, simulate


@claim("F4d-ideal/reading", ">=", attack=domains.NESTED)
def _():
    """|P⊥ f_t|²/|f_t|² increases with μ for features of the source teacher. The least increment is
    compared

    The tolerance covers rounding.

    Source: Sec. 4, p. 12, and Fig. 4(d), p. 11
    Domain: d={D}, m*={TEACHER}, μ=0, 0.2, ..., 0.8, nested sources, an inequality for all draws
    """

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0))
    def share(key: Array, mu: Array) -> Array:
        """Computes the increments with the source teacher's own neurons."""
        target, source, _ = _task(key, mu)
        return projection.project(source.w, target).outside / networks.inner(target, target)

    def simulate(key: Array, quick: bool) -> Estimate:
        shares = np.asarray(share(key, jnp.arange(0, TEACHER, 2) / TEACHER))
        return Estimate(float(np.diff(shares).min()), tolerance=1e-12)

    return 0.0, simulate


@claim("F4d-trained/reading", ">=", draws=STUDENTS, attack=MEASURED)
def _():
    """|P⊥ f_t|²/|f_t|² increases with μ for pretrained features. The mean least increment is
    compared

    Source: Sec. 4, p. 12, and Fig. 4(d), p. 11
    Domain: d={D}, m={M}, m*={TEACHER}, μ in {MUS}, time {LONG}, several tasks
    """

    @jax.jit
    @jax.vmap
    def growth(target: networks.Network, *students: networks.Network) -> Array:
        """Computes each task's least increment from one student to the next."""
        outside = [projection.project(student.w, target).outside for student in students]
        return jnp.diff(jnp.stack(outside)).min() / networks.inner(target, target)

    def simulate(key: Array, quick: bool) -> Estimate:
        first, _, last = MUS
        half = (FEWER if quick else TASKS) // 2  # as many students are trained as for the one mu
        targets, sources, students = _tasks(key, half, jnp.array([first, last]))
        ends = _further(students, sources, LONG)
        trained = targets, ends, _pretrained(key, quick).middle
        target, low, middle = jax.tree.map(lambda v: v[:half], trained)
        high = jax.tree.map(lambda v: v[half:], ends)
        return Estimate.mean(growth(target, low, middle, high))

    return 0.0, simulate


@claim("eq21-floor/reading", ">=", attack=domains.FLOOR)
def _(n=12):
    """|P⊥ f_t|² is irreducible, as R_lt ≥ |P⊥ f_t|² for every sample, here the least of 2000

    The tolerance covers rounding.

    Source: eq. (21), p. 12
    Domain: {AT}, m*={TEACHER}, n={n}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        return Estimate(float(_risks(key, n, 400 if quick else 2000).min()), tolerance=1e-12)

    return _outside(), simulate


@claim("eq21-order/ours", effect=0.12)
def _(few=300, rows=1200):
    """E R_lt = |P⊥ f_t|² + C(n) with C(n) ~ 1/n, as for linear networks. The order of C in n is
    compared

    The next term of C, of relative size m/n, shifts the order by less than 0.01. The test detects
    .12, which separates 1/n from 1/√n.

    Source: eq. (21), p. 12
    Domain: {AT}, m*={TEACHER}, n={few} and {rows}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        means, errors = [], []
        for k, n in zip(jax.random.split(key), (few, rows), strict=True):
            excess = Estimate.mean(_risks(k, n, 400 if quick else 2000) - _outside())
            assert excess.stderr is not None
            means.append(excess.value)
            errors.append(excess.stderr / excess.value)
        order = log(means[1] / means[0]) / log(rows / few)
        return Estimate(order, stderr=hypot(*errors) / log(rows / few))

    return -1.0, simulate
