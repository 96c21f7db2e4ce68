"""List the tensors, sizes and spaces of a checkpoint; compare several.

$ sail-jax inspect tuned-a tuned-b --base base

With two checkpoints or more, `compare` predicts how well they merge.
"""

import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sail_jax.checks import escaped
from sail_jax.cli import saving
from sail_jax.cli.options import (
    Parser,
    add_offline,
    add_params,
    add_tables,
    numbers,
    on_inputs,
)
from sail_jax.cli.progress import say, show

if TYPE_CHECKING:
    from sail_jax.basis.spaces import Spec
    from sail_jax.checkpoint import Checkpoint
    from sail_jax.cli.inspect_figure import Layout

FIGURE, SCHEMA = "spaces.png", "sail-jax inspect 1"


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    what = "a folder, a file of tensors, or a name on the Hub; two or more are compared"
    add("checkpoint", metavar="CKPT", nargs="+", help=what)
    add("--base", metavar="CKPT", help="with several CKPT: the model they were fine-tuned from")
    add("--data", metavar="FILE", type=Path, help="with several CKPT: an .npz of examples to run")
    add(
        "--linearity",
        action="store_true",
        help="with --data: compare features of merged weights with merged features, by layer",
    )
    add(
        "--scales",
        metavar="S,S",
        type=numbers,
        help="with --linearity and --base: scales of task vectors (default: 0.4)",
    )
    add_tables(parser, "CKPT")
    add_params(parser)
    add("--draft", action="store_true", help="print a draft of the --spec file, and stop")
    add("--full", action="store_true", help="print a row for every tensor and space of each layer")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help=f"draw which tensors share a space ({FIGURE}), or where several CKPT conflict",
    )
    add("--json", metavar="FILE", type=Path, help="also write the result to FILE as JSON")
    add("--allow-pickle", action="store_true", help="read PyTorch's .bin, without running it")
    add_offline(parser)


def run(args: Namespace) -> None:
    """Runs the command."""
    if len(args.checkpoint) > 1:
        from sail_jax.cli.compare import run_pairs

        run_pairs(args)
        return
    for option in ("base", "data", "linearity", "scales"):
        if getattr(args, option) not in (None, False):
            raise ValueError(f"--{option} needs two checkpoints or more, got 1")
    from sail_jax.checkpoint.formats.open import open_checkpoint
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.checkpoint.sources.quantised import open_values

    saving.admit(args.json, SCHEMA)
    opening = open_values if args.draft else open_checkpoint
    with opening(
        args.checkpoint[0], allow_pickle=args.allow_pickle, offline=args.offline
    ) as checkpoint:
        checkpoint.select(args.select)
        if args.draft:
            config = None if args.config is None else read_target(args.config)
            show(tables.draft_table(checkpoint, config), end="")
            return
        record, spec = inspect(checkpoint, args)
    from sail_jax.cli import inspect_figure

    shapes = {row["name"]: tuple(row["shape"]) for row in record["tensors"]}
    layout = None if spec is None else inspect_figure.layout(spec, shapes)
    show(render(record, None if args.full else layout))
    saving.write(args.json, SCHEMA, record)
    if args.out is None:
        return
    if spec is None or layout is None:
        say("note: no drawing was made, because the spaces are unknown")
    else:
        title = f"{record['architecture']}: {parameters(record)}"
        saving.draw(args.out, {FIGURE: inspect_figure.draw(layout, spec, title)})


