"""Does SAIL's start, between models trained on other texts, save training steps?

The study repeats Section 4.4 and Appendix I of SAIL (Structured-Initialization Learning). The
blocks of a text are divided by their mean token value into D_1, D_2 and D_t. GPTs are trained on
D_1 and on D_2. Training on D_t then starts from gamma theta_1 + (1 - gamma) theta_2. The weight
gamma comes from eq. 11 and distances between the texts, or minimises the held-out loss before
training. The study compares this with trainings on the same minibatches: from scratch, from LiGO
(Wang et al., 2023), from the uniform and the greedy soup (Wortsman et al., 2022), and from SAIL
between a shallower and a narrower source that are grown. The mean of several checkpoints of one
run, such as OLMo's, is compared with the last of them. Eq. 3 defines gamma by the loss after
training. Its loop, which retrains for every gamma, is a further method to choose it.

With checkpoints on disk (GPT-2, Llama or OLMo of Hugging Face), the study merges them and asks them
questions. With `retrain`, training continues from them: the columns of Table 2, with its six
benchmarks, and the perplexities during training of Figure 7.

The paper leaves some choices open. LiGO's source is the narrow one, trained on D_2, which is closer
to D_t than D_1. `source.start` decides whether sources have the same initial weights.
`weight.distance` selects the features of the distance. By default sources are trained for as many
steps as the target. Sources of other shapes are grown to the target's by the method `grow`. Weights
are chosen on text that is not used for results. Table 1 does not specify the model. Its rate and
warm-up are OLMo-1B's, so it is interpreted as OLMo-1B's. For nanoGPT's training, only the network
and the data are specified. The paper's questions must be given as files. Offline, there are
questions on how held-out text continues, and generated arithmetic, which is at chance for networks
that were not trained on it.
"""
