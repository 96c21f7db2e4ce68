"""Settings of language models, for the studies that pre-train or read one."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import jax
from annotated_types import Ge
from pydantic import AfterValidator

from experiments.data import text
from experiments.lab.config import Natural, config
from experiments.models import presets
from experiments.studies.shared import language_training as training
from experiments.studies.shared.checking import must
from experiments.training.mup import Scales, scales
from sail_jax import architectures
from sail_jax.basis.spaces import Spec


@config
class Model:
    """The network: a preset, or OLMo's architecture with the sizes below.

    OLMo's architecture has LayerNorm without parameters, and tied embeddings.
    """

    preset: Annotated[str, AfterValidator(presets.of_type("flax_llama"))] | None = None
    """A network of `experiments.models.presets`, such as 'olmo-30m'; None for the sizes below."""
    context: Annotated[int, Ge(2)] = 32
    """Length of the network's context in tokens, also for a preset."""
    width: Natural = 16
    """Units of the residual stream."""
    layers: Natural = 2
    """Transformer blocks."""
    heads: Natural = 2
    """Attention heads; they divide the width."""
    hidden: Natural = 48
    """Units of an MLP."""
    mup: Natural | None = None
    """Width from which initial scales and learning rates are transferred to the network's width by
    the maximal update parametrisation (muP); None for the standard one. Heads keep their size."""

    def __post_init__(self) -> None:
        if self.preset is None:
            even = self.width % (2 * self.heads) == 0
            must(self, "heads", even, f"divide width = {self.width} into heads of an even size")
        else:
            most = presets.config(self.preset)["context"]
            few = self.context <= most
            must(self, "context", few, f"be at most {most}, the positions of {self.preset}")
        if self.mup is None:
            return
        sizes = self.network()
        for name in ("heads", "hidden"):
            whole = sizes[name] * self.mup % sizes["width"] == 0
            of = f"whole {name}, of {sizes[name]} at width {sizes['width']}"
            must(self, "mup", whole, f"leave {of}")

    def network(self, dropout: float | None = None) -> dict[str, Any]:
        """Returns the configuration of the network.

        Args:
          dropout: The dropout of a preset; None keeps the preset's own. Without a preset there is
            no dropout.

        Returns:
          The configuration for `experiments.models.presets.build`.
        """
        if self.preset is not None:
            own = presets.config(self.preset, **({} if dropout is None else {"dropout": dropout}))
        else:
            own = self._sizes()
        # Tied embeddings have the scale of an input. The growth of the width divides their logits.
        grown = self.mup is not None and own["tied"]
        return {**own, **({"logit_scale": self.mup / own["width"]} if grown else {})}

    def _sizes(self) -> dict[str, Any]:
        """Returns the configuration of the network without a preset."""
        return {
            "model_type": "flax_llama",
            "vocab": text.VOCAB,
            "context": self.context,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.width // self.heads,
            "hidden": self.hidden,
            "tied": True,
            "norm": "layernorm",
        }

    def parametrisation(self) -> tuple[Scales, ...]:
        """Computes the scales of initial parameters and learning rates.

        Returns:
          The scales of each parameter by muP; empty for the standard parametrisation.
        """
        if self.mup is None:
            return ()
        own = self.network()
        part = {name: own[name] * self.mup // own["width"] for name in ("width", "heads", "hidden")}
        base, spec = (_spec(sizes) for sizes in ({**own, **part}, own))
        return scales(base, spec)


def _spec(sizes: dict[str, Any]) -> Spec:
    """Returns the feature space of each axis of a network's parameters."""
    shapes = jax.eval_shape(partial(training.first, presets.build(sizes)), jax.random.key(0))
    return architectures.of(sizes).rules(sizes).spec(shapes)


@config
class Memory:
    """Computations that are split into parts, to save memory."""

    together: Natural | None = None
    """Maximum number of networks trained side by side; None for all of a budget or task."""
    at_once: Natural = 16
    """Number of sequences on which losses are measured together."""
    micro_batches: Natural = 1
    """Number of parts of a batch. Their gradients are computed one after the other and averaged."""

    def parts(self, members: Sequence[Any]) -> list[tuple[str, list[Any]]]:
        """Divides networks into parts that are trained side by side.

        Args:
          members: The networks.

        Returns:
          Each part, with the ending of its stage's name; "" for a single part.
        """
        size = self.together or len(members)
        parts = [list(members[at : at + size]) for at in range(0, len(members), size)]
        names = [f" {k + 1}/{len(parts)}" if len(parts) > 1 else "" for k in range(len(parts))]
        return list(zip(names, parts, strict=True))

    def check(self, **batches: int) -> None:
        """Checks that `micro_batches` divides batches.

        Args:
          **batches: The size of each batch, by the group that has it.

        Raises:
          ValueError: If it does not divide one of them.
        """
        for field, size in batches.items():
            if size % self.micro_batches:
                raise ValueError(
                    f"memory.micro_batches must divide {field}.batch = {size}; got "
                    f"{self.micro_batches}"
                )
