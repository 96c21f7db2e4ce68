"""Recommends how to use a source: the method with the smallest expected risk.

`advise` takes numbers, `advise_tasks` the two weight vectors, `advise_features` a matrix of
features, and `advise_sample` only a sample of the target task. The risks come from `risks`,
`covariance`, `subspace` and `penalised`.

Every method is compared at its best, because a user who can choose a penalty for transfer can also
choose one from scratch. The candidates with a penalty are

    ridge from scratch
    ridge transfer      linear transfer with a penalty on its coefficient
    L2-SP               a pull towards the source
    scaled L2-SP        a pull towards the best multiple of the source, also a negative one
    free direction      ridge regression with no penalty along the source
    fixed direction     ridge regression across the source, next to its best multiple
    early stopping      gradient flow from the best multiple of the source, for the best time.

Each has the penalty with the smallest expected risk, which depends on the noise and the angle.
Scaled L2-SP is never worse than ridge regression from scratch, the multiple 0, nor than L2-SP. The
free direction is never worse than linear transfer, the infinite penalty. For isotropic inputs the
fixed direction has the smallest risk of all methods that are linear in the labels: at a given
angle, the target's component along the source is known, and across it every direction is equally
likely. The others show what is lost by fewer choices. Early stopping, whose time takes the place of
a penalty, is a candidate only for other covariances, where it may be better than all others. The
paper compares transfer with scratch training without a penalty. `against="unregularised"` does the
same.
"""

import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.deprecated import renamed
from sail_jax.views import view
from theory import problems
from theory.deep_linear import (
    certainty,
    covariance,
    penalised,
    regularised,
    risks,
    subspace,
    training_time,
)
from theory.deep_linear.certainty import EXACT, Known
from theory.deep_linear.estimators import check_data

Against = Literal["regularised", "unregularised"]
T = TypeVar("T")

# The candidates, simpler ones first: of two equal risks the first is advised.
METHODS = (
    "scratch", "ridge from scratch", "linear transfer", "ridge transfer", "fine-tuning", "L2-SP",
    "scaled L2-SP", "free direction", "fixed direction", "early stopping",
)  # fmt: skip
PAPER = METHODS[0], *METHODS[2:5]


class Advice(NamedTuple):
    """The method with the smallest expected risk, compared with the others.

    Attributes:
      method: Name of the best method, one of `METHODS`.
      risk: Its expected risk.
      runner_up: Name of the second-best method.
      margin: The runner-up's risk minus the best risk.
      risks: Expected risk of each method.
      known: How each risk was obtained, and its error. Empty if the risks are estimates from a
        sample.
      undecided: Methods whose risks are within the errors of the best one.
      settings: The best "penalty" and the "scale" of the source, for the methods that have them.
        L2-SP towards features has a second penalty "along" them. Early stopping has a "time", as in
        `training_time.flow_risk`.
      simplest: The first of `METHODS` whose risk is at most 1 % above the best one.
    """

    method: str
    risk: float
    runner_up: str
    margin: float
    risks: dict[str, float]
    known: dict[str, Known] = {}  # noqa: RUF012
    undecided: tuple[str, ...] = ()
    settings: dict[str, dict[str, float]] = {}  # noqa: RUF012
    simplest: str = ""

    def _repr_html_(self) -> str:
        rows = []
        for method, risk in sorted(self.risks.items(), key=lambda item: item[1]):
            known, settings = self.known.get(method), self.settings.get(method, {})
            how = known.how if known else "estimated"
            if known and known.error:  # 0 if it is exact, None if it was not measured
                how += f", ± {known.error:.2g}"
            rows.append((method, f"{risk:.4g}", how, _spelt(settings)))
        unsure = f"\nNot decided, within the errors: {', '.join(self.undecided)}"
        title = f"{self.method}{unsure if self.undecided else ''}"
        return view(title, rows, ("method", "risk", "known", "settings"))


