"""Closed-form risks of scratch training, linear transfer and fine-tuning in deep linear networks.

The source is Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thms 3.6 to 3.9. The paper
states limits n, d -> inf. The functions here are exact expectations at finite n and d where a
closed form exists. Functions called `*_limit`, and `fine_tuning_risk`, are limits at load n / d.
Arguments may be arrays and broadcast. A mean can be infinite: for n within 1 of d with noise, and
for n <= 2 in linear transfer. This is an error unless `allow_infinite=True`, which returns inf.
`distributions` contains the full distributions.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from sail_jax.checks import concrete
from sail_jax.deprecated import former, renamed
from theory import problems
from theory.deep_linear.overlaps import scale_by_seen

__getattr__ = former(
    __name__,
    {"fine_tune_risk": "fine_tuning_risk", "fine_tune_boundary": "fine_tuning_boundary"},
    until="0.4",
)

Mode = Literal["linear", "fine_tuning"]
FORMER_MODES = {"fine_tune": "fine_tuning"}


@renamed("n", "d", "sigma", until="0.4")
@problems.in_float64
def scratch_risk(
    *, n: ArrayLike, d: ArrayLike, sigma: ArrayLike, allow_infinite: bool = False
) -> Array:
    """Computes the expected risk of training from scratch on n Gaussian samples, exactly.

    E|X^+ y - beta_t|^2 with a unit target is

        n <= d - 2:  1 - n/d + sigma^2 n / (d - n - 1)
        n >= d + 2:  sigma^2 d / (n - d - 1)
        between:     inf if sigma > 0, max(1 - n/d, 0) if sigma = 0.

    Args:
      n: Number of samples, >= 0.
      d: Dimension, >= 1.
      sigma: Standard deviation of the label noise, >= 0.
      allow_infinite: Whether to return inf where the mean is infinite.

    Returns:
      The expected risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or the mean is infinite and `allow_infinite` is
        False.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.6, has the limit of this.

    >>> float(scratch_risk(n=250, d=500, sigma=0.2))
    0.54016...
    >>> scratch_risk(n=500, d=500, sigma=0.2)
    Traceback (most recent call last):
    ValueError: n must be at most d-2 or at least d+2 where sigma > 0 (the mean is infinite ...
    """
    problems.check("n", n, lambda n: (n >= 0) & (n < np.inf), "a finite number of samples >= 0")
    _check_dimension(d)
    problems.check_sigma(sigma)
    if not allow_infinite:
        _check_finite_scratch("n", n, d, sigma)
    n, d, sigma = (jnp.asarray(v, dtype=float) for v in (n, d, sigma))
    gap = jnp.abs(n - d) - 1
    # The unused branch of `where` must also be finite, or derivatives become NaN.
    safe = jnp.where(gap > 0, gap, 1.0)
    noise = sigma**2 * jnp.where(gap > 0, jnp.minimum(n, d) / safe, jnp.inf)
    return jnp.maximum(d - n, 0.0) / d + jnp.where(sigma > 0, noise, 0.0)


@renamed("load", "sigma", until="0.4", gamma="load")
@problems.in_float64
def scratch_limit(*, load: ArrayLike, sigma: ArrayLike, allow_infinite: bool = False) -> Array:
    """Computes the limit of `scratch_risk` as n, d -> inf at load n / d.

        load < 1:  1 - load + load sigma^2 / (1 - load)
        load > 1:  sigma^2 / (load - 1)

    Args:
      load: Load n / d, >= 0.
      sigma: Standard deviation of the label noise, >= 0.
      allow_infinite: Whether to return inf at load = 1 with noise.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or load = 1 with noise and `allow_infinite` is
        False.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.6, eq. (10).

    >>> float(scratch_limit(load=0.5, sigma=0.2))
    0.54...
    """
    problems.check_load(load)
    problems.check_sigma(sigma)
    if not allow_infinite:
        _check_finite_limit(load, sigma)
    load, sigma = jnp.asarray(load, dtype=float), jnp.asarray(sigma, dtype=float)
    gap = jnp.abs(load - 1)
    noise = jnp.where(gap > 0, jnp.minimum(load, 1) / jnp.where(gap > 0, gap, 1.0), jnp.inf)
    return jnp.maximum(1 - load, 0.0) + jnp.where(sigma > 0, sigma**2 * noise, 0.0)


@renamed("n", "theta", "sigma", "ridge", until="0.4")
@problems.in_float64
def linear_transfer_risk(
    *,
    n: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    ridge: ArrayLike = 0.0,
    allow_infinite: bool = False,
) -> Array:
    """Computes the expected risk of refitting only the last layer on n samples, exactly.

    It does not depend on d. With u ~ chi^2_n and k = n ridge,

        ridge = 0, n > 2:   sin^2 + (sigma^2 + sin^2) / (n - 2)
        ridge > 0, n >= 1:  sin^2 + cos^2 E[k^2/(u + k)^2] + (sigma^2 + sin^2) E[u/(u + k)^2].

    Args:
      n: Number of samples, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.
      ridge: Ridge penalty on the refitted weight, >= 0.
      allow_infinite: Whether to return inf at n <= 2 without ridge.

    Returns:
      The expected risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or n <= 2 without ridge and `allow_infinite` is
        False.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.7, eq. (12), without ridge.
      Thm 3.8, eq. (15), is the limit n -> inf with ridge.

    >>> float(linear_transfer_risk(n=8, theta=jnp.pi / 4, sigma=0.5))
    0.625...
    """
    minimum = "a number of samples > 2 where ridge = 0 (the mean is infinite at n <= 2), else >= 1"
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), minimum)
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    problems.check_ridge(ridge)
    known_ridge = concrete(ridge)
    if not allow_infinite and known_ridge is not None:
        problems.check("n", n, lambda n: (n > 2) | (known_ridge > 0), minimum)
    n, sigma, ridge = (jnp.asarray(v, dtype=float) for v in (n, sigma, ridge))
    cos, sin = problems.cos_sin(theta)
    missed = sin**2
    noise2 = sigma**2 + missed
    plain = jnp.where(n > 2, 1 / jnp.where(n > 2, n - 2, 1.0), jnp.inf)
    shrunk, noise = _ridge_moments(n, n * ridge)
    # E[1/u] = 1 / (n - 2) for u ~ chi^2_n, infinite for n <= 2.
    learned = jnp.where(ridge > 0, noise, plain)
    return (
        missed
        + jnp.where(ridge > 0, cos**2 * shrunk, 0.0)
        + jnp.where(noise2 > 0, noise2 * learned, 0.0)  # 0 inf = 0: nothing to mistake
    )


@renamed("theta", "ridge", until="0.4")
@problems.in_float64
def linear_transfer_limit(*, theta: ArrayLike, ridge: ArrayLike = 0.0) -> Array:
    """Computes the limit of `linear_transfer_risk` as n -> inf.

        sin^2 + cos^2 (ridge / (1 + ridge))^2

    Args:
      theta: Angle between source and target in radians, in [0, pi].
      ridge: Ridge penalty on the refitted weight, >= 0.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.8, eq. (15).

    >>> float(linear_transfer_limit(theta=jnp.pi / 2))
    1.0
    """
    problems.check_theta(theta)
    problems.check_ridge(ridge)
    cos, sin = problems.cos_sin(theta)
    ridge = jnp.asarray(ridge, dtype=float)
    return sin**2 + (cos * (ridge / (1 + ridge))) ** 2


@renamed("n", "theta", "sigma", until="0.4")
@problems.in_float64
def optimal_ridge(*, n: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes the ridge that minimises `linear_transfer_risk`.

        (sigma^2 + sin^2) / (n cos^2)

    It is positive at every finite n, unless both noise and angle are 0. Thm 3.8 of Features
    are fate states 0, which is the limit n -> inf.

    Args:
      n: Number of samples, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The best ridge, with the broadcast shape of the arguments. It is inf at theta = pi/2, where
      nothing transfers.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(float(optimal_ridge(n=10, theta=jnp.pi / 4, sigma=0.0)), 4)
    0.1
    """
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), "a finite number of samples >= 1")
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    cos, sin = problems.cos_sin(theta)
    n, sigma = jnp.asarray(n, dtype=float), jnp.asarray(sigma, dtype=float)
    return (sigma**2 + sin**2) / (n * cos**2)


