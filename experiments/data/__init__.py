"""Data sets that are part of every installation, and loaders of data sets used in the papers."""
