"""Tensors that are computed when they are read: adapted, grown, in another basis, of other rows."""
