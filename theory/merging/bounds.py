"""The bounds of the merging theory, as printed and as corrected, computed from constants.

The loss enters only through constants, from an exact testbed (`quadratic.constants`) or measured
(`measure`). The paper is Li et al., A Unified Generalization Framework for Model Merging, 2026
(arXiv 2601.21690).
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory.merging.tasks import Training, Weights
from theory.problems import check, defined, log1p

Form = Literal["printed", "corrected"]


class Constants(NamedTuple):
    """Constants of the losses that the bounds require, in the units of the parameters.

    f_i is the empirical risk of task i, f = mean_i f_i, and f~ = sum_i w_i f_i is the surrogate.

    Attributes:
      smoothness: L, a Lipschitz constant of the gradient of every sample's loss (Assumption 1).
      pl: C with f - inf f <= C |grad f|^2 (Assumption 5); 1 / (2 mu) under the Polyak-Lojasiewicz
        condition.
      variance: sigma_i^2, the variance of one sample's gradient about grad f_i (Assumption 2), one
        number or one per task.
      heterogeneity: zeta_i^2 >= |grad f_i - grad f|^2 (Assumption 3), one number or one per task.
      gap: f~(start) - inf f~.
    """

    smoothness: Float[ArrayLike, ""]
    pl: Float[ArrayLike, ""]
    variance: Float[ArrayLike, " #N"]
    heterogeneity: Float[ArrayLike, " #N"]
    gap: Float[ArrayLike, ""]


class Bound(NamedTuple):
    """A bound on the excess risk, with its parts.

    Attributes:
      stability: Bound on the merged model's stability (Theorem 1).
      surrogate: Bound on |grad f~|^2 (Theorem 2, eps_sgd).
      gradient: Bound on |grad f|^2 (eq. 7).
      sample_gradient: Bound on the term that Lemma 1 divides by 2 gamma.
      excess: Bound on the excess risk at the given gamma.
      gamma: The gamma with the smallest bound.
      least: The bound at this gamma.
    """

    stability: Float[Array, ""]
    surrogate: Float[Array, ""]
    gradient: Float[Array, ""]
    sample_gradient: Float[Array, ""]
    excess: Float[Array, ""]
    gamma: Float[Array, ""]
    least: Float[Array, ""]


@defined
def excess_risk_bound(
    constants: Constants,
    training: Training,
    *,
    form: Form = "printed",
    gamma: ArrayLike = 1.0,
    coefficient: float = 5.0,
    convex: bool = True,
) -> Bound:
    """Computes a bound on the excess risk of a merged model, and its parts.

        (L + gamma) / 2 stability + sample_gradient / (2 gamma) + C gradient

    Form "printed" is Theorem 3, which has gamma = 1. It is not a bound, because Lemma 1 and
    Theorems 1 and 2 are not bounds.

    Form "corrected" holds for quadratics of one curvature and rates <= 1 / L, with at least two
    samples per task. It combines Lemma 1 with gradients of samples, `local_stability`,
    `surrogate_gradient`, and eq. (7) with the chi-square divergence.

    Args:
      constants: Constants of the losses.
      training: The training and merging of the experts.
      form: "printed" or "corrected".
      gamma: The free parameter of Lemma 1, finite and > 0.
      coefficient: Coefficient of the term in A_3, 5 (Theorem 2) or 12 (Corollary 2, Theorem 4).
        Only for "printed".
      convex: Whether the losses are convex. False multiplies the stability by exp(2 rate L K).
        sigma_i^2 must then bound the variance along the whole path, and the part of the gradient
        still holds only for quadratics. Only for "corrected".

    Returns:
      The bound and its parts, scalars.

    Raises:
      ValueError: If `form` is unknown, an argument is out of range, or the number of entries of a
        constant differs from the number of tasks.

    References:
      Li et al., 2026 (arXiv 2601.21690), Theorems 1 to 3, Lemma 1, eq. (7).

    >>> constants = Constants(smoothness=1.0, pl=0.5, variance=1.0, heterogeneity=0.0, gap=1.0)
    >>> training = Training.of(samples=100, steps=10, batch=4, rate=0.1, tasks=2)
    >>> bound = excess_risk_bound(constants, training, form="corrected")
    >>> bool(bound.least <= bound.excess)
    True
    """
    check("gamma", gamma, lambda x: (x > 0) & (x < jnp.inf), "finite and > 0")
    L, C, variance, zeta2, _ = _checked(constants, training)
    w, N = training.weights, training.weights.size
    if form == "printed":
        local = local_stability(constants, training, form=form)
        stability = jnp.sum(w * local)
        surrogate = surrogate_gradient(constants, training, form=form, coefficient=coefficient)
        # Eq. (7): |grad f|^2 <= 2 (chi + 1) |grad f~|^2 + 2 chi sum_i w_i zeta_i^2, as printed.
        chi = chi_square(w, form=form)
        gradient = 2 * (chi + 1) * surrogate + 2 * _times(chi, jnp.sum(w * zeta2))
        sample = gradient
    else:
        local = local_stability(constants, training, form=form, convex=convex)
        # Definition 2 replaces a sample of one task at a time, and the merged model moves by w_i
        # times that expert's move.
        stability = jnp.sum(w**2 * local) / N
        surrogate = surrogate_gradient(constants, training, form=form)
        chi = chi_square(w, form=form)
        # With the divergence of the corrected form, eq. (7) holds without the term in chi |grad
        # f~|^2. The square of grad f - grad f~ = sum_i (1/N - w_i) (grad f_i - grad f) is at most
        # chi sum_i w_i zeta_i^2 by Cauchy and Schwarz.
        gradient = 2 * surrogate + 2 * _times(chi, jnp.sum(w * zeta2))
        # The mean square of all samples' gradients has three parts. They are the square of their
        # mean, the variance of the tasks about it, and the variance of the samples within their
        # tasks.
        sample = gradient + jnp.mean(zeta2 + variance)
    gamma = jnp.asarray(gamma, float)
    excess = (L + gamma) / 2 * stability + sample / (2 * gamma) + C * gradient
    # gamma / 2 stability + sample / (2 gamma) is smallest if its two terms are equal.
    best = jnp.sqrt(sample / stability)
    least = L / 2 * stability + jnp.sqrt(sample * stability) + C * gradient
    return Bound(stability, surrogate, gradient, sample, excess, best, least)


@defined
def local_stability(
    constants: Constants, training: Training, *, form: Form = "printed", convex: bool = True
) -> Float[Array, " N"]:
    """Computes a bound on E|x_i - x_i'|^2, an expert's change when one of its samples is replaced.

        printed:    16 K rate^2 (sigma^2 + 3 b zeta^2) / n
        corrected:  2 sigma^2 ((rate K)^2 / (n (n - 1)) + rate^2 K / (b n))

    "corrected" holds for convex losses and rates <= 2 / L, with batches at the same positions for
    both experts. In general, it has a factor exp(2 rate L K). It has n (n - 1), because sigma^2 is
    about the mean of n samples, and the mean squared difference of two samples of a task is 2
    sigma^2 n / (n - 1). Where "corrected" holds, "printed" holds up to K = (8 - 1/b) (n - 1), for
    the sigma^2 within the n samples. It is violated from about K = 8 n.

    Args:
      constants: Constants of the losses.
      training: The training of the experts.
      form: "printed" or "corrected".
      convex: Whether the losses are convex. Only for "corrected".

    Returns:
      The bounds `(N,)`, one per task.

    Raises:
      ValueError: If an argument is out of range, or a task has one sample with form "corrected".

    References:
      Li et al., 2026 (arXiv 2601.21690), Lemma 3, eq. (11).
    """
    L, _, variance, zeta2, _ = _checked(constants, training)
    n, k, b = training.samples, training.steps, training.batch
    if form == "printed":
        return 16 * k * training.rate**2 * (variance + 3 * _times(b, zeta2)) / n
    check("samples", n, lambda x: x >= 2, ">= 2 (one sample has no variance within its data)")
    # A step expands distances by at most 1 + rate L, and not at all for a convex loss and rates <=
    # 2 / L.
    growth = 1.0 if convex else jnp.exp(2 * training.rate * L * k)
    return 2 * variance * training.rate**2 * growth * (k**2 / (n * (n - 1)) + k / (b * n))


@defined
def surrogate_gradient(
    constants: Constants,
    training: Training,
    *,
    form: Form = "printed",
    coefficient: float = 5.0,
) -> Float[Array, ""]:
    """Computes a bound on E|grad f~|^2 at the merged model.

        printed:    eps_sgd of eq. (6)
        corrected:  (1 - rate / 2C)^(2 min K) (2 L gap + sum_i w_i zeta_i^2)
                    + rate L sum_i w_i^2 sigma_i^2 / b_i

    "printed" is only for the rate sqrt(N / mean K). It fails there unless L sqrt(N mean K) <= 1/8.
    It is then vacuous, because its first term is at least 16 |grad f~(start)|^2. "corrected" holds
    for quadratics of one curvature and rates <= 1 / L.

    Args:
      constants: Constants of the losses.
      training: The training and merging of the experts.
      form: "printed" or "corrected".
      coefficient: Coefficient of the term in A_3, 5 (Theorem 2) or 12 (Corollary 2, Theorem 4).
        Only for "printed".

    Returns:
      The bound, a scalar.

    Raises:
      ValueError: If an argument is out of range, or the rate is above 1 / L with form "corrected".

    References:
      Li et al., 2026 (arXiv 2601.21690), Theorem 2, eq. (6).

    >>> constants = Constants(smoothness=1.0, pl=0.5, variance=0.0, heterogeneity=0.0, gap=1.0)
    >>> training = Training.of(samples=100, steps=1, batch=4, rate=1.0, tasks=2)
    >>> float(surrogate_gradient(constants, training, form="corrected"))
    0.0
    """
    L, C, variance, zeta2, gap = _checked(constants, training)
    w, k, b, N = training.weights, training.steps, training.batch, training.weights.size
    if form == "printed":
        mean, noise = k.mean(), variance.max() / b.min()
        # A_1, A_2 and A_3, defined after eq. (6).
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
    # 1 / (2 C) is the smallest eigenvalue, so this is the largest remaining fraction of a start
    # after the smallest number of steps.
    left = jnp.exp(2 * k.min() * log1p(-jnp.minimum(training.rate / (2 * C), 1.0)))
    noise = jnp.sum(w**2 * variance / b) * training.rate * L
    return left * (2 * L * gap + jnp.sum(w * zeta2)) + noise


@defined
def chi_square(weights: Weights, *, form: Form = "corrected") -> Float[Array, ""]:
    """Computes the chi-square divergence of uniform probabilities p from the weights.

        corrected:  sum_i (p - w_i)^2 / w_i
        printed:    sum_i (p - w_i)^2 / w_i^2

    "printed" is not a divergence, but at least as large for weights <= 1. A weight of 0 gives inf.

    Args:
      weights: Weights `(N,)` of sum 1.
      form: "printed" or "corrected".

    Returns:
      The divergence, a scalar.

    Raises:
      ValueError: If the weights are none, negative or infinite, or their sum is not 1.

    >>> [round(float(chi_square([0.9, 0.1], form=form)), 2) for form in ("corrected", "printed")]
    [1.78, 16.2]
    """
    w = jnp.asarray(weights, float)
    if w.ndim != 1 or not w.size:
        raise ValueError(f"weights must be those of at least one task, (N,); got {w.shape}")
    check("weights", w, lambda w: (w >= 0) & (w <= 1), "in [0, 1]")
    check("the sum of weights", w.sum(), lambda s: abs(s - 1) < 1e-3, "1")
    return jnp.sum((1 / w.size - w) ** 2 / w ** (2 if form == "printed" else 1))


def _times(a: Array, b: Array) -> Array:
    """Multiplies with 0 inf = 0, for heterogeneity 0 with a weight of 0 or an infinite batch."""
    return jnp.where(b == 0, 0.0, a * jnp.where(b == 0, 1.0, b))


def _checked(constants: Constants, training: Training) -> tuple[Array, ...]:
    """Checks the constants and broadcasts the ones that may differ between tasks."""
    for name, value in constants._asdict().items():
        least = (lambda x: x > 0) if name in ("smoothness", "pl") else (lambda x: x >= 0)
        check(name, value, least, "> 0" if name in ("smoothness", "pl") else ">= 0")
    n = training.weights.shape
    L, C, *per_task, gap = (jnp.asarray(x, float) for x in constants)
    for name, value in zip(("variance", "heterogeneity"), per_task, strict=True):
        if value.shape not in ((), (1,), n):
            raise ValueError(f"{name} must have one entry per task, {n[0]}; got {value.shape}")
    return (L, C, *(jnp.broadcast_to(x, n) for x in per_task), gap)
