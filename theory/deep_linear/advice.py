"""Recommendations of how to use a source: the method of least expected risk, and by how much.

`advise` takes numbers, `advise_tasks` the two weight vectors, `advise_features` a matrix of
features, and `advise_sample` nothing but a sample of the target task. The risks come from `risks`,
`covariance` and `subspace`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.deep_linear import covariance, risks, subspace
from theory.deep_linear.estimators import check_data


class Advice(NamedTuple):
    """The method of least expected risk, compared with the others.

    Attributes:
      method: Name of the best method: "scratch", "linear transfer", "ridge transfer" or
        "fine-tuning".
      risk: Its expected risk.
      runner_up: Name of the second-best method.
      margin: By how much the runner-up's risk is larger.
      risks: Expected risk of each method.
    """

    method: str
    risk: float
    runner_up: str
    margin: float
    risks: dict[str, float]


def transfer_risks(
    n: ArrayLike,
    d: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    *,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
) -> dict[str, Array]:
    """Computes the expected risk of every method, for isotropic inputs.

    "scratch", "linear transfer" and "ridge transfer" (at the best ridge) are exact at finite n and
    d. "fine-tuning" is the exact scratch risk minus the limiting gain (n, d -> inf).

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise in units of |beta_t|, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed; it matters for fine-tuning only.
      size: |beta_s| / |beta_t|; it matters for fine-tuning only.

    Returns:
      The risk of each method in units of |beta_t|^2, with the broadcast shape of the arguments; inf
      where a mean is infinite.

    Raises:
      ValueError: If an argument is out of range.

    >>> {name: round(float(risk), 2) for name, risk in transfer_risks(50, 500, 0.3, 0.5).items()}
    {'scratch': 0.93, 'linear transfer': 0.09, 'ridge transfer': 0.09, 'fine-tuning': 0.11}
    """
    scratch = risks.scratch_risk(n, d, sigma, allow_infinite=True)
    gain = risks.transferability("fine_tune", n, d, theta, sigma, depth=depth, size=size)
    by_method = {"scratch": scratch, **_refits(n, theta, sigma), "fine-tuning": scratch - gain}
    shape = jnp.broadcast_shapes(*(v.shape for v in by_method.values()))
    return {name: jnp.broadcast_to(value, shape) for name, value in by_method.items()}


def advise(
    n: int, d: int, theta: float, sigma: float, *, depth: float = 2, size: float = 1.0
) -> Advice:
    """Recommends how to use a source at a given angle to the target.

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise in units of |beta_t|, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed.
      size: |beta_s| / |beta_t|.

    Returns:
      The advice, with risks in units of |beta_t|^2.

    Raises:
      ValueError: If an argument is out of range.

    >>> advise(50, 500, 0.3, 0.2).method
    'fine-tuning'
    >>> advise(2000, 500, 1.2, 0.2).method
    'scratch'
    """
    return _advice(transfer_risks(n, d, theta, sigma, depth=depth, size=size))


def advise_tasks(
    beta_s: Float[ArrayLike, " d"],
    beta_t: Float[ArrayLike, " d"],
    n: int,
    sigma: float,
    *,
    inputs: Float[ArrayLike, "d d"] | None = None,
    depth: float = 2,
) -> Advice:
    """Recommends how to use a source, given the weight vectors of both tasks.

    With `inputs`, the risks of scratch training and fine-tuning are deterministic equivalents (n
    and d large). The others are exact.

    Args:
      beta_s: Source task `(d,)`, nonzero.
      beta_t: Target task `(d,)`, nonzero.
      n: Number of target samples.
      sigma: Standard deviation of the label noise, in the units of the labels.
      inputs: Covariance matrix of x, `(d, d)`; the identity if None.
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      The advice, with risks |beta - beta_t|^2, in the norm of Sigma if `inputs` is given.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.

    >>> advise_tasks(jnp.array([1.0, 0.0]), jnp.array([1.0, 0.5]), 50, 0.1).method
    'scratch'
    """
    theta, size = angle(beta_s, beta_t), jnp.linalg.norm(jnp.asarray(beta_t, dtype=float))
    if inputs is None:
        ratio = jnp.linalg.norm(jnp.asarray(beta_s, dtype=float)) / size
        by_method = transfer_risks(
            n, jnp.size(beta_t), theta, jnp.asarray(sigma) / size, depth=depth, size=ratio
        )
        return _advice(by_method, float(size**2))
    s, source, target = covariance.diagonalise(inputs, beta_s, beta_t)
    theta, size2 = covariance.sigma_angle(s, source, target)
    refits = _refits(n, theta, sigma / jnp.sqrt(size2))
    by_method = {
        "scratch": covariance.scratch_risk(s, target, n, sigma),
        **{name: size2 * value for name, value in refits.items()},
        "fine-tuning": covariance.fine_tune_risk(s, source, target, n, sigma, depth),
    }
    return _advice(by_method)


def advise_features(
    features: Float[ArrayLike, "d k"], target: Float[ArrayLike, "d m"], n: int, sigma: float
) -> Advice:
    """Recommends how to use a source that left k features, for a target of m outputs.

    The choice is between scratch training, linear transfer and ridge transfer at its best ridge.
    Fine-tuning from k > 1 features has no known law and is left out. The ridge risk is a
    deterministic equivalent (n and k large), the others are exact.

    Args:
      features: Feature matrix `(d, k)` with linearly independent columns, not necessarily
        orthonormal.
      target: Target map `(d, m)`.
      n: Number of target samples.
      sigma: Standard deviation of the label noise of each output.

    Returns:
      The advice, with risks |B_hat - B|_F^2.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, the columns are linearly
        dependent, or a number is out of range.
    """
    U, B = jnp.asarray(features, dtype=float), jnp.asarray(target, dtype=float)
    if U.ndim != 2 or 0 in U.shape:
        raise ValueError(f"features must have shape [d, k]; got {U.shape}")
    problems.check("features", U, np.isfinite, "finite")
    U, R = jnp.linalg.qr(U)
    pivots = jnp.abs(jnp.diagonal(R))
    if not float(pivots.min()) > 100 * U.shape[0] * float(jnp.finfo(U.dtype).eps) * pivots.max():
        raise ValueError("features must have linearly independent columns; drop the superfluous")
    of = subspace.overlap(U, B)
    of_all = subspace.overlap(jnp.eye(U.shape[0]), B)
    noise = of.missed + of.m * sigma**2
    by_method = {
        "scratch": subspace.linear_transfer_risk(n, of_all, sigma, allow_infinite=True),
        "linear transfer": subspace.linear_transfer_risk(n, of, sigma, allow_infinite=True),
    }
    if of.explained > 0:
        best = of.k * noise / (n * of.explained)
        # The features are isotropic: only the length of the signal matters, not its direction.
        signal = jnp.zeros(of.k).at[0].set(of.explained)
        at = covariance.equivalent(jnp.ones(of.k), n, best)
        by_method["ridge transfer"] = of.missed + at.risk(signal, jnp.sqrt(noise))
    return _advice(by_method)


class SampleAdvice(NamedTuple):
    """Advice from a sample of the target task, with the estimates that it rests on.

    Attributes:
      advice: The recommendation.
      stderr: For each method, the standard error of how much more risk it leaves than the advised
        one.
      undecided: Methods within two standard errors of the advised one; the sample cannot tell them
        apart.
      theta: Estimated angle between source and target, in radians.
      sigma: Estimated standard deviation of the label noise.
      size: Estimated |beta_t|.
      anisotropy: Estimated d tr(C^2) / (tr C)^2 of the covariance C of the inputs. The risks assume
        isotropic inputs, for which it is 1.
    """

    advice: Advice
    stderr: dict[str, float]
    undecided: tuple[str, ...]
    theta: float
    sigma: float
    size: float
    anisotropy: float


def advise_sample(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    beta_s: Float[ArrayLike, " d"],
    *,
    depth: float = 2,
    blocks: int = 20,
) -> SampleAdvice:
    """Recommends how to use a source, given only a sample of the target task.

    Nothing is trained, and n < d is allowed. The moments are estimated without bias: |beta_t|^2
    from y_i y_j x_i.x_j over pairs i != j, <beta_s, beta_t> from y x.beta_s, and sigma^2 from what
    these leave of y^2. Inputs are taken to be centred, with one common variance that is estimated.
    Standard errors are a jackknife over blocks of the sample.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Source task `(d,)`, nonzero.
      depth: Number of weight matrices, >= 1, inf allowed.
      blocks: Number of blocks of the jackknife, from 2 to n / 2.

    Returns:
      The advice and the estimates, with risks in the units of y^2.

    Raises:
      ValueError: If shapes do not conform, a value is not finite, `blocks` is out of range, or the
        sample shows no linear dependence of y on x.
    """
    x, y, beta_s = (jnp.asarray(v, dtype=float) for v in (x, y, beta_s))
    check_data(x, y, beta_s)
    n, d = x.shape
    if not 2 <= blocks <= n // 2:
        raise ValueError(f"blocks must be from 2 to n / 2 = {n // 2}; got {blocks}")
    scale = jnp.sqrt(jnp.mean(x**2))
    # In inputs of unit variance, which the closed forms assume; x.beta_s stays as it is.
    x, beta_s = x / scale, beta_s * scale
    norms2 = jnp.sum(x**2, axis=-1)
    # Sums over the sample without each block in turn, and over all of it (row 0).
    block = jnp.arange(n) * blocks // n
    included = jnp.concatenate([jnp.ones((1, n)), block != jnp.arange(blocks)[:, None]])
    count = included.sum(-1)
    image = included @ (y[:, None] * x)
    own = included @ (y**2 * norms2)
    # The square of a sum less its diagonal is the sum over pairs i != j.
    size2 = (jnp.sum(image**2, -1) - own) / (count * (count - 1))
    inner = image @ beta_s / count
    length = jnp.linalg.norm(beta_s)
    size2 = jnp.maximum(size2, (inner / length) ** 2)  # |beta_t| is at least its projection
    if not float(size2[0]) > 0:
        raise ValueError("y must depend linearly on x; no such dependence shows in this sample")
    # An estimate without a block may come out negative by chance.
    size2 = jnp.maximum(size2, 1e-6 * size2[0])
    sigma = jnp.sqrt(jnp.maximum(included @ y**2 / count - size2, 0.0))
    size = jnp.sqrt(size2)
    theta = jnp.arccos(jnp.clip(inner / (length * size), -1, 1))
    by_method = transfer_risks(n, d, theta, sigma / size, depth=depth, size=length / size)
    advice = _advice({k: v[0] for k, v in by_method.items()}, float(size2[0]))
    stderr = {}
    for name in by_method:
        gaps = (size2 * (by_method[name] - by_method[advice.method]))[1:]
        # The jackknife's variance; paired, since the methods are compared on the same sample.
        stderr[name] = float(jnp.sqrt((blocks - 1) * jnp.mean((gaps - gaps.mean()) ** 2)))
    others = {name: risk - advice.risk for name, risk in advice.risks.items()}
    del others[advice.method]
    undecided = tuple(name for name, gap in others.items() if gap <= 2 * stderr[name])
    cross = x @ x.T
    # An unbiased estimate of tr C^2; the inputs are scaled such that tr C = d.
    pairs = (jnp.sum(cross**2) - jnp.sum(norms2**2)) / (n * (n - 1))
    return SampleAdvice(
        advice,
        stderr,
        undecided,
        float(theta[0]),
        float(sigma[0]),
        float(size[0] / scale),
        float(pairs / d),
    )


def angle(beta_s: Float[ArrayLike, " d"], beta_t: Float[ArrayLike, " d"]) -> Array:
    """Computes the angle between two weight vectors, accurately at both ends of [0, pi].

    Args:
      beta_s: First vector `(d,)`, nonzero.
      beta_t: Second vector `(d,)`, nonzero.

    Returns:
      The angle in radians.

    Raises:
      ValueError: If the shapes differ, or a vector is 0 or not finite.

    >>> round(float(angle(jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0]))), 4)
    1.5708
    """
    source, target = (jnp.asarray(beta, dtype=float) for beta in (beta_s, beta_t))
    for name, vector in (("beta_s", source), ("beta_t", target)):
        size = jnp.linalg.norm(vector)
        problems.check(f"|{name}|", size, lambda s: (s > 0) & (s < np.inf), "positive and finite")
    if source.shape != target.shape:
        raise ValueError(
            f"beta_s and beta_t must have one shape; got {source.shape} and {target.shape}"
        )
    return problems.angle(source, target)


def _refits(n: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> dict[str, Array]:
    """Computes the risks of linear transfer, without ridge and at its best ridge."""
    plain = risks.linear_transfer_risk(n, theta, sigma, allow_infinite=True)
    best = risks.optimal_ridge(n, theta, sigma)
    # The best ridge is infinite at theta = pi/2 (nothing is transferred) and 0 without any error.
    finite = jnp.isfinite(best) & (best < 1e12) & (best > 0)
    ridge = risks.linear_transfer_risk(
        n, theta, sigma, jnp.where(finite, best, 1.0), allow_infinite=True
    )
    # An infinite ridge transfers nothing, and the risk is |beta_t|^2 = 1.
    ridge = jnp.where(finite, ridge, jnp.where(best > 0, 1.0, plain))
    return {"linear transfer": plain, "ridge transfer": ridge}


def _advice(by_method: dict[str, Array], unit: float = 1.0) -> Advice:
    """Picks the best and the second-best method; the risks are multiples of `unit`."""
    plain = {name: unit * float(value) for name, value in by_method.items()}
    # `sorted` is stable: where methods tie, the simpler one is named.
    first, second, *_ = sorted(plain, key=plain.__getitem__)
    return Advice(first, plain[first], second, plain[second] - plain[first], plain)
