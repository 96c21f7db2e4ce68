"""Checks arguments, and formats error messages.

Values are checked only if they are known, outside a trace. Messages about unknown words contain
suggestions.
"""

import contextlib
import inspect
import itertools
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


# One value for the whole process, because other threads also write messages and would not see a
# context variable. The identity of a merge does not follow lists, and must not depend on the
# notation of messages.
_SPELLING: list[Callable[[str, str], str]] = [_in_python]


def argument(name: str, value: str = "") -> str:
    """Formats an argument in a message in the reader's notation: Python or the command line.

    Messages therefore need not be rewritten for the command line, where an argument is an option.
    Rewriting could not distinguish arguments from text that came from a file.

    Args:
      name: The argument.
      value: Its value, such as "True"; "..." for a value that the reader chooses.

    Returns:
      "name=value", or "name" without a value; see `spelled`.

    >>> argument("resume", "True"), argument("max_memory")
    ('resume=True', 'max_memory')
    """
    return _SPELLING[-1](name, value)


@contextlib.contextmanager
def spelled(spelling: Callable[[str, str], str]) -> Iterator[None]:
    """Sets the notation of arguments in all messages during the block, in any thread.

    Args:
      spelling: The function from an argument's name and value to its text.

    Yields:
      Nothing.

    >>> with spelled(lambda name, value: f"--{name}"):
    ...     argument("resume", "True")
    '--resume'
    """
    _SPELLING.append(spelling)
    try:
        yield
    finally:
        _SPELLING.pop()


