"""What the executor raises. Apart from it, as commands that merge nothing should not load it."""

from sail_jax import disk

__all__ = ["MergeError", "MergeRefusedError"]


class MergeError(ValueError):
    """Raised when a merge cannot go on; the message names the tensors."""


class MergeRefusedError(MergeError, disk.RefusedError):
    """Raised when a merge cannot be done as it was asked for, before any tensor is read."""
