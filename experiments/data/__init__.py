"""Data sets that every installation has, and loaders of the data sets that the papers use."""
