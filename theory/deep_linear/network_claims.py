"""features-are-fate, Lemma 3.3 to Theorem 3.5 and Appendices A, B, compared with networks.

Networks are trained by gradient descent at two rates, extrapolated to gradient flow. Initial
weights come from `networks.small_weights`. They are alpha times W̄_l = √(L-l+1) · orthogonal, with
|W̄_L| = 1. Hence D̄_l = W̄_lᵀW̄_l - W̄_{l+1}W̄_{l+1}ᵀ is the identity, except that D̄_{L-1} = 2 I -
W̄_L W̄_Lᵀ. (22) holds with lambda = 1, |W̄_l|_F² = (L-l+1) d and |W̄_l|²_op = L-l+1.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from itertools import pairwise
from math import exp, factorial, log2
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import betainc

from theory import claims
from theory.claims import Estimate, Simulate, generator, measured, once
from theory.deep_linear import domains, lemma_domains, networks
from theory.deep_linear.claims import small_weights
from theory.deep_linear.networks import Weights
from theory.deep_linear.regressions import PAPER, Setting, one_sample

D, RATE, TIME = 20, 0.02, 400
# One key for all networks, so claims about the same network train the same one.
claim = partial(claims.claim, PAPER, draws=f"{PAPER}/App-B")


class Start(NamedTuple):
    """Initial weights: alpha times weights W̄ that satisfy (22) with lambda = size².

    Attributes:
      depth: Number of layers L.
      alpha: Scale of the weights.
      size: Factor of W̄.
    """

    depth: int
    alpha: float
    size: float = 1.0

    def __str__(self) -> str:
        size = "" if self.size == 1 else f", W̄ of {self.size:g} times the size"
        return f"d={D}, L={self.depth}, α={self.alpha:g}{size}"

    def weights(self, key: Array) -> Weights:
        """Draws the initial weights."""
        return small_weights(key, D, self.depth, self.alpha * self.size)


# --- what is measured -----------------------------------------------------------------------------


def columns(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the layers as matrices."""
    return [*weights[:-1], weights[-1][:, None]]


