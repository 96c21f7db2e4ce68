"""How does a merge change with the steps, batch, rate, samples and tasks of its experts?

Unified merging (arXiv 2601.21690) derives a law for each of these from a bound on the excess risk
of the merged model. The study varies each of them around a common centre, in two testbeds with the
same values. The first testbed has quadratic losses: excess risk, stability and bound are exact, and
SGD on drawn data is simulated for comparison. The second has networks: one is pre-trained on
upright handwritten digits, and copies are fine-tuned by SGD on rotations and classes of them. They
are merged by averaging, TIES (Yadav et al. 2023), DARE (Yu et al. 2024) and AdaMerging (Yang et al.
2024). As in its authors' code, AdaMerging uses the test inputs without labels. The stability of
Definition 2 is measured, not only bounded: every expert has a twin that is trained on the same
batches with one sample replaced.
"""
