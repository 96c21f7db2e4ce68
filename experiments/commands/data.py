"""List the data sets for studies, or check the files of one data set.

$ sail-jax data cifar-10 --folder cifar-10-batches-bin
"""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.commands.run import add_fields, given
from sail_jax.checks import nearest, spelled
from sail_jax.cli.options import Parser, UsageError, flag
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    """Describes one data set and the commands that use it, or lists all data sets."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="the data set to read and describe")
    if not argv or argv[0].startswith("-"):
        parser.read(argv)
        show(listed())
        return 0
    from experiments.data.registry import KINDS
    from experiments.lab.config import varied

    kind = next((kind for kind in KINDS.values() if argv[0] in kind.sets), None)
    if kind is None:
        names = [name for kind in KINDS.values() for name in kind.sets]
        raise UsageError(f"unknown data set '{argv[0]}'{nearest(argv[0], names)}")
    group = kind.group(name=argv[0])
    add_fields(parser, group, but=["name"])
    args = parser.read(argv)
    try:
        data = varied(group, **given(vars(args) | {"name": argv[0]}, group))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    # Here the options for fields omit the name of their group.
    with spelled(lambda name, value: flag(name.removeprefix("data."), value)):
        show(data.described())
    fields = {k: v for k, v in vars(data).items() if v is not None}
    options = [x for k, v in fields.items() for x in (f"--data.{k.replace('_', '-')}", str(v))]
    for study, preset in _that_take(type(data), fields):
        chosen = [] if preset == "default" else ["--preset", preset]
        show(f"  {shlex.join(['sail-jax', 'run', study, *chosen, *options])}")
    return 0


def listed() -> str:
    """Lists all data sets as text, one paragraph for each kind.

    Returns the text. Each data set has a line on its name, source and size, and one on its files.
    """
    from experiments.data.registry import KINDS

    blocks = []
    for title, kind in KINDS.items():
        lines = [f"{title}:"]
        for name, row in kind.sets.items():
            where = f"{row.files}; published at {row.source.home}"
            lines += [
                f"  {name}: {row.source.name} ({kind.size(name)})",
                f"      {where if row.files else 'included; no files needed'}",
            ]
        blocks.append("\n".join(lines))
    blocks.append("sail-jax data NAME --help lists the options for its folder or files.")
    return "\n\n".join(blocks)


def _that_take(kind: type[Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the studies that accept such data, with the first preset that allows them."""
    from experiments.lab.config import varied
    from experiments.lab.registry import studies

    for name, study in studies().items():
        for preset, config in study.presets.items():
            if isinstance(vars(config).get("data"), kind):
                with contextlib.suppress(ValueError):
                    varied(config, data=fields)
                    yield name, preset
                    break
