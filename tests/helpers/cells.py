"""Cells of a parametrised test, not all of which are quick; `tests/conftest.py` on marks."""

import pytest


def soak_unless(quick, *values):
    """A cell with these values: a soak test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.soak)


def slow_unless(quick, *values):
    """A cell with these values: a slow test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)
