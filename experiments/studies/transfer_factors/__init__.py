"""How do the inputs' spectrum, training time and the source data change transfer?

The study draws phase diagrams over the load n/d and one more factor, at a fixed angle between the
tasks. They go beyond Tahir et al., Features are fate, 2024 (arXiv 2410.08194):

  spectrum  inputs with power-law eigenvalues i^-value; theory: deterministic equivalents
  time      training stopped at t = value; theory: the two-point equivalent (one layer)
  source    pretraining on value * d samples; theory: limits of the law of the fitted source

Theory is compared with means over random data. For fine-tuning the means are of the estimator, with
theory's scale. For the factor `time`, gradient flow is solved numerically instead. The preset
`early_stopping` tests how stopping changes fine-tuned two-layer networks near n = d. The paper's
own points are not converged there, and the only theory is the limit t -> inf.
"""
