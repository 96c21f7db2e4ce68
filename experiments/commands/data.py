"""The data sets that experiments know, and what is found of one.

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
    """Describes one data set, with the commands that use it, or lists all."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="read this data set and say what it holds"
    )
    if not argv or argv[0].startswith("-"):
        parser.read(argv)
        show(listed())
        return 0
    from experiments.data.registry import KINDS
    from experiments.lab.config import varied

    kind = next((kind for kind in KINDS.values() if argv[0] in kind.sets), None)
    if kind is None:
        names = [name for kind in KINDS.values() for name in kind.sets]
        raise UsageError(f"no data set is called '{argv[0]}'{nearest(argv[0], names)}")
    group = kind.group(name=argv[0])
    add_fields(parser, group, but=["name"])
    args = parser.read(argv)
    try:
        data = varied(group, **given(vars(args) | {"name": argv[0]}, group))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    # Here fields are options without the name of their group.
    with spelled(lambda name, value: flag(name.removeprefix("data."), value)):
        show(data.described())
    fields = {k: v for k, v in vars(data).items() if v is not None}
    options = [x for k, v in fields.items() for x in (f"--data.{k.replace('_', '-')}", str(v))]
    for study, preset in _that_take(type(data), fields):
        chosen = [] if preset == "default" else ["--preset", preset]
        show(f"  {shlex.join(['sail-jax', 'run', study, *chosen, *options])}")
    return 0


def listed() -> str:
    """Puts all data sets into words, a paragraph for each kind.

    Returns the text. Each data set has a line with its name, source and size, and one on its files.
    """
    from experiments.data.registry import KINDS

    blocks = []
    for title, kind in KINDS.items():
        lines = [f"{title}:"]
        for name, row in kind.sets.items():
            where = f"{row.files}; published at {row.source.home}"
            lines += [
                f"  {name}: {row.source.name} ({kind.size(name)})",
                f"      {where if row.files else 'installed: nothing is to be given'}",
            ]
        blocks.append("\n".join(lines))
    blocks.append("sail-jax data NAME --help says where a data set is to be given.")
    return "\n\n".join(blocks)


def _that_take(kind: type[Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the studies that take such data, and the first preset of each that allows them."""
    from experiments.lab.config import varied
    from experiments.lab.registry import studies

    for name, study in studies().items():
        for preset, config in study.presets.items():
            if isinstance(vars(config).get("data"), kind):
                with contextlib.suppress(ValueError):
                    varied(config, data=fields)
                    yield name, preset
                    break
