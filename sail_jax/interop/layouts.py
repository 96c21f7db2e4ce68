"""Converts between MaxText's or Tunix's trees and Hugging Face's tensors, in both directions.

A `Link` describes one leaf of a tree, its tensors, and the steps that lay out each of them. Axes
are split, permuted and joined, entries are scaled and shifted, rows of padding are added, and the
results are stacked. Each step has an inverse, which is computed from the same link, so one table
defines both directions.

Splitting, permuting, padding and stacking keep every bit. A shift rounds once, and so does a scale
other than a power of two. No rounding within one dtype could make a scale invertible: for a scale c
between 1 and 2, more floats lie between 2/c and 2 than between 2 and 2c, where they are mapped.
With leaves in float32, tensors in bfloat16 are restored bit for bit: after scales always, after
shifts for entries from 2^-16 on.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from sail_jax.architectures.frameworks import (
    DECODERS,
    GEMMA3_PATTERN,
    Place,
    Row,
    family_of,
    places,
    recognised,
    rows,
)
from sail_jax.architectures.table import Config, count, divided, flag, setting
from sail_jax.checks import argument, nearest, one_of
from sail_jax.trees import factor_of, leaf_paths, some_paths

Shape = tuple[int, ...]

# No network has this many layers, but a number in a file may be anything.
_LAYERS = 10_000


class Link(NamedTuple):
    """One leaf of a tree and its Hugging Face tensors.

    Attributes:
      leaf: The path of the leaf.
      tensors: The names of the tensors, in the order in which they are stacked.
      layout: The axes of a tensor and of the leaf, as in "(h d) e -> e h d".
      sizes: The sizes of letters in the layout that shapes do not determine.
      stack: The axis of the leaf along which tensors are stacked; None for a single one.
      scale: The factor on entries of the leaf.
      shift: The number added to them after that.
      padding: The number of rows of zeros that are appended along the first axis of the tensor.
      optional: Whether it may be missing on both sides.
    """

    leaf: str
    tensors: tuple[str, ...]
    layout: str
    sizes: Mapping[str, int] = {}
    stack: int | None = None
    scale: float = 1.0
    shift: float = 0.0
    padding: int = 0
    optional: bool = False

    @property
    def exact(self) -> bool:
        """Whether every bit is restored, for any dtype."""
        return not self.shift and math.frexp(self.scale)[0] == 0.5

    @property
    def plain(self) -> bool:
        """Whether entries stay unchanged."""
        return self.scale == 1 and not self.shift

    def at(self, n: int, shape: Sequence[int]) -> tuple[Any, ...]:
        """Returns the position of a tensor in the leaf.

        Args:
          n: The number of the tensor.
          shape: The shape of the leaf.

        Returns:
          The index of its part of the leaf.
        """
        if self.stack is None:
            return (...,)
        # A leaf with fewer axes is stacked on its last axis.
        return (*[slice(None)] * min(self.stack, len(shape) - 1), n)

    def part(self, shape: Sequence[int]) -> Shape:
        """Computes the shape of a tensor within the leaf.

        Args:
          shape: The shape of the tensor.

        Returns:
          The shape, without the axis of the stack.

        Raises:
          ValueError: If the tensor does not match the layout.
        """
        shape = (shape[0] + self.padding, *shape[1:]) if self.padding and shape else tuple(shape)
        left, right = _sides(self.layout)
        known = _solved(left, shape, self.sizes, self.tensors[0])
        return tuple(math.prod(known[x] for x in group) for group in right)

    def shape(self, shape: Sequence[int]) -> Shape:
        """Computes the shape of the leaf.

        Args:
          shape: The shape of each tensor.

        Returns:
          The shape of the leaf.

        Raises:
          ValueError: If the tensors do not match the layout.
        """
        part = self.part(shape)
        if self.stack is None:
            return part
        axis = min(self.stack, len(part))
        return (*part[:axis], len(self.tensors), *part[axis:])

    def tensor(self, shape: Sequence[int]) -> Shape:
        """Computes the shape of each tensor.

        Args:
          shape: The shape of the leaf.

        Returns:
          The shape of a tensor, without rows of padding.

        Raises:
          ValueError: If the leaf does not match the layout, or stacks another number of tensors.
        """
        part = tuple(shape)
        left, right = _sides(self.layout)
        if self.stack is not None:
            axis = min(self.stack, len(part) - 1)
            if len(part) != len(right) + 1 or part[axis] != len(self.tensors):
                raise ValueError(
                    f"{self.leaf!r}: expected {len(self.tensors)} tensors on axis {axis} of "
                    f"{len(right) + 1}, got shape {part}"
                )
            part = part[:axis] + part[axis + 1 :]
        known = _solved(right, part, self.sizes, self.leaf)
        whole = tuple(math.prod(known[x] for x in group) for group in left)
        return (whole[0] - self.padding, *whole[1:]) if self.padding else whole

    def put(self, tensor: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Lays out one tensor for the leaf.

        Args:
          tensor: The tensor.
          dtype: The dtype of the leaf; by default the tensor's.

        Returns:
          Its part of the leaf.

        Raises:
          ValueError: If the tensor does not match the layout.
        """
        part = self.part(tensor.shape)
        if self.padding:
            rows = np.zeros_like(tensor, shape=(self.padding, *tensor.shape[1:]))
            tensor = np.concatenate([tensor, rows])
        left, right = _sides(self.layout)
        out = _permuted(tensor, left, right, self.sizes, self.tensors[0]).reshape(part)
        if self.plain:
            return out.astype(dtype or tensor.dtype, copy=False)
        # In float64, only the last step rounds. Rows of padding stay 0.
        wide = out.astype(np.float64)
        wide *= self.scale
        wide += self.shift
        return wide.astype(dtype or tensor.dtype)

    def take(self, part: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Undoes `put`.

        Args:
          part: A part of the leaf.
          dtype: The dtype of the tensor; by default the leaf's.

        Returns:
          The tensor, without rows of padding.

        Raises:
          ValueError: If the part does not match the layout.
        """
        left, right = _sides(self.layout)
        known = _solved(right, part.shape, self.sizes, self.leaf)
        whole = [math.prod(known[x] for x in group) for group in left]
        out = _permuted(part, right, left, self.sizes, self.leaf).reshape(whole)
        out = out[: len(out) - self.padding] if self.padding else out
        if self.plain:
            return out.astype(dtype or part.dtype, copy=False)
        wide = out.astype(np.float64)
        wide -= self.shift
        wide /= self.scale
        return wide.astype(dtype or part.dtype)


def links(
    framework: str,
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    rope: str | None = None,
) -> tuple[Link, ...]:
    """Lists the leaves of a framework's tree, each with its Hugging Face tensors.

    MaxText divides queries of Llama, Mistral, Gemma and Gemma 2 by the root of a head's size (Gemma
    2: of `query_pre_attn_scalar`). It adds one to the scales of Gemma's norms, and multiplies
    Gemma's embeddings by the root of the width. Tunix does none of this.

    Args:
      framework: "maxtext" or "tunix".
      config: The Hugging Face configuration of the network: `model_type`, `num_hidden_layers`,
        `num_attention_heads`, and `hidden_size` or `head_dim`.
      scan_layers: Whether MaxText stacks its layers; Tunix never does.
      param_scan_axis: The axis on which it stacks them, 0 or 1.
      vocab_size: The rows of the tree's embeddings, if these are padded; the configuration's
        `vocab_size` by default.
      rope: MaxText's layout of the pairs of a rotated head: "halves" like Hugging Face, or
        "interleaved". The default is "interleaved" for a Llama with Llama 3.1's `rope_scaling`,
        for which MaxText uses it, and "halves" otherwise.

    Returns:
      One link for each leaf.

    Raises:
      ValueError: If the framework or the model type is unknown, or an entry of the configuration is
        missing or has the wrong type.

    References:
      The public sources of MaxText (`checkpoint_conversion/utils/param_mapping.py`) and of Tunix
      (`models/*/params*.py`).

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> config |= {"head_dim": 8, "vocab_size": 10}
    >>> link = next(x for x in links("maxtext", config) if "query" in x.leaf)
    >>> link.leaf, link.tensors[1]
    ('decoder/layers/self_attention/query/kernel', 'model.layers.1.self_attn.q_proj.weight')
    >>> link.shape((32, 16))
    (16, 2, 4, 8)
    """
    one_of("framework", framework, DECODERS)
    one_of("param_scan_axis", param_scan_axis, (0, 1))
    kind = setting(config, "model_type")
    known = DECODERS[framework]
    if "text_config" in config or not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"no layout of {framework} is known for the model type {kind!r} (known: "
            f"{', '.join(known)}, of text alone){nearest(str(kind), known)}"
        )
    family = family_of(known[kind])
    heads = count(config, "num_attention_heads")
    shared = count(config, "num_key_value_heads", default=heads)
    divided(heads, shared, "num_key_value_heads among num_attention_heads")
    size = count(config, "head_dim", default=0) or divided(
        count(config, "hidden_size"), heads, "num_attention_heads heads in hidden_size units"
    )
    if size >= 1 << 31:
        raise ValueError(f"head_dim: expected less than 2^31, got {size!r:.40}")
    layers = count(config, "num_hidden_layers")
    if layers > _LAYERS:
        raise ValueError(f"num_hidden_layers: expected at most {_LAYERS}, got {layers}")
    vocabulary = count(config, "vocab_size")
    padding = (vocab_size or vocabulary) - vocabulary
    if padding < 0:
        raise ValueError(
            f"vocab_size: expected at least the {vocabulary} rows of the configuration, got "
            f"{vocab_size}"
        )
    sizes = {"h": heads, "k": shared, "d": size}
    rope = rope or ("interleaved" if _llama31(config) else "halves")
    one_of("rope", rope, ("halves", "interleaved"))
    block, ends = rows(framework, family)
    scanned = scan_layers and framework == "maxtext"
    out = []

    def linked(row: Row, leaf: str, tensors: tuple[str, ...], stack: int | None) -> Link:
        link = Link(leaf, tensors, row.layout, sizes, stack, optional=row.optional)
        if "v" in row.layout.split("->")[0].split():
            link = link._replace(padding=padding)
        return _as_maxtext(link, row, kind, config, rope) if framework == "maxtext" else link

    for row in ends:
        # The table of a tied network is stored once. A head that is also stored is not read.
        if "lm_head" in row.tensors[0] and _is_tied(config):
            continue
        out.append(linked(row, row.leaf, row.tensors, None))
    fused = heads == shared
    for place in places(framework, family, scanned):
        for i, numbers in _layers(place, family, layers):
            for row in block:
                # Tunix stores queries, keys and values together if each has as many heads.
                if row.leaf.endswith("einsum/w") and "attn_vec" not in row.leaf:
                    if ("qkv" in row.leaf) != fused:
                        continue
                    row = row._replace(optional=False)
                names = tuple(f"model.layers.{n}.{t}" for n in numbers for t in row.tensors)
                several = len(row.tensors) > 1
                stack = param_scan_axis if place.stacked else 0 if several else None
                out.append(linked(row, place.path(row.leaf).replace("{i}", i), names, stack))
    return tuple(out)


def _is_tied(config: Config) -> bool:
    """Checks whether the embeddings are also the output's table; by default true for Gemma."""
    gemma = str(config.get("model_type")).startswith("gemma")
    return flag(config, "tie_word_embeddings", default=gemma)


