"""The six benchmarks of SAIL's Table 2: PIQA, HellaSwag, Winogrande, SciQ, ARC-Easy and COPA.

`read` reads the questions of a benchmark from a file of JSON lines, with the publishers' field
names. `pack` encodes them as tokens, with the lengths that divide log-likelihoods of choices. The
paper specifies neither prompts nor scoring, but OLMo's tools evaluate its networks. Questions
therefore use the wording of these tools, zero-shot.

References:
  SAIL (Structured-Initialization Learning), App. I.2 and Table 2.
  Groeneveld et al., OLMo, 2024 (arXiv 2402.00838); olmo/eval/downstream.py of its code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.data import choices
from experiments.data.choices import Item, Packed
from experiments.data.files import DataError, inside, json_lines, lines

Unit = Literal["token", "character", "sum"]
"""The divisor of a choice's log-likelihood: its tokens, its characters without the leading space,
or 1."""
Scoring = Literal["token", "character", "sum", "olmo"]
"""A unit for all benchmarks, or "olmo" for the unit that OLMo's tools use for each benchmark."""


class Question(NamedTuple):
    """A question of a benchmark.

    Attributes:
      contexts: The text before each choice. They differ only in Winogrande.
      choices: The possible continuations, each beginning with a space. They are equal in
        Winogrande.
      answer: The index of the correct choice.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    answer: int


class _Asked(NamedTuple):
    """A question with the fields of its benchmark; `answer` is one of `names`, the choices'
    names."""

    contexts: Sequence[str]
    choices: Sequence[str]
    answer: object
    names: Sequence[object]


class Benchmark(NamedTuple):
    """Rules to read, phrase and score the questions of a benchmark.

    Attributes:
      title: Its name in the paper's table.
      unit: The divisor of its choices' log-likelihoods in OLMo's tools.
      ask: A function from the fields of a question and its number to the question.
    """

    title: str
    unit: Unit
    ask: Callable[[Mapping[str, Any], int], _Asked]


def _put(text: str) -> str:
    """Phrases a question that has a short answer."""
    return f"Question: {text}\nAnswer:"


def _piqa(record: Mapping[str, Any], _: int) -> _Asked:
    """Phrases a question of PIQA: a goal, and two ways to reach it."""
    return _Asked(
        2 * [_put(record["goal"])], [record["sol1"], record["sol2"]], record["label"], (0, 1)
    )


def _plain(text: str) -> str:
    """Removes remnants of the source web pages from a text of HellaSwag."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(record: Mapping[str, Any], _: int) -> _Asked:
    """Phrases a question of HellaSwag: an activity, its beginning, and possible continuations."""
    begun = f"{record['ctx_a']} {record['ctx_b'].capitalize()}"
    endings = [_plain(ending) for ending in record["endings"]]
    context = _plain(f"{record['activity_label']}: {begun}")
    return _Asked(len(endings) * [context], endings, record["label"], range(len(endings)))


def _winogrande(record: Mapping[str, Any], _: int) -> _Asked:
    """Phrases a question of Winogrande: the rest of a sentence, after each of two words in its
    blank.

    The rest is scored. The word that makes it more likely is the answer.
    """
    before, blank, after = record["sentence"].partition("_")
    if not blank:
        raise ValueError("a sentence with a blank, _")
    contexts = [before + record["option1"], before + record["option2"]]
    return _Asked(contexts, 2 * [after.strip()], record["answer"], (1, 2))


def _sciq(record: Mapping[str, Any], index: int) -> _Asked:
    """Phrases a question of SciQ after the text that supports its answer.

    The position of the correct answer is the question's number modulo 4, so that equal scores
    favour no position.
    """
    wrong = [record[f"distractor{k}"] for k in (1, 2, 3)]
    wrong.insert(index % 4, record["correct_answer"])
    context = f"{record['support'].strip()}\n{_put(record['question'])}"
    return _Asked(4 * [context], wrong, index % 4, range(4))


def _arc(record: Mapping[str, Any], _: int) -> _Asked:
    """Phrases a question of ARC, in its publishers' own layout or in columns."""
    question, offered = record["question"], record.get("choices")
    if isinstance(question, dict):
        question, offered = question["stem"], question["choices"]
    if isinstance(offered, dict):
        texts, names = offered["text"], offered["label"]
    else:
        texts, names = ([one[key] for one in offered] for key in ("text", "label"))  # type: ignore[union-attr]
    return _Asked(len(texts) * [_put(question)], texts, record["answerKey"], names)


def _copa(record: Mapping[str, Any], _: int) -> _Asked:
    """Phrases a question of COPA: a premise without its full stop, and a cause or effect of it."""
    # The full stop of the premise is removed, because the sentence continues in the choice.
    joint = choices.CONNECTIVES[record["question"]]
    pair = [record["choice1"], record["choice2"]]
    pair = [text[:1].lower() + text[1:] for text in pair]
    return _Asked(2 * [f"{record['premise'].strip()[:-1]} {joint}"], pair, record["label"], (0, 1))


