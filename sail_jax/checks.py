"""Helpers with which functions check their arguments and word their messages.

They look at values where these are known, and name what is near an unknown word.
"""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import jax
    import numpy as np


def _in_python(name: str, value: str) -> str:
    return f"{name}={value}" if value else name


# One for the process, as the way in which a command prints its messages is. Threads make messages,
# too, so that a context variable would not do.
_spelling: Callable[[str, str], str] = _in_python


def argument(name: str, value: str = "") -> str:
    """Names an argument in a message, as the one who reads it can give it.

    So messages need not be rewritten for the command line, where an argument is an option. Text
    that came from a file could not be told from arguments then.

    Args:
      name: The argument.
      value: What is given, such as "True"; "..." for a value that the reader chooses.

    Returns:
      "name=value", or "name" alone without a value; see `spelled`.

    >>> argument("resume", "True"), argument("max_memory")
    ('resume=True', 'max_memory')
    """
    return _spelling(name, value)


@contextlib.contextmanager
def spelled(spelling: Callable[[str, str], str]) -> Iterator[None]:
    """Lets all messages that are made meanwhile, in any thread, spell arguments in one way.

    Args:
      spelling: Makes the words of an argument's name and value.

    Yields:
      Nothing.

    >>> with spelled(lambda name, value: f"--{name}"):
    ...     argument("resume", "True")
    '--resume'
    """
    global _spelling
    before, _spelling = _spelling, spelling
    try:
        yield
    finally:
        _spelling = before


