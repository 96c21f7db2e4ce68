"""Multiple-choice questions, answered by a language model.

A choice is scored by its log-likelihood after the context, per token or per byte of it (Brown et
al., Language Models are Few-Shot Learners, 2020). `experiments.data.choices` reads the questions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from experiments.data.choices import Packed, accuracy, scores

Apply = Callable[[Int[Array, "batch time"]], Float[Array, "batch time vocab"]]
"""A language model: from tokens to the logits of each next token."""


def log_likelihood(
    apply: Apply, tokens: Int[ArrayLike, "*any token"], *, batch_size: int = 32
) -> Float[Array, "*any token"]:
    """Computes the log-probability of each token given those before it.

    Args:
      apply: The language model: the logits of the next token at each position.
      tokens: The sequences. Padding at the end of a sequence does not change the values of its
        other tokens.
      batch_size: The number of sequences evaluated at once.

    Returns:
      The log-probabilities in nats, in float32; 0 for the first token of a sequence.

    >>> log_likelihood(lambda x: jnp.zeros((*x.shape, 4)), [[0, 3, 1]]).round(3).tolist()
    [[0.0, -1.38..., -1.38...]]
    """
    tokens = jnp.asarray(tokens)
    flat = tokens.reshape(-1, tokens.shape[-1])

    def of_row(row: Array) -> Array:
        logits = apply(row[None, :-1])[0].astype(jnp.float32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), row[1:, None], axis=-1)[:, 0]
        return jnp.concatenate([jnp.zeros(1), log_probs])

    # Sequences are run in batches, because the logits are `vocab` times as large as the tokens.
    return jax.lax.map(of_row, flat, batch_size=min(batch_size, len(flat))).reshape(tokens.shape)


def normalised(
    apply: Apply, packed: Packed, *, by: str = "token", batch_size: int = 32
) -> Float[Array, "item choice"]:
    """Computes the score of each choice: its log-likelihood, divided by its length.

    Args:
      apply: The language model, as in `log_likelihood`.
      packed: The questions as tokens.
      by: The unit of length: "token" or "byte".
      batch_size: The number of sequences evaluated at once.

    Returns:
      The scores in nats per unit; -inf for a choice without tokens.

    Raises:
      ValueError: If `by` is neither unit.
    """
    if by not in ("token", "byte"):
        raise ValueError(f"by must be token or byte; got {by!r}")
    log_probs = log_likelihood(apply, packed.tokens, batch_size=batch_size)
    length = None if by == "token" else jnp.asarray(packed.length)
    return scores(log_probs, jnp.asarray(packed.scored), length)


def answered(
    apply: Apply, packed: Packed, *, by: str = "token", batch_size: int = 32
) -> Float[Array, ""]:
    """Computes the fraction of questions for which the correct choice has the highest score.

    It can be compiled with `packed` as an argument.

    Args:
      apply: The language model, as in `log_likelihood`.
      packed: The questions as tokens.
      by: The unit of length: "token" or "byte".
      batch_size: The number of sequences evaluated at once.

    Returns:
      The fraction, from 0 to 1. Of equal scores, the first is used.

    Raises:
      ValueError: If `by` is neither unit.
    """
    return accuracy(
        normalised(apply, packed, by=by, batch_size=batch_size), jnp.asarray(packed.answer)
    )


def continuations(
    blocks: Int[np.ndarray, "n token"], *, context: int, items: int, choices: int, seed: int
) -> Packed:
    """Builds multiple-choice questions from plain text: the continuation of a block of tokens.

    The context is the beginning of a block. The correct choice is the rest of the block. The wrong
    choices are the ends of other blocks, as in HellaSwag. All choices have the same length.

    Args:
      blocks: n blocks of tokens, all of one length.
      context: The number of tokens of the context.
      items: The number of questions.
      choices: The number of choices of each question.
      seed: The seed of the chosen blocks, the wrong choices and their order.

    Returns:
      The questions. They count the length of a choice in tokens.

    Raises:
      ValueError: If `items` is not from 1 to n, `choices` not from 2 to n, or `context` not from 1
        to one less than the length of a block.

    References:
      Zellers et al., HellaSwag, 2019 (arXiv 1905.07830).

    >>> blocks = np.arange(12).reshape(3, 4)
    >>> questions = continuations(blocks, context=2, items=3, choices=2, seed=0)
    >>> questions.tokens.shape, questions.scored[0, 0].tolist()
    ((3, 2, 4), [False, False, True, True])
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
        # Drawn from n - 1 numbers and shifted from `own` on, so that every other block is equally
        # likely.
        from_block = np.insert(others + (others >= own), answer[i], own)
        tokens[i, :, :context] = blocks[own, :context]
        tokens[i, :, context:] = blocks[from_block, context:]
    scored = np.broadcast_to(np.arange(length) >= context, tokens.shape)
    size = np.full(tokens.shape[:2], length - context, np.int32)
    return Packed(tokens, np.array(scored), size, answer)
