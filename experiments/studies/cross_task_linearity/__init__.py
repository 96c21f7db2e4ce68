"""Do networks fine-tuned from one checkpoint act as linear maps of their parameters?

The experiments of cross-task linearity (arXiv 2402.03660), on scikit-learn's digits or, in presets
`paper_*`, on MNIST and CIFAR from files. A ReLU MLP is pre-trained on upright images and fine-tuned
on rotated ones, a ResNet on some classes and then on others. Features of interpolated weights are
compared with interpolated features (Figures 2, 3);
without pre-training, aligned and not (Figure 11); after pre-training on random labels (Figure 12);
averaged weights with averaged logits (Figure 4); sums and differences of task vectors (Figures 7,
8), and stitched (Figures 9, 10); and Theorem 1's main term with the gap of the loss (B.2).
"""
