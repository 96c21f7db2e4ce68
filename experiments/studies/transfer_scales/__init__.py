"""When do features stop being fate?

The study measures transfer against the scale of the layers, from rich to lazy training. It covers
two cases that Tahir et al., Features are fate, 2024 (arXiv 2410.08194), do not consider: weights
that are not small, and layers of unequal size. Diagonal networks have sparse tasks, where the
source shares some of the target's features. Two layers have the paper's tasks. Theory is compared
with averages over data sets of the predictor at which gradient flow ends.
"""
