"""Closed forms beside simulators of the same quantities."""
