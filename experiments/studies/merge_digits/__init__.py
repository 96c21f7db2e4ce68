"""Which merge keeps what the experts know, on real data?

A network is pre-trained on upright handwritten digits and copies of it are fine-tuned on tasks made
of the same digits: rotations of all of them, or some of the classes. The copies are merged by a
uniform soup (Wortsman et al. 2022), by task arithmetic (Ilharco et al. 2023) and by TIES (Yadav et
al. 2023), whose scale is chosen on held-out images. The prediction beside the measurement is
cross-task linearity (arXiv 2402.03660): weights that are added act as if the outputs were added.
"""
