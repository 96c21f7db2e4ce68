"""Merges of pytrees: what they are made of, and what computes them.

A `Merge` (module `merge`) is a value: transforms of task vectors (`transforms`), then one reduction
(`reductions`). Both are lists of steps (`steps`). Two evaluators carry out the same steps:
`evaluate` in one compiled program, `engine` and `streaming` piece by piece under a memory limit.
`task_vectors` checks the inputs, `ranking` finds exact thresholds, `random_bits` draws masks.
"""
