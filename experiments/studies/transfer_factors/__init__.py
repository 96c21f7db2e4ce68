"""How do the inputs' spectrum, training time and the source data change transfer?

Phase diagrams over the load gamma = n/d and one more factor, at a fixed angle between the tasks,
past what features-are-fate (arXiv 2410.08194) could draw:

  spectrum  inputs with power-law eigenvalues i^-value; deterministic equivalents
  time      training stopped at t = value; the two-point equivalent (one layer)
  source    pretraining on value * d samples; limits of the law of the fitted source

Theory beside a simulation of the same data. Preset `early_stopping` asks what stopping does to
fine-tuned two-layer networks near n = d, where the paper's own points are not converged: theory
there is the limit t -> inf alone.
"""
