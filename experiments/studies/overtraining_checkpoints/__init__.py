"""Are later checkpoints of one language model's training harder to perturb and to fine-tune?

The study repeats Section 2 and Figures 2 and 65 of Springer et al., Overtrained Language Models Are
Harder to Fine-Tune, 2025 (arXiv 2503.19206). A series of checkpoints is read from folders, such as
OLMo-1B after 0.04 to 3.1 trillion tokens. Every checkpoint is changed in two ways:

  Gaussian noise of several sizes is added, with the initialisation's standard deviations (eq. 1);
  instructions are taught at several rates, by all weights or by low-rank adapters (LoRA).

The study measures the loss on held-out text of pre-training before and afterwards. It also measures
the loss on held-out instructions and, if files are given, the fraction of correct answers to
multiple-choice questions. Without folders it first trains a series of tiny networks of characters
and writes them as checkpoints. All checkpoints belong to one training, as in the paper's Section 2.
`overtraining_language` instead has a separate training for each budget.

The paper's judged answers (AlpacaEval), images (LLaVA), and OLMo-2's block are not included. The
paper does not specify the sizes and draws of the noise, the number of epochs, the length of
examples, or Adam's decays, which are chosen here.
"""
