"""Real data sets that need no network."""
