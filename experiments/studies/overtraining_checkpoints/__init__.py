"""Are later checkpoints of one language model's training harder to perturb and to fine-tune?

Past overtrained (Springer et al. 2025), Section 2 and Figures 2 and 65: a series of checkpoints,
such as OLMo-1B's after 0.04 to 3.1 trillion tokens, is read from folders. To every one of them

  Gaussian noise of several sizes gamma is added, shaped as the initialisation is (eq. 1),
  instructions are taught at several rates, by all weights or by adapters of low rank (LoRA),

and the perplexity on held-out text of pre-training is measured before and afterwards, beside the
loss on held-out instructions and answers to multiple choice. Without folders a series of tiny
networks is trained first, on characters, and written as checkpoints. `overtraining_language` trains
each budget apart; here, as in the paper's Section 2, checkpoints are of one run, whose rate falls.

Not here: judges of answers (AlpacaEval), images (LLaVA), and OLMo-2's block. Not printed, and
chosen here: the sizes of the noise and how many draws, epochs and the length of examples, Adam's
decays.
"""
