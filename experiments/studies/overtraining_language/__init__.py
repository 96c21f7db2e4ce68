"""Are language models that were trained for longer harder to perturb and to fine-tune?

The study repeats Section 3 and Appendices C and D of Springer et al., Overtrained Language Models
Are Harder to Fine-Tune, 2025 (arXiv 2503.19206). Small language models of OLMo's block are
pre-trained on the source text of Python's standard library, for a series of token budgets. As in
the paper, each budget is a training of its own from the beginning, with a cosine schedule that ends
at 0. Each model is then changed in two ways:

  Gaussian noise of several sizes lambda is added, shaped as the initialisation is (eq. 1, Fig. 3);
  other tasks are taught at several learning rates, fixed or tuned by budget (Figs. 4 to 6, 8).

The loss on held-out text of pre-training is measured afterwards. It is compared with what the
Hessian predicts (Figs. 9, 10) and with the theory of two-layer linear networks. Losses are in nats
per token: the logarithm of the perplexity.

The paper's text leaves open the sizes of the noise, its two signs and the number of draws, which
are chosen here. Adam's decays in fine-tuning are those of pre-training. The paper stops early over
fine-tuning epochs and has muP; its presets do, with muP by `experiments.training.mup`, and stop
within one training.
"""
