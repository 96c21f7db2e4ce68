"""Where between two models should training start, on two spirals?

The study repeats SAIL, App. K. theta_1 and theta_2 are trained on parts of the spirals. Training on
the whole spirals then starts from gamma theta_1 + (1 - gamma) theta_2. The study measures loss,
accuracy and norm of the gradient against the weight gamma, before and during training. It compares
the best gamma with SAIL's predictions from distances of the data (eq. 11), from the parameters (eq.
4) and from the loss (eq. 3).

The study varies two choices that the paper leaves open. The first is the construction of the
sources. The paper's "points exclusively from the first spiral" give sources with one class each;
sources cut by radius contain both classes, and random ones are statistically equal. The second is
whether the two models have the same initial weights or different ones.
"""
