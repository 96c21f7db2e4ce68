"""Does pre-training help a learner who regularises?

Tahir et al., Features are fate, 2024 (arXiv 2410.08194) compare transfer with training from scratch
without a penalty. Here the learner from scratch has ridge regression at its best penalty. Linear
transfer, L2-SP at its best penalty and a penalty on all but the source's direction stand against
it. Risks are exact at finite n and d, beside direct solves on random data.
"""
