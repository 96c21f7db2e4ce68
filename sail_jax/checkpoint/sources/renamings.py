"""Names of tensors in memory and in files, for models that transformers renames at loading.

PEFT saves the names that a model has in memory. transformers renames some tensors when it loads a
file, stacks experts, and splits fused matrices. `renamings.json` contains its rules, which
`.ci/against/renamings.py` writes from `transformers.conversion_mapping`. `Names` applies them to
the names of a base, as transformers does at loading, and looks up names in memory.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.configurations import Config, class_of

T = TypeVar("T")
_FILE = "renamings.json"
# Python's regular expressions can take quadratic time in the length of a name.
_LONGEST = 1000
# Experts of one weight are stacked, and those of several weights are concatenated after that.
_STACKED = ("MergeModulelist(0)", "MergeModulelist(0) Concatenate(1)")


class Rule(NamedTuple):
    """One rule of transformers: a renaming, or a conversion of one or several tensors.

    Attributes:
      pattern: Finds the part of a name that is replaced; its groups g0, g1, ... are the sources.
      targets: The new part; the first of several is for the name, the others for the parts that are
        split off.
      how: "" for a renaming, "group" for renamings that apply together, otherwise the operations.
      scope: The module that the rule is limited to; None for the whole model.
      prefix: The name of the model without its head, with which the scope may begin.
    """

    pattern: re.Pattern[str]
    targets: list[str]
    how: str
    scope: str | None
    prefix: str

    def search(self, name: str) -> tuple[str, str, re.Match[str], int] | None:
        """Returns the part of a name before the scope, the rest, the match, and its source."""
        before = ""
        if self.scope is not None:
            inner, outer = (f"{x}." if x else "" for x in (self.scope, self.prefix))
            before = outer + inner if name.startswith(outer + inner) else inner
            if not name.startswith(before):
                return None
        rest = name[len(before) :]
        if (match := self.pattern.search(rest)) is None:
            return None
        which = next(int(g[1:]) for g, text in match.groupdict().items() if text is not None)
        return before, rest, match, which

    def replaced(self, name: str, target: int | None = None) -> tuple[str, int]:
        """Replaces the matching part of a name.

        Args:
          name: The name.
          target: Which target replaces it; by default the first one.

        Returns:
          The new name, and the number of the source that matched; the name and -1 without a match.
        """
        if (found := self.search(name)) is None:
            return name, -1
        before, rest, match, which = found
        new = self.targets[(which if self.how == "group" else 0) if target is None else target]
        if r"\1" in new:
            new = new.replace(r"\1", match.group(self.pattern.groupindex[f"g{which}"] + 1))
        return before + rest.replace(match.group(0), new, 1), which


class Stored(NamedTuple):
    """The location in a file of what is one tensor in memory.

    Attributes:
      files: Names in the file. For stacked experts, those of one expert after another, and in the
        order in which an expert's tensors are concatenated.
      each: The number of tensors of the file that make one expert.
      how: "" for one tensor as it is, "experts" for stacked ones, else transformers' operations.
    """

    files: tuple[str, ...]
    each: int = 1
    how: str = ""

    def experts(self) -> list[list[str]]:
        """Lists the names of each expert's tensors."""
        starts = range(0, len(self.files), self.each)
        return [list(self.files[i : i + self.each]) for i in starts]


