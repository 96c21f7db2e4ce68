"""Whole commands on checkpoints: merge, grow, align, compare, try."""
