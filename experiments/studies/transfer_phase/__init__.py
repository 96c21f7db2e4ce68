"""When does transfer beat training from scratch? Phase diagrams over load and angle.

The subject is Figures 1, 3, 6 and 7 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194):
the transferability of linear transfer and of fine-tuning over the load n/d and the angle
theta. Two maps stand side by side: the closed form, and means over random data. The line on which
transfer neither helps nor hurts is dashed in closed form, and solid as measured. The closed form of
linear transfer is exact at finite n and d; its data are fitted by least squares. The closed form of
fine-tuning is a limit, with the correction of Thm 3.9, which depends on depth and noise. Its data
are fitted by the estimator with the same correction: that map shows how fast the limit is reached,
and is no test of the correction. Gradient flow (`flowed`) and trained networks are.

Beyond the figures there are diagrams for every depth from 1 to infinity, and for noise from none to
as much as signal. The paper's figures train networks, which the option `train` adds: closed form,
estimator (where training ends) and network at the same points, and what sets the last two apart.
The networks begin with normal weights, as the paper's do (App. D.1), which break the assumption
(22) of its theorems; `networks.orthogonal` trains some beside them that satisfy it.
"""