BENCHMARKS: Mapping[str, Benchmark] = {
    "piqa": Benchmark("PIQA", "character", _piqa),
    "hellaswag": Benchmark("HellaSwag", "character", _hellaswag),
    "winogrande": Benchmark("Winogrande", "sum", _winogrande),
    "sciq": Benchmark("SciQ", "sum", _sciq),
    "arc_easy": Benchmark("ARC-Easy", "sum", _arc),
    "copa": Benchmark("COPA", "sum", _copa),
}


def read(folder: str | Path, name: str) -> tuple[Question, ...]:
    """Reads the questions of a benchmark.

    The file is NAME.jsonl, with a question on each line, as in the publishers' files or the Hugging
    Face datasets. SciQ's list becomes lines, and COPA is as in SuperGLUE. If PIQA's questions
    contain no labels, the labels are in NAME.lst, as published.

    Args:
      folder: The folder of the files.
      name: The name of the benchmark, a key of `BENCHMARKS`.

    Returns:
      The questions, in the order of the file.

    Raises:
      KeyError: If there is no such benchmark.
      DataError: If a file is missing or damaged, or a line is not a question of the benchmark. The
        message contains the file and the line. It is a `ValueError`.
    """
    ask, found = BENCHMARKS[name].ask, []
    path, labels = inside(Path(folder), f"{name}.jsonl"), inside(Path(folder), f"{name}.lst")
    # PIQA's publishers keep labels in a separate file, with one for each line of the questions.
    given = lines(labels, choices.SOURCE) if labels.exists() else None
    for what, record in json_lines(path, choices.SOURCE, choices.MAX_LINE):
        if given is not None:
            if len(found) >= len(given):
                raise DataError(f"{labels} has {len(given)} labels, {path} more questions")
            record = {**record, "label": given[len(found)]}
        try:
            found.append(_checked(ask(record, len(found))))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            told = repr(", ".join(sorted(record))[:99])
            raise DataError(
                f"{what}: expected the fields of a question of {BENCHMARKS[name].title}; got "
                f"{told} ({type(error).__name__}: {str(error)[:99]})"
            ) from None
    if not found:
        raise DataError(f"{path} is empty; expected a question in JSON on each line")
    if given is not None and len(given) != len(found):
        raise DataError(f"{labels} has {len(given)} labels, {path} has {len(found)} questions")
    return tuple(found)


def _checked(asked: _Asked) -> Question:
    """Builds a `Question` after checking that its texts are texts and its answer is a choice."""
    for text in (*asked.contexts, *asked.choices):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"a text that is not empty in place of {text!r}")
        text.encode()
    names = [str(name) for name in asked.names]
    if len(asked.choices) < 2 or len(set(names)) != len(asked.choices):
        raise ValueError("two choices or more, each with a name of its own")
    # Tokenizers join a word with the space before it, so the space belongs to the choice and not to
    # the text before.
    spaced = tuple(f" {text.strip()}" for text in asked.choices)
    return Question(tuple(asked.contexts), spaced, names.index(str(asked.answer).strip()))


def pack(
    questions: Sequence[Question],
    encode: Callable[[bytes], Int[np.ndarray, " n"]],
    length: int,
    unit: Unit,
) -> Packed:
    """Encodes questions as token arrays, with the lengths that divide scores.

    A choice and the text before it are encoded separately. A sequence that is too long is truncated
    at the beginning of that text.

    Args:
      questions: The questions, one or more.
      encode: A function from bytes in UTF-8 to tokens `(n,)`.
      length: The number of tokens of each sequence, at least 2.
      unit: The unit of a choice's length; with "sum" the length is 1.

    Returns:
      The arrays. They have as many choices as the longest question. Their `length` is in `unit`,
      not in bytes.

    Raises:
      ValueError: As `choices.pack`, where each choice counts as an item.

    >>> one = Question(("1 +", "1 + 1"), (" 1 = 2", " = 2"), 1)
    >>> packed = pack([one], lambda text: np.frombuffer(text, np.uint8), 12, "character")
    >>> packed.scored.sum(-1).tolist(), packed.length.tolist()
    ([[6, 4]], [[5, 3]])
    """
    places, items = [], []
    for i, one in enumerate(questions):
        for j, pair in enumerate(zip(one.contexts, one.choices, strict=True)):
            places.append((i, j))
            items.append(Item(pair[0], (pair[1],), 0))
    flat = choices.pack(items, encode, length)
    shape = (len(questions), max(len(one.choices) for one in questions))
    at = tuple(np.array(places).T)
    tokens = np.zeros((*shape, length), np.int32)
    scored, sizes = np.zeros(tokens.shape, bool), np.zeros(shape, np.int32)
    tokens[at], scored[at] = flat.tokens[:, 0], flat.scored[:, 0]
    sizes[at] = [1 if unit == "sum" else len(item.choices[0].strip()) for item in items]
    packed = Packed(tokens, scored, sizes, np.array([one.answer for one in questions], np.int32))
    return per_token(packed) if unit == "token" else packed


def per_token(packed: Packed) -> Packed:
    """Counts the length of choices in tokens.

    Args:
      packed: Questions as tokens.

    Returns:
      The same questions; `length` has the number of tokens of each choice.
    """
    return packed._replace(length=packed.scored.sum(-1).astype(np.int32))
