"""Does the distance between texts predict where between two language models to start?

SAIL, Sec. 4.4 and Fig. 2: text is cut into blocks, which are split by their mean token value into
D_1, D_2 and D_t. A GPT is trained on each of two sources, made of D_1 and D_2, and training on the
target D_t then starts from gamma theta_1 + (1 - gamma) theta_2. The study measures the held-out
loss on D_t against gamma after a few steps. It compares the best gamma with those that eq. 11
predicts from distances between the parts, as the overlap of the sources with each other (alpha) and
with the target (beta) grows. The text is the source of Python's library, or in presets `paper*`
OpenWebText from files; the target can be of another text (Fig. 2d).

The paper does not say which distance it takes, of which features, so several are shown. Nor does it
say whether the two models have the same initial weights, so both cases are shown.
"""
