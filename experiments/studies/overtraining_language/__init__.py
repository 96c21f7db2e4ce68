"""Are language models that were trained for longer harder to perturb and to fine-tune?

The study repeats Section 3 and Appendices C and D of Springer et al., Overtrained Language Models
Are Harder to Fine-Tune, 2025 (arXiv 2503.19206). Small language models of OLMo's architecture are
pre-trained on the source text of Python's standard library, for a series of token budgets. As in
the paper, each budget has its own training from the beginning, with a cosine schedule that ends at
0. Each model is then changed in two ways:

  Gaussian noise of several sizes lambda is added, shaped like the initialisation (eq. 1, Fig. 3);
  other tasks are taught at several learning rates, fixed or tuned by budget (Figs. 4 to 6, 8).

The loss on held-out text of pre-training is measured afterwards. It is compared with the Hessian's
predictions (Figs. 9, 10) and with the theory of two-layer linear networks. Losses are in nats per
token: the logarithm of the perplexity.

The paper's text does not specify the sizes of the noise, its two signs and the number of draws, so
they are chosen here. Adam's decays in fine-tuning are the same as in pre-training. The paper uses
muP and early stopping by the number of fine-tuning epochs. The presets for it do the same, with muP
by `experiments.training.mup`, but stop within one training.
"""
