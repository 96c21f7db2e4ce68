"""Several sources, beyond features-are-fate, and when their best weights equal SAIL's.

The simulator (`several`) fits every source, fine-tunes from it by least squares, and finds weights
by least squares over all draws. It does not use the moments of the closed forms.
"""

from math import pi

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sail_jax.proximal import affine_weights, gram_from_distances
from theory import claims
from theory.claims import Estimate, generator, once
from theory.deep_linear import risks, sources, sources_domains
from theory.deep_linear.regressions import PAPER, extrapolate
from theory.deep_linear.several import Inputs, Missed, Samples, Several

D, TIMES = 16, 3  # limits are extrapolated from d = 16 and 48
BEYOND = f"beyond {PAPER}: Thm 3.9, L=1, from fitted sources"


def moments(problem: Several, d: int, *, exact: bool = True) -> list[sources.Fit]:
    """Computes the moments of a problem's sources, from Wishart matrices or from the equivalents.

    Args:
      problem: The problem.
      d: Its dimension.
      exact: Whether to use Wishart matrices.

    Returns:
      The moments.
    """
    found = []
    for source, task in zip(problem.sources, problem.tasks(d), strict=True):
        task, n = jnp.asarray(task), source.count(d)
        inputs = jnp.asarray(source.inputs.covariance(d))
        if exact:
            white = source.inputs == Inputs()
            found.append(
                sources.wishart_fit(task, n=n, sigma=source.sigma, inputs=None if white else inputs)
            )
        else:
            found.append(
                sources.ridge_fit(inputs, task, n=n, sigma=source.sigma, ridge=source.ridge)
            )
    return found


def target(problem: Several) -> tuple[Array, Array, int]:
    """Returns the target's task, the covariance of its inputs, and the number of its samples."""
    inputs = jnp.asarray(problem.inputs.covariance(D))
    return jnp.asarray(problem.target(D)), inputs, round(problem.load * D)


# --- how to weigh them ----------------------------------------------------------------------------

THREE = Several(
    (Samples(1.5, 0.5, 0.3), Samples(2.5, 1.0, 0.8, way=1), Samples(0.5, 0.3, 0.5)),
    load=0.5,
    sigma=0.5,
)
PLACE = f"d={D}; n_s=24, 40, 8; σ_s=.5, 1, .3; angles .3, .8, .5"
TUNED = f"{PLACE}; n=8, σ=.5"


@once
def _weighed(key: Array, quick: bool) -> tuple[Missed, Missed]:
    return THREE.draw(generator(key), D, 1_500 if quick else 15_000)


def _mixture(problem: Several = THREE) -> sources.Mixture:
    return sources.best_weights(moments(problem, D), target(problem)[0])


@claims.claim(
    PAPER, "sources-weight-{i}/ours", effect=0.02, draws=f"{PAPER}/sources", each=((1,), (2,), (3,))
)
def _(i):
    """For b_0 = Σ a_s b_s of least E|b_0 - β_t|², a_{i} solves G a = g with G_st = E b_s·b_t and
    g_s = E b_s·β_t

    The test detects .02 of weights from .09 to .47.

    Source: {BEYOND}
    Domain: {PLACE}
    """
    return _mixture().weights[i - 1], lambda *how: _weighed(*how)[0].best()[0][i - 1]


@claims.claim(PAPER, "sources-risk/ours", draws=f"{PAPER}/sources")
def _():
    """The least E|b_0 - β_t|² over all weights is |β_t|² - gᵀG⁻¹g

    Source: {BEYOND}
    Domain: {PLACE}
    """
    return _mixture().risk, lambda *how: _weighed(*how)[0].best()[1]


@claims.claim(
    PAPER, "sources-tuned-weight-{i}/ours", effect=0.02, draws=f"{PAPER}/sources", each=((1,), (3,))
)
def _(i):
    """For isotropic inputs the best weights a_{i} after fine-tuning equal those before it

    The test detects .02.

    Source: {BEYOND}
    Domain: {TUNED}
    """
    return _mixture().weights[i - 1], lambda *how: _weighed(*how)[1].best()[0][i - 1]


