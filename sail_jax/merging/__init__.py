"""Merging of pytrees: task vectors, transforms of them, reductions, and what evaluates them."""
