"""Checkpoints written completely or not at all, by runs that can be resumed."""