@renamed("load", "theta", "sigma", "depth", "size", until="0.4", gamma="load")
@problems.in_float64
def fine_tuning_risk(
    *,
    load: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
    allow_infinite: bool = False,
) -> Array:
    """Computes the limiting risk of fine-tuning all layers, as n, d -> inf at load n / d.

        load < 1:   (1 - load)(1 - 2 c cos + c^2) + load sigma^2 / (1 - load)
        load >= 1:  the risk of scratch training: the source is forgotten

    with c = size * null_scale(p / size^2, q, depth), p = load (1 + sigma^2/(1 - load)) and
    q = 1 - load. For exact draws at finite n and d use `overlaps_law(...).fine_tune(...)` or
    `fine_tuning_law`.

    Args:
      load: Load n / d, >= 0.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed.
      size: Norm of the pretrained predictor, > 0; the target has norm 1.
      allow_infinite: Whether to return inf at load = 1 with noise.

    Returns:
      The limiting risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, or load = 1 with noise and `allow_infinite` is
        False.

    References:
      Corrects Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thm 3.9, eq. (16), which
      has c = 1.

    >>> round(float(fine_tuning_risk(load=0.5, theta=0.0, sigma=0.0)), 4)  # same task, no noise
    0.0
    """
    problems.check_theta(theta)
    problems.check_depth(depth)
    scratch = scratch_limit(load=load, sigma=sigma, allow_infinite=allow_infinite)
    load = jnp.asarray(load, dtype=float)
    return scratch - _fine_tuning_gain(load, 1 - load, theta, sigma, depth, size)


