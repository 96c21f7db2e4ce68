"""Does ridge regularisation help linear transfer? Risk against its strength, exact and simulated.

Figure 2 of features-are-fate (arXiv 2410.08194), and what it leaves out: the paper's statement that
the best ridge is 0 (Thm 3.8) is the limit n -> inf; at every finite n the best is
(sigma^2 + sin^2 theta)/(n cos^2 theta) > 0, which matters when samples are few.
"""
