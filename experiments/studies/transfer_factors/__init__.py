"""How do the inputs' spectrum, training time and the source data change transfer?

The study draws phase diagrams over the load n/d and one more factor, at a fixed angle
between the tasks. They go beyond Tahir et al., Features are fate, 2024 (arXiv 2410.08194):

  spectrum  inputs with power-law eigenvalues i^-value; deterministic equivalents
  time      training stopped at t = value; the two-point equivalent (one layer)
  source    pretraining on value * d samples; limits of the law of the fitted source

Theory stands beside means over random data. Those of fine-tuning are of the estimator, whose scale
is that of theory, except where training time varies: there gradient flow is solved numerically.
Preset `early_stopping` asks what stopping does to fine-tuned two-layer networks near n = d, where
the paper's own points are not converged; theory there is the limit t -> inf alone.
"""
