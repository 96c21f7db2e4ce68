"""The commands on checkpoints, one module each; `sail_jax.cli.finder` finds them."""
