"""Computes the excess risk of averages, DARE, trimming and TIES of Gaussian task vectors.

Each entry of every task has the same law. A task uses an entry with the probability `support`.
At such an entry, its optimum and its expert's task vector are

    c_t = mu + delta_t,    tau_t = c_t + eps_t,

with mu shared by all tasks, the heterogeneity delta_t of the task, and the noise eps_t of finite
training, all normal and independent. At other entries c_t = 0 and tau_t = eps_t. The loss of task t
is h_t (x - c_t)^2 / 2, with the curvature h_t = 1 if the task uses the entry and `elsewhere`
otherwise. A merge is scale * m. Its excess risk is its mean loss over tasks and entries, minus the
mean loss at the best point of each entry.

The excess is quadratic in the scale. Two moments of a merge are therefore sufficient
(`merge_moments`), and its best scale has a closed form. Trimming is by magnitude over the whole
vector. Its threshold is the quantile of infinitely many entries. With n entries it varies by about
1 / sqrt(n).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr, owens_t

from theory.problems import check, check_squares, defined

Method = Literal["average", "dare", "trim", "ties"]
METHODS: tuple[Method, ...] = get_args(Method)

# TIES is summed over shared parts this many standard deviations from 0, and over task vectors this
# many from their mean.
FAR = 6.5
# Cells of the lattice of sums per standard deviation of a task vector about its shared part. The
# error decreases with their square, and was at most 5e-5 of the moments in all trials.
CELLS = 16
# The smallest ratio of this deviation to that of the shared part that `ties` resolves.
LEAST = 0.01
# Limits on the numbers in memory at once, and on all computed numbers (CPU-seconds).
TOGETHER, MOST = 2**22, 2**28


@dataclass(frozen=True)
class GaussianTasks:
    """Tasks with normal optima, entry by entry, and experts that found them up to noise.

    Raises a ValueError for numbers out of range.

    Attributes:
      tasks: Number of tasks T, >= 1.
      shared: Standard deviation of the part that all tasks share, >= 0.
      heterogeneity: Standard deviation of a task's own part, >= 0.
      noise: Standard deviation of an expert about its optimum, >= 0.
      support: The fraction of entries that a task uses, in (0, 1].
      elsewhere: A task's curvature in the entries that it does not use, in [0, 1]. With 1, the
        curvature is the same everywhere. With 0, changes of these entries do not affect the task.

    >>> tasks = GaussianTasks(4, shared=1.0, heterogeneity=1.0, noise=0.5)
    >>> round(merge_moments(tasks, "average").excess(1.0), 5)  # noise^2 / (2 T)
    0.03125
    """

    tasks: int
    shared: float
    heterogeneity: float
    noise: float
    support: float = 1.0
    elsewhere: float = 0.0

    def __post_init__(self) -> None:
        whole = lambda n: (n >= 1) & (n < 1e4) & (n == np.floor(n))  # noqa: E731
        check("tasks", self.tasks, whole, "a whole number from 1 to 9999")
        for name in ("shared", "heterogeneity", "noise"):
            held = lambda s: (s == 0) | ((s >= 1e-100) & (s <= 1e100))  # noqa: E731
            check(name, getattr(self, name), held, "0, or from 1e-100 to 1e100")
        check("support", self.support, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
        check("elsewhere", self.elsewhere, lambda h: (h >= 0) & (h <= 1), "in [0, 1]")

    @property
    def own(self) -> float:
        """The standard deviation of a task vector about its shared part, at used entries."""
        return math.hypot(self.heterogeneity, self.noise)

    @property
    def spread(self) -> float:
        """The standard deviation of a task vector, at used entries."""
        return math.hypot(self.shared, self.own)

    @property
    def curvature(self) -> float:
        """The mean curvature of a task."""
        return self.support + self.elsewhere * (1 - self.support)

    @property
    def start(self) -> float:
        """Twice the excess risk of the base, the largest possible gain of a merge."""
        square = self.shared**2 + self.heterogeneity**2
        if self.support == 1:
            return square - self.heterogeneity**2 * (1 - 1 / self.tasks)
        # For n tasks that use an entry, the squared sum of their optima over all curvatures.
        n = np.arange(1, self.tasks + 1)
        used = n**2 * self.shared**2 + n * self.heterogeneity**2
        best = used / (n + self.elsewhere * (self.tasks - n))
        return float(_binomial(self.tasks, self.support)[1:] @ best / self.tasks)


class MergeMoments(NamedTuple):
    """The moments in the excess risk of a merge scale * m.

    Attributes:
      square: The mean over tasks of E h_t m^2.
      product: The mean over tasks of E h_t c_t m.
      start: Twice the excess risk of the base.
    """

    square: float
    product: float
    start: float

    def excess(self, scale: float) -> float:
        """Computes the excess risk at a scale, (scale^2 square - 2 scale product + start) / 2."""
        return (scale * (scale * self.square - 2 * self.product) + self.start) / 2

    @property
    def scale(self) -> float:
        """The scale with the smallest excess, product / square; 0 for a merge that is 0."""
        return self.product / self.square if self.square else 0.0

    @property
    def least(self) -> float:
        """The smallest excess over all scales."""
        return (self.start - self.product * self.scale) / 2


class BestMerge(NamedTuple):
    """A merge at its best density and scale.

    Attributes:
      density: The density.
      scale: The scale.
      excess: The excess risk.
    """

    density: float
    scale: float
    excess: float


@defined
def trim_threshold(tasks: GaussianTasks, density: float) -> float:
    """Computes the magnitude that a fraction `density` of a task vector's entries exceeds.

    Args:
      tasks: The tasks.
      density: The fraction, in (0, 1].

    Returns:
      The threshold. It is 0 if at most this fraction of the entries differs from 0.

    Raises:
      ValueError: If the density is out of range.

    >>> round(trim_threshold(GaussianTasks(2, shared=0.6, heterogeneity=0.8, noise=0.0), 0.2), 4)
    1.2816
    """
    check("density", density, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
    unused = 1 - tasks.support

    def beyond(c: float) -> float:
        used = 2 * tasks.support * _tail(c, tasks.spread)
        return used + 2 * unused * _tail(c, tasks.noise) - density

    if density == 1 or beyond(0.0) <= 0:
        return 0.0
    high = 40 * max(tasks.spread, tasks.noise)
    root: Any = brentq(beyond, 0.0, high, xtol=1e-15 * high)
    return float(root)


@defined
def merge_moments(
    tasks: GaussianTasks, method: Method, density: float = 1.0, *, cells: float = CELLS
) -> MergeMoments:
    """Computes the two moments that determine a merge's excess risk at every scale.

    - "average" is the mean of the task vectors. Task arithmetic with the scale s is the average
      with the scale s T.
    - "dare" is the mean of randomly masked task vectors, divided by the density.
    - "trim" is the mean of trimmed task vectors, with 0 for trimmed entries.
    - "ties" trims task vectors, elects a sign by their sum, and averages the remaining entries of
      this sign.

    All but "ties" are in closed form. TIES is a sum over the shared part and over the number of
    task vectors that agree. The distribution of their sum is computed on a lattice by convolution.

    Args:
      tasks: The tasks.
      method: The merge.
      density: The fraction of entries that is kept, in (0, 1]. "average" ignores it.
      cells: Cells of the lattice per standard deviation of a task vector about its shared part.

    Returns:
      The moments.

    Raises:
      ValueError: For another method or a density out of range. For TIES also if heterogeneity and
        noise are positive but less than a hundredth of the shared part, which the lattice cannot
        resolve.

    References:
      Yadav et al., TIES-Merging, 2023 (arXiv 2306.01708); Yu et al., Language Models are Super
      Mario, 2024 (arXiv 2311.03099), introduce TIES and DARE.

    >>> tasks = GaussianTasks(2, shared=0.6, heterogeneity=0.8, noise=0.5)
    >>> [round(merge_moments(tasks, method, 0.2).least, 4) for method in METHODS]
    [0.0528, 0.27, 0.1381, 0.1507]
    """
    check("density", density, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
    if not tasks.spread and not tasks.noise:
        return MergeMoments(0.0, 0.0, tasks.start)
    cut = trim_threshold(tasks, density) if method in ("trim", "ties") else 0.0
    if method == "ties":
        return MergeMoments(*_ties(tasks, cut, cells), tasks.start)
    return _linear(tasks, cut, density if method == "dare" else 1.0)


@defined
def dense_moments(
    tasks: ArrayLike,
    shared: ArrayLike,
    heterogeneity: ArrayLike,
    noise: ArrayLike,
    density: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    """Computes the moments of the average and of DARE if all tasks use all entries.

        square = shared^2 (1 - 1/T) + (shared^2 + heterogeneity^2 + noise^2) / (T density)
        product = start = shared^2 + heterogeneity^2 / T

    The smallest excess over all scales is therefore start (1 - start / square) / 2. These are
    `merge_moments` for arrays, which JAX can trace.

    Args:
      tasks: Number of tasks T, >= 1.
      shared: Standard deviation of the part that all tasks share, >= 0.
      heterogeneity: Standard deviation of a task's own part, >= 0.
      noise: Standard deviation of an expert about its optimum, >= 0.
      density: The fraction of entries that DARE keeps, in (0, 1]. 1 is the average.

    Returns:
      The square and the product, each with the broadcast shape of the arguments.

    Raises:
      ValueError: If an argument is out of range.

    >>> square, product = dense_moments(4, 1.0, 1.0, 0.5)
    >>> float(square - product) / 2  # the excess at the scale 1: noise^2 / (2 T)
    0.03125
    """
    check("tasks", tasks, lambda n: (n >= 1) & (n < np.inf), "a finite number >= 1")
    for name, value in (("shared", shared), ("heterogeneity", heterogeneity), ("noise", noise)):
        check_squares(name, value)
        check(name, value, lambda s: s >= 0, ">= 0")
    check("density", density, lambda p: (p > 0) & (p <= 1), "in (0, 1]")
    n, common, own, error, kept = (
        jnp.asarray(v, float) for v in (tasks, shared, heterogeneity, noise, density)
    )
    square = common**2 * (1 - 1 / n) + (common**2 + own**2 + error**2) / (n * kept)
    product = common**2 + own**2 / n
    square, product = jnp.broadcast_arrays(square, product)
    return square, product


@defined
def best_merge(tasks: GaussianTasks, method: Method, *, cells: float = CELLS) -> BestMerge:
    """Finds the density and the scale at which a merge has the smallest excess risk.

    The scale has a closed form. The density is searched among powers of 2, and then between the
    neighbours of the best one.

    Args:
      tasks: The tasks.
      method: The merge, as for `merge_moments`.
      cells: As for `merge_moments`.

    Returns:
      The merge at its best settings. Averages and DARE are best at the density 1.

    >>> best_merge(GaussianTasks(4, shared=1.0, heterogeneity=1.0, noise=2.0), "dare")
    BestMerge(density=1.0, scale=0.5555555555555556, excess=0.2777777777777778)
    """

    def at(density: float) -> MergeMoments:
        return merge_moments(tasks, method, density, cells=cells)

    found = 1.0
    if method in ("trim", "ties"):
        tried = 2.0 ** -np.arange(9)
        least = int(np.argmin([at(density).least for density in tried]))
        ends = tried[min(least + 1, 8)], tried[max(least - 1, 0)]
        search: Any = minimize_scalar(
            lambda log: at(math.exp(log)).least, bounds=np.log(ends), method="bounded",
            options={"xatol": 1e-3},
        )  # fmt: skip
        inside = float(math.exp(search.x))
        found = inside if search.fun < at(tried[least]).least else float(tried[least])
    outcome = at(found)
    return BestMerge(found, outcome.scale, outcome.least)


# --- averages -------------------------------------------------------------------------------------


def _linear(tasks: GaussianTasks, cut: float, density: float) -> MergeMoments:
    """Computes the moments of a mean of thresholded task vectors, after DARE of some density."""
    n, p, off = tasks.tasks, tasks.support, 1 - tasks.support
    used, unused = _kept(cut, tasks.spread), _kept(cut, tasks.noise)
    both = p**2 * _both_kept(cut, tasks)  # of two task vectors, at an entry that both may use
    weighed = p * used + tasks.elsewhere * off * unused  # E h_t g(tau_t)^2
    one, others = p * used + off * unused, n - 1
    # Weighted by the curvature of task 1, the terms are its own square, the others' squares, and
    # products of pairs. Task 1 contributes to products only if it uses the entry.
    squares = (weighed + others * tasks.curvature * one) / density
    pairs = 2 * others * both + others * (others - 1) * tasks.curvature * both
    # E[c_1 | tau_1] is linear in tau_1, and E[c_1 | tau_2] in tau_2.
    share = used / tasks.spread**2 if tasks.spread else 0.0
    product = p * share * (tasks.shared**2 + tasks.heterogeneity**2)
    product += others * p**2 * share * tasks.shared**2
    return MergeMoments((squares + pairs) / n**2, product / n, tasks.start)


def _tail(c: float, spread: float) -> float:
    """Computes P(x > c) of a normal variable for c >= 0. Without spread it is 0."""
    return float(ndtr(-c / spread)) if spread else 0.0


def _density(z: np.ndarray | float) -> np.ndarray:
    return np.asarray(np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi))


def _kept(c: float, spread: float) -> float:
    """Computes E[x^2; |x| > c] of a normal variable."""
    if not spread:
        return 0.0
    z = c / spread
    return spread**2 * 2 * float(z * _density(z) + ndtr(-z))


def _both_kept(c: float, tasks: GaussianTasks) -> float:
    """Computes E[x y; |x|, |y| > c] of task vectors of two tasks that both use the entry."""
    if not tasks.shared:
        return 0.0
    z, ratio = c / tasks.spread, (tasks.shared / tasks.spread) ** 2
    same, other = (_corner(z, sign * ratio, tasks) for sign in (1, -1))
    return tasks.spread**2 * 2 * (same - other)


def _corner(z: float, rho: float, tasks: GaussianTasks) -> float:
    """Computes E[x y; x, y > z] of standard normals of correlation rho (Rosenbaum, 1961)."""
    # 1 - |rho| without cancellation.
    apart = (tasks.own / tasks.spread) ** 2
    less, more = (apart, 1 + rho) if rho > 0 else (1 - rho, apart)  # 1 - rho, 1 + rho
    if less == 0:
        return _kept(z, 1.0) / 2
    slope = math.sqrt(less / more) if more else math.inf
    above = ndtr(-z) - 2 * owens_t(z, slope) if more else 0.0
    edge = 2 * rho * z * _density(z) * ndtr(-z * slope) if z else 0.0
    meeting = math.sqrt(less * more) / (2 * math.pi)
    meeting *= math.exp(-(z**2) / more) if more else 0.0
    return float(rho * above + edge + meeting)


def _binomial(n: int, p: float) -> np.ndarray:
    """Computes the probabilities of 0 to n successes."""
    k = np.arange(n + 1)
    rest = 1 - p
    counts = np.array([math.comb(n, int(i)) for i in k], float)
    return counts * p**k * rest ** (n - k)


# --- TIES -----------------------------------------------------------------------------------------

# The difficulty is that the elected sign depends on all task vectors, and the divisor on the number
# that agree. Given the shared part mu, they are independent. Let S be their sum after trimming, a
# the number of positive ones and P the sum of these. By symmetry, a negative S contributes as much
# as a positive one, so
#
#     E[w_1 m^j] = 2 sum_a E[w_1 P^j; a, S > 0] / a^j,
#
# with w_1 = h_1 or h_1 c_1 of task 1. Each term is a product of Fourier transforms. They are of the
# law of one task vector above the threshold, of this law times x and x^2, of the law below -c with
# trimmed entries at 0, and of the same laws weighted by w_1. The lattice only determines whether S
# > 0. All moments within its cells are exact.


def _ties(tasks: GaussianTasks, cut: float, cells: float) -> tuple[float, float]:
    """Computes E h_1 m^2 and E h_1 c_1 m of the disjoint mean of TIES."""
    n, own = tasks.tasks, tasks.own
    if not own:
        return _alike(tasks, cut)
    if own < LEAST * tasks.shared:
        raise ValueError(
            f"heterogeneity and noise must be 0, or {LEAST:g} of shared or more together, for "
            f"ties; got {own:g} of {tasks.shared:g}"
        )
    mu, weight = _shared_parts(tasks)
    reach = n * mu[-1] + (FAR + 1) * math.sqrt(n) * max(own, tasks.noise)
    size = 2 ** math.ceil(math.log2(2 * reach * cells / own))
    if n * mu.size * size > MOST:
        raise ValueError(f"tasks must be fewer for ties with this shared part; got {n}")
    positive = np.zeros(size)
    positive[1 : size // 2], positive[0] = 1.0, 0.5  # half of the cell around 0 is above it
    together = max(1, TOGETHER // (n * size))
    sums = np.zeros(2)
    for start in range(0, mu.size, together):
        some = slice(start, start + together)
        moments = _sums(tasks, _laws(tasks, cut, mu[some], 2 * reach / size, size))
        sums += [np.fft.irfft(weight[some] @ moment, size) @ positive for moment in moments]
    return float(2 * sums[0]), float(2 * sums[1])


def _sums(tasks: GaussianTasks, of: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the transforms of both moments, by the position of the sum of all task vectors."""
    n, (law, x, x2), (h0, h1, h2), (c0, c1) = tasks.tasks, of["law"], of["h"], of["hc"]
    # Powers 0 to T - 1 of the law of a positive task vector, and of the rest.
    power, left = _powers(law, n), _powers(of["rest"], n)
    square, product = np.zeros_like(law), np.zeros_like(law)
    for a in range(1, n + 1):
        # The vectors of task 1 and of a - 1 other tasks are positive.
        of_square, of_product = h2 * power[a - 1], c1 * power[a - 1]
        if a > 1:
            of_square += (a - 1) * (2 * h1 * x + h0 * x2) * power[a - 2]
            of_product += (a - 1) * c0 * x * power[a - 2]
        if a > 2:
            of_square += (a - 1) * (a - 2) * h0 * x**2 * power[a - 3]
        ways = math.comb(n - 1, a - 1)
        square += ways / a**2 * of_square * left[n - a]
        product += ways / a * of_product * left[n - a]
        if a == n:
            break
        # The vectors of a other tasks are positive, and that of task 1 is not.
        of_square = a * x2 * power[a - 1]
        if a > 1:
            of_square += a * (a - 1) * x**2 * power[a - 2]
        ways = math.comb(n - 1, a)
        square += ways / a**2 * of_square * of["h rest"] * left[n - 1 - a]
        product += ways * x * power[a - 1] * of["hc rest"] * left[n - 1 - a]
    return square, product


