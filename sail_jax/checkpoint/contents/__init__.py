"""The content of a checkpoint beyond its tensors: names, configuration and vocabulary."""
