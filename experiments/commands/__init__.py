"""The commands on studies, one module each; `sail_jax.cli.finder` finds them.

Each module has a function `main(parser, argv)` that returns the exit code.
"""
