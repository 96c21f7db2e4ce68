"""The `sail-jax` command. Nothing heavy is imported before a command needs it."""

import _thread
import argparse
import atexit
import gc
import importlib
import itertools
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# OpenBLAS, which jax uses for factorisations on a CPU, keeps its threads spinning beside XLA's own:
# on few cores each waits for the other. Read when NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from experiments import registry
from experiments.arguments import seed
from experiments.progress import reporting, say


class UsageError(Exception):
    """The command line asks for something that does not exist; one line, exit code 2."""


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, with the nearest known option."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(
            prog=f"sail-jax {command}",
            description=COMMANDS[command.split()[0]][0],
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            raise UsageError(_unknown(unknown[0], self._option_string_actions))
        return args


def _unknown(word: str, options: Any) -> str:
    if not word.startswith("-"):
        return f"unexpected argument '{word}'"
    return f"unknown option '{word}'{registry.nearest(word.split('=')[0], options)}"


def _quickstart(argv: Sequence[str]) -> int:
    parser = _Parser("quickstart")
    parser.add_argument("--out", metavar="DIR", default="quickstart", help="default: %(default)s")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smaller grids, fewer draws")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted quickstart")
    args = parser.read(argv)
    from experiments import quickstart

    return quickstart.main(args.out, seed=args.seed, quick=args.quick, resume=args.resume)


def _verify(argv: Sequence[str]) -> int:
    parser = _Parser("verify")
    parser.add_argument("--claims", metavar="GLOB", default="*", help="which; default: all")
    parser.add_argument("--json", metavar="FILE", help="also write the ledger there")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smaller simulations")
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="only list which claims answer to which statement of the papers, and what is missing",
    )
    args = parser.read(argv)
    if args.coverage and len(argv) > 1:
        raise UsageError("--coverage simulates nothing, and takes no other option")
    from experiments import ledger, store
    from sail_jax import disk

    if args.coverage:
        text, complete = ledger.accounted()
        print(text)
        return 0 if complete else 1

    try:
        config = ledger.Config(claims=args.claims, seed=args.seed, quick=args.quick)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if args.json:
        disk.admit(Path(args.json), ledger.SCHEMA, "a ledger")
        store.probe(Path(args.json).parent)
    dataset = ledger.run(config, reporting(store.direct))
    _print_table(*ledger.table(dataset, "statement", "where"))
    print(ledger.summary(dataset))
    if args.json:
        about = {**store.config_record(config), **store.provenance()}
        disk.write_atomic(args.json, ledger.as_json(dataset, about))
    return 0 if dataset["ok"].values.all() else 1


def _print_table(header: Sequence[str], *rows: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, show_lines=False, pad_edge=False)
    for row in rows:
        style = "bold red" if row[-1].split()[0].isupper() else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: sail-jax run NAME [--preset P] [--out DIR] [--resume] [config fields]\n")
        print("sail-jax run NAME --help lists the fields of one experiment.\n")
        return _list([])
    name = argv[0]
    if name.startswith("-"):
        raise UsageError("name the experiment first: sail-jax run NAME [options]")
    try:
        module = registry.load(name)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    parser = _Parser(f"run {name}", add_help=False)
    presets = ", ".join(module.PRESETS)
    parser.add_argument("--preset", metavar="P", default="default", help=f"one of: {presets}")
    parser.add_argument(
        "--out", metavar="DIR", default=f"results/{name}", help="default: %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument(
        "--processes",
        metavar="HOW",
        help="one of several processes: auto (SLURM, TPU pods), or HOST:PORT,COUNT,RANK",
    )
    args, fields = parser.parse_known_args(argv[1:])
    if args.preset not in module.PRESETS:
        hint = registry.nearest(args.preset, module.PRESETS)
        raise UsageError(f"unknown preset '{args.preset}'{hint}")
    config = _config(module, args.preset, fields, parser)
    if config is None:
        return 0
    from experiments import processes, store

    if args.processes is not None:
        try:
            processes.join(args.processes)
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
    first = processes.is_first()
    with store.Run.open(args.out, name, config, resume=args.resume) as run:
        if first:
            say(f"{name}: {registry.QUESTIONS[name]}")
        dataset, figures = store.complete(run, module, config, *[reporting] * first)
    if first:
        _show(module, dataset, figures, run.path)
    return 0


