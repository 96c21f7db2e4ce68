"""Readers and layouts of checkpoint formats. Opening reads names and shapes; bytes follow later."""