def tree_config(
    framework: str, config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1
) -> dict[str, Any]:
    """Writes the configuration of a tree, for `sail_jax.architectures.of` and for converting back.

    Args:
      framework: "maxtext" or "tunix".
      config: The Hugging Face configuration of the network.
      scan_layers: As in `links`.
      param_scan_axis: As in `links`.

    Returns:
      The configuration. Its entry `hugging_face` contains Hugging Face's.
    """
    decoder = DECODERS[framework][config["model_type"]]
    if framework == "tunix":
        about = {"decoder": decoder, "use_tied_embedding": _is_tied(config)}
    else:
        about = {"decoder_block": decoder, "logits_via_embedding": _is_tied(config)}
        about |= {"scan_layers": scan_layers, "param_scan_axis": param_scan_axis}
    return {"model_type": framework, **about, "hugging_face": dict(config)}


def _llama31(config: Config) -> bool:
    """Checks whether a configuration belongs to a Llama 3.1."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    return config.get("model_type") == "llama" and kind == "llama3"


def _as_maxtext(link: Link, row: Row, kind: str, config: Config, rope: str) -> Link:
    """Adds MaxText's scales, shifts and order of pairs to a link."""
    gemma = kind.startswith("gemma")
    if gemma and row.layout in ("e -> e", "d -> d"):
        return link._replace(shift=1.0)
    if gemma and "embed_tokens" in row.tensors[0]:
        return link._replace(scale=_root(config, "hidden_size"))
    if re.match(r"self_attention/(query|key)/", row.leaf):
        if rope == "interleaved":
            layout = row.layout.replace("(h d)", "(h p j)").replace("(k d)", "(k p j)")
            layout = re.sub(r"\bd\b", "(j p)", layout)
            sizes = {**link.sizes, "p": 2, "j": divided(link.sizes["d"], 2, "pairs in head_dim")}
            link = link._replace(layout=layout, sizes=sizes)
        if "query" in row.leaf and kind in ("llama", "mistral", "gemma", "gemma2"):
            stated = kind == "gemma2" and config.get("query_pre_attn_scalar") is not None
            root = _root(config, "query_pre_attn_scalar") if stated else math.sqrt(link.sizes["d"])
            link = link._replace(scale=1 / root)
    return link


