"""Does SAIL start the training of a vision network well, with labels and without?

Past SAIL (Section 4.5), whose experiments these are: a ResNet is trained with labels, and by BYOL
(Grill et al. 2020) without, from SAIL's start, from scratch, and from what other transformations
and merges make of the same two smaller networks. These were trained in the same way, each on some
classes of the data; `other` starts from those trained in the other way. Weights of the merge are
those of Theorem 3, from total variation distances between the labels of the parts and the whole.

SAIL prints the networks and the data (ResNet-18 and -34, standard and modified; CIFAR-10, CIFAR-100
and Tiny ImageNet) and accuracy curves without figures. It prints neither the sources of the start
nor schedules, augmentations or baselines: those of the `paper` presets are chosen here. Networks
half as wide are grown by interpolation; 200 epochs of SGD with cosine decay, and BYOL with its
paper's augmentations and target decay but smaller projections, are what CIFAR commonly gets. Of the
default preset, rates, BYOL's target decay and augmentations were chosen from a few, by what did
best from scratch, and SAIL's transformation by what did best of random embeddings, embeddings of
singular vectors and interpolation; all with other seeds.
"""