def _config(module: Any, preset: str, fields: list[str], parser: _Parser) -> Any:
    """The preset with its fields replaced from the command line; None if help was asked for."""
    import contextlib
    import io

    import tyro

    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            config, unknown = tyro.cli(
                module.Config,
                prog=parser.prog,
                default=module.PRESETS[preset](),
                args=fields,
                return_unknown_args=True,
            )
    except SystemExit as exc:
        if exc.code not in (0, None):
            raise UsageError(_sentence(err.getvalue())) from None
        print("with any experiment:" + parser.format_help().split("options:")[-1], end="")
        return None
    if unknown:
        options = [f"--{field.replace('_', '-')}" for field in vars(config)]
        outer = parser._option_string_actions
        raise UsageError(_unknown(unknown[0].replace("_", "-"), [*options, *outer]))
    return config


def _sentence(box: str) -> str:
    """The message in tyro's box (a title, the message, a rule, hints; two styles), on one line."""
    lines = [line.strip("│ ") for line in re.sub("╭.*", "title\n---", box).splitlines()]
    groups = itertools.groupby(lines, key=lambda line: not line.strip("-─╰╯"))
    parts = [" ".join(part).strip() for is_rule, part in groups if not is_rule]
    message = parts[1] if len(parts) > 1 else " ".join(parts)
    return message.removeprefix("Error parsing ").removeprefix("Config: ")


def _plot(argv: Sequence[str]) -> int:
    parser = _Parser("plot")
    parser.add_argument("dir", metavar="DIR", help="the output directory of a finished run")
    args = parser.read(argv)
    from experiments import store
    from sail_jax import disk

    run = store.reopen(args.dir)
    try:
        module = registry.load(run.record["experiment"])
    except ValueError as exc:
        raise disk.StoreError(f"{run.path}: {exc}") from exc
    dataset, figures = store.redraw(run, module)
    _show(module, dataset, figures, run.path)
    return 0


def _show(module: Any, dataset: Any, figures: Any, path: Path) -> None:
    from experiments import store

    print(module.summary(dataset))
    if hasattr(module, "findings"):
        from experiments import findings

        print(findings.told(module.findings(dataset)))
    for file in (store.RESULT, *(f"{figure}.png" for figure in figures)):
        print(path / file)


def _report(argv: Sequence[str]) -> int:
    parser = _Parser("report")
    parser.add_argument("dir", metavar="DIR", help="where finished runs are, at any depth")
    parser.add_argument("--out", metavar="FILE", help="the page; default: DIR/report.html")
    args = parser.read(argv)
    from experiments import gallery

    return gallery.main(args.dir, args.out)


def _list(argv: Sequence[str]) -> int:
    _Parser("list").read(argv)
    width = max(map(len, registry.QUESTIONS))
    for name, question in registry.QUESTIONS.items():
        print(f"{name:{width}}  {question}")
    return 0


def benchmarks() -> list[str]:
    """The modules of `experiments.bench`, not imported."""
    folder = Path(__file__).parent / "bench"
    return sorted(f.stem for f in folder.glob("*.py") if not f.stem.startswith("_"))


def _bench(argv: Sequence[str]) -> int:
    names = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: sail-jax bench NAME [options of that benchmark]\n")
        print("\n".join(names))
        return 0
    if argv[0] not in names:
        raise UsageError(f"unknown benchmark '{argv[0]}'{registry.nearest(argv[0], names)}")
    module = importlib.import_module(f"experiments.bench.{argv[0]}")
    return int(module.main(list(argv[1:])) or 0)


