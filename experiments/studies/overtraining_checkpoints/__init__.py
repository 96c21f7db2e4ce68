"""Are later checkpoints of one language model's training harder to perturb and to fine-tune?

The study repeats Section 2 and Figures 2 and 65 of Springer et al., Overtrained Language Models Are
Harder to Fine-Tune, 2025 (arXiv 2503.19206). A series of checkpoints is read from folders, such as
those of OLMo-1B after 0.04 to 3.1 trillion tokens. Every checkpoint is changed in two ways:

  Gaussian noise of several sizes gamma is added, shaped as the initialisation is (eq. 1);
  instructions are taught at several rates, by all weights or by adapters of low rank (LoRA).

The loss on held-out text of pre-training is measured before and afterwards. So are the loss on
held-out instructions and, where files are given, the share of right answers to multiple choice.
Without folders a series of tiny networks of characters is trained first and written as checkpoints.
All checkpoints are of one training, as in the paper's Section 2. `overtraining_language` trains
each budget apart.

Left out are the paper's judged answers (AlpacaEval), images (LLaVA), and OLMo-2's block. The paper
does not print the sizes and draws of the noise, the number of epochs, the length of examples, or
Adam's decays. They are chosen here.
"""
