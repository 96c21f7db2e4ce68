"""Does theory predict, before training, which use of a source is best, and which merge?

The study draws settings at random: the number of samples, the classes with another label than in
the source's task, a shift of the inputs, label noise and the size of the source's data. In each
setting it trains small networks on images (an MLP) or on a text (a GPT) from scratch, from the last
layer alone, by fine-tuning and by L2-SP. In further settings it merges experts. Before that, theory
gets the source and the training samples only, and states the probability that each choice has the
least test loss. The study compares these forecasts with two rules: the most frequent winner of the
other settings, and always the same choice (fine-tuning, or averaging).
"""
