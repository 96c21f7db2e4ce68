"""Theory's forecasts: the probability that each choice has the least risk, stated before training.

Each forecast estimates the risk of every choice, on the whole training sample and without each
block of it. The spread of these estimates (the jackknife) is the uncertainty of the risks. The
probability of a choice is the fraction of normal draws in which its risk is the smallest.

There are two theories of transfer. "numbers" reduces a setting to five numbers: n, the effective
dimension, the noise, and the angle and size of the source (`theory.deep_linear.transfer_risks`).
"kernels" assumes that networks stay near their start, where training is regression on tangent
features, and uses the cross-validated error of this regression. Merges have one theory, "spread"
(`theory.merging.gaussian`), from the moments of the experts' task vectors.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy import linalg

from theory import deep_linear as dl
from theory import merging
from theory.merging.gaussian import GaussianTasks, Method

THEORIES, BLOCKS = ("numbers", "kernels"), 8
DEPTH = 3
"""Layers of weights, for the law of fine-tuning."""
RIDGES, TIMES = np.logspace(-6, 1, 22), np.logspace(-1, 6, 22)
"""Ridges and stopping times, for Gram matrices of trace 1."""
MERGES: dict[str, tuple[Method, float, float]] = {
    "average": ("average", 1.0, 1.0),
    "task arithmetic": ("average", 1.0, 0.3),
    "trimmed average": ("trim", 0.2, 1.0),
    "TIES": ("ties", 0.2, 1.0),
}
"""Method, density and scale of each merge. The scale of task arithmetic multiplies the sum."""

Risks = Float[np.ndarray, "replicate choice"]


def chances(risks: Risks, rng: np.random.Generator, draws: int) -> Float[np.ndarray, " choice"]:
    """Computes the probability that each choice has the least risk.

    - `risks`: the estimates from the whole sample, then those without each block. Infinite risks
      count as far above all others.

    >>> rng = np.random.default_rng(0)
    >>> chances(np.array([[0.0, 1.0], [0.0, 1.1], [0.0, 0.9]]), rng, 100).tolist()
    [1.0, 0.0]
    """
    far = 10 * np.abs(risks[np.isfinite(risks)]).max(initial=1.0)
    first, *others = np.nan_to_num(risks, nan=far, posinf=far)
    apart = np.stack(others) - np.mean(others, 0)
    weight = np.sqrt((len(others) - 1) / len(others))
    drawn = first + weight * rng.standard_normal((draws, len(others))) @ apart
    # Equal risks share the probability.
    least = drawn == drawn.min(1, keepdims=True)
    return (least / least.sum(1, keepdims=True)).mean(0)


def _without_blocks(n: int) -> list[np.ndarray]:
    """Lists the whole sample, then the sample without each block."""
    every, blocks = np.arange(n), min(n, BLOCKS)
    return [every, *(every[every * blocks // n != k] for k in range(blocks))]


def effective_dimension(gram: Float[np.ndarray, "n n"]) -> float:
    """Computes (tr K)^2 / tr K^2 of a Gram matrix, which is d for n >> d isotropic inputs."""
    return float(np.trace(gram) ** 2 / np.sum(gram**2))


def by_numbers(
    gram: Float[np.ndarray, "n n"],
    labels: Float[np.ndarray, " n"],
    source: Float[np.ndarray, " n"],
) -> tuple[Risks, dict[str, float]]:
    """Estimates the risks of all choices from n, d, the noise, and the source's angle and size.

    d is the effective dimension of the centred Gram matrix of tangent features. The noise is the
    residual of a regression of the labels on its d leading directions.

    - `source`: the source's outputs on the sample.

    It returns the risks, in the order of `networks.CHOICES`, and the numbers.
    """
    n = len(labels)
    centred = gram - gram.mean(0) - gram.mean(0)[:, None] + gram.mean()
    d = int(np.clip(round(effective_dimension(centred)), 2, n // 2 - 1))
    rows = np.array([_moments(gram, labels, source, kept, d) for kept in _without_blocks(n)])
    theta, noise, size, ratio = rows.T
    by_method = dl.transfer_risks(
        n=n, d=d, theta=theta, sigma=noise / size, size=ratio, depth=DEPTH
    )
    names = "ridge from scratch", "ridge transfer", "fine-tuning", "L2-SP"
    risks = np.stack([size**2 * np.asarray(by_method[name], float) for name in names], 1)
    numbers = {"n": n, "d": d, "theta": theta[0], "noise": noise[0], "size": size[0]}
    return risks, numbers


def _moments(
    gram: np.ndarray, labels: np.ndarray, source: np.ndarray, kept: np.ndarray, d: int
) -> tuple[float, float, float, float]:
    """Estimates the angle, the noise, the size of the target, and |source| / |target|."""
    n = len(kept)
    y, f = (values[kept] - values[kept].mean() for values in (labels, source))
    inner = gram[np.ix_(kept, kept)]
    centred = inner - inner.mean(0) - inner.mean(0)[:, None] + inner.mean()
    leading = linalg.eigh(centred, subset_by_index=[n - d, n - 1])[1]
    total, explained = float(y @ y), float(np.sum((leading.T @ y) ** 2))
    # One degree of freedom is the mean's, and d are the directions'.
    noise2 = min(max(total - explained, 1e-6) / (n - 1 - d), total / (n - 1) + 1e-6)
    length = max(float(np.sqrt(f @ f / (n - 1))), 1e-6)
    along = float(y @ f) / (n - 1) / length
    # The target is at least as large as its part along the source.
    size = np.sqrt(max(total / (n - 1) - noise2, along**2, 1e-6))
    return float(np.arccos(np.clip(along / size, -1, 1))), noise2**0.5, float(size), length / size


def by_kernels(
    start_gram: Float[np.ndarray, "n n"],
    head_gram: Float[np.ndarray, "n n"],
    source_gram: Float[np.ndarray, "n n"],
    labels: Float[np.ndarray, " n"],
    start: Float[np.ndarray, " n"],
    source: Float[np.ndarray, " n"],
) -> Risks:
    """Estimates the risks of all choices by cross-validation on tangent features.

    Scratch training and L2-SP are ridge regressions of the labels' distance from the outputs at the
    start (`start`, `source`). Transfer is a ridge regression on the last layer's features. Each has
    its best ridge. Fine-tuning is gradient flow with the best stopping time.
    """
    flow = lambda s: -np.expm1(-s * TIMES[:, None])  # noqa: E731
    ridge = lambda s: s / (s + RIDGES[:, None])  # noqa: E731
    errors = np.stack(
        [
            _left_out(start_gram, labels - start, ridge),
            _left_out(head_gram, labels, ridge),
            _left_out(source_gram, labels - source, flow),
            _left_out(source_gram, labels - source, ridge),
        ],
        1,
    )
    return np.array([errors[kept].mean(0) for kept in _without_blocks(len(labels))])


def _left_out(
    gram: np.ndarray, residual: np.ndarray, learned: Callable[[np.ndarray], np.ndarray]
) -> Float[np.ndarray, " n"]:
    """Computes squared errors on each block, of fits without it, at the best setting.

    - `learned`: maps eigenvalues to the fraction of each direction that is learned `(setting, n)`.
    """
    errors, every = np.empty((len(RIDGES), len(residual))), np.arange(len(residual))
    for kept in _without_blocks(len(residual))[1:]:
        out = np.setdiff1d(every, kept)
        values, basis = np.linalg.eigh(gram[np.ix_(kept, kept)])
        values, total = np.maximum(values, 1e-9 * values[-1]), values.sum()
        share = learned(values / total) * (basis.T @ residual[kept]) / values
        errors[:, out] = (share @ basis.T @ gram[np.ix_(kept, out)] - residual[out]) ** 2
    return errors[errors.mean(1).argmin()]


def by_spread(
    vectors: Float[np.ndarray, "task entry"], halves: Float[np.ndarray, "2 task entry"]
) -> tuple[Risks, GaussianTasks]:
    """Estimates the excess risk of the base and of all `MERGES`, from the spread of task vectors.

    - `halves`: task vectors of experts that were trained on the two halves of the samples. Half of
      their difference has the noise of an expert trained on all samples.

    All tasks have the same inputs. The curvature is therefore taken to be the same everywhere.

    It returns the risks, and the fitted tasks. Blocks are ranges of entries.
    """
    fits = [_fit(vectors[:, i], halves[:, :, i]) for i in _without_blocks(vectors.shape[1])]
    return np.array([_excesses(fit) for fit in fits]), fits[0]


def _fit(vectors: np.ndarray, halves: np.ndarray) -> GaussianTasks:
    """Fits the shared part, heterogeneity, noise and support by moments of order two and four.

    With v the variance of an optimum at used entries, and e the noise, task vectors have variance
    p v + e^2, fourth moment 3 (p v^2 + 2 p v e^2 + e^4), and mean products p^2 shared^2. Entries of
    networks have unequal scales. These are common to all tasks, unlike the use of an entry. Fourth
    moments are therefore divided by the scale that products of different tasks' squares show.
    """
    tasks, squares = len(vectors), vectors**2
    square, pairs, both = float(np.mean(squares)), _pairs(vectors), _pairs(squares)
    power = float(np.mean(squares**2)) / 3
    noise2 = min(float(np.mean((halves[0] - halves[1]) ** 2)) / 4, 0.99 * square)
    signal, support = square - noise2, 1.0
    least = float(np.clip(pairs / signal, 0.02, 1.0))  # shared^2 is at most v
    for _ in range(20):
        # E x^2 y^2 = s (square^2 + 2 E[x y]^2 / p^2), with the common scale s = 1 in the model.
        common = both / (square**2 + 2 * (pairs / support) ** 2)
        fourth = power / common - 2 * signal * noise2 - noise2**2
        support = float(np.clip(signal**2 / fourth, least, 1.0)) if fourth > 0 else 1.0
    # At least a hundredth of a used entry's variance is the task's own, which TIES resolves.
    most = 0.99 * signal / support
    shared2 = float(np.clip(pairs / support**2, 0.0, most))
    own2 = signal / support - shared2
    return GaussianTasks(tasks, shared2**0.5, own2**0.5, noise2**0.5, support, 1.0)


def _pairs(vectors: np.ndarray) -> float:
    """Computes the mean product over entries and pairs of different tasks."""
    tasks, entries = vectors.shape
    products = np.sum(vectors.sum(0) ** 2) - np.sum(vectors**2)
    return float(products / (tasks * (tasks - 1) * entries))


def _excesses(tasks: GaussianTasks) -> list[float]:
    found = [tasks.start / 2]
    for name, (method, density, scale) in MERGES.items():
        moments = merging.merge_moments(tasks, method, density, cells=3)
        found.append(moments.excess(scale_of(name, scale, tasks.tasks)))
    return found


def scale_of(name: str, scale: float, tasks: int) -> float:
    """Returns the factor of the mean task vector, or of the TIES vector."""
    return scale * tasks if name == "task arithmetic" else scale
