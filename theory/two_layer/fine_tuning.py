"""Fine-tuning on A_ft with the anchor lambda |theta - theta(0)|_F^2, from n learned modes.

If A_ft = U Sigma_ft V^T shares the singular vectors of A_pre = U Sigma_pre V^T, modes stay apart
and everything is scalar (overtrained, Sections 4.3 and A.3 to A.6). For any other A_ft the flow is
`riccati.flow(..., anchor=lambda)`, and `unaligned_losses` gives its end.

A mode that is not learned stays so in exact arithmetic only. From a real start e^{-tau} it grows as
e^{4 sigma_ft T}, and the laws below hold while that is small.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.two_layer import modes
from theory.two_layer.layers import check_spectrum

Spectrum = Float[ArrayLike, " d"]


def step(
    x: ArrayLike, rate: ArrayLike, anchor: ArrayLike, sigma: ArrayLike, start: ArrayLike
) -> Array:
    """One step of gradient descent on x = sqrt(y): f(x) = x + 2 eta x (sigma^2 - x^2)
    + 2 eta lambda x (sigma_0^2 - x^2), with sigma^2 = sigma_ft and sigma_0^2 = the initial y
    (overtrained Section A.6; eq. 18 lacks the last x)."""
    x = jnp.asarray(x, dtype=float)
    pull = jnp.asarray(sigma) ** 2 - x**2 + jnp.asarray(anchor) * (jnp.asarray(start) ** 2 - x**2)
    return x + 2 * jnp.asarray(rate) * x * pull


def mode(time: ArrayLike, start: ArrayLike, sigma_ft: ArrayLike, anchor: ArrayLike = 0.0) -> Array:
    """Gradient flow of one mode from y(0) = start: the sigmoid law towards `mode_limit`, 1 + lambda
    times as fast. Unlike `step`, in y and not in its root."""
    limit = mode_limit(start, sigma_ft, anchor)
    return modes.mode((1 + jnp.asarray(anchor, float)) * jnp.asarray(time, float), start, limit)


def mode_limit(start: ArrayLike, sigma_ft: ArrayLike, anchor: ArrayLike = 0.0) -> Array:
    """(sigma_ft + lambda y(0)) / (1 + lambda), where a mode with y(0) > 0 ends (overtrained Lemma
    A.23; Lemma A.11 prints the weights the other way round)."""
    check_anchor(anchor)
    start, sigma_ft, anchor = (jnp.asarray(x, dtype=float) for x in (start, sigma_ft, anchor))
    return sigma_ft / (1 + anchor) + anchor / (1 + anchor) * start  # anchor * start can overflow


def fine_tuned_spectrum(
    pre: Sequence[float] | Spectrum,
    ft: Sequence[float] | Spectrum,
    learned: int,
    lam: ArrayLike = 0.0,
) -> Float[Array, " d"]:
    """Singular values after fine-tuning to the end from the first `learned` modes of `pre`:
    `mode_limit` for those, 0 for the others. Both spectra descending."""
    check_anchor(lam, "lam")
    pre, ft = check_spectrum("pre", pre), check_spectrum("ft", ft)
    if pre.shape != ft.shape:
        raise ValueError(f"pre and ft must have one length; got {pre.size} and {ft.size}")
    if not 0 <= learned <= pre.size:
        raise ValueError(f"learned must be a number of modes in 0..{pre.size}; got {learned}")
    is_learned = np.arange(pre.size) < learned
    return jnp.where(is_learned, mode_limit(jnp.asarray(pre), jnp.asarray(ft), lam), 0.0)


def pretraining_losses(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """|theta - A_pre|^2 after fine-tuning from n = 0, ..., d learned modes: sum_{i<=n}
    ((sigma_ft - sigma_pre)/(1 + lambda))^2 + sum_{i>n} sigma_pre^2. It rises with n where
    sigma_ft/sigma_pre > 2 + lambda and nowhere else."""
    moved = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_pre)
    return _stages(moved**2, jnp.asarray(sigma_pre) ** 2)


def degradations(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """Delta_pre(n), the pre-training loss after fine-tuning less that before, n = 0, ..., d."""
    moved = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_pre)
    return _stages(moved**2, jnp.zeros_like(moved))


def fine_tuning_losses(
    sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0
) -> Float[Array, " stages"]:
    """|theta - A_ft|^2 (without the anchor's term) after fine-tuning, n = 0, ..., d."""
    lacking = mode_limit(sigma_pre, sigma_ft, anchor) - jnp.asarray(sigma_ft)
    return _stages(lacking**2, jnp.asarray(sigma_ft) ** 2)


def _stages(learned: Array, unlearned: Array) -> Array:
    """sum_{i<=n} learned_i + sum_{i>n} unlearned_i for n = 0, ..., d."""
    zero = jnp.zeros(1, learned.dtype)
    before = jnp.concatenate([zero, jnp.cumsum(learned)])
    after = jnp.concatenate([jnp.cumsum(unlearned[::-1])[::-1], zero])
    return before + after


def misaligned(sigma_pre: Spectrum, sigma_ft: Spectrum, alpha: float, r: int) -> bool:
    """Overtrained Definition 4.5: sigma_ft > alpha sigma_pre for every mode after the r-th."""
    return bool((np.asarray(sigma_ft)[r:] > alpha * np.asarray(sigma_pre)[r:]).all())


def misalignment_threshold(lam: ArrayLike = 0.0) -> Array:
    """2 + lambda: learning mode n harms the fine-tuned model's pre-training loss iff
    sigma_ft/sigma_pre exceeds it (overtrained Lemma A.26 asks for 4 at lambda = 0)."""
    check_anchor(lam, "lam")
    return 2 + jnp.asarray(lam, dtype=float)


def inflection(sigma_pre: Spectrum, sigma_ft: Spectrum, anchor: ArrayLike = 0.0) -> int | None:
    """r(lambda) of overtrained Definition 4.2, which never falls as lambda grows (Theorem 4.7;
    Theorem A.25 prints the opposite); None if the loss never rises.

    >>> pre, ft = jnp.array([3.0, 2.0, 1.0]), jnp.array([9.0, 7.0, 4.5])
    >>> [inflection(pre, ft, anchor) for anchor in (0.5, 1.0, 2.0, 3.0)]
    [0, 1, 2, None]
    """
    return modes.inflection(pretraining_losses(sigma_pre, sigma_ft, anchor))


def unaligned_losses(
    target_pre: Float[ArrayLike, "o i"], target_ft: Float[ArrayLike, "o i"], anchor: ArrayLike = 0.0
) -> tuple[Float[Array, " stages"], Float[Array, " stages"]]:
    """Pre-training and fine-tuning loss |theta - A|^2 after fine-tuning from n = 0, ..., min(o, i)
    learned modes, when the singular vectors of A_ft are in general position to those of A_pre.

    The flow conserves the rank n of the start. With [.]_n for the best approximation of rank n, it
    ends at [(A_ft + lambda [A_pre]_n)/(1 + lambda)]_n, the minimum of |theta - A_ft|^2 + lambda
    |theta - [A_pre]_n|^2 over that rank. (At full rank it also conserves the sign of det theta; if
    that of the target differs, its smallest mode is never learned.) Of overtrained's theorems,

    - it survives that the fine-tuning loss never falls as lambda grows, as for any penalty;
    - it survives that Delta_pre(n) >= 0, at lambda = 0: by von Neumann's trace inequality it is at
      least sum_{i<=n} (sigma_ft,i - sigma_pre,i)^2;
    - Delta_pre need not be monotone in n, nor the inflection point in lambda. At lambda = 0 mode n
      changes the pre-training loss by sigma_ft,n (sigma_ft,n - 2 a_n), a_n = u_n^T A_pre v_n in the
      singular vectors of A_ft, so that the threshold is sigma_ft,n > 2 a_n.
    """
    check_anchor(anchor)
    pre, ft = jnp.asarray(target_pre, dtype=float), jnp.asarray(target_ft, dtype=float)
    weight, (o, i) = jnp.asarray(anchor, dtype=float), pre.shape
    ends = []
    for n in range(min(o, i) + 1):
        target = (ft + weight * _truncate(pre, n)) / (1 + weight)
        barred = o == i == n and jnp.linalg.det(pre) * jnp.linalg.det(target) < 0
        ends.append(_truncate(target, jnp.where(barred, n - 1, n)))
    lost, left = (jnp.stack([jnp.sum((end - a) ** 2) for end in ends]) for a in (pre, ft))
    return lost, left


@jax.jit
def _truncate(matrix: Array, rank: ArrayLike) -> Array:
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return (u * jnp.where(jnp.arange(s.size) < rank, s, 0.0)) @ vt


def check_anchor(anchor: ArrayLike, name: str = "anchor") -> None:
    problems.check(name, anchor, lambda x: (x >= 0) & (x < np.inf), "finite and >= 0")