@renamed("n", "d", "theta", "sigma", until="0.4")
@problems.defined
def transfer_risks(
    *,
    n: ArrayLike,
    d: ArrayLike,
    theta: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
    size: ArrayLike = 1.0,
    against: Against = "regularised",
) -> dict[str, Array]:
    """Computes the expected risk of every method, for isotropic inputs.

    "scratch", "linear transfer" and "ridge transfer" (at the best ridge) are exact at finite n and
    d. "fine-tuning" is the exact scratch risk minus the limiting gain (n, d -> inf). "ridge from
    scratch", "L2-SP", "scaled L2-SP", "free direction" and "fixed direction", at the best penalty,
    are deterministic equivalents (n and d large). The penalties are those of
    `penalised.best_penalty` and `optimal_ridge`. `advise` computes the risks at finite n and d.

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise in units of |beta_t|, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed; it matters for fine-tuning only.
      size: |beta_s| / |beta_t|; it matters for fine-tuning and L2-SP only.
      against: "regularised" includes ridge regression and related methods among the candidates,
        each at its best penalty; "unregularised" omits them, as in the paper.

    Returns:
      The risk of each method in units of |beta_t|^2, with the broadcast shape of the arguments; inf
      where a mean is infinite.

    Raises:
      ValueError: If an argument is out of range.

    References:
      Tahir et al., Features are fate, 2024 (arXiv 2410.08194), Thms 3.6 to 3.9, without the
      candidates of `penalised`.

    >>> for name, risk in transfer_risks(n=98, d=100, theta=jnp.pi / 2, sigma=0.2).items():
    ...     print(f"{name}: {risk:.2f}")
    scratch: 3.94
    ridge from scratch: 0.19
    linear transfer: 1.01
    ridge transfer: 1.00
    fine-tuning: 3.97
    L2-SP: 0.28
    scaled L2-SP: 0.19
    free direction: 0.19
    fixed direction: 0.19
    """
    scratch = risks.scratch_risk(n=n, d=d, sigma=sigma, allow_infinite=True)
    gain = risks.transferability(
        "fine_tuning", n=n, d=d, theta=theta, sigma=sigma, depth=depth, size=size
    )
    by_method = {"scratch": scratch, **_refits(n, theta, sigma), "fine-tuning": scratch - gain}
    if against == "regularised":
        sin = problems.cos_sin(theta)[1]
        for name, distance in (
            ("ridge from scratch", 1.0),
            ("L2-SP", _distance(theta, size)),
            ("scaled L2-SP", sin),
        ):
            by_method[name] = penalised.best_risk(n=n, d=d, distance=distance, sigma=sigma)
        by_method["free direction"] = _free(n, d, theta, sigma, by_method["linear transfer"])
        by_method["fixed direction"] = _fixed(n, d, sin, sigma)
    shape = jnp.broadcast_shapes(*(v.shape for v in by_method.values()))
    return {name: jnp.broadcast_to(value, shape) for name, value in _in_order(by_method).items()}


@renamed("n", "d", "theta", "sigma", until="0.4")
@problems.defined
def advise(
    *,
    n: int,
    d: int,
    theta: float,
    sigma: float,
    depth: float = 2,
    size: float = 1.0,
    against: Against = "regularised",
) -> Advice:
    """Recommends how to use a source at a given angle to the target.

    Args:
      n: Number of target samples, >= 1.
      d: Dimension, >= 1.
      theta: Angle between source and target in radians, in [0, pi].
      sigma: Standard deviation of the label noise in units of |beta_t|, >= 0.
      depth: Number of weight matrices, >= 1, inf allowed.
      size: |beta_s| / |beta_t|.
      against: "regularised" includes ridge regression and related methods among the candidates,
        each at its best penalty; "unregularised" omits them, as in the paper.

    Returns:
      The advice, with risks in units of |beta_t|^2. Risks are exact at this n and d, except that
      the risk of fine-tuning at n < d is simulated, and that methods with a penalty have limits
      where n and d are in the hundreds.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If an argument is out of range.

    >>> advise(n=50, d=500, theta=0.3, sigma=0.2).method
    'fixed direction'
    >>> advise(n=50, d=500, theta=0.3, sigma=0.2).simplest
    'scaled L2-SP'
    >>> advise(n=98, d=100, theta=1.5, sigma=0.2, against="unregularised").method
    'ridge transfer'
    """
    return _isotropic(n, d, theta, sigma, depth, size, against)


def _isotropic(
    n: int,
    d: int,
    theta: Array | float,
    sigma: Array | float,
    depth: float,
    size: Array | float,
    against: Against,
    unit: float = 1.0,
) -> Advice:
    """Advises for isotropic inputs, with risks in units of `unit`."""
    limits = transfer_risks(
        n=n, d=d, theta=theta, sigma=sigma, depth=depth, size=size, against=against
    )
    theta, sigma, size = float(theta), float(sigma), float(size)
    found = certainty.isotropic(n=n, d=d, theta=theta, sigma=sigma, depth=depth, size=size)
    risks_now = {name: found[name][0] if name in found else v for name, v in limits.items()}
    known = {name: found[name][1] if name in found else EXACT for name in limits}
    return _advice(risks_now, unit, known, _settings(n, d, theta, sigma, size, limits.keys()))


