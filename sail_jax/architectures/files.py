"""Tables of architectures that stand in files: what was found by tracing forward passes, as data.

`tables/TYPE.json` has the table of a model type of transformers. `.ci/tables` writes the files: it
traces the classes of that type at many configurations, and states what all of them have in common.
A file holds these parts; only `axes` has to be there.

axes, spaces, optional, settings, layers, single, ends, folds, scales, post_norm: as in `Rules`
tied: the axes of leaves while the head is the table of the embeddings
ties: whether it is where the configuration does not say
head: patterns of the head, which is required unless it is tied
implied: whether a tied head has no tensor at all
classes: axes of tensors that a class uses in another way
sizes: for a space, what states its size: a quotient of entries of the configuration; of several
  the first is taken all entries of which are known ("head_dim | hidden_size / num_attention_heads")
words: for an entry and its value, or for a class, words of spaces that differ then
defaults: what entries are where the configuration does not state them
holds: values of entries for which the table was found to hold, where others give another one
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from typing import Any, NamedTuple

from sail_jax.architectures.forward.heads import has_vocabulary
from sail_jax.architectures.table import Config, Rules, count, divided, look
from sail_jax.configurations import class_of


class Table(NamedTuple):
    """The table of an architecture for every configuration, as it stands in a file.

    Attributes:
      axes: The axes strings, by pattern.
      spaces: What is applied to each space.
      sizes: What states the size of a space.
      settings: Pairs of an entry and the spaces the product of whose sizes it states.
      layers: The prefix of layers, by the entry that counts them.
      optional: Patterns that need not match.
      single: Patterns under a prefix of layers that one layer alone has.
      tied: Axes strings of leaves while the head is tied.
      ties: Whether the head is tied where the configuration does not state it.
      head: The patterns of the head.
      implied: Whether a tied head has no tensor.
      classes: Axes strings that differ, by the name of a class and by pattern.
      ends: Spaces that are the output, unless one of these patterns matches.
      words: Words of spaces that differ, by entry, value and space.
      defaults: The values of entries that are not stated.
      holds: The values of entries for which the table holds.
      folds: As the attribute of `Rules`.
      scales: As the attribute of `Rules`.
      post_norm: As the attribute of `Rules`.
    """

    axes: Mapping[str, str]
    spaces: Mapping[str, str] = {}
    sizes: Mapping[str, str] = {}
    settings: tuple[tuple[str, str], ...] = ()
    layers: Mapping[str, str] = {}
    optional: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    tied: Mapping[str, str] = {}
    ties: bool = False
    head: tuple[str, ...] = ()
    implied: bool = False
    classes: Mapping[str, Mapping[str, str]] = {}
    ends: Mapping[str, tuple[str, ...]] = {}
    words: Mapping[str, Mapping[str, Mapping[str, str]]] = {}
    defaults: Mapping[str, Any] = {}
    holds: Mapping[str, tuple[Any, ...]] = {}
    folds: Mapping[str, tuple[str, ...]] = {}
    scales: Mapping[str, tuple[str, float]] = {}
    post_norm: bool = False

    def _entry(self, config: Config, key: str) -> Any:
        value = look(config, key)
        return self.defaults.get(key) if value is None else value

    def check(self, config: Config) -> None:
        """Checks that the table holds for a configuration.

        Args:
          config: The configuration.

        Raises:
          ValueError: If it does not.
        """
        for key, values in self.holds.items():
            value = self._entry(config, key)
            if value is not None and value not in values:
                raise ValueError(
                    f"the configuration's {key!r} is {value!r}, and the table of this architecture "
                    f"holds for {' or '.join(map(repr, values))}: let the spaces be inferred "
                    "(pip install 'sail-jax[torch]')"
                )

    def rules(self, config: Config) -> Rules:
        """Makes the rules of one configuration.

        Args:
          config: The configuration.

        Returns:
          The rules.

        Raises:
          ValueError: If the table does not hold for an entry of the configuration.
        """
        self.check(config)
        entry = partial(self._entry, config)
        worded = has_vocabulary(config)
        tie = entry("tie_word_embeddings")
        tied = worded and bool(self.head) and (self.ties if tie is None else tie is True)
        own = self.classes.get(class_of(config), {})
        axes = {**self.axes, **(self.tied if tied else {}), **own}
        optional = frozenset(self.optional)
        if worded and not tied:
            optional -= {*self.head}
        spaces = dict(self.spaces)
        for key, values in self.words.items():
            value = class_of(config) if key == "class" else str(entry(key))
            spaces |= values.get(value, {})
        sizes = {name: n for name, text in self.sizes.items() if (n := _size(text, entry))}
        ends = {} if tied and self.implied else self.ends
        return Rules(
            tuple(axes.items()), spaces, sizes, optional, ends, settings=self.settings,
            folds=self.folds, layers=self.layers, single=frozenset(self.single), scales=self.scales,
            post_norm=self.post_norm,
        )  # fmt: skip


def _size(text: str, entry: Callable[[str], Any]) -> int | None:
    """The first of several quotients of entries that are all stated; None if there is none."""
    for choice in text.split(" | "):
        if any(not key.isdigit() and entry(key) is None for key in re.split(r" [*/] ", choice)):
            continue
        above, *below = choice.split(" / ")
        size = math.prod(_value(key, entry) for key in above.split(" * "))
        for key in below:
            what = f"the configuration's {key!r} must divide {above!r}"
            size = divided(size, _value(key, entry), what)
        return size
    return None


def _value(key: str, entry: Callable[[str], Any]) -> int:
    return int(key) if key.isdigit() else count({key: entry(key)}, key)


@cache
def model_types() -> tuple[str, ...]:
    """Lists the model types that have a table in a file.

    Returns:
      Their names, in order.
    """
    files = resources.files("sail_jax.architectures").joinpath("tables").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def read(model_type: str) -> Table:
    """Reads the table of a model type.

    Args:
      model_type: One of `model_types()`.

    Returns:
      The table.
    """
    files = resources.files("sail_jax.architectures").joinpath("tables")
    return parsed(files.joinpath(f"{model_type}.json").read_text("utf-8"))


def parsed(text: str) -> Table:
    """Reads a table from the text of its file, the inverse of `written`.

    Args:
      text: The text, which `written` made.

    Returns:
      The table.

    Raises:
      ValueError: If it is another text.
    """
    try:
        parts = json.loads(text)
        for key in ("settings", "optional", "single", "head"):
            parts[key] = tuple(tuple(x) if isinstance(x, list) else x for x in parts.get(key, ()))
        for key in ("ends", "holds", "folds", "scales"):
            parts[key] = {name: tuple(x) for name, x in parts.get(key, {}).items()}
        return Table(**parts)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not the text of a table: {error}") from error


def written(table: Table) -> str:
    """Writes a table as the text of its file.

    Args:
      table: The table.

    Returns:
      The text, JSON.
    """
    parts = {k: v for k, v in table._asdict().items() if v not in ((), {}, False)}
    lines = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in parts.items())
    return f"{{\n{lines}\n}}\n"


def _lines(value: Any) -> str:
    """A part of a file, with a line for each of its items."""
    if isinstance(value, Mapping):
        items = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
        return "{\n  " + ",\n  ".join(items) + "\n}"
    if isinstance(value, tuple):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)