def as_array(x: Any) -> "jax.Array":
    """Converts x to a JAX array without compiling a program for NumPy arrays.

    `jnp.asarray` compiles one program per shape. Both functions copy NumPy arrays, because their
    owner may modify them. (On CPUs `device_put` alone shares aligned memory, whatever `may_alias`
    is; jax 0.10.2.)

    Args:
      x: Anything that `jnp.asarray` accepts.

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
    """Returns the values of x, or None if any of them is traced and cannot be checked.

    Args:
      x: Anything that `np.asarray` accepts.

    Returns:
      The values as a NumPy array, or None.

    >>> concrete([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """
    # Imported here: JAX imports slowly, and the command line needs `escaped` and `nearest` at once.
    import jax
    import numpy as np

    try:
        return np.asarray(x)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        return None


def escaped(text: str) -> str:
    """Converts a text to one line that is safe to print in a terminal.

    Names in a file may contain line ends and control sequences. Such characters are written as in
    `repr`.

    Args:
      text: Any text.

    Returns:
      The text with printable characters only.

    >>> print(escaped("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def integer(name: str, value: object, least: int = 1) -> int:
    """Checks that an argument is an integer.

    Args:
      name: Its name in the message.
      value: A value of Python or NumPy.
      least: The smallest allowed integer.

    Returns:
      The integer.

    Raises:
      ValueError: If the value is invalid, including a bool.

    >>> integer("rank", 4)
    4
    """
    import numpy as np

    expected = f"{name}: expected an integer >= {least}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{expected}, got {described(value)}")
    if value < least:
        raise ValueError(f"{expected}, got {value!r}")
    return int(value)


def as_path(name: str, value: object) -> Path:
    """Checks that an argument is a path.

    Args:
      name: Its name in the message.
      value: The value.

    Returns:
      The path.

    Raises:
      TypeError: If the value is neither text nor a path.

    >>> as_path("out", "merged/model.npz").name
    'model.npz'
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: expected a path, got {described(value)}")
    return Path(value)


def callable_with(name: str, f: object, *arguments: str) -> None:
    """Checks that an argument is a function that can be called with some positional arguments.

    Args:
      name: Its name in the message.
      f: The value.
      *arguments: The names of the arguments, for the message.

    Raises:
      TypeError: If the value is not a function, or takes other arguments.

    >>> callable_with("score", abs, "params")
    """
    form = f"{name}({', '.join(arguments)})"
    if not callable(f):
        raise TypeError(f"{name}: expected a function, called as {form}; got {described(f)}")
    try:
        signature = inspect.signature(f)
    except ValueError:  # some functions in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as reason:
        raise TypeError(f"{name}: expected a function, called as {form}; {reason}") from None


def described(value: object) -> str:
    """Describes a value for a message without printing arrays.

    Args:
      value: Any value.

    Returns:
      The value for None; the value and its type for text, numbers and lists of them; the type and
      the size for other values.

    >>> import numpy as np
    >>> described(None), described("3"), described(["3"]), described({"w": 1})
    ('None', "'3' (str)", "['3'] (list)", 'dict of 1')
    >>> described(np.zeros((2, 3)))
    'ndarray of shape (2, 3), float64'
    """
    kind, plain = type(value).__name__, (str, int, float, complex)
    if value is None:
        return "None"
    items = value if isinstance(value, list | tuple) else (value,)
    if all(isinstance(item, plain) for item in items):
        return f"{shortened(repr(value), 80)} ({kind})"
    if (shape := getattr(value, "shape", None)) is not None:
        return f"{kind} of shape {shape}, {getattr(value, 'dtype', '?')}"
    return f"{kind} of {len(value)}" if isinstance(value, Sized) else kind


_COMPARED = 2000  # options that are compared; more, such as a checkpoint's tensors, take too long
_LISTED = 200  # characters of a list; a longer message would be shortened within a name


def nearest(word: str, options: Iterable[str]) -> str:
    """Suggests options that are similar to an unknown word, or lists the options.

    An option is suggested if it is one typo away (two in words of 6 letters or more), or if the
    word is its prefix or its last part.

    Args:
      word: The unknown word.
      options: The valid words.

    Returns:
      A text in brackets for the end of a message, with up to 3 suggestions, or with the first
      options: up to 24, and as many whole ones as a line holds.

    >>> nearest("tise", ["ties", "dare"]), nearest("dense", ["ties", "dare"])
    (" (nearest: 'ties')", ' (known: ties, dare)')
    >>> nearest("ties,dare", ["ties", "dare"])
    ' (each is known: give them as separate values)'
    """
    options = list(options)
    if "," in word and {part.strip() for part in word.split(",")} <= set(options):
        return " (each is known: give them as separate values)"
    letters = len(word.strip("-"))
    most = (letters > 1) + (letters > 5)
    ranks = [(_typos(word, option, most), option) for option in options[:_COMPARED]]
    near = [option for rank, option in sorted(ranks, key=lambda r: r[0]) if rank <= most + 1][:3]
    if near:
        return f" (nearest: {', '.join(map(repr, near))})"
    lengths = itertools.accumulate(len(option) + 2 for option in options)
    most = max(1, sum(length <= _LISTED for length in itertools.islice(lengths, 24)))
    listed = ", ".join(options[:most]) + ", ..." * (len(options) > most)
    return f" (known: {listed})"


def mistyped(word: str, options: Iterable[str]) -> str | None:
    """Returns the valid word from which an unknown word differs by one typo.

    Args:
      word: The unknown word.
      options: The valid words.

    Returns:
      The first option that differs by one inserted, missing, wrong or swapped letter, ignoring
      case; None if there is none. Single letters are never taken for one another.

    >>> mistyped("wieght", ["weight"]), mistyped("wihgt", ["weight"]), mistyped("t", ["r"])
    ('weight', None, None)
    """
    long = [option for option in options if min(len(word), len(option)) > 1]
    near = (option for option in long if _typos(word.casefold(), option.casefold(), 1) <= 1)
    return next(near, None)


def _typos(word: str, option: str, most: int) -> int:
    """Counts the typos in `word`: inserted, missing, wrong and swapped letters.

    Returns `most` + 1 if `option` begins with the word or has it as its last part, and `most` + 2
    if it has more typos (optimal string alignment, restricted to the diagonals within `most`).
    """
    far, bare = most + 2, word.strip("-")
    if len(bare) > 2 and (option.startswith(word) or _ends(option, bare)):
        far = most + 1
    # Texts from files may be long, and the time is quadratic.
    if abs(len(word) - len(option)) > most or len(word) > 200:
        return far
    older: list[int] = []
    before, row = [], list(range(len(option) + 1))
    for i, x in enumerate(word, 1):
        older, before, row = before, row, [i] + [far] * len(option)
        for j in range(max(1, i - most), min(len(option), i + most) + 1):
            y = option[j - 1]
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == option[j - 2] and word[i - 2] == y:
                row[j] = min(row[j], older[j - 2] + 1)
        if min(row) > most:
            return far
    return row[-1] if row[-1] <= most else far


def _ends(option: str, word: str) -> bool:
    """Checks whether an option ends with a word after a separator such as a dot."""
    return option.endswith(word) and not option[: -len(word)][-1:].isalnum()


def one_of(name: str, value: object, options: object, error: type[ValueError] = ValueError) -> None:
    """Checks that an argument is one of a few words or numbers.

    Args:
      name: Its name in the message.
      value: The value.
      options: A `Literal`, or a collection of the allowed values.
      error: The class of the error.

    Raises:
      ValueError: If the value is not among them.

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
      key: A typed key, or a raw key of the default generator. It may be traced.
      optional: Whether None is also accepted.

    Raises:
      TypeError: If the value is invalid.

    >>> import jax
    >>> one_key(jax.random.key(0))
    """
    if optional and key is None:
        return
    import jax

    try:  # `fold_in` takes one typed or raw key, and refuses everything else
        jax.eval_shape(lambda key: jax.random.fold_in(key, 0), key)
    except (TypeError, ValueError):
        expected = "expected one PRNG key, such as jax.random.key(0)"
        raise TypeError(f"key: {expected}; got {described(key)}") from None


def scalar(name: str, x: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """Checks that an argument is one real number.

    Args:
      name: Its name in the message.
      x: The value, which may be traced.
      holds: The condition on the value, which is checked if the value is known.
      expected: The description of valid values in the message, such as "a finite number".

    Raises:
      ValueError: If the value is not a real scalar, or `holds` returns false.
    """
    import jax.numpy as jnp
    import numpy as np

    value = concrete(x)
    kinds = (jnp.floating, jnp.integer, jnp.bool)
    real = np.shape(x) == () and (
        value is None or any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    )
    if not real or (value is not None and not holds(value)):
        got = repr(x) if real else described(x)
        raise ValueError(f"{name}: expected {expected}, got {got}")


def shortened(text: str, longest: int) -> str:
    """Shortens a text in its middle.

    Args:
      text: The text.
      longest: The largest length in characters, at least 3.

    Returns:
      The text, with "..." for the removed middle.

    >>> shortened("abcdefghijkl", 9)
    'abc...jkl'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 2
    return f"{text[: longest - 3 - tail]}...{text[len(text) - tail :]}"


def static(name: str, x: Any, holds: Callable[[Any], Any], expected: str) -> float:
    """Checks a number that must not be traced because shapes or control flow depend on it.

    Args:
      name: Its name in the message.
      x: The value.
      holds: The condition on the value.
      expected: The description of valid values in the message, such as "a number in (0, 1]".

    Returns:
      The number.

    Raises:
      ValueError: As `scalar` does.
      TypeError: If the value is traced.
    """
    scalar(name, x, holds, expected)
    value = concrete(x)
    if value is None:
        raise TypeError(f"{name}: expected a static number, got a traced one")
    return float(value)


def storage(size: float) -> str:
    """Formats a number of bytes in a suitable unit.

    Args:
      size: The number of bytes.

    Returns:
      The number with its unit, a power of 1000.

    >>> storage(1_500_000), storage(999_950_000)
    ('1.5 MB', '1.0 GB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if round(size / factor, 1) >= 1:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"