@claims.claim(PAPER, "sources-tuned-risk/ours", draws=f"{PAPER}/sources")
def _():
    """The least risk after fine-tuning is (1 - n/d)(|β_t|² - gᵀG⁻¹g) + σ²n/(d-n-1)

    Source: {BEYOND}
    Domain: {TUNED}
    """
    n = target(THREE)[2]
    noise = risks.scratch_risk(n=n, d=D, sigma=THREE.sigma) - (1 - n / D)
    return (1 - n / D) * _mixture().risk + noise, lambda *how: _weighed(*how)[1].best()[1]


# --- where they meet SAIL's -----------------------------------------------------------------------

PROXIMAL = "Theorem 3, eq. (12) (p. 6), at expected distances"


def _proximal(problem: Several) -> np.ndarray:
    """Computes SAIL's weights at expected squared distances."""
    found = sources.expected_distances(moments(problem, D), target(problem)[0])
    return affine_weights(gram_from_distances(*map(np.asarray, found), squared=True)).weights


@claims.claim("sail", "T3-expected/ours", draws=f"{PAPER}/sources")
def _():
    """With H of E d_i*² and E d_ij², w = H⁻¹e / eᵀH⁻¹e are the weights of sum 1 with the least
    E|Σw_i θ_i - θ*|²

    The models are fitted. With measured distances the same holds for each draw.

    Source: {PROXIMAL}
    Domain: {PLACE}
    """

    return _proximal(THREE)[0], lambda *how: _weighed(*how)[0].best(affine=True)[0][0]


ALIKE = Several((Samples(2.0, 0.5, pi / 3), Samples(0.5, 0.3, 0.0), Samples(1.5, 0.4, pi / 3, 1)))


@claims.claim("sail", "T3-bridge/ours", effect=0.02)
def _():
    """If E θ_i·θ* = c for all i, the best weights of any sum are ρw with ρ = c / E|Σw_i θ_i|²

    This holds only then, unless their sum is 1 anyway. The test detects .02 of .16.

    Source: {PROXIMAL}, and features-are-fate beyond: several sources
    Domain: d={D}; n_s=32, 8, 24; σ_s=.5, .3, .4; E θ_i·θ* = |θ*|²/2
    """
    weights = _proximal(ALIKE)
    left = sources.start_moments(moments(ALIKE, D), weights, target(ALIKE)[0])
    overlap = 0.5
    size2 = jnp.trace(left) - 1 + 2 * overlap  # |m|^2 = |m - θ*|^2 - |θ*|^2 + 2 m.θ*

    def simulate(key: Array, quick: bool) -> Estimate:
        missed, _ = ALIKE.draw(generator(key), D, 1_000 if quick else 10_000)
        return missed.best()[0][0]

    return overlap / size2 * weights[0], simulate


NEAR = Several((Samples(1.5, 0.3, 0.0), Samples(2.0, 0.6, 0.0), Samples(3.0, 0.6, 0.0)))


@once
def _near(key: Array, quick: bool) -> Missed:
    return NEAR.draw(generator(key), D, 1_000 if quick else 10_000)[0]


@claims.claim("sail", "T3-precision-{i}/ours", draws="sail/T3-precision", each=((1,), (3,)))
def _(i):
    """For independent models without bias w_{i} ∝ 1 / E d_i*², with E d_i*² = σ_i² d/(n_i - d - 1)

    These are inverse variances. The nearer a model is, the larger its weight.

    Source: {PROXIMAL}
    Domain: d={D}; n_s=24, 32, 48; σ_s=.3, .6, .6; sources of the target's task
    """
    counts = np.array([s.count(D) for s in NEAR.sources])
    noise = np.array([s.sigma for s in NEAR.sources])
    precision = (counts - D - 1) / (noise**2 * D)

    def simulate(key: Array, quick: bool) -> Estimate:
        # Weights of sum 1 determine the last one without an error of its own. Each is therefore
        # searched for as the first.
        missed = _near(key, quick)
        order = [i - 1, *(j for j in range(3) if j != i - 1)]
        return Missed(missed.rest, missed.parts[:, order]).best(affine=True)[0][0]

    return precision[i - 1] / precision.sum(), simulate


