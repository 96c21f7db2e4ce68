"""How should several sources be weighted, and how many directions should fine-tuning move?

The study solves linear regression on random data and compares the risks with closed forms. The
first panel compares weights of two sources: the weights with the smallest risk, SAIL's proximal
weights at expected distances, and equal weights. The second panel rotates the covariance of the
source's inputs away from the target's. The third panel fine-tunes in k directions, chosen at random
or by size.
"""
