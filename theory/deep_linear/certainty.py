"""How a mean risk was obtained: exactly, as a limit of large n and d, or by simulation.

A limit is inaccurate at small n and d. `advice` uses the exact mean if it is known. Otherwise it
measures the error of the limit on random data sets.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from theory.deep_linear import overlaps, penalised, risks, subspace, wishart

DRAWS = 4000  # of the law of fine-tuning
WORK = 2e9  # multiplications on drawn data sets, about a second
MOST, LEAST = 200, 16  # data sets


class Known(NamedTuple):
    """How a risk was obtained.

    Attributes:
      how: "exact" at this n and d; "limit" of large n and d; "simulated" at this n and d.
      error: 0 if exact, up to rounding. For a limit, its distance from the mean at this n and d, as
        measured, plus two standard errors of the measurement. If simulated, two standard errors.
        None if it was not measured.
    """

    how: Literal["exact", "limit", "simulated"]
    error: float | None = 0.0


EXACT = Known("exact")
Measured = dict[str, tuple[float, Known]]


def isotropic(*, n: int, d: int, theta: float, sigma: float, depth: float, size: float) -> Measured:
    """Computes the risks at finite n and d that `transfer_risks` gives as limits.

    Args:
      n: Number of target samples.
      d: Dimension.
      theta: Angle between source and target.
      sigma: Standard deviation of the label noise in units of |beta_t|.
      depth: Number of weight matrices.
      size: |beta_s| / |beta_t|.

    Returns:
      The risk of each such method, and how it was obtained. Ridge regressions are exact, or limits
      if n and d are too large for `wishart`. Fine-tuning is simulated from its exact law.
    """
    sin, apart = abs(np.sin(theta)), np.hypot(1 - size, 2 * size**0.5 * np.sin(theta / 2))
    # sin(pi) in floats is not 0.
    sin = 0.0 if np.float32(theta) == np.float32(np.pi) else sin
    found: Measured = {"fine-tuning": _fine_tuning(n, d, theta, sigma, depth, size)}
    for name, distance in (("ridge from scratch", 1.0), ("L2-SP", apart), ("scaled L2-SP", sin)):
        found[name] = _ridge(n, d, distance, sigma)
    if n > 2 and d > 1:
        found["free direction"] = _free(n, d, 1, sin, sigma)
    if d > 1:
        found["fixed direction"] = _ridge(n, d - 1, sin, sigma)
    return found


def features(*, n: int, d: int, of: subspace.Overlap, sigma: float, around: float) -> Measured:
    """Computes the risks that `advise_features` offers, at finite n, d and k.

    Args:
      n: Number of target samples.
      d: Dimension.
      of: Overlap of the target with the features.
      sigma: Standard deviation of the noise on all outputs together.
      around: Limit of the risk of ridge regression with one penalty inside the features' span and
        another outside, which is "L2-SP".

    Returns:
      The risk of each such method, and how it was obtained. The error of L2-SP is measured on
      random data sets.
    """
    inside2, missed2, k = float(of.explained), float(of.missed), int(of.k)
    inside, missed = inside2**0.5, missed2**0.5
    learned, how = _ridge(n, k, inside, float(np.hypot(missed, sigma)))
    found: Measured = {
        "ridge from scratch": _ridge(n, d, float(np.hypot(inside, missed)), sigma),
        "ridge transfer": (missed2 + learned, how),
        "L2-SP": (around, _around(n, d, of, sigma, around)),
    }
    if n > k + 1 and d > k:
        found["free direction"] = _free(n, d, k, missed, sigma)
    if k == 1:  # the source is known up to a multiple for each output
        found["scaled L2-SP"] = _ridge(n, d, missed, sigma)
        found["fixed direction"] = _ridge(n, d - 1, missed, sigma) if d > 1 else (missed2, EXACT)
    return found


def _around(n: int, d: int, of: subspace.Overlap, sigma: float, limit: float) -> Known:
    """Measures the error of the limit. Only the lengths of both parts of the target matter."""
    k, rng = int(of.k), np.random.default_rng(0)
    inside2, missed2 = float(of.explained), float(of.missed)
    spread = np.repeat([inside2 / k, missed2 / max(d - k, 1)], [k, d - k]) ** 0.5
    target = np.zeros(d)
    target[-1] = missed2**0.5
    target[0] = inside2**0.5
    risk = np.empty(_draws(n, d))
    for i in range(risk.size):
        x = rng.standard_normal((n, d))
        parts = np.linalg.svd(x * spread, full_matrices=False)
        fit = spread * _ridge_fit(parts, x @ target + sigma * rng.standard_normal(n), sigma**2)
        risk[i] = np.sum((fit - target) ** 2)
    return _measured(limit, risk)


def _free(n: int, d: int, k: int, distance: float, sigma: float) -> tuple[float, Known]:
    """Computes the mean risk with k directions free and the best penalty on the rest."""
    rest, known = _ridge(n - k, d - k, distance, sigma)
    risk = float(risks.refitted_risk(n=n, rest=rest, sigma=sigma, k=k))
    return risk, known._replace(error=(known.error or 0.0) * (n - 1) / (n - k - 1))


def _ridge(n: int, d: int, distance: float, sigma: float) -> tuple[float, Known]:
    """Computes the mean risk at the best penalty, exactly if sizes allow it."""
    if (n**0.5 + d**0.5) ** 2 <= wishart.LARGEST:
        penalty = penalised.best_penalty(n=n, d=d, distance=distance, sigma=sigma)
        found = wishart.ridge_risk(n=n, d=d, distance=distance, sigma=sigma, penalty=penalty)
        return float(found), EXACT
    limit = penalised.best_risk(n=n, d=d, distance=distance, sigma=sigma)
    if distance == 0 or sigma == 0:
        return float(limit), EXACT
    # The first order of the difference (`penalised.best_risk`).
    ends = (n**0.5 - d**0.5) ** 2, (n**0.5 + d**0.5) ** 2
    near, far = (1 / np.sqrt(end + d * (sigma / distance) ** 2) for end in ends)
    return float(limit), Known("limit", float((sigma * (near - far) / 2) ** 2))


def _fine_tuning(
    n: int, d: int, theta: float, sigma: float, depth: float, size: float
) -> tuple[float, Known]:
    """Averages the risk of fine-tuning over draws of its exact law; the noise term is exact."""
    scratch = float(risks.scratch_risk(n=n, d=d, sigma=sigma, allow_infinite=True))
    if n >= d or np.isinf(scratch):
        return scratch, EXACT
    rng, cos, sin = np.random.default_rng(0), np.cos(theta), np.sin(theta)

    def chi2(dof: int) -> np.ndarray:
        return 2 * rng.gamma(dof / 2, size=DRAWS)

    def wishart2(dof: int) -> np.ndarray:
        """Bartlett's root of a Wishart matrix, times its transpose."""
        root = np.zeros((DRAWS, 2, 2))
        root[:, 0, 0], root[:, 1, 1] = chi2(dof) ** 0.5, chi2(dof - 1) ** 0.5
        root[:, 1, 0] = rng.standard_normal(DRAWS)
        return root @ root.swapaxes(1, 2)

    # Projections of the plane of both tasks on the row space of the data, a matrix-variate Beta.
    seen = wishart2(n)
    inverse = np.linalg.inv(np.linalg.cholesky(seen + wishart2(d - n)))
    seen = inverse @ seen @ inverse.swapaxes(1, 2)
    unseen = np.eye(2) - seen
    target = np.array([cos, sin])
    kept = np.maximum(target @ seen @ target, 0.0)
    noise = sigma * np.sqrt(chi2(n) / chi2(d - n + 1))
    along = rng.standard_normal(DRAWS)
    along /= np.sqrt(along**2 + chi2(n - 1))
    fit2 = kept + 2 * noise * along * np.sqrt(kept) + noise**2
    left = np.clip(unseen[:, 0, 0], 0.0, 1.0)
    c = np.asarray(overlaps.null_scale(np.maximum(fit2, 0.0) / size**2, left, depth), float) * size
    off = np.stack([c - cos, np.full(DRAWS, -sin)], -1)
    missed = np.einsum("ai,aij,aj->a", off, unseen, off)
    risk = scratch - (1 - n / d) + missed.mean()
    return float(risk), Known("simulated", float(2 * missed.std(ddof=1) / DRAWS**0.5))


