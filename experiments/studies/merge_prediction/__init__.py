"""Which measurements, taken before merging, tell how a merge will turn out?

A few hundred merges of small networks: of an MLP on scikit-learn's digits, turned or of some
classes, and of a GPT on parts of the source text of Python's standard library. What varies: how
long the base model was pre-trained (or not at all), steps and rate of fine-tuning, which tasks and
how many; some experts come of base models that have nothing to do with each other. Each probe of
`sail_jax.probe` and each bound of cross-task linearity (arXiv 2402.03660) and unified merging
(arXiv 2601.21690) is held against the outcome, on held-out data, by Spearman's rank correlation.
"""
