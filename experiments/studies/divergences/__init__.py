"""Does the distance between two data sets predict transfer?

Figure 5 of features-are-fate (arXiv 2410.08194): transferability against the KL divergence and the
Wasserstein-1 distance of the laws of (x, y), and the Dudley metric of its Theorem 2.2. The distance
alone cannot: at one distance T has either sign, by load and by what is trained. But at one load and
for angles up to 90 degrees every distance orders T perfectly; what hides it in the figure are
angles beyond, and an estimate of W_1 from samples in d dimensions, which shows its own error.
"""