def _on_checkpoints(command: str) -> Callable[[Sequence[str]], int]:
    """A command in a module of its own, `add_arguments(parser)` and `run(args)`."""

    def main(argv: Sequence[str]) -> int:
        module = importlib.import_module(f"experiments.commands.{command}")
        parser = _Parser(command)
        module.add_arguments(parser)
        args = parser.read(argv)
        from sail_jax import disk
        from sail_jax.checkpoint.engine.executor import MergeError

        try:
            return module.run(args)
        except disk.StoreError:
            raise
        except MergeError as exc:
            raise disk.StoreError(str(exc)) from exc
        except ValueError as exc:
            raise UsageError(str(exc)) from exc

    return main


def _examples(argv: Sequence[str]) -> int:
    from experiments import examples

    return examples.main(argv)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "merge": ("Merge checkpoints by a recipe, tensor by tensor.", _on_checkpoints("merge")),
    "grow": ("Grow a checkpoint in width and depth.", _on_checkpoints("grow")),
    "align": ("Permute or rotate a checkpoint to match another.", _on_checkpoints("align")),
    "inspect": ("Spaces, sizes and parameters of a checkpoint.", _on_checkpoints("inspect")),
    "examples": ("Small real checkpoints and recipes, to try merging on.", _examples),
    "quickstart": ("Three real results in a few minutes, and a page that shows them.", _quickstart),
    "verify": ("Check the papers' claims: closed form beside simulation.", _verify),
    "run": ("Run one experiment; every field of its config is an option.", _run),
    "plot": ("Redraw a finished run from its stored result.", _plot),
    "report": ("One page of all finished runs, beside the papers' figures.", _report),
    "list": ("The experiments and what each one asks.", _list),
    "bench": ("Run one benchmark.", _bench),
}


def _help() -> str:
    commands = "\n".join(f"  {name:11} {text}" for name, (text, _) in COMMANDS.items())
    return (
        "usage: sail-jax [--help] [--version] COMMAND ...\n\n"
        "Merge, grow and transfer neural networks in JAX, with the theory that says when it works."
        f"\n\n{commands}\n\nsail-jax COMMAND --help tells more. Exit codes: 0 well, 1 a claim or "
        "a run failed,\n2 bad usage, 130 interrupted.\n"
    )


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"sail-jax {version('sail-jax')}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "option" if argv[0].startswith("-") else "command"
        known = ["--help", "--version"] if kind == "option" else COMMANDS
        raise UsageError(f"unknown {kind} '{argv[0]}'{registry.nearest(argv[0], known)}")
    return COMMANDS[argv[0]][1](argv[1:])


def _deliver_again(lost: Any) -> None:
    """An interrupt that lands in a finaliser or a garbage collector's callback (JAX has one) cannot
    be raised there, and would be lost: it is delivered again a moment later."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _interrupt).start()
    else:
        sys.__unraisablehook__(lost)


def _interrupt() -> None:
    """A signal that wakes the main thread from whatever it waits for, where the system has them."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    What the user can put right is one line on stderr; anything else keeps its traceback.
    """
    alone = argv is None
    if alone:
        # what is imported and traced makes many objects and little garbage: to look for it among
        # them again and again takes a tenth of a second
        gc.set_threshold(200_000, 50, 100)
        sys.unraisablehook = _deliver_again
        # nor when it all goes: an exit looks through them twice
        atexit.register(gc.freeze)
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except SystemExit as exc:  # argparse, after --help
        return int(exc.code or 0)
    except UsageError as exc:
        say(f"sail-jax: error: {exc}")
        return 2
    except Exception as exc:
        disk = sys.modules.get("sail_jax.disk")  # unless a command imported it, nobody raised its
        if disk is None or not isinstance(exc, disk.StoreError):
            raise
        say(f"sail-jax: error: {exc}")
        return 1 if type(exc) is disk.StoreError else 2
    except KeyboardInterrupt:
        say("sail-jax: interrupted")
        if argv[:1] in (["run"], ["quickstart"], ["merge"], ["grow"], ["align"]):
            again = argv if "--resume" in argv else [*argv, "--resume"]
            say(f"what is finished is kept; continue with: {shlex.join(['sail-jax', *again])}")
        if alone:  # XLA may still be computing, and an orderly exit can then crash
            sys.stdout.flush()
            os._exit(130)
        return 130


if __name__ == "__main__":
    sys.exit(main())
