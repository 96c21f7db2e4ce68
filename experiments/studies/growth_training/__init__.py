"""Does growing a trained network save training, and by which method?

A small network is trained, made larger by each method of `sail_jax.growth`, and trained further.
The larger network is also trained from scratch on the same minibatches. The networks are a GPT on
the source text of Python's standard library, or an MLP or a ResNet on scikit-learn's digits.
Measured are the held-out loss right after growth, which function-preserving methods leave at the
small network's, and the steps and the compute that growth saves. LiGO's and SAIL's maps are learned
in a phase of their own before training (Wang et al. 2023; SAIL, App. F). Masked structural growth
(Yao et al. 2023) starts with its new units masked and brings them in along a ramp.
"""
