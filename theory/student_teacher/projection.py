"""What frozen ReLU features can and cannot express of a target (features-are-fate, App. C).

The feature space of a network is the span of its neurons relu(w_i.x) in L2 of N(0, I). With
G = E[relu(Wx) relu(Wx)^T] and h = E[relu(Wx) f(x)], the projection has |Pf|^2 = h^T G^+ h: eqs.
(158), (159), in which K = G / m.

G is numerically singular once training has gathered the neurons: eigenvalues below `cutoff` times
the largest are dropped. That is a choice, not a detail: the features just above and just below it
differ in what finite data can use. The number kept is reported.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from theory import problems
from theory.student_teacher import arc_cosine, networks

CUTOFF = 1e-10  # relative, on eigenvalues of a Gram matrix


class Projection(NamedTuple):
    """|P f|^2, |P_perp f|^2 and the dimension of the space projected on."""

    inside: Float[Array, ""]
    outside: Float[Array, ""]
    rank: Array


class Mercer(NamedTuple):
    """psi_l(x) = sum_i coefficients[i, l] relu(w_i.x), orthonormal eigenfunctions of the operator
    with kernel (1/m) sum_i relu(w_i.x) relu(w_i.x'), ascending in eigenvalue; both 0 where the
    eigenvalue falls below the cut-off."""

    eigenvalues: Float[Array, " m"]
    coefficients: Float[Array, "m m"]


def mercer(w: Float[Array, "m d"], cutoff: ArrayLike = CUTOFF) -> Mercer:
    """Eq. (157), summed over neurons: z_l / sqrt(m lambda_l), K z_l = lambda_l z_l; lambda_l (the
    paper's lambda_l^2) is the eigenvalue of the operator."""
    check_cutoff(cutoff)
    return _mercer(w, cutoff)


@jax.jit
def _mercer(w: Array, cutoff: ArrayLike) -> Mercer:
    m = w.shape[0]
    values, z = jnp.linalg.eigh(arc_cosine.gram(w, w) / m)
    kept = values > floor(values, cutoff)
    scale = jnp.where(kept, 1 / jnp.sqrt(m * jnp.where(kept, values, 1.0)), 0.0)
    return Mercer(jnp.where(kept, values, 0.0), z * scale)


def project(
    w: Float[Array, "m d"], target: networks.Network, cutoff: ArrayLike = CUTOFF
) -> Projection:
    """The target onto the span of neurons `w` and off it; |P_perp f|^2 is exact to about
    eps |f|^2. With the source teacher's neurons for `w`: what perfectly learned features give."""
    check_cutoff(cutoff)
    return _project(w, target, cutoff)


@jax.jit
def _project(w: Array, target: networks.Network, cutoff: ArrayLike) -> Projection:
    eigenvalues, psi = _mercer(w, cutoff)
    overlap = arc_cosine.gram(w, target.w) @ target.c / target.c.size
    inside = jnp.sum((psi.T @ overlap) ** 2)
    norm = networks.inner(target, target)
    return Projection(inside, norm - inside, jnp.sum(eigenvalues > 0))


def check_cutoff(cutoff: ArrayLike) -> None:
    problems.check("cutoff", cutoff, lambda c: (c >= 0) & (c < 1), "a fraction in [0, 1)")


def floor(eigenvalues: Float[Array, " m"], cutoff: ArrayLike) -> Array:
    """The least eigenvalue that counts: `cutoff` times the largest, or the rounding of eigh."""
    rounding = eigenvalues.size * jnp.finfo(eigenvalues.dtype).eps
    return jnp.maximum(cutoff, rounding) * jnp.max(eigenvalues)


def operator(w: Float[Array, "m d"], psi: Array) -> Array:
    """Coefficients of T psi from those of psi (eq. 149): (1/m) G psi, exactly."""
    return jax.lax.dot(arc_cosine.gram(w, w), psi, precision="highest") / w.shape[0]
