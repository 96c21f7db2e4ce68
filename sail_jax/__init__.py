"""Merge, grow and transfer neural networks as pure pytree transforms."""