@renamed("n", "d", "theta", "sigma", until="0.4", mode=FORMER_MODES)
@problems.in_float64
def transferability(
    mode: Mode,
    *,
    n: ArrayLike,
    d: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
    ridge: ArrayLike = 0.0,
    allow_infinite: bool = False,
) -> Array:
    """Computes the transferability E R_scratch - E R_transfer, positive where transfer helps.

    Mode "linear" is exact at finite n and d. Mode "fine_tuning" is the limit

        (1 - load) c (2 cos - c)  at  load = n / d,

    with c of `fine_tuning_risk`. The noise of the two risks cancels there, so the value is finite
    at n = d.

    Args:
      mode: "linear" (refit the last layer) or "fine_tuning" (train all layers).
      n: Number of target samples; >= 1 in mode "linear", >= 0 in mode "fine_tuning".
      d: Dimension, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.
      depth: Number of weight matrices; mode "fine_tuning" only.
      size: Norm of the pretrained predictor, > 0; mode "fine_tuning" only.
      ridge: Ridge penalty on the refitted weight; mode "linear" only.
      allow_infinite: Whether one of the two means may be infinite; mode "linear" only.

    Returns:
      The transferability, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, the mode is unknown, a mean is infinite and
        `allow_infinite` is False, or both means are infinite.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (7). Mode "linear" is exact
      where eq. (13) is a limit; mode "fine_tuning" corrects eq. (17).

    >>> bool(transferability("fine_tuning", n=50, d=100, theta=0.3, sigma=0.2) > 0)
    True
    """
    if mode == "linear":
        scratch = scratch_risk(n=n, d=d, sigma=sigma, allow_infinite=allow_infinite)
        linear = linear_transfer_risk(
            n=n, theta=theta, sigma=sigma, ridge=ridge, allow_infinite=allow_infinite
        )
        undefined = concrete(jnp.isinf(scratch) & jnp.isinf(linear))
        if undefined is not None:
            difference = (
                "such that one of the two means is finite (their difference is not defined)"
            )
            problems.check("n", n, lambda _: ~undefined, difference)
        return scratch - linear
    problems.check("n", n, lambda n: (n >= 0) & (n < np.inf), "a finite number of samples >= 0")
    _check_dimension(d)
    _check_tasks(theta, sigma, depth)
    n, d = jnp.asarray(n, dtype=float), jnp.asarray(d, dtype=float)
    return _fine_tuning_gain(n / d, (d - n) / d, theta, sigma, depth, size)


@renamed("load", "theta", "sigma", until="0.4", gamma="load", mode=FORMER_MODES)
@problems.in_float64
def transferability_limit(
    mode: Mode,
    *,
    load: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
    ridge: ArrayLike = 0.0,
    allow_infinite: bool = False,
) -> Array:
    """Computes the limit of `transferability` as n, d -> inf at load n / d.

    Mode "linear" is `scratch_limit` - `linear_transfer_limit`. Mode "fine_tuning" is
    (1 - load) c (2 cos - c) for load < 1, with c of `fine_tuning_risk`, and 0 beyond.

    Args:
      mode: "linear" (refit the last layer) or "fine_tuning" (train all layers).
      load: Load n / d, >= 0.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.
      depth: Number of weight matrices; mode "fine_tuning" only.
      size: Norm of the pretrained predictor, > 0; mode "fine_tuning" only.
      ridge: Ridge penalty on the refitted weight; mode "linear" only.
      allow_infinite: Whether to return inf at load = 1 with noise; mode "linear" only.

    Returns:
      The limiting transferability, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range, the mode is unknown, or load = 1 with noise in
        mode "linear" and `allow_infinite` is False.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), eq. (13) for "linear". Mode
      "fine_tuning" corrects eq. (17).

    >>> round(float(transferability_limit("linear", load=0.5, theta=0.0, sigma=0.0)), 4)
    0.5
    """
    problems.check_load(load)
    _check_tasks(theta, sigma, depth)
    if mode == "fine_tuning":
        load = jnp.asarray(load, dtype=float)
        return _fine_tuning_gain(load, 1 - load, theta, sigma, depth, size)
    scratch = scratch_limit(load=load, sigma=sigma, allow_infinite=allow_infinite)
    return scratch - linear_transfer_limit(theta=theta, ridge=ridge)


