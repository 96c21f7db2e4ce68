"""Seeded mutations of a program's inputs, and checks of its behaviour on them."""

import collections
import contextlib
import io
import json
import pickletools
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sail_jax.cli import main as cli
from sail_jax.cli.progress import LONGEST

# CPU time, which excludes other processes; wall time, for waits; bytes.
SECONDS, WAITING, MEMORY = 5, 60, 10**9

PIECES = (
    *(b"\0", b"\1", b"\x7f", b"\x80", b"\xdd", b"\xdf", b"\xc6", b"\xc9", b"\xff", b"9", b"-"),
    *(b"[", b"{", b'"', b":", b",", b"\n", b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"9" * 30),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"9" * 5000, b"&a [*a]", b"!!int "),
    *(bytes([ord(op.code)]) for op in pickletools.opcodes if op.code < "\x80"),
)
WORDS = (
    *("", " ", "x", "2x", "0", "-1", "1.5", "nan", "-inf", "1e400", "9" * 5000, "n" * 5000, "None"),
    *("\0", "a\0b", "\x1b[31m", "\u202e\u2028", "\r\n", "\udcff", "é", "<b>`x`</b>", "%s{}", "a=b"),
    *(".", "..", "../x", "/dev/null", "loop", "none", "*", "re:(", "re:(a+)+$", "glob:[", "{i}"),
    *("(a+)+$", r"\1", r"\g<9>", "[[[[", "&a [*a]", "!!python/name:os.system", "~", "2020-99-99"),
    *(
        "0o9",
        "0x",
        "1:99",
        "<<",
        "@",
        "+",
        "a@b+c@d",
        "a+lora",
        "a b",
        "{",
        "[1, 2",
        "- -",
        "[" * 3000,
    ),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *(2**31 - 1, 2**31, 2**63, 2**80, -(2**80), 10**400, 1e-320),
    *([], {}, [[]], [None], [1, 2, 3], {"": None}, {"x": {}}, [{"name": []}], {"filter": "x"}),
    *(*WORDS, "\ud800"),
)


class Mutations(random.Random):
    """Draws from a seed; without one, nothing is changed, and the first choice is used."""

    def __init__(self, seed: str | None) -> None:
        super().__init__(seed)
        self.identity = seed is None

    def one(self, options: Any) -> Any:
        options = list(options)
        return options[0] if self.identity else self.choice(options)

    def often(self, share: float) -> bool:
        return not self.identity and self.random() < share

    def bytes_of(self, data: bytes, first: int = 0) -> bytes:
        """Replaces, inserts, removes, moves or truncates a few bytes from `first` on."""
        found = bytearray(data)
        for _ in range(0 if self.identity else self.randint(1, 3)):
            at = self.randint(min(first, len(found)), len(found))
            new = self.choice(PIECES) if self.often(0.5) else bytes([self.randrange(256)])
            match self.randrange(6):
                case 0 | 1:
                    found[at : at + len(new)] = new
                case 2:
                    found[at:at] = new
                case 3:
                    del found[at : at + self.randint(1, 8)]
                case 4:
                    other = self.randint(0, len(found))
                    found[at:at] = found[other : other + 12]
                case _:
                    del found[at : at + (len(found) if self.often(0.1) else 1)]
        return bytes(found)

    def tree_of(self, tree: Any) -> Any:
        """Replaces, renames, removes or adds some random parts of a tree."""
        for _ in range(0 if self.identity else self.choice((1, 1, 1, 2, 3))):
            tree = self._changed(tree)
        return tree

    def _changed(self, node: Any) -> Any:
        if not isinstance(node, dict | list) or (not node and self.often(0.5)):
            return self._near(node) if self.often(0.2) else self.choice(VALUES)
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        at = self.randrange(len(items) + (not items or self.often(0.1)))
        if at == len(items):
            items.append((self.choice(WORDS), self.choice(VALUES)))
        elif self.often(0.7):
            items[at] = (items[at][0], self._changed(items[at][1]))
        elif self.often(0.3):
            items[at] = (self.choice(WORDS), items[at][1])
        elif self.often(0.5):
            del items[at]
        else:
            items[at] = (items[at][0], self.choice(VALUES))
        return dict(items) if isinstance(node, dict) else [value for _, value in items]

    def _near(self, value: Any) -> Any:
        """Returns a value of the same kind."""
        if isinstance(value, str):
            return self.bytes_of(value.encode(errors="replace")).decode(errors="replace")
        if isinstance(value, int | float):
            return value * self.choice((-1, 2, 3, 7))
        return value

    def json_of(self, tree: Any) -> bytes:
        """Changes the tree or the text of a document."""
        if self.often(0.7) or self.identity:
            return json.dumps(self.tree_of(tree)).encode()
        return self.bytes_of(json.dumps(tree).encode())

    def words_of(self, words: list[str]) -> list[str]:
        """Replaces, removes, repeats or adds some words of a command line."""
        words = list(words)
        for _ in range(0 if self.identity else self.randint(1, 2)):
            at = self.randint(0, len(words))
            match self.randrange(6):
                case 0 | 1 | 2 if at < len(words):
                    words[at] = self.choice(WORDS)
                case 3 if at < len(words):
                    option, equals, _ = words[at].partition("=")
                    words[at] = f"{option}={self.choice(WORDS)}" if equals else words[at] * 2
                case 4:
                    del words[max(1, at) : at + 1]
                case _:
                    words[at:at] = [self.choice((*WORDS, "--resume", "--full", "--help", "--"))]
        return words


