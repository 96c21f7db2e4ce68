"""Tests that do not require torch; `.ci/against/spaces.py` runs its modules."""

import sys

import pytest

from sail_jax.interop.torch import jax_function


def test_without_torch_one_line_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^torch .* pip install 'sail-jax\[torch\]'$"):
        jax_function(object())