def any_inputs(
    eigenvalues: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    *,
    n: int,
    sigma: float,
    depth: float,
    limits: Mapping[str, float],
    settings: Mapping[str, Mapping[str, float]],
) -> dict[str, Known]:
    """Measures the errors of limits at this n and d, on data sets that all methods share.

    Args:
      eigenvalues: Eigenvalues of the covariance of x, `(d,)`.
      source: The source in its eigenbasis, `(d,)`.
      target: The target in the same basis, `(d,)`.
      n: Number of target samples.
      sigma: Standard deviation of the label noise.
      depth: Number of weight matrices.
      limits: The limit of each method's risk.
      settings: The "penalty" or "time", and the "scale", of the methods that have one.

    Returns:
      The error of each limit.
    """
    d = len(target)
    draws = _draws(n, d)
    rng, fits = np.random.default_rng(0), {name: np.empty((draws, d)) for name in limits}
    scratch, unseen = np.empty((draws, d)), np.empty((draws, d))
    # An orthonormal basis of the orthogonal complement of the source.
    across = np.linalg.svd(source[None])[2][1:].T
    for i in range(draws):
        x = rng.standard_normal((n, d)) * np.sqrt(eigenvalues)
        y = x @ target + sigma * rng.standard_normal(n)
        parts = np.linalg.svd(x, full_matrices=False)
        scratch[i] = _ridge_fit(parts, y, 0.0)
        unseen[i] = source - _ridge_fit(parts, x @ source, 0.0)
        for name in limits.keys() & settings.keys():
            start = settings[name]["scale"] * source
            if "time" in settings[name]:
                fits[name][i] = start + _flow_fit(parts, y - x @ start, settings[name]["time"] / n)
                continue
            penalty = n * settings[name]["penalty"]
            if name == "free direction":
                fits[name][i] = _free_fit(x, y, source, across, penalty)
            elif name == "fixed direction":
                rest = np.linalg.svd(x @ across, full_matrices=False)
                fits[name][i] = start + across @ _ridge_fit(rest, y - x @ start, penalty)
            else:
                fits[name][i] = start + _ridge_fit(parts, y - x @ start, penalty)
    p, q, size2 = (scratch**2).sum(-1), (unseen**2).sum(-1), source @ source
    c = np.asarray(overlaps.null_scale(p / size2, np.minimum(q / size2, 1.0), depth), float)
    fits |= {"scratch": scratch, "fine-tuning": scratch + c[:, None] * unseen}
    return {
        name: _measured(limit, (fits[name] - target) ** 2 @ eigenvalues)
        for name, limit in limits.items()
    }