def conserved(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Computes what gradient flow conserves, D_l = W_l^T W_l - W_{l+1} W_{l+1}^T (eq. 35)."""
    return [a.T @ a - b @ b.T for a, b in pairwise(columns(weights))]


def _features(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Computes Phi = W_1 ... W_{L-1}."""
    return reduce(np.matmul, weights[:-1])


def _beta(weights: Sequence[np.ndarray]) -> np.ndarray:
    return reduce(np.matmul, weights)


def _whole(w: np.ndarray) -> float:
    return np.sum(w**2)


def _top(w: np.ndarray) -> float:
    return float(np.linalg.norm(np.atleast_2d(w), 2)) ** 2


def _tail(weights: Sequence[np.ndarray]) -> float:
    """Computes |W_1|_F² - |W_1|²_op, the squared distance of W_1 from rank one."""
    return np.sum(np.linalg.svd(weights[0], compute_uv=False)[1:] ** 2)


def _alignment(weights: Sequence[np.ndarray]) -> float:
    """Computes (u_2 . v_1)² of the top singular vectors between the first two layers."""
    right, left = np.linalg.svd(weights[0])[2][0], np.linalg.svd(weights[1])[0][:, 0]
    return (right @ left) ** 2


def _odd_eigenvalue(weights: Sequence[np.ndarray]) -> float:
    """Computes the eigenvalue of D_1 that is farthest from the mean of all."""
    values = np.linalg.eigvalsh(conserved(weights)[0])
    return values[np.argmax(np.abs(values - values.mean()))]


def _form(weights: Sequence[np.ndarray]) -> float:
    """Computes v_1 . D_1 v_1 for the top right singular vector v_1 of W_1."""
    v = np.linalg.svd(weights[0])[2][0]
    return v @ conserved(weights)[0] @ v


# --- training -------------------------------------------------------------------------------------

AT = Setting(8, D, 1.0, 0.5)  # of training from scratch


def _trained(
    weights: Weights, rate: float, time: float = TIME, *, at: Setting | None, size: float = 1.0
) -> networks.Trained:
    """Runs descent for a time, on data or on the population risk of the source task `size` e_1."""
    steps = round(time / rate)
    if at is None:
        return networks.pretrain(weights, size * jnp.eye(D)[0], rate, steps)
    x, y = map(jnp.asarray, one_sample(at))
    return networks.fine_tune(weights, x, y, rate, steps)


def _in_numpy(weights: Weights) -> list[np.ndarray]:
    """Converts weights to NumPy arrays, because measures of few numbers are not worth compiling."""
    return [np.asarray(w) for w in weights]


Measure = Callable[[list[np.ndarray]], Any]


@cache
def _ends(
    start: Start, at: Setting | None, size: float
) -> Callable[[Array, bool], list[list[np.ndarray]]]:
    """Trains a network at both rates. Claims about one network train it once."""

    @once
    def ends(key: Array, quick: bool) -> list[list[np.ndarray]]:
        del quick  # one trajectory either way
        weights = start.weights(key)
        rates = RATE, RATE / 2
        return [_in_numpy(_trained(weights, rate, at=at, size=size).weights) for rate in rates]

    return ends


def _end(
    of: Measure,
    start: Start,
    tolerance: float,
    *,
    at: Setting | None = None,
    size: float = 1.0,
) -> Simulate:
    """Measures a network at the end of gradient flow."""

    def simulate(key: Array, quick: bool) -> Estimate:
        coarse, fine = (of(weights) for weights in _ends(start, at, size)(key, quick))
        return Estimate(float(2 * fine - coarse), tolerance=tolerance)

    return simulate


def _least(of: Measure, start: Start, times: int = 20) -> Simulate:
    """Measures a network at times 0, 1, 2, ... of pretraining and returns the smallest value."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        weights, values = start.weights(key), []
        for _ in range(times):
            values.append(float(of(_in_numpy(weights))))
            weights = _trained(weights, RATE, 1.0, at=None).weights
        return Estimate(min(values), tolerance=1e-4)

    return simulate


def _loss_left(start: Start, time: float, *, at: Setting | None = None) -> Simulate:
    """Computes L(t) / L(0). For n < d the training loss is only the part in the row space."""

    def simulate(key: Array, quick: bool) -> Estimate:
        del quick
        first, coarse, fine = (
            _trained(start.weights(key), rate, t, at=at).loss
            for rate, t in ((RATE, 0.0), (RATE / 20, time), (RATE / 40, time))
        )
        return Estimate(float((2 * fine - coarse) / first), tolerance=1e-6)

    return simulate


def _halved(
    combine: Callable[[float, float], float],
    of: Measure,
    start: Start,
    tolerance: float,
    *,
    at: Setting | None = None,
) -> Simulate:
    """Combines the measures at alpha and at alpha / 2."""

    def simulate(key: Array, quick: bool) -> Estimate:
        values = [
            _end(of, start._replace(alpha=alpha), 0.0, at=at)(key, quick).value
            for alpha in (start.alpha, start.alpha / 2)
        ]
        return Estimate(combine(*values), tolerance=tolerance)

    return simulate


def _least_eigenvalue() -> float:
    x, _ = one_sample(AT)
    return float(np.linalg.eigvalsh(x @ x.T)[0])


# --- Appendix A and the bound of singular values --------------------------------------------------


@cache
def _square_layers(floor: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns W_1, W_2, W_3 of L = 4 with D_l ≽ floor I, and a unit vector for which (44) fails."""

    def root(a: np.ndarray) -> np.ndarray:
        values, basis = np.linalg.eigh(a)
        return (basis * np.sqrt(values)) @ basis.T

    third = root(np.array([[1.0, 1.0], [1.0, 1.0]]) + floor * np.eye(2))
    second = root(third @ third.T + np.diag([1.0, 0.0]) + floor * np.eye(2))
    layers = [root(second @ second.T + floor * np.eye(2)), second, third]
    product = reduce(np.matmul, layers)
    gap = product.T @ product - np.linalg.matrix_power(third.T @ third, 3)
    return layers, np.linalg.eigh(gap)[1][:, 0]


# --- the claims -----------------------------------------------------------------------------------

END = f"end of pretraining, time {TIME}"
THIN, THICK, SHALLOW = Start(3, 0.01), Start(3, 0.3), Start(2, 0.02)
LEMMA, UNIT = Start(3, 0.05), Start(2, 1.0)
WHOLE = [(THICK.depth - l) * D for l in range(THICK.depth - 1)]  # |W̄_l|_F², |W̄_L| = 1
TOP = [THICK.depth - l for l in range(THICK.depth - 1)]  # |W̄_l|²_op
BOUND = "Lemma B.1, eqs. (55)-(60), p. 18"


@claim("eq22-gaussian/ours")
def _():
    """Gaussian weights, as in App. D.1, satisfy (22) for L = 2 with probability I_½(d/2, ½)

    Source: eq. (22), p. 15, and App. D.1, p. 27
    Domain: d=2; at d=500 it is below 1e-150
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Counts the share of W̄_1 (2 x 2), W̄_2 for which W̄_1ᵀW̄_1 - W̄_2W̄_2ᵀ has only
        eigenvalues >= 0.
        """
        rng, draws = generator(key), 10_000 if quick else 100_000
        first, last = rng.standard_normal((draws, 2, 2)), rng.standard_normal((draws, 2))
        gap = first.swapaxes(1, 2) @ first - last[:, :, None] * last[:, None, :]
        return Estimate.mean((np.linalg.eigvalsh(gap)[:, 0] >= 0).astype(float))

    return betainc(1.0, 0.5, 0.5), simulate


@claim("eq22-orthogonal/ours")
def _():
    """W̄_l = √(L-l+1) · orthogonal with |W̄_L| = 1 satisfies (22), with λ = 1 at most

    Source: eq. (22), p. 15
    Domain: d={D}, L=3
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        weights = _in_numpy(Start(3, 1.0).weights(key))
        least = [np.linalg.eigvalsh(gap)[0] for gap in conserved(weights)]
        return Estimate(float(min(least)), tolerance=1e-9)

    return 1.0, simulate


@claim("L3.3/exact")
def _():
    """Gradient flow on the population risk from (22) ends at β_s. |β - β_s| is compared with 0

    The tolerance covers float64 rounding.

    Source: Lemma 3.3, p. 5
    Domain: {THIN}, {END}
    """
    return 0.0, _end(lambda w: np.linalg.norm(_beta(w) - np.eye(D)[0]), THIN, 1e-12)


@claim("eq35/exact")
def _():
    """D_l = W_lᵀW_l - W_{{l+1}}W_{{l+1}}ᵀ = α²D̄_l at all times. The eigenvalue of D_1 farthest from
    α² is compared

    Source: eq. (35), p. 16
    Domain: {THICK}, {END}
    """
    return THICK.alpha**2, _end(_odd_eigenvalue, THICK, RATE**2)


@claim("eq44/printed", ">=", attack=domains.POWER)
def _printed_power(floor=0.01):
    """The step from (43) to (44) is ΦᵀΦ ≽ (W_{{L-1}}ᵀW_{{L-1}})^(L-1), here as forms at u

    Squaring is not monotone. (46) holds all the same.

    Source: eqs. (42)-(46), p. 17
    Domain: L=4, 2 x 2 layers with D_l ≽ {floor} I, at one u
    """
    layers, u = _square_layers(floor)
    form = u @ np.linalg.matrix_power(layers[-1].T @ layers[-1], 3) @ u
    # u.ΦᵀΦ u = |W_1 W_2 W_3 u|².
    return form, measured(lambda: np.sum((reduce(np.matmul, layers) @ u) ** 2), 1e-9)


@_printed_power.beside(
    "corrected", attack=domains.features(depth=4), overlooks="tightened", sharper="eq46/ours"
)
def _(floor):
    """ΦᵀΦ ≽ (α²λ)^(L-1) I, from σ_min(AB) ≥ σ_min(A) σ_min(B)

    This is (46) without (44). It is not sharp. The search comes within 6 x, as the factor (L-1)! is
    missing.
    """
    return floor**3


@claim("eq46/exact", ">=", attack=domains.features(), overlooks="tightened")
def _features_bound(start=Start(4, 0.5)):
    """λ_min(ΦᵀΦ) ≥ (α²λ)^(L-1) at all times, Φ = W_1…W_{{L-1}}

    The tolerance covers the rate. The value starts at L! times the bound.

    Source: eqs. (42)-(46), p. 17
    Domain: {start}, least at times 0 to 19
    """
    bound = start.alpha ** (2 * (start.depth - 1))
    return bound, _least(lambda w: np.linalg.svd(_features(w), compute_uv=False)[-1] ** 2, start)


@_features_bound.beside("ours", attack=domains.features(2.0), overlooks="tightened")
def _(start):
    """λ_min(ΦᵀΦ) ≥ (L-1)! (α²λ)^(L-1), as σ_min(W_l)² ≥ σ_min(W_{{l+1}})² + α²λ

    Source: eqs. (42)-(46), p. 17, sharpened
    """
    return factorial(start.depth - 1) * start.alpha ** (2 * (start.depth - 1))


@claim("eq48/reading", "<=", attack=lemma_domains.POPULATION, overlooks="tightened")
def _(start=Start(2, 0.3), time=2.0):
    """L(t)/L(0) ≤ exp(-2(α²λ)^(L-1) t), which is printed with = after (47) with ≤

    It is attained at short times and loose later, since the late rate does not depend on α.

    Source: eqs. (47), (48), p. 17
    Domain: {start}, t={time:g}
    """
    return exp(-2 * start.alpha**2 * time), _loss_left(start, time)


@claim("LB.1-order/printed")
def _printed_order():
    """W_l = σ_l u_l v_lᵀ + O(α²). The order in α of |W_1 - σ_1 u_1 v_1ᵀ|_F is compared

    Eq. (60) bounds the square of the remainder by O(α²).

    Source: Lemma B.1, eq. (50), p. 17
    Domain: {SHALLOW} and half of it, {END}
    """
    found = _halved(lambda a, b: log2(a / b), lambda w: np.sqrt(_tail(w)), SHALLOW, 0.02)
    return 2.0, found


@_printed_order.beside("corrected")
def _():
    """W_l = σ_l u_l v_lᵀ + O(α). The order in α of |W_1 - σ_1 u_1 v_1ᵀ|_F is compared

    Eq. (60) bounds the square of the remainder by O(α²).
    """
    return 1.0


@claim("LB.1-alignment/limit")
def _():
    """As α → 0 and t → ∞, (u_{{l+1}}ᵀv_l)² → 1, here for the first two layers

    The tolerance is α².

    Source: Lemma B.1, eq. (51), p. 17
    Domain: {THIN}, {END}
    """
    return 1.0, _end(_alignment, THIN, THIN.alpha**2)


@claim("eq54/exact")
def _():
    """|W_l|²_F - |W_L|²_F = α²(|W̄_l|²_F - |W̄_L|²_F), here of the first layer

    Source: eqs. (52)-(54), p. 18
    Domain: {THICK}, {END}
    """
    found = _end(lambda w: _whole(w[0]) - _whole(w[-1]), THICK, RATE**2)
    return THICK.alpha**2 * (WHOLE[0] - 1), found


@claim("eq59/printed", ">=", attack=domains.TOP_PRINTED)
def _():
    """|W_l|²_op ≥ |W̄_L|²_op + α²(|W̄_L|²_op - |W̄_l|²_op), here of the first layer

    The bound has W̄_L in place of W_L. Every layer starts at order α.

    Source: {BOUND}
    Domain: {THICK}, least at times 0 to 19
    """
    return 1 + THICK.alpha**2 * (1 - TOP[0]), _least(lambda w: _top(w[0]), THICK)


@claim("eq59/corrected", ">=", attack=domains.REVERSED, overlooks="tightened", sharper="eq59/ours")
def _corrected_top():
    """|W_l|²_op - |W_L|²_op ≥ α²(|W̄_L|²_op - |W̄_l|²_op), here of the first layer

    It is never sharp, since the left side is ≥ 0 and the right side ≤ 0.

    Source: {BOUND}
    Domain: {THICK}, least at times 0 to 19
    """
    found = _least(lambda w: _top(w[0]) - _top(w[-1]), THICK)
    return THICK.alpha**2 * (1 - TOP[0]), found


@_corrected_top.beside("ours", attack=domains.DIFFERENCE)
def _():
    """|W_l|²_op - |W_L|²_op ≥ (L-l) α²λ, here of the first layer

    The tolerance covers the rate. The bound is attained, as D̄_l is a multiple of I.

    Source: {BOUND}, sharpened
    """
    return (THICK.depth - 1) * THICK.alpha**2


@claim(
    "eq60/exact",
    "<=",
    attack=domains.tail(domains.FROBENIUS, domains.OPERATOR),
    overlooks="tightened",
)
def _():
    """|W_l|²_F - |W_l|²_op ≤ α²(|W̄_l|²_F - |W̄_L|²_F + |W̄_l|²_op - |W̄_L|²_op), here of the first
    layer

    The operator norms never matter, as LB.1-remainder holds without them.

    Source: {BOUND}
    Domain: {LEMMA}, {END}
    """
    bound = LEMMA.alpha**2 * (WHOLE[0] - 1 + TOP[0] - 1)
    return bound, _end(_tail, LEMMA, 1e-6)


@claim("LB.1-remainder/ours", "<=", attack=domains.tail(domains.FROBENIUS))
def _():
    """|W_l|²_F - |W_l|²_op ≤ α²(|W̄_l|²_F - |W̄_L|²_F), here of the first layer

    Source: {BOUND}
    Domain: {LEMMA}, {END}
    """
    return LEMMA.alpha**2 * (WHOLE[0] - 1), _end(_tail, LEMMA, 1e-6)


@claim("eq62/printed", "<=", attack=lemma_domains.FORM_PRINTED)
def _printed_form(start=Start(3, 0.3, 0.5), end=END):
    """v_lᵀD_l v_l ≤ α²|D̄_l|²_op, here of the first layer

    The square of the norm is a misprint. The bound is attained, as D̄_1 is a multiple of I.

    Source: eqs. (61)-(70), pp. 18-19
    Domain: {start}, {end}
    """
    return start.alpha**2 * start.size**4, _end(_form, start, 1e-4)


@_printed_form.beside("corrected", attack=lemma_domains.FORM)
def _(start):
    """v_lᵀD_l v_l ≤ α²|D̄_l|_op, here of the first layer

    The print squares the norm. The bound is attained, as D̄_1 is a multiple of I.
    """
    return start.alpha**2 * start.size**2


@claim("eq69/corrected", ">=", attack=lemma_domains.ALIGNMENT, overlooks="tightened")
def _():
    """(v_lᵀu_{{l+1}})² ≥ 1 - α² C_l/s²_{{l+1}}, with |D̄_l|_op in place of its square, here for l=1
    and s→1

    The search comes within 1.2 x, and one instance within 2 %. |D̄_l|_op and the operator norms
    never matter, as |W̄_l|²_F - |W̄_L|²_F is enough.

    Source: eqs. (69), (70), p. 19, corrected
    Domain: {LEMMA}, {END}
    """
    constant = 2 + WHOLE[0] - 1 + TOP[0] - 1  # C_1 of (70) with |D̄_1|_op = 1
    return 1 - LEMMA.alpha**2 * constant, _end(_alignment, LEMMA, 1e-4)


@claim("T3.4/limit")
def _():
    """As α → 0 and t → ∞, Φ = W_1…W_{{L-1}} → β_s vᵀ. The share of rank one, |Φᵀβ_s|²/|Φ|²_F, is
    compared

    The tolerance is α².

    Source: Thm 3.4, p. 6
    Domain: {THIN}, {END}
    """
    return 1.0, _end(lambda w: _whole(_features(w)[0]) / _whole(_features(w)), THIN, 1e-4)


@claim("T3.4-norm/ours")
def _(start=THIN, norm=2.0, end=END):
    """Φ → β_s vᵀ with |v| = |β_s|^((L-1)/L - 1)

    The tolerance is 10 α².

    Source: Thm 3.4, p. 6, and eqs. (73)-(77), p. 19
    Domain: {start}, |β_s|={norm:g}, {end}
    """
    size = _end(lambda w: np.linalg.norm(_features(w)[0]) / norm, start, 1e-3, size=norm)
    return norm ** (-1 / start.depth), size


@claim("eq71/exact", ">=", attack=lemma_domains.PRODUCT, overlooks="tightened")
def _():
    """lim Π s_l² ≥ |ŷ|²/|X|²_op, where ŷ is the fit of the network (the labels for n < d)

    Source: eqs. (71), (72), p. 19
    Domain: {AT}, L=3, α={THICK.alpha}, from scratch
    """
    x, y = one_sample(AT)
    found = _end(lambda w: np.prod([_top(v) for v in w]), THICK, 1e-3, at=AT)
    return np.sum(y**2) / np.linalg.norm(x, 2) ** 2, found


@claim("T3.5/limit")
def _():
    """As α → 0 and t → ∞, training from scratch ends at X⁺y. Its risk is compared

    The tolerance is α. The remainder is O(α²).

    Source: Thm 3.5, p. 6
    Domain: {AT}, L=2, α={SHALLOW.alpha} and half of it extrapolated
    """

    def risk(beta: np.ndarray) -> float:
        return np.sum((beta - AT.target()) ** 2)

    x, y = one_sample(AT)
    ends = SHALLOW, SHALLOW.alpha
    found = _halved(lambda a, b: 2 * b - a, lambda w: risk(_beta(w)), *ends, at=AT)
    return risk(np.linalg.pinv(x) @ y), found


@claim("eq87/printed", "<=", attack=lemma_domains.SAMPLE_PRINTED)
def _printed_decay(at=AT, time=2.0):
    """L_∥(t)/L_∥(0) ≤ exp(-2(α²λ)^(L-1) λ_min(XXᵀ) t)

    The factor 1/n of the loss is missing in the printed exponent.

    Source: eqs. (87), (88), p. 20
    Domain: {at}, L=2, α=1, t={time:g}
    """
    return exp(-2 * _least_eigenvalue() * time), _loss_left(UNIT, time, at=at)


@_printed_decay.beside("corrected", attack=lemma_domains.SAMPLE, overlooks="tightened")
def _(at, time):
    """L_∥(t)/L_∥(0) ≤ exp(-2(α²λ)^(L-1) λ_min(XXᵀ) t/n)

    The factor 1/n of the loss is missing in the printed exponent.
    """
    return exp(-2 * _least_eigenvalue() * time / at.n)


@claim("eq90/exact")
def _():
    """|(I-P)W_1(t)|²_F = |(I-P)W_1(0)|²_F, here α² L (d-n)

    The tolerance covers float64 rounding.

    Source: eqs. (82), p. 20, and (90), p. 21
    Domain: {AT}, L=3, α={THICK.alpha}, from scratch
    """
    x, _ = one_sample(AT)

    def unseen(w: np.ndarray) -> np.ndarray:
        """Projects w on the complement of the rows of X."""
        return w - np.linalg.pinv(x) @ (x @ w)

    found = _end(lambda w: _whole(unseen(w[0])), THICK, 1e-9, at=AT)
    return THICK.alpha**2 * THICK.depth * (D - AT.n), found
