"""What importing the packages drags along."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("sail_jax", ("matplotlib", "xarray", "flax", "optax", "scipy", "theory", "experiments")),
        ("theory.deep_linear", ("matplotlib", "xarray", "flax", "optax", "experiments")),
        ("theory.student_teacher", ("matplotlib", "xarray", "flax", "optax", "experiments")),
        ("theory.two_layer", ("matplotlib", "xarray", "flax", "optax", "experiments")),
        ("theory.linearity", ("matplotlib", "xarray", "flax", "optax", "experiments")),
        ("theory.initialisation", ("matplotlib", "xarray", "flax", "optax", "experiments")),
        ("theory.merging", ("matplotlib", "xarray", "flax", "optax", "experiments")),
    ],
)
def test_import_is_light(package, forbidden):
    code = (
        f"import jax, sys; before = set(sys.modules); import {package}; "
        f"print([m for m in {forbidden} if m in set(sys.modules) - before])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
