"""Multiple-choice questions: read from JSON lines, generated, packed into tokens, and scored.

`read` understands the fields of HellaSwag, ARC, PIQA, COPA, WinoGrande, SciQ, SIQA and files like
them.
`generate` makes arithmetic questions without files. A model chooses the answer with the highest
log-likelihood per token or byte (`scores`).

References:
  Brown et al., Language models are few-shot learners, 2020 (arXiv 2005.14165), for choosing by
  length-normalised log-likelihood.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from experiments.data import gpt2_tokens
from experiments.data.files import MAX_BYTES, DataError, Source, json_lines, lines

SOURCE = Source(
    "multiple choice in JSON lines",
    "rowanzellers.com/hellaswag, yonatanbisk.com/piqa or allenai.org/data (ARC, WinoGrande, SciQ)",
    "generated questions (experiments.data.choices.generate)",
)
# The maximum number of bytes of one question.
MAX_LINE = 1 << 20
MAX_CHOICES = 64
CONNECTIVES = {"cause": "because", "effect": "therefore"}
"""The word between a premise of COPA and a choice, by the question."""


class Item(NamedTuple):
    """A question: a text, and several possible continuations. One of them is correct.

    Attributes:
      context: The text before the choices, without white space at its end (unless it is nothing
        else).
      choices: The continuations, 2 or more. Each begins with the white space that separates it from
        the context.
      answer: The index of the right choice.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


class Packed(NamedTuple):
    """Questions as arrays of tokens, padded with zeros.

    Attributes:
      tokens: The context followed by the choice, for each choice of each item: int32 `(item,
        choice, token)`. Items with fewer choices than others have rows of zeros.
      scored: True at the tokens of the choice itself: `(item, choice, token)`.
      length: The number of bytes of each choice in UTF-8, 0 for a missing choice: int32 `(item,
        choice)`.
      answer: The index of the right choice: int32 `(item,)`.
    """

    tokens: Int32[np.ndarray, "item choice token"]
    scored: Bool[np.ndarray, "item choice token"]
    length: Int32[np.ndarray, "item choice"]
    answer: Int32[np.ndarray, " item"]


def read(path: str | Path, answers: str | Path | None = None) -> tuple[Item, ...]:
    """Reads questions from a file of JSON lines.

    Blank lines are skipped. Each line is an object. The names of its fields determine its layout.

    Args:
      path: The file, one question per line.
      answers: A second file with only the answers, one per line, as for PIQA; None if each question
        contains its own. If given, it replaces the answers in the questions.

    Returns:
      The questions, in the order of the file.

    Raises:
      DataError: If a file is missing, a line is not a question, its answer is not one of its
        choices, or the numbers of answers and questions differ. The message contains the file and
        the invalid line. It is a `ValueError`.
    """
    path, items, given = Path(path), [], None
    if answers is not None:
        given = lines(Path(answers), SOURCE)
    for what, record in json_lines(path, SOURCE, MAX_LINE):
        if given is not None:
            if len(items) >= len(given):
                raise DataError(f"{answers} has {len(given)} answers, {path} more questions")
            record = {key: record[key] for key in record if key not in _ANSWERS}
            record["label"] = given[len(items)]
        items.append(_item(record, what, len(items)))
    if given is not None and len(given) != len(items):
        raise DataError(f"{answers} has {len(given)} answers, {path} has {len(items)} questions")
    if not items:
        raise DataError(f"{path} is empty; expected a question in JSON on each line")
    return tuple(items)


def understood(record: Mapping[str, Any]) -> bool:
    """Returns whether an object has the fields of a question."""
    return any(all(field in record for field in fields) for fields, _ in _SPELLINGS)


