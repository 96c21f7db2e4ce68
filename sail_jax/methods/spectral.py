"""Methods that merge matrices by their singular vectors: TSV-M, Iso-C, Iso-CTS, WUDI, OPCM.

These methods treat every leaf with exactly two axes, both longer than 1, as a matrix. `matrices`
restricts them to some of these leaves (the authors exclude embeddings). All other leaves get the
weighted mean of deltas, except in OPCM. Weights multiply the deltas and are 1 by default.

Singular vectors with a singular value of 0, up to rounding (eps * longer side * the largest), are
arbitrary. All methods here exclude them. Results therefore depend only on the deltas, and rotating
all inputs rotates the result. The published programs include these vectors. They add noise for
frozen tensors, deltas of low rank, and copies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from sail_jax import linalg
from sail_jax.checks import integer, one_of, scalar, static
from sail_jax.merging.arithmetic import (
    Products,
    add_products,
    at_unit_scale,
    automatic,
    norm,
    number,
    products,
    task_sum,
    total,
    units_of,
)
from sail_jax.merging.combining import Transform, masked, matching, reduce, transform
from sail_jax.merging.leafwise import check_chosen
from sail_jax.merging.matrices import matmul, polar, rounding, svd
from sail_jax.merging.merge import Merge
from sail_jax.merging.placement import in_parts, whole
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Fold, Kernel, Piece, kernel
from sail_jax.merging.transforms import Scope, Vectors
from sail_jax.methods.registry import Range, Scale, method

Scalar = Float[ArrayLike, ""]
Matrices = str | Callable[[str], bool] | None
Matrix = Float[Array, "a b"]
Stack = Float[Array, "task a b"]


@method
def tsv_m(*, ratio: float | None = None, scale: Scale = 1.0, matrices: Matrices = None) -> Merge:
    r"""Adds up low-rank task matrices after making their singular vectors orthogonal (TSV-M).

    Each :math:`\delta_m` is cut down to its k largest singular triplets :math:`(U_m, S_m, V_m)`.
    The :math:`U_m` form the matrix U side by side, and the :math:`V_m` form V. Both are replaced by
    their polar factor, the nearest matrix with orthonormal columns (or rows):

    .. math::

        \theta = \theta_0 + \lambda \operatorname{polar}(U)
        \operatorname{diag}(S_1 \dots S_M) \operatorname{polar}(V)^T

    Copies of one model give its best approximation of rank k. The order of the models does not
    matter.

    Args:
      ratio: In (0, 1], static: k = max(1, floor(ratio * min(a, b))) for a matrix [a, b]. 1/M by
        default, so all M k columns fit. (The authors' code computes int(r * (1/M)) for the shorter
        side r. Rounding makes this 0 for r = M = 49, and it is 0 for M > r.)
      scale: The factor :math:`\lambda` on the merged task vector, 1 in the paper's code.
      matrices: The leaves to treat as matrices, a glob pattern of paths (`*` crosses "/") or a
        predicate. By default all leaves with exactly two axes, both longer than 1.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `ratio` is outside (0, 1], or `scale` is not finite. When the merge is applied,
        if `matrices` selects no leaf.
      TypeError: If `ratio` is traced.

    References:
      Gargiulo et al., Task Singular Vectors, 2024 (arXiv 2412.00081), Algorithm 1.

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> tsv_m()([one, one], base)["a"].round(4) + 0.0
    Array([[3., 0.],
           [0., 0.]], dtype=float32)
    """
    if ratio is not None:
        static("ratio", ratio, lambda x: 0 < x <= 1, "a number in (0, 1]")
    update = kernel(_tsv, ratio=None if ratio is None else float(ratio))
    return _merge(update, scale, matrices, _Held(3, 8))


@method
def iso_c(*, scale: Scale = 1.0, matrices: Matrices = None) -> Merge:
    r"""Adds up the task matrices and makes all singular values of the sum equal (Iso-C).

    With the singular value decomposition
    :math:`\sum_k w_k \delta_k = U \operatorname{diag}(S) V^T`, the result is

    .. math:: \theta = \theta_0 + \lambda \operatorname{mean}(S) \, U V^T

    The mean covers min(a, b) values for a matrix [a, b]. Directions in which no model changed stay
    unchanged.

    Args:
      scale: The factor :math:`\lambda` on the merged task vector, chosen on held-out data.
      matrices: The leaves to treat as matrices, a glob pattern of paths or a predicate; see
        `tsv_m`.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `scale` is not finite. When the merge is applied, if `matrices` selects no
        leaf.

    References:
      Marczak et al., No Task Left Behind, 2025 (arXiv 2502.04959), Sec. 4.

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> iso_c()([one], base)["a"].round(4) + 0.0
    Array([[2., 0.],
           [0., 2.]], dtype=float32)
    """
    return _merge(kernel(_iso_c), scale, matrices, _Held(0, 2))


@method
def iso_cts(
    *,
    common_fraction: Annotated[float, Range(0.0, 1.0)] = 0.8,
    input_axis: Literal[-1, 0] = -1,
    scale: Scale = 1.0,
    matrices: Matrices = None,
) -> Merge:
    r"""Equalises singular values in a common subspace and in one subspace per task (Iso-CTS).

    1. The c largest singular triplets of the sum of deltas are common; U holds their output
       vectors.
    2. The part of each :math:`\delta_m` in this output space is removed:
       :math:`\delta_m - U U^T \delta_m`. The n largest triplets of the rest are specific to task m.
    3. All c + M n = min(a, b) triplets are made orthonormal together, as in `tsv_m`. Every singular
       value becomes the mean of all.

    n = round((min(a, b) - floor(common_fraction * min(a, b))) / M), and at most min(a, b) // M.
    (The authors' code rounds up beyond this limit, to a negative c.)

    Args:
      common_fraction: The approximate fraction of common triplets, in [0, 1], static. The authors
        use 0.8.
      input_axis: -1 for weights [out, in] (PyTorch), 0 for [in, out] (Flax).
      scale: The factor on the merged task vector, chosen on held-out data.
      matrices: The leaves to treat as matrices, a glob pattern of paths or a predicate; see
        `tsv_m`.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `common_fraction` is outside [0, 1], for an unknown `input_axis`, or if `scale`
        is not finite. When the merge is applied, if `matrices` selects no leaf.
      TypeError: If `common_fraction` is traced.

    References:
      Marczak et al., No Task Left Behind, 2025 (arXiv 2502.04959), Sec. 5.

    >>> base, one = {"a": jnp.zeros((2, 2))}, {"a": jnp.diag(jnp.array([3.0, 1.0]))}
    >>> iso_cts()([one], base)["a"].round(4) + 0.0
    Array([[2., 0.],
           [0., 2.]], dtype=float32)
    """
    static("common_fraction", common_fraction, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    update = kernel(_iso_cts, common_fraction=float(common_fraction))
    one_of("input_axis", input_axis, (-1, 0))
    return _merge(update, scale, matrices, _Held(12, 0), input_axis == 0)


@method
def wudi(
    *,
    solution: Literal["adam", "exact"] = "adam",
    steps: int = 300,
    rate: Scalar = 1e-5,
    damping: Scalar = 1e-6,
    input_axis: Literal[-1, 0] = -1,
    scale: Scale = 1.0,
    matrices: Matrices = None,
) -> Merge:
    r"""Finds the update that interferes least with the task matrices (WUDI).

    The result is :math:`\theta_0 + \lambda x`, where x minimises (with Frobenius norms and
    :math:`\delta_m` as [out, in])

    .. math:: L(x) = \sum_m \frac{\| (x - \delta_m) \delta_m^T \|^2}{\| \delta_m \|^2}

    Weights multiply the deltas. They do not weight the terms of L. A delta of 0 is omitted (the
    published code computes 0/0). A single model is returned unchanged.

    Args:
      solution: "adam", as published, takes steps of Adam (Kingma and Ba 2015) from x = sum_m
        delta_m. Each step moves an entry by about `rate`, regardless of the size of the deltas. 300
        steps at 1e-5 therefore move an entry by at most about 3e-3. "exact" computes the minimum of
        the quadratic L. It solves x sum_m G_m = sum_m delta_m G_m, with G_m = delta_m^T delta_m /
        |delta_m|^2 of shape [in, in]. This solution commutes with scaling and rotating the deltas.
        Derivatives of Adam's steps overflow where the steps start at the minimum of L, as for a
        single model. Derivatives of "exact" do not.
      steps: The number of Adam steps.
      rate: The learning rate of Adam, at least 0.
      damping: With "exact", damping * M * |x - sum_m delta_m|^2 is added to L. It determines x in
        directions in which no delta is large. A number > 0.
      input_axis: -1 for weights [out, in] (PyTorch), 0 for [in, out] (Flax).
      scale: The factor :math:`\lambda` on the merged task vector, 1 in the published code.
      matrices: The leaves to treat as matrices, a glob pattern of paths or a predicate; see
        `tsv_m`.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: For an unknown `solution` or `input_axis`, or numbers outside their ranges. When
        the merge is applied, if `matrices` selects no leaf.

    References:
      Cheng et al., Whoever Started the Interference Should End It, 2025 (arXiv 2503.08099), Sec. 4.

    >>> base = {"a": jnp.zeros((2, 2))}
    >>> models = [{"a": jnp.diag(jnp.array([1.0, 0.0]))}, {"a": jnp.diag(jnp.array([3.0, 2.0]))}]
    >>> x = wudi(solution="exact")(models, base)["a"]
    >>> ((x[0, 0] * (1 + 9 / 13) - (1 + 27 / 13)) ** 2 < 1e-8).item()  # x a = b on the diagonal
    True
    """
    one_of("solution", solution, Literal["adam", "exact"])
    integer("steps", steps, 0)
    scalar("rate", rate, lambda x: 0 <= x < np.inf, "a finite number >= 0")
    scalar("damping", damping, lambda x: 0 < x < np.inf, "a finite number > 0")
    if solution == "exact":
        update, held = kernel(_wudi_exact, number(damping)), _Held(3, 0, 4, input_axis, 1)
    else:
        update, held = kernel(_wudi_adam, number(rate), steps=steps), _Held(5, 0, 1, input_axis, 1)
    one_of("input_axis", input_axis, (-1, 0))
    return _merge(update, scale, matrices, held, input_axis == 0)


@method
def opcm(
    *,
    alpha: Annotated[Scalar, Range(0.0, 1.0)] = 0.5,
    scope: Scope = "tree",
    scale: Scale = 1.0,
    matrices: Matrices = None,
) -> Merge:
    r"""Adds one model after another, each orthogonally to the sum so far (OPCM).

    The order of the models matters. The sum starts as :math:`\delta_1`. For each further
    :math:`\delta_m`:

    1. The sum so far is decomposed as :math:`U S V^T`.
    2. In :math:`U^T \delta_m V`, the diagonal and the block of the r leading directions on both
       sides are set to 0. The singular values of these r directions add up to at most `alpha` of
       the total.
    3. The rest of :math:`\delta_m` is added to the sum.

    Leaves that are not matrices are summed. At the end, the sum is rescaled to the mean norm of the
    deltas. The authors rescale after each model and undo it before the next, which is equivalent.
    Copies of one model give this model if all leaves are matrices, or with `scope="tensor"`.
    Otherwise the sums of the other leaves contribute to the norm, as in the authors' code.

    Args:
      alpha: The protected share of the singular values, in [0, 1]. The authors use 0.5.
      scope: Whether norms cover the whole "tree", or each "tensor" is rescaled separately.
      scale: The factor on the merged task vector.
      matrices: The leaves to treat as matrices, a glob pattern of paths or a predicate; see
        `tsv_m`.

    Returns:
      A merge of one or more models. It requires a base.

    Raises:
      ValueError: If `alpha` is outside [0, 1], for an unknown `scope`, or if `scale` is not finite.
        When the merge is applied, if `matrices` selects no leaf.

    References:
      Tang et al., Merging Models on the Fly Without Retraining, 2025 (arXiv 2501.09522), Sec. 4.

    >>> base = {"a": jnp.zeros((2, 2))}
    >>> one = {"a": jnp.array([[3.0, 0.0], [0.0, 0.0]])}
    >>> other = {"a": jnp.array([[1.0, 4.0], [0.0, 0.0]])}
    >>> x = opcm(scope="tensor")([one, other], base)["a"]  # the 4 is new, the 1 is not
    >>> (x / x[0, 0] * 3).round(2).astype(int).tolist()
    [[3, 4], [0, 0]]
    """
    scalar("alpha", alpha, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    one_of("scope", scope, Scope)
    # The projected sum is computed twice, for its norm and for the result. Keeping it between the
    # two passes would take as much memory as the model.
    projected = kernel(_of_matrix, kernel(_opcm, number(alpha)), transposed=False)
    rescaled = reduce(
        kernel(_rescaled, projected),
        Fold(kernel(_squares), add=add_products),
        Fold(kernel(_square, projected), add=add_products),
        needs="tensor",
        scope=scope,
        local=_Chosen(None if matrices is None else matching(matrices)),
        workspace=_Held(4, 4),
    )
    return Merge(reduction=rescaled, scale=scale)


@dataclass(frozen=True)
class _Chosen:
    """For `Step.local`: returns () for selected leaves and None for others."""

    where: Callable[[str], bool] | None

    def __call__(self, path: str) -> tuple[()] | None:
        return () if self.where is None or self.where(path) else None

    def check(self, paths: Sequence[str]) -> None:
        if self.where is not None:
            check_chosen(self.where, paths)


class _Held(NamedTuple):
    """The `Workspace` of an update of matrices [a, b]: the number of arrays in memory, by shape.

    Attributes:
      whole: The number of arrays [a, b].
      small: The number of arrays [r, r], for the shorter side r.
      grams: The number of arrays [n, n], for n inputs.
      axis: The axis of the inputs.
      each: The number of further arrays [a, b] and [n, n] for each model.
    """

    whole: int
    small: int
    grams: int = 0
    axis: int = -1
    each: int = 0

    def __call__(self, models: int, shape: tuple[int, ...]) -> int:
        if len(shape) != 2 or min(shape) < 2:
            return 0
        more = self.each * models
        square = (self.grams + more) * shape[self.axis] ** 2 if self.grams else 0
        return (self.whole + more) * shape[0] * shape[1] + self.small * min(shape) ** 2 + square


def _merge(
    update: Kernel, scale: Scalar, matrices: Matrices, held: _Held, transposed: bool = False
) -> Merge:
    """Makes a merge that applies `update` to matrices, and takes the weighted mean elsewhere."""
    return Merge(_on_matrices(update, matrices, held, transposed), weighted_mean, scale=scale)


def _on_matrices(
    update: Kernel, matrices: Matrices, held: _Held, transposed: bool = False
) -> Transform:
    """Makes a transform that stores a matrix's update in model 0 and masks the others."""
    whole = kernel(_of_matrix, update, transposed=transposed)
    inner = transform(whole, needs="tensor", workspace=held)
    return inner if matrices is None else masked(inner, matrices)


def _of_matrix(
    update: Kernel, piece: Piece, delta: Array, weight: Array, *, transposed: bool
) -> Vectors:
    """Applies `update` to a matrix; other leaves are unchanged."""
    if delta.ndim != 3 or min(delta.shape[1:]) < 2:
        return delta, weight
    # Shapes: delta [task, a, b]; `update` takes such a stack and returns one matrix [a, b].
    weighted = weight * delta
    stack = jnp.swapaxes(weighted, 1, 2) if transposed else weighted
    # Factorisations are not divided among devices.
    merged = automatic(update, stack[0])(stack)
    first = jnp.zeros((len(delta), 1, 1), delta.dtype).at[0].set(1)
    # Model 0 gets the result with weight 1, and all others are masked. The weighted mean that
    # follows then returns the result unchanged.
    return first * (merged.T if transposed else merged), first


def _orthonormal(U: Float[Array, "a n"], V: Float[Array, "b n"]) -> tuple[Array, Array]:
    """Computes the polar factors of both matrices, one after another.

    On CPUs, simultaneous factorisations compete for threads. The shorter matrix is therefore padded
    with rows of 0, and one loop computes both.
    """
    rows = max(len(U), len(V))
    pair = jnp.stack([jnp.pad(whole(x), ((0, rows - len(x)), (0, 0))) for x in (U, V)])
    first, second = lax.map(polar, whole(pair))
    return whole(first[: len(U)]), whole(second[: len(V)])


def _beside(x: Float[Array, "task a k"]) -> Float[Array, "a task*k"]:
    """Concatenates the matrices of all tasks."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def _floor(x: float) -> int:
    """Computes the floor of a product, corrected for rounding: 0.29 * 100 gives 29."""
    return math.floor(x * (1 + 1e-12))


@at_unit_scale
def _tsv(deltas: Stack, *, ratio: float | None) -> Matrix:
    """Computes the update of `tsv_m` for one matrix."""
    r = min(deltas.shape[1:])
    k = max(1, r // len(deltas) if ratio is None else _floor(ratio * r))
    # This is a loop instead of `vmap`, because simultaneous factorisations compete for threads on
    # CPUs.
    U, S, V = lax.map(lambda x: tuple(part[..., :k] for part in svd(x)), deltas)
    U, V = _orthonormal(_beside(U), _beside(V))
    return matmul(U * S.reshape(-1), V.T)


@at_unit_scale
def _iso_c(deltas: Stack) -> Matrix:
    """Computes the update of `iso_c` for one matrix."""
    x = task_sum(deltas)
    factor = polar(x)
    return total(factor * x) / min(x.shape) * factor  # <U V^T, x> is the sum of singular values


@at_unit_scale
def _iso_cts(deltas: Stack, *, common_fraction: float) -> Matrix:
    """Computes the update of `iso_cts` for one matrix."""
    r, tasks = min(deltas.shape[1:]), len(deltas)
    # The common space gets the remainder of the division by M, so all r triplets are used.
    n = min(round((r - _floor(common_fraction * r)) / tasks), r // tasks)
    common = r - n * tasks
    U, S, V = (part[..., :common] for part in svd(task_sum(deltas)))

    def specific(x: Matrix) -> tuple[Array, ...]:
        x = whole(x)
        # If x has no remaining part, the rest is rounding. Zero is therefore relative to the size
        # of x.
        rest = svd(x - matmul(U, U.T, x), norm(x))
        return tuple(part[..., :n] for part in rest)

    if n:
        own = lax.map(specific, deltas)
        U = jnp.concatenate([U, _beside(own[0])], 1)
        S = jnp.concatenate([S, own[1].reshape(-1)])
        V = jnp.concatenate([V, _beside(own[2])], 1)
    U, V = _orthonormal(U, V)
    return S.mean() * matmul(U, V.T)


def _quadratic(deltas: Stack) -> tuple[Matrix, Matrix, Matrix]:
    """Computes s = sum_m delta_m, and A and C, for which the gradient of L at s + y is 2 (y A + C).

    Deltas of 0 are left out. The formula avoids subtracting large numbers. For one model C is
    exactly 0.
    """
    # The Grams do not depend on the size of a delta. Each is computed at a scale at which squares
    # neither overflow nor underflow.
    deltas = in_parts(deltas, -2)  # grams are sums over rows, and all else goes row by row
    own = deltas * (1 / units_of([*deltas]))[:, None, None]
    squares = jnp.stack([total(x**2) for x in own])
    inverse = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0)
    grams = [scale * matmul(x.T, x) for scale, x in zip(inverse, own, strict=True)]
    # L is expanded around the sum of deltas, where the published code also starts.
    start = task_sum(deltas)
    # For one model, start - x and its pull are exactly 0.
    pulls = [matmul(start - x, gram) for x, gram in zip(deltas, grams, strict=True)]
    A, C = task_sum(jnp.stack(grams)), task_sum(jnp.stack(pulls))
    return in_parts(start, -2), whole(A), in_parts(C, -2)


def _wudi_exact(damping: Array, deltas: Stack) -> Matrix:
    """Computes the minimum of L by the eigenvalues of A."""
    start, A, C = _quadratic(deltas)
    # The Grams are divided by squared norms. Each then has trace 1, and A has trace M. Damping is
    # relative to M.
    return start - _solved(C, A, jnp.asarray(damping, A.dtype) * len(deltas))


@jax.custom_jvp
def _solved(C: Matrix, A: Matrix, pull: Array) -> Matrix:
    """Computes C (A + pull)^-1, without the directions in which A is 0 up to rounding."""
    return _spectral_inverse(A, pull)(C)


def _spectral_inverse(A: Matrix, pull: Array) -> Callable[[Matrix], Matrix]:
    """Makes the function that multiplies by (A + pull)^-1 from the right."""
    values, Q = linalg.eigh(A)
    # Where A is 0 up to rounding, C is too. Division would amplify its rounding to a change.
    real = values > rounding(A, values[-1])
    inverse = jnp.where(real, 1 / jnp.where(real, values + pull, 1), 0)
    return lambda x: matmul(matmul(x, Q) * inverse, Q.T)


@_solved.defjvp
def _solved_jvp(primals: tuple, tangents: tuple) -> tuple[Matrix, Matrix]:
    # This differentiates y (A + pull) = C. The derivative of `eigh` would divide by differences of
    # eigenvalues.
    (C, A, pull), (dC, dA, dpull) = primals, tangents
    solve = _spectral_inverse(A, pull)
    y = solve(C)
    return y, solve(dC - matmul(y, dA) - y * dpull)


def _wudi_adam(rate: Array, deltas: Stack, *, steps: int) -> Matrix:
    """Computes s + y after steps of Adam on y, from y = 0."""
    start, A, C = _quadratic(deltas)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # Rows are independent, so the steps do not send data between devices.
        y, mean, square = (in_parts(x, -2) for x in state)
        # The gradient of a quadratic depends only on A and C, so a step costs one product for any
        # number of models.
        gradient = 2 * (matmul(y, A) + C)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        t = jnp.asarray(i + 1, y.dtype)
        first, second = mean / (1 - 0.9**t), square / (1 - 0.999**t)
        # The root has an infinite slope at 0. The inner where keeps it out of gradients.
        root = jnp.where(second > 0, jnp.sqrt(jnp.where(second > 0, second, 1)), 0)
        return y - jnp.asarray(rate, y.dtype) * first / (root + 1e-8), mean, square

    zero = jnp.zeros_like(start)
    return start + lax.fori_loop(0, steps, step, (zero, zero, zero))[0]


@at_unit_scale
def _opcm(alpha: Array, deltas: Stack) -> Matrix:
    """Computes the sum of the projected deltas of one matrix."""

    def add(merged: Matrix, x: Matrix) -> tuple[Matrix, None]:
        x = whole(x)
        U, S, V = svd(merged)
        mass = jnp.cumsum(S)
        # The r leading directions are the longest run of singular values with at most alpha of
        # their sum.
        leading = mass <= alpha * mass[-1]
        index = jnp.arange(len(S))
        # The block of the leading directions and the diagonal, in the basis of the sum so far.
        removed = (leading[:, None] & leading) | (index[:, None] == index)
        rest = x - matmul(U, jnp.where(removed, matmul(U.T, x, V), 0), V.T)
        return merged + rest, None

    return whole(lax.scan(add, whole(deltas[0]), deltas[1:])[0])


def _squares(piece: Piece, delta: Array, weight: Array) -> Products:
    """Computes the squared norm of each model's weighted deltas."""
    weighted = weight * delta
    return jax.tree.map(lambda *x: jnp.stack(x), *(products(x[None]) for x in weighted))


def _merged(projected: Kernel, piece: Piece, delta: Array, weight: Array) -> Array:
    """Computes the sum of a leaf's deltas, after projection if the leaf is a selected matrix."""
    if piece.local is not None:
        delta, weight = projected(piece, delta, weight)
    return task_sum(weight * delta)


def _square(
    projected: Kernel, squares: Products, piece: Piece, delta: Array, weight: Array
) -> Products:
    """Computes the squared norm of that sum."""
    return products(_merged(projected, piece, delta, weight)[None])


def _rescaled(
    projected: Kernel,
    squares: Products,
    square: Products,
    piece: Piece,
    delta: Array,
    weight: Array,
) -> Array:
    """Rescales that sum to the mean norm of the deltas."""
    top, inner = squares.unit.max(), square.inner[0, 0]
    mean = (squares.unit[:, 0] / top * squares.lengths[:, 0]).mean()
    # The inner where keeps the infinite slope of the root at 0 out of gradients.
    factor = jnp.where(inner > 0, mean * lax.rsqrt(jnp.where(inner > 0, inner, 1)), 0)
    factor = (factor * (top / square.unit[0])).astype(delta.dtype)
    return factor * _merged(projected, piece, delta, weight)
