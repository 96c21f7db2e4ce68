"""Readers and layouts of checkpoint formats: what lies in a file, and its bytes when asked for."""
