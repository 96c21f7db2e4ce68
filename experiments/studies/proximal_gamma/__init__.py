"""Does the distance between texts predict the best initial weights between two language models?

The study repeats SAIL, Sec. 4.4 and Fig. 2. Text is cut into blocks, which are split by their mean
token value into D_1, D_2 and D_t. A GPT is trained on each of two sources, made from D_1 and D_2.
Training on the target D_t then starts from gamma theta_1 + (1 - gamma) theta_2. The study measures
the held-out loss on D_t against the weight gamma after a few steps. It compares the best gamma with
the predictions of eq. 11, from distances between the parts. The overlap of the sources with each
other (alpha) and with the target (beta) varies. The text is the source of Python's library, or in
presets `paper*` OpenWebText from files. The target can be another text (Fig. 2d).

The paper does not specify the distance or its features, so several are shown. It also does not
specify whether the two models have the same initial weights, so both cases are shown.
"""
