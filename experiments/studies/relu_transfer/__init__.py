"""When do frozen ReLU features beat training from scratch? Student and teacher networks.

Figure 4 of features-are-fate (arXiv 2410.08194): a two-layer network is pretrained on a source that
lacks a fraction mu of the target's neurons; its features are then frozen and the output layer is
fitted to n samples of the target. Scratch training is the same network trained on the same samples.
All risks are exact (no test set); preset `figure_4c` is the law of scratch training alone, at the
paper's sizes. Pretraining and projections run in float64, scratch training,
whose loss is a mean of squares, in float32.
"""