def _settings(
    n: int, d: int, theta: float, sigma: float, size: float, names: Collection[str]
) -> dict[str, dict[str, float]]:
    """Computes the best penalties, exactly, and the scales of the source."""
    cos, sin = (float(v) for v in problems.cos_sin(theta))
    at = {
        "ridge from scratch": (0.0, 1.0),
        "L2-SP": (1.0, float(_distance(theta, size))),
        "scaled L2-SP": (cos / size, sin),
    }
    found = {
        name: {
            "scale": scale,
            "penalty": float(penalised.best_penalty(n=n, d=d, distance=distance, sigma=sigma)),
        }
        for name, (scale, distance) in at.items()
    }
    ridge = float(risks.optimal_ridge(n=n, theta=theta, sigma=sigma))
    found["ridge transfer"] = {"penalty": ridge}
    if n > 2 and d > 1:
        penalty = penalised.best_penalty(n=n - 1, d=d - 1, distance=sin, sigma=sigma)
        found["free direction"] = {"penalty": float(penalty) * (n - 1) / n}
    if d > 1:
        penalty = penalised.best_penalty(n=n, d=d - 1, distance=sin, sigma=sigma)
        found["fixed direction"] = {"scale": cos / size, "penalty": float(penalty)}
    return {name: found[name] for name in names if name in found}


@renamed("n", "sigma", until="0.4")
@problems.defined
def advise_tasks(
    beta_s: Float[ArrayLike, " d"],
    beta_t: Float[ArrayLike, " d"],
    *,
    n: int,
    sigma: float,
    inputs: Float[ArrayLike, "d d"] | None = None,
    depth: float = 2,
    against: Against = "regularised",
) -> Advice:
    """Recommends how to use a source, given the weight vectors of both tasks.

    With `inputs`, the risks of linear and ridge transfer are exact, and so are those of scratch
    training and fine-tuning for n >= d. The others are limits of large n and d, and their error at
    this n and d is measured on random data sets. Without `inputs` the risks are those of `advise`.

    Args:
      beta_s: Source task `(d,)`, nonzero.
      beta_t: Target task `(d,)`, nonzero.
      n: Number of target samples.
      sigma: Standard deviation of the label noise, in the units of the labels.
      inputs: Covariance matrix of x, `(d, d)`; the identity if None.
      depth: Number of weight matrices, >= 1, inf allowed.
      against: "regularised" includes ridge regression and related methods among the candidates,
        each at its best penalty; "unregularised" omits them, as in the paper.

    Returns:
      The advice, with risks |beta - beta_t|^2, in the norm of Sigma if `inputs` is given.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If an argument is out of range or shapes do not conform.

    >>> advise_tasks(jnp.array([1.0, 0.0]), jnp.array([1.0, 0.5]), n=50, sigma=0.1).method
    'fixed direction'
    """
    theta, size = angle(beta_s, beta_t), jnp.linalg.norm(jnp.asarray(beta_t, dtype=float))
    if inputs is None:
        ratio = jnp.linalg.norm(jnp.asarray(beta_s, dtype=float)) / size
        noise, d = jnp.asarray(sigma) / size, jnp.size(beta_t)
        return _isotropic(n, d, theta, noise, depth, ratio, against, float(size**2))
    s, source, target = covariance.diagonalise(inputs, beta_s, beta_t)
    theta, size2 = covariance.sigma_angle(s, source, target)
    refits = _refits(n, theta, sigma / jnp.sqrt(size2))
    by_method = {
        "scratch": covariance.scratch_risk(s, target, n=n, sigma=sigma),
        **{name: size2 * value for name, value in refits.items()},
        "fine-tuning": covariance.fine_tuning_risk(
            s, source, target, n=n, sigma=sigma, depth=depth
        ),
    }
    rank, exact = int((s > 0).sum()), {*refits}
    if n >= rank - (sigma > 0):  # the risk depends only on the rank, and the source is forgotten
        every = risks.scratch_risk(n=n, d=rank, sigma=sigma, allow_infinite=True)
        by_method |= {"scratch": every, "fine-tuning": every}
        exact |= {"scratch", "fine-tuning"}
    best = risks.optimal_ridge(n=n, theta=theta, sigma=sigma / jnp.sqrt(size2))
    best *= s @ source**2 / (source @ source)  # of a coefficient in the units of the others
    settings = {"ridge transfer": {"penalty": float(best)}}
    if against == "regularised":
        by_method["free direction"] = by_method["linear transfer"]
        found = _penalised(s, source, target, n, sigma)
        by_method |= {name: risk for name, (risk, _) in found.items()}
        settings |= {name: at for name, (_, at) in found.items()}
        stopped, settings["early stopping"] = _stopped(s, source, target, n, sigma)
        by_method["early stopping"] = stopped
        exact |= {"free direction"} - found.keys()
    limits = {name: float(v) for name, v in by_method.items() if name not in exact}
    known = certainty.any_inputs(
        np.asarray(s),
        np.asarray(source),
        np.asarray(target),
        n=n,
        sigma=float(sigma),
        depth=depth,
        limits=limits,
        settings=settings,
    )
    by_method = _in_order(by_method)
    return _advice(by_method, 1.0, {name: known.get(name, EXACT) for name in by_method}, settings)


