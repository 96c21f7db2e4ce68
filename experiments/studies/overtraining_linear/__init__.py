"""When does more pre-training hurt two-layer linear networks, solved and trained?

Past overtrained (Springer et al. 2025), whose theory this is: the pre-training loss after a
perturbation or after fine-tuning, over the pre-training time and one more quantity, in closed form
at every point and by stochastic gradient descent of the network itself; drawn on top, the time
after which more pre-training hurts (Definition 4.2, in continuous time). Diagrams:

  perturbation   Gaussian noise gamma on the weights (Proposition 4.3, Theorem 4.4)
  learning_rate  fine-tuning for a number of steps at a rate (Theorem 4.6)
  anchor         fine-tuning with the anchor lambda |theta - theta(0)|^2 (Theorem 4.7)
  misalignment   decay of the spectrum against sigma_ft / sigma_pre: what the last of pre-training
                 costs, the loss at its end less the least loss on the way
  sensitivity    what noise gamma adds to the loss, beside its quadratic prediction gamma^2 tr(H)/2
                 (Proposition D.1), and the curvature H along pre-training
  trade_off      Figure 7: rates that stay constant, fall slowly or fall quickly with pre-training
                 time; the noise of fine-tuning is modelled as Gaussian, of variance nu x rate

Spectrum sigma_i = scale i^-decay, fine-tuning target sigma_ft,i = ratio sigma_i for i > kept and
sigma_i up to there, both with the same singular vectors; start e^{-tau} I.
"""
