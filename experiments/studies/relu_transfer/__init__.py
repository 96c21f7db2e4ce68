"""When do frozen ReLU features beat training from scratch?

The subject is Figure 4 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194): student and
teacher networks with two layers. A student is pretrained on a source without a fraction mu of
the target's neurons. Its features are then frozen, and the output layer is fitted to n samples of
the target. Training from scratch trains the same network on the same samples. All risks are exact,
without a test set.

Preset `figure_4c` only trains from scratch, at the paper's sizes. Pretraining and projections run
in float64. Training from scratch runs in float32, because its loss is a mean of squares.
"""