@renamed("n", "sigma", until="0.4")
@problems.defined
def advise_features(
    features: Float[ArrayLike, "d k"],
    target: Float[ArrayLike, "d m"],
    *,
    n: int,
    sigma: float,
    against: Against = "regularised",
) -> Advice:
    """Recommends how to use a source with k features, for a target of m outputs.

    Fine-tuning from k > 1 features without a penalty is omitted, because its law is unknown.
    L2-SP uses only the source's features here. It pulls the part of the fit outside their span to 0
    with one penalty, and the part inside with another. Its risk is a limit of large n and k, and
    its error at these sizes is measured on random data sets. The other risks are exact where n and
    d are at most in the hundreds. The free direction leaves all features free of the penalty.
    "scaled L2-SP" and "fixed direction" are candidates for k = 1 only, because the best multiple
    of each of k features would be the target itself. Each output has its own multiple.

    Args:
      features: Feature matrix `(d, k)` with linearly independent columns, not necessarily
        orthonormal.
      target: Target map `(d, m)`.
      n: Number of target samples.
      sigma: Standard deviation of the label noise of each output.
      against: "regularised" includes ridge regression and related methods among the candidates,
        each at its best penalty; "unregularised" omits them, as in the paper.

    Returns:
      The advice, with risks |B_hat - B|_F^2.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If shapes do not conform, a value is not finite, the columns are linearly
        dependent, or a number is out of range.
    """
    U, B = jnp.asarray(features, dtype=float), jnp.asarray(target, dtype=float)
    if U.ndim != 2 or 0 in U.shape:
        raise ValueError(f"features must have shape [d, k]; got {U.shape}")
    problems.check_squares("features", U)
    U, R = linalg.qr(U)
    pivots = jnp.abs(jnp.diagonal(R))
    if not float(pivots.min()) > 100 * U.shape[0] * float(jnp.finfo(U.dtype).eps) * pivots.max():
        raise ValueError("features must have linearly independent columns; drop the superfluous")
    of = subspace.overlap(U, B)
    of_all = subspace.overlap(jnp.eye(U.shape[0]), B)
    d, sigma_all = len(U), jnp.sqrt(of.m) * sigma  # the noise of all outputs together
    plain, refitted = (
        subspace.linear_transfer_risk(n=n, of=part, sigma=sigma, allow_infinite=True)
        for part in (of_all, of)
    )
    found = {"scratch": (float(plain), EXACT)}
    found |= dict.fromkeys(("linear transfer", "free direction"), (float(refitted), EXACT))
    around = float(_around(of, d, n, sigma_all))
    found |= certainty.features(n=n, d=d, of=of, sigma=float(sigma_all), around=around)
    found = _in_order(found, METHODS if against == "regularised" else PAPER)
    return _advice(
        {name: risk for name, (risk, _) in found.items()},
        1.0,
        {name: known for name, (_, known) in found.items()},
        _in_order(_feature_settings(of, d, n, sigma_all), found),
    )


