"""Stateless random bits. Each is a hash of a key, names and an index.

Masks must be reproducible for any division of a merge. The memory determines the sizes of pieces,
threads determine their order, and arrays may be on several devices. A merge may also be resumed
after an interruption, or cover only some tensors. The result must be the same in all cases. A
stateful generator would assign the next bits to each entry. `jax.random` is stateless, but its bits
depend on the shape of the draw instead of on positions. On one CPU core, threefry takes 3.6 ms for
a mask of 2^20 entries; this module takes 0.4 ms.

The draw of an entry depends only on the entry's identity. It is computed in two steps:

    stream = hash(words of the key, path of the leaf, place of the model)   64 bits, (low, high)
    draw   = mix(mix(index ^ low) + high) / 2^32, in its upper 24 bits

The first step is computed once for each leaf and model. The second step is a few operations for
each entry. XLA fuses them with the comparison that uses the draw. For example, with the key of seed
0 and the path "block/kernel", model 0 has the stream (fa61d258, 6ec38b81). The draws of its entries
0, 1, 2, 3, ... are 0.3716, 0.6387, 0.5454, 0.0765. DARE with density 0.5 keeps the first and the
fourth. A piece that starts at entry 2 draws 0.5454 and 0.0765.

Both words of a stream are used, one before and one after a round of mixing. With only `low`,
streams would be shuffled copies of one another. The hash is not cryptographic.
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
"""The version of the stream. Another number gives other bits for the same keys, names and indices.

Interrupted work is resumed only with the same version. A test holds the draws of each version, so
neither can change alone.
"""


def key(seed: int) -> Array:
    """Makes the key of `jax.random.key(seed)` without compiling a program.

    The generator is always threefry2x32, regardless of JAX's default. All 64 bits of the seed
    count; JAX uses only the lower 32 bits unless it has 64 bits enabled.

    Args:
      seed: 0 <= seed < 2**64.

    Returns:
      A typed PRNG key, a scalar.

    Raises:
      ValueError: If the seed is out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected 0 <= seed < 2**64, got {seed}")
    # The upper word comes first, as in threefry's own seeding. Keys then equal those from
    # `jax.random.key`.
    words: Any = np.array(divmod(seed, 1 << 32), np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def mix(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Applies a bijection of 32-bit words in which every input bit affects every output bit.

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
    """Makes the streams of a key for given names, with 64 bits of state each.

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

    # 2**32 divided by the golden ratio, and the multipliers of MurmurHash3's finaliser
    first = jnp.full(shape, 0x9E3779B9, jnp.uint32)
    # This is a loop, because XLA would fuse anything else into its users and hash the names for
    # every entry.
    return lax.scan(absorb, (first, jnp.full_like(first, 0x85EBCA6B)), jnp.stack([*own, *arrays]))[
        0
    ]


def uniform(of: Stream, index: UInt[Array, "..."]) -> Float[Array, "..."]:
    """Draws the numbers at given indices of a stream, uniform in [0, 1).

    The two words of the stream enter before and after a round of mixing. Streams of a plain counter
    would be shifted copies of one another; these streams are not.

    Args:
      of: The stream (`stream`), or several streams that broadcast with `index`.
      index: uint32, of any shape.

    Returns:
      float32 multiples of 2**-24, of the broadcast shape.
    """
    low, high = of
    bits = mix(mix(index ^ low) + high)
    # float32 represents 24 bits exactly, so no draw is rounded up to 1. The cast through int32 is
    # faster on CPUs than a cast from uint32.
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def key_words(key: Array | None, purpose: str) -> UInt[Array | np.ndarray, "words"]:
    """Returns all words of one PRNG key.

    Args:
      key: A typed key, or a raw key of the default generator. It may be traced.
      purpose: The use of the key, for the message about a missing key.

    Returns:
      uint32, flat; a NumPy array if the values are known.

    Raises:
      TypeError: For None, and for anything that is not one PRNG key.
    """
    if key is None:
        raise TypeError(f"key: expected a PRNG key, for {purpose}, got None")
    one_key(key)
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words: Any = concrete(data)
    return (data if words is None else words).reshape(-1).astype(np.uint32)