def as_array(x: Any) -> "jax.Array":
    """Returns x as a JAX array, without compiling a program for NumPy arrays.

    `jnp.asarray` compiles one for each of their shapes. The memory of a NumPy array is copied, as
    there, since its owner may write to it again. (`device_put` alone takes aligned memory as it is,
    on CPUs, whatever `may_alias` says; jax 0.10.2.)

    Args:
      x: What `jnp.asarray` takes.

    Returns:
      The array.

    >>> as_array([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    return jax.device_put(x.copy()) if isinstance(x, np.ndarray) else jnp.asarray(x)


def concrete(x: Any) -> "np.ndarray | None":
    """Returns the values of x, or None while any of them is traced and so cannot be checked.

    Args:
      x: What `np.asarray` takes.

    Returns:
      The values as a NumPy array, or None.

    >>> concrete([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    # Not above: the command line needs `escaped` and `nearest` at once, and JAX imports slowly.
    import jax
    import numpy as np

    try:
        return np.asarray(x)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def escaped(text: str) -> str:
    """Returns text as one line that is safe to show in a terminal.

    Names in a file may hold line ends and control sequences. Such characters are written as `repr`
    writes them.

    Args:
      text: Any text.

    Returns:
      The text, all of it printable.

    >>> print(escaped("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def integer(name: str, value: object, least: int = 1) -> int:
    """Checks that an argument is an integer.

    Args:
      name: What the message calls it.
      value: The value, of Python or of NumPy.
      least: The least integer that is allowed.

    Returns:
      The integer.

    Raises:
      ValueError: If it is anything else, a bool included.

    >>> integer("rank", 4)
    4
    """
    import numpy as np

    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return int(value)


_COMPARED = 2000


def as_path(name: str, value: object) -> Path:
    """Checks that an argument is a path.

    Args:
      name: What the message calls it.
      value: The value.

    Returns:
      The path.

    Raises:
      TypeError: If it is anything but text or a path.

    >>> as_path("out", "merged/model.npz").name
    'model.npz'
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: expected a path, got {described(value)}")
    return Path(value)


def callable_with(name: str, f: object, *arguments: str) -> None:
    """Checks that an argument is a function that can be called with some positional arguments.

    Args:
      name: What the message calls it.
      f: The value.
      *arguments: The names of the arguments, for the message.

    Raises:
      TypeError: If it is no function, or takes other arguments.

    >>> callable_with("score", abs, "params")
    """
    form = f"{name}({', '.join(arguments)})"
    if not callable(f):
        raise TypeError(f"{name}: expected a function, called as {form}; got {described(f)}")
    try:
        signature = inspect.signature(f)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as reason:
        raise TypeError(f"{name}: expected a function, called as {form}; {reason}") from None


def described(value: object) -> str:
    """Describes a value for a message, without printing arrays.

    Args:
      value: Any value.

    Returns:
      Its type; for None, text, and numbers the value itself.

    >>> import numpy as np
    >>> described(None), described(3), described({"w": np.zeros(9)}), described(np.zeros((2, 3)))
    ('None', '3', 'dict of 1', 'ndarray of shape (2, 3)')
    """
    if value is None or isinstance(value, str | int | float | complex):
        return repr(value)[:80]
    kind = type(value).__name__
    if (shape := getattr(value, "shape", None)) is not None:
        return f"{kind} of shape {shape}"
    return f"{kind} of {len(value)}" if isinstance(value, Sized) else kind


def nearest(word: str, options: Iterable[str]) -> str:
    """Names the known words near an unknown one, or else the known ones, for a message.

    Args:
      word: The unknown word.
      options: The known ones.

    Returns:
      A text in brackets, to be put behind the message. It names up to 3 words that are near, or up
      to 24 that are known.

    >>> nearest("tise", ["ties", "dare"]), nearest("zzz", ["ties", "dare"])
    (" (nearest: 'ties')", ' (known: ties, dare)')
    """
    options = list(options)
    # Each comparison takes time: of the tensors of a large checkpoint the first have to do.
    near = difflib.get_close_matches(word, options[:_COMPARED], n=3, cutoff=0.4)
    if near:
        return f" (nearest: {', '.join(map(repr, near))})"
    listed = ", ".join(options[:24]) + ", ..." * (len(options) > 24)
    return f" (known: {listed})"


def one_of(name: str, value: object, options: object, error: type[ValueError] = ValueError) -> None:
    """Checks that an argument is one of a few words or numbers.

    Args:
      name: What the message calls it.
      value: The value.
      options: A `Literal`, or a collection of the values.
      error: The class of the error.

    Raises:
      ValueError: If it is none of them.

    >>> one_of("axis", 1, (0, 1))
    """
    known = options if isinstance(options, Collection) else get_args(options)
    # Other values, such as arrays, may not be comparable.
    if not isinstance(value, str | Integral) or value not in known:
        listed = ", ".join(repr(option) for option in known)
        near = nearest(str(value), map(str, known))
        hint = near if near.startswith(" (nearest") else ""
        raise error(f"{name}: expected one of {listed}; got {value!r:.200}{hint}")


def one_key(key: Any, *, optional: bool = False) -> None:
    """Checks that an argument is one PRNG key.

    Args:
      key: A typed key, or a raw one of the default generator; it may be traced.
      optional: Whether None passes, too.

    Raises:
      TypeError: If it is anything else.

    >>> import jax
    >>> one_key(jax.random.key(0))
    """
    if optional and key is None:
        return
    import jax

    try:  # it takes one key, typed or raw, and refuses everything else
        jax.eval_shape(lambda key: jax.random.fold_in(key, 0), key)
    except (TypeError, ValueError):
        expected = "expected one PRNG key, such as jax.random.key(0)"
        raise TypeError(f"key: {expected}; got {described(key)}") from None


def scalar(name: str, x: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """Checks that an argument is one real number.

    Args:
      name: What the message calls it.
      x: The value, which may be traced.
      holds: What has to be true of the value, where it is known.
      expected: What the message says was expected, such as "a finite number".

    Raises:
      ValueError: If it is no scalar, no real number, or if `holds` is false of it.
    """
    import jax.numpy as jnp
    import numpy as np

    value = concrete(x)
    fits = np.shape(x) == ()
    if fits and value is not None:
        real = any(
            jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool)
        )
        fits = real and bool(holds(value))
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {x!r}")


def shortened(text: str, longest: int) -> str:
    """Cuts a text in its middle.

    Args:
      text: The text.
      longest: How many characters it may have, at least 3.

    Returns:
      The text, with "..." in the place of what was cut.

    >>> shortened("abcdefghijkl", 9)
    'abc...jkl'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 2
    return f"{text[: longest - 3 - tail]}...{text[len(text) - tail :]}"


def static(name: str, x: Any, holds: Callable[[Any], Any], expected: str) -> float:
    """Checks a number that decides on shapes or on the course of a program, so cannot be traced.

    Args:
      name: What the message calls it.
      x: The value.
      holds: What has to be true of the value.
      expected: What the message says was expected, such as "a number in (0, 1]".

    Returns:
      The number.

    Raises:
      ValueError: As `scalar` does.
      TypeError: If it is traced.
    """
    scalar(name, x, holds, expected)
    value = concrete(x)
    if value is None:
        raise TypeError(f"{name}: expected a static number, got a traced one")
    return float(value)


def storage(size: float) -> str:
    """Formats bytes in the unit that fits.

    Args:
      size: The bytes.

    Returns:
      The number with its unit, a power of 1000.

    >>> storage(1_500_000), storage(999_950_000)
    ('1.5 MB', '1.0 GB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if round(size / factor, 1) >= 1:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"
