"""Complete operations on checkpoints: merge, grow, align, compare, try."""
