"""SAIL, Proposition 1, Theorems 1 and 2, Appendix C, on the advantage of a near initialisation."""

from functools import partial
from math import exp, log, log2, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import integrate, special

from theory.claims import Estimate, Simulate, compiled, generator, measured
from theory.initialisation import descent, domains, proximity, proximity_domains
from theory.initialisation.settings import claim

# A target with |theta*|^2 = 2. The features of a task move one direction of the parameters.
LENGTH, RATIO = 2.0, 0.2
NEAR = 0.3  # tau of Appendix C
MIXED = (1.0, 0.7, 0.4, 0.25)  # curvatures, from L to mu
RATE, STEPS = 0.8, 12
DRAWS = 400_000  # a twentieth of them in quick checks


def _drawn(
    key: Array, quick: bool, dim: int, length: float = LENGTH, rank: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Draws X of spread 1 and Y, where theta_i - theta* is normal in `rank` coordinates."""
    rng, draws = generator(key), DRAWS // 20 if quick else DRAWS
    target = np.sqrt(length) * np.eye(dim)[0]
    X = np.sum(rng.normal(size=(draws, rank)) ** 2, 1)
    return X, np.sum((rng.normal(size=(draws, dim)) - target) ** 2, 1)


def _exceeds(dim: int, ratio: float, length: float = LENGTH, rank: int = 1) -> Simulate:
    """Estimates P(X >= alpha Y) from drawn models, with the standard error of a mean of events."""

    def simulate(key: Array, quick: bool) -> Estimate:
        near, far = _drawn(key, quick, dim, length, rank)
        return Estimate.mean(ratio * near >= far)

    return simulate


@claim("T1/printed", "<=", attack=proximity_domains.markov(1.0, 1.0))
def _(ratio=RATIO):
    """For α ∈ (0,1), P(X ≥ αY) ≤ E X / (α E Y)

    Markov's inequality needs a constant threshold, but Y is random.

    Source: Theorem 1, Appendix A, step 2 (p. 21)
    Domain: d=1, |θ*|=0, E X = {ratio} α
    """
    return ratio / proximity.mean_distance(1), _exceeds(1, ratio, 0.0)


@claim(
    "T1/corrected",
    "<=",
    attack=proximity_domains.markov(3.0, 1e5, inverse=True),
    overlooks="tightened",
)
def _(ratio=RATIO, length=LENGTH):
    """P(X ≥ αY) ≤ E X E[1/Y] / α, d ≥ 3

    Source: Theorem 1, Appendix A, step 2 (p. 21)
    Domain: d=5, X = L²τ²χ²₁ independent of Y, |θ*|²={length:g}, E X = {ratio} α
    """
    predicted = compiled(proximity.tail_bound, ratio, dim=5, squared_length=length)
    return predicted, _exceeds(5, ratio, length)


@claim("T1-tail-d{dim}/ours", each=((1, 1, 0.2), (2, 1, 0.5), (4, 4, 0.4)))
def _(dim, rank, ratio, length=LENGTH):
    """P(X ≥ αY) = Σⱼ Poisson(j; |θ*|²/2) I_{{u/(1+u)}}(d/2 + j, p/2), u = L²τ²/α

    Source: Theorem 1, eq. (5) (p. 4), solved
    Domain: d={dim}, p={rank}, u={ratio}, |θ*|²={length:g}
    """
    predicted = compiled(proximity.tail, ratio, dim, length, rank=rank)
    return predicted, _exceeds(dim, ratio, length, rank)


@claim("T1-order-d1/printed", ">=")
def _printed_order(rare=1e-6):
    """1 - P(X ≤ αY) = O((τ² + β)/α), with an exponent of u of at least 1

    Source: Theorem 1, eq. (5) (p. 4)
    Domain: d=1, |θ*|=0, u = L²τ²/α from {rare:g} to 2e-06
    """

    def tail(ratio: float) -> float:
        """Computes the probability by quadrature over theta_i."""

        def density(x: float) -> float:
            return float(sqrt(2 / pi) * exp(-(x**2) / 2) * special.chdtr(1, ratio * x**2))

        return integrate.quad(density, 0, 12, epsabs=0, epsrel=1e-10)[0]

    return 1.0, measured(lambda: log2(tail(2 * rare) / tail(rare)), 1e-3)


@_printed_order.beside("corrected", "=")
def _():
    """1 - P(X ≤ αY) ~ u^{{d/2}}, with the exponent ½ of u for d = 1"""
    return 0.5


for _dim, _length, _overlooks in (
    (2, 0.0, ""),
    (3, 2.0, "tightened"),
    (20, 50.0, "tightened"),
):

    @claim(
        "T1-independent-d{dim}/ours",
        "<=",
        attack=proximity_domains.markov(_dim, _dim),
        overlooks=_overlooks,
        each=((_dim, _length),),
    )
    def _(dim, length):
        """P(X ≥ αY) ≤ E X / (α E Y) for d ≥ 2, as P(Y ≤ y) ≤ y / E Y

        The printed proof does not show this, but it is true.

        Source: Theorem 1, Appendix A, step 2 (p. 21), for X independent of Y
        Domain: d={dim}, |θ*|²={length:g}; the y of 60 with the closest sides
        """
        share = np.geomspace(1e-6, 1.0, 60)
        y = share * (dim + length)
        below = special.chndtr(y, dim, length) if length else special.chdtr(dim, y)
        worst = (below / share).argmax()
        return share[worst], measured(lambda: below[worst])


@claim("T1-step1/exact")
def _(lipschitz=1.5, tau=0.4, beta=0.03):
    """E X ≤ L²(τ² + β), attained where f is L times an isometry

    For means in p dimensions τ² is p τ².

    Source: Theorem 1, Appendix A, step 1 (p. 20)
    Domain: θ = {lipschitz} (μ, σ²), τ={tau}, β={beta}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), DRAWS // 20 if quick else DRAWS
        mean = tau * rng.normal(size=draws)
        # A uniform variable on [-sqrt(3 beta), sqrt(3 beta)] has the variance beta.
        variance = sqrt(3 * beta) * rng.uniform(-1, 1, draws)
        return Estimate.mean(lipschitz**2 * (mean**2 + variance**2))

    return lipschitz**2 * (tau**2 + beta), simulate


