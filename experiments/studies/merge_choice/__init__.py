"""Which merge has the least risk, by how far tasks differ, their number, and the noise of training?

Task vectors are Gaussian, entry by entry, on three beds. On the first all tasks use all entries. On
the others each uses a few: losses have curvature where a task uses an entry, or everywhere. The
excess risk of averages, DARE, trimming and TIES is exact (`theory.merging.gaussian`), at their best
scale and density and at published ones. Beside it drawn task vectors are merged by
`sail_jax.methods`, and their losses are measured. Two papers disagree on what wins. One has it that
sparsifying reduces the risk (arXiv 2601.21690), another that task arithmetic alone gains reliably
(arXiv 2511.21437).
"""