class HangError(BaseException):
    """Not an `Exception`, because the code under test may handle those."""


class WrongError(Exception):
    """A wrong answer, or an error with a wrong message."""


def refused(error: Exception) -> None:
    """WrongError if an error of the documented kinds is not one line, or stands for memory that was
    asked for and not given."""
    if not str(error) or "\n" in str(error):
        raise WrongError(f"an error not of one line: {str(error)!r}") from error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            raise MemoryError(str(error)) from error
        cause = cause.__cause__ or cause.__context__


def called(*argv: str) -> str:
    """The error of a command in this process, "" if it succeeds; WrongError if it is not said in
    one line of at most 300 characters, or if anything is printed that a terminal would obey."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    errors = [line for line in err.getvalue().split("\n") if line.startswith("sail-jax: error: ")]
    if code not in (0, 1, 2) or len(errors) != (code != 0):
        raise WrongError(f"exit code {code} with the errors {errors}")
    if any(len(line) > LONGEST for line in errors):
        raise WrongError(f"an error of {max(map(len, errors))} characters: {errors}")
    for line in (out.getvalue() + err.getvalue()).split("\n"):
        if not line.isprintable():
            raise WrongError(f"printed as it is: {line!r}")
    return "".join(errors)


class Fault(NamedTuple):
    seed: int
    kind: str
    what: str


class Tally(NamedTuple):
    """Counts the outcomes of the inputs of one target."""

    target: str
    tried: int
    refused: int
    seconds: float
    slowest: tuple[float, int]
    memory: int
    faults: list[Fault]

    def __str__(self) -> str:
        kinds = collections.Counter(fault.kind for fault in self.faults)
        rest = "".join(f", {count} x {kind}" for kind, count in kinds.items())
        return (
            f"{self.target}: {self.tried} tried in {self.seconds:.0f} s, {self.refused} refused, "
            f"slowest {self.slowest[0]:.2f} s (seed {self.slowest[1]}), "
            f"at most {self.memory / 1e6:.0f} MB more{rest or ', no fault'}"
        )


def fuzz(target: str, attempt: Callable[[Mutations], bool], seeds: range) -> Tally:
    """Tries one input for each seed; `attempt` says whether it was accepted, and raises what should
    not be. Before, the input that is not mutated, which must be accepted."""
    if not attempt(Mutations(None)):
        raise WrongError(f"{target}: what is right is refused")
    turned_away, slowest, faults = 0, (0.0, 0), []
    began, memory = time.monotonic(), 0
    for seed in seeds:
        before, start = _reset_peak(), time.process_time()
        try:
            with _alarm():
                turned_away += not attempt(Mutations(f"{target} {seed}"))
        except (Exception, HangError) as error:
            kind = {HangError: "hang", MemoryError: "memory", WrongError: "wrong"}.get(type(error))
            faults.append(Fault(seed, kind or "wrong exception", _told(error)))
        slowest = max(slowest, (took := time.process_time() - start, seed))
        memory = max(memory, more := _peak() - before)
        if took > SECONDS and not (faults and faults[-1].seed == seed):
            faults.append(Fault(seed, "hang", f"{took:.1f} s"))
        if more > MEMORY:
            faults.append(Fault(seed, "memory", f"{more / 1e6:.0f} MB"))
    seconds = time.monotonic() - began
    return Tally(target, len(seeds), turned_away, seconds, slowest, memory, faults)


def told(faults: list[Fault]) -> str:
    """Lists distinct faults, each with its first seed."""
    different: dict[tuple[str, str], list[int]] = {}
    for fault in faults:
        different.setdefault((fault.kind, fault.what), []).append(fault.seed)
    return "\n".join(
        f"{len(seeds)} x {kind}, as with --fuzz 1 --fuzz-seed {seeds[0]}: {what}"
        for (kind, what), seeds in different.items()
    )


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "tests" not in Path(frame.filename).parts]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in (ours or frames)]
    return f"{type(error).__name__}: {str(error)[:300]} ({' > '.join(places[-6:])})"


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, WAITING),
    }

    def ring(number: int, _: Any) -> None:
        raise HangError(f"not done after {timers[signal.Signals(number)][1]} s")

    before = {number: signal.signal(number, ring) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> int:
    """Resets the peak memory; returns the current memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Allows at most `MEMORY` more address space, including memory that is reserved and
    never used. It is not suitable for code that starts threads or compiles, which reserves
    much memory."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