@claim("T1-mean/exact")
def _(dim=5, length=LENGTH):
    """E Y = d + |θ*|²

    Source: Theorem 1, Appendix A, step 2 (p. 21)
    Domain: d={dim}, |θ*|²={length:g}
    """
    return dim + length, lambda key, quick: Estimate.mean(_drawn(key, quick, dim, length)[1])


@claim("T1-inverse/ours")
def _(dim=7, length=LENGTH):
    """E[1/Y] = ∫₀¹ v^{{d-3}} exp(-|θ*|²(1-v²)/2) dv ≤ 1/(d-2)

    Source: Theorem 1, Appendix A, step 2 (p. 21), corrected
    Domain: d={dim}, |θ*|²={length:g}
    """
    predicted = proximity.mean_inverse_distance(dim, length)
    return predicted, lambda key, quick: Estimate.mean(_drawn(key, quick, dim, length)[1] ** -1)


# Strongly convex and smooth, but not quadratic. The curvature of log cosh is at most 1.
MU, SMOOTH, SLOW, FEW = 0.5, 1.5, 0.2, 4
FAR = np.array([4.0, -3.0, 1.5])
CONVEX = f"Σ log 2cosh θ + |θ|²/4, μ={MU}, L={SMOOTH}, η={SLOW}, θ = {FAR.tolist()}"


def _excess(theta: np.ndarray) -> float:
    """Computes J - J* in NumPy."""
    return float(np.sum(np.log(2 * np.cosh(theta)) + theta**2 / 4) - theta.size * log(2))


