"""Tensors that are computed as they are read: adapted, grown, in another basis, with other rows."""