def _root(config: Config, key: str) -> float:
    """Returns the root of an entry of a configuration, checked to be a positive number."""
    value = setting(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
        raise ValueError(
            f"the configuration's {key!r} must be a positive number, got {value!r:.40}"
        )
    return math.sqrt(value)


def _layers(place: Place, family: str, layers: int) -> list[tuple[str, range]]:
    """Returns the value of `{i}` and Hugging Face's layers, for each layer at a position."""
    if family == "gemma2" and place.suffix:
        if layers % 2:
            raise ValueError(
                f"MaxText pairs the layers of Gemma 2: expected an even number, got {layers}"
            )
        first = int(place.suffix == "_global")
        if place.stacked:
            return [("", range(first, layers, 2))]
        return [(str(n), range(2 * n + first, 2 * n + first + 1)) for n in range(layers // 2)]
    whole = layers - layers % GEMMA3_PATTERN
    if "remainder" in place.folder:
        return [(str(n - whole), range(n, n + 1)) for n in range(whole, layers)]
    if place.stacked and family == "gemma3":
        return [(str(b), range(b, whole, GEMMA3_PATTERN)) for b in range(GEMMA3_PATTERN) if whole]
    if place.stacked:
        return [("", range(layers))]
    return [(str(n), range(n, n + 1)) for n in range(layers)]


class Found(NamedTuple):
    """A recognised tree.

    Attributes:
      framework: "maxtext" or "tunix".
      links: Its leaves, with their paths in the tree, and their tensors.
      left: The other leaves: the state of an optimiser, counters, other towers.
    """

    framework: str
    links: tuple[Link, ...]
    left: tuple[str, ...]


def links_of(shapes: Mapping[str, Sequence[int]], config: Config, **options: Any) -> Found:
    """Recognises a tree by its paths and shapes, and lists its links.

    Args:
      shapes: The shapes of its leaves by path. The tree may be inside another one, such as a
        training state.
      config: The Hugging Face configuration of the network.
      **options: Options of `links` that override the values found in the tree.

    Returns:
      The links.

    Raises:
      ValueError: If the tree belongs to no known framework, occurs twice, or does not match the
        configuration. The message contains the leaf.
    """
    about = recognised(shapes)
    if about is None:
        raise ValueError(
            "expected a tree of MaxText (with 'decoder/decoder_norm/scale') or Tunix (with "
            f"'embedder/input_embedding'), got {some_paths(list(shapes), 3)}"
        )
    framework = about["model_type"]
    given = {k: about[k] for k in ("scan_layers", "param_scan_axis") if k in about}
    table = "token_embedder/embedding" if framework == "maxtext" else "embedder/input_embedding"
    prefix, suffix = _surroundings(shapes, table)
    whole = shapes[f"{prefix}{table}{suffix}"]
    if len(whole) != 2:
        raise ValueError(f"'{prefix}{table}{suffix}': expected two axes, got shape {tuple(whole)}")
    given["vocab_size"] = int(whole[0])
    made = links(framework, config, **{**given, **options})
    tops = {link.leaf.split("/")[0] for link in made}
    made = [link._replace(leaf=f"{prefix}{link.leaf}{suffix}") for link in made]
    made = tuple(matched(made, shapes, "leaf"))
    left = tuple(path for path in shapes if path not in {link.leaf for link in made})
    for path in left:
        if path.startswith(prefix) and path.removeprefix(prefix).split("/")[0] in tops:
            if factor_of(path):
                raise ValueError(
                    f"{path!r} is a factor of low rank of another leaf: fold it first, "
                    f"{argument('lora_alpha', '...')}, or sail_jax.lora.fold"
                )
            raise ValueError(f"{path!r} has no Hugging Face tensor in a network of this kind")
    return Found(framework, made, left)


def _surroundings(paths: Iterable[str], table: str) -> tuple[str, str]:
    """Returns the text before and after the path of the embeddings."""
    pattern = re.compile(rf"((?:.*/)?){table}(/value)?")
    # An optimiser's moments have the paths of the parameters, inside its state.
    found = [m for p in paths if "opt_state" not in p and (m := pattern.fullmatch(p))]
    if len(found) != 1:
        names = some_paths([m[0] for m in found])
        raise ValueError(f"expected one leaf {table!r} outside of opt_state, got {names or 'none'}")
    return found[0][1], found[0][2] or ""


def matched(made: Iterable[Link], have: Iterable[str], side: str) -> list[Link]:
    """Selects the links that one side contains, and checks that all required ones are present.

    Args:
      made: The links.
      have: The names on that side.
      side: The side, "leaf" or "tensors".

    Returns:
      The links, in their order.

    Raises:
      ValueError: If a required name is missing; the message contains it.
    """
    have, out = set(have), []
    for link in made:
        names = (link.leaf,) if side == "leaf" else link.tensors
        missing = [name for name in names if name not in have]
        if not missing:
            out.append(link)
        elif not link.optional or len(missing) < len(names):
            raise ValueError(
                f"expected {missing[0]!r}, which is missing{nearest(missing[0], have)}"
            )
    return out


# Tensors of a Hugging Face checkpoint besides its weights: buffers of old releases, and a second
# copy of a tied table.
_UNREAD = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|lm_head\.weight")


def check_placed(made: Iterable[Link], names: Iterable[str]) -> None:
    """Checks that every Hugging Face tensor has a leaf, except for buffers and copies.

    Args:
      made: The links.
      names: The names of the tensors.

    Raises:
      ValueError: If a tensor has no leaf; the message contains its name.
    """
    placed = {name for link in made for name in link.tensors}
    if rest := [name for name in names if name not in placed and not _UNREAD.fullmatch(name)]:
        raise ValueError(f"the tree has no leaf for {some_paths(rest)}")


def to_hugging_face(tree: PyTree, config: Config, **options: Any) -> dict[str, np.ndarray]:
    """Converts a MaxText or Tunix tree to Hugging Face tensors.

    Args:
      tree: The tree, or a training state that contains it. It is recognised by paths and shapes.
      config: The Hugging Face configuration of the network.
      **options: Options of `links` that override the values found in the tree, such as `rope`.

    Returns:
      The tensors by name, with the dtypes of their leaves.

    Raises:
      ValueError: If the tree is not recognised, or does not match the configuration.

    >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config |= {"head_dim": 4, "vocab_size": 5}
    >>> kernels = {"q_proj": (8, 6), "k_proj": (8, 6), "v_proj": (8, 6), "o_proj": (6, 8)}
    >>> tensors = {f"self_attn.{n}.weight": np.ones(shape) for n, shape in kernels.items()}
    >>> tensors |= {f"mlp.{n}_proj.weight": np.ones((7, 6)) for n in ("gate", "up")}
    >>> tensors |= {"mlp.down_proj.weight": np.ones((6, 7)), "input_layernorm.weight": np.ones(6)}
    >>> tensors |= {"post_attention_layernorm.weight": np.ones(6)}
    >>> tensors = {f"model.layers.0.{name}": x for name, x in tensors.items()}
    >>> tensors |= {"model.embed_tokens.weight": np.ones((5, 6)), "model.norm.weight": np.ones(6)}
    >>> tensors |= {"lm_head.weight": np.ones((5, 6))}
    >>> tree = from_hugging_face(tensors, "maxtext", config)
    >>> tree["decoder"]["layers"]["self_attention"]["query"]["kernel"].shape
    (6, 1, 2, 4)
    >>> back = to_hugging_face(tree, config)
    >>> sorted(back) == sorted(tensors) and all((back[k] == x).all() for k, x in tensors.items())
    True
    """
    leaves = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    found = links_of({path: np.shape(x) for path, x in leaves.items()}, config, **options)
    out = {}
    for link in found.links:
        leaf = np.asarray(leaves[link.leaf])
        link.tensor(leaf.shape)
        for n, name in enumerate(link.tensors):
            out[name] = np.ascontiguousarray(link.take(leaf[link.at(n, leaf.shape)]))
    return out


def from_hugging_face(
    tensors: Mapping[str, Any], framework: str, config: Config, **options: Any
) -> dict[str, Any]:
    """Converts Hugging Face tensors to a MaxText or Tunix tree.

    Args:
      tensors: The tensors by name.
      framework: "maxtext" or "tunix".
      config: The configuration of the network.
      **options: Options of `links`.

    Returns:
      The tree: nested dictionaries with NumPy arrays, with the dtypes of the tensors.

    Raises:
      ValueError: If a tensor is missing, has no leaf in the tree, or does not match the
        configuration.
    """
    made = matched(links(framework, config, **options), tensors, "tensors")
    check_placed(made, tensors)
    out: dict[str, Any] = {}
    for link in made:
        arrays = [np.asarray(tensors[name]) for name in link.tensors]
        leaf = np.empty(link.shape(arrays[0].shape), arrays[0].dtype)
        for n, array in enumerate(arrays):
            leaf[link.at(n, leaf.shape)] = link.put(array)
        *folders, last = link.leaf.split("/")
        node = out
        for name in folders:
            node = node.setdefault(name, {})
        node[last] = leaf
    return out


def _sides(layout: str) -> tuple[list[str], list[str]]:
    """Returns the axes of both sides of a layout, each with the letters of its factors."""
    found = (re.findall(r"\(([^)]*)\)|(\w)", side) for side in layout.split("->"))
    left, right = ([(a or b).replace(" ", "") for a, b in side] for side in found)
    return left, right


def _permuted(
    x: np.ndarray, old: list[str], new: list[str], sizes: Mapping[str, int], name: str
) -> np.ndarray:
    """Returns an array with one axis for each letter, in the order of the new side."""
    known = _solved(old, x.shape, sizes, name)
    split = x.reshape([known[letter] for letter in "".join(old)])
    return split.transpose(["".join(old).index(letter) for letter in "".join(new)])


def _solved(
    groups: list[str], shape: Sequence[int], sizes: Mapping[str, int], name: str
) -> dict[str, int]:
    """Solves for the size of each letter, from the known ones and a shape."""
    known = {x: sizes[x] for group in groups for x in group if x in sizes}
    fits = len(groups) == len(shape)
    for group, size in zip(groups, shape, strict=False):
        unknown = [x for x in group if x not in known]
        if len(unknown) == 1:
            known[unknown[0]] = size // math.prod(known[x] for x in group if x in known)
        fits = fits and math.prod(known.get(x, 0) for x in group) == size
    if not fits:
        said = ", ".join(f"{x} = {n}" for x, n in known.items() if x in sizes)
        axes = " ".join(f"({' '.join(g)})" if len(g) > 1 else g for g in groups)
        raise ValueError(
            f"{name!r}: expected axes {axes}{f' with {said}' if said else ''}, got shape "
            f"{tuple(shape)}"
        )
    return known
