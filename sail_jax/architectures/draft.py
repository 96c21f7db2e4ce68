"""Drafts the spec of a model without a table from the names and shapes of its tensors.

Where names and shapes are ambiguous, the draft asks a question instead of guessing. Until the
question is answered, the ambiguous axes have no space. Every space to which they may belong is
"outer", so no map of it is reported as exact.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from sail_jax.architectures.table import Config, Rules, divided, fill
from sail_jax.basis.axes import Patterns, parse_axes, path_pattern
from sail_jax.checks import nearest
from sail_jax.trees import leaf_paths


class Question(NamedTuple):
    """An ambiguous leaf, whose name and shape do not determine its spaces.

    Attributes:
      path: The path of the leaf, or a pattern of paths for all equal layers; "settings" or "layers"
        for a question about the configuration.
      text: The question.
      options: Axes strings as possible answers. For the configuration: an entry, and its possible
        meanings.
    """

    path: str
    text: str
    options: tuple[str, ...]


class Draft(NamedTuple):
    """Provisional rules with open questions; `print` shows both.

    Attributes:
      rules: The rules. They give a valid spec of the parameters, unless answers leave sizes open.
      questions: The open questions; empty if there are none.
    """

    rules: Rules
    questions: tuple[Question, ...]

    def __str__(self) -> str:
        lines = [f"{pattern!r}: {axes!r}" for pattern, axes in self.rules.axes]
        lines += [f"spaces: {dict(self.rules.spaces)}"] if self.rules.spaces else []
        lines += [f"settings: {dict(self.rules.settings)}"] if self.rules.settings else []
        for path, text, options in self.questions:
            lines.append(f"? {path}: {text}" + " | ".join(f"\n    {o!r}" for o in options))
        return "\n".join(lines)


class _Leaf(NamedTuple):
    """The properties of a leaf that follow from its path and shape.

    Attributes:
      path: Its path.
      module: The path without the last name.
      name: The last name.
      layer: The path of its layer; "" outside layers.
      tag: The suffix of the layer's space names, which distinguishes them from other layers'.
      shape: Its shape.
      floating: Whether its dtype is floating.
    """

    path: str
    module: str
    name: str
    layer: str
    tag: str
    shape: tuple[int, ...]
    floating: bool


class _Matrix(NamedTuple):
    """A leaf that reads `fan_in` units along one axis and writes `fan_out` along another.

    Attributes:
      leaf: The leaf.
      reads: The index of the axis that is read.
      writes: The index of the axis that is written.
    """

    leaf: _Leaf
    reads: int
    writes: int

    @property
    def fan_in(self) -> int:
        return self.leaf.shape[self.reads]

    @property
    def fan_out(self) -> int:
        return self.leaf.shape[self.writes]

    def axes(self, read: str, write: str) -> str:
        words = ["_"] * len(self.leaf.shape)
        words[self.reads], words[self.writes] = read, write
        return " ".join(words)


_PROJECTIONS = {
    "q": {"q", "query", "q_proj", "wq", "to_q"},
    "k": {"k", "key", "k_proj", "wk", "to_k"},
    "v": {"v", "value", "v_proj", "wv", "to_v"},
    "o": {"o", "out", "o_proj", "out_proj", "wo", "to_out", "proj", "c_proj", "output", "dense"},
}
_FUSED = {"qkv", "c_attn", "in_proj", "qkv_proj", "query_key_value", "wqkv", "to_qkv"}
_BIASES = {"bias", "b", "beta", "mean", "running_mean"}
# The number of leaves that a question lists.
_NAMED = 8
_GAINS = {"scale", "gamma", "g", "weight", "var", "running_var"}


def draft(
    params: PyTree,
    *,
    heads: int | None = None,
    stream: int | None = None,
    answers: Mapping[str, str] | None = None,
    config: Config | None = None,
) -> Draft:
    """Drafts the rules of an unknown model, and asks about ambiguous names and shapes.

    Spaces are named by their sizes. A size that every layer reads and writes is the width of their
    stream, `resid`. A size inside a layer belongs to that layer. A size that is only read or only
    written is an input or output of the network. Spaces of equal size become one space if the
    structure does not distinguish them. This is sound: permuting all of them at once is always
    exact. Shapes do not show nonlinearities, so none is recorded, and only permutations are exact.

    Args:
      params: The parameters, arrays or ShapeDtypeStructs.
      heads: The number of query heads, for splitting attention projections. None: from `config`, or
        else a question.
      stream: The width of the stream. None: from the shapes, or else a question.
      answers: Axes strings by patterns of paths, as in rules. They determine these leaves.
      config: The configuration. Entries with the size of a single space, or with the number of
        layers, become `settings` and `layers` of the rules. Ambiguous entries become questions.

    Returns:
      The rules, and the open questions.

    Raises:
      ValueError: If an answer matches no leaf, or heads do not divide a projection.

    >>> net = {"fc1": {"kernel": np.zeros((3, 8)), "bias": np.zeros(8)}}
    >>> net["fc2"] = {"kernel": np.zeros((8, 2)), "bias": np.zeros(2)}
    >>> print(draft(net))
    'fc1/bias': 'units8'
    'fc1/kernel': 'units3* units8'
    'fc2/bias': 'units2'
    'fc2/kernel': 'units8* units2'
    spaces: {'units2': 'outer', 'units3': 'outer'}
    """
    # Whole numbers that may be sizes, not names of tokens or of releases. `type(n) is int` excludes
    # true and false, which are integers in Python.
    sizes = {
        key: n
        for key, n in (config or {}).items()
        if type(n) is int and n > 0 and not re.search(r"_id$|version|seed", key)
    }
    stated = next((sizes[key] for key in _HEADS if key in sizes), None)
    drafted = _Drafter(params, heads, stream, answers or {}, stated).run()
    return _stated(drafted, params, sizes)


# Entries of configurations that count the query heads.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")


def _stated(drafted: Draft, params: PyTree, entries: Mapping[str, int]) -> Draft:
    """Adds the configuration's entries to a draft.

    Entries that equal the size of one space, or the number of layers, become settings and layers of
    the rules. Ambiguous entries become questions.
    """
    rules = drafted.rules
    # After some answers the size of a space remains unknown until a further answer. Sizes are only
    # compared with entries; without entries such a draft can still be printed.
    sized = rules.spec(params).spaces if entries else ()
    # The sizes of every space, and of heads times groups, by their names in rules: one number if
    # all layers agree.
    sizes: dict[str, set[int]] = {}
    texts = {name: 0 for _, axes in rules.axes for name in re.findall(r"[\w.{}-]+", axes)}
    heads = [name.replace("head", "group", 1) for name in texts if name.startswith("head")]
    known = list(dict.fromkeys([*texts, *heads])) if sized else []
    patterns, fitting = Patterns(known, stars=False), defaultdict[str, list[int]](list)
    for space in sized:
        for k, _ in patterns.matches(space.name):
            fitting[known[k]].append(space.size)
    for text in texts:
        with_groups = f"{text} {text.replace('head', 'group', 1)}"
        for names in (text, with_groups) if text.startswith("head") else (text,):
            spaces = [fitting[name] for name in names.split()]
            if products := {math.prod(factors) for factors in zip(*spaces, strict=False)}:
                sizes[names] = products
    settings, asked = [], []
    for key, n in entries.items():
        fits = [names for names in sizes if sizes[names] == {n} and _speaks_of(key, names)]
        if "head" in key and len(fits) > 1 and "dim" not in key:
            # Without groups, key heads and heads times groups have one size. The entry then counts
            # the query heads.
            fits = fits[-1:]
        # Two entries with one number, or two spaces with one size, cannot be distinguished.
        alike = [other for other in entries if entries[other] == n and "head" not in other]
        if fits and ("head" in key or len(fits) == len(alike) == 1):
            settings += [(key, names) for names in fits]
        elif fits:
            options = tuple(f"{key}: {names}" for names in fits)
            asked.append(Question("settings", f"is {key} = {n} the size of one space?", options))
    layers: dict[str, str] = {}
    for prefix in dict.fromkeys(p[: p.index("{i}") + 4] for p, _ in rules.axes if "{i}" in p):
        numbered = path_pattern(f"{prefix}**").fullmatch
        indices = {match["i"] for path in leaf_paths(params) if (match := numbered(path))}
        # Without a configuration any name can be used for the entry. With one, a single entry that
        # fits the tensors and has "layer" in its name is used without a question.
        counts = [k for k, n in entries.items() if n == len(indices) and _speaks_of_layers(k)]
        if len(counts) == 1 or not entries:
            layers[counts[0] if counts else "num_layers"] = prefix
        else:
            options = tuple(f"{key}: {prefix}" for key in counts)
            text = f"which entry of config.json counts the {len(indices)} of {prefix}?"
            asked.append(Question("layers", text, options))
    rules = rules._replace(settings=tuple(settings), layers=layers)
    return Draft(rules, (*drafted.questions, *asked))


def _speaks_of(key: str, names: str) -> bool:
    """Checks whether an entry may describe these spaces; keys about heads contain "head"."""
    if "head" not in key:
        return not re.match(r"(head|group|qk|v)(\.|$)", names)
    if "dim" in key or "size" in key:
        return bool(re.match(r"(qk|v)(\.|$)", names))
    shared = "key_value" in key or "kv" in key
    return names.startswith("head") and (not shared or " " not in names)


def _speaks_of_layers(key: str) -> bool:
    """Checks whether an entry of this name may count layers."""
    return bool(re.search("layer|block|depth", key))


class _Drafter:
    """The state of a draft: the rules so far, the questions, and the ambiguous spaces.

    Spaces known only by their size are written "@size" in the rules, until `_plain` names them.
    """

    def __init__(
        self,
        params: PyTree,
        heads: int | None,
        stream: int | None,
        answers: Mapping[str, str],
        stated: int | None,
    ):
        paths = leaf_paths(params)
        self.leaves = _leaves(paths, jax.tree.leaves(params))
        self.heads, self.stream, self.stated = heads, stream, stated
        self.rules: dict[str, str] = {}
        self.questions: list[Question] = []
        self.frozen: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.within: dict[str, set[str]] = {}  # the sizes of axes with this space as a factor
        self.tables: dict[str, int] = {}  # embeddings, and their numbers of rows
        for pattern, axes in answers.items():
            hits = {p: m.groupdict() for p in paths if (m := path_pattern(pattern).fullmatch(p))}
            if not hits:
                raise ValueError(f"the answer {pattern!r} matches no leaf{nearest(pattern, paths)}")
            self.rules |= {p: fill(axes, captures) for p, captures in hits.items()}
        self.answered = set(self.rules)
        self.modules: dict[str, list[_Leaf]] = defaultdict(list)
        # The vectors of each module without a rule, by their sizes.
        self.vectors: dict[tuple[str, int], list[_Leaf]] = defaultdict(list)
        # The sizes of the biases of each module.
        self.biases: dict[str, list[int]] = defaultdict(list)
        self.with_matrices = {leaf.module for leaf in self.leaves if len(leaf.shape) > 1}
        for leaf in self.leaves:
            self.modules[leaf.module].append(leaf)
            if len(leaf.shape) == 1:
                self.vectors[leaf.module, leaf.shape[0]].append(leaf)
            if leaf.name in {"bias", "b"} and leaf.shape:
                self.biases[leaf.module].append(leaf.shape[0])

    def run(self) -> Draft:
        """Drafts the rules: matrices first, then attention, the other matrices, and vectors.

        Returns the draft without the configuration's entries.
        """
        open_leaves = [leaf for leaf in self.leaves if leaf.path not in self.answered]
        matrices = []
        for leaf in open_leaves:
            if not leaf.floating or not leaf.shape:
                self.rules[leaf.path] = " ".join("_" * len(leaf.shape))
            elif len(leaf.shape) > 1 and (matrix := self._orient(leaf)):
                matrices.append(matrix)
        self.stream = self.stream or self._find_stream(matrices)
        self._assign(self._attention(matrices))
        # Vectors belong to spaces of matrices, and add no spaces.
        spaces = {w for axes in self.rules.values() for w in re.findall(r"[\w.@]+", axes)}
        for leaf in open_leaves:
            if leaf.path not in self.rules:
                self._vector(leaf, spaces)
        return self._finish()

    def _ask(self, leaf: _Leaf, text: str, options: Iterable[str] = ()) -> None:
        """Asks about a leaf. Until the answer it has no space, and its sizes are outer."""
        self.questions.append(Question(leaf.path, text, tuple(options)))
        self._leave(leaf)

    def _leave(self, leaf: _Leaf) -> None:
        """Leaves a leaf and its module's vectors without a space, and its sizes outer."""
        self.rules[leaf.path] = " ".join("_" * len(leaf.shape))
        self._freeze(leaf.shape)
        for n in leaf.shape if len(leaf.shape) > 1 else ():
            self._settle(leaf.module, n, "_")

    def _settle(self, module: str, n: int, axes: str) -> None:
        """Assigns these axes to the vectors of a module that have n entries and no axes yet."""
        for leaf in self.vectors.pop((module, n), ()):
            self.rules.setdefault(leaf.path, axes)

    def _freeze(self, sizes: Iterable[int]) -> None:
        self.frozen |= {str(n) for n in sizes}

    def _orient(self, leaf: _Leaf) -> _Matrix | None:
        """Finds the axes that are read and written; None for embeddings and ambiguous leaves."""
        shape, n = leaf.shape, len(leaf.shape)
        table = self._table(leaf)
        if table == "positions":
            self.rules[leaf.path] = " ".join(["_"] * (n - 1) + [f"@{shape[-1]}"])
            return None
        if table == "tokens":
            self.rules[leaf.path] = f"@{shape[0]}* @{shape[1]}"
            self.tables[leaf.path] = shape[0]
            return None
        # Kernels of convolutions have two or three axes besides channels.
        spatial = n - 2 if n in (4, 5) else 0
        # Flax kernels end with (in, out); PyTorch weights begin with (out, in).
        last, first = _Matrix(leaf, n - 2, n - 1), _Matrix(leaf, 1, 0)
        bias = self.biases[leaf.module]
        # A bias has as many entries as its matrix writes. This determines the axes of all matrices
        # that are not square, in any framework.
        if n == 2 and bias and shape[0] != shape[1] and bias[0] in shape:
            return last if bias[0] == shape[1] else first
        if leaf.name == "kernel" and (n == 2 or spatial):
            return last
        # A weight with one input channel may be depthwise: it multiplies channels instead of mixing
        # them.
        if leaf.name == "weight" and (n == 2 or (spatial and shape[1] > 1)):
            return first
        if n == 2:
            options = [f"units{shape[0]}* units{shape[1]}", f"units{shape[0]} units{shape[1]}*"]
            self._ask(leaf, "which axis is read, and which is written?", options)
        else:
            self._ask(leaf, f"what are the {n} axes of shape {list(shape)}?")
        return None

    def _table(self, leaf: _Leaf) -> str:
        """Classifies embeddings by name: "positions", "tokens", or "" for other leaves."""
        words = _words(re.split("[/.]", leaf.module)[-1]) | _words(leaf.name)
        biased = leaf.name == "weight" and len(self.modules[leaf.module]) > 1
        if leaf.name == "kernel" or biased or len(leaf.shape) < 2:
            return ""
        if words & {"position", "positions", "positional", "pos", "wpe", "type", "segment"}:
            return "positions"
        tokens = words & {"wte", "token", "tokens"} or any("emb" in word for word in words)
        return "tokens" if tokens and len(leaf.shape) == 2 else ""

    def _find_stream(self, matrices: list[_Matrix]) -> int | None:
        """Returns the size that every layer reads and writes; None without layers or in doubt."""
        closed = _closed(matrices)
        if not closed:
            return None
        shared = set.intersection(*closed.values())
        outside = {m.fan_out for m in matrices if not m.leaf.layer}
        outside |= {int(n) for axes in self.rules.values() for n in re.findall(r"@(\d+)", axes)}
        # Every layer also reads and writes its own hidden sizes. But embeddings and a first matrix
        # outside the layers write only the stream.
        candidates = shared & outside
        if len(candidates) == 1:
            return candidates.pop()
        inside = [m for m in matrices if m.leaf.layer]
        text = f"the layers share the sizes {sorted(shared)}: which one is their stream? "
        text += "give stream=..., or their axes"
        self._ask(inside[0].leaf, text)
        for m in inside[1:]:
            self._leave(m.leaf)
        return None

    def _attention(self, matrices: list[_Matrix]) -> list[_Matrix]:
        """Writes rules for queries, keys, values and outputs; returns the other matrices."""
        rest = []
        groups: dict[str, dict[str, _Matrix]] = defaultdict(dict)
        for m in matrices:
            if m.leaf.path in self.rules:
                continue
            parent, word = _parent(m.leaf)
            role = next((r for r, words in _PROJECTIONS.items() if word in words), None)
            if word in _FUSED:
                self._fused(m)
            elif role and role not in groups[parent]:
                groups[parent][role] = m
            else:
                rest.append(m)
        for group in groups.values():
            # Names such as "out" and "dense" also occur elsewhere: only all four together indicate
            # attention.
            if set(group) != set("qkvo"):
                rest += group.values()
                continue
            self._heads(group)
        return rest

    def _fused(self, m: _Matrix) -> None:
        """Asks how a fused matrix arranges queries, keys and values."""
        i = m.leaf.tag
        # Both arrangements have the same shape, so no rule is assumed until the answer.
        apart = f"(head{i} qk{i} + head{i} qk{i}* + head{i} v{i})"
        text = "queries, keys and values are fused: end to end, or head by head?"
        options = [m.axes(f"@{m.fan_in}*", apart)]
        self._ask(m.leaf, text, options)

    def _heads(self, group: Mapping[str, _Matrix]) -> None:
        """Writes the rules of one attention module, or asks for its number of heads."""
        q, k, v, o = (group[name] for name in "qkvo")
        i = q.leaf.tag
        heads = self.heads
        # The caller's number is final; if it does not divide, this is an error below. The
        # configuration's number is only used where it fits.
        if heads is None and self.stated and q.fan_out % self.stated == 0:
            size = q.fan_out // self.stated
            # The configuration may count other heads: they must divide evenly among the keys.
            even = k.fan_out % size == 0 and self.stated % (k.fan_out // size) == 0
            heads = self.stated if even else None
        if heads is None:
            options = [
                q.axes(f"@{q.fan_in}*", f"(head{i} qk{i})"),
                q.axes(f"@{q.fan_in}*", f"(head{i} group{i} qk{i})"),
            ]
            text = (
                "how many heads? give heads=..., or the axes of query, key, value and output, and "
                "the sizes of these spaces"
            )
            # Until the number of heads is known, only the stream's axes get a space. The inner axes
            # get none.
            for m in group.values():
                reads = m is not o
                axes = m.axes(f"@{m.fan_in}*", "_") if reads else m.axes("_", f"@{m.fan_out}")
                self.rules[m.leaf.path] = axes
                self._bias(m, "_" if reads else f"@{m.fan_out}")
            self.questions.append(Question(q.leaf.path, text, tuple(options)))
            return
        size = divided(q.fan_out, heads, f"heads in {q.leaf.path!r}")
        shared = divided(k.fan_out, size, f"head size in {k.leaf.path!r}")
        group_size = divided(heads, shared, f"heads of {k.leaf.path!r} among queries")
        query_heads = f"head{i} group{i}" if group_size > 1 else f"head{i}"
        written = {"q": f"({query_heads} qk{i})", "k": f"(head{i} qk{i}*)", "v": f"(head{i} v{i})"}
        for name, axes in written.items():
            m = group[name]
            self.rules[m.leaf.path] = m.axes(f"@{m.fan_in}*", axes)
            self._bias(m, axes)
        self.rules[o.leaf.path] = o.axes(f"({query_heads} v{i})*", f"@{o.fan_out}")
        self._bias(o, f"@{o.fan_out}")
        value = divided(v.fan_out, shared, f"heads in {v.leaf.path!r}")
        factors = {"head": shared, "qk": size, "v": value, "group": group_size}
        self.sizes |= {f"{name}{i}": n for name, n in factors.items()}
        products = {str(m.fan_out) for m in (q, k, v)}
        self.within |= {f"{name}{i}": {str(n)} | products for name, n in factors.items()}
        # Rotary positions turn pairs of units by different angles, which shapes do not show.
        # Therefore no map inside a head may be reported as exact.
        self.frozen.add(f"qk{i}")

    def _bias(self, m: _Matrix, axes: str) -> None:
        """Gives the bias of a matrix the axes of the matrix's output."""
        self._settle(m.leaf.module, m.fan_out, axes)

    def _assign(self, matrices: list[_Matrix]) -> None:
        """Writes rules for matrices by their sizes: of the stream, a layer, or the network."""
        stream = self.stream
        matrices = [m for m in matrices if m.leaf.path not in self.rules]
        closed = _closed(matrices)
        for m in matrices:
            # A square matrix may lead from the stream to itself, or be one half of a block with as
            # many hidden units as the stream has.
            if m.fan_in == m.fan_out and stream is not None:
                i = m.leaf.tag
                options = [("resid*", "resid"), ("resid*", f"hidden{i}"), (f"hidden{i}*", "resid")]
                text = f"it reads and writes {m.fan_in} units: the stream's, or other units?"
                self._ask(m.leaf, text, [m.axes(*o) for o in options])
                continue
            read, write = f"@{m.fan_in}", f"@{m.fan_out}"
            if stream is not None and m.leaf.layer:
                # A layer both writes and reads its hidden sizes.
                inside = [n for n in (m.fan_in, m.fan_out) if n != stream]
                if not closed[m.leaf.layer].issuperset(inside) or len(inside) != 1:
                    text = f"its layer has nothing with the sizes {sorted(set(inside))}"
                    self._ask(
                        m.leaf, text, [m.axes("resid*", "hidden"), m.axes("hidden*", "resid")]
                    )
                    continue
                hidden = f"units{inside[0]}{m.leaf.tag}"
                read = hidden if m.fan_in != stream else read
                write = hidden if m.fan_out != stream else write
            self.rules[m.leaf.path] = m.axes(f"{read}*", write)
            self._bias(m, write)
        if stream is None:
            self._merged(matrices)
        self._ends(matrices)

    def _merged(self, matrices: list[_Matrix]) -> None:
        """In a network without layers, asks about sizes that several matrices write."""
        writers: dict[int, list[_Matrix]] = defaultdict(list)
        for m in matrices:
            writers[m.fan_out].append(m)
        read = {m.fan_in for m in matrices}
        for n, group in writers.items():
            if len(group) > 1 and n in read:
                names = ", ".join(repr(m.leaf.path) for m in group[:_NAMED])
                names += f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
                last = group[-1]
                options = [f"units{last.fan_in}*", f"units{last.fan_in}.before*"]
                text = f"{names} write {n} units each: one space (a sum, as drafted), or several?"
                self.questions.append(
                    Question(
                        last.leaf.path, text, tuple(last.axes(o, f"units{n}") for o in options)
                    )
                )

    def _ends(self, matrices: list[_Matrix]) -> None:
        """Asks for the input and output if every size is both read and written."""
        embeds = any(self._table(leaf) == "tokens" for leaf in self.leaves)
        roles = list(_roles(map(self._plain, self.rules.values())).values())
        inner = sorted({m.fan_in for m in matrices} & {m.fan_out for m in matrices})
        for role, what in (("read", "input"), ("write", "output")):
            if inner and not embeds and {role} not in roles:
                text = f"which of the sizes {inner} is the network's {what}?"
                self.questions.append(Question(matrices[0].leaf.path, text, ()))
                self._freeze(inner)

    def _vector(self, leaf: _Leaf, spaces: set[str]) -> None:
        """Writes the rule of a leaf other than a matrix: a bias, a gain, or a question."""
        if len(leaf.shape) > 1:
            self._ask(leaf, f"what are its axes of sizes {list(leaf.shape)}?")
            return
        n = math.prod(leaf.shape)
        # A vector next to a matrix whose bias it is not, and a norm of queries or keys, may belong
        # to another space of the same size.
        matrix = leaf.module in self.with_matrices
        kind = leaf.name in _GAINS or leaf.name in _BIASES
        inner = f"units{n}{leaf.tag}"
        options = [name for name in (f"@{n}", inner) if name in spaces]
        doubtful = matrix or _words(leaf.module) & {"q", "k", "query", "key"}
        if not kind or doubtful or len(options) != 1:
            self._ask(
                leaf, f"to which space do its {n} units belong?", ["diag(resid)", "resid", "_"]
            )
            return
        self.rules[leaf.path] = options[0] if leaf.name in _BIASES else f"diag({options[0]})"

    def _finish(self) -> Draft:
        """Names the spaces, decides which are outer, and makes one rule for all equal layers."""
        rules = {path: self._plain(axes) for path, axes in self.rules.items()}
        # A table of embeddings may also be the head (tied), unless a matrix writes as many units as
        # the table has rows.
        matrices = {leaf.path for leaf in self.leaves if len(leaf.shape) > 1} - set(self.tables)
        written = {
            name for name, how in _roles(rules[p] for p in matrices).items() if "write" in how
        }
        for path, rows in self.tables.items():
            if f"units{rows}" not in written:
                read, write = rules[path].split()
                rules[path] = f"{read} {write} | {read[:-1]} {write}*"
                text = "is it also the output's table (tied), as drafted?"
                self.questions.append(Question(path, text, (rules[path], f"{read} {write}")))
        roles = _roles(rules.values())
        self._freeze(self.tables.values())
        # If a size occurs both inside a layer and outside, there may be several streams. Sizes do
        # not distinguish them.
        sized = [m for name in roles if (m := re.fullmatch(r"units(\d+)(\..*)?", name))]
        self._freeze(
            int(n) for n in {m[1] for m in sized if m[2]} & {m[1] for m in sized if not m[2]}
        )
        # A space that is only read is an input of the network; one that is only written, an output.
        ends = {name for name, how in roles.items() if not how >= {"read", "write"}}
        outer = {name for name in roles if self._is_frozen(name)} | ends
        sizes = {k: v for k, v in self.sizes.items() if k in roles}
        asked = [q._replace(options=tuple(map(self._plain, q.options))) for q in self.questions]
        return _templates(self.leaves, rules, outer, sizes, asked)

    def _plain(self, axes: str) -> str:
        """Replaces "@size" in axes by the final names of the spaces."""
        stream = str(self.stream)
        return re.sub(r"@(\d+)", lambda m: "resid" if m[1] == stream else f"units{m[1]}", axes)

    def _is_frozen(self, name: str) -> bool:
        """Checks whether a space is ambiguous, by its name or a possible size."""
        units = re.match(r"units(\d+)", name)
        size = str(self.stream) if name == "resid" else units[1] if units else name
        return bool({name, size, *self.within.get(name, ())} & self.frozen)


def _leaves(paths: list[str], arrays: list[Any]) -> list[_Leaf]:
    """Collects the information in the path and shape of each leaf.

    A layer is a numbered module with at least two matrices.
    """
    shapes = [tuple(np.shape(x)) for x in arrays]
    matrices = [path for path, shape in zip(paths, shapes, strict=True) if len(shape) > 1]
    inside = {p: [p[: m.end() + 1] for m in re.finditer(r"\d+(?=[/.])", p)] for p in paths}
    held = Counter(prefix for path in matrices for prefix in inside[path])
    # The outermost numbered module with two matrices is the layer. A numbered module inside it (of
    # a Sequential) belongs to it.
    layers = [next((x for x in inside[path] if held[x] > 1), "")[:-1] for path in paths]
    out = []
    # If all layers differ only in one number, that number names their spaces, as in `{i}` rules.
    # Otherwise layers of two stacks could share a number, so the whole path is used.
    alike = len({_general(layer) for layer in layers if layer}) == 1
    for path, layer, shape, x in zip(paths, layers, shapes, arrays, strict=True):
        cut = max(path.rfind("/"), path.rfind("."))
        module, name = path[: max(cut, 0)], path[cut + 1 :]
        number = re.findall(r"\d+", layer)[-1:] if alike else [re.sub(r"[/.]+", "-", layer)]
        tag = f".{number[0]}" if layer else ""
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        floating = bool(jnp.issubdtype(dtype, jnp.inexact))
        out.append(_Leaf(path, module, name, layer, tag, shape, floating))
    return out


def _closed(matrices: Iterable[_Matrix]) -> dict[str, set[int]]:
    """Returns the sizes that each layer both reads and writes."""
    reads, writes = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for m in matrices:
        if m.leaf.layer:
            reads[m.leaf.layer].add(m.fan_in)
            writes[m.leaf.layer].add(m.fan_out)
    return {layer: sizes & writes[layer] for layer, sizes in reads.items()}


def _parent(leaf: _Leaf) -> tuple[str, str]:
    """Splits the name of a matrix (or its module) into the enclosing module and the rest."""
    path = leaf.module if leaf.name in {"kernel", "weight", "w"} else leaf.path
    cut = max(path.rfind("/"), path.rfind("."))
    return path[: max(cut, 0)], path[cut + 1 :]


def _words(text: str) -> set[str]:
    """Splits a name into words, in lower case."""
    return set(re.split(r"[/._\d]+", text.lower()))


def _roles(axes: Iterable[str]) -> dict[str, set[str]]:
    """Returns the roles of each space."""
    roles: dict[str, set[str]] = defaultdict(set)
    for text in axes:
        for axis in parse_axes(text):
            for f in axis:
                roles[f.space] |= {f.role, *(("read", "write") if f.tied else ())}
    return roles


def _general(layer: str) -> str:
    """Replaces the number in a layer's path by a capture."""
    return re.sub(r"\d+(?=\D*$)", "{i}", layer)


def _open(leaf: _Leaf, text: str) -> str:
    """Replaces the layer's number in axes by a capture, for a rule of all layers."""
    if not leaf.layer:
        return text
    # A single pattern for all layers: compiling one per layer would take most of the time.
    first, *parts = text.split(leaf.tag)
    follow = [*(part or leaf.tag for part in parts[:-1]), *parts[-1:]]
    return first + "".join(
        (leaf.tag if re.match(r"[\w.]", then) else ".{i}") + part
        for part, then in zip(parts, follow, strict=True)
    )


def _templates(
    leaves: list[_Leaf],
    rules: Mapping[str, str],
    outer: set[str],
    sizes: Mapping[str, int],
    questions: list[Question],
) -> Draft:
    """Combines equal rules and questions of layers into one; different ones stay separate."""
    # A combined rule must give every layer the same axes as its literal rule. Wherever it would
    # not, the literal rules are the draft.
    literal = Rules(tuple(sorted(rules.items())), dict.fromkeys(sorted(outer), "outer"), sizes)
    tags = {leaf.tag: leaf for leaf in leaves if leaf.layer}
    if len({_general(leaf.layer) for leaf in tags.values()}) > 1:
        return Draft(literal, tuple(questions))
    axes: dict[str, str] = {}
    where: dict[str, str] = {}
    for leaf in leaves:
        path = leaf.path.replace(leaf.layer, _general(leaf.layer), 1) if leaf.layer else leaf.path
        where[leaf.path] = path
        text = _open(leaf, rules[leaf.path])
        if axes.setdefault(path, text) != text:
            return Draft(literal, tuple(questions))

    def template(name: str) -> str:
        # A tag begins with its only dot.
        leaf = tags.get(name[max(name.rfind("."), 0) :])
        return _open(leaf, name) if leaf else name

    # A space that is outer in one layer would become outer in all.
    closed = {template(name) for name in outer}
    if any(template(name) in closed and name not in outer for name in _roles(rules.values())):
        return Draft(literal, tuple(questions))
    spaces = dict.fromkeys(sorted(closed), "outer")
    short = Rules(tuple(sorted(axes.items())), spaces, {template(k): n for k, n in sizes.items()})
    by_path = {leaf.path: leaf for leaf in leaves}
    asked = {}
    for path, text, options in questions:
        leaf = by_path[path]
        asked[where[path], text] = tuple(_open(leaf, option) for option in options)
    return Draft(short, tuple(Question(path, text, o) for (path, text), o in asked.items()))
