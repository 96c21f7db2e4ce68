"""Rows of new tokens, compared with their definition."""

import functools

import jax
import numpy as np
import pytest

from sail_jax.transplant import combined, neighbours, pursue, transplant

EPS = np.finfo(np.float32).eps
WIDTH, ANCHORS, ROWS = 12, 40, 9


@functools.cache
def rows(seed=0):
    """The donor's rows of new tokens and of shared ones, in float32."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        rng.normal(size=(ANCHORS, WIDTH)).astype(np.float32),
    )


def pursued(target, anchors, k):
    """Orthogonal matching pursuit by its definition, in float64: least squares at every step."""
    chosen, left = [], target
    for _ in range(k):
        products = np.abs(anchors @ left)
        products[chosen] = -1
        chosen.append(int(products.argmax()))
        coefficients, *_ = np.linalg.lstsq(anchors[chosen].T, target, rcond=None)
        left = target - anchors[chosen].T @ coefficients
    return chosen, coefficients, left


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, 1, WIDTH])
def test_pursuit_is_what_defines_it(k):
    targets, anchors = rows()
    found = pursue(targets, anchors, k)
    for i, target in enumerate(targets.astype(np.float64)):
        chosen, coefficients, _ = pursued(target, anchors.astype(np.float64), k)
        assert found.indices[i].tolist() == chosen
        # A least-squares solution moves with its matrix by the condition number.
        tolerance = 8 * EPS * np.linalg.cond(anchors[chosen]) * np.linalg.norm(coefficients)
        np.testing.assert_allclose(found.coefficients[i], coefficients, rtol=0, atol=tolerance)


def test_pursuit_chooses_an_anchor_once():
    """The residual of the row is 0 after the first choice."""
    found = pursue(np.float32([[3, 0]]), np.eye(2, dtype=np.float32), 2)
    assert (found.indices.tolist(), found.coefficients.tolist()) == ([[0, 1]], [[3, 0]])


@pytest.mark.slow
def test_pursuit_is_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    targets, anchors = (x.astype(np.float64) for x in rows(1))
    # Its anchors are of length 1.
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    theirs = linear_model.orthogonal_mp(anchors.T, targets.T, n_nonzero_coefs=5).T
    found = pursue(targets.astype(np.float32), anchors.astype(np.float32), 5)
    ours = np.zeros_like(theirs)
    np.put_along_axis(ours, np.asarray(found.indices), np.asarray(found.coefficients), 1)
    assert ((ours != 0) == (theirs != 0)).all()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=100 * EPS * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, WIDTH, 20])
def test_a_linear_image_is_recovered_but_for_the_image_of_what_is_left(k):
    """b = a M gives b - r M, where r is left of the donor's row; r is 0 from k = width on."""
    targets, anchors = rows(2)
    M = np.random.default_rng(3).normal(size=(WIDTH, 7))
    found = np.asarray(transplant(targets, anchors, (anchors @ M).astype(np.float32), k=k))
    for row, target in zip(found, targets.astype(np.float64), strict=True):
        chosen, coefficients, left = pursued(target, anchors.astype(np.float64), min(k, WIDTH))
        if k >= WIDTH:
            assert np.linalg.norm(left) < 1e-12
        # Rounding of the coefficients moves along the anchors, and so by their condition.
        own = np.abs(coefficients) @ np.linalg.norm(anchors[chosen], axis=1)
        tolerance = 8 * EPS * np.linalg.norm(M, 2) * own
        np.testing.assert_allclose(row, (target - left) @ M, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_anchors_beyond_the_rank_are_not_used():
    """Three dimensions hold all anchors, and not the rows: what is left is large, and none is used
    to meet it, though each differs from the others by rounding."""
    rng = np.random.default_rng(4)
    basis = rng.normal(size=(3, WIDTH))
    anchors = (rng.normal(size=(ANCHORS, 3)) @ basis).astype(np.float32)
    targets, _ = rows()
    many, few = pursue(targets, anchors, 20), pursue(targets, anchors, 3)
    assert (np.count_nonzero(many.coefficients, axis=1) == 3).all()
    size = np.abs(few.coefficients).max()
    np.testing.assert_allclose(many.coefficients[:, :3], few.coefficients, rtol=0, atol=1e-4 * size)


@pytest.mark.slow
def test_anchors_that_are_nearly_parallel():
    """The residual of the sum is as small as that of least squares, except for rounding of the sum.

    Such a rounding is orthogonal to what is left, so that its square is added to the square.
    """
    targets, _ = rows()
    near = np.random.default_rng(7).normal(size=(ANCHORS, WIDTH))
    anchors = (1 + 1e-3 * near).astype(np.float32)
    found = pursue(targets, anchors, 8)
    for i, target in enumerate(targets.astype(np.float64)):
        chosen = anchors[found.indices[i]].astype(np.float64)
        coefficients = np.asarray(found.coefficients[i], np.float64)
        best, *_ = np.linalg.lstsq(chosen.T, target, rcond=None)
        least = np.linalg.norm(target - chosen.T @ best)
        rounding = 8 * EPS * np.abs(best) @ np.linalg.norm(chosen, axis=1)
        assert np.linalg.norm(target - chosen.T @ coefficients) <= np.hypot(least, rounding)


@pytest.mark.slow
def test_rows_that_are_anchors_or_zero():
    """Copies of an anchor make one of it, and nothing is made of nothing."""
    _, anchors = rows()
    twice = np.concatenate([anchors[:3] * 3, anchors[:3] * 3, 0 * anchors[:1]])
    found = np.asarray(transplant(np.stack([twice[1], 0 * twice[1]]), twice, twice, k=6))
    np.testing.assert_allclose(found[0], twice[1], rtol=8 * EPS)
    np.testing.assert_array_equal(found[1], 0)
    # Once a row is met, others that are independent of it are not used for what rounding left.
    _, others = rows(6)
    met = pursue(3 * others[:1], others, 6)
    assert np.count_nonzero(met.coefficients) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**-70, 2.0**60])
