"""LiGO from one language model to a larger one of its kind, in width and depth at once.

`parts` widens the small networks that the study trains. This module grows GPT-2, Llama and OLMo in
their format on disk.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from experiments.data.tokens import Batch
from experiments.models.next_token import token_losses
from experiments.models.presets import describe
from experiments.studies.shared.growth_ways import LAYERS_OF, by_maps, growing, stacked
from sail_jax import growth


def check(small: nn.Module, large: nn.Module) -> None:
    """Checks that LiGO can grow one network to the shape of another."""
    ours, theirs = describe(small), describe(large)
    sizes = ("width", "layers", "heads", "kv_heads", "head_dim", "hidden")
    for name in sorted({*ours, *theirs} - set(sizes)):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"smaller must have the {name} of the checkpoints, {theirs.get(name)}; got "
                f"{ours.get(name)}"
            )
    grown = [name for name in sizes if ours.get(name) != theirs.get(name)]
    if not grown or any((ours.get(n) or 0) > (theirs.get(n) or 0) for n in grown):
        told = ", ".join(f"{n} {ours.get(n)} to {theirs.get(n)}" for n in grown) or "equal sizes"
        raise ValueError(f"smaller must be smaller in a size, and larger in none; got {told}")


@partial(jax.jit, static_argnums=(0, 1))
def grow(
    small: nn.Module,
    large: nn.Module,
    variables: PyTree,
    batches: Batch,
    rate: float,
    key: PRNGKeyArray,
) -> PyTree:
    """Learns LiGO's maps by Adam, and grows a network by them.

    - `batches`: the minibatches of all steps, `(step, n, context)`.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).
    """
    flat = growth.stack_layers(variables, LAYERS_OF)
    token = jnp.zeros((1, 1), int)
    shapes = jax.eval_shape(
        lambda k: growth.stack_layers(large.init(k, token), LAYERS_OF), jax.random.key(0)
    )
    spec, after = stacked(describe(small), flat), stacked(describe(large), shapes)

    def loss(grown: PyTree, batch: Batch) -> Array:
        whole = growth.unstack_layers(grown, LAYERS_OF)
        return token_losses(large, whole, batch.inputs, batch.targets).mean()

    got = by_maps(loss, flat, spec, growing(spec, after), batches, rate, key)
    return growth.unstack_layers(got, LAYERS_OF)
