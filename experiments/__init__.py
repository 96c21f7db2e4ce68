"""Studies of the papers' claims, and what they share: data, models, training, storage, commands.

A study is a folder of `experiments.studies`. Its config goes to its `run`, which returns a dataset;
its findings and its plots are computed from that dataset alone.
"""
