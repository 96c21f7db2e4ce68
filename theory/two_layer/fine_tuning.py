"""Fine-tuning on A_ft with the anchor lambda |theta - theta(0)|_F^2, from n learned modes.

If A_ft = U Sigma_ft V^T shares the singular vectors of A_pre = U Sigma_pre V^T, modes remain
separate and everything is scalar (Springer et al. 2025, arXiv 2503.19206, Sections 4.3 and A.3 to
A.6). For any other A_ft the flow is `riccati.flow(..., anchor=lambda)`, and `unaligned_losses`
computes its end. `networks.descend` simulates the same training.

An unlearned mode remains unlearned only in exact arithmetic. From a real start e^{-tau}, it grows
as e^{4 sigma_ft T}. The laws below hold while it is small.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory import problems
from theory.two_layer import modes
from theory.two_layer.layers import check_spectrum

Spectrum = Float[ArrayLike, " d"]


@problems.defined
def step(
    x: ArrayLike, rate: ArrayLike, anchor: ArrayLike, sigma: ArrayLike, start: ArrayLike
) -> Array:
    """Makes one step of gradient descent on the root x = sqrt(y) of an aligned mode.

        f(x) = x + 2 eta x (sigma^2 - x^2) + 2 eta lambda x (sigma_0^2 - x^2)

    Args:
      x: Roots of modes.
      rate: Learning rate eta.
      anchor: Strength lambda of the anchor.
      sigma: Root of the singular value of A_ft, sigma^2 = sigma_ft.
      start: Root sigma_0 of the initial mode.

    Returns:
      The roots after the step, with the broadcast shape of the arguments.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Section A.6; eq. (18) lacks the last factor x.
    """
    x = jnp.asarray(x, dtype=float)
    pull = jnp.asarray(sigma) ** 2 - x**2 + jnp.asarray(anchor) * (jnp.asarray(start) ** 2 - x**2)
    return x + 2 * jnp.asarray(rate) * x * pull


@problems.defined
def mode(time: ArrayLike, start: ArrayLike, sigma_ft: ArrayLike, anchor: ArrayLike = 0.0) -> Array:
    """Computes an aligned mode during fine-tuning by gradient flow.

    It follows the sigmoid `modes.mode` towards (sigma_ft + lambda y(0)) / (1 + lambda), 1 + lambda
    times as fast. Its arguments are modes y, while `step` uses their roots.

    Args:
      time: Times >= 0, inf allowed.
      start: Initial modes y(0), finite and >= 0.
      sigma_ft: Singular values of A_ft.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The modes, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.
    """
    limit = _pulled(start, sigma_ft, anchor)
    return modes.mode((1 + jnp.asarray(anchor, float)) * jnp.asarray(time, float), start, limit)


@problems.defined
def mode_limit(start: ArrayLike, sigma_ft: ArrayLike, anchor: ArrayLike = 0.0) -> Array:
    """Computes the limit (sigma_ft + lambda y(0)) / (1 + lambda) of an aligned mode with y(0) > 0.

    If this is negative, the limit is 0, because a mode y = x^2 cannot become negative.

    Args:
      start: Initial modes y(0).
      sigma_ft: Singular values of A_ft; negative for a mode of the opposite sign.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The limits, with the broadcast shape of the arguments.

    Raises:
      ValueError: If the anchor is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Lemma A.23. Lemma A.11 prints the two weights
      swapped.
    """
    return jnp.maximum(_pulled(start, sigma_ft, anchor), 0.0)


def _pulled(start: ArrayLike, sigma_ft: ArrayLike, anchor: ArrayLike) -> Array:
    """Computes the minimum of both terms of the objective together, of either sign."""
    check_anchor(anchor)
    start, sigma_ft, anchor = (jnp.asarray(x, dtype=float) for x in (start, sigma_ft, anchor))
    # The weights are computed first, because `anchor * start` can overflow.
    return sigma_ft / (1 + anchor) + anchor / (1 + anchor) * start


@problems.defined
def fine_tuned_spectrum(
    pre: Sequence[float] | Spectrum,
    ft: Sequence[float] | Spectrum,
    learned: int,
    lam: ArrayLike = 0.0,
) -> Float[Array, " d"]:
    """Computes the singular values after fine-tuning to the end from the first modes of `pre`.

    They are `mode_limit` for the learned modes and 0 for the others.

    Args:
      pre: Singular values of A_pre `(d,)`, descending.
      ft: Singular values of A_ft `(d,)`, descending.
      learned: Number of modes that pre-training has learned, from 0 to d.
      lam: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The singular values `(d,)`.

    Raises:
      ValueError: If an argument is out of range, the spectra differ in length or are not
        descending.

    >>> fine_tuned_spectrum([2.0, 1.0], [6.0, 3.0], 1, 1.0).tolist()
    [4.0, 0.0]
    """
    check_anchor(lam, "lam")
    pre, ft = check_spectrum("pre", pre), check_spectrum("ft", ft)
    if pre.shape != ft.shape:
        raise ValueError(f"pre and ft must have one length; got {pre.size} and {ft.size}")
    if not 0 <= learned <= pre.size:
        raise ValueError(f"learned must be a number of modes in 0..{pre.size}; got {learned}")
    is_learned = np.arange(pre.size) < learned
    return jnp.where(is_learned, mode_limit(jnp.asarray(pre), jnp.asarray(ft), lam), 0.0)


@problems.defined
def pretraining_losses(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """Computes the pre-training loss |theta - A_pre|^2 after fine-tuning from n = 0, ..., d modes.

        sum_{i<=n} ((sigma_ft,i - sigma_pre,i) / (1 + lambda))^2 + sum_{i>n} sigma_pre,i^2

    It increases from n - 1 to n if and only if sigma_ft,n / sigma_pre,n > 2 + lambda.

    Args:
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The losses `(d + 1,)`.

    Raises:
      ValueError: If the anchor is out of range.
    """
    moved = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_pre)
    return _stages(moved**2, jnp.asarray(sigma_pre) ** 2)


@problems.defined
def degradations(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """Computes the increase of the pre-training loss by fine-tuning from n = 0, ..., d modes.

        Delta_pre(n) = sum_{i<=n} ((sigma_ft,i - sigma_pre,i) / (1 + lambda))^2

    Args:
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The differences `(d + 1,)`.

    Raises:
      ValueError: If the anchor is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Theorems 4.6 and A.24.
    """
    moved = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_pre)
    return _stages(moved**2, jnp.zeros_like(moved))


@problems.defined
def fine_tuning_losses(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """Computes the fine-tuning loss |theta - A_ft|^2 after fine-tuning from n = 0, ..., d modes.

        (lambda / (1 + lambda))^2 sum_{i<=n} (sigma_ft,i - sigma_pre,i)^2 + sum_{i>n} sigma_ft,i^2

    It does not include the anchor's term.

    Args:
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The losses `(d + 1,)`.

    Raises:
      ValueError: If the anchor is out of range.
    """
    lacking = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_ft)
    return _stages(lacking**2, jnp.asarray(sigma_ft) ** 2)


def _stages(learned: Array, unlearned: Array) -> Array:
    """Computes sum_{i<=n} learned_i + sum_{i>n} unlearned_i for n = 0, ..., d."""
    zero = jnp.zeros(1, learned.dtype)
    before = jnp.concatenate([zero, jnp.cumsum(learned)])
    after = jnp.concatenate([jnp.cumsum(unlearned[::-1])[::-1], zero])
    return before + after


@problems.defined
def misaligned(sigma_pre: Spectrum, sigma_ft: Spectrum, alpha: float, r: int) -> bool:
    """Checks whether sigma_ft > alpha sigma_pre for every mode after the r-th.

    Args:
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      alpha: The factor.
      r: Number of modes that are exempt.

    Returns:
      Whether the tasks are (alpha, r)-misaligned.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Definition 4.5.
    """
    return bool((np.asarray(sigma_ft)[r:] > alpha * np.asarray(sigma_pre)[r:]).all())


@problems.defined
def misalignment_threshold(lam: ArrayLike = 0.0) -> Array:
    """Returns 2 + lambda, the ratio sigma_ft / sigma_pre above which learning a mode hurts.

    Learning mode n increases the pre-training loss of the fine-tuned model if and only if its ratio
    exceeds this.

    Args:
      lam: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The threshold, with the shape of `lam`.

    Raises:
      ValueError: If `lam` is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Lemma A.26, has 4 at lambda = 0.

    >>> float(misalignment_threshold(0.5))
    2.5
    """
    check_anchor(lam, "lam")
    return 2 + jnp.asarray(lam, dtype=float)


@problems.defined
def inflection(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0, *, first: int = 1
) -> int | None:
    """Returns the number of modes after which the fine-tuned model's pre-training loss increases.

    It never decreases as lambda grows (Theorem 4.7; Theorem A.25 prints the opposite).

    Args:
      sigma_pre: Singular values of A_pre `(d,)`.
      sigma_ft: Singular values of A_ft `(d,)`.
      anchor: Strength lambda of the anchor, finite and >= 0.
      first: The smallest number considered, 1 as in Definition 4.2, or 0 (see `modes.inflection`).

    Returns:
      The number r(lambda), or None if the loss never increases.

    Raises:
      ValueError: If the anchor is out of range.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Definition 4.2 and Theorem 4.7.

    >>> pre, ft = jnp.array([3.0, 2.0, 1.0]), jnp.array([9.0, 7.0, 4.5])
    >>> [inflection(pre, ft, anchor, first=0) for anchor in (0.5, 1.0, 2.0, 3.0)]
    [0, 1, 2, None]
    """
    return modes.inflection(pretraining_losses(sigma_pre, sigma_ft, anchor), first=first)


@problems.defined
def unaligned_losses(
    target_pre: Float[ArrayLike, "o i"], target_ft: Float[ArrayLike, "o i"], anchor: ArrayLike = 0.0
) -> tuple[Float[Array, " stages"], Float[Array, " stages"]]:
    """Computes both losses after fine-tuning on a task with singular vectors in general position.

    Otherwise, the losses may differ. A mode of the target that is orthogonal to
    everything that the start has learned is never learned. The flow then ends at a saddle with a
    larger fine-tuning loss (`modes.learned_modes` is the same for pre-training). Aligned tasks with
    spectra in a different order are an example. In practice, rounding errors leave the saddle after
    some time.

    The flow conserves the rank n of the start. Let [.]_n be the best approximation of rank n. The
    flow ends at [(A_ft + lambda [A_pre]_n) / (1 + lambda)]_n, the minimum of |theta - A_ft|^2 +
    lambda |theta - [A_pre]_n|^2 over this rank. At full rank it also conserves the sign of det
    theta. If the target's determinant has the opposite sign, its smallest mode is never learned.

    The theorems for aligned tasks change as follows:

    * The fine-tuning loss never decreases as lambda grows, as for any penalty.
    * At lambda = 0 Delta_pre(n) >= 0 still holds. By von Neumann's trace inequality it is at least
      sum_{i<=n} (sigma_ft,i - sigma_pre,i)^2.
    * Delta_pre may be non-monotone in n, and the inflection point in lambda. At lambda = 0 mode n
      changes the pre-training loss by sigma_ft,n (sigma_ft,n - 2 a_n) with a_n = u_n^T A_pre v_n in
      the singular vectors of A_ft. The threshold is therefore sigma_ft,n > 2 a_n.

    Args:
      target_pre: Pre-training target A_pre `(o, i)`.
      target_ft: Fine-tuning target A_ft `(o, i)`.
      anchor: Strength lambda of the anchor, finite and >= 0.

    Returns:
      The pre-training losses |theta - A_pre|^2 and the fine-tuning losses |theta - A_ft|^2, each
      `(min(o, i) + 1,)`, for n = 0, ..., min(o, i) learned modes.

    Raises:
      ValueError: If the anchor is out of range.
    """
    check_anchor(anchor)
    pre, ft = jnp.asarray(target_pre, dtype=float), jnp.asarray(target_ft, dtype=float)
    weight, (o, i) = jnp.asarray(anchor, dtype=float), pre.shape
    ends = []
    for n in range(min(o, i) + 1):
        # Both quadratic terms combine: |theta - A_ft|^2 + lambda |theta - A_n|^2 is (1 + lambda)
        # |theta - target|^2 plus a constant.
        target = (ft + weight * _truncate(pre, n)) / (1 + weight)
        # At full rank, det theta cannot change its sign, so a target of the opposite sign loses its
        # smallest mode.
        barred = o == i == n and linalg.det(pre) * linalg.det(target) < 0
        ends.append(_truncate(target, jnp.where(barred, n - 1, n)))
    lost, left = (jnp.stack([jnp.sum((end - a) ** 2) for end in ends]) for a in (pre, ft))
    return lost, left


@jax.jit
def _truncate(matrix: Array, rank: ArrayLike) -> Array:
    u, s, vt = linalg.svd(matrix, full_matrices=False)
    return (u * jnp.where(jnp.arange(s.size) < rank, s, 0.0)) @ vt


def check_anchor(anchor: ArrayLike, name: str = "anchor") -> None:
    """Raises an error unless an anchor's strength is finite and >= 0.

    Args:
      anchor: Strengths to check.
      name: The argument's name, for the message.

    Raises:
      ValueError: If a value is negative, infinite or NaN.
    """
    problems.check(name, anchor, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
