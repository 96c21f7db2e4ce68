"""Risks for Gaussian inputs of any covariance, from deterministic equivalents.

Inputs are x ~ N(0, Sigma). Every risk is a function of the eigenvalues s_i of Sigma, of squared
components of the tasks in its eigenbasis, and of one number kappa(n, ridge). kappa is the ridge
that would have the same effect with infinitely many samples:

    ridge = kappa (1 - df1(kappa) / n),  df1 = sum_i s_i / (s_i + kappa).

The objective is |y - X b|^2 / n + ridge |b|^2. Its limit ridge -> 0 is the limit of gradient flow,
the fit of minimum norm. The risk is |b - beta_t|^2_Sigma. Relative errors are O(1/n) away from n =
d. Linear transfer is exact at any n. In float32, rounding errors are about 1e-6 / |1 - n/d|.
`risks` covers the isotropic case.

Why few samples act as a ridge. The fit is b = (X^T X / n + ridge)^-1 X^T y / n. For isotropic
inputs its mean risk is known exactly, because X^T X is a Wishart matrix and the mean of its inverse
has a closed form. For any other Sigma no such mean is known. As n and d grow, however, the random
matrix ridge (X^T X / n + ridge)^-1 acts on any fixed vector as the fixed matrix kappa (Sigma +
kappa)^-1 does. Direction i is then learned to the fraction s_i / (s_i + kappa), as with infinitely
many samples and the ridge kappa. df1 is the sum of these fractions. Without a ridge, the n samples
are fitted exactly, and df1 = n.

The risk has one more term, because the fractions vary between samples. With df2 = sum_i (s_i /
(s_i + kappa))^2,

    E R = [sum_i s_i (kappa beta_i / (s_i + kappa))^2 + sigma^2 df2 / n] / (1 - df2 / n).

An example: 100 eigenvalues are 1 and 100 are 0.1, n = 100, sigma = 0.5, and beta_t has norm 1 and
equal components. Then kappa = sqrt(0.1) = 0.316. The large directions are learned to 0.76, the
small ones to 0.24, and 100 * 0.76 + 100 * 0.24 = n. With df2 = 63.5 the risk is
(0.0577 + 0.1587) / 0.365 = 0.593. Least squares on 200 random data sets gives 0.595 +- 0.007.

`effective_ridge` solves for log kappa. Near n = d, kappa is many orders of magnitude below the
eigenvalues, and 1 - df1 / n is a difference of nearly equal numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from sail_jax.checks import concrete
from sail_jax.deprecated import former, renamed
from theory import problems
from theory.deep_linear import risks
from theory.deep_linear.overlaps import null_scale

__getattr__ = former(__name__, {"fine_tune_risk": "fine_tuning_risk"}, until="0.4")

Spectrum = Float[Array, " d"]


@problems.defined
def power_law(d: int, exponent: ArrayLike) -> Spectrum:
    """Returns the eigenvalues i^(-exponent), i = 1, ..., d, scaled to mean 1.

    Args:
      d: Number of eigenvalues, at least 1.
      exponent: The exponent, a scalar; 0 gives isotropic inputs.

    Returns:
      The eigenvalues `(d,)`, descending for exponents >= 0.

    Raises:
      ValueError: If d < 1.
    """
    if d < 1:
        raise ValueError(f"d must be at least 1; got {d}")
    s = jnp.arange(1, d + 1, dtype=float) ** -jnp.asarray(exponent, dtype=float)
    return s / s.mean()


@problems.defined
def diagonalise(
    covariance: Float[ArrayLike, "d d"], *vectors: Float[ArrayLike, " d"]
) -> tuple[Array, ...]:
    """Returns the eigenvalues of a covariance matrix, and vectors in its eigenbasis.

    The other functions of this module expect tasks in this form.

    Args:
      covariance: Symmetric positive semidefinite matrix `(d, d)`, not all 0.
      *vectors: Vectors `(d,)` to express in the eigenbasis.

    Returns:
      The eigenvalues `(d,)`, descending, followed by each vector in the eigenbasis `(d,)`.

    Raises:
      ValueError: If the matrix is not square, finite, symmetric, positive semidefinite or nonzero
        (up to rounding), or a vector has another length or is not finite.
    """
    values, basis = eigenbasis(covariance)
    for i, vector in enumerate(vectors):
        if jnp.shape(vector) != values.shape:
            raise ValueError(
                f"vector {i} must have shape {values.shape}, as covariance; got {jnp.shape(vector)}"
            )
        problems.check_squares(f"vector {i}", vector)
    return (values, *(basis.T @ jnp.asarray(v, dtype=float) for v in vectors))


@problems.defined
def eigenbasis(covariance: Float[ArrayLike, "d d"]) -> tuple[Spectrum, Float[Array, "d d"]]:
    """Returns the eigenvalues of a covariance matrix, and its eigenvectors.

    Eigenvalues that are negative only by rounding are set to 0.

    Args:
      covariance: Symmetric positive semidefinite matrix `(d, d)`, not all 0.

    Returns:
      The eigenvalues `(d,)`, descending, and the eigenvectors as columns `(d, d)`.

    Raises:
      ValueError: If the matrix is not square, finite, symmetric, positive semidefinite or nonzero
        (up to rounding).
    """
    covariance = jnp.asarray(covariance, dtype=float)
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1] or covariance.size == 0:
        raise ValueError(f"covariance must be a square matrix; got shape {covariance.shape}")
    problems.check_squares("covariance", covariance)
    matrix = concrete(covariance)
    rounding = 10 * covariance.shape[0] * float(jnp.finfo(covariance.dtype).eps)
    if matrix is not None and np.abs(matrix - matrix.T).max() > rounding * np.abs(matrix).max():
        i, j = np.unravel_index(np.abs(matrix - matrix.T).argmax(), matrix.shape)
        raise ValueError(
            f"covariance must be symmetric; got {matrix[i, j]:g} at [{i}, {j}] and "
            f"{matrix[j, i]:g} at [{j}, {i}]"
        )
    values, basis = linalg.eigh((covariance + covariance.T) / 2)
    # Largest first, as in `power_law`.
    values, basis = values[::-1], basis[:, ::-1]
    spectrum = concrete(values)
    if spectrum is not None and (
        spectrum[-1] < -rounding * np.abs(spectrum).max() or not spectrum.any()
    ):
        raise ValueError(
            "covariance must be positive semidefinite and not 0; its eigenvalues run from "
            f"{spectrum[-1]:g} to {spectrum[0]:g}"
        )
    return jnp.maximum(values, 0.0), basis


@problems.in_float64
def effective_ridge(eigenvalues: Spectrum, n: ArrayLike, ridge: ArrayLike = 0.0) -> Array:
    """Computes kappa >= ridge, which solves ridge = kappa (1 - df1(kappa) / n).

    It is 0 if ridge = 0 and n is at least the number of positive eigenvalues. It is differentiated
    as an implicit function.

    For accuracy, the equation is solved in another form. With s_1 >= s_2 >= ... and j = floor(n),
    it is A(kappa) = B(kappa), without cancellation:

        A = n - j + sum_{i<=j} kappa / (s_i + kappa)
        B = sum_{i>j} s_i / (s_i + kappa) + n ridge / kappa.

    log A - log B increases in log kappa, so Newton's method, safeguarded by bisection, finds its
    root.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0, in any order.
      n: Number of samples, > 0.
      ridge: Ridge penalty, >= 0.

    Returns:
      kappa, with the broadcast shape of n and ridge.

    Raises:
      ValueError: If an argument is out of range.
    """
    s = jnp.sort(check_spectrum(eigenvalues), descending=True)
    problems.check("n", n, lambda n: (n > 0) & (n < np.inf), "a finite number of samples > 0")
    problems.check_ridge(ridge)
    n, ridge = jnp.broadcast_arrays(jnp.asarray(n, dtype=float), jnp.asarray(ridge, dtype=float))
    return _effective_ridge(s, n, ridge)


@jax.jit
def _effective_ridge(s: Array, n: Array, ridge: Array) -> Array:
    """Computes `effective_ridge` of eigenvalues in descending order."""
    # n - df1 would cancel where kappa is small. The first j terms of df1 are therefore written as 1
    # - kappa / (s + kappa), and the ones are moved to the other side of the equation.
    j = jnp.minimum(jnp.floor(n), s.size)
    first = jnp.arange(s.size) < j[..., None]

    def slack(x: Array, s: Array, n: Array, ridge: Array) -> tuple[Array, Array]:
        """Computes log A - log B at x = log kappa, and its derivative."""
        kappa = jnp.exp(x)[..., None]
        share, rest = s / (s + kappa), kappa / (s + kappa)
        a = n - j + jnp.where(first, rest, 0.0).sum(-1)
        b = jnp.where(first, 0.0, share).sum(-1) + n * ridge / kappa[..., 0]
        rise = jnp.where(first, share * rest, 0.0).sum(-1)
        fall = jnp.where(first, 0.0, share * rest).sum(-1) + n * ridge / kappa[..., 0]
        return jnp.log(a) - jnp.log(b), rise / a + fall / b

    # s_{j+1}, the largest eigenvalue that is not among the first j, or 0.
    next_ = jnp.append(s, 0.0)[j.astype(int)]
    # A bound from below: at kappa, df1 >= (j + 1) s_{j+1} / (s_{j+1} + kappa), and df1 <= n.
    bottom = jnp.maximum(ridge, next_ * (j + 1 - n) / n)
    # Where this lower bound is 0, kappa is 0 too. A placeholder keeps the logarithms finite.
    found = bottom > 0
    # A bound from above: kappa = ridge + kappa df1 / n, and kappa df1 < sum_i s_i.
    top = ridge + s.sum() / n
    low, high = jnp.log(jnp.where(found, bottom, top)), jnp.log(top)

    def step(_, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, low, high = state
        value, slope = slack(x, s, n, ridge)
        low, high = jnp.where(value < 0, x, low), jnp.where(value < 0, high, x)
        # Invariant: the root lies between low and high. Newton's step is taken if it stays between
        # them, else the middle.
        newton = x - value / jnp.maximum(slope, jnp.finfo(x.dtype).tiny)
        inside = (newton > low) & (newton < high)
        return jnp.where(inside, newton, (low + high) / 2), low, high

    x, *_ = jax.lax.fori_loop(0, 60, step, ((low + high) / 2, low, high))
    # The iterations are not differentiated, because JAX would store 60 of them, and bisection has
    # slope 0.
    x = jax.lax.stop_gradient(jnp.where(found, x, 0.0))
    value, slope = slack(x, s, n, jnp.where(found, ridge, 1.0))
    # The value is 0 at the root, and this step has the derivative of the implicit function.
    return jnp.where(found, jnp.exp(x - value / jax.lax.stop_gradient(slope)), 0.0)


class Equivalent(NamedTuple):
    """Deterministic equivalents at one spectrum, for given n and ridge.

    Arrays broadcast over n and ridge. `equivalent` constructs these.

    Attributes:
      eigenvalues: Eigenvalues of Sigma `(d,)`.
      n: Number of samples.
      kappa: Effective ridge, see `effective_ridge`.
      ridge: Ridge penalty.
    """

    eigenvalues: Spectrum
    n: Array
    kappa: Array
    ridge: Array

    @property
    def df2(self) -> Array:
        """The degrees of freedom sum_i (s_i / (s_i + kappa))^2."""
        return (self._share() ** 2).sum(-1)

    def risk(self, offset2: Float[Array, "... d"], sigma: ArrayLike) -> Array:
        """Computes the expected risk E|b - beta_t|^2_Sigma of ridge regression centred at beta_0.

            [kappa^2 delta^T Sigma (Sigma + kappa)^{-2} delta + sigma^2 df2 / n] / (1 - df2 / n)

        with delta = beta_t - beta_0.

        Args:
          offset2: Squared components of beta_t - beta_0 in the eigenbasis, `(..., d)`. beta_0 is
            the start of training (without ridge) or the centre of the ridge.
          sigma: Standard deviation of the label noise.

        Returns:
          The risks. They are inf where df2 = n, unless the offset is fully learned and sigma = 0.
        """
        share, rest = self._share(), self._rest()
        # kappa^2 delta^T Sigma (Sigma + kappa)^-2 delta in the eigenbasis, where rest = kappa / (s
        # + kappa).
        missed = (self.eigenvalues * rest**2 * offset2).sum(-1)
        # 1 - df2/n = (1 - df1/n) + (df1 - df2)/n. By the equation of kappa the first term is ridge
        # / kappa.
        some = self.kappa > 0
        short = jnp.where(
            some, self.ridge / jnp.where(some, self.kappa, 1.0), 1 - share.sum(-1) / self.n
        )
        # df1 - df2 = sum share (1 - share), term by term, where the difference of the sums would
        # cancel.
        room = short + (share * rest).sum(-1) / self.n
        sigma = jnp.asarray(sigma, dtype=float)
        top = missed + sigma**2 * self.df2 / self.n
        full = jnp.where(top > 0, jnp.inf, 0.0)
        return jnp.where(room > 0, top / jnp.where(room > 0, room, 1.0), full)

    def unseen(self, beta2: Float[Array, " d"]) -> Array:
        """Computes E beta^T (I - P) beta, where P projects on the row space of X (ridge = 0)."""
        return (self._rest() * beta2).sum(-1)

    def fit_size(self, beta2: Float[Array, " d"], sigma: ArrayLike) -> Array:
        """Computes E|X^+ y|^2 for n below the rank of Sigma (ridge = 0)."""
        sigma = jnp.asarray(sigma, dtype=float)
        return (self._share() * beta2).sum(-1) + sigma**2 / self.kappa

    def moments(self, beta: Spectrum, sigma: ArrayLike) -> tuple[Spectrum, Spectrum]:
        """Computes the mean and the variance of each component of the fit b, centred at 0.

        With R = `risk(beta^2, sigma)` and n samples they are

            s beta / (s + kappa)  and  s / (s + kappa)^2 (R + sigma^2) / n.

        Components are uncorrelated. The variance of a fit equals the variance from noise as large
        as the fit's own error on new data.

        Args:
          beta: The task in the eigenbasis, `(d,)`.
          sigma: Standard deviation of the label noise.

        Returns:
          The means and the variances `(d,)`, where n and ridge are one number each.
        """
        s, share = self.eigenvalues, self._share()
        beta, sigma = jnp.asarray(beta, dtype=float), jnp.asarray(sigma, dtype=float)
        error = self.risk(beta**2, sigma) + sigma**2
        return share * beta, share**2 / jnp.where(s > 0, s, 1.0) * error / self.n

    def _share(self) -> Array:
        """Computes s / (s + kappa); 0 where s = 0, also at kappa = 0."""
        s = self.eigenvalues
        return s / (jnp.where(s > 0, s, 1.0) + self.kappa[..., None])

    def _rest(self) -> Array:
        """Computes 1 - share, accurate also where share rounds to 1."""
        s, kappa = self.eigenvalues, self.kappa[..., None]
        return jnp.where(s > 0, kappa / (jnp.where(s > 0, s, 1.0) + kappa), 1.0)


@problems.defined
def equivalent(eigenvalues: Spectrum, n: ArrayLike, ridge: ArrayLike = 0.0) -> Equivalent:
    """Returns the deterministic equivalents for n samples of inputs with a given spectrum.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      n: Number of samples, > 0.
      ridge: Ridge penalty, >= 0.

    Returns:
      The equivalents; their arrays have the broadcast shape of n and ridge.

    Raises:
      ValueError: If an argument is out of range.
    """
    kappa = effective_ridge(eigenvalues, n, ridge)
    n, ridge = (jnp.broadcast_to(jnp.asarray(v, dtype=float), kappa.shape) for v in (n, ridge))
    return Equivalent(jnp.asarray(eigenvalues, dtype=float), n, kappa, ridge)


@renamed("n", "sigma", "ridge", until="0.4")
@problems.defined
def scratch_risk(
    eigenvalues: Spectrum,
    beta_t: Spectrum,
    *,
    n: ArrayLike,
    sigma: ArrayLike,
    ridge: ArrayLike = 0.0,
) -> Array:
    """Computes the risk of training from scratch, or of ridge regression, for any covariance.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      beta_t: Target in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 0.
      sigma: Standard deviation of the label noise, >= 0.
      ridge: Ridge penalty, >= 0.

    Returns:
      The risk in the large n, d limit, with the broadcast shape of n, sigma and ridge.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    check_vectors(eigenvalues, beta_t=beta_t)
    problems.check_sigma(sigma)
    return equivalent(eigenvalues, n, ridge).risk(jnp.asarray(beta_t) ** 2, sigma)


