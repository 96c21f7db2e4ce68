"""Which measurements, made before merging, predict the loss of a merge?

The study makes a few hundred merges of small networks. One family is an MLP on images (rotated, or
of some classes only; by default scikit-learn's digits). The other is a GPT on parts of a text (by
default the source of Python's standard library). Merges differ in the length of the base model's
pre-training (including none), in steps and rate of fine-tuning, and in the merged tasks and their
number. Some merge experts of unrelated base models. The study compares each probe of
`sail_jax.probe` and each bound of cross-task linearity (arXiv 2402.03660) and unified merging
(arXiv 2601.21690) with the result on held-out data, by Spearman's rank correlation.
"""
