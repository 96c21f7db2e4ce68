"""Compiles regular expressions from recipes and adapters, which are untrusted.

They run under RE2, which takes linear time in the length of the name and a few MB of memory.
Python's own engine can take exponential time on a hostile pattern. RE2 does not support lookarounds
and references to groups within a pattern: https://github.com/google/re2/wiki/Syntax.
"""

import re
from collections.abc import Callable

import re2

_ESCAPE = re.compile(r"\\(?:g<(\w+)>|([1-9]\d?)|(.?))", re.DOTALL)


Pattern = re2._Regexp
"""A compiled regular expression, with the methods of `re.Pattern`."""


def compiled(text: str) -> Pattern:
    r"""Compiles a regular expression in RE2's syntax.

    Args:
      text: The regular expression.

    Returns:
      A pattern with the methods of Python's `re.Pattern`.

    Raises:
      ValueError: If the expression is invalid in RE2; the message quotes it.

    >>> compiled(r"\d+").search("block12")[0]
    '12'
    """
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0]
        why = why.decode(errors="replace") if isinstance(why, bytes) else error
        raise ValueError(f"{text!r} is not a regular expression of RE2: {why}") from error


def renaming(text: str, replacement: str) -> Callable[[str], str]:
    r"""Makes a function that replaces every match of a regular expression in a name.

    Args:
      text: The regular expression, in RE2's syntax.
      replacement: The replacement of a match: \1, \g<1> and \g<name> stand for groups, \\ for a
        backslash. A group that matched nothing stands for "".

    Returns:
      A function from a name to the name with all matches replaced.

    Raises:
      ValueError: If `text` is not a regular expression, or if `replacement` refers to a group that
        is missing in `text` or contains any other escape.

    >>> renaming(r"^(\w+)\.block(\d+)", r"\1.layers.\g<2>")("model.block3.weight")
    'model.layers.3.weight'
    """
    pattern = compiled(text)
    parts: list[str | int] = []
    end = 0
    for escape in _ESCAPE.finditer(replacement):
        named, numbered, other = escape.groups()
        group = named or numbered
        if group is None and other != "\\":
            raise ValueError(rf"{replacement!r}: expected a group or \\ for {escape[0]!r}")
        if group is not None:
            group = int(group) if group.isdecimal() else pattern.groupindex.get(group, -1)
            if not 0 <= group <= pattern.groups:
                raise ValueError(
                    f"{replacement!r}: the group for {escape[0]!r} is missing in {text!r}"
                )
        parts += [replacement[end : escape.start()], other if group is None else group]
        end = escape.end()
    parts.append(replacement[end:])

    def filled(match: re2._Match) -> str:
        return "".join(part if isinstance(part, str) else match[part] or "" for part in parts)

    return lambda name: pattern.sub(filled, name)