class Names:
    """The names in memory of a base's tensors."""

    def __init__(self, files: Iterable[str], model: Config) -> None:
        """Applies transformers' rules to the names in a file.

        Args:
          files: The names of the base's tensors.
          model: The content of its config.json.
        """
        self._files = dict.fromkeys(files)
        table = _table()
        family = str(model.get("model_type"))
        self._prefix: str = table["prefixes"].get(family, "")
        self._rules = rules_of(class_of(model), family)
        self._firsts = {name.partition(".")[0] for name in self._files}
        self._active = {
            i
            for i, rule in enumerate(self._rules)
            if rule.how != "group"
            or any((rule.search(x[:_LONGEST]) or [-1])[-1] == 0 for x in self._files)
        }
        self._memory: dict[str, Stored] = {}
        stacked: dict[str, list[tuple[int, str, str]]] = {}
        for file in self._files:
            name, rule, which = self._renamed(file)
            if rule is None:
                self._memory[name] = Stored((file,))
            elif rule.how in _STACKED:
                stacked.setdefault(name, []).append((which, rule.how, file))
            else:
                for target in range(len(rule.targets)):
                    part, _ = rule.replaced(self._renamed(file, convert=False)[0], target)
                    old = self._memory.get(part, Stored((), how=rule.how)).files
                    self._memory[part] = Stored((*old, file), how=rule.how)
        for name, parts in stacked.items():
            of: dict[int, list[str]] = {}
            for which, _, file in sorted(parts, key=lambda x: (x[0], _natural(x[2]))):
                of.setdefault(which, []).append(file)
            lists = [of[which] for which in sorted(of)]
            even = len({len(x) for x in lists}) == 1
            files = tuple(file for one in zip(*lists, strict=False) for file in one)
            how = "experts" if even else parts[0][1]
            self._memory[name] = Stored(files, len(lists), how)

    def _renamed(self, name: str, convert: bool = True) -> tuple[str, Rule | None, int]:
        """Returns a name in memory, and its conversion with the number of the source."""
        if len(name) > _LONGEST:
            return name, None, -1
        for i, rule in enumerate(self._rules):
            if rule.how in ("", "group") and i in self._active:
                name, _ = rule.replaced(name)
        for rule in self._rules if convert else ():
            if rule.how not in ("", "group"):
                new, which = rule.replaced(name)
                if which >= 0:
                    return new, rule, which
        return name, None, -1

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def items(self) -> Iterable[tuple[str, Stored]]:
        """Iterates over the names in memory."""
        return self._memory.items()

    def exactly(self, name: str) -> bool:
        """Checks whether a tensor has this name, without a shorter or longer prefix."""
        return name in self._files or name in self._memory

    def find(self, name: str) -> Stored | None:
        """Finds a tensor in the file by its name in memory, or by its name in files.

        The name of the model without its head, such as "transformer.", may be missing on one side:
        in a base that was saved without its head, or in an adapter of such a model.

        Args:
          name: The name.

        Returns:
          Its location; None if it is missing in the base.

        Raises:
          CheckpointError: If the name in memory and the same name in files are different tensors.
        """
        first, _, rest = name.partition(".")
        found = self._found(name)
        if found is None and first not in self._firsts:
            found = self._found(rest)
        if found is None and self._prefix and first != self._prefix:
            found = self._found(f"{self._prefix}.{name}")
        return found

    def _found(self, name: str) -> Stored | None:
        there = self._memory.get(name)
        if name in self._files:
            if there is not None and there.files != (name,):
                raise CheckpointError(
                    f"{name!r} may be {name!r} or {', '.join(there.files)} of the base: "
                    "transformers renames one to the other"
                )
            return Stored((name,))
        return there or self._memory.get(self._renamed(name)[0])

    def file(self, name: str, source: str) -> str:
        """Returns the name in the base's file of a tensor that is stored as it is.

        Args:
          name: Its name in memory.
          source: Where the adapter lies, for messages.

        Returns:
          The name; for a tensor that is not in the base, the name that a file would use.

        Raises:
          CheckpointError: If the file stores it in another form.
        """
        found = self.find(name)
        if found is None:
            return self.new(name)
        if found.how:
            raise CheckpointError(
                f"{source}: {name!r} is made at loading from {_some(found.files)} of the base "
                f"({found.how}), and this is not supported here"
            )
        return found.files[0]

    def new(self, name: str) -> str:
        """Returns the name in files of a tensor that is not in the base, such as a tied head's."""
        return file_name(name, self._rules)


