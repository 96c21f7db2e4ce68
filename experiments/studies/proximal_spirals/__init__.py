"""Where between two models should training start, on two spirals?

SAIL, App. K: theta_1 and theta_2 are trained on parts of the spirals, and training on all of them
starts from gamma theta_1 + (1 - gamma) theta_2. Loss, accuracy and norm of the gradient against
gamma, before training and along it; the gamma that SAIL predicts from distances of the data (eq.
11), from the parameters (eq. 4) and from the loss (eq. 3), beside the one that is best.

Two things the paper leaves open are shown side by side. "Points exclusively from the first spiral"
make sources of one class each; sources cut by radius know both classes, and random ones are all
alike. And the two models may start from the same initial weights or each from its own.
"""
