"""A SiT with hidden states aligned to a frozen encoder's, and its losses (SAIL, App. J).

`WAYS` lists the losses and the start of each training of the study; `training` runs them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from experiments.data.augment import Augment, augment, pixels
from experiments.studies.sail_diffusion.functions import NOTHING, Traced
from experiments.studies.sail_diffusion.sampling import interpolate


class Way(NamedTuple):
    """One kind of training: the losses added to that of the velocity, and its start.

    Attributes:
      repa: Whether REPA's loss is added.
      align: Whether the alignment loss (eq. 16) is added.
      start: Whether training starts from the weights that minimise the alignment loss (eq. 14).
      clean: Whether the alignment loss's target is the encoder's features of the data. Otherwise it
        is the features of the noised latents.
    """

    repa: bool = False
    align: bool = False
    start: bool = False
    clean: bool = False


WAYS = {
    "sit": Way(),
    "repa": Way(repa=True),
    "sail": Way(repa=True, align=True, start=True),
    "sail_clean": Way(repa=True, align=True, start=True, clean=True),
    "sail_start": Way(repa=True, start=True),
    "sail_loss": Way(repa=True, align=True),
}


class Projector(nn.Module):
    """Maps hidden states to an encoder's feature space: three layers with SiLU in between.

    The same network at every position, as in REPA.

    Attributes:
      hidden: Units of the two hidden layers.
      outputs: Units of the output, the encoder's number of features.

    References:
      Yu et al., Representation Alignment for Generation (REPA), 2024.

    >>> model = Projector(hidden=8, outputs=3)
    >>> made = jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.zeros((2, 4, 5)))
    >>> projections, params = made
    >>> projections.shape
    (2, 4, 3)
    """

    hidden: int
    outputs: int

    @nn.compact
    def __call__(self, h: Float[Array, "*n width"]) -> Float[Array, "*n outputs"]:
        for i in range(2):
            h = nn.silu(nn.Dense(self.hidden, name=f"hidden_{i}")(h))
        return nn.Dense(self.outputs, name="out")(h)


def captured(net: nn.Module, variables: PyTree, name: str, *inputs: Any) -> tuple[Array, Array]:
    """Runs a network and also returns the output of one of its submodules."""
    out, collected = net.apply(
        variables,
        *inputs,
        capture_intermediates=lambda module, _: module.name == name,
        mutable=["intermediates"],
    )
    return out, collected["intermediates"][name]["__call__"][0]  # type: ignore[return-value]


def encoded(encoder: nn.Module, variables: PyTree, x: Array) -> tuple[Array, Array]:
    """Evaluates a ViT and returns the features below its classifier."""
    return captured(encoder, variables, "ln", x)


def velocity_loss(predicted: Array, target: Array) -> Float[Array, ""]:
    """Computes the mean squared error of a velocity, in float32."""
    return jnp.mean((predicted.astype(jnp.float32) - target) ** 2)


def repa_loss(
    projected: Float[Array, "n patch d"], features: Float[Array, "n patch d"]
) -> Float[Array, ""]:
    """Computes REPA's loss: the negative mean cosine similarity, in float32.

    It returns minus the cosine averaged over examples and patches, a scalar in [-1, 1].

    References:
      Yu et al., Representation Alignment for Generation (REPA), 2024.
    """
    f32 = jnp.float32
    cosine = optax.cosine_similarity(projected.astype(f32), features.astype(f32), epsilon=1e-6)
    return -cosine.mean()


def align_loss(
    projected: Float[Array, "n patch d"],
    features: Float[Array, "n patch d"],
    *,
    summed: bool = False,
) -> Float[Array, ""]:
    """Computes the alignment loss: the mean squared distance between features, in float32.

    The mean is over examples, patches and units, as that of the velocity's loss is over entries.

    References:
      SAIL, Appendix J, eq. (16).
    """
    mean = jnp.mean((projected.astype(jnp.float32) - features) ** 2)
    return mean * (features.size // len(features)) if summed else mean


@dataclasses.dataclass(frozen=True)
class Networks:
    """The networks of one training: a SiT, its two projectors, and the frozen encoder.

    Attributes:
      sit: The SiT.
      projector: The shape of both projectors, REPA's and the alignment's, with separate weights.
      encoder: The frozen ViT, or None if the features come from a file or a function.
      blocks: Number of SiT blocks before the aligned hidden states, at least 1.
      class_drop: Fraction of examples with "no class" instead of their class, in [0, 1).
      summed: Whether the alignment loss sums over patches and units.
      given: The user's functions: `encode`, if batches are images that are not encoded yet, and
        `features`, the frozen encoder instead of a ViT.
      scale: The factor on latents for the SiT.
      bias: The term added after that.
      changes: Random changes of the images; None for none.
      noised: Whether the features of noised latents are required.
    """

    sit: nn.Module
    projector: Projector
    encoder: nn.Module | None
    blocks: int
    class_drop: float
    summed: bool = False
    given: Traced = NOTHING
    scale: float = 1.0
    bias: float = 0.0
    changes: Augment | None = None
    noised: bool = True

    def init(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> PyTree:
        """Draws initial weights."""
        keys = jax.random.split(key, 3)
        inputs = jnp.zeros((1, *shape)), jnp.zeros(1), jnp.zeros(1, jnp.int32)
        hidden = jnp.zeros((1, 1, self.sit.width))  # type: ignore[attr-defined]
        return {
            "sit": self.sit.init(keys[0], *inputs)["params"],
            "repa": self.projector.init(keys[1], hidden)["params"],
            "align": self.projector.init(keys[2], hidden)["params"],
        }

    def weights(
        self, way: Way, repa: float, align: float, *, velocity: float = 1.0
    ) -> dict[str, Array]:
        """Returns the weights of the loss terms as arrays.

        They are data, not static arguments, so that one compiled step is sufficient for all kinds
        of training. The weights of REPA's loss and of the alignment loss are 0 unless the training
        uses them.

        It returns float32 scalars: `velocity`, `repa` and `align`, and `clean`, which is 1 for
        features of the data.
        """
        repa, align = way.repa * repa, way.align * align
        values = {"velocity": velocity, "repa": repa, "align": align, "clean": way.clean}
        return {name: jnp.float32(value) for name, value in values.items()}

    def seen(self, x: Array, arrays: Sequence[Array], key: PRNGKeyArray | None = None) -> Array:
        """Computes the SiT's input: changes images at random, and encodes them.

        - `key`: the key of the changes; None changes nothing.

        It returns `scale * latent + bias` of each example, in float32; without functions and
        changes it returns `x`.
        """
        encode = self.given.bind(arrays).get("encode")
        how = self.changes if key is not None else None
        if encode is None and how is None:
            return x.astype(jnp.float32)
        images = pixels(x) if encode else (x.astype(jnp.float32) - self.bias) / self.scale
        if key is not None and how is not None:
            images = augment(images, key, how)
        latents = encode(images).astype(jnp.float32) if encode else images
        return self.scale * latents + self.bias

    def features(self, mutable: PyTree, x: Array) -> Array:
        """Evaluates the frozen encoder, the user's function or the ViT.

        - `x`: the SiT's input, or this input with noise, in float32.

        It returns the features `(n, patch, d)`.
        """
        given = self.given.bind(mutable.get("given", ())).get("features")
        if given is not None:
            return given((x - self.bias) / self.scale)
        assert self.encoder is not None
        return encoded(self.encoder, mutable["encoder"], x)[1]

    def loss(
        self, params: PyTree, mutable: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array], PyTree]:
        """Computes the training loss of eq. (15) at random times, in the trainer's form.

            velocity + w_repa * repa + w_align * align

        The time of each example is uniform in [0, 1).

        - `mutable`: `weights`, from the method `weights`; `encoder`, the encoder's variables if
          there is one; and `given`, the arrays of `given` if it has any. They do not change.

        It returns the loss, a float32 scalar; its unweighted terms by name; and `mutable`,
        unchanged.

        References:
          SAIL, Appendix J, eqs. (15) and (16).
        """
        n = len(batch["x"])
        in_t, in_noise, in_drop, in_changes = jax.random.split(key, 4)
        # The batch may be bfloat16. Noised latents and the velocity are computed in float32, and
        # only the SiT's input is cast back. The encoder's input is float32.
        x = self.seen(batch["x"], mutable.get("given", ()), in_changes)
        t = jax.random.uniform(in_t, (n,))
        z, target = interpolate(x, jax.random.normal(in_noise, x.shape), t)
        none = self.sit.classes  # type: ignore[attr-defined]
        labels = jnp.where(
            jax.random.bernoulli(in_drop, self.class_drop, (n,)), none, batch["labels"]
        )
        name = f"block_{self.blocks - 1}"
        dtype = jax.tree.leaves(params["sit"])[0].dtype
        velocity, hidden = captured(
            self.sit, {"params": params["sit"]}, name, z.astype(dtype), t, labels
        )
        clean = noised = batch["features"] if "features" in batch else self.features(mutable, x)
        if self.noised and (self.encoder is not None or "features" in self.given.names):
            noised = self.features(mutable, z)
        weights = mutable["weights"]
        projected = {
            name: jnp.asarray(self.projector.apply({"params": params[name]}, hidden))
            for name in ("repa", "align")
        }
        wanted = jnp.where(weights["clean"] > 0, clean, noised)
        terms: dict[str, Array] = {
            "velocity": velocity_loss(velocity, target),
            "repa": repa_loss(projected["repa"], clean),
            "align": align_loss(projected["align"], wanted, summed=self.summed),
        }
        total = jnp.asarray(sum(weights[term] * value for term, value in terms.items()))
        return total, terms, mutable
