"""Does growing a trained network save training, and by which method?

A small network is trained, made larger by each method of `sail_jax.growth`, and trained on, beside
the larger network trained from scratch on the same minibatches: a GPT on the source text of
Python's standard library, an MLP or a ResNet on scikit-learn's digits. Measured are the held-out
loss right after growth, which function-preserving methods leave at the small network's, and the
steps and the compute that are saved. LiGO's and SAIL's maps are learned first (Wang et al. 2023;
SAIL, App. F); masked structural growth (Yao et al. 2023) brings its units in along a ramp.
"""
