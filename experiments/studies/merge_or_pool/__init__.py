"""Is it better to merge experts or to train on the pooled data?

Experts are linear regressions, each fitted to its own data. Inputs are correlated. The study
compares averaged experts with training on the pooled data, by the size of the data and by the
spread of the teachers: without penalties, where theory is exact, and with the best penalties and
the best scale. In the last panel, tasks have different curvatures, and three weights are compared.
"""
