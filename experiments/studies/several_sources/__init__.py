"""How should several sources be weighed, and how many directions should fine-tuning move?

Linear regression, solved on random data, beside closed forms. The first panel compares weights of
two sources: those of least risk, SAIL's proximal weights at expected distances, and equal ones. The
second turns the covariance of the source's inputs away from the target's. The third fine-tunes in
k directions, at random or in an order.
"""
