"""Where between two models should training start, on two spirals?

SAIL, App. K: theta_1 and theta_2 are trained on parts of the spirals, and training on all of them
then starts from gamma theta_1 + (1 - gamma) theta_2. The study measures loss, accuracy and norm of
the gradient against gamma, before training and along it. It compares the best gamma with those that
SAIL predicts from distances of the data (eq. 11), from the parameters (eq. 4) and from the loss
(eq. 3).

Two things that the paper leaves open are varied. The first is how sources are made. The paper's
"points exclusively from the first spiral" make sources of one class each; sources cut by radius
know both classes, and random ones are all alike. The second is whether the two models start from
the same initial weights or each from its own.
"""
