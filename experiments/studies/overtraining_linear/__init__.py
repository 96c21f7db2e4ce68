"""When does more pre-training hurt two-layer linear networks, solved and trained?

The theory comes from Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025
(arXiv 2503.19206). The study maps the pre-training loss after a perturbation or after fine-tuning,
over the pre-training time and one more quantity. Each map is drawn twice: in closed form, and from
networks trained by stochastic gradient descent. A line marks the time after which more pre-training
hurts (Definition 4.2, in continuous time). The diagrams are:

  perturbation   Gaussian noise of size gamma on the weights (Proposition 4.3, Theorem 4.4)
  learning_rate  fine-tuning for a number of steps, by the learning rate (Theorem 4.6)
  anchor         fine-tuning with the penalty lambda |theta - theta(0)|^2 (Theorem 4.7)
  misalignment   the decay of the spectrum against sigma_ft / sigma_pre: the cost of the last of
                 pre-training, which is the loss at its end minus the least loss before
  sensitivity    the increase of the loss by noise gamma, its quadratic prediction gamma^2 tr(H)/2
                 (Proposition D.1), and the curvature H along pre-training
  trade_off      Figure 7: learning rates that stay constant, fall slowly or fall quickly with the
                 pre-training time; the noise of fine-tuning is modelled as Gaussian, with a
                 variance of nu times the learning rate

The pre-training task has singular values sigma_i = scale i^-decay. The fine-tuning task has the
same singular vectors. Its singular values are sigma_i for i <= kept, and ratio sigma_i beyond.
Both layers start at e^{-tau} I.
"""
