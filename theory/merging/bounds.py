"""The bounds of unified merging (arXiv 2601.21690), as printed and repaired, from constants alone.

Nothing here knows the loss: give the constants of an exact testbed, or measured ones.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.merging.tasks import Training, Weights
from theory.problems import check

Form = Literal["printed", "corrected"]


class Constants(NamedTuple):
    """Of the losses, in the units of the parameters. smoothness L of every sample's loss
    (Assumption 1); pl C with f - inf f <= C |grad f|^2 (Assumption 5), 1 / (2 mu) under
    Polyak-Lojasiewicz; variance sigma_i^2 of one sample's gradient about grad f_i (Assumption 2);
    heterogeneity zeta_i^2 >= |grad f_i - grad f|^2 (Assumption 3), f the plain mean of the tasks;
    gap f~(start) - inf f~ of the surrogate f~ = sum_i w_i f_i."""

    smoothness: Float[ArrayLike, ""]
    pl: Float[ArrayLike, ""]
    variance: Float[ArrayLike, " #N"]
    heterogeneity: Float[ArrayLike, " #N"]
    gap: Float[ArrayLike, ""]


class Bound(NamedTuple):
    """stability of the merged model (Theorem 1); surrogate: |grad f~|^2 (Theorem 2, eps_sgd);
    gradient: |grad f|^2 (eq. 7); sample_gradient: what Lemma 1 divides by 2 gamma; excess at the
    gamma asked for; gamma: where the least is; least: the excess there."""

    stability: Float[Array, ""]
    surrogate: Float[Array, ""]
    gradient: Float[Array, ""]
    sample_gradient: Float[Array, ""]
    excess: Float[Array, ""]
    gamma: Float[Array, ""]
    least: Float[Array, ""]


def excess_risk_bound(
    constants: Constants,
    training: Training,
    *,
    form: Form = "printed",
    gamma: ArrayLike = 1.0,
    coefficient: float = 5.0,
    convex: bool = True,
) -> Bound:
    """(L + gamma)/2 stability + sample_gradient / (2 gamma) + C gradient, and its parts.

    "printed": Theorem 3, at gamma = 1 as there; not a bound, since Lemma 1 and Theorems 1 and 2 are
    not. `coefficient` of the term in A_3: 5 (Theorem 2), 12 (Corollary 2, Theorem 4).

    "corrected": holds for quadratics of one curvature and rates <= 1 / L. Lemma 1 with gradients of
    samples, `local_stability`, `surrogate_gradient`, and eq. 7 with the chi-square divergence.
    Needs two samples a task. `convex`: False for the factor exp(2 rate L K) of other losses, where
    sigma has to bound the gradients of samples all along the way; the gradient's part holds for
    quadratics all the same.
    """
    if form not in get_args(Form):
        raise ValueError(f"form must be one of {get_args(Form)}; got {form!r}")
    check("gamma", gamma, lambda x: (x > 0) & (x < jnp.inf), "finite and > 0")
    L, C, variance, zeta2, _ = _checked(constants, training)
    w, N = training.weights, training.weights.size
    if form == "printed":
        local = local_stability(constants, training, form=form)
        stability = jnp.sum(w * local)
        surrogate = surrogate_gradient(constants, training, form=form, coefficient=coefficient)
        chi = chi_square(w, form=form)
        gradient = 2 * (chi + 1) * surrogate + 2 * _times(chi, jnp.sum(w * zeta2))
        sample = gradient
    else:
        local = local_stability(constants, training, form=form, convex=convex)
        stability = jnp.sum(w**2 * local) / N
        surrogate = surrogate_gradient(constants, training, form=form)
        chi = chi_square(w, form=form)
        gradient = 2 * surrogate + 2 * _times(chi, jnp.sum(w * zeta2))
        sample = gradient + jnp.mean(zeta2 + variance)
    gamma = jnp.asarray(gamma, float)
    excess = (L + gamma) / 2 * stability + sample / (2 * gamma) + C * gradient
    best = jnp.sqrt(sample / stability)
    least = L / 2 * stability + jnp.sqrt(sample * stability) + C * gradient
    return Bound(stability, surrogate, gradient, sample, excess, best, least)


def local_stability(
    constants: Constants, training: Training, *, form: Form = "printed", convex: bool = True
) -> Float[Array, " N"]:
    """E|x_i - x_i'|^2 of an expert, one of its samples replaced.

    "printed": 16 K rate^2 (sigma^2 + 3 b zeta^2) / n, Lemma 3, violated from K of about 8 n on.
    "corrected": 2 sigma^2 ((rate K)^2 / (n (n - 1)) + rate^2 K / (b n)) for convex losses and
    rates <= 2 / L, the same batches for both; in general times exp(2 rate L K). Why n (n - 1):
    sigma^2 is about the mean of n samples, and two of a task differ by 2 sigma^2 n / (n - 1).
    """
    L, _, variance, zeta2, _ = _checked(constants, training)
    n, k, b = training.samples, training.steps, training.batch
    if form == "printed":
        return 16 * k * training.rate**2 * (variance + 3 * _times(b, zeta2)) / n
    check("samples", n, lambda x: x >= 2, ">= 2 (one sample has no variance within its data)")
    growth = 1.0 if convex else jnp.exp(2 * training.rate * L * k)
    return 2 * variance * training.rate**2 * growth * (k**2 / (n * (n - 1)) + k / (b * n))


def surrogate_gradient(
    constants: Constants,
    training: Training,
    *,
    form: Form = "printed",
    coefficient: float = 5.0,
) -> Float[Array, ""]:
    """E|grad f~|^2 at the merged model.

    "printed": eps_sgd of eq. 6, for the rate sqrt(N / mean K) only; there it fails unless
    L sqrt(N mean K) <= 1/8, and says nothing then (its first term is at least 16 |grad f~(x_0)|^2).
    "corrected": (1 - rate / 2C)^(2 min K) (2 L gap + sum_i w_i zeta_i^2) + rate L sum_i w_i^2
    sigma_i^2 / b_i, for quadratics of one curvature, rate <= 1 / L.
    """
    L, C, variance, zeta2, gap = _checked(constants, training)
    w, k, b, N = training.weights, training.steps, training.batch, training.weights.size
    if form == "printed":
        mean, noise = k.mean(), variance.max() / b.min()
        a1 = N * jnp.sum(mean / k * w**2)
        a2 = jnp.sum(w * (k - 1))
        a3 = jnp.max(k * (k - 1))
        root = jnp.sqrt(N * mean)
        return (
            4 * gap / root
            + 4 * L * noise * a1 / root
            + 6 * N * L**2 * noise * a2 / mean
            + coefficient * N * L**2 * zeta2.max() * a3 / mean
        )
    check("rate * L", training.rate * L, lambda x: x <= 1 + 1e-6, "at most 1")
    left = jnp.exp(2 * k.min() * jnp.log1p(-jnp.minimum(training.rate / (2 * C), 1.0)))
    noise = jnp.sum(w**2 * variance / b) * training.rate * L
    return left * (2 * L * gap + jnp.sum(w * zeta2)) + noise


def chi_square(weights: Weights, *, form: Form = "corrected") -> Float[Array, ""]:
    """Of uniform p from the weights: sum (p - w)^2 / w. "printed" divides by w^2, which is at least
    as large for weights <= 1 and no divergence; inf where a weight is 0.

    >>> [round(float(chi_square([0.9, 0.1], form=form)), 2) for form in ("corrected", "printed")]
    [1.78, 16.2]
    """
    w = jnp.asarray(weights, float)
    return jnp.sum((1 / w.size - w) ** 2 / w ** (2 if form == "printed" else 1))


def _times(a: Array, b: Array) -> Array:
    """0 inf = 0: a weight of 0, or a batch of all samples, beside no heterogeneity."""
    return jnp.where(b == 0, 0.0, a * jnp.where(b == 0, 1.0, b))


def _checked(constants: Constants, training: Training) -> tuple[Array, ...]:
    for name, value in constants._asdict().items():
        least = (lambda x: x > 0) if name in ("smoothness", "pl") else (lambda x: x >= 0)
        check(name, value, least, "> 0" if name in ("smoothness", "pl") else ">= 0")
    n = training.weights.shape
    L, C, *per_task, gap = (jnp.asarray(x, float) for x in constants)
    for name, value in zip(("variance", "heterogeneity"), per_task, strict=True):
        if value.shape not in ((), (1,), n):
            raise ValueError(f"{name} must have one entry per task, {n[0]}; got {value.shape}")
    return (L, C, *(jnp.broadcast_to(x, n) for x in per_task), gap)
