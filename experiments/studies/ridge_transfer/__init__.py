"""Does ridge regularisation help linear transfer?

The study computes the risk of linear transfer against the strength of a ridge penalty. It compares
the exact mean risk with simulated data sets. The subject is Figure 2 of Tahir et al., Features are
fate, 2024 (arXiv 2410.08194), and a case that is not in the paper. The paper states that the best
ridge is 0 (Thm 3.8), which is the limit n -> inf. At every finite n the best ridge is (sigma^2 +
sin^2 theta) / (n cos^2 theta) > 0. This matters when samples are few.
"""
