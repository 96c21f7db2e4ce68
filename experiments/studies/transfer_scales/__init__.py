"""When do features stop being fate? Transfer by the scale of the layers, from rich to lazy.

The subject is what Tahir et al., Features are fate, 2024 (arXiv 2410.08194), leave out: weights
that are not small, and layers of unequal size. Diagonal networks have sparse tasks, and the source
shares some of their features. Two layers have the paper's tasks. Theory is drawn with averages over
data sets of the predictor at which gradient flow ends.
"""
