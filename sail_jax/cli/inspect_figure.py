"""Draws the tensors that share each space, as a table of marks. Equal layers are drawn once."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sail_jax.basis.axes import Axis
from sail_jax.basis.spaces import Spec
from sail_jax.checkpoint.contents.layers import is_early

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In the order of the palette's colours.
MARKS = {
    "write": (">", "writes it"),
    "read": ("<", "reads it"),
    "gain": ("D", "multiplies it, unit by unit"),
}


class Row(NamedTuple):
    """The tensors of one module, as a row of the picture.

    Attributes:
      label: The label of the row.
      paths: The tensors.
      shape: The shape of the first tensor.
      marks: The use of each space by the tensors, as (space, role).
      groups: The spaces that share one array axis.
    """

    label: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    marks: tuple[tuple[str, str], ...]
    groups: tuple[tuple[str, ...], ...]


class Band(NamedTuple):
    """Rows under one heading, such as a layer.

    Attributes:
      heading: The heading; "" outside the layers.
      repeats: The number of layers equal to this one, including itself.
      rows: The rows.
    """

    heading: str
    repeats: int
    rows: tuple[Row, ...]


class Layout(NamedTuple):
    """The rows and columns of the picture.

    Attributes:
      bands: The rows, under their headings.
      spaces: The columns, in the order of their first mark. Each has the name of a space, its
        label, and the number of layers with an equivalent space.
    """

    bands: tuple[Band, ...]
    spaces: tuple[tuple[str, str, int], ...]


class _Layer(NamedTuple):
    """Layers that are equal except for their number.

    Attributes:
      start: The name up to and including the number of the first layer.
      index: The numbers of all layers.
      paths: The tensors of the first layer.
    """

    start: str
    index: tuple[str, ...]
    paths: tuple[str, ...]


def layout(spec: Spec, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Arranges the tensors of a spec in rows. Layers that differ only in their number share rows.

    Args:
      spec: The spaces of the tensors.
      shapes: The shape of each tensor, by its path.

    Returns:
      The rows and columns of the picture. Tensors before the layers come first, tensors after them
      last.
    """
    layers, alone = _layers(spec, shapes)
    bands: list[Band] = []
    before = [path for path in alone if is_early(_plain(path))]
    after = [path for path in alone if not is_early(_plain(path))]
    if before:
        bands.append(Band("", 1, _rows(spec, shapes, before, "")))
    labels = {space.name: (space.name, 1) for space in spec.spaces}
    for layer in layers:
        rows = _rows(spec, shapes, layer.paths, layer.start)
        bands.append(Band(_heading(layer), len(layer.index), rows))
        if len(layer.index) > 1:
            for name in _private(spec, layer.paths):
                labels[name] = (_numberless(name, layer.index[0], "{i}"), len(layer.index))
    if after:
        bands.append(Band("", 1, _rows(spec, shapes, after, "")))
    order = dict.fromkeys(mark[0] for band in bands for row in band.rows for mark in row.marks)
    return Layout(tuple(bands), tuple((name, *labels[name]) for name in order))


def _plain(path: str) -> str:
    """Removes the Flax collection from the start of a path."""
    return re.sub(r"^(params|batch_stats)/", "", path)


def _numberless(name: str, number: str, mark: str) -> str:
    """Replaces the last occurrence of a number in a name by a placeholder."""
    places = [match for match in re.finditer(r"\d+", name) if match[0] == number]
    return name[: places[-1].start()] + mark + name[places[-1].end() :] if places else name


def _heading(layer: _Layer) -> str:
    """Labels the layers of a band, such as "model.layers.{0..11}"."""
    plain = layer.start.strip("./_")
    if len(layer.index) < 2:
        return plain
    return re.sub(rf"{layer.index[0]}$", f"{{{_range(layer.index)}}}", plain)


def _range(numbers: Sequence[str]) -> str:
    """Formats the numbers of layers, as a range if they are consecutive."""
    ordered = sorted(map(int, numbers))
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}..{ordered[-1]}"
    return ",".join(map(str, ordered))


def _layers(spec: Spec, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[_Layer], list[str]]:
    """Groups equal layers, and returns them with the paths outside the layers."""
    paths = list(shapes)
    numbered: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        plain = _plain(path)
        for match in re.finditer(r"\d+(?=[./_])", plain):
            numbered[plain[: match.start()]][match[0]].append(path)
    # A layer has several modules, which excludes the numbers of a pair of norms.
    numbered = {
        prefix: members
        for prefix, members in numbered.items()
        if max(len({_module(_plain(p)) for p in leaves}) for leaves in members.values()) > 1
    }
    layers: list[_Layer] = []
    done: set[str] = set()
    in_order = sorted(numbered)
    # In this order, the names that begin with a prefix follow it.
    within = {a for a, b in itertools.pairwise(in_order) if b.startswith(a)}
    for prefix in sorted(numbered, key=len):
        members = {n: leaves for n, leaves in numbered[prefix].items() if done.isdisjoint(leaves)}
        alike: dict[Any, list[str]] = defaultdict(list)
        for number, leaves in members.items():
            alike[_signature(spec, shapes, leaves, prefix + number, number)].append(number)
        # Blocks with two numbers (block 2 of stage 1) repeat at the inner number.
        if prefix in within and max(map(len, alike.values()), default=0) < 2:
            continue
        for numbers in alike.values():
            layers.append(_Layer(prefix + numbers[0], tuple(numbers), tuple(members[numbers[0]])))
            done |= {path for number in numbers for path in members[number]}
    order = {path: k for k, path in enumerate(paths)}
    layers.sort(key=lambda x: (_tower(x.start), _numbers(x.start), order[x.paths[0]]))
    return layers, [path for path in paths if path not in done]


