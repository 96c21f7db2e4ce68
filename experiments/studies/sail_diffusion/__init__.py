"""Does aligning a SiT with a frozen encoder, and starting it aligned, speed up its training?

SAIL's Appendix J trains a SiT (Ma et al. 2024) to predict the velocity of noised latents z_t. It
adds REPA's loss (Yu et al. 2024) and an alignment loss (eqs. 15-16), and starts from weights that
minimise the alignment loss alone (eq. 14). This study does the same on scikit-learn's digits, where
each image is its own latent, on latents from files, or on images in folders, which are encoded in
every step. Samples are compared with held-out images in the features of a classifier that is
trained on the same data. This classifier replaces Inception, so values cannot be compared with a
published FID. For comparison, the training images are scored in the same way.

The study also accepts the user's functions (`--functions.encode MODULE:FUNCTION` and others, or
callables in Python). An autoencoder converts images to latents and back, an encoder such as DINOv2
computes features of latents, and a network such as Inception measures images. Only the command line
and Python can give functions. Text in a config is never converted to a function.

The paper leaves some points open. The choices here are:

- f_P(z_t), the target of eq. (16): as printed, it is the frozen encoder's features of the noised
  latents (`sail`). This requires an encoder that can be evaluated: the one trained here, or
  `functions.features`. The alternative (`sail_clean`) uses the features of the data, as REPA does.
  Features from a file only allow this alternative. The squared norm is averaged over patches and
  units; preset `paper_eq16` sums it, as printed.
- f_A: a projector of three layers, separate from REPA's. Both read the hidden states after
  `alignment.layer` blocks (REPA: 4 of B/2's 12).
- Eq. (14): a SiT of the target's shape is trained from its usual initial weights on the alignment
  loss alone, for `alignment.steps` steps, with the same optimiser and with times uniform in [0, 1].
  The paper does not specify the number of steps. Weights without influence on this loss (later
  blocks and the velocity's head) keep their initial values. Optimiser moments and weight averages
  are reset afterwards. `saved` counts these steps; the paper's table does not.
- Flips and crops (J.4) apply to the images, before they are encoded (`changes`, which requires
  images: the digits or `data.name` image-folders). The paper does not specify their frequency and
  extent. Measured images are not changed.
- The frozen encoder: a ViT classifier of the SiT's own sizes, trained on the SiT's training images.
  The measuring classifier is a ResNet trained on all images.
- Samples are made with the averaged weights, along the flow or by the reverse diffusion, without
  guidance.
- On digits the learning rate is the best of 1e-3, 4e-3 and 1e-2 for plain SiT (at 800 steps, 2
  seeds).
"""
