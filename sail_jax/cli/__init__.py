"""The `sail-jax` command. A command is a module with `main(parser, argv)` and a row in `table`."""
