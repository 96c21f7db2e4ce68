"""Random bits without state: each is a hash of a key, names and an index, nothing else.

What makes masks hard is that a merge may be cut in any way. A model comes in pieces of a size that
the memory allows, in an order that threads decide, and on several devices; it goes on after it was
interrupted, or some of its tensors are merged alone. The outcome has to be the same. A generator
with a state would give each entry the bits that are next. `jax.random` has no state, but its bits
depend on the shape that is drawn at once, not on places in it, and on CPUs threefry takes 3.6 ms
for a mask of 2^20 entries where these take 0.4 ms, on one core.

So the draw of an entry follows from who the entry is, in two steps:

    stream = hash(words of the key, path of the leaf, place of the model)   64 bits, (low, high)
    draw   = mix(mix(index ^ low) + high) / 2^32, in its upper 24 bits

The first is computed once for each leaf and model. The second is a few operations for each entry,
which XLA fuses with the comparison that uses the draw. For instance, the key of seed 0 and the path
"block/kernel" give model 0 the stream (fa61d258, 6ec38b81), and its entries 0, 1, 2, 3, ... the
draws 0.3716, 0.6387, 0.5454, 0.0765: DARE with density 0.5 keeps the first and the fourth. A piece
that begins with entry 2 draws 0.5454 and 0.0765.

Both words of a stream enter, one before and one after a round of mixing. With `low` alone streams
would be shuffled copies of one another. The hash is not meant for cryptography.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, UInt

from sail_jax.checks import concrete, one_key

Stream = tuple[UInt[Array, "..."], UInt[Array, "..."]]
"""The 64 bits of state of one or more streams, in two words (low, high)."""
STREAM = 1
"""The number of the stream: another one stands for other bits of the same keys, names and indices.

Work that was interrupted is resumed only with the bits with which it began. A test has the draws of
each number, so that neither can change alone.
"""


def key(seed: int) -> Array:
    """Makes the key of `jax.random.key(seed)` without compiling a program.

    The generator is threefry2x32, whatever JAX is told to use by default. The whole seed counts, of
    which JAX takes the lower 32 bits unless it computes in 64 bits.

    Args:
      seed: 0 <= seed < 2**64.

    Returns:
      A typed PRNG key, a scalar.

    Raises:
      ValueError: If the seed is out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected 0 <= seed < 2**64, got {seed}")
    # Upper word first, as threefry's own seeding has it, so that keys agree with `jax.random.key`.
    words: Any = np.array(divmod(seed, 1 << 32), np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def mix(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Applies a bijection of 32-bit words in which every input bit reaches every output bit.

    Xor-shifts and products with odd numbers alternate.

    Args:
      x: uint32, of any shape.

    Returns:
      uint32, of the shape of `x`.

    References:
      Wellons, Prospecting for Hash Functions, 2018 (the constants, of low bias).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def stream(words: UInt[Array, "words"], *names: ArrayLike) -> Stream:
    """Makes the streams of a key that have certain names, with 64 bits of state each.

    Args:
      words: The words of the key, uint32 (`key_words`).
      *names: At least one array of 32-bit words; they are broadcast together.

    Returns:
      Two words (low, high) for each stream, both uint32 of the broadcast shape.
    """
    arrays = jnp.broadcast_arrays(*(jnp.asarray(name, jnp.uint32) for name in names))
    shape = arrays[0].shape
    own = [jnp.broadcast_to(words[i], shape) for i in range(len(words))]

    def absorb(state: Stream, word: Array) -> tuple[Stream, None]:
        low = mix(state[0] ^ word)
        return (low, mix(state[1] + word * jnp.uint32(0xC2B2AE35) + low)), None

    # 2**32 over the golden ratio, and the multipliers of MurmurHash3's finaliser
    first = jnp.full(shape, 0x9E3779B9, jnp.uint32)
    # A loop, since XLA would fuse anything else into its users and hash the names for every entry.
    return lax.scan(absorb, (first, jnp.full_like(first, 0x85EBCA6B)), jnp.stack([*own, *arrays]))[
        0
    ]


def uniform(of: Stream, index: UInt[Array, "..."]) -> Float[Array, "..."]:
    """Draws the entries at some indices of a stream, uniform in [0, 1).

    The two words of the stream enter before and after one round of mixing each. So streams are not
    shifted copies of one another, as those of a plain counter would be.

    Args:
      of: The stream (`stream`), or several whose shape broadcasts with `index`.
      index: uint32, of any shape.

    Returns:
      float32 multiples of 2**-24, of the broadcast shape.
    """
    low, high = of
    bits = mix(mix(index ^ low) + high)
    # float32 holds 24 bits exactly, so that no draw is rounded up to 1
    # not astype: int32 converts faster than uint32 on CPUs
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def key_words(key: Array | None, purpose: str) -> UInt[Array | np.ndarray, "words"]:
    """Returns all words of one PRNG key.

    Args:
      key: A typed key, or a raw one of the default generator; it may be traced.
      purpose: What the key is for, for the message about a missing one.

    Returns:
      uint32, flat; a NumPy array if the values are known.

    Raises:
      TypeError: For None, and for anything else that is not one PRNG key.
    """
    if key is None:
        raise TypeError(f"key: expected a PRNG key, for {purpose}, got None")
    one_key(key)
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words: Any = concrete(data)
    return (data if words is None else words).reshape(-1).astype(np.uint32)
