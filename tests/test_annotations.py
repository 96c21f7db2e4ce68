"""Annotations are correct: every doctest runs again, with arguments and results checked at run
time.

Doctests and not the suite, which gives bad input on purpose and expects our own errors. The
commands, which have no doctests, are run once on checkpoints.
"""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from slow_examples import SLOW_EXAMPLES

PACKAGES = ["theory", "sail_jax"]

# One process for both: to import everything with checks takes ten seconds.
CHECK = """
import doctest, importlib, pkgutil, sys
from pathlib import Path
import less_waste
from jaxtyping import install_import_hook

less_waste.one_context()
wrong = []
with install_import_hook(["sail_jax", "theory"], "checked.checked"):
    found = {}
    with less_waste.kept():
        for package in map(importlib.import_module, sys.argv[1:]):
            rooms = getattr(package, "__path__", ())
            names = [m.name for m in pkgutil.walk_packages(rooms, package.__name__ + ".")]
            names = [name for name in names if not name.endswith("__main__")]
            found[package.__name__] = [package, *map(importlib.import_module, names)]
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for package, modules in found.items():
        results = [doctest.testmod(module, optionflags=flags) for module in modules]
        attempted = sum(result.attempted for result in results)
        failed = sum(result.failed for result in results)
        print(package, attempted, "examples")
        if attempted == 0 or failed > 0:
            wrong.append(package)

    from sail_jax.cli.main import main

    def run(*words):
        print(*words)
        if main(words) != 0:
            wrong.append(" ".join(words))

    import small_checkpoints as small

    base = small.tensors()
    small.save(Path("base"), base, small.CONFIG)
    for seed in (1, 2):
        small.save(Path(f"expert-{seed}"), small.tuned(base, seed), small.CONFIG)
    for method in ("linear", "ties", "breadcrumbs"):
        with open("recipe.yaml", "w") as file:
            file.write(f"merge_method: {method}\\nparameters: {{weight: 0.3}}\\n")
            file.write("models: [{model: expert-1}, {model: expert-2}]\\n")
            file.write("" if method == "linear" else "base_model: base\\n")
        run("merge", "recipe.yaml", "--plan")
        run("merge", "recipe.yaml", method, "--report", f"report-{method}")
    run("inspect", "expert-1", "expert-2", "--base", "base")
    run("align", "expert-1", "expert-2", "aligned")
    run("grow", "base", "grown", "--width", "2")
sys.exit(", ".join(wrong) or 0)
"""

CHECKED = """
import typing

import pydantic
from beartype import BeartypeConf, beartype

# pydantic does not mark its protocol as one that can be checked at run time, but it can.
typing.runtime_checkable(pydantic.ValidationInfo)

# An int is a float, as annotations mean it.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""


@pytest.mark.soak
def test_doctests_and_commands_keep_to_the_annotations(tmp_path):
    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "check.py").write_text(CHECK)
    helpers = str(Path(__file__).parent / "helpers")
    path = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "check.py"), *PACKAGES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
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


@pytest.mark.parametrize("name", sorted(SLOW_EXAMPLES))
def test_a_slow_example_exists(name):
    """Otherwise a renamed function would have a quick example again, and an entry for nothing."""
    assert ">>>" in pkgutil.resolve_name(name).__doc__
