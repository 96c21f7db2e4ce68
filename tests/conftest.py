"""Shared test set-up: the suite runs on the CPU, so that it means the same on every machine."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
