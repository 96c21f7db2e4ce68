"""Annotations are true: every doctest once more, with arguments and results checked at run time.

Doctests and not the suite, which gives bad input on purpose and expects our own errors.
`sail_jax.checkpoint` is not among them: beartype can check neither pydantic's protocols nor `Self`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = [
    "theory",
    "sail_jax.align",
    "sail_jax.architectures",
    "sail_jax.basis",
    "sail_jax.distances",
    "sail_jax.growth",
    "sail_jax.lora",
    "sail_jax.merging",
    "sail_jax.methods",
    "sail_jax.probe",
    "sail_jax.proximal",
]

CHECK = """
import doctest, gc, importlib, pkgutil, sys
import lowering
from jaxtyping import install_import_hook

lowering.share_contexts()
gc.set_threshold(100_000, 20, 20)  # as tests/conftest.py
with install_import_hook(["sail_jax", "theory"], "checked.checked"):
    flags, wrong = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, []
    for package in map(importlib.import_module, sys.argv[1:]):
        rooms = getattr(package, "__path__", ())
        names = [m.name for m in pkgutil.walk_packages(rooms, package.__name__ + ".")]
        modules = [package, *map(importlib.import_module, names)]
        results = [doctest.testmod(module, optionflags=flags) for module in modules]
        attempted = sum(result.attempted for result in results)
        failed = sum(result.failed for result in results)
        print(package.__name__, attempted, "examples")
        if attempted == 0 or failed > 0:
            wrong.append(package.__name__)
sys.exit(", ".join(wrong) or 0)
"""

CHECKED = """
from beartype import BeartypeConf, beartype

# An int is a float, as annotations mean it.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""


@pytest.mark.slow
def test_doctests_keep_to_the_annotations(tmp_path):
    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "check.py").write_text(CHECK)
    helpers = str(Path(__file__).parent / "helpers")
    paths = [helpers, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "check.py"), *PACKAGES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.slow
def test_a_false_annotation_is_found(tmp_path):
    """The check can fail: a vector given where a matrix is annotated."""
    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "wrong.py").write_text(
        "import numpy as np\nfrom jaxtyping import Float\n"
        "def trace(x: Float[np.ndarray, 'n n']) -> float:\n    return float(x.sum())\n"
    )
    program = (
        "from jaxtyping import install_import_hook\n"
        "with install_import_hook('wrong', 'checked.checked'):\n    import wrong\n"
        "import numpy as np\nwrong.trace(np.ones(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "Type-check error" in done.stderr
