"""Small Flax models, used through pure `init` and `apply`."""
