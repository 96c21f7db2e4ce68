"""The `sail-jax` command. A command is a module; `finder` finds it."""
