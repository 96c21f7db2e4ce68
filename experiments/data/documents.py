"""Texts for language modelling, read from JSON lines: GSM8k, Starcoder's Python and similar files.

`read` reads a text from one field, or a question and its answer. `pack` encodes each text in a
separate row. All its tokens are learned.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import choices
from experiments.data.files import DataError, Source, json_lines
from experiments.data.instructions import MAX_LINE, Packed

SOURCE = Source(
    "texts in JSON lines",
    "openai/grade-school-math (GSM8k) or bigcode/starcoderdata",
    "generated questions and their answers (experiments.data.choices)",
)
_LAYOUTS = (("text",), ("content",), ("question", "answer"))


def holds(path: str | Path) -> bool:
    """Returns whether a file contains texts, by the fields of its first line.

    Args:
      path: The file of JSON lines.

    Returns:
      Whether `read` knows these fields, and they are not the fields of a question with choices.
      Their values are not read.

    Raises:
      DataError: If the file is missing, or its first line is not an object.
    """
    first = next((record for _, record in json_lines(Path(path), SOURCE, MAX_LINE)), {})
    known = any(set(fields) <= first.keys() for fields in _LAYOUTS)
    return known and not choices.understood(first)


def read(path: str | Path) -> tuple[str, ...]:
    """Reads texts from a file of JSON lines.

    Blank lines are skipped. A line has the field `text` or `content`, or a `question` and its
    `answer`, which are joined by a line break.

    Args:
      path: The file, one text per line.

    Returns:
      The texts, in the order of the file.

    Raises:
      DataError: If the file is missing, or a line is not a text. The message contains the file and
        the invalid line. It is a `ValueError`.
    """
    texts = []
    for what, record in json_lines(Path(path), SOURCE, MAX_LINE):
        fields = next((at for at in _LAYOUTS if set(at) <= record.keys()), None)
        if fields is None:
            held = repr(", ".join(sorted(record))[:99])
            raise DataError(f"{what}: expected text, content, or question and answer; got {held}")
        parts = [record[field] for field in fields]
        for part in parts:
            if not isinstance(part, str) or not part.strip():
                raise DataError(
                    f"{what}: expected texts that are not empty, got {str(part)[:99]!r}"
                )
            try:
                part.encode()
            except UnicodeEncodeError:
                raise DataError(f"{what}: {part[:99]!a} is not Unicode") from None
        texts.append("\n".join(parts))
    if not texts:
        raise DataError(f"{path} is empty; expected a text in JSON on each line")
    return tuple(texts)


def pack(texts: Sequence[str], encode: Callable[[bytes], Any], length: int) -> Packed:
    """Encodes texts, each in a separate row. Longer texts are truncated.

    Args:
      texts: The texts.
      encode: A function from bytes in UTF-8 to tokens `(n,)`.
      length: Tokens of a row, 2 or more.

    Returns:
      The tokens `(text, length)`, padded with zeros, and a mask of the learned tokens: the tokens
      of the text, from the second on.

    Raises:
      DataError: If the arrays would be too large for memory, or a text has fewer than two tokens
        and so nothing to learn.

    >>> packed = pack(["abc"], lambda x: np.frombuffer(x, np.uint8), 5)
    >>> packed.tokens.tolist(), packed.scored.tolist()
    ([[97, 98, 99, 0, 0]], [[True, True, False, False]])
    """
    packed = Packed.blank(len(texts), length, "texts")
    for i, text in enumerate(texts):
        row = np.asarray(encode(text.encode()), np.int32)[:length]
        if len(row) < 2:
            raise DataError(f"texts[{i}] has {len(row)} tokens; expected 2 or more")
        packed.tokens[i, : len(row)] = row
        packed.scored[i, : len(row) - 1] = True
    return packed