def _feature_settings(
    of: subspace.Overlap, d: int, n: int, sigma: Array
) -> dict[str, dict[str, float]]:
    """Computes the best penalties of what `advise_features` offers, exactly."""

    def best(size: int | Array, part2: Array, noise: Array = sigma) -> float:
        distance = jnp.sqrt(part2)
        return float(penalised.best_penalty(n=n, d=size, distance=distance, sigma=noise))

    across = best(d - of.k, of.missed) if d > of.k else math.inf
    return {
        "ridge from scratch": {"penalty": best(d, of.explained + of.missed)},
        "ridge transfer": {"penalty": best(of.k, of.explained, jnp.hypot(of.missed**0.5, sigma))},
        "L2-SP": {"along": best(of.k, of.explained), "penalty": across},
        "scaled L2-SP": {"penalty": best(d, of.missed)},
        "free direction": {"penalty": across},
        "fixed direction": {"penalty": across},
    }


def _around(of: subspace.Overlap, d: int, n: int, sigma: Array) -> Array:
    """Computes the risk of ridge regression with one penalty inside the features' span and another
    outside, both optimal.

    The best penalties are inverse to the mean square of a coefficient, as in
    `penalised.best_penalty`. In coordinates where both penalties are 1, the inputs have these mean
    squares as eigenvalues, and every coefficient has mean square 1.
    """
    inside, outside = of.explained / of.k, of.missed / max(d - of.k, 1)
    scale = jnp.maximum(inside, outside)
    some = scale > 0  # else the target is 0, and infinite penalties leave no risk
    unit = jnp.where(some, scale, 1.0)
    spread = jnp.where(jnp.arange(d) < of.k, inside, outside) / unit
    at = covariance.equivalent(jnp.where(some, spread, 1.0), n, sigma**2 / (n * unit))
    return jnp.where(some, at.risk(jnp.full(d, unit), sigma), 0.0)


def _spelt(settings: Mapping[str, float]) -> str:
    """Lists settings with their values."""
    return ", ".join(f"{name} {value:.4g}" for name, value in settings.items())


