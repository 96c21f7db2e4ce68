"""Do networks fine-tuned from one checkpoint act as linear maps of their parameters?

The study repeats the experiments of Zhou et al., Cross-Task Linearity, 2024 (arXiv 2402.03660). It
uses scikit-learn's digits or, in presets `paper_*`, MNIST and CIFAR from files. A ReLU MLP is
pre-trained on upright images and fine-tuned on rotated ones. A ResNet is pre-trained on some
classes and fine-tuned on others. The parts are:

  rotated, split_classes  features of interpolated weights, interpolated features (Figs. 2, 3)
  scratch                 the same without pre-training, with and without alignment (Fig. 11)
  random_labels           the same after pre-training on random labels (Fig. 12)
  averaging               averaged weights against averaged logits (Fig. 4)
  arithmetic              features under sums and negatives of task vectors (Figs. 7, 8)
  stitching               such features as input of a network's upper layers (Figs. 9, 10)
  theorem                 Theorem 1's main term against the gap of the loss (App. B.2)
"""
