"""Fine-tuning at any scale of the layers, compared with trained networks and linear programs.

Diagonal networks follow the gradient flow of u and v, and networks of two layers that of both
layers. Neither uses a potential or a conserved quantity. Thresholds of recovery are determined with
linear programs on nested data sets.
"""

from functools import partial
from math import pi, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import integrate, optimize

from theory import claims
from theory.adversary import Box, Domain, Problem
from theory.claims import Estimate, Simulate, generator, measured
from theory.deep_linear import diagonal, scales
from theory.deep_linear.regressions import AVERAGED, PAPER, Setting, extrapolate, one_sample

claim = partial(claims.claim, PAPER)
DIAGONAL = "beyond the paper: diagonal networks at any scale"
LAYERS = "beyond the paper: two layers of unequal scale, for Thm 3.9"
SMALL, TIMES = 16, 3  # limits are extrapolated from d = 16 and 48
BATCH = 100  # data sets in one program
ENDED = 1e-3  # the largest residual at which networks for a mean end; it moves no mean by 1e-3


# --- training -------------------------------------------------------------------------------------


def _slope(x: np.ndarray, y: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the residuals of many predictors `[draws d]` and the gradients of their losses."""
    left = (x @ beta[..., None])[..., 0] - y
    return left, (x.swapaxes(1, 2) @ left[..., None])[..., 0] / x.shape[1]


def _flows(
    x: np.ndarray, y: np.ndarray, first: np.ndarray, last: np.ndarray, until: float = ENDED
) -> np.ndarray:
    """Follows the flows of many networks beta = first * last, `last` of shape `[draws d]` or
    `[draws 1]`, by Runge and Kutta's method. Returns the predictors `[draws d]`.
    """
    found, at = np.empty((len(x), x.shape[2])), np.arange(len(x))
    top = np.linalg.eigvalsh(x @ x.swapaxes(1, 2))[:, -1:] / x.shape[1]
    shared = last.shape[1] == 1

    def speed(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pull = -_slope(x, y, u * v)[1]
        return v * pull, (u * pull).sum(-1, keepdims=True) if shared else u * pull

    for step in range(100_000):
        if step % 25 == 0:
            left, gradient = _slope(x, y, first * last)
            going = abs(left).max(-1) > until
            found[at] = first * last
            at, x, y, first, last, top = (v[going] for v in (at, x, y, first, last, top))
            if not at.size:
                return found
        # The step depends on the curvature near the data, and on growth where the layers are small.
        size = (first**2).sum(-1, keepdims=True) + last**2 if shared else first**2 + last**2
        gradient = _slope(x, y, first * last)[1]
        drive = np.linalg.norm(gradient, axis=-1) if shared else abs(gradient).max(-1)
        h = 1 / np.maximum(size.max(-1, keepdims=True) * top, 2 * drive[:, None])
        a = speed(first, last)
        b = speed(first + h / 2 * a[0], last + h / 2 * a[1])
        c = speed(first + h / 2 * b[0], last + h / 2 * b[1])
        d = speed(first + h * c[0], last + h * c[1])
        first, last = (
            v + h / 6 * (a[i] + 2 * b[i] + 2 * c[i] + d[i]) for i, v in enumerate((first, last))
        )
    raise ArithmeticError("gradient flow did not end")


def _followed(weights: np.ndarray, shape: tuple, gradient, time: float) -> np.ndarray:
    """Follows one network W_1 w_2, or u v for vectors, to 1e-10 and returns its weights."""
    size = int(np.prod(shape))

    def speed(_: float, flat: np.ndarray) -> np.ndarray:
        first, last = flat[:size].reshape(shape), flat[size:]
        if len(shape) == 1:
            pull = gradient(first * last)
            return -np.concatenate([pull * last, pull * first])
        pull = gradient(first @ last)
        return -np.concatenate([np.outer(pull, last).ravel(), first.T @ pull])

    options = {"method": "LSODA", "rtol": 1e-10, "atol": 1e-13}
    return integrate.solve_ivp(speed, (0.0, time), weights, **options).y[:, -1]


# --- diagonal networks ----------------------------------------------------------------------------


class Kinds(NamedTuple):
    """Entries of source and target for fractions of the directions, and the sizes of a data set.

    Attributes:
      source: Entries times sqrt(d).
      target: Entries times sqrt(d).
      share: Fractions, multiples of 1/16.
      load: n / d.
      sigma: Standard deviation of the label noise.
    """

    source: tuple[float, ...]
    target: tuple[float, ...]
    share: tuple[float, ...]
    load: float
    sigma: float

    def __str__(self) -> str:
        kinds = zip(self.share, self.source, self.target, strict=True)
        entries = ", ".join(f"{p:g}: {s:g}→{t:g}" for p, s, t in kinds)
        return f"entries √d·(β_s→β_t) of shares {entries}; load={self.load}, σ={self.sigma}"

    def at(self, d: int, values: tuple[float, ...] | np.ndarray) -> np.ndarray:
        """Repeats a number of each kind as often as it occurs among d."""
        return np.repeat(values, [round(p * d) for p in self.share])

    def samples(self, rng: np.random.Generator, d: int, draws: int):
        """Draws inputs `[draws n d]` and labels `[draws n]`."""
        x = rng.standard_normal((draws, round(self.load * d), d))
        y = x @ self.at(d, self.target) / sqrt(d)
        return x, y + self.sigma * rng.standard_normal(y.shape)

    def risks(self, beta: np.ndarray) -> np.ndarray:
        """Computes |beta - beta_t|^2 of predictors `[draws d]`."""
        d = beta.shape[-1]
        return np.sum((beta - self.at(d, self.target) / sqrt(d)) ** 2, -1)


AT = Kinds((2, 2, 0, 0), (2, 0, 2, 0), (0.125, 0.125, 0.125, 0.625), 0.375, 0.4)


def _pretrained(d: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Trains u = sqrt(scale), v = 0 on the population loss of the source."""
    beta_s = AT.at(d, AT.source) / sqrt(d)
    begun = np.concatenate([np.full(d, sqrt(scale)), np.zeros(d)])
    u, v = np.split(_followed(begun, (d,), lambda beta: beta - beta_s, 400.0), 2)
    return u[None], v[None]


@claim("diagonal-limit-{scale:g}/ours", each=((0.02,), (0.5,), (5.0,)))
def _limit(scale):
    """After pre-training from u=√s, v=0 and fine-tuning of u and v, the risk equals the risk of the
    nearest interpolator, with asinh(2β/s) - asinh(2β_s/s) ∈ range Xᵀ

    The tolerance covers the error of the flow and what remains at its end.

    Source: {DIAGONAL}
    Domain: one data set, d=8, n=3, s={scale:g}/√d
    """
    d = 8
    x, y = (v[0] for v in AT.samples(np.random.default_rng(0), d, 1))
    beta_s = jnp.asarray(AT.at(d, AT.source) / sqrt(d))
    fit = diagonal.diagonal_limit(jnp.asarray(x), jnp.asarray(y), beta_s, scale / sqrt(d))

    def trained() -> float:
        weights = np.concatenate(_pretrained(d, scale / sqrt(d))).ravel()
        ended = _followed(weights, (d,), lambda beta: x.T @ (x @ beta - y) / len(x), 4_000.0)
        return float(AT.risks(ended[:d] * ended[d:]))

    return AT.risks(np.asarray(fit)), measured(trained, 1e-6)


def _trained(rng: np.random.Generator, d: int, scale: float, draws: int) -> Estimate:
    x, y = AT.samples(rng, d, draws)
    u, v = (np.repeat(w, draws, 0) for w in _pretrained(d, scale / sqrt(d)))
    return Estimate.mean(AT.risks(_flows(x, y, u, v)))


@claim("diagonal-networks/ours", effect=0.11)
def _(scale=0.5):
    """E R_ft of trained networks tends to the solution of τ² = (σ² + R)/load and E h' = load

    The test detects 15 %.

    Source: {DIAGONAL}
    Domain: {AT}, √d·s={scale}, d=16 and 48 extrapolated, gradient flow of networks
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 30 if quick else 300
        sizes = (SMALL, 2 * draws), (TIMES * SMALL, draws)
        small, large = (_trained(rng, d, scale, count) for d, count in sizes)
        return extrapolate(small, large, times=TIMES)

    of = partial(
        diagonal.diagonal_risk, AT.share, AT.source, AT.target, load=AT.load, sigma=AT.sigma
    )
    return of(scale=scale), simulate


_limits = jax.jit(jax.vmap(diagonal._interpolator, (0, 0, None, None)))


def _averaged(key: Array, start, scale, draws: int) -> Estimate:
    """Averages the interpolator of `diagonal.diagonal_limit` over data sets, as d -> inf."""
    rng = generator(key)

    def at(d: int, draws: int) -> Estimate:
        given = AT.at(d, start) / sqrt(d), AT.at(d, scale) / sqrt(d)
        parts = [_limits(*AT.samples(rng, d, BATCH), *given) for _ in range(draws // BATCH)]
        return Estimate.mean(AT.risks(np.concatenate(parts)))

    return extrapolate(at(SMALL, draws), at(TIMES * SMALL, draws), times=TIMES)


REACHED = f"d=16 and 48 extrapolated, {AVERAGED}"


@claim("diagonal-risk-{scale:g}/ours", effect=0.06, each=((0.02, 3_000), (5.0, 1_000)))
def _(scale, draws):
    """E R_ft of the nearest interpolator tends to the solution of τ² = (σ² + R)/load and E h' =
    load

    The test detects 7 to 8 %.

    Source: {DIAGONAL}
    Domain: {AT}, √d·s={scale}, {REACHED}
    """
    of = partial(
        diagonal.diagonal_risk, AT.share, AT.source, AT.target, load=AT.load, sigma=AT.sigma
    )
    every = np.full(len(AT.share), scale)
    return of(scale=scale), lambda key, quick: _averaged(
        key, AT.source, every, draws // 10 if quick else draws
    )


@claim("diagonal-reset/ours", effect=0.06, each=((0.1, 2_000),))
def _(scale, draws):
    """If v is set to 0 after pre-training, E R tends to the solution from start 0 at the scales u²
    = (s + √(s² + 4β_s²))/2

    The test detects 8 %.

    Source: {DIAGONAL}
    Domain: {AT}, √d·s={scale}, {REACHED}
    """
    own = (scale + np.sqrt(scale**2 + 4 * np.square(AT.source))) / 2
    start = np.zeros(len(AT.share))
    predicted = diagonal.diagonal_risk(
        AT.share, start, AT.target, load=AT.load, sigma=AT.sigma, scale=own
    )
    return predicted, lambda key, quick: _averaged(key, start, own, draws // 10 if quick else draws)


@claim("diagonal-lazy/limit")
def _():
    """As s → ∞, E R_ft = (1-n/d)|β_s-β_t|² + σ²n/(d-n-1), the printed mean, which deep networks do
    not have

    The test detects 5 %. The finite scale changes the mean by a relative 1e-3.

    Source: Thm 3.9, eqs. (16), (142), beyond: for diagonal networks as the scale goes to infinity
    Domain: {AT}, √d·s=100, d=16, gradient flow of networks
    """
    d, n = SMALL, round(AT.load * SMALL)
    distance2 = AT.risks(AT.at(d, AT.source)[None] / sqrt(d))[0]

    def simulate(key: Array, quick: bool) -> Estimate:
        return _trained(generator(key), d, 100.0, 250 if quick else 2_500)

    return (1 - n / d) * distance2 + AT.sigma**2 * n / (d - n - 1), simulate


# --- recovery -------------------------------------------------------------------------------------


class Features(NamedTuple):
    """The numbers of entries, out of 16 of size 1, by their relation to the source.

    Attributes:
      kept: Entries of source and target.
      dropped: Entries of only the source.
      flipped: Entries of both, with opposite signs.
      new: Entries of only the target.
    """

    kept: int
    dropped: int
    flipped: int
    new: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}/16" for name, n in self._asdict().items())

    def tasks(self, d: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source's signs and the target `[d]`."""
        counts = [d // 16 * n for n in (*self, 16 - sum(self))]
        return np.repeat([1, 1, -1, 0, 0], counts), np.repeat([1.0, 0, 1, 1, 0], counts)


def _cheapest(x: np.ndarray, y: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, float]:
    """Minimises |beta_i| over entries without a source, and 2 |beta_i| of the other sign, summed.

    Returns the minimiser `[d]` and the minimum.
    """
    costs = [np.where(signs == 0, 1.0, 1.0 - sign * signs) for sign in (1, -1)]
    program = optimize.linprog(
        np.concatenate(costs), A_eq=np.hstack([x, -x]), b_eq=y, method="highs"
    )
    return program.x[: signs.size] - program.x[signs.size :], program.fun


def _needed(rng: np.random.Generator, features: Features, d: int, draws: int) -> Estimate:
    """Averages (N - 1/2) / d, where N is the smallest number of samples for recovery."""
    signs, target = features.tasks(d)
    counts = []
    for _ in range(draws):
        x = rng.standard_normal((d, d))
        fails, finds = 0, d  # what more samples allow is a smaller set: it fails below N alone
        while finds - fails > 1:
            n = (fails + finds) // 2
            missed = abs(_cheapest(x[:n], x[:n] @ target, signs)[0] - target).max() > 1e-6
            fails, finds = (n, finds) if missed else (fails, n)
        counts.append((finds - 0.5) / d)
    return Estimate.mean(counts)


@claim(
    "recovery-{name}/ours",
    effect=0.08,
    each=(("scratch", Features(0, 0, 0, 3)), ("transfer", Features(2, 1, 1, 1))),
)
def _(name, features):
    """As s → 0, let N be the least number of samples with which rich fine-tuning finds the target.
    Then (E N - 1/2)/d → min_t [kept + new (1+t²) + flipped (1+4t²) + dropped (1/2 + S(2t)) + 2
    absent S(t)] with S(t) = E (g-t)₊²

    E N is exactly the statistical dimension plus 1/2. The minimum is its limit. The test detects 13
    to 16 %.

    Source: {DIAGONAL}
    Domain: {features}, σ=0, d=16 and 48 extrapolated, linear programs
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 12 if quick else 150
        sizes = (SMALL, draws), (TIMES * SMALL, draws)
        return extrapolate(*(_needed(rng, features, *size) for size in sizes), times=TIMES)

    return diagonal.recovery_load(*(n / 16 for n in features)), simulate


@claim("diagonal-rich/limit")
def _(features=Features(2, 2, 0, 3), scale=1e-30):
    """As s → 0, fine-tuning minimises the sum of |β_i| over entries without a source and 2|β_i|
    over entries of the other sign. The least sum is compared

    The tolerance is 1e-3. The excess over the minimum is O(1 / log(1/s)).

    Source: {DIAGONAL}
    Domain: one data set, {features}, d=16, n=5, s={scale:g}
    """
    signs, target = features.tasks(16)
    x = np.random.default_rng(2).standard_normal((5, 16))
    source = jnp.asarray(signs, dtype=float)
    fit = diagonal.diagonal_limit(jnp.asarray(x), jnp.asarray(x @ target), source, scale)
    paid = np.where(signs == 0, abs(fit), np.maximum(-2 * signs * np.asarray(fit), 0.0))
    return paid.sum(), measured(lambda: _cheapest(x, x @ target, signs)[1], 1e-3)


# --- two layers -----------------------------------------------------------------------------------

ONE = Setting(3, 6, pi / 3, 1.0)


def _ended(wide: bool, r: float, task: Setting = ONE) -> np.ndarray:
    """Pre-trains a network of imbalance r on the source, fine-tunes it, and returns its beta."""
    rng, (x, y), beta_s = np.random.default_rng(3), one_sample(task), np.eye(ONE.d)[0]
    if wide:
        turn = np.linalg.qr(rng.standard_normal((ONE.d, ONE.d)))[0]
        first, last = sqrt(r) * turn, np.zeros(ONE.d)
    else:  # small in the last layer, and of random direction in the first
        first = rng.standard_normal((ONE.d, 1))
        first *= sqrt(0.01 - r) / np.linalg.norm(first)
        last = np.array([0.1])
    at = np.concatenate([first.ravel(), last])
    at = _followed(at, first.shape, lambda beta: beta - beta_s, 400.0)
    at = _followed(at, first.shape, lambda beta: x.T @ (x @ beta - y) / ONE.n, 4_000.0)
    return at[: first.size].reshape(first.shape) @ at[first.size :]


@claim("layers-limit-{name}/ours", each=(("wide", 0.5), ("narrow", -2.0)))
def _(name, r):
    """β = X⁺y + c(I-P)β_s with c² = a/a_s, a² = ((1-q)r + q a_s) a + p, for a {name} network. It
    has W_1ᵀW_1 - w_2w_2ᵀ = rI, or one neuron with |w_2|² - |W_1|² = r. The risk is compared

    The tolerance covers the error of the flow.

    Source: {LAYERS}
    Domain: {ONE}, one data set, r={r:g}, gradient flow
    """
    x, y = one_sample(ONE)
    beta_s = np.eye(ONE.d)[0]
    fit = scales.unbalanced_limit(jnp.asarray(x), jnp.asarray(y), jnp.asarray(beta_s), r)

    def risk(beta: np.ndarray) -> float:
        return np.sum((beta - ONE.target()) ** 2)

    return risk(np.asarray(fit)), measured(lambda: risk(_ended(name == "wide", r)), 1e-6)


@claim("layers-crossed-{degrees}/ours", each=((100, -6.0), (135, -3.0), (170, -2.0)))
def _(degrees, r):
    """β = X⁺y - c(I-P)β_s for one neuron whose output weight changes its sign, with c of the rows
    above. The risk is compared

    The tolerance covers the error of the flow.

    Source: {LAYERS}
    Domain: n=3, d=6, θ={degrees}°, σ=0.3, one data set, r={r:g}, gradient flow
    """
    task = Setting(ONE.n, ONE.d, degrees * pi / 180, 0.3)
    x, y = one_sample(task)
    fit = scales.unbalanced_limit(jnp.asarray(x), jnp.asarray(y), jnp.eye(ONE.d)[0], r)

    def risk(beta: np.ndarray) -> float:
        return np.sum((beta - task.target()) ** 2)

    return risk(np.asarray(fit)), measured(lambda: risk(_ended(False, r, task)), 1e-6)


def _share(p: Problem):
    """Divides log c of any imbalance by its limit as r -> -inf, log(p / (1 - q)) / 2."""
    c = scales.unbalanced_scale(p["p"], p["q"], p["r"])
    return jnp.log(c) / jnp.log(p["p"] / (1 - p["q"])) * 2


def _share_again(p: Problem) -> float:
    """Computes the same, with c by bisection."""
    r, q, size = (float(p[name]) for name in ("r", "q", "p"))

    def a(norm2: float) -> float:
        return (r + sqrt(r**2 + 4 * norm2)) / 2

    def gap(log_c: float) -> float:
        return 2 * log_c - np.log(a(size + q * np.exp(2 * log_c)) / a(1.0))

    return 2 * optimize.brentq(gap, -40, 40, xtol=1e-13) / np.log(size / (1 - q))


BETWEEN = Domain(
    "p from .05 to 20, q from .1 to .9, r from -30 to 30",
    {"p": Box(0.05, 20.0, log=True), "q": Box(0.1, 0.9), "r": Box(-30.0, 30.0)},
    _share,
    _share_again,
)


@claim("layers-between/ours", "<=", attack=BETWEEN, overlooks="tightened")
def _():
    """No scale of the layers moves the unseen part further than frozen features do, as |log c| ≤
    |log(p/(1-q))|/2

    The bound is approached as r → -∞.

    Source: {LAYERS}
    Domain: {ONE}, one data set, r=-2, gradient flow
    """
    x, y = one_sample(ONE)
    unseen = np.eye(ONE.d)[0] - np.linalg.pinv(x) @ x[:, 0]
    p, q = np.sum((np.linalg.pinv(x) @ y) ** 2), unseen @ unseen

    def moved() -> float:
        return abs(np.log(_ended(False, -2.0) @ unseen / q))

    return abs(np.log(p / (1 - q))) / 2, measured(moved, 1e-6)


class Rescaled(NamedTuple):
    """Pre-trained layers of rank one, the first multiplied and the last divided by a factor.

    Attributes:
      factor: The factor.
      load: n / d.
      theta: The angle between the tasks in radians.
      sigma: Standard deviation of the label noise.
    """

    factor: float
    load: float
    theta: float
    sigma: float

    @property
    def imbalance(self) -> float:
        """Computes |w_2|^2 - |W_1|^2 for a source of norm 1."""
        return self.factor**-2 - self.factor**2

    def gains(self, rng: np.random.Generator, d: int, draws: int) -> np.ndarray:
        """Simulates risks of fine-tuned networks and of minimum-norm least squares, `[2 draws]`."""
        at = Setting(round(self.load * d), d, self.theta, self.sigma)
        x, y = at.samples(rng, draws)
        first = np.tile(self.factor * np.eye(d)[0], (draws, 1))
        beta = _flows(x, y, first, np.full((draws, 1), 1 / self.factor))
        fits = beta, (np.linalg.pinv(x) @ y[..., None])[..., 0]
        return np.stack([np.sum((fit - at.target()) ** 2, -1) for fit in fits])


def _mean_risk(at: Rescaled) -> tuple[Array, Simulate]:
    """Compares the limit of the mean risk with simulations at two sizes, extrapolated."""

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 80 if quick else 800
        small, large = (Estimate.mean(at.gains(rng, d, draws)[0]) for d in (SMALL, TIMES * SMALL))
        return extrapolate(small, large, times=TIMES)

    return scales.unbalanced_risk(
        load=at.load, theta=at.theta, sigma=at.sigma, imbalance=at.imbalance
    ), simulate


TURNED = pi / 2, 0.8  # angle and noise


@claim("layers-risk-{factor:g}/ours", effect=0.2, each=((1.5,), (0.5,)))
def _(factor):
    """E R_ft of networks with rescaled layers tends to (1-load)(1 - 2c cos θ + c²) + load
    σ²/(1-load), with c at r = factor⁻² - factor²

    The test detects 10 to 12 %.

    Source: {LAYERS}
    Domain: load=0.375, θ=90°, σ=0.8, d=16 and 48 extrapolated, W_1 times {factor:g}, w_2
      divided by it, gradient flow
    """
    return _mean_risk(Rescaled(factor, 0.375, *TURNED))


@claim("layers-boundary/ours", effect=0.08)
def _(factor=1.5, printed=0.195):
    """At the angle arccos(c/2) fine-tuning neither helps nor hurts, as E (R_ft - R_scratch) → 0

    The test detects .08. At 60°, the printed angle, the difference would be {printed:.3f}.

    Source: {LAYERS}
    Domain: load=0.375, σ=0.8, d=16 and 48 extrapolated, W_1 times {factor:g}, w_2 divided by it,
      gradient flow
    """
    r = Rescaled(factor, 0.375, *TURNED).imbalance
    angle = float(scales.unbalanced_boundary(load=0.375, sigma=TURNED[1], imbalance=r))
    at = Rescaled(factor, 0.375, angle, TURNED[1])

    def simulate(key: Array, quick: bool) -> Estimate:
        rng, draws = generator(key), 80 if quick else 800
        small, large = (
            Estimate.mean(-np.diff(at.gains(rng, d, draws), axis=0)[0])
            for d in (SMALL, TIMES * SMALL)
        )
        return extrapolate(small, large, times=TIMES)

    return 0.0, simulate


@claim("layers-opposite-{degrees}/ours", effect=0.08, each=((160,), (170,)))
def _(degrees, factor=2.0):
    """Beyond an angle above 90°, a neuron of negative imbalance changes the sign of its output
    weight, and E R_ft tends to (1-load)(1 + 2c cos θ + c²) + load σ²/(1-load): the opposite task
    helps

    The test detects .08. The risk would be above 1.5 if the output weight kept its sign.

    Source: {LAYERS}
    Domain: load=0.625, θ={degrees}°, σ=0.3, d=16 and 48 extrapolated, W_1 times {factor:g}, w_2
      divided by it, gradient flow
    """
    return _mean_risk(Rescaled(factor, 0.625, degrees * pi / 180, 0.3))
