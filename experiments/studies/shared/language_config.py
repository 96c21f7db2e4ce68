"""Settings of language models, of the studies that pre-train or read one."""

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
    """The network: a preset, or one of OLMo's blocks with the sizes below.

    The latter has OLMo's LayerNorm without parameters, and tied embeddings.
    """

    preset: Annotated[str, AfterValidator(presets.of_type("flax_llama"))] | None = None
    """A network of `experiments.models.presets`, such as 'olmo-30m'; None for the sizes below."""
    context: Annotated[int, Ge(2)] = 32
    """Tokens that the network sees, also if it is a preset."""
    width: Natural = 16
    """Units of the residual stream."""
    layers: Natural = 2
    """Transformer blocks."""
    heads: Natural = 2
    """Attention heads; they divide the width."""
    hidden: Natural = 48
    """Units of an MLP."""
    mup: Natural | None = None
    """Width from which initial scales and learning rates are carried over to the network's own by
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
        """Makes the configuration of the network.

        Args:
          dropout: That of a preset; None keeps the preset's own. Without a preset there is none.

        Returns:
          The configuration, as `experiments.models.presets.build` takes it.
        """
        if self.preset is not None:
            own = presets.config(self.preset, **({} if dropout is None else {"dropout": dropout}))
        else:
            own = self._sizes()
        # Tied embeddings are as large as an input's; what they read out is divided by the growth.
        grown = self.mup is not None and own["tied"]
        return {**own, **({"logit_scale": self.mup / own["width"]} if grown else {})}

    def _sizes(self) -> dict[str, Any]:
        """Makes the configuration of the network without a preset."""
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
        """Computes how initial parameters and learning rates are scaled.

        Returns:
          The scales of each parameter by muP; none for the standard parametrisation.
        """
        if self.mup is None:
            return ()
        own = self.network()
        part = {name: own[name] * self.mup // own["width"] for name in ("width", "heads", "hidden")}
        base, spec = (_spec(sizes) for sizes in ({**own, **part}, own))
        return scales(base, spec)


def _spec(sizes: dict[str, Any]) -> Spec:
    """Says in which feature space each axis of a network's parameters is."""
    shapes = jax.eval_shape(partial(training.first, presets.build(sizes)), jax.random.key(0))
    return architectures.of(sizes).rules(sizes).spec(shapes)


@config
class Memory:
    """What is computed one part after the other, to save memory."""

    together: Natural | None = None
    """Networks that are trained side by side at most; None for all of a budget or task."""
    at_once: Natural = 16
    """Sequences that losses are measured on together."""
    micro_batches: Natural = 1
    """Parts of a batch whose gradients are averaged, one after the other."""
