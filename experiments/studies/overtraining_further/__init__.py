"""What moves the time after which more pre-training hurts, and what comes afterwards?

The study extends Springer et al., Overtrained Language Models Are Harder to Fine-Tune, 2025 (arXiv
2503.19206), with two-layer linear networks. Theory only has the modes; simulations have whole
weight matrices. There are five parts:

  decay  Gaussian noise follows pre-training: the number of modes worth learning, and the best time
         to stop, by the decay of the spectrum
  turned the best time for a target with U != V, if both layers begin as e^-tau I
  bits   the weights are rounded to b bits: the best time, and the increase of the loss by rounding
         along pre-training, compared with independent uniform errors
  sam    pre-training by sharpness-aware minimisation: the times when modes are learned, without
         normalisation; and the imbalance a^2 - b^2 of modes at a minimum, with it
  labels pre-training with noise on the labels: the trace of the Hessian by the schedule of the
         learning rate, and by how much a decay raises the curvature of one balanced mode

The singular values are scale i^-decay, or `sigma`. In mirrored layers, W_2 is the transpose of W_1.
a and b are the singular values of W_1 and W_2.
"""