def _tower(start: str) -> str:
    """Returns the part of a name before its first number, which layers of one tower share."""
    return re.split(r"\d", start)[0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _signature(
    spec: Spec, shapes: Mapping[str, Any], paths: list[str], start: str, number: str
) -> Any:
    """Returns what equal layers share: names, shapes and axes, without the number."""
    private = _private(spec, paths)
    rows = []
    for path in paths:
        axes = [
            [
                (_numberless(f.space, number, "#") if f.space in private else f.space, *f[1:])
                for f in axis
            ]
            for axis in spec.axes(path)
        ]
        rows.append((path.replace(start, "#", 1), shapes[path], str(axes)))
    return tuple(sorted(rows))


def _private(spec: Spec, paths: Iterable[str]) -> set[str]:
    """Returns the spaces that only these tensors use."""
    own = set(paths)
    names = {f.space for path in own for axis in spec.axes(path) for f in axis}
    return {name for name in names if all(use.path in own for use in spec.uses(name))}


def _module(path: str) -> str:
    """Returns the path of a tensor's module."""
    return re.split(r"[./](?=[^./]*$)", path)[0]


def _rows(
    spec: Spec, shapes: Mapping[str, tuple[int, ...]], paths: Sequence[str], start: str
) -> tuple[Row, ...]:
    """Makes a row for each module of these tensors, in the order of the computation."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        modules[_module(_plain(path))].append(path)
    rows = []
    for module, members in modules.items():
        members = sorted(members, key=lambda p: -len(shapes[p]))
        names = [_plain(path)[len(module) :].lstrip("./") for path in members]
        label = module[len(start) :].strip("./_") or names[0]
        if len(members) > 1:
            shown = names if len(names) < 5 else [*names[:2], f"+{len(names) - 2}"]
            label += f" ({', '.join(shown)})"
        elif names[0] and names[0] not in ("weight", "kernel", "embedding"):
            label += f".{names[0]}"
        marks = dict.fromkeys(
            (f.space, role)
            for path in members
            for axis in spec.axes(path)
            for f in axis
            for role in (
                (f.role, "read" if f.role == "write" else "write") if f.tied else (f.role,)
            )
        )
        groups = dict.fromkeys(
            tuple(dict.fromkeys(f.space for f in axis))
            for path in members
            for axis in spec.axes(path)
            if _several(axis)
        )
        rows.append(Row(label, tuple(members), shapes[members[0]], tuple(marks), tuple(groups)))
    return tuple(sorted(rows, key=lambda row: (*_place(row.label), len(row.shape) < 2)))


def _several(axis: Axis) -> bool:
    """Checks whether an axis consists of more than one space."""
    return len({f.space for f in axis}) > 1


# The parts of a transformer layer or a residual block in the order of the computation, by their
# usual names in releases. The position in this list orders the rows.
_ORDER = (
    r"^(layer\.\d+\.)?layer_norm$|input_layernorm|ln_1|norm1|layernorm_before|layer_norm1|^bn0",
    r"(?<![a-z])(q|query|q_proj|c_attn|qkv)(?![a-z])",
    r"(?<![a-z])q_norm",
    r"(?<![a-z])(k|key|k_proj)(?![a-z])",
    r"(?<![a-z])k_norm",
    r"(?<![a-z])(v|value|v_proj)(?![a-z])",
    r"relative_attention_bias",
    r"(?<![a-z])(o|o_proj|out_proj)(?![a-z])|attn.c_proj|attention.output.dense",
    r"attention.output.LayerNorm|post_attention_layernorm|ln_2|norm2|layernorm_after|layer_norm2",
    r"gate_proj|c_fc|fc1|intermediate|wi|^in(?![a-z])|^conv1",
    r"up_proj|^bn1",
    r"down_proj|mlp.c_proj|fc2|output.dense|wo|^out(?![a-z])|^conv2",
    r"output.LayerNorm|^bn2",
)


def _place(label: str) -> tuple[int, int]:
    """Returns a sort key: a module's position in the order of the computation within a layer.

    The number at the start of the name comes first, then the kind of module; unknown kinds last.
    """
    part = re.match(r"[a-z]+\.(\d+)\.", label)
    kinds = (k for k, pattern in enumerate(_ORDER) if re.search(pattern, label))
    return int(part[1]) if part else 0, next(kinds, len(_ORDER))


def draw(found: Layout, spec: Spec, title: str) -> "Figure":
    """Draws the picture. Rows are modules, columns are spaces, marks are uses.

    Args:
      found: The rows and columns.
      spec: The spaces, for their sizes and nonlinearities.
      title: The title.

    Returns:
      The Matplotlib figure.
    """
    # Imported here because Matplotlib imports slowly, and `layout`, which is always printed, does
    # not require it.
    from matplotlib.patches import Rectangle

    from sail_jax.drawing import style

    rows = [(band, row) for band in found.bands for row in band.rows]
    columns = {name: k for k, (name, *_) in enumerate(found.spaces)}
    n = len(rows) + sum(1.6 if band.heading else 0.5 for band in found.bands)
    longest = max((len(style.literal(row.label)) for _, row in rows), default=8)
    left, right = 0.3 + 0.075 * longest, 2.1
    head, foot = 1.5, 0.55
    wide = max(0.5, min(0.62, 9 / max(1, len(columns)))) * max(1, len(columns))
    # The legend and the title require some width.
    wide = max(wide, 4.5 - left)
    width, height = left + wide + right, head + 0.23 * n + foot
    fig, axes = style.figure(width=width, height=height)
    fig.set_layout_engine("none")
    ax = axes[0, 0]
    ax.set_position([left / width, foot / height, wide / width, (height - head - foot) / height])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_xlim(-0.5, max(1, len(columns)) - 0.5)
    ax.set_ylim(n - 0.5, -0.5)
    inches = (right - 0.1) / (wide / max(1, len(columns)))
    at, spans = 0.0, defaultdict(list)
    labels = []
    for band in found.bands:
        if band.heading:
            ax.add_patch(
                Rectangle(
                    (-0.5, at - 0.5),
                    len(columns) + inches,
                    len(band.rows) + 1.1,
                    color="#F2F2F2",
                    lw=0,
                    zorder=-3,
                    clip_on=False,
                )
            )  # fmt: skip
            where = {"va": "center", "fontweight": "bold", "color": style.INK}
            ground = {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 1.5}
            ax.text(
                -0.4,
                at,
                style.literal(band.heading),
                fontsize=style.points(8),
                bbox=ground,
                **where,
            )
            if band.repeats > 1:
                x = len(columns) - 0.55 + inches
                ax.text(
                    x, at + 0.1, f"x {band.repeats}", ha="right", fontsize=style.points(12), **where
                )
            at += 1
        for row in band.rows:
            labels.append((at, style.literal(row.label)))
            _marks(ax, row, at, columns)
            for name, _ in row.marks:
                spans[name].append(at)
            shape = " x ".join(map(str, row.shape)) or "scalar"
            ax.text(
                len(columns) - 0.35,
                at,
                shape,
                va="center",
                fontsize=style.points(7.5),
                color=style.FAINT,
            )
            at += 1
        at += 0.6 if band.heading else 0.5
    for name, k in columns.items():
        ax.plot([k, k], [min(spans[name]), max(spans[name])], color="#CFCFCF", lw=2.2, zorder=-1)
        ax.plot([k, k], [-0.45, min(spans[name])], color="#E4E4E4", lw=0.8, ls=":", zorder=-2)
    ax.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=style.points(8))
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    names = []
    for name, label, _ in found.spaces:
        space = spec.space(name)
        under = style.literal(space.nonlinearity or "unstated")
        names.append(f"{style.literal(label, 40)} = {space.size}\n{under}")
    ax.set_xticks(range(len(columns)), names, rotation=55, ha="left", rotation_mode="anchor")
    ax.tick_params(axis="x", labelsize=style.points(8))
    for label in ax.get_xticklabels():
        label.set_linespacing(1.0)
    fig.text(
        0.1 / width,
        1 - 0.12 / height,
        style.literal(title, 120),
        fontsize=style.points(10),
        va="top",
        color=style.INK,
    )
    handles = [
        ax.scatter([], [], marker=marker, color=colour, s=38, label=what)
        for (marker, what), colour in zip(MARKS.values(), style.PALETTE, strict=False)
    ]
    handles += ax.plot([], [], color=style.INK, lw=1.1, label="spaces of one array axis")
    fig.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=4, frameon=False,
        fontsize=style.points(8), handletextpad=0.3, columnspacing=1.2,
    )  # fmt: skip
    return fig


def _marks(ax: "Axes", row: Row, y: float, columns: Mapping[str, int]) -> None:
    """Draws the marks of one row, at height y."""
    from sail_jax.drawing import style

    by_space: dict[str, list[str]] = defaultdict(list)
    for name, role in row.marks:
        by_space[name].append(role)
    for name, roles in by_space.items():
        roles = sorted(roles, key=list(MARKS).index)
        for k, role in enumerate(roles):
            marker, colour = MARKS[role][0], style.PALETTE[list(MARKS).index(role)]
            x = columns[name] + 0.2 * (k - (len(roles) - 1) / 2)
            ax.scatter([x], [y], marker=marker, color=colour, s=38, zorder=3, linewidths=0)
    for group in row.groups:
        places = [columns[name] for name in group]
        ax.plot([min(places), max(places)], [y + 0.3] * 2, color=style.INK, lw=1.1, zorder=2)