def inspect(checkpoint: "Checkpoint", args: Namespace) -> "tuple[dict[str, Any], Spec | None]":
    """Describes an open checkpoint: its tensors and, if known, their spaces.

    Args:
      checkpoint: The checkpoint. Codes are read as weights. No tensor values are read except a head
        that config.json calls tied.
      args: The arguments of the command line. Only --config and --spec are used.

    Returns:
      The record as JSON data (what --json writes), and the `Spec` of the spaces, or None if the
      spaces are unknown.
    """
    from sail_jax.checkpoint.contents.relations import contradictions_of
    from sail_jax.checkpoint.contents.vocabulary import read_vocabulary
    from sail_jax.checkpoint.formats import hub
    from sail_jax.checkpoint.formats.extras import config_of
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.checkpoint.sources.quantised import read_if_possible

    codes = read_if_possible(checkpoint)
    config = config_of(checkpoint.extras) if args.config is None else read_target(args.config)
    name, spec, notes, questions = _spec(checkpoint, config, args)
    notes = [*checkpoint.about(), *notes]
    notes = [codes, *notes] if codes else notes
    if args.config is None and not _adapter(checkpoint):
        vocabulary = None
        try:
            vocabulary = read_vocabulary(checkpoint.extras)
        except ValueError as error:
            notes.append(f"the tokenizer was not compared: {error}")
        notes += map(str, contradictions_of(checkpoint, vocabulary))
    tensors = [
        {
            "name": path,
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "parameters": math.prod(x.shape),
            "bytes": math.prod(x.shape) * x.dtype.itemsize,
        }
        for path, x in checkpoint.tensors.items()
    ]
    size = {row["name"]: row["parameters"] for row in tensors}
    spaces = []
    uses = (lambda name: ()) if spec is None else spec.uses
    for space in () if spec is None else spec.spaces:
        by_role: dict[str, dict[str, None]] = {"write": {}, "read": {}, "gain": {}}
        for use in uses(space.name):
            # A tied tensor, such as an embedding that also serves as the head, has both roles.
            other = {"write": "read", "read": "write"}.get(use.role)
            for role in (use.role, other) if use.tied and other else (use.role,):
                by_role[role][use.path] = None
        touching = dict.fromkeys(use.path for use in uses(space.name))
        spaces.append(
            {
                "name": space.name,
                "size": space.size,
                "nonlinearity": space.nonlinearity,
                "writers": list(by_role["write"]),
                "readers": list(by_role["read"]),
                "gains": list(by_role["gain"]),
                "parameters": sum(size[path] for path in touching),
            }
        )
    record = {
        "checkpoint": hub.called(checkpoint.path),
        "architecture": name,
        "parameters": sum(size.values()),
        "bytes": sum(row["bytes"] for row in tensors),
        "dtypes": sorted({row["dtype"] for row in tensors}),
        "tensors": tensors,
        "spaces": spaces,
        "questions": [
            {"tensor": q.path, "question": q.text, "options": list(q.options)} for q in questions
        ],
        "notes": notes,
    }
    return record, spec


def _spec(
    checkpoint: "Checkpoint", config: Mapping[str, Any], args: Namespace
) -> "tuple[str, Spec | None, list[str], Iterable[Any]]":
    """Finds the spaces of a checkpoint: from a given table, a known architecture, or a draft.

    Returns the architecture's name, the spec, notes on the source of the spec, and open questions.
    """
    import jax

    from sail_jax import architectures
    from sail_jax.checkpoint.recipe import tables
    from sail_jax.interop import transformers

    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in checkpoint.tensors.items()}
    if args.spec is not None:
        return f"as in {args.spec}", tables.read_table(args.spec).spec(shapes), [], ()
    if adapter := _adapter(checkpoint):
        return adapter, None, ["an adapter has no spaces of its own: inspect its base model"], ()
    notes = []
    # Runs of MaxText and Tunix have no config.json, but their trees identify them.
    if config := config or architectures.of_tree(shapes) or {}:
        try:
            architecture = architectures.of(config)
            kind = str(config.get("model_type") or architecture.name)
            classes = ", ".join(map(str, config.get("architectures") or ()))
            return (
                f"{kind} ({classes})" if classes else kind,
                architecture.rules(config).spec(shapes),
                [],
                (),
            )
        except (ValueError, TypeError, LookupError) as error:
            # The architecture is unknown, or the tensors do not match its table. This is noted, and
            # the spaces are inferred from the forward pass or drafted.
            notes.append(_line(error))
        if by := transformers.name_of(config):
            try:
                found = transformers.spec_of_config(config, shapes)
            except (ValueError, TypeError) as error:
                notes.append(f"the forward pass of {by} gave no spaces: {_line(error)}")
            else:
                notes[-1] = f"the spaces are inferred from the forward pass of {by}"
                return str(config["model_type"]), found.spec, notes, ()
    try:
        drafted = architectures.draft(shapes)
        spec = drafted.rules.spec(shapes)
    except (ValueError, TypeError, LookupError) as error:
        return "unknown", None, [*notes, f"no spaces could be drafted: {_line(error)}"], ()
    notes.append(
        "the spaces below are a draft from names and shapes: correct the output of --draft, and "
        "pass it with --spec"
    )
    return "unknown", spec, notes, drafted.questions