def _item(record: Mapping[str, Any], what: str, index: int) -> Item:
    """Builds an `Item` from a line's fields, by the first known layout with all its fields
    present."""
    for fields, take in _SPELLINGS:
        if all(field in record for field in fields):
            context, choices, answer, names = take(record, what, index)
            break
    else:
        held = repr(", ".join(sorted(record))[:99])
        raise DataError(
            f"{what}: expected the fields of a question, such as question, choices and answer, or "
            f"ctx, endings and label; got {held}"
        )
    if not isinstance(choices, list) or not 2 <= len(choices) <= MAX_CHOICES:
        got = len(choices) if isinstance(choices, list) else type(choices).__name__
        raise DataError(f"{what}: expected a list of 2 to {MAX_CHOICES} choices, got {got}")
    for text in (context, *choices):
        if not isinstance(text, str) or not text.strip(" "):
            raise DataError(f"{what}: expected texts that are not empty, got {str(text)[:99]!r}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{what}: {text[:99]!a} is not Unicode") from None
    where = {str(name): k for k, name in enumerate(names)}
    if len(where) != len(choices):
        raise DataError(f"{what}: {len(choices)} choices have {len(where)} distinct names")
    if type(answer) not in (int, str) or str(answer).strip() not in where:
        raise DataError(
            f"{what} is mislabelled: its answer is {str(answer)[:99]!r}; expected one of "
            f"{', '.join(where)[:99]!r}"
        )
    spaced = tuple(text if text[0].isspace() else f" {text}" for text in choices)
    return Item(context.rstrip() or context, spaced, where[str(answer).strip()])


_Taken = tuple[Any, Any, Any, Sequence[Any]]
_CONTEXTS = ("ctx", "context", "question", "prompt", "query", "goal", "premise", "stem")
_LISTS = ("choices", "endings", "options")
_ANSWERS = ("answer", "label", "answerKey", "answer_index", "gold")


def _first(record: Mapping[str, Any], fields: Sequence[str], what: str) -> Any:
    """Returns the value of the first of these fields that the record has."""
    for field in fields:
        if field in record:
            return record[field]
    raise DataError(f"{what}: expected one of the fields {', '.join(fields)}")


def _plain(record: Mapping[str, Any], what: str, _: int) -> _Taken:
    """Reads a context, a list of choices and an answer, under any of their usual names."""
    context, choices = _first(record, _CONTEXTS, what), _first(record, _LISTS, what)
    answer, names = _first(record, _ANSWERS, what), None
    if isinstance(context, dict):  # ARC's own files
        choices, context = context.get("choices", choices), context.get("stem")
    if isinstance(choices, dict):  # ARC in columns
        choices, names = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        names = [choice.get("label") for choice in choices]
        choices = [choice.get("text") for choice in choices]
    if names is None:
        letters = isinstance(answer, str) and len(answer) == 1 and answer.isupper()
        count = len(choices) if isinstance(choices, list) else 0
        names = list(ascii_uppercase[:count]) if letters else list(range(count))
    if not isinstance(names, list):
        raise DataError(f"{what}: expected a list of the choices' names, got {str(names)[:99]!r}")
    return context, choices, answer, names


def _arc(record: Mapping[str, Any], what: str, index: int) -> _Taken:
    """Reads a question of ARC, in its own files or in the columns of other publishers."""
    question = record["question"]
    held = question if isinstance(question, dict) else {}
    return _plain({**record, "choices": record.get("choices", held.get("choices"))}, what, index)


def _numbered(context: str, choice: str) -> Callable[[Mapping[str, Any], str, int], _Taken]:
    """Returns a reader of records with two choices in numbered fields (PIQA, COPA)."""

    def take(record: Mapping[str, Any], what: str, _: int) -> _Taken:
        pair = [record[f"{choice}1"], record[f"{choice}2"]]
        text = record[context]
        if context == "premise":  # COPA
            joint = CONNECTIVES.get(str(record["question"]))
            if joint is None:
                raise DataError(f"{what}: expected the question cause or effect")
            text = f"{str(text).rstrip().removesuffix('.')} {joint}"
            pair = [c[:1].lower() + c[1:] if isinstance(c, str) else c for c in pair]
        return text, pair, _first(record, _ANSWERS, what), (0, 1)

    return take


def _blank(record: Mapping[str, Any], what: str, _: int) -> _Taken:
    """Reads a question of WinoGrande, with the options for a blank as its choices.

    Each choice is one of the options, followed by the rest of the sentence. A sentence that begins
    with the blank has no context, and a line break is used instead.
    """
    sentence, options = record["sentence"], [record["option1"], record["option2"]]
    if not isinstance(sentence, str) or sentence.count("_") != 1:
        raise DataError(f"{what}: expected a sentence with one blank, _")
    before, after = sentence.split("_")
    choices = [text + after if isinstance(text, str) else text for text in options]
    return before or "\n", choices, _first(record, _ANSWERS, what), (1, 2)


