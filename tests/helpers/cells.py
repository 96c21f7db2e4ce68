"""Cells of parametrised tests, of which only some are quick.

The reference of every method, and every format and claim, are quick. For laws that hold for many
subjects, one diagonal is quick, chosen by the positions in the lists, so that each law is tested on
some subjects and each subject with some law. New entries are appended, which does not change the
others."""

import pytest


def soak_unless(quick, *values):
    """Makes a cell with these values: a soak test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.soak)


def slow_unless(quick, *values):
    """Makes a cell with these values: a slow test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


def slow(*values):
    """Makes slow cells, one for each value."""
    return [slow_unless(False, value) for value in values]


def soak(*values):
    """Makes soak cells, one for each value."""
    return [soak_unless(False, value) for value in values]


def one_of_every(few, values):
    """Makes a cell for each value: a soak test, except for the first of every few."""
    return [soak_unless(i % few == 0, value) for i, value in enumerate(values)]


def chosen(values, *quick):
    """Makes a cell for each value: slow except for the chosen ones."""
    unknown = [value for value in quick if value not in values]
    assert not unknown, unknown
    return [slow_unless(value in quick, value) for value in values]


def diagonal(laws, subjects):
    """All pairs: cell (i, j) is quick if i and j are equal modulo the shorter length."""
    n = min(len(laws), len(subjects))
    return [
        slow_unless(i % n == j % n, law, subject)
        for i, law in enumerate(laws)
        for j, subject in enumerate(subjects)
    ]


def of_law(i, laws, subjects, among=None):
    """Cells of the i-th of so many laws, as in `diagonal`: of the subjects, or of those among them
    for which it holds."""
    n = min(laws, len(subjects))
    return [
        slow_unless(i % n == j % n, subject)
        for j, subject in enumerate(subjects)
        if among is None or subject in among
    ]
