"""Finds commands: a command is a module, and its name is the name of the module.

A folder of commands is a command of its own, such as `lora`: its first argument names one of them.
The first line of a docstring is what `--help` prints about the command, and its first line that
begins with "$ sail-jax" is the example at the end. They are read without importing anything, as
to start one command may not import the others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HOME = Path(__file__).parents[2]
GROUPS = {
    "sail_jax.cli.commands": "checkpoints",
    "experiments.commands": "experiments and theory",
}
"""The packages of commands, and what those of each are about."""


class Command(NamedTuple):
    """A command of `sail-jax`.

    Attributes:
      module: The module, or the package of several commands.
      file: Where it lies: the file of a module, the folder of a package.
    """

    module: str
    file: Path

    @property
    def about(self) -> str:
        """What the command does, in one line."""
        source = self.file / "__init__.py" if self.file.is_dir() else self.file
        with open(source, encoding="utf-8") as lines:
            return lines.readline().strip().strip('"')

    @property
    def example(self) -> str:
        """A line that runs it: the first that begins with "$ sail-jax"."""
        source = self.file / "__init__.py" if self.file.is_dir() else self.file
        with open(source, encoding="utf-8") as lines:
            return next((x.strip("$ \n") for x in lines if x.startswith("$ sail-jax ")), "")

    def inner(self) -> "dict[str, Command]":
        """The commands of a package, by name; none for a module."""
        return dict(_within(self.module, self.file)) if self.file.is_dir() else {}


def commands(package: str | None = None) -> dict[str, Command]:
    """Lists the commands.

    Args:
      package: One of `GROUPS`; None for all of them.

    Returns:
      The commands by name, those of each group in the order of their names.
    """
    packages = GROUPS if package is None else [package]
    return {
        name: command
        for module in packages
        for name, command in _within(module, _HOME.joinpath(*module.split(".")))
    }


def _within(package: str, folder: Path) -> Iterator[tuple[str, Command]]:
    """The commands in the folder of a package."""
    for file in sorted(folder.glob("[!_]*")):
        if file.suffix == ".py" or (file / "__init__.py").exists():
            yield file.stem, Command(f"{package}.{file.stem}", file)