@jax.jit
def _walk() -> tuple[Array, Array]:
    """Computes J - J* along `FEW` steps and the first squared gradient, by autodiff."""

    def loss(theta: Array) -> Array:
        return jnp.sum(jnp.logaddexp(theta, -theta)) + jnp.sum(theta**2) / 4

    def step(theta: Array, _: None) -> tuple[Array, Array]:
        return theta - SLOW * jax.grad(loss)(theta), loss(theta)

    start = jnp.asarray(FAR)
    losses = jax.lax.scan(step, start, length=FEW + 1)[1]
    return losses - loss(0 * start), jnp.sum(jax.grad(loss)(start) ** 2)


_descend = jax.jit(descent.descend)


def _descended(
    curvature: tuple[float, ...], start: tuple[float, ...], rate: float, steps: int
) -> float:
    """Computes the excess after some steps, by autodiff, in four dimensions or fewer."""
    h, e = (np.pad(x, (0, 4 - len(x))) for x in (curvature, start))
    return float(np.sum(h * np.asarray(_descend(h, e, rate, steps)) ** 2) / 2)


FAST = 0.6
FLATTEST = (0.0, 0.0, 0.0, 1.0)


@claim("T2-eq6/exact", "<=", attack=domains.CONTRACTION, overlooks="tightened")
def _():
    """For η ∈ (0, 1/L), J(θ_T) - J* ≤ (1 - ημ)^T (J(θ_0) - J*)

    Source: Theorem 2, eq. (6) (p. 4)
    Domain: {CONVEX}, T={FEW}
    """
    predicted = compiled(descent.contraction, MU, SLOW, FEW) * _excess(FAR)
    return predicted, measured(lambda: _walk()[0][FEW])


@claim("T2-descent/exact", "<=", attack=domains.DESCENT)
def _():
    """J(θ - η∇J) - J* ≤ J(θ) - J* - η(1 - Lη/2)|∇J|²

    Source: Theorem 2, Appendix B, step 1 (pp. 22-23)
    Domain: {CONVEX}
    """
    slope = np.tanh(FAR) + FAR / 2
    left = _excess(FAR) - SLOW * (1 - SMOOTH * SLOW / 2) * float(slope @ slope)
    return left, measured(lambda: _walk()[0][1])


@claim("T2-gradient/exact", ">=", attack=domains.SLOPE, overlooks="tightened")
def _():
    """|∇J|² ≥ 2μ (J(θ) - J*)

    Source: Theorem 2, Appendix B, step 1 (pp. 22-23)
    Domain: {CONVEX}
    """
    return 2 * MU * _excess(FAR), measured(lambda: _walk()[1])


@claim("T2-quadratic/ours")
def _(curvature=MIXED, rate=RATE, steps=STEPS, start=(0.3, -0.8, 0.5, 1.1)):
    """J(θ_T) - J* = Σ h (1 - ηh)^{{2T}} e_h² / 2

    Source: Theorem 2, eq. (6) (p. 4), solved for quadratics
    Domain: quadratic, curvatures {curvature}, η={rate}, T={steps}, θ_0 - θ* = {start}
    """
    predicted = compiled(descent.excess, np.array(curvature), np.array(start), rate, steps)
    return predicted, measured(lambda: _descended(curvature, start, rate, steps))


@claim("T2-rate/ours")
def _(curvature=MIXED, rate=RATE, steps=STEPS, start=FLATTEST):
    """J(θ_T) - J* ≤ (1 - ημ)^{{2T}} (J(θ_0) - J*), the printed factor squared, is attained

    Source: Theorem 2, eq. (6) (p. 4), sharpened for quadratics
    Domain: quadratic, curvatures {curvature}, η={rate}, T={steps}, θ_0 - θ* = {start}
    """
    mu = curvature[-1]
    predicted = (1 - rate * mu) ** (2 * steps) * mu / 2
    return predicted, measured(lambda: _descended(curvature, start, rate, steps))


@claim("T2-eq7/exact", "<=", attack=domains.EXCESS, overlooks="tightened")
def _():
    """J(θ) - J* ≤ L|θ - θ*|²/2

    Source: Theorem 2, eq. (7) (p. 4)
    Domain: {CONVEX}
    """
    predicted = descent.excess_bound(SMOOTH, float(np.linalg.norm(FAR)))
    return predicted, measured(lambda: _walk()[0][0])


