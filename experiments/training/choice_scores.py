"""Multiple choice for any network that gives logits of the next token: a choice is scored by its
log-likelihood after the context, per token of it (Brown et al., 2020)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from experiments.data.choices import Packed, accuracy, scores

Apply = Callable[[Int[Array, "batch time"]], Float[Array, "batch time vocab"]]


def log_likelihood(
    apply: Apply, tokens: Int[ArrayLike, "*any token"], *, batch_size: int = 32
) -> Float[Array, "*any token"]:
    """The log-probability of each token given those before it, 0 for the first; `batch_size`
    sequences at a time. Where `tokens` are filled up at the end, what is there does not count.

    >>> log_likelihood(lambda x: jnp.zeros((*x.shape, 4)), [[0, 3, 1]]).round(3).tolist()
    [[0.0, -1.38..., -1.38...]]
    """
    tokens = jnp.asarray(tokens)
    flat = tokens.reshape(-1, tokens.shape[-1])

    def of_row(row: Array) -> Array:
        logits = apply(row[None, :-1])[0].astype(jnp.float32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), row[1:, None], axis=-1)[:, 0]
        return jnp.concatenate([jnp.zeros(1), log_probs])

    return jax.lax.map(of_row, flat, batch_size=min(batch_size, len(flat))).reshape(tokens.shape)


def normalised(
    apply: Apply, packed: Packed, *, by: str = "token", batch_size: int = 32
) -> Float[Array, "item choice"]:
    """The score of every choice, per "token" or per "byte" of it."""
    if by not in ("token", "byte"):
        raise ValueError(f"by must be token or byte; got {by!r}")
    log_probs = log_likelihood(apply, packed.tokens, batch_size=batch_size)
    length = None if by == "token" else jnp.asarray(packed.length)
    return scores(log_probs, jnp.asarray(packed.scored), length)


def answered(
    apply: Apply, packed: Packed, *, by: str = "token", batch_size: int = 32
) -> Float[Array, ""]:
    """The share of items whose right choice scores best. Can be compiled, `packed` being data."""
    return accuracy(
        normalised(apply, packed, by=by, batch_size=batch_size), jnp.asarray(packed.answer)
    )


def continuations(
    blocks: Int[np.ndarray, "n token"], *, context: int, items: int, choices: int, seed: int
) -> Packed:
    """Questions made of text: the first `context` tokens of a block, and how it goes on, among how
    other blocks go on (as HellaSwag asks, Zellers et al., 2019). All choices are equally long.

    ValueError where there are fewer blocks than `choices` or than `items`, or no token is left.
    """
    n, length = blocks.shape
    if not (1 <= items <= n and 2 <= choices <= n and 1 <= context < length):
        raise ValueError(
            f"items, choices, context must be 1 to {n}, 2 to {n} and 1 to {length - 1}; got "
            f"{items}, {choices}, {context}"
        )
    rng = np.random.default_rng(seed)
    answer = rng.integers(choices, size=items).astype(np.int32)
    tokens = np.empty((items, choices, length), np.int32)
    for i, own in enumerate(rng.permutation(n)[:items].tolist()):
        others = rng.choice(n - 1, choices - 1, replace=False)
        from_block = np.insert(others + (others >= own), answer[i], own)
        tokens[i, :, :context] = blocks[own, :context]
        tokens[i, :, context:] = blocks[from_block, context:]
    scored = np.broadcast_to(np.arange(length) >= context, tokens.shape)
    size = np.full(tokens.shape[:2], length - context, np.int32)
    return Packed(tokens, np.array(scored), size, answer)
