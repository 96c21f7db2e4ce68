"""What every boundary needs to say a clear no: values where they are known, names that are near."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np

__all__ = ["as_array", "concrete", "escaped", "nearest"]


def as_array(x: Any) -> "jax.Array":
    """x as a JAX array: as `jnp.asarray`, which compiles a program for each shape of NumPy's.

    NumPy's memory is copied, as there: whoever owns it may write to it again. (`device_put` alone
    takes aligned memory as it is, on CPUs, whatever `may_alias` says; jax 0.10.2.)

    >>> as_array([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    return jax.device_put(x.copy()) if isinstance(x, np.ndarray) else jnp.asarray(x)


def concrete(x: Any) -> "np.ndarray | None":
    """The values of x, or None while any of it is traced (then they cannot be checked).

    >>> concrete([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    import jax  # here, as the command line wants the other function alone, at once
    import numpy as np

    try:
        return np.asarray(x)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def escaped(text: str) -> str:
    """Text as one line without what a terminal would obey or cannot show, as names in a file may
    hold it: that is written as `repr` writes it.

    >>> print(escaped("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def nearest(word: str, options: Iterable[str]) -> str:
    """What to add to an error about an unknown word: the nearest known ones, or some.

    >>> nearest("tise", ["ties", "dare"]), nearest("zzz", ["ties", "dare"])
    (" (nearest: 'ties')", ' (known: ties, dare)')
    """
    options = list(options)
    near = difflib.get_close_matches(word, options, n=3, cutoff=0.4)
    if near:
        return f" (nearest: {', '.join(map(repr, near))})"
    listed = ", ".join(options[:24]) + ", ..." * (len(options) > 24)
    return f" (known: {listed})"
