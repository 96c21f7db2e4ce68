"""Sums at scale 1 have the bits of scaled sums, or are computed again."""

import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import methods
from sail_jax.merging.arithmetic import l1_norms, products, settled

X = np.random.default_rng(0).normal(size=(3, 24, 40)).astype(np.float32)
SCALES = {"ordinary": 1.0, "small": 2.0**-30, "tiny": 2.0**-70, "huge": 2.0**70, "zero": 0.0}


@pytest.mark.parametrize("scale", SCALES)
def test_sums_at_scale_1_are_settled_if_nothing_over_or_underflows(scale):
    x = jnp.asarray(X * np.float32(SCALES[scale]))
    plain, scaled = products(x, at_scale_1=True), products(x)
    assert settled([plain]) == (scale in ("ordinary", "small"))
    assert settled(scaled) or scale == "zero"
    if settled(plain):
        np.testing.assert_array_equal(plain.cosines, scaled.cosines)
        np.testing.assert_array_equal(plain.lengths * plain.top, scaled.lengths * scaled.top)


@pytest.mark.slow
def test_l1_norms_at_scale_1_are_settled_unless_a_sum_is_near_the_ends():
    before, half = list(jnp.asarray(X)), list(jnp.asarray(X * (X > 0)))
    plain, scaled = l1_norms(before, half, at_scale_1=True), l1_norms(before, half)
    assert settled({"norms": plain})
    np.testing.assert_array_equal(plain.ratio, scaled.ratio)
    huge = [x * jnp.float32(2.0**125) for x in before]
    assert not settled(l1_norms(huge, huge, at_scale_1=True))
    assert not settled(l1_norms(before, [x * 0 for x in before], at_scale_1=True))


def test_l1_norms_are_sums_in_row_major_order_of_any_shape():
    """The same bits for a matrix and its entries in a row, within 4 eps of the exact sum."""
    matrices = l1_norms(list(jnp.asarray(X)), list(jnp.asarray(X / 3)))
    rows = l1_norms(list(jnp.asarray(X.reshape(3, -1))), list(jnp.asarray(X.reshape(3, -1) / 3)))
    for a, b in zip(matrices, rows, strict=True):
        np.testing.assert_array_equal(a, b)
    exact = np.abs(X.astype(float)).sum((1, 2))
    error = 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(matrices.unit * matrices.before, exact, rtol=error)


@pytest.mark.slow
def test_merges_in_pieces_scale_with_their_models():
    """Squares of 2^-70 are 0 in float32; each of the two pieces is summed again at its scale."""
    models = np.random.default_rng(1).normal(size=(2, (1 << 20) + 99)).astype(np.float32)
    base = {"w": np.zeros(models.shape[1], np.float32)}

    def merged(scale):
        return np.asarray(methods.model_stock()([{"w": x * scale} for x in models], base)["w"])

    np.testing.assert_array_equal(merged(np.float32(2.0**-70)), merged(1) * np.float32(2.0**-70))
