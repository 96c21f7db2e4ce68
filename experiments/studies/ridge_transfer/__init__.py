"""Does ridge regularisation help linear transfer? Risk against its strength, exact and simulated.

The subject is Figure 2 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194), and what it
leaves out. The paper states that the best ridge is 0 (Thm 3.8), which is the limit n -> inf. At
every finite n the best is (sigma^2 + sin^2 theta) / (n cos^2 theta) > 0, which matters when samples
are few.
"""
