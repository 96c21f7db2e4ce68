"""Which merge has the least risk?

The answer depends on the differences between tasks, on their number, and on the noise of training.
Task vectors are Gaussian, entry by entry, in three settings ("beds"). In the first, all tasks use
all entries. In the others, each task uses a few: losses have curvature only where a task uses an
entry, or everywhere. The excess risk of averages, DARE, trimming and TIES is exact
(`theory.merging.gaussian`), at their best scale and density and at published ones. For comparison,
`sail_jax.methods` merges drawn task vectors, and their losses are measured. Two papers disagree on
the best merge. One claims that sparsifying reduces the risk (arXiv 2601.21690). Another claims that
only task arithmetic gains reliably (arXiv 2511.21437).
"""
