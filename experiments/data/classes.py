"""Texts with classes, read from JSON lines as questions with the classes as choices.

`read` understands SUBJ, MR, CR, TREC, tweet sentiment and AG News (a text and its label), BoolQ (a
passage and a question), RTE (a premise and a hypothesis), and similar files. Files of
multiple-choice questions, such as SIQA's, are passed to `experiments.data.choices`.

A context consists of the texts of a line, each on a separate line, then "Label:". A class is a word
or two. The paper on overtraining specifies neither prompts nor words, so these are chosen here.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.data import choices
from experiments.data.choices import MAX_CHOICES, MAX_LINE, Item
from experiments.data.files import DataError, Source, json_lines

SOURCE = Source(
    "texts with classes in JSON lines",
    "huggingface.co: SetFit/subj, SetFit/CR, SetFit/rotten_tomatoes, SetFit/TREC-QC, "
    "SetFit/tweet_sentiment_extraction, SetFit/ag_news, aps/super_glue (BoolQ, RTE)",
    "generated questions and their answers (experiments.data.choices)",
)
# Fields of the texts, and the words for labels that are numbers or truth values. None means that
# the file's name or `label_text` must give them.
_LAYOUTS: tuple[tuple[tuple[str, ...], tuple[str, ...] | None], ...] = (
    (("passage", "question"), ("no", "yes")),
    (("premise", "hypothesis"), None),
    (("sentence1", "sentence2"), None),
    (("text",), None),
    (("sentence",), None),
)
# The first of these on a line is used. TREC has six coarse and fifty fine classes. The paper does
# not specify them, and the coarse classes are usual.
_LABELS = ("label_coarse_text", "coarse_label", "label_text", "sentiment", "label", "answer")
_TREC = ("abbreviation", "entity", "description", "human", "location", "number")
_OF_FILES: Mapping[str, tuple[str, ...]] = {
    "ag_news": ("world", "sports", "business", "technology"),
    "cr": ("negative", "positive"),
    "mr": ("negative", "positive"),
    "rotten_tomatoes": ("negative", "positive"),
    "rte": ("entailment", "not entailment"),
    "sst2": ("negative", "positive"),
    "subj": ("objective", "subjective"),
    "trec": _TREC,
}


def holds(path: str | Path) -> bool:
    """Returns whether a file contains texts with classes, by the fields of its first line.

    Args:
      path: The file of JSON lines.

    Returns:
      Whether `read` knows these fields. Their values are not read.

    Raises:
      DataError: If the file is missing or empty, or its first line is not an object.
    """
    first = next((record for _, record in json_lines(Path(path), SOURCE, MAX_LINE)), None)
    if first is None:
        raise DataError(f"{path} is empty; expected a text in JSON on each line")
    return choices.understood(first) or None not in _known(first)


def _known(record: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Returns the layout of a line and the field of its label; None for missing ones."""
    layout = next((at for at in _LAYOUTS if set(at[0]) <= record.keys()), None)
    return layout, next((name for name in _LABELS if name in record), None)


def read(path: str | Path) -> tuple[Item, ...]:
    """Reads texts and their classes from a file of JSON lines.

    Blank lines are skipped. The field names of the first line determine the layout of the file.
    Text labels are the classes themselves, in alphabetical order. The words for numeric labels
    follow from the fields (BoolQ, TREC) or from the beginning of the file's name, such as
    ag_news_train.jsonl.

    Args:
      path: The file, one text per line.

    Returns:
      The questions, in the order of the file. All have the same choices, except in files of
      multiple choice.

    Raises:
      DataError: If the file is missing, a field of the first line is missing, a text is empty, a
        label is not a class, or the classes are not known or not from 2 to 64. The message contains
        the file and the invalid line. It is a `ValueError`.
    """
    path = Path(path)
    rows = list(json_lines(path, SOURCE, MAX_LINE))
    if not rows:
        raise DataError(f"{path} is empty; expected a text and its class in JSON on each line")
    what, first = rows[0]
    if choices.understood(first):
        return choices.read(path)
    layout, label = _known(first)
    if layout is None or label is None:
        held = repr(", ".join(sorted(first))[:99])
        raise DataError(
            f"{what}: expected text and label or label_text, passage and question, premise and "
            f"hypothesis, or the fields of a question; got {held}"
        )
    fields, words = layout
    labels = [_label(record.get(label), where) for where, record in rows]
    classes = _classes(path, labels, _TREC if label == "coarse_label" else words)
    items = []
    for (where, record), own in zip(rows, labels, strict=True):
        texts = [record.get(field) for field in fields]
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{where}: expected texts that are not empty, got {str(text)[:99]!r}"
                )
            try:
                text.encode()
            except UnicodeEncodeError:
                raise DataError(f"{where}: {text[:99]!a} is not Unicode") from None
        if own not in classes:
            raise DataError(
                f"{where} is mislabelled: its {label} is {str(own)[:99]!r}; expected one of "
                f"{', '.join(map(str, classes))[:99]!r}"
            )
        context = "\n".join([*(str(text).strip() for text in texts), "Label:"])
        items.append(Item(context, tuple(classes.values()), list(classes).index(own)))
    return tuple(items)


def _label(value: object, where: str) -> str | int:
    """Checks one label: a text, a number, or a truth value, which becomes 0 or 1."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int):
        return int(value)
    raise DataError(f"{where}: expected a label, a text or a number; got {str(value)[:99]!r}")


def _classes(
    path: Path, labels: Sequence[str | int], words: tuple[str, ...] | None
) -> dict[str | int, str]:
    """Returns the words of all classes by their labels, each word after a space."""
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise DataError(f"{path}: expected labels that are all texts or all numbers; got both")
    if kinds == {str}:
        texts = sorted({str(label) for label in labels})
        found: dict[str | int, str] = {text: text for text in texts}
    else:
        stem = path.stem.lower()
        own = (w for name, w in _OF_FILES.items() if re.match(rf"{name}(?![a-z0-9])", stem))
        words = words or next(own, None)
        if words is None:
            raise DataError(
                f"{path}: its labels are numbers; give their words as label_text, or begin the "
                f"file's name with one of {', '.join(_OF_FILES)}"
            )
        found = dict(enumerate(words))
    if not 2 <= len(found) <= MAX_CHOICES:
        raise DataError(f"{path}: expected 2 to {MAX_CHOICES} classes, got {len(found)}")
    return {label: f" {word.replace('_', ' ')}" for label, word in found.items()}
