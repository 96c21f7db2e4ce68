r"""Gradient descent of two layers in the few hidden directions in which the weights move.

Two layers compute beta = W w, with W of shape `(d, h)`. On a quadratic loss with gradient g at
beta, a step of descent at rate r is

    W <- W - r g w^T,    w <- w - r W^T g.                                                     (1)

Let S be a subspace of the hidden space with w(0) in S, and P the projection on it. Split

    W = A + N,  A = W P,  N = W (I - P),        w = c + m,  c = P w,  m = (I - P) w.

Rows of A and c lie in S, rows of N and m in its complement. So A m = 0, N c = 0, and (1) reads

    beta = A c + N m                                                                           (2)
    A <- A - r g c^T,    c <- c - r A^T g                                                      (3)
    N <- N - r g m^T,    m <- m - r N^T g,    m(0) = 0.                                        (4)

(3) is (1) for a network with dim S hidden units. The rest affects it only through N m in (2).

*Exact.* g lies in the row space R of X. If S also contains W(0)^T v for every v in R, then N^T g =
0 at the first step. By (4), m stays 0 and N stays constant, and N^T g = 0 at every later step as
well. Then N m = 0, and the network in S takes exactly the steps of the full one. It has at most
min(n, d) + 1 units.

*Small weights.* For given g, (4) is linear in (N, m). So N m is quadratic in N(0), for any S that
contains w(0). Weights of standard deviation alpha have |N(0)| of about 2 alpha sqrt(d) or less, and
a smaller S changes beta by O(alpha^2 d). Two directions are sufficient,

    S = span{w(0), W(0)^T g(0)}.                                                               (5)

From scratch, the second is necessary. Without it, (N, m) grows as fast as the network, by 1 /
alpha, while g is still g(0). With it, N^T g(0) = 0, and (N, m) does not move until A c turns g away
from g(0). After that the sum of r g over all steps stays of order 1, because training ends where g
is 0. A pretrained network has rank one up to alpha, and w(0) is its direction.

*The last layer alone.* With W frozen, g need not end at 0, and the sum of r g grows with time.
However, the loss is then quadratic in w. This is one layer on the features X W, without
approximation.

*Data.* In the basis of the right singular vectors of X the loss is a sum over coordinates
(`Problem`). A step takes O(d) operations for each hidden direction. No closed form is used here.
`networks` takes the same steps at the same rate, in O(d^2).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sail_jax import linalg
from theory.deep_linear import networks
from theory.problems import defined


class Problem(NamedTuple):
    """A quadratic loss |scale z - pull|^2 / 2 + rest of the coordinates z = basis beta.

    Attributes:
      basis: Orthonormal rows `(c, d)`, one for each coordinate.
      scale: The square root of the curvature along each coordinate, `(c,)`.
      pull: The target of `scale z`, `(c,)`.
      rest: The smallest loss, a scalar.
    """

    basis: Float[Array, "*b c d"]
    scale: Float[Array, "*b c"]
    pull: Float[Array, "*b c"]
    rest: Float[Array, "*b"]


class Descended(NamedTuple):
    """Networks after gradient descent, with leading axes for many of them.

    Attributes:
      first: The first layer, hidden direction first, in the coordinates of the problem.
      last: The last layer, by hidden direction.
      loss: The final loss.
      steps: The number of steps taken.
    """

    first: Float[Array, "*b k d"]
    last: Float[Array, "*b k"]
    loss: Float[Array, "*b"]
    steps: Array


@defined
def of_task(beta_s: Float[Array, " d"]) -> Problem:
    """Makes the population loss |beta - beta_s|^2 / 2.

    Args:
      beta_s: The source task.

    Returns:
      The problem, in the coordinates of beta itself.
    """
    return Problem(jnp.eye(beta_s.size), jnp.ones_like(beta_s), beta_s, jnp.zeros(()))


@defined
def of_samples(x: Float[Array, "n d"], y: Float[Array, " n"], *, unseen: bool = True) -> Problem:
    """Makes the training loss |y - X beta|^2 / (2n).

    Args:
      x: Inputs.
      y: Labels.
      unseen: Whether directions outside the row space of the data also have coordinates. Nothing
        moves along them. `restored` works without them, but `predictor` requires them.

    Returns:
      The problem, in the coordinates of the right singular vectors of X.
    """
    n, d = x.shape
    # Rows of zeros do not change the loss, and complete the basis of all d directions.
    fill = max(d - n, 0) if unseen else 0
    u, s, vt = linalg.svd(jnp.pad(x, ((0, fill), (0, 0))), full_matrices=False)
    pull = u.T @ jnp.pad(y, (0, fill)) / jnp.sqrt(n)
    rest = jnp.maximum(y @ y / n - pull @ pull, 0.0) / 2
    return Problem(vt, s / jnp.sqrt(n), pull, rest)


@defined
def moving(weights: networks.Weights, problem: Problem) -> Float[Array, "k h"]:
    """Finds the two hidden directions of eq. (5) above.

    Args:
      weights: Two layers, `[d, h]` and `[h]`.
      problem: The loss that they are trained on.

    Returns:
      Orthonormal directions; one if there is one hidden unit only.
    """
    first, last = weights
    scale, basis = problem.scale, problem.basis
    gradient = basis.T @ (scale * (scale * (basis @ (first @ last)) - problem.pull))
    # Each is scaled to norm 1 before orthogonalisation, because their norms may differ by a factor
    # of alpha.
    tiny = jnp.finfo(last.dtype).tiny
    spanning = (v / jnp.maximum(jnp.linalg.norm(v), tiny) for v in (last, first.T @ gradient))
    return linalg.qr(jnp.stack(list(spanning), -1))[0].T


@defined
def reduced(
    weights: networks.Weights, problem: Problem, hidden: Float[Array, "k h"]
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    """Restricts two layers to some hidden directions, in the coordinates of a problem.

    Args:
      weights: Two layers, `[d, h]` and `[h]`.
      problem: The problem.
      hidden: The directions, orthonormal.

    Returns:
      The first layer, hidden direction first, and the last layer.
    """
    first, last = weights
    return (problem.basis @ (first @ hidden.T)).T, hidden @ last


@defined
def restored(
    weights: networks.Weights, problem: Problem, hidden: Float[Array, "k h"], ended: Descended
) -> networks.Weights:
    """Puts trained hidden directions back into the two layers.

    Args:
      weights: The two layers that descent began with.
      problem: The problem.
      hidden: The directions.
      ended: The outcome of descent from `reduced(weights, problem, hidden)`.

    Returns:
      Two layers of the shapes of `weights`.
    """
    first, last = weights
    before = reduced(weights, problem, hidden)
    moved = problem.basis.T @ (ended.first - before[0]).T
    return first + moved @ hidden, last + (ended.last - before[1]) @ hidden


@defined
def predictor(problem: Problem, ended: Descended) -> Float[Array, "*b d"]:
    """Computes the linear map beta of networks after descent.

    Args:
      problem: Their problems.
      ended: The networks.

    Returns:
      The maps, in the coordinates of the inputs.
    """
    return jnp.einsum("...cd,...c->...d", problem.basis, _coordinates(ended.first, ended.last))


@defined
def descend(
    first: Float[Array, "*b k d"],
    last: Float[Array, "*b k"],
    problem: Problem,
    rate: ArrayLike,
    steps: ArrayLike,
    until: ArrayLike = 0.0,
    freeze_last: bool = False,
) -> Descended:
    """Runs gradient descent of many networks in one loop, each until it stops.

    Leading axes run over networks and broadcast. Each network stops on its own, and the loop ends
    with the last one.

    Args:
      first: First layers, hidden direction first, in the coordinates of the problems.
      last: Last layers.
      problem: The problems.
      rate: Learning rate.
      steps: The largest number of steps.
      until: The loss at which training stops earlier, from 0.
      freeze_last: Whether the last layer is frozen.

    Returns:
      The networks.
    """
    shape = jnp.broadcast_shapes(
        first.shape[:-2], last.shape[:-1], problem.rest.shape, jnp.shape(steps)
    )
    first = jnp.broadcast_to(first, (*shape, *first.shape[-2:]))
    last = jnp.broadcast_to(last, (*shape, *last.shape[-1:]))

    def missed(first: Array, last: Array) -> tuple[Array, Array]:
        """Computes the differences along each coordinate, and the loss."""
        missing = problem.scale * _coordinates(first, last) - problem.pull
        return missing, jnp.sum(missing**2, -1) / 2 + problem.rest

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        taken, going, first, last = state
        missing, loss = missed(first, last)
        # The loss is that of the weights before the step. Networks that reach `until` are not
        # changed further. A NaN also stops a network.
        going = going & (loss > until) & (taken < steps)
        gradient = problem.scale * missing
        pace = jnp.where(going, rate, 0.0)
        moved = first - (pace[..., None] * last)[..., None] * gradient[..., None, :]
        if not freeze_last:
            pulled = jnp.einsum("...kd,...d->...k", first, gradient)
            last = last - pace[..., None] * pulled
        return taken + going, going, moved, last

    start = jnp.zeros(shape, int), jnp.ones(shape, bool), first, last
    taken, _, first, last = jax.lax.while_loop(lambda state: state[1].any(), step, start)
    return Descended(first, last, missed(first, last)[1], taken)


@defined
def flow(
    first: Float[Array, "*b k d"],
    last: Float[Array, "*b k"],
    problem: Problem,
    time: ArrayLike,
    steps: int,
) -> Descended:
    """Follows the gradient flow of many networks by the classical Runge-Kutta scheme.

    It is the limit of `descend` at rate 0, with errors of (curvature x time / steps)^4. (3) and (4)
    hold for it, too. The scheme is stable where curvature x time / steps is at most 2.7. The
    curvature of two layers is that of the problem times |W|^2 + |w|^2.

    Args:
      first: First layers, hidden direction first, in the coordinates of the problems.
      last: Last layers.
      problem: The problems.
      time: The duration, one number or one per network.
      steps: The number of steps.

    Returns:
      The networks.
    """
    h = jnp.asarray(time)[..., None, None] / steps

    def speed(w: tuple[Array, Array]) -> tuple[Array, Array]:
        missing = problem.scale * _coordinates(*w) - problem.pull
        gradient = (problem.scale * missing)[..., None, :]
        return -w[1][..., None] * gradient, -jnp.sum(w[0] * gradient, -1)

    def move(w: tuple[Array, Array], share: float, by: tuple[Array, Array]) -> tuple[Array, Array]:
        return w[0] + share * h * by[0], w[1] + share * h[..., 0] * by[1]

    def step(_, w: tuple[Array, Array]) -> tuple[Array, Array]:
        a = speed(w)
        b = speed(move(w, 0.5, a))
        c = speed(move(w, 0.5, b))
        d = speed(move(w, 1.0, c))
        return move(w, 1 / 6, jax.tree.map(lambda a, b, c, d: a + 2 * b + 2 * c + d, a, b, c, d))

    first, last = jax.lax.fori_loop(0, steps, step, (first, last))
    missing = problem.scale * _coordinates(first, last) - problem.pull
    loss = jnp.sum(missing**2, -1) / 2 + problem.rest
    return Descended(first, last, loss, jnp.full(loss.shape, steps))


def _coordinates(first: Float[Array, "*b k d"], last: Float[Array, "*b k"]) -> Array:
    return jnp.sum(first * last[..., None], -2)
