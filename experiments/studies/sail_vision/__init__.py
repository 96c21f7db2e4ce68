"""Does SAIL's start speed up the training of a vision network, with labels and without?

The study repeats the vision experiments of SAIL (Structured-Initialization Learning), Section 4.5.
A ResNet is trained with labels, and without them by BYOL (Grill et al., 2020). It starts from
SAIL's combination of two smaller networks, from scratch, or from other transformations and merges
of the same two. The small networks were trained in the same way as the large one, each on some of
the classes. The start `other` uses small networks that were trained in the other way. The weights
of SAIL's merge come from its Theorem 3, with total variation distances between the labels of the
parts and of the whole.

SAIL specifies the networks and the data (ResNet-18 and -34, standard and modified; CIFAR-10,
CIFAR-100 and Tiny ImageNet) and shows accuracy curves without figures. It specifies neither the
sources of the start nor schedules, augmentations or baselines. In the `paper` presets, the usual
choices for CIFAR are made: sources of half the width, grown by interpolation; 200 epochs of SGD
with cosine decay; BYOL with its paper's augmentations and target decay, but smaller projections. In
the default preset, the learning rates, BYOL's target decay and the augmentations performed best
from scratch among a few. SAIL's transformation performed best among random embeddings, embeddings
of singular vectors and interpolation. All of this was chosen with other seeds.
"""
