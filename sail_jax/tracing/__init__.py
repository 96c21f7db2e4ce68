"""Infers feature spaces from a forward pass, for networks without a table."""

from sail_jax.lazy import listed
from sail_jax.tracing.check import Checked, Trial, check_spec
from sail_jax.tracing.infer import Inferred, spec_of
from sail_jax.tracing.stacks import Stack, stack, unstack

__dir__ = listed(__name__)

__all__ = ["Checked", "Inferred", "Stack", "Trial", "check_spec", "spec_of", "stack", "unstack"]