class Boundary(NamedTuple):
    """The loads n / d at which the limiting transferability of linear transfer is 0.

    Linear transfer hurts for lower < load < upper and for load > over. If lower == upper, it does
    not hurt anywhere below load = 1.

    Attributes:
      lower: The load where transfer starts to hurt.
      upper: The load where it stops hurting, below load = 1.
      over: The load where it starts to hurt again, above load = 1.
    """

    lower: Array
    upper: Array
    over: Array


@renamed("theta", "sigma", until="0.4")
@problems.in_float64
def linear_transfer_boundary(*, theta: ArrayLike, sigma: ArrayLike) -> Boundary:
    """Computes the loads at which linear transfer changes from helping to hurting, in the limit.

        lower, upper = (b -+ sqrt(b^2 - 4 cos^2)) / 2,  b = 1 + cos^2 - sigma^2
        over = 1 + sigma^2 / sin^2

    lower and upper differ if |cos| < 1 - sigma. Otherwise both are |cos|. The paper has the two
    roots in the other order, and states the condition theta > arccos(1 - sigma) for angles up to
    pi/2 only.

    Args:
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The three loads, each with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), after eq. (13).

    >>> round(float(linear_transfer_boundary(theta=jnp.pi / 3, sigma=0.0).lower), 4)  # cos^2 theta
    0.25
    """
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    cos, sin = problems.cos_sin(theta)
    cos, sin, sigma = jnp.broadcast_arrays(jnp.abs(cos), sin, jnp.asarray(sigma, dtype=float))
    b = 1 + cos**2 - sigma**2
    # The discriminant b^2 - 4 cos^2 = ((1 - cos)^2 - sigma^2) ((1 + cos)^2 - sigma^2) in factors,
    # in which nothing cancels. Here cos stands for |cos|, and `near` is 1 - |cos|.
    near = sin**2 / (1 + cos)  # 1 - |cos|
    exists = sigma < near
    far = 1 + cos
    inside = (near - sigma) * (near + sigma) * (far - sigma) * (far + sigma)
    # Where roots do not exist, the discriminant is replaced by 1, because the derivative of the
    # root at 0 is infinite.
    root = jnp.sqrt(jnp.where(exists, inside, 1.0))
    # The roots meet at |cos|. Their product is cos^2, so nothing cancels. Without roots both are
    # |cos| itself: b / 2 could be rounded otherwise each time that a compiled program computes it.
    upper = jnp.where(exists, (b + root) / 2, cos)
    lower = jnp.where(exists, cos**2 / jnp.where(exists, upper, 1.0), cos)
    over = jnp.where(sin > 0, 1 + (sigma / jnp.where(sin > 0, sin, 1.0)) ** 2, jnp.inf)
    return Boundary(lower, upper, over)


@renamed("n", "rest", "sigma", "k", until="0.4")
@problems.in_float64
def refitted_risk(*, n: ArrayLike, rest: ArrayLike, sigma: ArrayLike, k: ArrayLike = 1) -> Array:
    """Computes the expected risk with some directions free of the penalty, exactly.

        (rest + sigma^2) (n - 1) / (n - k - 1) - sigma^2

    Args:
      n: Number of samples, > k + 1.
      rest: Expected risk of the same learner across these directions, from n - k samples in d - k
        dimensions.
      sigma: Standard deviation of the label noise, >= 0.
      k: Number of free directions, >= 0.

    Returns:
      The expected risk, with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> float(refitted_risk(n=8, rest=0.5, sigma=0.5))  # linear transfer learns nothing across
    0.625
    """
    n, k, sigma = _free(n, k, sigma)
    problems.check("rest", rest, lambda r: r >= 0, ">= 0")
    # Nothing cancels in this form of it.
    return jnp.asarray(rest, dtype=float) + (rest + sigma**2) * k / (n - k - 1)


