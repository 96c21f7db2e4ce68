"""Reads recipes and tables of spaces from YAML, and checks them."""
