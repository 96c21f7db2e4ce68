"""Runs the shell blocks of a page, and compares their output with what the page shows.

A block begins with ```sh. The block with ```text below it has its output. HTML comments directly
above a fence, which no reader sees, change what happens:

- `<!-- not run: REASON -->`: the block requires something that is not available in tests.
- `<!-- soak -->`: only the soak tests run the block, since it takes long.
- `<!-- with: COMMANDS -->`: commands that run before the block, such as those that make its files.
- `<!-- test -->`: `.ci/run` runs the block.
- `<!-- numbers vary: REASON -->` above output: its numbers depend on the machine.
"""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sail_jax.cli.main import main

FENCE = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMENT = re.compile(r"<!--\s*([a-z ]+?)(?::\s*((?:(?!-->).)*?))?\s*-->", re.S)
MARKS = {"not run", "soak", "with", "test", "numbers vary"}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


class Output(NamedTuple):
    """The output that a page shows, and whether its numbers depend on the machine."""

    text: str
    varies: bool


class Block(NamedTuple):
    """A block of a page: the line it begins in, its code, its marks and its outputs."""

    line: int
    language: str
    code: str
    marks: dict[str, str]
    outputs: list[Output]


def blocks(page: str, languages: Collection[str] = ("sh",)) -> list[Block]:
    """Finds the blocks of a page with the outputs that it shows."""
    found: list[Block] = []
    for fence in FENCE.finditer(page):
        comments, language, text = fence.groups()
        marks = {name: reason or "" for name, reason in COMMENT.findall(comments) if name in MARKS}
        if language in languages:
            line = page.count("\n", 0, fence.start(3))
            found.append(Block(line, language, text, marks, []))
        elif language == "text" and found:
            found[-1].outputs.append(Output(text, "numbers vary" in marks))
    return found


def shows(output: Output, printed: str) -> bool:
    """Compares what a page shows with what was printed.

    The words of the page must appear in the output in order. White space is ignored, and `...`
    matches any text. Numbers may differ by one in their last digit, since rounding depends on the
    processor; any number will do if the page's numbers vary.
    """
    words = output.text.split()
    pattern = re.compile(r"\s+".join(map(_pattern, words)), re.S)
    wanted = [number for word in words for number in NUMBER.findall(word)]
    start = 0
    while match := pattern.search(printed, start):
        if output.varies or all(map(_near, wanted, match.groups())):
            return True
        start = match.start() + 1
    return False


def _pattern(word: str) -> str:
    """A regular expression for a word of a page, with a group for each number."""
    parts, end = [], 0
    for number in NUMBER.finditer(word):
        parts += [re.escape(word[end : number.start()]), f"({NUMBER.pattern})"]
        end = number.end()
    return "".join([*parts, re.escape(word[end:])]).replace(r"\.\.\.", ".*?")


def _near(wanted: str, got: str) -> bool:
    """Checks whether two numbers differ by at most one in the last digit shown on the page."""
    digits, _, power = wanted.replace(",", "").partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - decimals) if "." in digits or power else 0.0
    return abs(float(wanted.replace(",", "")) - float(got.replace(",", ""))) <= 1.01 * unit


SHIM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps([os.getcwd(), sys.argv[1:]]).encode() + b"\\n")
    out, err, code = json.load(server.makefile())
sys.stderr.write(err)
try:
    print(out, end="", flush=True)
except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.exit(code)
"""


class Shell:
    """A shell in which `sail-jax` runs in this process.

    A separate process would spend a second on imports and compilation that this process has already
    done. Folders of networks that `sail-jax examples` trains are kept, and copied for the next
    page.

    Args:
      folder: The folder in which code runs.
      examples: The folder that keeps examples.
    """

    def __init__(self, folder: Path, examples: Path):
        self._folder, self._examples = folder, examples
        self._names: dict[str, object] = {}

    def python(self, code: str) -> tuple[int, str]:
        """Runs Python code, with the names of earlier code; returns a code and all output."""
        out = io.StringIO()
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(out):
            exec(code, self._names)
        return 0, out.getvalue()

    def run(self, code: str) -> tuple[int, str]:
        """Runs shell code; returns the exit code and all output."""
        with (
            tempfile.TemporaryDirectory(prefix="shell") as tools,  # a socket's path must be short
            socket.socket(socket.AF_UNIX) as server,
            tempfile.TemporaryFile("w+") as printed,
        ):
            server.bind(f"{tools}/socket")
            server.listen()
            server.settimeout(0.02)
            shim = Path(tools, "sail-jax")
            shim.write_text(SHIM.format(python=sys.executable, address=f"{tools}/socket"))
            shim.chmod(0o755)
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", code],
                cwd=self._folder,
                env={**os.environ, "PATH": os.pathsep.join([tools, os.environ["PATH"]])},
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            )  # fmt: skip
            while shell.poll() is None:
                with contextlib.suppress(TimeoutError):
                    self._answer(server.accept()[0])
            printed.seek(0)
            return shell.returncode, printed.read()

    def _answer(self, client: socket.socket) -> None:
        with client:
            client.setblocking(True)
            cwd, argv = json.loads(client.makefile().readline())
            out, err = io.StringIO(), io.StringIO()
            with (
                contextlib.chdir(cwd),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                try:
                    code = self._command(argv)
                except Exception:
                    traceback.print_exc()
                    code = 1
            client.sendall(json.dumps([out.getvalue(), err.getvalue(), code]).encode() + b"\n")

    def _command(self, argv: list[str]) -> int:
        if argv[:1] != ["examples"] or {"--evaluate", "--force", "--llama"} & {*argv}:
            return main(argv)
        kept = self._examples / re.sub(r"\W", "_", " ".join(argv))
        if not kept.exists():
            with contextlib.redirect_stdout(text := io.StringIO()):
                code = main(argv)
            print(text.getvalue(), end="")
            if code:
                return code
            shutil.copytree(argv[1], part := kept.with_suffix(f".{os.getpid()}"))
            Path(part, "printed").write_text(text.getvalue())
            with contextlib.suppress(OSError):  # another worker was first
                part.rename(kept)
        else:
            ignored = shutil.ignore_patterns("printed")
            shutil.copytree(kept, argv[1], ignore=ignored)
            print((kept / "printed").read_text(), end="")
        return 0


def faults(found: Iterable[Block], shell: Shell, *, soak: bool = False) -> Iterator[str]:
    """Runs the blocks of a page in order, and describes each that fails or prints something else.

    Args:
      found: The blocks.
      shell: Where the blocks run.
      soak: Whether long blocks run, too.
    """
    for block in found:
        if {"not run", "test"} & block.marks.keys() or ("soak" in block.marks and not soak):
            continue
        if setup := block.marks.get("with"):
            code, printed = shell.run(setup)
            assert not code, f"line {block.line}, before the block: {printed}"
        run = shell.python if block.language == "python" else shell.run
        code, printed = run(block.code)
        if code:
            yield f"line {block.line}: exit code {code}\n{printed}"
        for output in block.outputs:
            if not shows(output, printed):
                yield f"line {block.line}: the page shows\n{output.text}\nprinted is\n{printed}"
