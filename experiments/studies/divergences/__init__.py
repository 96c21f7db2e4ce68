"""Does the distance between two data sets predict transfer?

The study compares transferability with three distances between the laws of (x, y) in source and
target: the KL divergence, the Wasserstein-1 distance W_1, and the Dudley metric. The subjects are
Figure 5 and Theorem 2.2 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194).

Distance alone cannot predict transfer: for one distance, the transferability T can have either
sign. It also depends on the load and on the trained layers. However, at one load, and for angles up
to 90 degrees, every distance orders T perfectly. Two effects hide this in the figure. It includes
angles beyond 90 degrees, and it estimates W_1 from samples in d dimensions. The estimate is
dominated by its own error.
"""