@renamed("n", "risk", "sigma", "k", until="0.4")
@problems.in_float64
def rest_allowed(*, n: ArrayLike, risk: ArrayLike, sigma: ArrayLike, k: ArrayLike = 1) -> Array:
    """Computes the risk across free directions at which `refitted_risk` is a given risk.

    Args:
      n: Number of samples, > k + 1.
      risk: The given risk, >= 0.
      sigma: Standard deviation of the label noise, >= 0.
      k: Number of free directions, >= 0.

    Returns:
      The risk, with the broadcast shape of the arguments; 0 if the free directions alone cost more
      than the given risk.

    Raises:
      ValueError: If an argument is out of range.
    """
    n, k, sigma = _free(n, k, sigma)
    problems.check("risk", risk, lambda r: r >= 0, ">= 0")
    risk = jnp.asarray(risk, dtype=float)
    return jnp.maximum((risk * (n - k - 1) - sigma**2 * k) / (n - 1), 0.0)


@renamed("n", "d", "sigma", until="0.4")
@problems.in_float64
def linear_transfer_sin2(*, n: ArrayLike, d: ArrayLike, sigma: ArrayLike) -> Array:
    """Computes sin^2 of the angle beyond which linear transfer hurts, exactly at finite n and d.

    With R the risk from scratch (`scratch_risk`), the mean risks are equal where

        sin^2 = ((n - 2) R - sigma^2) / (n - 1).

    `linear_transfer_boundary` is the limit n, d -> inf.

    Args:
      n: Number of samples, >= 1.
      d: Dimension, >= 1.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      Values in [0, 1], with the broadcast shape of the arguments; 0 if linear transfer hurts at
      every angle, 1 if it hurts at none.

    Raises:
      ValueError: If an argument is out of range.

    >>> angle = jnp.arcsin(jnp.sqrt(linear_transfer_sin2(n=50, d=100, sigma=0.5)))
    >>> bool(abs(transferability("linear", n=50, d=100, theta=angle, sigma=0.5)) < 1e-6)
    True
    """
    problems.check("n", n, lambda n: (n >= 1) & (n < np.inf), "a finite number of samples >= 1")
    scratch = scratch_risk(n=n, d=d, sigma=sigma, allow_infinite=True)
    n = jnp.asarray(n, dtype=float)
    # Up to n = 2 the refit's mean risk is infinite.
    more = n > 2
    share = rest_allowed(n=jnp.where(more, n, 3.0), risk=scratch, sigma=sigma)
    return jnp.where(more, jnp.minimum(share, 1.0), 0.0)


@renamed("load", "sigma", "depth", until="0.4", gamma="load")
@problems.in_float64
def fine_tuning_boundary(*, load: ArrayLike, sigma: ArrayLike, depth: ArrayLike = 2) -> Array:
    """Computes the angle beyond which fine-tuning hurts, arccos(c / 2), in the limit.

    c is the factor of `fine_tuning_risk` for a pretrained predictor of norm 1. The paper's angle
    pi/3 is the case c = 1.

    Args:
      load: Load n / d, in [0, 1). For n >= d, fine-tuning equals scratch training.
      sigma: Standard deviation of the label noise, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      Angles in radians; 0 if fine-tuning always hurts.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Corrects Tahir et al., Features are fate, 2024 (arXiv 2410.08194), after eq. (17).

    >>> round(float(fine_tuning_boundary(load=0.5, sigma=0.0) / jnp.pi), 4)
    0.3333
    """
    check_below_one = "a load in [0, 1): from n = d on fine-tuning equals scratch training"
    problems.check("load", load, lambda g: (g >= 0) & (g < 1), check_below_one)
    problems.check_sigma(sigma)
    load = jnp.asarray(load, dtype=float)
    c = _limit_null_scale(load, 1 - load, sigma, depth, 1.0)
    helps = ~(c >= 2)  # true of NaN, which is passed on
    # The inner `where` keeps the derivative finite, since arccos has an infinite one at 1.
    return jnp.where(helps, jnp.arccos(jnp.where(helps, c / 2, 0.0)), 0.0)


