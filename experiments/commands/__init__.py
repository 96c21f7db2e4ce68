"""The commands that work on checkpoints, each `add_arguments(parser)` and `run(args)`."""
