"""A SiT whose hidden states are aligned with a frozen encoder's, and its losses (SAIL, App. J)."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from experiments.studies.sail_diffusion.sampling import interpolate


class Way(NamedTuple):
    """What a training has of SAIL: which losses beside the velocity's, and where it starts."""

    repa: bool = False
    align: bool = False
    start: bool = False
    """From the weights that minimise the alignment loss (eq. 14)."""
    clean: bool = False
    """The alignment loss's target is of the data, not of the noised latents."""


WAYS = {
    "sit": Way(),
    "repa": Way(repa=True),
    "sail": Way(repa=True, align=True, start=True),
    "sail_clean": Way(repa=True, align=True, start=True, clean=True),
    "sail_start": Way(repa=True, start=True),
    "sail_loss": Way(repa=True, align=True),
}


class Projector(nn.Module):
    """Hidden states to an encoder's space: three layers with SiLU between (REPA, Yu et al. 2024).

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
    """The network's output, and that of its submodule `name`."""
    out, collected = net.apply(
        variables,
        *inputs,
        capture_intermediates=lambda module, _: module.name == name,
        mutable=["intermediates"],
    )
    return out, collected["intermediates"][name]["__call__"][0]  # type: ignore[return-value]


def encoded(encoder: nn.Module, variables: PyTree, x: Array) -> tuple[Array, Array]:
    """A ViT's answers, and its features [n, patch, d] before they are averaged and classified."""
    return captured(encoder, variables, "ln", x)


def velocity_loss(predicted: Array, target: Array) -> Float[Array, ""]:
    """Mean over examples and entries of the squared error."""
    return jnp.mean((predicted.astype(jnp.float32) - target) ** 2)


def repa_loss(
    projected: Float[Array, "n patch d"], features: Float[Array, "n patch d"]
) -> Float[Array, ""]:
    """Less the mean cosine over examples and patches (REPA, Yu et al. 2024)."""
    f32 = jnp.float32
    cosine = optax.cosine_similarity(projected.astype(f32), features.astype(f32), epsilon=1e-6)
    return -cosine.mean()


def align_loss(
    projected: Float[Array, "n patch d"], features: Float[Array, "n patch d"]
) -> Float[Array, ""]:
    """Eq. (16), averaged over patches and units, as the velocity's loss is over entries."""
    return jnp.mean((projected.astype(jnp.float32) - features) ** 2)


@dataclasses.dataclass(frozen=True)
class Networks:
    """A SiT, the projectors beside it, and the frozen encoder, if it can be evaluated."""

    sit: nn.Module
    projector: Projector
    encoder: nn.Module | None
    blocks: int
    """Blocks before the hidden states that are aligned."""
    class_drop: float
    """Share of examples whose class is not shown."""

    def init(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> PyTree:
        """`sit`, and the projectors `repa` and `align`, each from a key of its own."""
        keys = jax.random.split(key, 3)
        inputs = jnp.zeros((1, *shape)), jnp.zeros(1), jnp.zeros(1, jnp.int32)
        hidden = jnp.zeros((1, 1, self.sit.width))  # type: ignore[attr-defined]
        return {
            "sit": self.sit.init(keys[0], *inputs)["params"],
            "repa": self.projector.init(keys[1], hidden)["params"],
            "align": self.projector.init(keys[2], hidden)["params"],
        }

    def weights(
        self, way: Way | None, repa: float, align: float, *, clean: bool = False
    ) -> dict[str, Array]:
        """Those of the losses of a way, or of the alignment phase: data, so that one program serves
        them all."""
        if way is None:
            values = {"velocity": 0.0, "repa": 0.0, "align": 1.0, "clean": clean}
        else:
            values = {
                "velocity": 1.0,
                "repa": way.repa * repa,
                "align": way.align * align,
                "clean": way.clean,
            }
        return {name: jnp.float32(value) for name, value in values.items()}

    def loss(
        self, params: PyTree, mutable: PyTree, batch: PyTree, key: PRNGKeyArray
    ) -> tuple[Array, dict[str, Array], PyTree]:
        """Eq. (15): `mutable` holds the weights of its terms, and the encoder's variables."""
        x, n = batch["x"], len(batch["x"])
        in_t, in_noise, in_drop = jax.random.split(key, 3)
        t = jax.random.uniform(in_t, (n,))
        z, target = interpolate(x.astype(jnp.float32), jax.random.normal(in_noise, x.shape), t)
        none = self.sit.classes  # type: ignore[attr-defined]
        labels = jnp.where(
            jax.random.bernoulli(in_drop, self.class_drop, (n,)), none, batch["labels"]
        )
        name = f"block_{self.blocks - 1}"
        velocity, hidden = captured(
            self.sit, {"params": params["sit"]}, name, z.astype(x.dtype), t, labels
        )
        clean = noised = batch["features"]
        if self.encoder is not None:
            noised = encoded(self.encoder, mutable["encoder"], z)[1]
        weights = mutable["weights"]
        project = lambda which: self.projector.apply({"params": params[which]}, hidden)  # noqa: E731
        terms: dict[str, Any] = {
            "velocity": velocity_loss(velocity, target),
            "repa": repa_loss(project("repa"), clean),  # type: ignore[arg-type]
            "align": align_loss(
                project("align"),  # type: ignore[arg-type]
                jnp.where(weights["clean"] > 0, clean, noised),
            ),
        }
        total: Any = sum(weights[term] * value for term, value in terms.items())
        return total, terms, mutable
