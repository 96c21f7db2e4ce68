"""Runs a command: finds it by name, and prints errors and interrupts as one line."""

import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# JAX uses OpenBLAS for factorisations on a CPU. OpenBLAS's spinning threads compete with XLA's:
# on few cores each waits for the other. The variable is read when NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from sail_jax.checks import nearest, spelled
from sail_jax.cli.finder import GROUPS, Command, commands
from sail_jax.cli.memory import collect_rarely, reuse_freed_memory
from sail_jax.cli.options import Parser, UsageError, flag
from sail_jax.cli.progress import fitted, say, show
from sail_jax.cli.stopping import stop_on_signals
from sail_jax.disk import NO_PATH, StoreError


def _help() -> str:
    groups = "\n\n".join(
        f"{about}:\n{_listed(commands(package))}" for package, about in GROUPS.items()
    )
    return (
        "usage: sail-jax [--help] [--version] COMMAND ...\n\n"
        "Merge, grow and transfer neural networks in JAX, and check the theory of when this works."
        f"\n\n{groups}\n\nsail-jax COMMAND --help describes a command. Exit codes: 0 success, "
        "1 a claim or\na run failed, 2 bad usage, 130 interrupted (SIGINT, SIGTERM or SIGHUP).\n"
    )


def _listed(found: Mapping[str, Command]) -> str:
    """Formats one line per command."""
    return "\n".join(f"  {name:11} {command.about}" for name, command in found.items())


def _dispatch(argv: Sequence[str], alone: bool) -> int:
    """Runs the command in the arguments, and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        show(_help(), end="")
        return 0 if argv else 2
    # The system rejects arguments with null characters, but a caller in this process may pass one.
    for word in argv:
        if "\0" in word:
            raise UsageError(f"'{word}' contains a null character")
    name, *rest = argv
    if name == "--version":
        from importlib.metadata import version

        show(f"sail-jax {version('sail-jax')}")
        return 0
    if name.startswith("-"):
        raise UsageError(f"unknown option '{name}'{nearest(name, ['--help', '--version'])}")
    command = _named(name, commands())
    if inner := command.inner():
        if not rest or rest[0] in ("-h", "--help"):
            return _choose(name, command.about, inner, asked=bool(rest))
        command = _named(f"{name} {rest[0]}", {f"{name} {key}": inner[key] for key in inner})
        name, *rest = f"{name} {rest[0]}", *rest[1:]
    if not command.module.startswith("sail_jax."):
        _pin_packages(own=alone and sys.modules["__main__"].__spec__ is None)
    return importlib.import_module(command.module).main(
        Parser(name, command.about, example=command.example), rest
    )


def _named(name: str, known: Mapping[str, Command]) -> Command:
    """Returns the command with this name."""
    if name not in known:
        raise UsageError(f"unknown command '{name}'{nearest(name, known)}")
    return known[name]


def _choose(name: str, about: str, inner: Mapping[str, Command], asked: bool) -> int:
    """Lists the commands of a package, if requested."""
    if not asked:
        raise UsageError(f"expected a command: {', '.join(inner)}; see sail-jax {name} --help")
    show(f"usage: sail-jax {name} {{{','.join(inner)}}} ...\n\n{about}\n\n{_listed(inner)}")
    return 0


def _pin_packages(own: bool) -> None:
    """Imports the packages of this installation, or rejects other packages with the same names.

    Python takes the first match: in the working directory for `python -m`, in PYTHONPATH, and in
    folders that are added for the user's functions.

    Args:
      own: Whether to use our packages even if another match comes first.

    Raises:
      UsageError: If another package comes first and `own` is false.
    """
    import importlib.util

    home = Path(__file__).parents[2]
    for name in ("theory", "experiments"):
        ours = home / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        found = None if spec is None else spec.origin
        if found is None or not ours.exists() or os.path.samefile(found, ours):
            importlib.import_module(name)
        elif own:
            spec = importlib.util.spec_from_file_location(name, ours)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        else:
            there = Path(found).parent if Path(found).name == "__init__.py" else found
            raise UsageError(
                f"{there} shadows the package '{name}' of sail-jax, {ours.parent}; run the command "
                "sail-jax, or change the working directory and unset PYTHONPATH"
            )


def _interrupted(argv: Sequence[str]) -> None:
    """Prints that the command was interrupted and how to continue it, if there is a terminal."""
    with contextlib.suppress(OSError):
        say("sail-jax: interrupted")
        if Parser.latest is not None and Parser.latest.takes("--resume"):
            again = argv if "--resume" in argv else [*argv, "--resume"]
            say(f"finished work is kept; continue with: {shlex.join(['sail-jax', *again])}")
        sys.stdout.flush()


def _leave(argv: Sequence[str]) -> None:
    """Exits at once, because XLA may still be computing and a normal exit could then crash."""
    try:
        _interrupted(argv)
    finally:  # it may interrupt a print
        os._exit(130)


def run(argv: Sequence[str] | None) -> int:
    """Runs one command. `sail_jax.cli.main.main` calls it after it has set up signal handling.

    Args:
      argv: The command and its arguments, as for `main`.

    Returns:
      The exit code, as in `main`.
    """
    alone = argv is None
    argv, Parser.latest = list(sys.argv[1:] if argv is None else argv), None
    try:
        if alone:
            _settle(lambda: _leave(argv))
        return _reported(argv, alone)
    except KeyboardInterrupt:
        (_leave if alone else _interrupted)(argv)
        return 130


def _settle(leave: Callable[[], None]) -> None:
    """Prepares the process for running one command."""
    collect_rarely()
    reuse_freed_memory()

    def lost(what: "sys.UnraisableHookArgs") -> None:
        """Handles an interrupt in a finaliser or a callback of the garbage collector."""
        leave() if what.exc_type is KeyboardInterrupt else sys.__unraisablehook__(what)

    sys.unraisablehook = lost
    stop_on_signals(leave)


def _reported(argv: Sequence[str], alone: bool) -> int:
    """Runs a command, and prints errors that the user can fix as one line."""
    try:
        with spelled(flag):
            return _dispatch(argv, alone)
    except SystemExit as exc:  # argparse, after --help
        return int(exc.code or 0)
    except (UsageError, StoreError) as exc:
        say(fitted(f"sail-jax: error: {exc}"))
        return exc.code
    # The reader of the output has closed the pipe, as `head` does.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as exc:
        what = "" if exc.filename is None else f" {os.fsdecode(exc.filename)}"
        why = exc.strerror or exc
        say(fitted(f"sail-jax: error: the system refused{what}: {why}"))
        return 2 if exc.errno in NO_PATH else 1
    except (MemoryError, RuntimeError) as exc:
        # XLA's error for a device or a machine without enough memory
        if isinstance(exc, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(exc):
            raise
        why = str(exc).splitlines()[0] if str(exc) else "the system has no more"
        why = why.removeprefix("RESOURCE_EXHAUSTED: ").removeprefix("Out of memory ")
        say(fitted(f"sail-jax: error: memory does not suffice: {why}"))
        return 1
