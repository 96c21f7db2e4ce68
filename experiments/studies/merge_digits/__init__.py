"""Which merge keeps the experts' skills, on real data?

A network is pre-trained on upright handwritten digits. Copies of it are fine-tuned on tasks made
from the same digits: rotations of all of them, or some of the classes. The copies are merged by a
uniform soup (Wortsman et al. 2022), by task arithmetic (Ilharco et al. 2023) and by TIES (Yadav et
al. 2023). The scales of the last two are chosen on held-out images. The study compares the measured
accuracy with the prediction of cross-task linearity (arXiv 2402.03660): adding weights acts like
adding outputs.
"""