class SampleAdvice(NamedTuple):
    """Advice from a sample of the target task, with the estimates behind it.

    Attributes:
      advice: The recommendation.
      stderr: For each method, the standard error of its risk minus the advised method's risk. It is
        inf if the difference is infinite without some of the blocks.
      undecided: Methods within two standard errors of the advised one. The sample cannot separate
        them.
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

    def _repr_html_(self) -> str:
        best = self.advice.method
        rows = [
            (method, f"{risk:.4g}", f"{self.stderr[method]:.2g}" if method != best else "")
            for method, risk in sorted(self.advice.risks.items(), key=lambda item: item[1])
        ]
        unsure = f"\nNot decided by the sample: {', '.join(self.undecided)}"
        title = f"{best}{unsure if self.undecided else ''}"
        return view(title, rows, ("method", "risk", "standard error of the difference"))


@problems.defined
def advise_sample(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, " n"],
    beta_s: Float[ArrayLike, " d"],
    *,
    depth: float = 2,
    blocks: int = 20,
    against: Against = "regularised",
) -> SampleAdvice:
    """Recommends how to use a source, given only a sample of the target task.

    Nothing is trained, and n < d is allowed. The moments are estimated without bias. |beta_t|^2
    comes from y_i y_j x_i.x_j over pairs i != j, and <beta_s, beta_t> from y x.beta_s. sigma^2 is
    the remainder of y^2. Inputs are assumed to be centred, with a common variance that is
    estimated. Standard errors are a jackknife over blocks of the sample.

    Args:
      x: Inputs `(n, d)`.
      y: Labels `(n,)`.
      beta_s: Source task `(d,)`, nonzero.
      depth: Number of weight matrices, >= 1, inf allowed.
      blocks: Number of blocks of the jackknife, from 2 to n / 2.
      against: "regularised" includes ridge regression and related methods among the candidates,
        each at its best penalty; "unregularised" omits them, as in the paper.

    Returns:
      The advice and the estimates, with risks in the units of y^2.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If shapes do not conform, a value is not finite, `blocks` is out of range, or the
        sample shows no linear dependence of y on x.
    """
    x, y, beta_s = (jnp.asarray(v, dtype=float) for v in (x, y, beta_s))
    check_data(x, y, beta_s)
    n, d = x.shape
    if not 2 <= blocks <= n // 2:
        raise ValueError(f"blocks must be from 2 to n / 2 = {n // 2}; got {blocks}")
    scale = jnp.sqrt(jnp.mean(x**2))
    # The closed forms assume inputs of unit variance. x.beta_s is unchanged.
    x, beta_s = x / scale, beta_s * scale
    norms2 = jnp.sum(x**2, axis=-1)
    # Sums over the sample without each block in turn, and over all of it (row 0).
    block = jnp.arange(n) * blocks // n
    included = jnp.concatenate([jnp.ones((1, n)), block != jnp.arange(blocks)[:, None]])
    count = included.sum(-1)
    image = included @ (y[:, None] * x)
    own = included @ (y**2 * norms2)
    # The square of a sum minus its diagonal is the sum over pairs i != j.
    size2 = (jnp.sum(image**2, -1) - own) / (count * (count - 1))
    inner = image @ beta_s / count
    length = jnp.linalg.norm(beta_s)
    size2 = jnp.maximum(size2, (inner / length) ** 2)  # |beta_t| is at least its projection
    if not float(size2[0]) > 0:
        raise ValueError("y must depend linearly on x; no such dependence shows in this sample")
    # An estimate without a block may be negative by chance.
    size2 = jnp.maximum(size2, 1e-6 * size2[0])
    sigma = jnp.sqrt(jnp.maximum(included @ y**2 / count - size2, 0.0))
    size = jnp.sqrt(size2)
    theta = jnp.arccos(jnp.clip(inner / (length * size), -1, 1))
    by_method = transfer_risks(
        n=n, d=d, theta=theta, sigma=sigma / size, depth=depth, size=length / size, against=against
    )
    advice = _advice({k: v[0] for k, v in by_method.items()}, float(size2[0]))
    stderr = {}
    for name in by_method:
        risk, best = by_method[name], by_method[advice.method]
        gaps = (size2 * jnp.where(risk == best, 0.0, risk - best))[1:]  # both may be infinite
        # The jackknife's variance is paired, because the methods are compared on the same sample.
        stderr[name] = float(jnp.sqrt((blocks - 1) * jnp.mean((gaps - gaps.mean()) ** 2)))
        if jnp.isinf(gaps).any():
            stderr[name] = 0.0 if (gaps == gaps[0]).all() else math.inf
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


@problems.defined
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


@problems.in_float64
def _distance(theta: ArrayLike, size: ArrayLike) -> Array:
    """Computes |beta_t - beta_s| for a target of norm 1, without cancellation at small angles."""
    problems.check("size", size, lambda r: (r > 0) & (r < np.inf), "a finite norm > 0")
    size = jnp.asarray(size, dtype=float)
    half = jnp.sin(jnp.asarray(theta, dtype=float) / 2)
    return jnp.sqrt((1 - size) ** 2 + 4 * size * half**2)


def _in_order(by_method: dict[str, T], among: Collection[str] = METHODS) -> dict[str, T]:
    """Selects candidates, in the order of `METHODS`."""
    return {name: by_method[name] for name in METHODS if name in by_method and name in among}


@problems.unchecked_in_float64
def _free(
    n: ArrayLike, d: ArrayLike, theta: ArrayLike, sigma: ArrayLike, linear: ArrayLike
) -> Array:
    """Computes `regularised.direction_risk`; in one dimension, or for n <= 2, linear transfer's."""
    n, d = jnp.asarray(n, dtype=float), jnp.asarray(d, dtype=float)
    some = (n > 2) & (d > 1)
    risk = regularised.direction_risk(
        n=jnp.where(some, n, 3.0), d=jnp.where(some, d, 2.0), theta=theta, sigma=sigma
    )
    return jnp.where(some, risk, jnp.asarray(linear, dtype=float))


@problems.unchecked_in_float64
def _fixed(n: ArrayLike, d: ArrayLike, sin: Array, sigma: ArrayLike) -> Array:
    """Computes the limiting risk of the fixed direction; in one dimension it fits nothing."""
    d = jnp.asarray(d, dtype=float)
    risk = penalised.best_risk(n=n, d=jnp.maximum(d - 1, 1.0), distance=sin, sigma=sigma)
    return jnp.where(d > 1, risk, sin**2)


