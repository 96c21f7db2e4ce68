"""Shared test set-up: the suite runs on the CPU, so that it means the same on every machine, and
with one BLAS thread per worker, as the command does (`sail_jax.cli.main` says why)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def forget_compilations():
    """What one file compiles, no other needs: thousands of kept programs take gigabytes."""
    yield
    jax.clear_caches()
