"""Can averaging the checkpoints of a run at a constant rate replace decaying the rate?

A GPT on the source text of Python's standard library and a ResNet on scikit-learn's digits are
trained at a constant learning rate. Averages of their last checkpoints are compared with runs that
decay the rate over the same window. Both use the same minibatches and the same number of steps. A
noisy quadratic predicts the decayed runs (`theory.merging.averaging`). It is fitted only to the
constant run and its averages, on half of the held-out examples. Windows are also chosen on this
half. All other measurements use the other half.
"""
