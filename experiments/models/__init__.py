"""Flax networks of the studies, used through `init` and `apply`, and their sizes by name
(`presets`).
"""