def in_memory(tensors: Mapping[str, T], model: Config) -> dict[str, T]:
    """Renames the tensors of a file as transformers does when it loads them.

    Args:
      tensors: The tensors by their names in the file.
      model: The content of config.json.

    Returns:
      The tensors by their names in memory. Tensors that are converted at loading, such as stacked
      experts, keep their names.
    """
    named = Names(tensors, model).items()
    names = {stored.files[0]: name for name, stored in named if not stored.how}
    return {names.get(file, file): tensor for file, tensor in tensors.items()}


def file_name(name: str, rules: Iterable[Rule]) -> str:
    """Returns the name in files of a tensor outside the model without its head.

    Only rules that replace the beginning of a name are inverted.

    Args:
      name: The name in memory.
      rules: The rules of its class.

    Returns:
      The name in files; the same name without such a rule.

    >>> file_name("lm_head.weight", rules_of("GPTNeoXForCausalLM", "gpt_neox"))
    'embed_out.weight'
    """
    for rule in rules:
        source = re.fullmatch(r"\(\?P<g0>\^([\w\\.]+)\)", rule.pattern.pattern)
        whole = len(rule.targets) == 1 and rule.targets[0].endswith(".") and rule.scope is None
        if not rule.how and source and whole and name.startswith(rule.targets[0]):
            new = source[1].replace("\\", "") + name.removeprefix(rule.targets[0])
            if rule.replaced(new)[0] == name:
                return new
    return name


@functools.cache
def rules_of(kind: str, family: str) -> tuple[Rule, ...]:
    """Returns transformers' rules for a model, in the order in which they apply.

    Args:
      kind: Its class, as in config.json; "" if it is unknown.
      family: Its model type.

    Returns:
      The rules.
    """
    table = _table()
    default = [[None, key] for key in (kind, family) if key in table["rules"]][:1]
    about = table["classes"].get(kind, {})
    parts = [*about.get("scopes", default), [None, "legacy"]]
    prefix = about.get("prefix", "")
    return tuple(
        Rule(_compiled(sources), targets, how, scope, prefix)
        for scope, key in parts
        for sources, targets, how in _rules(key)
    )


def heads_of(kind: str) -> list[str]:
    """Lists the names of modules outside the model in classes for a task.

    Args:
      kind: The class, as in config.json.

    Returns:
      The first parts of names; none for a class without a task.

    >>> "classifier" in heads_of("BertForTokenClassification"), heads_of("BertModel")
    (True, [])
    """
    task = re.search(r"For[A-Z]\w*$|LMHead\w*$", kind)
    heads = _table()["heads"]
    return heads.get(kind, heads.get(task[0], [])) if task else []


def tied_head(kind: str) -> str:
    """Returns the name in memory of a class's tied head; "" if it is lm_head, or unknown."""
    return _table()["tied"].get(kind, "")


def _rules(key: str) -> list[Any]:
    """Returns the rules of a model type or class; a string stands for those of another one."""
    rules = _table()["rules"][key]
    return _rules(rules) if isinstance(rules, str) else rules


def _compiled(sources: list[str]) -> re.Pattern[str]:
    """Compiles the pattern of a rule's sources, as transformers does."""
    branches = []
    for i, source in sorted(enumerate(sources), key=lambda item: -len(item[1])):
        pattern = source.replace("*.", r".*\.")
        # A pattern that ends in a letter or digit must end there in the name, too.
        pattern += r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else ""
        branches.append(f"(?P<g{i}>{pattern})")
    return re.compile("|".join(branches))


@functools.cache
def _table() -> Mapping[str, Any]:
    file = resources.files("sail_jax.checkpoint.sources").joinpath(_FILE)
    return json.loads(file.read_text())


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key for which numbers in names are sorted by value."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(x), "") if x.isdigit() else (0, 0, x) for x in parts]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:2]) + ", ..." * (len(names) > 2)
