"""Does SAIL's start, between models trained on other texts, save training a language model?

SAIL, Sec. 4.4 and App. I: a text is split by the mean token value of its blocks into D_1, D_2 and
D_t; GPTs are trained on D_1 and D_2, and one on D_t starts from gamma theta_1 + (1 - gamma)
theta_2, with gamma by eq. 11 from the distances between the texts, or by the held-out loss before
training. Beside it, on the same minibatches: training from scratch, LiGO (Wang et al. 2023), the
uniform and the greedy soup (Wortsman et al. 2022), and SAIL from a narrower and a shallower source
that are grown. Also the mean of several checkpoints of one run (as of OLMo's) beside the last.

What the paper leaves open: LiGO's source (here the narrow one, of D_2, which is nearer D_t), if
sources share their initial weights (`source.start`), which features the distance is of
(`weight.distance`), how many steps sources take (here as many as the target). Sources of other
shapes are brought to the target's by the `grow` method. Weights are chosen on text that nothing is
judged on. Its questions come as files; offline, held-out text asks how it goes on, and generated
arithmetic is at chance for networks that have seen none.
"""
