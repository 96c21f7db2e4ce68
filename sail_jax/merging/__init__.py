"""Merges of pytrees: what they are made of, and what computes them.

A `Merge` is a value: transforms of task vectors (`transforms`), then one reduction (`reductions`).
Both are lists of steps (`steps`). Whatever is traced, sharded or on an accelerator goes through
them in one compiled program; files, and arrays of one CPU, go through them piece by piece. The page
"How a merge is evaluated" (docs/explanation/evaluating.md) follows an example through both.
"""
