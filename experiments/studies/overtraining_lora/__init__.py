"""Does longer pre-training hurt low-rank adapters (LoRA) as it hurts full fine-tuning?

The networks are those of Springer et al., 2025 (arXiv 2503.19206): two linear layers, pre-trained
from e^{-tau} I. Fine-tuning trains all weights, or only an adapter s B A on W_1, from B = 0. The
study computes three results in closed form and by training:

- both losses after a fixed time of fine-tuning, by the pre-training time (A in the leading modes).
- the pre-training loss at the end of fine-tuning, by the number of learned modes (A random).
- the time until half of the change is learned, by how far one mode was pre-trained.

Loureiro et al., 2026 (arXiv 2602.02855) find in single-index models that strong pre-training makes
the search of LoRA longer. The last part shows the same for linear networks.
"""
