"""When does transfer beat training from scratch?

The study draws phase diagrams over the load n/d and the angle theta between the tasks. The subject
is Figures 1, 3, 6 and 7 of Tahir et al., Features are fate, 2024 (arXiv 2410.08194): the
transferability of linear transfer and of fine-tuning. Two maps are shown side by side: the closed
form, and means over random data. On the dashed line the closed form predicts no gain and no loss;
the solid line is the measured one. The closed form of linear transfer is exact at finite n and d,
and its data are fitted by least squares. The closed form of fine-tuning is a limit, with the
correction of Thm 3.9, which depends on depth and noise. The estimator that is fitted to its data
has the same correction. Its map shows how fast the limit is reached, but does not test the
correction. Gradient flow (`flowed`) and trained networks do test it.

Beyond the figures there are diagrams for every depth from 1 to infinity, and for noise levels from
none to as large as the signal. The paper's figures train networks. The option `train` adds them: it
compares closed form, estimator (the end of training) and network at the same points, and splits the
difference between the last two by cause. The networks start with normal weights, as in the paper
(App. D.1). These violate the assumption (22) of its theorems. `networks.orthogonal` also trains
some that satisfy it.
"""
