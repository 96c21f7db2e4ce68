"""Does SAIL's start, between models trained on other texts, save training a language model?

The study repeats Section 4.4 and Appendix I of SAIL (Structured-Initialization Learning). The
blocks of a text are divided by their mean token value into D_1, D_2 and D_t. GPTs are trained on
D_1 and on D_2. One on D_t then starts from gamma theta_1 + (1 - gamma) theta_2. The weight gamma
comes from eq. 11 and distances between the texts, or is the one of least held-out loss before
training. Other trainings see the same minibatches: from scratch, from LiGO (Wang et al., 2023),
from the uniform and the greedy soup (Wortsman et al., 2022), and from SAIL between a shallower and
a narrower source that are grown. The mean of several checkpoints of one run (as of OLMo's) is
compared with the last of them. Eq. 3 defines gamma by the loss after training: its loop, which
retrains for every gamma, is a further way to choose it.

Checkpoints on disk (GPT-2, Llama or OLMo of Hugging Face) are merged and asked questions, and if
wanted training goes on from them: the columns of Table 2, with its six benchmarks and the
perplexities along training that Figure 7 has.

The paper leaves some choices open. LiGO's source is here the narrow one, trained on D_2, which is
nearer to D_t than D_1 is. Whether sources share their initial weights is `source.start`. Which
features the distance is of is `weight.distance`. Sources are trained for as many steps as the
target by default. Sources of other shapes are grown to the target's by the method `grow`. Weights
are chosen on text that nothing is judged on. Table 1 names no model; it is taken for OLMo-1B's,
whose rate and warm-up it has, so that of nanoGPT's training only the network and the data are
printed. The paper's questions have to be given as files; offline, held-out text asks how it goes
on, and generated arithmetic is at chance for networks that have seen none.
"""
