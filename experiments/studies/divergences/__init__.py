"""Does the distance between two data sets predict transfer?

The subject is Figure 5 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194): transferability
against the KL divergence and the Wasserstein-1 distance between the laws of (x, y), and against the
Dudley metric of its Theorem 2.2.

Distance alone cannot predict it: at one distance the transferability T has either sign, depending
on the load and on what is trained. But at one load, and for angles up to 90 degrees, every distance
orders T perfectly. Two things hide this in the figure: angles beyond 90 degrees, and an estimate of
W_1 from samples in d dimensions, which mostly shows its own error.
"""
