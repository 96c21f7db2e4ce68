"""Atomic writing of checkpoints, by runs that can be resumed."""
