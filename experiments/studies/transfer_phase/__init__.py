"""When does transfer beat training from scratch? Phase diagrams over load and angle.

Figures 1, 3, 6 and 7 of features-are-fate (arXiv 2410.08194): transferability of linear transfer
and of fine-tuning over (gamma = n/d, theta), closed form beside simulation, with the line on which
transfer neither helps nor hurts (in the limit n, d -> inf). Linear transfer: exact at finite n and
d. Fine-tuning: the limit, with the depth- and noise-dependent correction of Thm 3.9. Past the
figures: the diagram for every depth from 1 to infinity, and for noise from none to as much as
signal. The paper's figures train networks, which `train` adds: closed form, estimator (where
training ends) and network at the same points, and what sets the last two apart.
"""
