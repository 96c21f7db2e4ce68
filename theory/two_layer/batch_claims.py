"""Overtrained, Lemmas A.12 to A.22: finite batches and real starts against the ideal dynamics.

Simulators are stochastic gradient descent of the network by autodiff.
"""

from functools import cache, partial
from math import ceil, log, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory.claims import Estimate, Simulate, generator
from theory.two_layer import batch_domains, networks, step_domains
from theory.two_layer.layers import Layers, ideal, theta
from theory.two_layer.tasks import (
    BOTH,
    EVERY,
    GAMMA,
    PRE,
    STEPS,
    TARGET,
    D,
    at,
    claim,
    deterministic,
    distance2,
    fixed,
    task,
)

# In this many steps 1 + 16 eta Gamma = 1.154 and 1 + 32 eta Gamma = 1.307 grow to 17 and 211.
SGD = {"rate": 0.003, "steps": 20, "anchor": 0.5}
BATCH, SMALLER = 1024, 256
TRAINED = f"{BOTH}, λ={SGD['anchor']}, η={SGD['rate']}"
OFF = 1e-3  # |Sigma_k - I|. Lemma A.17 requires it to be < 1/(4 * 211)
NOISY = f"{TRAINED}, K={SGD['steps']}, |Σ_k - I|={OFF:g}"
APART = 1e-6  # of a start that is not ideal
GENERAL, SAMPLES = 500, 8  # layers in general position, and their batches


def _distance(first: Layers, second: Layers) -> float:
    """Computes the largest operator norm of the difference over layers and leading axes."""
    return max(
        float(np.linalg.norm(np.asarray(a) - np.asarray(b), 2, axis=(-2, -1)).max())
        for a, b in zip(first, second, strict=True)
    )


