"""Does aligning a SiT with a frozen encoder, and starting it aligned, speed up its training?

SAIL's Appendix J trains a SiT (Ma et al. 2024) for the velocity of noised latents z_t, adds REPA's
loss (Yu et al. 2024) and an alignment loss (eqs. 15-16), and starts from the weights that minimise
the latter alone (eq. 14). Here that is done on scikit-learn's digits, each image its own latent, or
on latents by path. Samples are measured against held-out images in the features of a classifier
trained on the data at hand, in place of Inception: so no value compares with a printed FID. Beside
them stands what the training images themselves score.

What the paper leaves open, and what is chosen here:

- f_P(z_t), the target of eq. (16): as printed, the frozen encoder's features of the noised latents
  (`sail`), where it can be evaluated there; or those of the data, as in REPA (`sail_clean`), the
  only ones that features by path can give. The norm is averaged over patches and units.
- f_A: three layers, a projector of its own beside REPA's; both read the states after
  `alignment.layer` blocks (REPA has 4 of B/2's 12).
- Eq. (14): a SiT of the target's shape, trained from its usual initial weights on the alignment
  loss alone, with the same optimiser, over times uniform in [0, 1], for `alignment.steps`, of which
  the paper says nothing. What it does not reach, later blocks and the velocity's head, stays
  initial; moments and averages begin again. `saved` counts these steps, the table of the paper
  does not.
- The encoder, frozen: a ViT classifier of the SiT's own sizes, trained on the images that the SiT
  learns from; the measuring classifier is a ResNet trained on all images.
- Averaged weights are sampled, by the flow or the reverse diffusion, without guidance.
- On digits the rate is the best of 1e-3, 4e-3 and 1e-2 for plain SiT (at 800 steps, 2 seeds).
"""
