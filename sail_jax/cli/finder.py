"""Finds commands. A command is a module, and has the module's name.

A folder of commands is also a command, such as `lora`; its first argument selects one of them.
The first line of a module's docstring is the description that `--help` prints. The first line that
begins with "$ sail-jax" is the example at the end of the help. Docstrings are read without
importing the module, because starting one command must not import the others.
"""

from pathlib import Path
from typing import NamedTuple

_HOME = Path(__file__).parents[2]
GROUPS = {
    "sail_jax.cli.commands": "checkpoints",
    "experiments.commands": "experiments and theory",
}
"""The packages of commands, and the subject of each."""


class Command(NamedTuple):
    """A command of `sail-jax`.

    Attributes:
      module: The module, or the package of several commands.
      file: The file of the module, or the folder of the package.
    """

    module: str
    file: Path

    @property
    def about(self) -> str:
        """Describes the command in one line."""
        source = self.file / "__init__.py" if self.file.is_dir() else self.file
        with open(source, encoding="utf-8") as lines:
            return lines.readline().strip().strip('"')

    @property
    def example(self) -> str:
        """Returns the example: the first line that begins with "$ sail-jax"."""
        source = self.file / "__init__.py" if self.file.is_dir() else self.file
        with open(source, encoding="utf-8") as lines:
            return next((x.strip("$ \n") for x in lines if x.startswith("$ sail-jax ")), "")

    def inner(self) -> "dict[str, Command]":
        """Returns the commands of a package by name; empty for a module."""
        return _within(self.module, self.file) if self.file.is_dir() else {}


def commands(package: str | None = None) -> dict[str, Command]:
    """Lists the commands.

    Args:
      package: One of `GROUPS`, or None for all of them.

    Returns:
      The commands by name, sorted by name within each group.
    """
    found: dict[str, Command] = {}
    for module in GROUPS if package is None else [package]:
        found |= _within(module, _HOME.joinpath(*module.split(".")))
    return found


def _within(package: str, folder: Path) -> dict[str, Command]:
    """Returns the commands in a package's folder."""
    return {
        file.stem: Command(f"{package}.{file.stem}", file)
        for file in sorted(folder.glob("[!_]*"))
        if file.suffix == ".py" or (file / "__init__.py").exists()
    }
