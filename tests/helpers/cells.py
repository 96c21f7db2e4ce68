"""Cells of a parametrised test, not all of which are quick.

Quick are the reference of every method, and every format and claim. Of laws, which hold for many
subjects, one diagonal is quick, chosen by the places in the lists: each law meets some subjects,
and each subject some law. A new one comes last, and leaves the others where they are."""

import pytest


def soak_unless(quick, *values):
    """A cell with these values: a soak test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.soak)


def slow_unless(quick, *values):
    """A cell with these values: a slow test if it is not quick."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


def slow(*values):
    """Slow cells, one for each value."""
    return [slow_unless(False, value) for value in values]


def soak(*values):
    """Soak cells, one for each value."""
    return [soak_unless(False, value) for value in values]


def chosen(values, *quick):
    """A cell for each value: slow but for the chosen ones."""
    unknown = [value for value in quick if value not in values]
    assert not unknown, unknown
    return [slow_unless(value in quick, value) for value in values]


def diagonal(laws, subjects):
    """All pairs: cell (i, j) is quick where i and j are equal modulo the length of the shorter."""
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
