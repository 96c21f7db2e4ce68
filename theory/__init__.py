"""Closed forms from theory papers, and simulators of what they predict.

Every folder covers one paper or topic. The modules called `claims` compare predictions with
simulations, or with averages of an estimator over random data; `sail-jax verify` runs all of these
comparisons.
"""
