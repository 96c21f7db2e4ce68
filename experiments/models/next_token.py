"""The loss of language models."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree


def token_losses(
    net: nn.Module,
    variables: PyTree,
    inputs: Int[Array | np.ndarray, "*batch time"],
    targets: Int[Array | np.ndarray, "*batch time"],
    key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch time"]:
    """Computes the negative log-likelihood of each target token.

    Args:
      net: A language model, such as `gpt.GPT` or `llama.Llama`.
      variables: Its variables.
      inputs: The tokens that the network reads.
      targets: The token that follows each of them.
      key: A key for dropout. Without a key there is no dropout.

    Returns:
      The negative log-likelihood of each target given the inputs up to its position, in nats and
      float32.
    """
    how: dict[str, Any] = {} if key is None else {"train": True, "rngs": {"dropout": key}}
    logits = jnp.asarray(net.apply(variables, inputs, **how)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
