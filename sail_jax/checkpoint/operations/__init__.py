"""Whole commands: merge, grow, align, compare, try."""
