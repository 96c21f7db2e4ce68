"""The studies: one folder for each, with its config, its run, its findings and its plots.

The docstring of the folder's `__init__` begins with the question that the study asks.
"""
