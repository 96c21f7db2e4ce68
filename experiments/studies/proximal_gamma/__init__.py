"""Does the distance between texts predict where between two language models to start?

SAIL, Sec. 4.4 and Fig. 2: text is cut into blocks and split by their mean token value into D_1, D_2
and D_t; a GPT is trained on each source, and training on D_t starts from gamma theta_1 +
(1 - gamma) theta_2. The held-out loss on D_t against gamma after a few steps; the best gamma beside
those that eq. 11 predicts from distances between the parts, as the overlap of the sources with each
other (alpha) and with the target (beta) grows. The text is the source of Python's library.

Which distance, of which features, the paper does not say: several are shown. Nor whether the two
models have the same initial weights: both are.
"""
