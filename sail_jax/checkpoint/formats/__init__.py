"""Readers and layouts of checkpoint formats, which read bytes only on request."""
