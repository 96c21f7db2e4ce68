"""The contents of a checkpoint other than its tensors: names, configuration and vocabulary."""
