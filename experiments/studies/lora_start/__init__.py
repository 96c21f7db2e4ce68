"""How do the rank and the scale of a random A determine what LoRA learns, and how fast?

Adapters start from B = 0 and a Gaussian A, the usual start. The networks are linear, so that one
direction has a closed form. The study trains adapters by gradient flow and compares:

- the learned part of one direction over time, for small and large rows of A;
- the time until half of a direction is learned, by the squared norm of the rows and by the rank;
- the same time for several directions that are learned together, by their singular values;
- which of two layers moves if both have adapters.
"""
