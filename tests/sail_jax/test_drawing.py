"""Colour bars say what they leave out."""

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from sail_jax.drawing import style

VALUES = np.array([[0.0, 1.0], [2.0, np.nan]])


def _extend(values, **options):
    _, ((ax,),) = style.figure()
    return style.heatmap(ax, values, **options).colorbar.extend


@pytest.mark.parametrize(
    ("low", "high", "extend"),
    [(0, 2, "neither"), (0.5, 2, "min"), (0, 1.5, "max"), (0.5, 1.5, "both"), (1e-9, 2, "neither")],
)
def test_a_bar_is_pointed_where_values_lie_beyond_it(low, high, extend):
    assert _extend(VALUES, vmin=low, vmax=high) == extend


def test_a_bar_without_limits_leaves_out_nothing():
    assert _extend(VALUES) == "neither"
    assert _extend(VALUES[1:] + 1, norm=LogNorm(1, 2)) == "max"


def test_a_bar_shows_what_the_other_maps_that_it_stands_for_leave_out():
    assert _extend(VALUES, vmin=0, vmax=2, also=np.array([5.0])) == "max"
