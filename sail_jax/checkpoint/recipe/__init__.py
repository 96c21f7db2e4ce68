"""Reads recipes and tables of spaces from YAML, and checks what they say."""
