"""Closed forms from theory papers, each beside a simulator of the same quantity.

Every folder covers one paper or topic and pairs formulas with simulators that do not use them. The
modules called `claims` compare the two; `sail-jax verify` runs all of these comparisons.
"""
