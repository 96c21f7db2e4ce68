"""Numbers near 0, found by their bits."""

import ml_dtypes
import numpy as np
import pytest

from sail_jax.merging.extremes import AT_ONCE, BLOCK, FAINT, lost

WIDE = [np.float32, np.float64, ml_dtypes.bfloat16]
SIZE = 3 * BLOCK


@pytest.mark.parametrize("entrywise", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", WIDE)
def test_numbers_near_0_are_found(dtype, sign, entrywise):
    """Tests the smallest subnormal and the number below the bound, with outcomes near 0."""
    ones, about = np.ones((3, SIZE), dtype), ml_dtypes.finfo(dtype)
    index = np.arange(3 * SIZE).reshape(ones.shape)
    outcome = lambda at, small: np.where(index == at, small, 1)  # noqa: E731
    ones[2, :3] = np.inf, -np.inf, np.nan
    place, other = (1, SIZE - 1), (1, 0)
    for value in (about.smallest_subnormal, FAINT * (1 - float(about.eps)), FAINT, 0):
        x = ones.copy()
        x[place] = sign * float(value)
        here, there = (np.ravel_multi_index(at, x.shape) for at in (place, other))
        yes = 0 < value < FAINT
        for small in (0.0, -0.0, sign * float(about.smallest_subnormal)):
            found = lost(outcome(here, small).astype(dtype), [ones, x], entrywise)
            assert found.tolist() == [False, yes, False]
            # another block: what is near 0 there cannot come from here, entry by entry
            found = lost(outcome(there, small).astype(dtype), [x], entrywise)
            assert found.tolist() == [False, yes and not entrywise, False]
        assert not lost(outcome(here, sign * FAINT).astype(dtype), [x], entrywise).any()


def test_long_arrays_are_looked_at_to_their_end():
    x = np.zeros((1, 2 * AT_ONCE + BLOCK), np.float32)
    assert not lost(0 * x, [x], True).any()
    x[0, -1] = 1e-45
    assert lost(np.zeros_like(x), [x], True).all()


@pytest.mark.parametrize("dtype", [*WIDE, np.float16, ml_dtypes.float8_e4m3fn])
def test_nothing_is_near_0_where_there_is_nothing(dtype):
    """This includes dtypes whose smallest number is larger."""
    assert lost(np.zeros((2, 0), dtype), [np.zeros((2, 0), dtype)], True).tolist() == [False] * 2
    if dtype not in WIDE:
        smallest = np.full((1, 3), float(ml_dtypes.finfo(dtype).smallest_subnormal)).astype(dtype)
        assert not lost(np.zeros((1, 3), np.float32), [smallest, -smallest], True).any()