@renamed("n", "sigma", "depth", until="0.4")
@problems.defined
def fine_tuning_risk(
    eigenvalues: Spectrum,
    beta_s: Spectrum,
    beta_t: Spectrum,
    *,
    n: ArrayLike,
    sigma: ArrayLike,
    depth: ArrayLike = 2,
) -> Array:
    """Computes the risk of fine-tuning all layers, for any covariance.

    The predictor is X^+ y + c (I - P) beta_s with c of `null_scale` at its deterministic value,
    that is, regression started at c beta_s. If n is at least the rank of Sigma, the source is
    forgotten.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`, >= 0, not all 0.
      beta_s: Source in the eigenbasis of Sigma, `(d,)`, nonzero.
      beta_t: Target in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 0.
      sigma: Standard deviation of the label noise, >= 0; one number.
      depth: Number of weight matrices, >= 1, inf allowed.

    Returns:
      The risk in the large n, d limit, with the broadcast shape of n and depth.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    check_vectors(eigenvalues, beta_s=beta_s, beta_t=beta_t)
    problems.check_sigma(sigma)
    problems.check_depth(depth)
    beta_s, beta_t = jnp.asarray(beta_s, dtype=float), jnp.asarray(beta_t, dtype=float)
    at = equivalent(eigenvalues, n)
    size2 = beta_s @ beta_s
    # kappa = 0 means that the data determine everything. c then multiplies 0, and its value is
    # irrelevant.
    below = at.kappa > 0
    kappa = jnp.where(below, at.kappa, 1.0)
    # The two arguments of `null_scale`, |X^+ y|^2 and |(I - P) beta_s|^2 in units of |beta_s|^2, at
    # their deterministic values.
    p = at._replace(kappa=kappa).fit_size(beta_t**2, sigma) / size2
    c = jnp.where(below, null_scale(p, at.unseen(beta_s**2) / size2, depth), 1.0)
    return at.risk((beta_t - c[..., None] * beta_s) ** 2, sigma)


@renamed("n", "sigma", until="0.4")
@problems.defined
def linear_transfer_risk(
    eigenvalues: Spectrum, beta_s: Spectrum, beta_t: Spectrum, *, n: ArrayLike, sigma: ArrayLike
) -> Array:
    """Computes the risk of refitting only the scale of beta_s, for any covariance, exactly.

    The part of the target orthogonal to beta_s, |beta_t|^2_Sigma sin^2, is not learned. The angle
    is taken in the inner product of Sigma. `risks.refitted_risk` adds the error of the scale.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`.
      beta_s: Source in the eigenbasis of Sigma, `(d,)`, nonzero.
      beta_t: Target in the eigenbasis of Sigma, `(d,)`.
      n: Number of samples, > 2.
      sigma: Standard deviation of the label noise, >= 0.

    Returns:
      The expected risk, with the broadcast shape of n and sigma.

    Raises:
      ValueError: If an argument is out of range or shapes do not conform.
    """
    check_vectors(eigenvalues, beta_s=beta_s, beta_t=beta_t)
    theta, size2 = sigma_angle(eigenvalues, beta_s, beta_t)
    _, sin = problems.cos_sin(theta)
    return risks.refitted_risk(n=n, rest=size2 * sin**2, sigma=sigma)


@problems.defined
def sigma_angle(eigenvalues: Spectrum, beta_s: Spectrum, beta_t: Spectrum) -> tuple[Array, Array]:
    """Computes the angle between two tasks in the inner product of Sigma.

    Args:
      eigenvalues: Eigenvalues of Sigma `(d,)`.
      beta_s: Source in the eigenbasis of Sigma, `(d,)`.
      beta_t: Target in the eigenbasis of Sigma, `(d,)`.

    Returns:
      The angle in radians, and |beta_t|^2_Sigma.
    """
    s, source, target = (jnp.asarray(v, dtype=float) for v in (eigenvalues, beta_s, beta_t))
    inner, ss, tt = (s * source * target).sum(), (s * source**2).sum(), (s * target**2).sum()
    # Gram-Schmidt in the inner product of Sigma.
    residual = target - inner / ss * source
    # The sine comes from the Gram-Schmidt residual, which does not cancel at small angles.
    sine2 = (s * residual**2).sum()
    return jnp.arctan2(jnp.sqrt(sine2), inner / jnp.sqrt(ss)), tt


def check_spectrum(eigenvalues: ArrayLike) -> Array:
    """Checks the eigenvalues of a covariance and returns them as an array.

    Args:
      eigenvalues: Values that must be `(d,)`, finite, >= 0 and not all 0.

    Returns:
      The eigenvalues in the default float precision.

    Raises:
      ValueError: If they are anything else.
    """
    s = jnp.asarray(eigenvalues, dtype=float)
    if s.ndim != 1 or s.size == 0:
        raise ValueError(f"eigenvalues must be a vector of Sigma's eigenvalues; got {s.shape}")
    problems.check("eigenvalues", s, lambda v: (v >= 0) & (v < np.inf), "finite and >= 0")
    spectrum = concrete(s)
    if spectrum is not None and not spectrum.any():
        raise ValueError("eigenvalues must not all be 0")
    return s


def check_vectors(eigenvalues: ArrayLike, **vectors: ArrayLike) -> None:
    """Raises an error unless vectors conform to the eigenvalues and are finite.

    Args:
      eigenvalues: Eigenvalues `(d,)`.
      **vectors: Vectors `(d,)` by name. A vector called `beta_s` must also be nonzero.

    Raises:
      ValueError: If a vector has another shape or is not finite, or `beta_s` is 0.
    """
    shape = jnp.shape(eigenvalues)
    for name, vector in vectors.items():
        if jnp.shape(vector) != shape:
            raise ValueError(
                f"{name} must have shape {shape}, as eigenvalues; got {jnp.shape(vector)}"
            )
        problems.check_squares(name, vector)
    if "beta_s" in vectors:
        problems.check(
            "|beta_s|", jnp.linalg.norm(jnp.asarray(vectors["beta_s"])), lambda v: v > 0, "positive"
        )