def _alike(tasks: GaussianTasks, cut: float) -> tuple[float, float]:
    """Computes TIES if all task vectors that use an entry are equal, and the others 0."""
    none = (1 - tasks.support) ** tasks.tasks
    kept = _kept(cut, tasks.shared)
    return kept * (tasks.curvature - tasks.elsewhere * none), kept * tasks.support


def _shared_parts(tasks: GaussianTasks) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes of the shared part and their weights, by the trapezoidal rule.

    Its error decreases as e^-(width / step)^2 (2 pi^2), because the integrand is smooth on the
    scale of the mean of all task vectors.
    """
    if not tasks.shared:
        return np.zeros(1), np.ones(1)
    width = tasks.own / math.sqrt(tasks.tasks)
    step = width * tasks.shared / math.hypot(width, tasks.shared)
    count = math.ceil(FAR * tasks.shared / step)
    z = np.linspace(-FAR, FAR, 2 * count + 1)
    return z * tasks.shared, _density(z) * (FAR / count)


def _laws(
    tasks: GaussianTasks, cut: float, mu: np.ndarray, step: float, size: int
) -> dict[str, np.ndarray]:
    """Computes Fourier transforms of a task vector's law on a lattice, given each shared part.

    "law", "h" and "hc" are the positive part of the law above the threshold, times 1, x and x^2 (a
    leading axis). "h" is weighted by the curvature, and "hc" by curvature times optimum. "rest" is
    the law below -c, with trimmed entries at 0.
    """
    widest = FAR * tasks.shared + (FAR + 2) * max(tasks.own, tasks.noise)
    last = min(size // 2 - 1, math.ceil(widest / step))
    edges = np.maximum((np.arange(last + 2) - 0.5) * step, cut)
    p, off = tasks.support, 1 - tasks.support
    idle = off * _cells(edges, np.zeros(1), tasks.noise) if off and tasks.noise else 0.0
    # E[c_t | tau_t, mu] is a mean of both.
    known = (tasks.heterogeneity / tasks.own) ** 2

    def positive(mu: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        used = p * _cells(edges, mu, tasks.own)
        optimum = (1 - known) * mu[:, None] * used[:2] + known * used[1:]
        return used + idle, used + tasks.elsewhere * idle, optimum

    def rest(above: np.ndarray, below: np.ndarray, total: np.ndarray | float) -> np.ndarray:
        zero = total - above.sum(1) - below.sum(1)
        return np.conj(np.fft.rfft(below, size)) + zero[:, None]

    law, h, hc = positive(mu)
    mirrored, mirrored_h, mirrored_hc = (moment[0] for moment in positive(-mu))
    return {
        "law": np.fft.rfft(law, size),
        "h": np.fft.rfft(h, size),
        "hc": np.fft.rfft(hc, size),
        "rest": rest(law[0], mirrored, 1.0),
        "h rest": rest(h[0], mirrored_h, tasks.curvature),
        "hc rest": rest(hc[0], -mirrored_hc, p * mu),
    }


def _cells(edges: np.ndarray, means: np.ndarray, spread: float) -> np.ndarray:
    """Computes the moments 0, 1 and 2 of a normal variable within cells, `(3, means, cells)`."""
    mean = means[:, None]
    z = (edges - mean) / spread
    f = _density(z)
    mass, first, second = np.diff(ndtr(z)), -np.diff(f), -np.diff(z * f)
    one = mean * mass + spread * first
    two = (mean**2 + spread**2) * mass + 2 * mean * spread * first + spread**2 * second
    return np.stack([mass, one, two])


def _powers(base: np.ndarray, count: int) -> list[np.ndarray]:
    """Computes powers 0 to `count` - 1."""
    found = [np.ones_like(base)]
    for _ in range(count - 1):
        found.append(found[-1] * base)
    return found
