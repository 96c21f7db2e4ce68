"""Benchmarks: each prints ratios to another program or to a physical limit, in the same run.

A module without a leading underscore is one benchmark of `sail-jax bench`, found by its name:

    its docstring      what `--help` shows; the first line is its place in the list
    options(parser)    adds its options
    measure(args)      measures, prints the results, and returns the record that `--json` writes;
                       `"good": False` in it makes the exit code 1
"""