def _infinite_batch(steps: int = SGD["steps"]) -> Layers:
    start = ideal(task(), D)
    path = networks.descend(
        start,
        task(TARGET),
        SGD["rate"],
        STEPS,
        anchor=SGD["anchor"],
        anchored_to=theta(start),
        every=EVERY,
    )
    return at(path, steps // EVERY - 1)


@cache
def _batches(steps: int = SGD["steps"], off: float = OFF) -> Float[np.ndarray, "steps m i"]:
    """Returns batches of d inputs with the covariances I + off S_k, |S_k|_op = 1."""
    drawn = fixed(0, steps, D, D)
    drawn = drawn + drawn.swapaxes(1, 2)
    values, vectors = np.linalg.eigh(drawn)
    values = 1 + off * values / np.abs(values).max(1, keepdims=True)
    return sqrt(D) * np.sqrt(values)[:, :, None] * vectors.swapaxes(1, 2)


def _sgd(start: Layers, batches: np.ndarray) -> Layers:
    return networks.sgd(
        start, task(TARGET), jnp.asarray(batches), SGD["rate"], anchor=SGD["anchor"]
    )


def _other(apart: float = APART) -> Layers:
    """Returns a start near the ideal one."""
    noise = fixed(1, 2, D, D)
    return Layers(*(w + apart * z for w, z in zip(ideal(task(), D), noise, strict=True)))


def _growth(constant: float, steps: int = SGD["steps"]) -> float:
    return (1 + constant * SGD["rate"] * GAMMA) ** steps


def _epsilon() -> float:
    """Computes max_k |Sigma_k - I|, and checks that Lemmas A.17 and A.19 apply."""
    covariances = np.einsum("kmi,kmj->kij", _batches(), _batches()) / D
    epsilon = float(np.linalg.norm(covariances - np.eye(D), 2, axis=(1, 2)).max())
    if epsilon >= 1 / (4 * _growth(32)):
        raise RuntimeError("the batch is too small for Lemmas A.17 and A.19 to apply")
    return epsilon


def _pace() -> float:
    """Computes g / (eta Gamma) of the sharper bounds."""
    step = SGD["rate"] * GAMMA
    return batch_domains.pace(SGD["rate"], SGD["anchor"], GAMMA) / step


def _batch_bound(form: batch_domains.Form = "printed") -> float:
    """Computes the bound of Lemma A.17, its corrected form from the lemmas that hold, or ours."""
    if form == "printed":
        return 2 * _growth(16) * _epsilon() * sqrt(GAMMA)
    step, growth = (2, _pace()) if form == "ours" else (20, 26 * (1 + SGD["anchor"]))
    return step / growth * (_growth(growth) - 1) * _epsilon() * sqrt(GAMMA)


def _start_bound(form: batch_domains.Form = "printed") -> float:
    """Computes the bound of Lemma A.19 at the distance between these two starts. The corrected
    bound grows as in Lemma A.18, and each step adds 2 eta lambda |theta(0) - theta'(0)| |W| for the
    two anchors.
    """
    apart, anchor = _distance(ideal(task(), D), _other()), SGD["anchor"]
    if form == "printed":
        return _growth(32) * apart
    corrected = 16, 26 * (1 + _epsilon() + anchor)
    step, growth = (4, _pace()) if form == "ours" else corrected
    power = _growth(growth)
    return apart * (power + step * anchor / growth * (power - 1))


# Assumption A.21 with its item 3 as printed, without 1/eta.
RELAXED = 0.6  # lambda_0, above the anchor


def _near() -> float:
    """Computes min |sigma_pre - sigma_ft|^2 / ((lambda_0 + 1)^2 Gamma)."""
    return float(((np.array(TARGET) - PRE) ** 2).min() / ((1 + RELAXED) ** 2 * GAMMA))


# --- how large a batch has to be ------------------------------------------------------------------

# d, K, delta, epsilon, C_1
DIMENSION, BATCHES, FAILURE, GAP, CONSTANT = 4, 100, 0.05, 0.5, 6.0
SETTING = f"d={DIMENSION}, K={BATCHES}, δ={FAILURE}, ε={GAP}, C_1={CONSTANT:g}"
# Lemma A.12 is for m ≥ d + log(1/δ) = 7. The printed size 13 satisfies this.
PRINTED = ceil(CONSTANT**2 / GAP**2 * (DIMENSION - log(10 * BATCHES * FAILURE)))
CORRECTED = ceil(CONSTANT**2 / GAP**2 * (DIMENSION + log(2 * BATCHES / FAILURE)))
SUFFICIENT = 286  # the least size of which A.13-law bounds the probability by FAILURE


def _failures(batch: int) -> Simulate:
    """Estimates how often a covariance among `BATCHES` Gaussian batches is off by more than `GAP`.

    The covariances are drawn from their Wishart law, not batch by batch. The standard error is
    computed at the allowed probability, because possibly none fails. The claim fails if more than 7
    % of 2,000 draws fail (9 % of 500 in quick checks).
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        from scipy.stats import wishart  # slow to import

        draws = 500 if quick else 2_000
        law = wishart(batch, np.eye(DIMENSION) / batch)
        rng = generator(key)
        gaps = law.rvs(draws * BATCHES, rng) - np.eye(DIMENSION)
        sizes = np.abs(np.linalg.eigvalsh(gaps)).max(-1).reshape(draws, BATCHES)
        failed = (sizes.max(1) > GAP).mean()
        return Estimate(float(failed), stderr=sqrt(FAILURE * (1 - FAILURE) / draws))

    return simulate


@claim("A.13/printed", "<=", attack=step_domains.batch_size(False))
def _():
    """For m ≥ C_1²(d - log(10Kδ))/ε², P(max_k |Σ_k - I| > ε) ≤ δ

    The union bound over K steps enters with the wrong sign.

    Source: Lemmas A.12 and A.14, Assumption A.13 (Appendix A.3.2)
    Domain: {SETTING}: m={PRINTED}, at least Lemma A.12's d + log(1/δ)
    """
    return FAILURE, _failures(PRINTED)


@claim(
    "A.13/corrected",
    "<=",
    effect=0.04,
    attack=step_domains.batch_size(True),
    overlooks="tightened",
    sharper="A.13-law/ours",
)
def _():
    """For m ≥ C_1²(d + log(2K/δ))/ε², P(max_k |Σ_k - I| > ε) ≤ δ

    The test detects .04, failures of 9 % in place of 5 %. The search finds that it is not sharp.

    Source: Lemmas A.12 and A.14, Assumption A.13 (Appendix A.3.2)
    Domain: {SETTING}: m={CORRECTED}
    """
    return FAILURE, _failures(CORRECTED)


@claim("A.13-law/ours", "<=", effect=0.04, attack=step_domains.BATCH, overlooks="tightened")
def _():
    """P(max_k |Σ_k - I| > ε) ≤ K(a P(χ²_{{m+d-1}} > m(1+ε)) + b P(χ²_{{m-d+1}} < m(1-ε))) with
    a = √π Γ((m+d-1)/2)/(Γ(m/2)Γ(d/2)) and b = √π Γ((m+1)/2)/(Γ((m-d)/2+1)Γ(d/2))

    No constant is unknown. The corrected Assumption A.13 has m={CORRECTED} here.

    Source: Lemmas A.12 and A.14, Assumption A.13 (Appendix A.3.2), sharpened
    Domain: {SETTING}: m={SUFFICIENT}
    """
    each = step_domains.off_probability(SUFFICIENT, DIMENSION, GAP)
    return BATCHES * each, _failures(SUFFICIENT)


# --- one step -------------------------------------------------------------------------------------


@claim("A.15/exact", "<=", attack=step_domains.batch_step(32), overlooks="tightened")
def _step():
    """One step with a batch deviates by ≤ 32ηεΓ^(3/2)

    Source: Lemma A.15 (Appendix A.3.2)
    Domain: d={D}, |W|=2√Γ, Γ=η=1, batches of {SAMPLES}; the worst of {GENERAL} drawn networks
    """
    return 32 * _worst_step()[0], deterministic(lambda: _worst_step()[1])


@_step.beside("ours", attack=step_domains.batch_step(20), overlooks="tightened")
def _():
    """One step with a batch deviates by ≤ 20ηεΓ^(3/2)"""
    return 20 * _worst_step()[0]


for _lemma, _printed in (
    (("A.16", "A.3.2", 16, "1+λ", 1.0, 0.075, "The factors 2 and 1+λ are missing."), 16),
    (("A.18", "A.3.3", 32, "1+ϵ+λ", 3.0, 0.045, "No constant holds for every λ."), 32),
):

    @claim("{lemma}/printed", "<=", attack=step_domains.growth(_printed), each=(_lemma,))
    def _printed_growth(lemma, place, constant, sharp, anchor, rate, why, near=1e-3):
        """For |W_i| ≤ 2√Γ, ε_{{k+1}} ≤ (1+{constant}ηΓ) ε_k

        {why}

        Source: Lemma {lemma} (Appendix {place})
        Domain: d=1, W=±(2,-2)√Γ, ε_k={near}, A_target=Γ=1, Σ_k=1, λ={anchor:g}, η={rate}
        """

        def one_step() -> float:
            """Computes eps_1 of two one-dimensional networks (w, -w), `near` apart, after a step to
            A_target, by autodiff. The batch covariance is 1.
            """
            one = jnp.ones((1, 1))
            starts = (Layers(w * one, -w * one) for w in (2.0, 2.0 - near))
            how = {"anchor": anchor, "anchored_to": one, "every": 1}
            return _distance(*(networks.descend(start, one, rate, 1, **how) for start in starts))

        return (1 + constant * rate) * near, deterministic(one_step)

    @_printed_growth.beside("corrected", attack=step_domains.growth(), overlooks="tightened")
    def _(sharp, anchor, rate, near):
        """For |W_i| ≤ 2√Γ, ε_{{k+1}} ≤ (1+26η({sharp})Γ) ε_k

        The search finds that it is not sharp. 26 is at least 1.5 times the largest value found.
        """
        return (1 + 26 * rate * (1 + anchor)) * near


# --- many steps -----------------------------------------------------------------------------------


@claim(
    "A.17/open",
    "<=",
    attack=batch_domains.batches("printed"),
    overlooks="tightened",
    sharper="A.17/ours",
)
def _noisy_path():
    """For ϵ < 1/(4(1+16ηΓ)^K), |Ŵ(k) - W̄(k)|_op ≤ 2(1+16ηΓ)^k ϵ√Γ

    It holds here, but its proof rests on Lemma A.16, which is wrong.

    Source: Lemma A.17 (Appendix A.3.2)
    Domain: {NOISY}
    """
    return _batch_bound(), deterministic(
        lambda: _distance(_sgd(ideal(task(), D), _batches()), _infinite_batch())
    )


@_noisy_path.beside(
    "corrected",
    attack=batch_domains.batches("corrected"),
    overlooks="tightened",
    sharper="A.17/ours",
)
def _():
    """|Ŵ(k) - W̄(k)|_op ≤ 20((1+g)^k - 1) ηϵΓ^(3/2)/g with g = 26η(1+λ)Γ, where this is ≤ √Γ

    The search finds that it is not sharp but 10 times too large. Growth never matters.
    """
    return _batch_bound("corrected")


@_noisy_path.beside("ours", attack=batch_domains.batches("ours"), overlooks="tightened")
def _():
    """As ϵ → 0, |Ŵ(k) - W̄(k)|_op ≤ 2((1+g)^k - 1) ηϵΓ^(3/2)/g with g = 2ηΓ + c/(2(1-c)) and
    c = η(1+λ)Γ

    Growth never matters in a dozen steps.

    Source: Lemma A.17 (Appendix A.3.2), sharpened
    """
    return _batch_bound("ours")


@claim(
    "A.19/open",
    "<=",
    attack=batch_domains.starts("printed"),
    overlooks="tightened",
    sharper="A.19/ours",
)
def _apart():
    """|W(k) - W̄(k)|_op ≤ (1+32ηΓ)^k e^(-Cτ), where e^(-Cτ) is the distance of the starts

    It holds here, but its proof rests on Lemma A.18, which is wrong, and on equal anchors.

    Source: Lemma A.19 (Appendix A.3.3)
    Domain: {NOISY}, starts {APART:g} apart by entry, each anchored to itself
    """
    return _start_bound(), deterministic(
        lambda: _distance(_sgd(ideal(task(), D), _batches()), _sgd(_other(), _batches()))
    )


@_apart.beside(
    "corrected",
    attack=batch_domains.starts("corrected"),
    overlooks="tightened",
    sharper="A.19/ours",
)
def _():
    """|W(k) - W̄(k)|_op ≤ ((1+g)^k (1+h) - h) e^(-Cτ) with g = 26η(1+ϵ+λ)Γ and h = 16ηλΓ/g

    The search finds that it is not sharp but 13 times too large. h (two anchors) never matters.
    """
    return _start_bound("corrected")


@_apart.beside("ours", attack=batch_domains.starts("ours"), overlooks="tightened")
def _():
    """As ϵ and e^(-Cτ) → 0, |W(k) - W̄(k)|_op ≤ ((1+g)^k (1+h) - h) e^(-Cτ) with the g of A.17/ours
    and h = 4ηλΓ/g

    The search comes within 1.2 x, and one instance within 2 %. h (two anchors) never matters.

    Source: Lemma A.19 (Appendix A.3.3), sharpened
    """
    return _start_bound("ours")


@claim(
    "A.20/open",
    "<=",
    without={"e^(-Cτ)": _batch_bound, "ϵ": _start_bound},
    attack=batch_domains.both("printed"),
    overlooks="tightened; without e^(-Cτ); without ϵ",
    sharper="A.20/ours",
)
def _both():
    """|W(k) - Ŵ(k)|_op ≤ (1+32ηΓ)^k e^(-Cτ) + 2(1+16ηΓ)^k ϵ√Γ

    It holds here, but its proof rests on Lemmas A.16 and A.18, which are wrong.

    Source: Lemma A.20 (Appendix A.3.4)
    Domain: {NOISY}, starts {APART:g} apart by entry
    """
    return _start_bound() + _batch_bound(), deterministic(
        lambda: _distance(_sgd(_other(), _batches()), _infinite_batch())
    )


@_both.beside(
    "corrected",
    without={
        "e^(-Cτ)": partial(_batch_bound, "corrected"),
        "ϵ": partial(_start_bound, "corrected"),
    },
    attack=batch_domains.both("corrected"),
    overlooks="tightened; without e^(-Cτ); without ϵ",
    sharper="A.20/ours",
)
def _():
    """|W(k) - Ŵ(k)|_op is at most the sum of the corrected bounds of Lemmas A.17 and A.19

    The search finds that it is not sharp but 11 times too large.
    """
    return _start_bound("corrected") + _batch_bound("corrected")


@_both.beside(
    "ours",
    without={"e^(-Cτ)": partial(_batch_bound, "ours"), "ϵ": partial(_start_bound, "ours")},
    attack=batch_domains.both("ours"),
    overlooks="tightened; without e^(-Cτ)",
)
def _():
    """As ϵ and e^(-Cτ) → 0, |W(k) - Ŵ(k)|_op is at most the sum of A.17/ours and A.19/ours

    Source: Lemma A.20 (Appendix A.3.4), sharpened
    """
    return _start_bound("ours") + _batch_bound("ours")


@claim("A.22-bound/open", "<=", attack=batch_domains.PRODUCT, overlooks="tightened")
def _():
    """|θⁿ(k) - θ̂ⁿ(k)|_F ≤ min|σ_pre-σ_ft|²/(1000(λ_0+1)²Γ)

    It holds here, but its proof rests on Lemma A.20, which is wrong.

    Source: Lemma A.22 and Assumption A.21 (Appendix A.3.4)
    Domain: {TRAINED}, λ_0={RELAXED}, K as in item 3, ϵ .9 of its largest, |Σ_k - I| = ϵ/(1+32ηΓ)^K
    """

    def real_product() -> float:
        """Trains with batches and a start as close as Assumption A.21 requires."""
        epsilon = 0.9 * _near() / (4000 * D * GAMMA)
        least = log(100 * GAMMA / epsilon) / min(*PRE, *TARGET)
        steps = ceil(least / EVERY) * EVERY
        shrunk = epsilon / _growth(32, steps)
        ends = (
            _sgd(_other(sqrt(GAMMA) * shrunk / (2 * D)), _batches(steps, shrunk)),
            _infinite_batch(steps),
        )
        real, limit = (np.asarray(theta(end)) for end in ends)
        return float(np.linalg.norm(real - limit))

    return _near() / 1000, deterministic(real_product)


@claim("A.22/ours", effect=0.4)
def _():
    """θ of stochastic gradient descent tends to the infinite batch as m^(-1/2). The order is
    compared

    The test detects .4, which separates m^(-1/2) from m^(-1/4) and m^(-1).

    Source: Lemmas A.20 and A.22 (Appendix A.3.4), sharpened
    Domain: {TRAINED}, K={SGD[steps]}, batch {BATCH}, against {SMALLER}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes log2 of the fall of the root mean square distance from the infinite batch as the
        batch grows, on independent batches.
        """
        start, limit, squares = ideal(task(), D), theta(_infinite_batch()), []
        rng = generator(key)
        for batch in (SMALLER, BATCH):
            drawn = (rng.normal(size=(SGD["steps"], batch, D)) for _ in range(20 if quick else 100))
            ends = (theta(_sgd(start, x)) for x in drawn)
            squares.append(np.array([distance2(end, limit) for end in ends]))
        logs = [np.log2(d2.mean()) / 2 for d2 in squares]
        variance = sum((d2.std(ddof=1) / d2.mean()) ** 2 / d2.size for d2 in squares)
        return Estimate(float(logs[0] - logs[1]), stderr=sqrt(variance) / (2 * log(2)))

    return 0.5 * log(BATCH / SMALLER) / log(2), simulate


@jax.jit
@jax.vmap
def _gradients(layers: Layers, target: Array, x: Array) -> tuple[Layers, Layers]:
    """Computes the gradients with a batch and with all data."""
    noisy = jax.grad(networks.batch_objective)(layers, x, target, 0.0, target)
    return noisy, jax.grad(networks.objective)(layers, target, 0.0, target)


def _worst_step() -> tuple[float, float]:
    """Returns epsilon and the deviation of one step of rate 1 from the infinite batch, Gamma = 1,
    for the network of `GENERAL` random ones with the largest ratio of deviation to epsilon.
    """
    drawn = fixed(2, 3, GENERAL, D, D)
    w1, w2, target = drawn / np.linalg.norm(drawn, 2, axis=(-2, -1), keepdims=True)
    x = fixed(3, GENERAL, SAMPLES, D)
    noisy, exact = _gradients(Layers(2 * w1, 2 * w2), target, x)
    covariance = np.einsum("nmi,nmj->nij", x, x) / SAMPLES
    epsilon = np.linalg.norm(covariance - np.eye(D), 2, axis=(1, 2))
    steps = [np.linalg.norm(a - b, 2, axis=(1, 2)) for a, b in zip(noisy, exact, strict=True)]
    deviation = np.maximum(*steps)
    worst = (deviation / epsilon).argmax()
    return float(epsilon[worst]), float(deviation[worst])
