"""Does pre-training help a learner who regularises?

Tahir et al., Features are fate, 2024 (arXiv 2410.08194) compare transfer with training from scratch
without a penalty. This study compares it with ridge regression from scratch at the best penalty.
Three strategies use the source: linear transfer, L2-SP at its best penalty, and a penalty on all
directions except the source's. Risks are exact at finite n and d, and are compared with direct
solves on random data.
"""
