"""Does longer pre-training hurt low-rank adapters (LoRA) as it hurts full fine-tuning?

Springer et al., 2025 (arXiv 2503.19206), have these networks: two linear layers, pre-trained from
e^{-tau} I. Instead of all weights, an adapter s B A on W_1 can be fine-tuned, from B = 0. The
study computes in closed form, and by training, three things:

- both losses after a fixed time of fine-tuning, by the pre-training time (A in the leading modes);
- the pre-training loss at the end of fine-tuning, by the number of learned modes (A random);
- the time until half of the way, by how far one mode was pre-trained.

Loureiro et al., 2026 (arXiv 2602.02855) find in single-index models that strong pre-training makes
the search of LoRA longer. The last part shows the same of linear networks.
"""
