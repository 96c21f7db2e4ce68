"""Softmax attention, as all transformers here have it."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["attend", "check_length", "dropped"]


def attend(
    q: Float[Array, "*batch t h k"],
    k: Float[Array, "*batch t g k"],
    v: Float[Array, "*batch t g k"],
    *,
    causal: bool = False,
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "*batch t h k"]:
    """Values mixed by softmax(q k / sqrt(size)), each head of keys and values serving h / g
    consecutive queries (Ainslie et al. 2023). `drop` is applied to the probabilities; without it
    JAX's own attention is called, which need not form them.
    """
    batch = q.shape[:-3]
    Q, K, V = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    if drop is None:
        return jax.nn.dot_product_attention(Q, K, V, is_causal=causal).reshape(q.shape)
    K, V = (jnp.repeat(x, Q.shape[2] // K.shape[2], axis=2) for x in (K, V))
    logits = jnp.einsum("bthk,bshk->bhts", Q, K).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        logits = jnp.where(jnp.tri(q.shape[-3], dtype=bool), logits, -jnp.inf)
    mixed = jnp.einsum("bhts,bshk->bthk", drop(jax.nn.softmax(logits).astype(V.dtype)), V)
    return mixed.reshape(*batch, *mixed.shape[1:])


def dropped(rate: float, train: bool) -> Callable[[Array], Array] | None:
    """Dropout within a module, where there is any: None, so that evaluation has no such module."""
    return nn.Dropout(rate, deterministic=False) if rate and train else None


def check_length(tokens: Array, context: int) -> None:
    """ValueError for a sequence longer than the network's positions."""
    if tokens.shape[-1] > context:
        raise ValueError(
            f"tokens: a sequence of {tokens.shape[-1]}, but the network has positions for {context}"
        )