def _fine_tuning_gain(load, unseen, theta, sigma, depth, size) -> Array:
    """Computes (1 - load) c (2 cos - c); `unseen` is 1 - load, exactly.

    A rounded load near 1 would not determine 1 - load.
    """
    problems.check("size", size, lambda r: (r > 0) & (r < np.inf), "a finite norm > 0")
    c = jnp.asarray(size, dtype=float) * _limit_null_scale(load, unseen, sigma, depth, size)
    # c grows like (1-load)^{-1/2 (1-1/depth)}, so the product has the limit 0 at load = 1.
    cos, _ = problems.cos_sin(theta)
    return jnp.where(unseen > 0, unseen * c * (2 * cos - c), 0.0)


def _limit_null_scale(load, unseen, sigma, depth, size) -> Array:
    """Computes `null_scale` at the limiting sizes of the seen and unseen parts."""
    sigma, size = jnp.asarray(sigma, dtype=float), jnp.asarray(size, dtype=float)
    q = jnp.where(unseen > 0, unseen, 1.0)
    seen = jnp.minimum(load, 1)
    return scale_by_seen(seen * (1 + sigma**2 / q) / size**2, seen, depth)


def _ridge_moments(n: Array, k: Array) -> tuple[Array, Array]:
    """Computes E[k^2/(u+k)^2] and E[u/(u+k)^2] for u ~ chi^2_n, by quadrature.

    1/(u+k)^2 is the Laplace transform of t e^{-kt}, and E e^{-ut} = (1+2t)^{-n/2}, E u e^{-ut} = n
    (1+2t)^{-n/2-1}. With 1+2t = e^{2s} the integrands are smooth, positive (nothing cancels) and
    negligible beyond `end`, for every n >= 1 and k > 0.
    """
    # The caller has a closed form for k = 0. A placeholder keeps this branch finite.
    k = jnp.where(k > 0, k, 1.0)
    # Beyond `end` the integrands are below e^-reach, and so below eps, relative to their largest
    # values.
    reach = 10.0 - jnp.log(jnp.finfo(k.dtype).eps)
    nodes, weights = (jnp.asarray(v, k.dtype) for v in np.polynomial.legendre.leggauss(128))
    end = jnp.minimum(reach / jnp.maximum(n - 4, 0.1), 0.5 * jnp.log1p(2 * reach / k))[..., None]
    s, w = end * (nodes + 1) / 2, end * weights / 2
    n, k = n[..., None], k[..., None]
    t = jnp.expm1(2 * s) / 2
    density = jnp.exp(-k * t - n * s)
    integrand = (k * w) * (k * t) * density * jnp.exp(2 * s)  # k^2 alone can overflow
    return jnp.sum(integrand, -1), jnp.sum(w * t * density * n, -1)


def _free(n: ArrayLike, k: ArrayLike, sigma: ArrayLike) -> tuple[Array, Array, Array]:
    problems.check("k", k, lambda k: (k >= 0) & (k < np.inf), "a number of directions >= 0")
    problems.check("n", n, lambda n: (n >= 0) & (n < np.inf), "a finite number of samples >= 0")
    problems.check_sigma(sigma)
    n, k, sigma = (jnp.asarray(v, dtype=float) for v in (n, k, sigma))
    problems.check("n - k", n - k, lambda v: v > 1, "more than 1")
    return n, k, sigma


def _check_tasks(theta: ArrayLike, sigma: ArrayLike, depth: ArrayLike) -> None:
    problems.check_theta(theta)
    problems.check_sigma(sigma)
    problems.check_depth(depth)


def _check_dimension(d: ArrayLike) -> None:
    problems.check("d", d, lambda d: (d >= 1) & (d < np.inf), "a finite dimension >= 1")


def _check_finite_scratch(name: str, n: ArrayLike, d: ArrayLike, sigma: ArrayLike) -> None:
    known_d, known_sigma = concrete(d), concrete(sigma)
    if known_d is not None and known_sigma is not None:
        problems.check(
            name,
            n,
            lambda n: (np.abs(n - known_d) > 1) | (known_sigma == 0),
            "at most d-2 or at least d+2 where sigma > 0 (the mean is infinite in between; "
            "allow_infinite=True returns inf)",
        )


def _check_finite_limit(load: ArrayLike, sigma: ArrayLike) -> None:
    known_sigma = concrete(sigma)
    if known_sigma is not None:
        problems.check(
            "load",
            load,
            lambda g: (g != 1) | (known_sigma == 0),
            "other than 1 where sigma > 0 (the mean is infinite; allow_infinite=True returns inf)",
        )
