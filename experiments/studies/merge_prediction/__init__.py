"""Which measurements, taken before merging, tell how a merge will turn out?

The study makes a few hundred merges of small networks: of an MLP on images (turned, or of some
classes only; by default scikit-learn's digits), and of a GPT on parts of a text (by default the
source of Python's standard library). They differ in how long the base model was pre-trained (or not
at all), in steps and rate of fine-tuning, and in which tasks are merged and how many. Some merge
experts of different, unrelated base models. Each probe of `sail_jax.probe` and each bound of cross-
task linearity (arXiv 2402.03660) and unified merging (arXiv 2601.21690) is compared with the
outcome on held-out data by Spearman's rank correlation.
"""
