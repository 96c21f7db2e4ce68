"""The commands that run experiments, each `main(parser, argv)`; `sail_jax.cli.table` lists them."""
