"""Benchmarks: each prints ratios to another program or to a physical limit, in the same run.

A module without a leading underscore is one benchmark of `sail-jax bench`; its docstring is what
`--help` shows.
"""
