"""What holds without torch; `.ci/against/spaces.py` runs its modules."""

import subprocess
import sys

import pytest

from sail_jax.interop.torch import jax_function


def test_without_torch_one_line_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^torch .* pip install 'sail-jax\[torch\]'$"):
        jax_function(object())


def test_torch_is_not_imported_before_it_is_needed():
    code = "import sys, sail_jax.interop.torch; print({'torch', 'torchax'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
