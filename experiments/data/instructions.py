"""Instructions and responses to fine-tune language models on: read from JSON lines, and packed.

`read` understands the fields of Anthropic-HH (the chosen response of each pair), TULU and others
with messages, Alpaca and similar files.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int32

from experiments.data import gpt2_tokens
from experiments.data.files import MAX_BYTES, DataError, Source, json_lines

# For messages about a missing file: its content, its publisher, the offline data.
SOURCE = Source(
    "instructions and responses in JSON lines",
    "anthropics/hh-rlhf (unpacked) or allenai/tulu-v1-sft-mixture",
    "generated questions and their answers (experiments.data.choices)",
)
# The maximum number of bytes of one example.
MAX_LINE = 1 << 22
# Anthropic-HH's text before each turn of the assistant.
_TURN = "\n\nAssistant:"
_PROMPTS = ("prompt", "instruction", "question")
_RESPONSES = ("response", "output", "completion", "answer")


class Instruction(NamedTuple):
    """A prompt, and the response that a model should learn.

    Attributes:
      prompt: Everything before the response, as text or as tokens.
      response: The response, the only part that is learned, as text or as tokens.
    """

    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]


class Packed(NamedTuple):
    """Instructions as arrays of tokens, padded with zeros.

    Attributes:
      tokens: The prompt followed by the response: int32 `(example, token)`.
      scored: Which tokens, from the second on, belong to the response: `(example, token - 1)`.
    """

    tokens: Int32[np.ndarray, "example token"]
    scored: Bool[np.ndarray, "example token_but_one"]

    @classmethod
    def blank(cls, count: int, length: int, what: str = "examples") -> Self:
        """Creates empty rows for examples, without learned tokens.

        Args:
          count: The number of examples.
          length: Tokens of a row, 1 or more.
          what: The name of the examples in messages.

        Returns:
          Rows of zeros.

        Raises:
          DataError: If the arrays would be too large for memory.
        """
        # A position takes four bytes of `tokens` and one byte of `scored`.
        if 5 * count * length > MAX_BYTES:
            raise DataError(f"{count} {what} of {length} tokens are too many")
        return cls(np.zeros((count, length), np.int32), np.zeros((count, length - 1), bool))


def read(path: str | Path) -> tuple[Instruction, ...]:
    """Reads instructions from a file of JSON lines.

    Blank lines are skipped. Each line is an object. The names of its fields determine its layout:
    `chosen` (Anthropic-HH: a dialogue; its last turn is the response), `messages` (each with `role`
    and `content`; the assistant's last message is the response), or `prompt` (`instruction`,
    `question`; followed by `input`, if present) and `response` (`output`, `completion`, `answer`).
    Prompt and response may be lists of tokens, for networks with unsupported tokenizers.

    Args:
      path: The file, one example per line.

    Returns:
      The examples, in the order of the file.

    Raises:
      DataError: If the file is missing, or a line is not an example. The message contains the file
        and the invalid line. It is a `ValueError`.
    """
    lines = json_lines(Path(path), SOURCE, MAX_LINE)
    examples = tuple(_example(record, what) for what, record in lines)
    if not examples:
        raise DataError(f"{path} is empty; expected an example in JSON on each line")
    return examples


def _example(record: Mapping[str, Any], what: str) -> Instruction:
    """Reads an example from one object; `what` is its line, for messages."""
    if "chosen" in record and isinstance(record["chosen"], str):
        prompt, turn, response = record["chosen"].rpartition(_TURN)
        # If the assistant has no turn, `turn` and the prompt are empty, which is rejected below.
        prompt += turn
    elif "messages" in record:
        prompt, response = _dialogue(record["messages"], what)
    else:
        prompt = next((record[k] for k in _PROMPTS if k in record), None)
        response = next((record[k] for k in _RESPONSES if k in record), None)
        if prompt is None or response is None:
            held = repr(", ".join(sorted(record))[:99])
            raise DataError(
                f"{what}: expected the fields prompt and response, instruction and output, chosen, "
                f"or messages; got {held}"
            )
        if _tokens(prompt) and _tokens(response):
            return Instruction(tuple(prompt), tuple(response))
        if isinstance(prompt, str) and isinstance(more := record.get("input", ""), str):
            prompt = f"{prompt}\n\n{more}\n\n" if more else f"{prompt}\n\n"
    for text in (prompt, response):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{what}: expected texts that are not empty, got {str(text)[:99]!r}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{what}: {text[:99]!a} is not Unicode") from None
    return Instruction(prompt, response)


def _tokens(value: object) -> bool:
    """Returns whether a value is a list of tokens: one or more integers in the range of int32."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(x) is int and 0 <= x < 1 << 31 for x in value)
    )


def _dialogue(messages: Any, what: str) -> tuple[str, str]:
    """Returns the prompt in TULU's format, and the assistant's last message.

    Later messages are omitted.
    """
    fine = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not fine:
        raise DataError(f"{what}: expected messages that have a role and a content, both texts")
    last = max((k for k, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    if not last:
        raise DataError(f"{what}: expected messages with an answer of the assistant")
    turns = [f"<|{m['role']}|>\n{m['content'].strip()}\n" for m in messages[:last]]
    return "".join(turns) + "<|assistant|>\n", messages[last]["content"]


def pack(
    examples: Sequence[Instruction],
    encode: Callable[[bytes], ArrayLike],
    length: int,
    end: Sequence[int] = (),
) -> Packed:
    """Encodes examples, each in a separate row.

    A row consists of the prompt, the response and `end`. A longer row is truncated at its end. An
    example is omitted if its prompt is empty, or fills the row and so leaves no token of the
    response.

    Args:
      examples: The examples.
      encode: A function from bytes in UTF-8 to tokens `(n,)`. It is not called for parts that are
        already tokens.
      length: Tokens of a row, 2 or more.
      end: Tokens that end a response, and are learned with it; none by default.

    Returns:
      The tokens `(example, length)`, and a mask of the learned ones; without examples, no rows.

    Raises:
      DataError: If the arrays would be too large for memory.

    >>> packed = pack([Instruction("ab", "c")], lambda x: np.frombuffer(x, np.uint8), 5)
    >>> packed.tokens.tolist(), packed.scored.tolist()
    ([[97, 98, 99, 0, 0]], [[False, True, False, False]])
    """
    tokens, scored = Packed.blank(len(examples), length)
    kept = 0
    for example in examples:
        prompt = _encoded(example.prompt, encode)
        if not 0 < len(prompt) < length:
            continue
        response = _encoded(example.response, encode, example.prompt)
        row = np.concatenate([prompt, response, np.asarray(end, np.int32)])[:length]
        tokens[kept, : len(row)] = row
        # `scored` begins with the second token: its entry i belongs to token i + 1.
        scored[kept, len(prompt) - 1 : len(row) - 1] = True
        kept += 1
    return Packed(tokens[:kept], scored[:kept])


def _encoded(
    part: str | tuple[int, ...],
    encode: Callable[[bytes], Any],
    before: str | tuple[int, ...] = "",
) -> np.ndarray:
    """Returns the tokens of a part, int32 `(n,)`, which is encoded after the text before it."""
    if isinstance(part, str):
        text = before.encode() if isinstance(before, str) else b""
        part = gpt2_tokens.following(encode, text, part.encode())
    return np.asarray(part, np.int32)
