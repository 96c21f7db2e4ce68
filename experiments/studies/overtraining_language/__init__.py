"""Are language models that were trained for longer harder to perturb and to fine-tune?

Past overtrained (Springer et al. 2025), Section 3 and Appendices C and D. Small language models of
OLMo's block are pre-trained on the source of Python's standard library for a series of budgets,
each from the beginning with a cosine that ends at 0, as in the paper. To every one of them

  Gaussian noise of several sizes lambda is added, shaped as the initialisation is (eq. 1, Fig. 3),
  other tasks are taught at several rates, fixed or tuned for each budget (Figs. 4 to 6, 8),

and the loss on held-out text of pre-training is measured afterwards, beside what the Hessian
predicts (Figs. 9, 10) and beside the theory of two-layer linear networks. Losses are in nats per
token, the logarithm of the perplexity.

Not in the text of the paper, and chosen here: the sizes of the noise, its two signs and the number
of draws; Adam's decays in fine-tuning, which are those of pre-training. Its early stopping over
fine-tuning epochs and its muP are not here.
"""
