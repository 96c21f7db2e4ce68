"""Does averaging the checkpoints of a run at a constant rate stand in for decaying that rate?

A GPT on the source text of Python's standard library and a ResNet on scikit-learn's digits are
trained at a constant learning rate. Averages of their last checkpoints are compared with runs that
decay the rate over the same window. Both see the same minibatches and take as many steps. A noisy
quadratic predicts the decayed runs (`theory.merging.averaging`). It is fitted to the constant run
and its averages alone, on half of the held-out examples, where windows are chosen, too. All else is
measured on the other half.
"""
