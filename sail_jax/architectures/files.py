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
        return _with_stacks(Rules(
            tuple(axes.items()), spaces, sizes, optional, ends, settings=self.settings,
            folds=self.folds, layers=self.layers, single=frozenset(self.single), scales=self.scales,
            post_norm=self.post_norm,
        ))  # fmt: skip


# What transformers names the tensors of an expert, and the parts of a gated layer that they are.
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def _with_stacks(rules: Rules) -> Rules:
    """Adds the tensors of mixtures whose experts lie in one tensor for each layer.

    Releases from 5 on of transformers hold the experts of Mixtral, Qwen-MoE, OLMoE and Phi-MoE so,
    and mergekit 0.1.5 writes them so: `mlp.experts.gate_up_proj`, `(expert, 2 hidden, width)`, and
    `mlp.experts.down_proj`, `(expert, width, hidden)`. The tables were found from files in which
    each expert has tensors of its own.
    """
    known = dict(rules.axes)
    experts: dict[str, dict[str, str]] = {}
    for pattern in known:
        if match := re.fullmatch(r"(.*\.)experts\.\{e\}\.(\w+)\.weight", pattern):
            experts.setdefault(match[1], {})[match[2]] = pattern
    apart: list[str] = []
    stacked: dict[str, str] = {}
    spaces, settings, folds = dict(rules.spaces), rules.settings, dict(rules.folds)
    for prefix, parts in experts.items():
        gate, up, down = (
            next((parts[name] for name in names if name in parts), "")
            for names in (_GATES, _UPS, _DOWNS)
        )
        unit, _, width = known.get(up, "").partition(" ")
        router = f"{prefix}gate.weight"
        if len(parts) != 3 or not (gate and down) or router not in known:
            continue
        stack = f"{prefix.rpartition('.')[0].rpartition('.')[0]}.mlp."
        # One space for the units of all experts: each expert may have a map of its own.
        units, expert = unit.replace(".{e}", ".experts"), "expert.{i}"
        both = f"{stack}experts.gate_up_proj"
        routers = f"{stack}{{gate,router}}.weight"
        stacked |= {
            both: f"{expert} (diag({units}) + {units}) {width}",
            f"{stack}experts.down_proj": f"{expert} {width.rstrip('*')} {units}*",
            routers: f"{expert} {width}",
        }
        apart += [*parts.values(), router]
        spaces |= {units: spaces[unit], expert: "softmax"}
        entry = "num_local_experts" if "block_sparse_moe" in prefix else "num_experts"
        settings += tuple((key, units) for key, text in settings if text == unit)
        settings += ((entry, expert),)
        # The forward pass was traced with the stacked tensors.
        for gain, readers in folds.items():
            if both in readers:
                folds[gain] = tuple(dict.fromkeys((*readers, gate, up, router)))
    if not stacked:
        return rules
    return rules._replace(
        axes=(*rules.axes, *stacked.items()), spaces=spaces, settings=settings, folds=folds,
        either=(tuple(apart), tuple(stacked)),
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