PAIRS = Several((Samples(1.5, 0.3, 0.0),) * 2 + (Samples(1.5, 0.9, 0.0),) * 2)


@claims.claim("sail", "T3-uniform/ours", "<=", attack=sources_domains.UNIFORM)
def _(kappa=9.0):
    """For independent models without bias equal weights have at most (κ+1)²/4κ times the error of
    the best weights, κ = max E d_i*² / min E d_i*²

    This is Kantorovich's inequality. It is attained with half of the models of each kind.

    Source: {PROXIMAL}
    Domain: d={D}; n_s=24; σ_s=.3, .3, .9, .9: κ=9
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        missed, _ = PAIRS.draw(generator(key), D, 1_000 if quick else 10_000)
        weights, _ = missed.best(affine=True)
        best = missed.risks([w.value for w in weights])
        equal = missed.risks(np.full(4, 0.25))
        ratio = equal.mean() / best.mean()
        error = Estimate.mean((equal - ratio * best) / best.mean()).stderr
        return Estimate(float(ratio), stderr=error)

    return (kappa + 1) ** 2 / (4 * kappa), simulate


# --- a covariance of its own ----------------------------------------------------------------------

DECAY = Inputs((1.0, 0.5, 0.25, 0.125))
TURNED = Inputs((1.0, 0.25, 1.0, 0.25), pi / 4)
OTHER = f"beyond {PAPER}: Thms 3.6-3.9 for any covariance, the source's and the target's"
SIZES = f"d={D} and {TIMES * D} extrapolated"
BOTH = "target: eigenvalues 1, 1/2, 1/4, 1/8; source: 1, 1/4, 1, 1/4, turned by 45°"


EXACT = (
    (
        "above",
        Samples(2.0, 0.5, 0.4, inputs=TURNED),
        f"{BOTH}; n_s=32, σ_s=.5, angle .4, d={D}",
        "For n_s ≥ d + 2, E|b_s - β_t|²_Σ = |β_s - β_t|²_Σ + σ_s² tr(Σ Σ_s⁻¹)/(n_s - d - 1)",
    ),
    (
        "below",
        Samples(0.5, 0.1, pi / 4),
        f"target: eigenvalues 1, 1/2, 1/4, 1/8; source: all 1, n_s=8, σ_s=.1, angle 45°, d={D}",
        "For n_s ≤ d - 2, E b_sb_sᵀ = (n_s/d - ud) β_sβ_sᵀ + (u|β_s|² + σ_s²n_s/d(d-n_s-1)) I",
    ),
)


@claims.claim(PAPER, "two-covariances-exact-{side}/ours", each=EXACT)
def _(side, source, where, text):
    """{text}

    Source: {OTHER}
    Domain: {where}
    """
    problem = Several((source,), inputs=DECAY)
    beta_t, inputs, _ = target(problem)
    to_target, _ = sources.expected_distances(moments(problem, D), beta_t, inputs)

    def simulate(key: Array, quick: bool) -> Estimate:
        missed, _ = problem.draw(generator(key), D, 500 if quick else 5_000)
        return Estimate.mean(missed.risks([1.0]))

    return to_target[0], simulate


def _after(problem: Several) -> Array:
    """Computes the risk of one source by the equivalents, fine-tuned if load > 0."""
    beta_t, inputs, n = target(problem)
    left = sources.start_moments(moments(problem, D, exact=False), jnp.ones(1), beta_t)
    return (
        sources.tuned_risk(inputs, left, n=n, sigma=problem.sigma)
        if n
        else jnp.trace(inputs @ left)
    )


def _limit(problem: Several, draws: tuple[int, int]) -> claims.Simulate:
    """Extrapolates the risk of one source, fine-tuned if there are target samples."""

    def simulate(key: Array, quick: bool) -> Estimate:
        rng = generator(key)
        means = [
            Estimate.mean(problem.draw(rng, d, count // 10 if quick else count)[1].risks([1.0]))
            for d, count in zip((D, TIMES * D), draws, strict=True)
        ]
        return extrapolate(*means, times=TIMES)

    return simulate


for _effect, *_case in (
    (
        0.05,
        "start",
        Several((Samples(0.625, 0.5, 0.4, inputs=TURNED),), inputs=DECAY),
        (4_000, 4_000),
        "n_s=.625 d, σ_s=.5, angle .4",
        "E|b_s - β_t|²_Σ → |Aβ_s - β_t|²_Σ + tr(ΣA²Σ_s⁻¹)(R_s+σ_s²)/n_s, A=Σ_s/(Σ_s+κ)",
    ),
    (
        None,
        "ridge",
        Several((Samples(0.625, 0.5, 0.4, inputs=TURNED, ridge=0.2),), inputs=DECAY),
        (8_000, 2_000),
        "n_s=.625 d, σ_s=.5, λ=.2, angle .4",
        "The same holds with a ridge λ = κ_s(1 - df₁/n_s)",
    ),
    (
        None,
        "tuned",
        Several((Samples(0.625, 0.5, 0.4, inputs=TURNED, ridge=0.2),), 0.5, 0.3, DECAY),
        (12_000, 4_000),
        "n_s=.625 d, σ_s=.5, λ=.2, angle .4; n=.5 d, σ=.3",
        "Fine-tuning from b_s has E R → [κ² tr(Σ(Σ+κ)⁻² D) + σ²df₂/n]/(1 - df₂/n), D of b_s",
    ),
):

    @claims.claim(PAPER, "two-covariances-{name}/ours", effect=_effect, each=(tuple(_case),))
    def _(name, problem, draws, place, text):
        """{text}

        The test detects 5 %, or .05 of the fit of least norm.

        Source: {OTHER}
        Domain: {BOTH}; {place}; {SIZES}
        """
        return _after(problem), _limit(problem, draws)


# The first source has learned the directions that matter most to the target, and the second the
# others.
PAIR = Several(
    tuple(
        Samples(0.625, 0.3, 0.4, way, Inputs(eigenvalues))
        for way, eigenvalues in enumerate(((1.0, 1.0, 0.1, 0.1), (0.1, 0.1, 1.0, 1.0)))
    ),
    0.5,
    0.3,
    DECAY,
)


@once
def _pair(key: Array, quick: bool) -> list[Estimate]:
    """Searches for the first weight with the smallest risk, before and after fine-tuning."""
    rng, counts = generator(key), (600, 600) if quick else (6_000, 6_000)
    sizes = [PAIR.draw(rng, d, n) for d, n in zip((D, TIMES * D), counts, strict=True)]
    whens = zip(*sizes, strict=True)
    return [extrapolate(*(m.best()[0][0] for m in when), times=TIMES) for when in whens]


@claims.claim(
    PAPER,
    "two-covariances-weight-{when}/ours",
    effect=0.05,
    draws=f"{PAPER}/two-covariances-weight",
    each=(("before", "before fine-tuning, Q = Σ"), ("after", "after it, Q ∝ Σ(Σ+κ)⁻²")),
)
def _(when, text):
    """The weight of least risk of the first source, {text}

    The weights are .53 and .41. For anisotropic inputs the best weight before fine-tuning is not
    the best one after it. The test detects .05.

    Source: {OTHER}
    Domain: sources: eigenvalues 1, 1, .1, .1 and .1, .1, 1, 1, n_s=.625 d; target: 1, 1/2, 1/4,
      1/8, n=.5 d; {SIZES}
    """
    beta_t, inputs, n = target(PAIR)
    metric = inputs if when == "before" else sources.tuned_metric(inputs, n)
    found = sources.best_weights(moments(PAIR, D, exact=False), beta_t, metric)
    return found.weights[0], lambda *how: _pair(*how)[when == "after"]
