"""Files of tensors: what lies in them, and their bytes when asked for."""
