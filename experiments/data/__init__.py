"""Data sets that every installation has, and loaders of those of the papers."""
