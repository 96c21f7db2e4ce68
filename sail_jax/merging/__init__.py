"""Merges of pytrees: their parts, and the evaluators that compute them.

A `Merge` is a value: transforms of task vectors (`transforms`), then one reduction (`reductions`).
Both are lists of steps (`steps`). Traced or sharded arrays, and arrays on accelerators, go through
the steps in one compiled program. Files, and arrays on one CPU, go through them piece by piece. The
page "How a merge is evaluated" (docs/explanation/evaluating.md) follows an example through both.
"""
