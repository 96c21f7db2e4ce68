"""Does growing a trained network save training, and by which method?

A small network is trained, enlarged by each method of `sail_jax.growth`, and trained further. The
larger network is also trained from scratch on the same minibatches. The networks are a GPT on the
source text of Python's standard library, or an MLP or a ResNet on scikit-learn's digits. The study
measures the held-out loss right after growth, which function-preserving methods do not change. It
also measures the steps and the compute that growth saves. The maps of LiGO and SAIL are learned in
a separate phase before training (Wang et al. 2023; SAIL, App. F). Masked structural growth (Yao et
al. 2023) begins with its new units masked and activates them gradually along a ramp.
"""
