"""How does a merge change with the steps, batch, rate, samples and tasks of its experts?

Unified merging (arXiv 2601.21690) reads laws of each off a bound on the excess risk of the merged
model. Here each is swept about one centre, at the same values twice. On quadratic losses, where the
excess, the stability and the bound are exact, beside SGD on drawn data. And on networks: one is
pre-trained on upright handwritten digits, copies are fine-tuned by SGD on rotations and classes of
them and merged by averaging, TIES (Yadav et al. 2023), DARE (Yu et al. 2024) and AdaMerging (Yang
et al. 2024), which sees the inputs of the test without labels, as its authors have it. The
stability of Definition 2 is measured, not bounded: every expert has a twin that saw the same
batches with one sample replaced.
"""
