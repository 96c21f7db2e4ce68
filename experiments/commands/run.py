"""Run one study; every field of its config is an option.

With --sweep, the study runs at every combination of values of some fields.

$ sail-jax run transfer_phase --preset tiny
"""

import argparse
import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal

from experiments.commands.list import experiments
from experiments.lab import registry
from experiments.lab.config import AnyConfig, documentation, fields, varied
from experiments.lab.progress import reporting
from experiments.lab.registry import Study
from sail_jax.checks import nearest
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import Parser, UsageError, add_on, function
from sail_jax.cli.progress import say, show

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from experiments.lab.callbacks import Callback
    from experiments.lab.grid import GridResult
    from sail_jax.drawing.printing import Looks


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Runs a study, or continues it, and prints its findings.

    Without a name, or with `--help` alone, it lists the studies.
    """
    if not argv or argv[0] in ("-h", "--help"):
        options = "[--preset P] [--out DIR] [--resume] [--sweep FIELD=VALUES] [config fields]"
        show(f"usage: sail-jax run NAME {options}\n")
        show("sail-jax run NAME --help lists the fields of one study.\n")
        show(experiments())
        return 0
    name = argv[0]
    if name.startswith("-"):
        raise UsageError("give the study first: sail-jax run NAME [options]")
    try:
        study = registry.load(name)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    usage = "%(prog)s [options] [fields of the config]"
    # Without --help, which is added after the fields: reading the preset must not print it.
    example = f"sail-jax run {name} --preset tiny"
    parser = Parser(f"run {name}", parser.description, example, usage=usage, add_help=False)
    args, config = _read(parser, argv[1:], study)
    looks = looks_of(args)
    if args.sweep:
        return _sweep(args, study, config, looks)
    if args.on is not None:
        raise UsageError("--on is for --sweep: a single run is computed here")
    from experiments.lab import processes, running, store

    remember_kernels()
    if args.processes is not None:
        try:
            processes.join(args.processes)
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
    folder = args.out or f"results/{name}"
    with running.compiling(args.preset), processes.together():
        # Every process computes, but only the first prints.
        first = processes.is_first()
        with store.Run.open(folder, name, config, resume=args.resume) as run:
            if first:
                say(f"{name}: {study.question}")
                if run.finished:
                    say(f"  {run.path}: finished before; only the figures are drawn again")
            complete = functools.partial(
                store.complete, run, study, config, looks=looks, callback=_callback(args, folder)
            )
            dataset, figures = complete(watch=reporting) if first else complete()
    if first:
        show_run(study, dataset, figures, run.path, looks.formats)
    return 0


def _sweep(args: argparse.Namespace, study: Study, preset: AnyConfig, looks: "Looks") -> int:
    """Runs a study at every combination of values of some fields."""
    from experiments.lab import grid
    from sail_jax.cluster import ClusterError

    if args.processes is not None:
        raise UsageError("--processes is for a single run; give --on to compute a sweep elsewhere")
    try:
        axes = swept(args.sweep, preset)
        points = grid.planned(study.name, axes, preset=args.preset, **given(vars(args), preset))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    remember_kernels()
    say(f"{study.name}: {study.question}")
    sizes = " x ".join(f"{field} ({len(values)})" for field, values in points.axes.items())
    say(f"  {len(points.points)} points: {sizes}")
    out = args.out or f"results/{study.name}_sweep"
    report = _callback(args, out)
    try:
        result = grid.compute(
            points, out, resume=args.resume, on=args.on, progress=True, callback=report
        )
    except ClusterError as exc:
        raise UsageError(str(exc)) from exc
    show_grid(result, looks)
    return 0


def _log(text: str) -> "Callable[[Path], Callback]":
    """Reads what receives metrics: the name of a writer, or MODULE:FUNCTION."""
    from experiments.lab.callbacks import WRITERS

    if text in WRITERS:
        return lambda out: WRITERS[text](out / text)
    if ":" not in text:
        names = ", ".join(WRITERS)
        why = f"expected {names} or MODULE:FUNCTION, got '{text}'{nearest(text, WRITERS)}"
        raise argparse.ArgumentTypeError(why)
    callback = function(text)
    return lambda out: callback


def _callback(args: argparse.Namespace, out: str) -> "Callback | None":
    """Makes the callback that was chosen. Its files are in a folder of the run."""
    return None if args.log is None else args.log(Path(out))


def add_looks(parser: argparse.ArgumentParser) -> None:
    """Adds the options for how figures are drawn.

    Args:
      parser: The parser.
    """
    add = parser.add_argument_group("figures").add_argument
    add("--format", default="png", help="png, svg, pdf, or several: png,pdf; default: %(default)s")
    add(
        "--figure-width",
        help="the width of a journal's column: single (3.5 inches) or double (7.2)",
    )
    add("--figure-style", help="a style of Matplotlib: its name, or a file")


def looks_of(args: argparse.Namespace) -> "Looks":
    """Reads the options for how figures are drawn.

    Args:
      args: The options, of a parser with `add_looks`.

    Returns:
      The looks.

    Raises:
      UsageError: If one of them is unknown.
    """
    from sail_jax.drawing.printing import FORMATS, Looks

    formats = tuple(args.format.split(","))
    for name in formats:
        if name not in FORMATS:
            raise UsageError(f"--format: unknown '{name}'{nearest(name, FORMATS)}")
    try:
        return Looks(formats, args.figure_width, args.figure_style).checked()
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def show_grid(result: "GridResult", looks: "Looks") -> None:
    """Draws the result of a grid, and prints its summary and the paths of its files.

    Args:
      result: The result.
      looks: How its figures are drawn.
    """
    from experiments.lab import store

    show(result.summary)
    for file in (result.path / store.RESULT, *result.draw(looks)):
        show(file)


def show_run(
    study: Study,
    dataset: "xr.Dataset",
    figures: "Mapping[str, Figure]",
    path: Path,
    formats: Sequence[str],
) -> None:
    """Prints the findings of a finished run, and the paths of its files.

    Args:
      study: The study.
      dataset: The result, an xarray dataset.
      figures: The figures by name.
      path: The directory of the run.
      formats: The formats of the files of figures.
    """
    from experiments.lab import store

    show(study.summary(dataset))
    if declared := study.findings(dataset):
        from experiments.lab import findings

        show(findings.told(declared))
    files = [f"{figure}.{format}" for figure in figures for format in formats]
    for file in (store.RESULT, *files):
        show(path / file)


def _read(parser: Parser, argv: Sequence[str], study: Study) -> tuple[argparse.Namespace, Any]:
    """Reads the options, and builds the config: the preset with the given fields replaced.

    For a sweep it is the preset itself.
    """
    add = parser.add_argument
    presets = ", ".join(study.presets)
    add(
        "--preset",
        metavar="P",
        default="default",
        help=f"the config that supplies the defaults, one of: {presets}",
    )
    add("--out", metavar="DIR", help="the folder for the results; default: results/NAME")
    add("--resume", action="store_true", help="continue an interrupted run")
    how = "run as one of several processes: auto (SLURM, TPU pods), or HOST:PORT,COUNT,RANK"
    add("--processes", metavar="HOW", help=how)
    how = "run at these values of a field: 0:10 (0 to 9) or .1,.2,.5; several make a grid"
    add("--sweep", metavar="FIELD=VALUES", action="append", help=how)
    how = "also pass metrics to tensorboard (files in DIR/tensorboard), or to MODULE:FUNCTION"
    add("--log", metavar="HOW", type=_log, help=how)
    add_on(parser, "compute the points of a sweep")
    add_looks(parser)
    # The fields' options show the preset's values as defaults, so the preset is read first.
    preset = parser.parse_known_args(argv)[0].preset
    if preset not in study.presets:
        raise UsageError(f"unknown preset '{preset}'{nearest(preset, study.presets)}")
    config = study.presets[preset]
    add("-h", "--help", action="help", help="show this help, and exit")
    add_fields(parser, config)
    args = parser.read(argv)
    if args.sweep:
        return args, config  # given fields need only fit together with the swept ones
    try:
        return args, varied(config, **given(vars(args), config))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def add_fields(
    parser: Parser, config: AnyConfig, group: str = "", *, but: Sequence[str] = ()
) -> None:
    """Adds an option to a parser for each field of a config.

    The option for a field within a group begins with the group's name: `--budget.steps`. The help
    of an option is the text under the field in the class of the config, with its default.

    Args:
      parser: The parser.
      config: The config. Its values are shown as defaults. A field that is not given is absent from
        the parser's result.
      group: The group's name if `config` is a group; empty for a whole config.
      but: Names of fields without an option.
    """
    about = (type(config).__doc__ or "").partition("\n")[0]
    options = parser.add_argument_group(group or "fields of the config", about if group else None)
    hints, texts = typing.get_type_hints(type(config)), documentation(type(config))
    for field in dataclasses.fields(config):
        if field.name in but:
            continue
        name, value = f"{group}.{field.name}".lstrip("."), getattr(config, field.name)
        if isinstance(value, AnyConfig):
            add_fields(parser, value, name)
            continue
        about = f"{texts.get(field.name, '')} (default: {_shown(value)})"
        kind, former = _kind(hints[field.name]), getattr(config, "FORMER", {})
        if words := former.get(field.name):
            kind["type"] = lambda word, words=words: words.get(word, word)
        options.add_argument(
            "--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS,
            help=about.strip().replace("%", "%%"), **kind,
        )  # fmt: skip
        for old, new in former.items():
            if new == field.name:
                option = f"--{group}.{old}" if group else f"--{old}"
                options.add_argument(
                    option.replace("_", "-"), dest=name, default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS, **kind,
                )  # fmt: skip


def given(args: Mapping[str, Any], config: AnyConfig, group: str = "") -> dict[str, Any]:
    """Collects the fields of a config that were given as options.

    Args:
      args: The options by name, as a parser with `add_fields` reads them.
      config: The config from which the options were made.
      group: The group's name if `config` is a group; empty for a whole config.

    Returns:
      The given values by field, with a mapping for each group: the changes that `lab.config.varied`
      accepts.
    """
    fields = {}
    for field in dataclasses.fields(config):
        name, was = f"{group}.{field.name}".lstrip("."), getattr(config, field.name)
        if isinstance(was, AnyConfig):
            if changes := given(args, was, name):
                fields[field.name] = changes
        # Options that are not given are absent (`argparse.SUPPRESS`).
        elif name in args:
            value = args[name]
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return fields


def swept(words: Sequence[str], config: AnyConfig) -> dict[str, list[Any]]:
    """Reads the axes of a grid from FIELD=VALUES.

    Args:
      words: The texts, one for each axis. Values are separated by commas, and START:STOP or
        START:STOP:STEP is a range of whole numbers, as in Python.
      config: The config. The values have the types of its fields.

    Returns:
      The values by field.

    Raises:
      ValueError: If a text has another form, a field is unknown or occurs twice, or a value does
        not have its type.
    """
    axes: dict[str, list[Any]] = {}
    known = fields(config)
    for word in words:
        name, equals, values = word.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and values):
            raise ValueError(f"--sweep: expected FIELD=VALUES, such as seed=0:10; got '{word}'")
        if name not in known:
            raise ValueError(f"--sweep: no field is called '{name}'{nearest(name, known)}")
        if name in axes:
            raise ValueError(f"--sweep: {name} occurs twice; give all its values at once")
        axes[name] = [
            value
            for part in values.split(",")
            for value in _values(part, name, _hint(config, name))
        ]
    return axes


def _hint(config: AnyConfig, name: str) -> Any:
    """Returns the type of a field, which may lie in a group."""
    *groups, field = name.split(".")
    for group in groups:
        config = getattr(config, group)
    return typing.get_type_hints(type(config))[field]


def _values(text: str, name: str, hint: Any) -> Sequence[Any]:
    """Reads a value, or a range of whole numbers."""
    kind = _kind(hint)
    if "nargs" in kind or kind.get("type") is function:
        raise ValueError(f"--sweep: {name} is not a single number, truth value or text")
    if hint is int and ":" in text:
        return _range(text, name)
    words = {"true": True, "false": False} if hint is bool else kind.get("choices")
    if words is not None:
        known = words if isinstance(words, dict) else {str(word): word for word in words}
        if text not in known:
            raise ValueError(f"--sweep: {name}: expected one of {', '.join(known)}; got '{text}'")
        return [known[text]]
    try:
        return [kind["type"](text)]
    except ValueError as exc:
        expected = kind["type"].__name__
        raise ValueError(f"--sweep: {name}: invalid {expected} value: '{text}'") from exc


def _range(text: str, name: str) -> range:
    """Reads START:STOP or START:STOP:STEP, the ends of a Python range."""
    from experiments.lab.grid import MOST

    try:
        values = range(*map(int, text.split(":")))
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"--sweep: {name}: expected START:STOP or START:STOP:STEP; got '{text}'"
        ) from exc
    if values[MOST:]:
        raise ValueError(f"--sweep: {name}: a sweep has at most {MOST:,} points; got '{text}'")
    return values


def _kind(hint: Any) -> dict[str, Any]:
    """Returns the options of argparse that read a value of this type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Callable:
        return {"type": function, "metavar": "MODULE:FUNCTION"}
    if origin is Literal:
        return {"choices": inner}
    if origin is tuple:
        return {**_kind(inner[0]), "nargs": "*" if inner[-1] is ... else len(inner)}
    if origin in (typing.Union, UnionType):
        (kind,) = (_kind(part) for part in inner if part is not NoneType)
        return {**kind, "type": _or_none(kind["type"])}
    return {"type": hint, "metavar": hint.__name__.upper()}


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps a reader of values so that it also accepts the word "None"."""

    @functools.wraps(read)  # argparse prints the wrapped function's name in errors
    def optional(text: str) -> Any:
        return None if text == "None" else read(text)

    return optional


def _shown(value: object) -> str:
    """Formats a value as the command line accepts it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