def _penalised(
    s: Array, source: Array, target: Array, n: int, sigma: ArrayLike
) -> dict[str, tuple[Array, dict[str, float]]]:
    """Computes limiting risks and settings of the methods with a penalty, for any covariance."""
    scratch, towards = (
        penalised.best_risk_of(s, offset, n=n, sigma=sigma) for offset in (target, target - source)
    )
    scaled = penalised.best_scaled_risk_of(s, source, target, n=n, sigma=sigma)
    found = {
        "ridge from scratch": (scratch[0], 0.0, scratch[1]),
        "L2-SP": (towards[0], 1.0, towards[1]),
        "scaled L2-SP": scaled,
        "fixed direction": penalised.best_fixed_risk_of(s, source, target, n=n, sigma=sigma),
    }
    if n > 2 and s.size > 1:
        across = regularised.across(s, source, target)
        penalty, rest = penalised.best_risk_of(*across, n=n - 1, sigma=sigma)
        free = risks.refitted_risk(n=n, rest=rest, sigma=sigma)
        found["free direction"] = penalty * (n - 1) / n, 0.0, free
    return {
        name: (risk, {"scale": float(scale), "penalty": float(penalty)})
        for name, (penalty, scale, risk) in found.items()
    }


def _stopped(
    s: Array, source: Array, target: Array, n: int, sigma: ArrayLike
) -> tuple[Array, dict[str, float]]:
    """Computes the limiting risk of the best time and multiple of the source, and both.

    At each time the bias is a square in the multiple, which three starts determine.
    """
    rates = np.asarray(s[s > 0])
    times = np.geomspace(1e-2 / rates.max(), 1e3 / rates.min(), 256)
    # The source is scaled to the size of the target. Otherwise a difference of risks would contain
    # only the digits of the larger one.
    sizes = [float(jnp.linalg.norm(v)) for v in (target, source)]
    unit = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
    source = unit * source
    from_zero, of_source, from_source = (
        np.asarray(training_time.flow_risk(s, offset, n=n, sigma=noise, times=times))
        for offset, noise in ((target, sigma), (source, 0.0), (target - source, sigma))
    )
    shared = (from_zero + of_source - from_source) / 2
    # Later the data have replaced the source, and its multiple has no effect.
    some = of_source > 1e-9 * of_source[0]
    scales = np.where(some, shared / np.where(some, of_source, 1.0), 0.0)
    found = np.maximum(from_zero - scales * shared, 0.0)
    best = int(np.argmin(found))
    at = {"scale": unit * float(scales[best]), "time": float(times[best])}
    return jnp.asarray(found[best]), at


def _refits(n: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> dict[str, Array]:
    """Computes the risks of linear transfer, without ridge and at its best ridge."""
    plain = risks.linear_transfer_risk(n=n, theta=theta, sigma=sigma, allow_infinite=True)
    best = risks.optimal_ridge(n=n, theta=theta, sigma=sigma)
    # The best ridge is infinite at theta = pi/2 (nothing is transferred) and 0 without any error.
    finite = jnp.isfinite(best) & (best < 1e12) & (best > 0)
    ridge = risks.linear_transfer_risk(
        n=n, theta=theta, sigma=sigma, ridge=jnp.where(finite, best, 1.0), allow_infinite=True
    )
    # An infinite ridge transfers nothing, and the risk is |beta_t|^2 = 1.
    ridge = jnp.where(finite, ridge, jnp.where(best > 0, 1.0, plain))
    return {"linear transfer": plain, "ridge transfer": ridge}


def _advice(
    by_method: Mapping[str, Array | float],
    unit: float = 1.0,
    known: Mapping[str, Known] | None = None,
    settings: dict[str, dict[str, float]] | None = None,
) -> Advice:
    """Picks the best and the second-best method; the risks are multiples of `unit`."""
    plain = {name: unit * float(value) for name, value in by_method.items()}
    # `sorted` is stable, so the simpler of two equal methods comes first.
    first, second, *_ = sorted(plain, key=plain.__getitem__)
    margin = 0.0 if plain[second] == plain[first] else plain[second] - plain[first]  # both infinite
    how = {
        name: at if at.error is None else at._replace(error=unit * at.error)
        for name, at in (known or {}).items()
    }

    def near(name: str) -> bool:
        errors = (how[name].error or 0.0) + (how[first].error or 0.0)
        return plain[name] == plain[first] or plain[name] - plain[first] <= errors

    undecided = tuple(name for name in plain if how and name != first and near(name))
    simplest = next(name for name in plain if plain[name] <= 1.01 * plain[first])
    return Advice(
        first, plain[first], second, margin, plain, how, undecided, settings or {}, simplest
    )