def _lettered(record: Mapping[str, Any], what: str, _: int) -> _Taken:
    """Reads a question of SIQA. Its labels are 1 to 3, or the letters in its fields' names."""
    context, question = record["context"], record["question"]
    if not isinstance(context, str) or not isinstance(question, str):
        raise DataError(f"{what}: expected a context and a question, both texts")
    answer = _first(record, ("correct", *_ANSWERS), what)
    names = "ABC" if str(answer).strip() in ("A", "B", "C") else "123"
    return f"{context} {question}", [record[f"answer{k}"] for k in "ABC"], answer, names


def _distracted(record: Mapping[str, Any], _: str, index: int) -> _Taken:
    """Reads a question of SciQ, which has a correct answer and three wrong ones.

    The position of the correct answer is the question's number modulo 4, because a fixed position
    would be easy to guess.
    """
    choices = [record[f"distractor{k}"] for k in (1, 2, 3)]
    choices.insert(index % 4, record["correct_answer"])
    return record["question"], choices, index % 4, range(4)


_SPELLINGS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str, int], _Taken]], ...] = (
    (("goal", "sol1", "sol2"), _numbered("goal", "sol")),
    (("premise", "choice1", "choice2", "question"), _numbered("premise", "choice")),
    (("sentence", "option1", "option2"), _blank),
    (("context", "question", "answerA", "answerB", "answerC"), _lettered),
    (("question", "correct_answer", "distractor1", "distractor2", "distractor3"), _distracted),
    (("question", "answerKey"), _arc),
    *(((text, options), _plain) for text in _CONTEXTS for options in _LISTS),
)


def generate(seed: int, items: int, choices: int = 4) -> tuple[Item, ...]:
    """Generates questions about sums, differences, products and arithmetic sequences.

    The four kinds alternate. The correct answer is equally likely at each position, and wrong
    answers differ from it by at most 9.

    Args:
      seed: Seed of the random numbers, >= 0.
      items: The number of questions, >= 1.
      choices: The number of choices of each question, from 2 to 8.

    Returns:
      The questions.

    Raises:
      ValueError: If an argument is outside its range.

    >>> generate(0, 1)[0].context.endswith(" =")
    True
    """
    if not (items >= 1 and 2 <= choices <= 8 and seed >= 0):
        raise ValueError(
            "seed, items, choices must be at least 0, at least 1 and 2 to 8; got "
            f"{seed}, {items}, {choices}"
        )
    rng, out = np.random.default_rng(seed), []
    for k in range(items):
        a, b = rng.integers(2, 50, 2).tolist()
        context, right = (
            (f"{a} + {b} =", a + b),
            (f"{a + b} - {b} =", a),
            (f"{a} * {b % 8 + 2} =", a * (b % 8 + 2)),
            (", ".join(str(a + i * b) for i in range(4)) + ",", a + 4 * b),
        )[k % 4]
        offsets = rng.permutation([d for d in range(-9, 10) if d and right + d >= 0])
        values = [right + d for d in offsets[: choices - 1].tolist()]
        answer = int(rng.integers(choices))
        values.insert(answer, right)
        out.append(Item(context, tuple(f" {value}" for value in values), answer))
    return tuple(out)