def test_no_scale_changes_a_digit(scale):
    targets, anchors = rows()
    for find in (pursue, neighbours):
        plain, scaled = find(targets, anchors, 5), find(targets * scale, anchors * scale, 5)
        for a, b in zip(plain, scaled, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("k", [1, 5])
def test_neighbours_are_the_nearest(k):
    targets, anchors = rows()
    own = np.arange(ANCHORS, dtype=np.float32)[:, None]
    found = np.asarray(transplant(targets, anchors, own, "nearest", k))[:, 0]
    for x, target in zip(found, targets.astype(np.float64), strict=True):
        apart = np.linalg.norm(anchors - target, axis=1)
        chosen = np.argsort(apart)[:k]
        expected = (chosen / apart[chosen]).sum() / (1 / apart[chosen]).sum()
        np.testing.assert_allclose(x, expected, rtol=16 * EPS)


@pytest.mark.slow
def test_one_program_for_all_batches():
    targets, anchors = rows(5)
    before = combined._cache_size()
    for part in (targets[:3], targets[3:6], targets[6:]):
        transplant(part, anchors, anchors, k=2)
    assert combined._cache_size() == before + 1


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch_beyond_rounding():
    targets, anchors = rows(5)
    whole = np.asarray(transplant(targets, anchors, anchors, k=5))
    alone = np.asarray(transplant(targets[:1], anchors, anchors, k=5))
    np.testing.assert_allclose(alone[0], whole[0], rtol=0, atol=64 * EPS)


@pytest.mark.slow
def test_64_bits_are_kept():
    targets, anchors = (x.astype(np.float64) for x in rows())
    found = transplant(targets, anchors, anchors, k=WIDTH)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, targets, rtol=0, atol=1e-11)
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k: expected an integer >= 1, got 0"),
        ({"method": "omq"}, "method: expected one of 'omp', 'nearest'; got 'omq'"),
        ({"targets": np.ones(3)}, r"targets: expected a matrix of floats, got float\d+\[3\]"),
        ({"anchors": np.ones((0, 2))}, "anchors: expected at least one row, got none"),
        ({"anchors": np.ones((1, 3))}, "expected rows of 2 entries, as in targets; got 3"),
        ({"own": np.ones((2, 3))}, "own: expected 1 rows, one for each anchor; got 2"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    given = {"targets": np.ones((2, 2)), "anchors": np.ones((1, 2)), "own": np.ones((1, 3))}
    with pytest.raises(ValueError, match=message):
        transplant(**(given | change))
