"""Merging pytrees: a merge is a value, made of transforms of task vectors and one reduction."""