def pack(
    items: Sequence[Item], encode: Callable[[bytes], Int[np.ndarray, " n"]], length: int
) -> Packed:
    """Encodes questions as token arrays: for each choice, the context followed by that choice.

    A sequence that is too long is truncated at the beginning of its context.

    Args:
      items: The questions, one or more.
      encode: A function from bytes in UTF-8 to tokens `(n,)`.
      length: The number of tokens of each sequence, at least 2.

    Returns:
      The arrays. They have as many choices as the longest item.

    Raises:
      ValueError: If there are no items, `length` is below 2, the arrays would be too large, or a
        choice has no tokens or leaves no room for any token of the context.

    >>> item = Item("1 + 1 =", (" 2", " 3"), 0)
    >>> packed = pack([item], lambda text: np.frombuffer(text, np.uint8), 10)
    >>> packed.tokens.shape, packed.scored.sum(-1).tolist()
    ((1, 2, 10), [[2, 2]])
    """
    widest = max((len(item.choices) for item in items), default=0)
    if not widest or length < 2:
        raise ValueError(
            f"items, length must be one or more and 2 or more; got {len(items)}, {length}"
        )
    # A position takes four bytes of `tokens` and one byte of `scored`.
    if 5 * len(items) * widest * length > MAX_BYTES:
        raise ValueError(
            f"items: {len(items)} of {widest} choices and {length} tokens are too many"
        )
    tokens = np.zeros((len(items), widest, length), np.int32)
    scored, sizes = np.zeros(tokens.shape, bool), np.zeros(tokens.shape[:2], np.int32)
    for i, item in enumerate(items):
        before = item.context.encode()
        context = np.asarray(encode(before))
        for j, text in enumerate(item.choices):
            choice = np.asarray(gpt2_tokens.following(encode, before, text.encode()))
            # The end of the context is kept: it is next to the choice and matters most for it.
            start = min(len(context), length - len(choice))
            if start < 1 or not len(choice):
                raise ValueError(
                    f"items[{i}]: choice {j} has {len(choice)} tokens and the context "
                    f"{len(context)}; expected some of both in {length}"
                )
            end = start + len(choice)
            tokens[i, j, :end] = np.concatenate([context[len(context) - start :], choice])
            scored[i, j, start:end] = True
            sizes[i, j] = len(text.encode())
    return Packed(tokens, scored, sizes, np.array([item.answer for item in items], np.int32))


def scores(
    log_likelihood: Float[Array, "*any token"],
    scored: Bool[Array, "*any token"],
    length: Int[Array, "*any"] | None = None,
) -> Float[Array, "*any"]:
    """Computes the log-likelihood of each choice, divided by its length.

        score = sum_t log p(token_t | tokens before t) / length,  t over the choice's tokens

    Args:
      log_likelihood: The log-likelihood `(..., token)` of each token given those before it.
      scored: `(..., token)`, True at the tokens of the choice.
      length: The divisor of the sum, `(...,)`, such as the choice's bytes; None for its number of
        tokens.

    Returns:
      The scores `(...,)`; -inf for a choice without tokens.

    >>> scores(jnp.array([-1.0, -2.0, -4.0]), jnp.array([False, True, True]))
    Array(-3., dtype=float32)
    """
    scored = jnp.asarray(scored)
    total = jnp.where(scored, log_likelihood, 0).sum(-1)
    units = scored.sum(-1) if length is None else jnp.asarray(length)
    # At least 1: the branch that `where` does not select would be 0 / 0, with a NaN gradient.
    return jnp.where(scored.any(-1), total / jnp.maximum(units, 1), -jnp.inf)


def accuracy(score: Float[Array, "*any choice"], answer: Int[Array, "*any"]) -> Float[Array, ""]:
    """Computes the fraction of items for which the correct choice has the highest score.

    Of equal scores, the first is considered the highest.

    Args:
      score: The scores `(..., choice)`.
      answer: The indices of the correct choices `(...,)`.

    Returns:
      The fraction, a scalar in [0, 1].

    >>> accuracy(jnp.array([[-1.0, -2.0], [-1.0, -2.0]]), jnp.array([0, 1]))
    Array(0.5, dtype=float32)
    """
    return (jnp.argmax(score, -1) == jnp.asarray(answer)).mean()


def class_losses(
    score: Float[Array, "*any choice"], answer: Int[Array, "*any"]
) -> Float[Array, "*any"]:
    """Computes the negative log-probability of the correct choices in a softmax of the scores.

        p(choice) = exp(score of choice) / sum over choices of exp(score)

    With length-normalised scores, exp of the mean over items is the perplexity over the classes of
    the paper on overtraining (App. C.1). Its best value is 1, and guessing gives the number of
    choices.

    Args:
      score: The scores in nats `(..., choice)`; -inf for missing choices.
      answer: The indices of the correct choices `(...,)`.

    Returns:
      The losses in nats `(...,)`.

    References:
      Springer et al., 2025 (arXiv 2503.19206), Appendix C.1. Dividing likelihoods by their sum over
      the classes is our interpretation.

    >>> class_losses(jnp.zeros((1, 4)), jnp.array([2])).round(3).tolist()
    [1.386...]
    """
    log_p = jax.nn.log_softmax(jnp.asarray(score))
    return -jnp.take_along_axis(log_p, jnp.asarray(answer)[..., None], -1)[..., 0]
