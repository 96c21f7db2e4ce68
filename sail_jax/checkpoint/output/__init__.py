"""Checkpoints written whole or not at all, by runs that can be resumed."""
