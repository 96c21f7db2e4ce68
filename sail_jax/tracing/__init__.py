"""Feature spaces inferred from a forward pass: for networks that no table describes."""

from sail_jax.tracing.check import Checked, Trial, check_spec
from sail_jax.tracing.infer import Inferred, spec_of

__all__ = ["Checked", "Inferred", "Trial", "check_spec", "spec_of"]
