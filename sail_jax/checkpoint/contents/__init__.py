"""What a checkpoint means beyond its tensors: names, configuration and vocabulary."""