def _draws(n: int, d: int) -> int:
    """Returns the number of data sets of this size that are drawn."""
    return int(np.clip(WORK / (n * d * min(n, d)), LEAST, MOST))


def _measured(limit: float, risk: np.ndarray) -> Known:
    """Measures the error of a limit by the risks on data sets."""
    if not np.isfinite(limit):
        return Known("limit", 0.0)
    error = 2 * risk.std(ddof=1) / risk.size**0.5
    return Known("limit", float(abs(risk.mean() - limit) + error))


def _ridge_fit(parts: tuple[np.ndarray, ...], y: np.ndarray, k: float) -> np.ndarray:
    """Fits labels with k = n penalty, from the SVD of the inputs; inf fits nothing."""
    left, values, right = parts
    seen = values > 1e-12 * values[0]
    with np.errstate(divide="ignore"):
        shrunk = np.where(seen, values, 0.0) / (1 + k / np.where(seen, values, 1.0) ** 2)
    back = np.where(seen, shrunk / np.where(seen, values, 1.0) ** 2, 0.0)
    return (back * (left.T @ y)) @ right


def _flow_fit(parts: tuple[np.ndarray, ...], y: np.ndarray, time: float) -> np.ndarray:
    """Fits labels by gradient flow on |y - x b|^2 / 2 from 0, from the SVD of the inputs."""
    left, values, right = parts
    # (1 - e^-x) / x with x = time values^2
    x = time * values**2
    learned = np.where(x > 0, -np.expm1(-x) / np.where(x > 0, x, 1.0), 1.0)
    return (learned * time * values * (left.T @ y)) @ right


def _free_fit(
    x: np.ndarray, y: np.ndarray, source: np.ndarray, across: np.ndarray, k: float
) -> np.ndarray:
    """Fits with the direction of the source free of the penalty."""
    along, rest = x @ source, x @ across
    unit = along / np.linalg.norm(along)
    left = rest - np.outer(unit, unit @ rest)
    parts = np.linalg.svd(left, full_matrices=False)
    fit = across @ _ridge_fit(parts, y - unit * (unit @ y), k)
    return fit + source * (along @ (y - x @ fit)) / (along @ along)