def _half(curvature: tuple[float, ...], models: int) -> Simulate:
    """Estimates how often the mean of models has more than half of the excess of a random start.
    The models are moved by N(0, NEAR^2) in the first direction, and the start is N(0, I), both
    about the target.
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 5 * (DRAWS // 100 if quick else DRAWS)
        near = NEAR * rng.normal(size=(draws, models)).mean(1)
        other = rng.normal(size=(draws, 4))
        return Estimate.mean(curvature[0] * near**2 > (curvature * other**2).sum(1) / 2)

    return simulate


@claim("C-half/exact")
def _(curvature=MIXED):
    """|θ^P - θ*|² ≤ (μ/2L)|θ_rand - θ*|² ⇒ ρ ≤ ½ at T = 0, attained

    Source: Appendix C.2 (pp. 24-25)
    Domain: quadratic, curvatures {curvature}; the nearer start steepest, the other flattest
    """
    near = (sqrt(curvature[-1] / (2 * curvature[0])),)
    left, right = (partial(_descended, curvature, start, RATE, 0) for start in (near, FLATTEST))
    return 0.5, measured(lambda: left() / right())


@claim("C-probability/ours", "<=", attack=proximity_domains.UNION, overlooks="tightened")
def _(models=2, curvature=MIXED, near=NEAR):
    """P(ρ > ½) ≤ n (2L/μ) E X E[1/Y], by a union over n models

    n never matters, since Markov's inequality for the mean of X over models works without it.

    Source: Appendix C.2 (pp. 24-25), quantified
    Domain: n={models}, d=4, curvatures {curvature}, τ={near}
    """
    condition = curvature[0] / curvature[-1]
    bound = models * proximity.tail_bound(2 * condition * near**2, 4)
    return bound, _half(curvature, models)


@claim("C-probability-one/ours")
def _(near=NEAR):
    """With one model and equal curvatures ρ = X/Y, and P(ρ ≥ ½) is Theorem 1's tail at α = ½

    Source: Appendix C.2 (pp. 24-25), solved
    Domain: d=4, curvature 1, τ={near}
    """
    return proximity.tail(2 * near**2, 4), _half((1.0,) * 4, 1)


@claim("C-last/printed", "<=", attack=proximity_domains.HALF_PRINTED)
def _printed_half(best=1.0, excess=0.5):
    """J(θ^P) - J* ≤ ½ J(θ_rand) - J*

    Parentheses are missing.

    Source: Appendix C.2 (pp. 24-25), after the bound of ρ
    Domain: J* = {best:g}, excess {excess} of θ_rand, half of it of θ^P
    """
    return (best + excess) / 2 - best, measured(
        lambda: _descended((1.0,), (sqrt(excess),), FAST, 0)
    )


@_printed_half.beside("corrected", attack=proximity_domains.HALF)
def _(best, excess):
    """J(θ^P) - J* ≤ ½ (J(θ_rand) - J*)"""
    return (best + excess - best) / 2


@claim("P1/ours")
def _(plane=(0.05, 1.0), flat=(0.1, 0.0), steep=(0.0, 1.0), rate=FAST, late=10):
    """A nearer start may be worse later, as ρ = Σ h(1-ηh)^{{2T}} e² / Σ h(1-ηh)^{{2T}} e'²

    The tolerance is 1e-12 of a ratio of 1e4 to 1e5. At T = 0, ρ = 5e-4.

    Source: Proposition 1 (p. 2), which proposes a smaller loss at T = 0
    Domain: curvatures {plane}, η={rate}, starts {flat} and {steep}, T={late}
    """
    predicted = compiled(descent.excess_ratio, *map(np.array, (plane, flat, steep)), rate, late)
    near, far = (partial(_descended, plane, e, rate, late) for e in (flat, steep))
    return predicted, measured(lambda: near() / far(), 1e-7)