def _adapter(checkpoint: "Checkpoint") -> str:
    """Describes a checkpoint that is an adapter; returns "" for other checkpoints."""
    from sail_jax.checkpoint.contents.kinds import factor_pair
    from sail_jax.checkpoint.formats.extras import config_of

    lora = [name for name in checkpoint.tensors if re.search(r"lora_(A|B|E|embedding)", name)]
    found = lora or factor_pair(checkpoint.tensors)
    if "adapter_config.json" not in checkpoint.extras and not found:
        return ""
    config = config_of(checkpoint.extras, "adapter_config.json")
    rank, base = config.get("r"), config.get("base_model_name_or_path")
    about = [f"rank {rank}"] * (rank is not None) + [f"of {base}"] * bool(base)
    return f"LoRA adapter{' (' * bool(about)}{', '.join(about)}{')' * bool(about)}"


def _line(error: Exception) -> str:
    """Returns the first line of an error and the number of further lines."""
    lines = str(error).splitlines() or [type(error).__name__]
    more = f" (and {len(lines) - 1} more like it)" if len(lines) > 1 else ""
    return lines[0] + more


def parameters(record: Mapping[str, Any]) -> str:
    """Formats the number of parameters of a checkpoint.

    >>> parameters({"parameters": 124_439_808})
    '124.4 M parameters'
    """
    n = record["parameters"]
    return f"{n:,} parameters" if n < 10**6 else f"{n / 1e6:,.1f} M parameters"


def render(record: Mapping[str, Any], layout: "Layout | None" = None) -> str:
    """Formats a record as text: totals, tensors, spaces, notes and open questions.

    Args:
      record: The record that `inspect` returns.
      layout: The `Layout` of its tensors, with one set of rows for equal layers. With None, every
        tensor and every space gets a row.

    Returns:
      Several lines.
    """
    from sail_jax.basis.spaces import table

    size = f"{parameters(record)}, {record['bytes'] / 1e6:,.1f} MB"
    lines = [
        f"{record['checkpoint']}: {record['architecture']}",
        f"{len(record['tensors'])} tensors, {size}, {', '.join(record['dtypes'])}",
        "",
        table([("tensors", "shape", "dtype", "parameters", "share"), *_tensors(record, layout)]),
    ]
    if record["spaces"]:
        header = ("space", "size", "under", "parameters", "writers", "readers", "gains")
        lines += ["", table([header, *_spaces(record, layout)])]
    lines += ["", *(f"note: {note}" for note in record["notes"])] if record["notes"] else []
    questions = record["questions"] if layout is None else record["questions"][:12]
    for question in questions:
        lines.append(escaped(f"? {question['tensor']}: {question['question']}"))
        lines += [f"    {option!r}" for option in question["options"]]
    if len(questions) < len(record["questions"]):
        lines.append(f"? and {len(record['questions']) - len(questions)} more: --full")
    return "\n".join(lines)


def _tensors(record: Mapping[str, Any], layout: "Layout | None") -> list[tuple[str, ...]]:
    """Makes one row per module in each band of a layout; without one, a row per tensor."""
    by_name = {row["name"]: row for row in record["tensors"]}
    groups = [(name, [row], 1) for name, row in by_name.items()]
    if layout is not None:
        groups = [
            (
                ".".join(filter(None, (band.heading, row.label))),
                [by_name[path] for path in row.paths],
                band.repeats,
            )
            for band in layout.bands
            for row in band.rows
        ]
    out = []
    for name, rows, repeats in groups:
        n = repeats * sum(row["parameters"] for row in rows)
        shape = " x ".join(map(str, rows[0]["shape"])) or "scalar"
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
        named = f"{name} x {repeats}" if repeats > 1 else name
        share = n / max(1, record["parameters"])
        out.append((named, shape, dtypes, f"{n:,}", f"{share:.1%}"))
    return out


def _spaces(record: Mapping[str, Any], layout: "Layout | None") -> list[tuple[str, ...]]:
    """Makes one row per space. Equal spaces of several layers share a row."""
    by_name = {space["name"]: space for space in record["spaces"]}
    groups = [(name, name, 1) for name in by_name] if layout is None else layout.spaces
    out = []
    for name, label, repeats in groups:
        space = by_name[name]
        named = f"{label} x {repeats}" if repeats > 1 else label
        under = space["nonlinearity"] or "unstated"
        users = (_some(space[kind]) for kind in ("writers", "readers", "gains"))
        n = repeats * space["parameters"]
        out.append((named, str(space["size"]), under, f"{n:,}", *users))
    return out


def _some(names: Iterable[str]) -> str:
    """Lists the first three tensors by the last two parts of their names."""
    short = [".".join(re.split(r"[./]", name)[-2:]) for name in names]
    unique = list(dict.fromkeys(short))
    return (", ".join(unique[:3]) or "-") + (f", +{len(unique) - 3}" if len(unique) > 3 else "")


main = on_inputs(add_arguments, run)
