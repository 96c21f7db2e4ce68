"""Tables of architectures in files: the results of tracing forward passes, as data.

`tables/TYPE.json` contains the table of a model type of transformers. `.ci/tables` writes the
files: it traces the classes of that type for many configurations, and writes the table that they
share. A file contains these parts; only `axes` is required.

axes, spaces, optional, settings, layers, single, ends, folds, scales, post_norm: as in `Rules`
tied: the axes of leaves while the head is the embedding table
ties: whether it is tied if the configuration has no such entry
head: patterns of the head, which is required unless it is tied
implied: whether a tied head is stored without a tensor
classes: axes of tensors that one class uses in another way
sizes: the source of a space's size, a quotient of entries of the configuration. The first quotient
  with known entries is used ("head_dim | hidden_size / num_attention_heads").
words: for an entry and its value, or for a class, the words of spaces that differ
defaults: the values of entries that a configuration omits
holds: values of entries for which the table was confirmed; other values require another table
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
    """The table of an architecture for every configuration, as stored in a file.

    Attributes:
      axes: The axes strings, by pattern.
      spaces: The nonlinearities of each space.
      sizes: The source of each space's size.
      settings: Pairs of an entry and spaces. The product of the spaces' sizes is the entry.
      layers: The prefix of layers, by the entry that counts them.
      optional: Patterns that need not match.
      single: Patterns under a prefix of layers that only one layer has.
      tied: Axes strings of leaves while the head is tied.
      ties: Whether the head is tied if the configuration has no such entry.
      head: The patterns of the head.
      implied: Whether a tied head is stored without a tensor.
      classes: Axes strings that differ, by class name and pattern.
      ends: Spaces that are the output, unless one of these patterns matches.
      words: Words of spaces that differ, by entry, value and space.
      defaults: The values of omitted entries.
      holds: The values of entries for which the table holds.
      folds: See the attribute of `Rules`.
      scales: See the attribute of `Rules`.
      post_norm: See the attribute of `Rules`.
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
        """Checks that the table applies to a configuration.

        Args:
          config: The configuration.

        Raises:
          ValueError: If it does not.
        """
        for key, values in self.holds.items():
            value = self._entry(config, key)
            if value is not None and value not in values:
                raise ValueError(
                    f"the configuration's {key!r} is {value!r}, but the table of this architecture "
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
          ValueError: If the table does not apply to an entry of the configuration.
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


# The names of an expert's tensors in transformers, and the corresponding parts of a gated layer.
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def _with_stacks(rules: Rules) -> Rules:
    """Adds the stacked tensors of mixtures that store all experts of a layer in one tensor.

    From release 5 on, transformers stores the experts of Mixtral, Qwen-MoE, OLMoE and Phi-MoE in
    this form, and mergekit 0.1.5 writes it: `mlp.experts.gate_up_proj`, `(expert, 2 hidden,
    width)`, and `mlp.experts.down_proj`, `(expert, width, hidden)`. The tables come from files with
    separate tensors for each expert.
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
        # One space for the units of all experts: each expert may have a separate map.
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
    """Returns the first of several quotients with known entries; None if there is none."""
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
    """Lists the model types with a table in a file.

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
    """Parses a table from the text of its file, the inverse of `written`.

    Args:
      text: The output of `written`.

    Returns:
      The table.

    Raises:
      ValueError: If the text has another form.
    """
    try:
        parts = json.loads(text)
        for key in ("settings", "optional", "single", "head"):
            parts[key] = tuple(tuple(x) if isinstance(x, list) else x for x in parts.get(key, ()))
        for key in ("ends", "holds", "folds", "scales"):
            parts[key] = {name: tuple(x) for name, x in parts.get(key, {}).items()}
        return Table(**parts)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"expected the text of a table: {error}") from error


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
    """Writes a part of a file, one line per item."""
    if isinstance(value, Mapping):
        items = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
        return "{\n  " + ",\n  ".join(items) + "\n}"
    if isinstance(value, tuple):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)
