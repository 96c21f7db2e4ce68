"""`sail-jax data`: the data sets that studies know, and what is found of one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.commands.run import add_fields, given
from sail_jax.checks import nearest
from sail_jax.cli.options import Parser, UsageError
from sail_jax.cli.progress import show


def main(parser: Parser, argv: Sequence[str]) -> int:
    parser.add_argument("name", metavar="NAME", nargs="?", help="read this data set, and say it")
    if not argv or argv[0].startswith("-"):
        parser.read(argv)
        show(listed())
        return 0
    from experiments.data.registry import KINDS
    from experiments.lab.config import varied

    kind = next((k for k, (_, sets) in KINDS.items() if argv[0] in sets), None)
    if kind is None:
        names = [name for _, sets in KINDS.values() for name in sets]
        raise UsageError(f"no data set is called '{argv[0]}'{nearest(argv[0], names)}")
    group = KINDS[kind][0](name=argv[0])
    add_fields(parser, group, but=["name"])
    args = parser.read(argv)
    try:
        data = varied(group, **given(vars(args) | {"name": argv[0]}, group))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    show(data.described())
    options = "".join(
        f" --data.{field.name.replace('_', '-')} {value}"
        for field in dataclasses.fields(data)
        if (value := getattr(data, field.name)) is not None
    )
    for study in _that_take(type(data)):
        show(f"  sail-jax run {study}{options}")
    return 0


def listed() -> str:
    """A paragraph for each kind, and in it two lines for each data set."""
    from experiments.data.registry import KINDS

    blocks = []
    for kind, (_, sets) in KINDS.items():
        lines = [f"{kind}:"]
        for name, row in sets.items():
            lines += [f"  {name}: {row.source.name} ({row.size})", f"      {row.files}"]
            if not row.installed:
                lines[-1] += f"; published at {row.source.home}"
        blocks.append("\n".join(lines))
    blocks.append("sail-jax data NAME --help says where a data set is to be given.")
    return "\n\n".join(blocks)


def _that_take(kind: type[Any]) -> list[str]:
    """The studies whose data are of this kind."""
    from experiments.lab.registry import studies

    defaults = {name: study.presets["default"] for name, study in studies().items()}
    return [name for name, config in defaults.items() if isinstance(vars(config).get("data"), kind)]
