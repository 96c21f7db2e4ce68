"""A fingerprint changes if and only if the code of a function anywhere in `theory` changes."""

import sys
from functools import partial

import pytest

from theory import fingerprints

FORMULA = '''"""A formula."""

from {package}.parts import scale

SHIFT = 1.0


def formula(x, offset=2.0):
    """Computes a number."""
    return scale(x) + SHIFT + offset


def other(x):
    return x
'''
PARTS = """from {package}.deep import inner


def scale(x):
    if x:
        x = x + 1
    return inner(2 * x)
"""
DEEP = """def inner(x):
    return x + 3


def outer(x):
    return x
"""


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """Writes a package with an error in place of some text, and computes a fingerprint in it."""
    count = iter(range(100))

    def of(old="", new="", function=lambda module: module.formula):
        package = f"formulas{next(count)}"
        folder = tmp_path / package
        folder.mkdir()
        texts = {"formula": FORMULA, "parts": PARTS, "deep": DEEP}
        assert not old or old in "".join(texts.values())
        for name, text in {"__init__": "", **texts}.items():
            changed = text.replace("{package}", package)
            (folder / f"{name}.py").write_text(changed.replace(old, new) if old else changed)
        monkeypatch.setattr(fingerprints, "ROOT", folder)
        fingerprints.forget()
        module = __import__(f"{package}.formula").formula
        found = fingerprints.fingerprint(function(module))
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]
        return found

    monkeypatch.syspath_prepend(tmp_path)
    yield of
    fingerprints.forget()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SHIFT = 1.0", "SHIFT = 1.1"),
        ("+ offset", "- offset"),
        ("offset=2.0", "offset=1.9"),
        ("2 * x", "1.9 * x"),
        ("        x = x + 1\n    return inner", "        x = x + 1\n        return inner"),
        ("x + 3", "x + 4"),
    ],
)
def test_an_error_anywhere_below_a_function_changes_its_fingerprint(printed, old, new):
    assert printed(old, new) != printed()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Computes a number.", "Computes another number."),
        ("    return scale", "    # a reason\n\n    return scale"),
        ("scale(x) + SHIFT", "scale(\n        x,\n    ) + SHIFT"),
        ("def other(x):\n    return x", "def other(x):\n    return -x"),
        ("def outer(x):\n    return x", "def outer(x):\n    return -x"),
    ],
)
def test_prose_layout_and_other_functions_do_not_count(printed, old, new):
    assert printed(old, new) == printed()


def test_what_a_function_is_given_counts():
    def more(constant):
        return lambda x: x + constant

    values = [
        max,
        min,
        more(1.0),
        more(2.0),
        partial(max, 1.0),
        partial(max, 2.0),
        {"a": max},
        {"b": max},
    ]
    assert len({fingerprints.fingerprint(value) for value in values}) == len(values)
    assert fingerprints.fingerprint(more(1.0)) == fingerprints.fingerprint(more(1.0 + 1e-15))
