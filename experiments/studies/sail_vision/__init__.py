"""Does SAIL start the training of a vision network well, with labels and without?

The study repeats the vision experiments of SAIL (Structured-Initialization Learning), Section 4.5.
A ResNet is trained with labels, and without them by BYOL (Grill et al., 2020). It starts from
SAIL's combination of two smaller networks, from scratch, and from what other transformations and
merges make of the same two. The small networks were trained in the same way as the large one, each
on some of the classes. The start `other` takes small networks that were trained in the other way.
The weights of SAIL's merge are those of its Theorem 3, from total variation distances between the
labels of the parts and of the whole.

SAIL prints the networks and the data (ResNet-18 and -34, standard and modified; CIFAR-10, CIFAR-100
and Tiny ImageNet) and accuracy curves without figures. It prints neither the sources of the start
nor schedules, augmentations or baselines. Those of the `paper` presets are chosen here, as is usual
for CIFAR: sources of half the width, grown by interpolation; 200 epochs of SGD with cosine decay;
BYOL with its paper's augmentations and target decay, but smaller projections. Of the default
preset, the learning rates, BYOL's target decay and the augmentations are those that did best from
scratch among a few. SAIL's transformation is the one that did best among random embeddings,
embeddings of singular vectors and interpolation. All of this was chosen with other seeds.
"""
