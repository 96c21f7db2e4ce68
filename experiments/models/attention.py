"""Softmax attention and dropout, shared by the transformers of this package."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attend(
    q: Float[Array, "*batch t h k"],
    k: Float[Array, "*batch t g k"],
    v: Float[Array, "*batch t g k"],
    *,
    causal: bool = False,
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "*batch t h k"]:
    """Computes softmax attention, with at most as many key and value heads as query heads.

    The output of query head i at position t is sum_s p_ts v_s with p_t = softmax_s(q_t . k_s /
    sqrt(k)). The keys and values come from head i // (h / g).

    Args:
      q: Queries: h heads of size k at each of t positions.
      k: Keys: g heads, where g divides h.
      v: Values: g heads.
      causal: Whether a position attends only to itself and to earlier positions.
      drop: A function applied to the probabilities `(batch, h, t, t)`, such as the dropout from
        `dropped`. Without it, JAX's own attention is used, which may not compute the probabilities
        explicitly.

    Returns:
      The mixed values, one for each query.

    References:
      Ainslie et al., GQA, 2023 (arXiv 2305.13245).

    >>> q, k = jnp.ones((5, 4, 2)), jnp.ones((5, 2, 2))
    >>> attend(q, k, k, causal=True).shape
    (5, 4, 2)
    """
    batch = q.shape[:-3]
    Q, K, V = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    if drop is None:
        return jax.nn.dot_product_attention(Q, K, V, is_causal=causal).reshape(q.shape)
    # JAX's attention, used above, has no dropout, so the computation is written out here.
    K, V = (jnp.repeat(x, Q.shape[2] // K.shape[2], axis=2) for x in (K, V))
    # Logits and softmax are in float32 for any dtype of the inputs, as in JAX's own attention.
    logits = jnp.einsum("bthk,bshk->bhts", Q, K).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        logits = jnp.where(jnp.tri(q.shape[-3], dtype=bool), logits, -jnp.inf)
    mixed = jnp.einsum("bhts,bshk->bthk", drop(jax.nn.softmax(logits).astype(V.dtype)), V)
    return mixed.reshape(*batch, *mixed.shape[1:])


def dropped(rate: float, train: bool) -> Callable[[Array], Array] | None:
    """Returns a dropout layer if the rate is above 0 in training, else None.

    Call it within a module, which then contains the layer as a submodule.
    """
    return nn.Dropout(rate, deterministic=False) if rate and train else None


def check_length(tokens: Array, context: int) -> None:
    """Checks that a network has enough positions for a sequence.

    Args:
      tokens: The tokens, `(*batch, time)`.
      context: The number of positions.

    Raises:
      ValueError: If the sequence is longer.
    """
    if tokens.shape[-1] > context:
        raise ValueError(
            f"tokens: a sequence of {tokens.shape[-1]}, but the network has positions for {context}"
        )
