"""Numbers near 0, found by their bits."""

import ml_dtypes
import numpy as np
import pytest

from sail_jax.merging.faint import AT_ONCE, FAINT, has_faint, has_faint_or_zero

WIDE = [np.float32, np.float64, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, AT_ONCE - 1, AT_ONCE + 6])
def test_one_number_near_0_is_found(dtype, sign, place):
    """The smallest subnormal and the number before the bound, wherever they lie; not the bound."""
    x = np.random.default_rng(0).normal(size=AT_ONCE + 7).astype(dtype)
    x[x == 0] = 1
    x[3:6] = np.inf, -np.inf, np.nan
    about = ml_dtypes.finfo(dtype)
    for value in (about.smallest_subnormal, about.smallest_normal, FAINT * (1 - float(about.eps))):
        x[place] = sign * float(value)
        assert has_faint(x)
        assert has_faint_or_zero(x)
    x[place] = sign * FAINT
    assert not has_faint(x)
    assert not has_faint_or_zero(x)
    x[place] = sign * 0.0
    assert not has_faint(x)
    assert has_faint_or_zero(x)


@pytest.mark.parametrize("dtype", [*WIDE, np.float16, ml_dtypes.float8_e4m3fn])
def test_nothing_is_near_0_where_there_is_nothing(dtype):
    """Nor in a dtype whose smallest number is larger."""
    empty = np.zeros(0, dtype)
    assert not has_faint(empty)
    assert not has_faint_or_zero(empty)
    if dtype not in WIDE:
        smallest = np.array([float(ml_dtypes.finfo(dtype).smallest_subnormal)]).astype(dtype)
        assert not has_faint(np.append(smallest, -smallest))
