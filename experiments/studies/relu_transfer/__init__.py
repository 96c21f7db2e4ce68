"""When do frozen ReLU features beat training from scratch? Student and teacher networks.

The subject is Figure 4 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194). A two-layer
network is pretrained on a source that lacks a fraction mu of the target's neurons. Its features are
then frozen, and the output layer is fitted to n samples of the target. Training from scratch trains
the same network on the same samples. All risks are exact, without a test set.

Preset `figure_4c` has training from scratch alone, at the paper's sizes. Pretraining and
projections run in float64. Training from scratch, whose loss is a mean of squares, runs in float32.
"""
