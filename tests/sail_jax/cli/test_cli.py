"""The command line: exit codes, one-line errors, resuming, and what is (not) imported."""

import base64
import csv
import dataclasses
import html.parser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

from experiments.commands import bench
from experiments.lab import registry, store
from experiments.pages import quickstart, quickstart_panels
from experiments.studies.ledger import attacks
from experiments.studies.ledger.attacks import SCHEMA as ATTACKS
from experiments.studies.ledger.findings import SCHEMA
from sail_jax import disk
from sail_jax.cli import main as cli
from sail_jax.cli import stopping
from sail_jax.cli.finder import commands
from sail_jax.cli.options import Parser
from sail_jax.drawing import pages, style
from theory import adversary, claims, coverage
from theory.adversary import Attack, Box, Domain
from theory.claims import Claim, Power, Verdict

_load = registry.load
HEAVY = ("jax", "flax", "optax", "orbax", "matplotlib", "xarray", "rich", "scipy", "numpy")


@dataclasses.dataclass(frozen=True)
class Config:
    """A fake experiment."""

    seed: int = 0
    """Seed of nothing."""
    step_size: float = 0.5
    """Must be positive."""
    sizes: tuple[int, ...] = (1, 2)
    """Any."""

    def __post_init__(self):
        if self.step_size <= 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")


class Fake(SimpleNamespace):
    """An experiment with two stages; `stop` determines what happens in the second."""

    name = "fake"
    question = "Is it?"
    config = Config
    presets = {"default": Config(), "tiny": Config(sizes=(1,))}  # noqa: RUF012
    stop: BaseException | None = None
    computed = ()

    def run(self, config, stage=store.direct):
        def second():
            self.computed += ("second",)
            if self.stop:
                raise self.stop
            return {"y": np.ones(2) / 3}

        def first():
            self.computed += ("first",)
            return {"x": np.arange(2.0) * config.step_size}

        x, y = stage("first", first)["x"], stage("second", second)["y"]
        return xr.Dataset({"sum": ("n", x + y)})

    def plot(self, dataset):
        fig, axes = style.figure()
        axes[0, 0].plot(dataset["sum"])
        axes[0, 0].set_xlabel('n & "m"')
        return {"sum": fig}

    def findings(self, dataset):
        return []

    def tables(self, dataset):
        return []

    def summary(self, dataset):
        return f"sum <b>{float(dataset['sum'].sum()):.3f}</b>"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    experiment, load = Fake(), registry.load
    monkeypatch.setattr(
        registry, "load", lambda name: experiment if name != "ledger" else load(name)
    )
    grown = pages.Section("a checkpoint, grown", "?", "yes", verdict="It is the same.")
    monkeypatch.setattr(quickstart, "grown", lambda folder, seed: grown)
    shown = quickstart_panels.Shown(lambda _: "x < y", lambda d: [*experiment.plot(d).values()])
    names = {"transfer_phase": shown, "merge_digits": shown}
    monkeypatch.setattr(quickstart_panels, "SHOWN", {**quickstart_panels.SHOWN, **names})
    return experiment


@pytest.fixture
def call(capsys):
    def call(*argv):
        code = cli.main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return call


LIGHT = ["--help", "--version", "list", "verify --help", "verfy"]


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys; from sail_jax.cli import main as cli\n"
        f"for line in {LIGHT}:\n"
        "    cli.main(line.split())\n"
        f"    print('heavy:', line, [m for m in {HEAVY} if m in sys.modules])\n"
        # pages and figures of finished runs: what the quickstart shows
        "import importlib; from experiments.pages.quickstart import STUDIES\n"
        "for name in STUDIES:\n"
        "    for file in ('config', 'findings', 'plots'):\n"
        "        importlib.import_module(f'experiments.studies.{name}.{file}')\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("heavy: ")]
    assert told == [f"heavy: {line} []" for line in LIGHT]
    assert done.stdout.endswith("\nFalse\n")


def test_help_and_version(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert all(command in out for command in commands())
    code, out, _ = call("--version")
    assert code == 0
    assert re.fullmatch(r"sail-jax \d+\.\d+\.\d+\n", out)
    assert call()[0] == 2
    for command in commands():
        code, out, err = call(command, "--help")
        assert (code, err) == (0, "")
        assert f"sail-jax {command}" in out
        if example := commands()[command].example:
            # `run` and `bench` print a list without a name.
            assert command in ("run", "bench") or out.endswith(f"example:\n  {example}\n")
            assert all(word in out for word in example.split() if word.startswith("--"))
        else:
            assert commands()[command].inner()


@pytest.mark.parametrize("name", registry.studies())
def test_run_help_lists_every_field_with_its_default(name, call):
    code, out, _ = call("run", name, "--help")
    assert code == 0
    assert {"--preset", "--out", "--resume"} <= set(out.split())
    flags = list(_flags(registry.load(name).presets["default"]))
    for flag in flags:
        assert re.search(rf"--{flag.replace('_', '-')}[ ,]", out)
    assert out.count("(default:") == len(flags)


def _flags(config, group=""):
    """The fields of a config, those of its groups by their dotted names."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flags(value, f"{group}{field.name}.")
        else:
            yield group + field.name


def test_data_lists_every_data_set_and_reads_one(call, tmp_path):
    code, out, _ = call("data")
    assert code == 0
    for name in ("digits", "mnist", "cifar-100", "tiny-imagenet", "python", "tokens", "latents"):
        assert re.search(rf"^  {name}: ", out, re.M)
    code, out, _ = call("data", "digits")
    assert out.splitlines()[0] == "1797 images of 8 x 8, 10 classes"
    assert "  sail-jax run sail_vision --data.name digits" in out
    for part, count in (("train", 90), ("val", 40)):
        np.save(tmp_path / f"{part}.npy", np.arange(count) % 7)
    code, out, err = call("data", "tokens", "--folder", str(tmp_path), "--vocab", "7")
    assert (code, err) == (0, "")
    assert out.startswith("90 tokens to learn from, 40 held out, of a vocabulary of 7\n")
    assert f"sail-jax run sail_language --data.name tokens --data.folder {tmp_path}" in out


BAD = [
    ("data cifar", "unknown data set 'cifar' (nearest: 'cifar-10'"),
    ("data cifar-10", "--folder must be the place of CIFAR-10"),
    ("data cifar-10 --foldr x", "unknown option '--foldr' (nearest: '--folder'"),
    ("data digits --folder x", "folder must not be given for digits; got x"),
    ("verfy", "unknown command 'verfy' (nearest: 'verify'"),
    ("--versio", "unknown option '--versio' (nearest: '--version'"),
    ("verify --clams x", "unknown option '--clams' (nearest: '--claims'"),
    ("verify --seed -1", "argument --seed: expected an integer from 0 to 2^31 - 1, got '-1'"),
    ("verify --seed 1.5", "expected an integer"),
    ("verify x", "unexpected argument 'x'"),
    ("verify --coverage --quick", "--coverage simulates nothing, and allows no other option"),
    ("verify --claims features-are-fate/T3.77*", "T3.77*' (nearest: 'features-are-fate/T3.7')"),
    ("verify --claims nope/*", "'nope/*' (known: features-are-fate, sail, overtrained, "),
    ("verify --claims sail/T1/nope", "(known: sail/T1/printed, sail/T1/corrected)"),
    ("quickstart --out a\0b", r"'a\x00b' contains a null character"),
    ("quickstart --quik", "unknown option '--quik' (nearest: '--quick'"),
    ("quickstart --seed", "argument --seed: expected one argument"),
    ("grow a b --width -1x", "--width: expected one argument (a value that starts with '-' is"),
    ("run merge_digit", "unknown study 'merge_digit' (nearest: 'merge_digits'"),
    ("run --preset tiny", "give the study first"),
    ("run fake --preset tinny", "unknown preset 'tinny' (nearest: 'tiny'"),
    ("run fake --step-siz 1", "unknown option '--step-siz' (nearest: '--step-size'"),
    ("run fake --ouu x", "unknown option '--ouu' (nearest: '--out'"),
    ("run fake surplus", "unexpected argument 'surplus'"),
    ("run fake --step-size -1", "step_size must be positive, got -1.0"),
    ("run fake --step-size much", "argument --step-size: invalid float value: 'much'"),
    ("run fake --seed", "argument --seed: expected one argument"),
    ("run fake --out there/file", "there/file is not a directory"),
    ("run fake --out there", "there is not empty and holds no run"),
    ("quickstart --out there", "there holds something else (file)"),
    ("plot", "the following arguments are required: DIR"),
    ("plot nowhere", "nowhere holds no run"),
    ("plot there", "there holds no run"),
    ("examples here --evaluate there", "here holds no examples; make some: sail-jax examples"),
    ("examples here --sed 1", "unknown option '--sed' (nearest: '--seed'"),
    ("bench search --nope", "unknown option '--nope'"),
    ("bench search --beds few", "argument --beds: expected a whole number >= 1, got 'few'"),
    ("bench spee", "unknown benchmark 'spee' (nearest: 'speed'"),
    ("list --all", "unknown option '--all'"),
]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_bad_usage_is_one_line_and_exit_code_2(line, says, call, fake, monkeypatch, tmp_path):
    if "merge_digit" in line:
        monkeypatch.setattr(registry, "load", _load)
    monkeypatch.setattr(bench, "benchmarks", lambda: ["scale", "search", "speed"])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    code, out, err = call(*shlex.split(line))
    assert code == 2
    assert out == ""
    assert err.startswith("sail-jax: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.rglob("*")] == ["there", "file"]  # nothing was begun


@pytest.mark.slow
def test_run_keeps_and_plot_redraws(fake, call, tmp_path):
    code, out, err = call(
        "run", "merge_digits", "--out", "here", "--step-size", "2", "--sizes", "3"
    )
    assert code == 0
    assert out.splitlines()[0] == "sum <b>2.667</b>"
    assert "first ..." in err
    record = json.loads((tmp_path / "here/config.json").read_text())
    assert record["config"] == {"seed": 0, "step_size": 2.0, "sizes": [3]}
    assert record["status"] == "finished"
    picture = (tmp_path / "here/sum.png").read_bytes()
    (tmp_path / "here/sum.png").unlink()
    code, again, _ = call("plot", "here")
    assert (code, again) == (0, out)
    assert (tmp_path / "here/sum.png").read_bytes() == picture
    assert fake.computed == ("first", "second")


def test_presets_are_starting_points(fake, call, tmp_path):
    out = call("run", "fake", "--help")[1]
    assert out.endswith("example:\n  sail-jax run fake --preset tiny\n")
    assert call("run", "merge_digits", "--preset", "tiny", "--out", "a", "--seed", "4")[0] == 0
    record = json.loads((tmp_path / "a/config.json").read_text())
    assert record["config"] == {"seed": 4, "step_size": 0.5, "sizes": [1]}


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_by_the_command_it_prints(fake, call, tmp_path):
    assert call("run", "merge_digits", "--out", "whole dir")[0] == 0
    fake.computed, fake.stop = (), KeyboardInterrupt()
    code, _, err = call("run", "merge_digits", "--out", "part dir")
    assert code == 130
    command = err.splitlines()[-1].split("continue with: ")[1]
    assert command == "sail-jax run merge_digits --out 'part dir' --resume"
    assert call("run", "merge_digits", "--out", "part dir")[0] == 2
    assert call("plot", "part dir")[0] == 2
    fake.stop = None
    code, _, err = call(*shlex.split(command)[1:])
    assert code == 0
    assert "first ... kept" in err
    assert fake.computed == ("first", "second", "second")
    whole, part = (xr.load_dataset(tmp_path / d / "result.nc") for d in ("whole dir", "part dir"))
    assert whole["sum"].values.tobytes() == part["sum"].values.tobytes()


@pytest.mark.slow
def test_a_real_signal_stops_a_real_run_with_130(call, tmp_path):
    line = f"run ledger --preset tiny --out {tmp_path / 'run'}"
    # A suite started in the background of a shell has SIGINT ignored, and children inherit that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sail_jax.cli.main import main; main()"
    )
    argv = [sys.executable, "-c", code, *line.split()]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not said.endswith("..."):  # the first stage has begun
            said += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        said += process.stderr.read()
    assert process.returncode == 130
    assert said.endswith(
        f"sail-jax: interrupted\nfinished work is kept; continue with: sail-jax {line} --resume\n"
    )
    assert call(*line.split(), "--resume")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experiments", "theory"])
def test_packages_of_our_names_are_named_or_passed_over(name, tmp_path):
    """`python -m` takes what lies in the working directory; the command has its own packages."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("print('a stranger')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    how: dict[str, Any] = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    refused = subprocess.run([sys.executable, "-m", "sail_jax.cli", "verify", "--help"], **how)
    assert (refused.returncode, refused.stdout) == (2, "")
    ours = Path(cli.__file__).parents[2] / name
    assert refused.stderr.count("\n") == 1
    assert f"{tmp_path / name} shadows the package '{name}' of sail-jax, {ours};" in refused.stderr
    script = "import sys; from sail_jax.cli.main import main; sys.exit(main())"
    found = subprocess.run([sys.executable, "-c", script, "verify", "--help"], **how)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("usage: sail-jax verify")


AMID = """
    import os, signal, sys

    name, number = sys.argv.pop(1), int(sys.argv.pop(1))

    class Amid:
        @staticmethod
        def find_spec(module, *_):
            if module == name:
                sys.meta_path.remove(Amid)
                os.kill(os.getpid(), number)

    sys.meta_path.insert(0, Amid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from sail_jax.cli.main import main

    sys.exit(main())
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("sail_jax.cli.options", signal.SIGINT),  # during the start of the command
        ("sail_jax.cli.options", signal.SIGTERM),
        ("numpy._core.multiarray", signal.SIGTERM),  # which reports that another import failed
    ],
)
def test_a_signal_amid_an_import_ends_the_command_with_one_line(module, number):
    command = [sys.executable, "-c", textwrap.dedent(AMID), module, str(int(number))]
    ended = subprocess.run([*command, "merge", "--methods"], capture_output=True, text=True)
    said = ended.stderr.splitlines()
    assert (ended.returncode, said[0]) == (130, "sail-jax: interrupted"), ended.stderr
    assert [line for line in said[1:] if not line.startswith("finished work is kept; ")] == []


STUCK = """
    import gc, signal, sys, time
    from sail_jax.cli import main as cli

    # a shell ignores interrupts in what it runs in the background, and nohup what follows a closed
    # terminal: this test perhaps
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def computing():
        import jax

        endless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y < 2, jax.numpy.sin, x))
        compiled = endless.lower(1.0).compile()
        print("go", flush=True)
        compiled(1.0).block_until_ready()

    def collecting():
        def callback(phase, info):
            gc.callbacks.remove(callback)
            time.sleep(90)  # which the signal cuts short, with an exception that is ignored here

        gc.callbacks.append(callback)
        print("go", flush=True)
        gc.collect()
        time.sleep(90)

    def command(parser, argv):
        parser.add_argument("where")
        parser.add_argument("--resume", action="store_true")
        {"computing": computing, "collecting": collecting}[parser.read(argv).where]()
        return 0

    from experiments.commands import run

    run.main = command
    cli.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
def test_a_signal_ends_a_command_in_time_wherever_it_is():
    """In what XLA computes, and in a callback of the garbage collector, Python cannot raise."""
    cases = [
        ("collecting", [signal.SIGTERM]), ("computing", [signal.SIGTERM, signal.SIGTERM]),
        ("computing", [signal.SIGINT]), ("computing", [signal.SIGTERM]),
        ("computing", [signal.SIGHUP]),
    ]  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STUCK), "run", where],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for where, _ in cases
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
    time.sleep(1)  # until the last one is also stuck
    began = time.monotonic()
    for k in range(2):
        for child, (_, numbers) in zip(children, cases, strict=True):
            for number in numbers[k : k + 1]:
                child.send_signal(number)
        time.sleep(0.5)
    for child, (where, numbers) in zip(children, cases, strict=True):
        with child:
            try:
                _, said = child.communicate(timeout=60)
            finally:
                child.kill()  # else the test waits for it for ever
        took = time.monotonic() - began
        assert child.returncode == 130, said
        assert "sail-jax: interrupted\nfinished work is kept; continue with: " in said
        waits = where == "computing" and len(numbers) == 1
        assert ("stopping at the next safe point" in said) == waits
        assert "Traceback" not in said
        # of itself a process ends after GRACE; the rest is what a busy machine takes
        assert took < stopping.GRACE + 5 * waits


def test_damage_is_one_line_and_exit_code_1(fake, call, tmp_path):
    assert call("run", "merge_digits", "--out", "here")[0] == 0
    file = tmp_path / "here/result.nc"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = call("plot", "here")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"sail-jax: error: .*result\.nc is damaged.*\n", err)


def test_a_record_naming_a_module_outside_the_registry_is_not_imported(fake, call, monkeypatch):
    assert call("run", "merge_digits", "--out", "here")[0] == 0
    monkeypatch.setattr(registry, "load", _load)
    record = store.reopen("here").record
    disk.write_record(Path("here/config.json"), {**record, "experiment": "os"})
    code, _, err = call("plot", "here")
    assert code == 1
    assert "unknown study 'os'" in err


def test_a_bug_keeps_its_traceback(fake, call):
    fake.stop = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        call("run", "merge_digits", "--out", "here")


def _verdict(name, holds=True, expected=True, relation="=", **more):
    end = "exact" if expected else "printed"
    claim = Claim(f"{name}/{end}", "a < b & c", "paper, eq. (1)", "n=2", float, None, relation)
    fields = {
        "predicted": 1.0, "simulated": 1.1, "stderr": 0.05, "score": 2.0, "score_name": "z",
        "power": Power(0.05, 0.3, 6e-5, 0.5), "seconds": 0.1,
    }  # fmt: skip
    return Verdict(claim=claim, holds=holds, **{**fields, **more})


def _stated(name, **texts):
    """A verdict on a claim with some texts."""
    made = _verdict(name)
    return dataclasses.replace(made, claim=dataclasses.replace(made.claim, **texts))


GOOD = [
    _verdict("p/one"),
    _verdict("p/two", False, False, stderr=None, score=-np.inf, score_name="err/tol"),
    _verdict("p/bound", relation="<=", score=-300.0),
]
WRONG = [*GOOD, _verdict("p/three", holds=False, score=9.0)]


@pytest.fixture
def verdicts(monkeypatch):
    def of(found):
        asked = []
        by_id = {one.claim.id: one for one in found}

        def check(claim, *, seed, quick):
            asked.append((claim.id, seed, quick))
            return by_id[claim.id]

        monkeypatch.setattr(claims, "select", lambda *_: [one.claim for one in found])
        monkeypatch.setattr(claims, "check", check)
        return asked

    return of


def test_verify_says_what_is_too_weak(verdicts, call):
    strong, blind = Power(0.05, 0.01, 6e-5, 1e-9), Power(0.05, 2.0, 6e-5, 1.0, 1.6)
    wide = {"relation": "<=", "simulated": 0.4, "predicted": 2.0}
    verdicts([*GOOD, _verdict("p/strong", power=strong), _verdict("p/wide", power=blind, **wide)])
    code, out, _ = call("verify", "--power")
    assert code == 0
    assert "made to see" in out
    assert (
        "2 of 3 equalities and misprints overlook their effect: p/one/exact, p/two/printed." in out
    )
    assert (
        "An adversary attains 0 of 2 bounds or comes within a factor of 2.\n"
        "  p/bound/exact: not attacked\n  p/wide/exact: not attacked\n" in out
    )
    verdicts([_verdict("p/strong", power=strong)])
    assert "All 1 equalities and misprints detect the effect" in call("verify", "--power")[1]


def test_verify_lists_the_claims_that_hold_with_a_wrong_prediction(verdicts, call, tmp_path):
    file = tmp_path / "ledger.json"
    wide = {
        "relation": ">=",
        "simulated": 3.0,
        "predicted": -1.0,
        "unnoticed": ("tightened", "without a"),
    }
    verdicts([*GOOD, _verdict("p/wide", power=Power(0.05, 4.1, 6e-5, 1.0, 4.0), **wide)])
    code, out, _ = call("verify", "--mutate", "--json", str(file))
    assert code == 0
    assert "  p/wide/exact: tightened; without a (slack by 4)\n" in out
    assert "p: 0 of 1 equalities and 1 of 2 bounds hold when moved by their effect.\n" in out
    found = {v["id"]: v["unnoticed"] for v in json.loads(file.read_text())["verdicts"]}
    assert found.pop("p/wide/exact") == ["tightened", "without a"]
    assert found == {"p/one/exact": [], "p/two/printed": [], "p/bound/exact": []}
    verdicts(GOOD)
    assert "No claim holds with a wrong prediction.\n" in call("verify", "--mutate")[1]


def _attackable(name, ratio, **more):
    domain = Domain("x in [0, 1]", {"x": Box(0.0, 1.0)}, None, None)
    both = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    found = Attack(name, "x in [0, 1]", *both, {"x": 0.5}, 7, {"a": 2.0, "b": 0.5})
    fields = {"relation": "<=", "attack": domain, **more}
    return Claim(name, "s", "src", "dom", float, lambda k, q: None, **fields), found


@pytest.mark.parametrize(
    ("ratio", "code", "said"),
    [
        (0.99, 0, "p: 1 of 2 bounds attacked: 1 attained.\n"),
        (1.5, 1, "BROKEN, expected to hold: p/wide/ours.\n"),
        (
            (1.053, 1.0),
            1,
            "NOT CONFIRMED, two evaluations differ: p/wide/ours (ratio 1.053, again 1).\n",
        ),
    ],
)
def test_verify_attacks_bounds(call, tmp_path, monkeypatch, ratio, code, said):
    made = [
        _attackable("p/wide/ours", ratio),
        _attackable("p/wrong/printed", 1.2),
        _attackable("p/other/ours", 0.5, attack="a measurement"),
    ]
    found = {one.id: attack for one, attack in made}
    asked = []

    def attack(name, domain, *, seed, seconds):
        asked.append((name, seed, seconds))
        return found[name]

    monkeypatch.setattr(claims, "select", lambda *_: [one for one, _ in made])
    monkeypatch.setattr(adversary, "attack", attack)
    file = tmp_path / "attacks.json"
    got, out, _ = call("verify", "--attack", "--budget", "3", "--seed", "4", "--json", str(file))
    assert got == code
    assert asked == [("p/wide/ours", 4, 1.5), ("p/wrong/printed", 4, 1.5)]
    assert said in out
    assert "Not attacked: p/other/ours: a measurement.\n" in out
    assert "1 of 1 attacked misprints are broken.\n" in out
    assert "a: breaks, b: holds (0.5)" in out
    kept = json.loads(file.read_text())
    assert kept["schema"] == ATTACKS
    assert [a["ratio"] for a in kept["attacks"]] == [found["p/wide/ours"].ratio, 1.2]


def test_verify_renews_only_what_has_expired(call, tmp_path, monkeypatch):
    made = [_attackable(f"p/{name}/ours", 0.9) for name in ("old", "new")]
    (old, kept), (new, found) = made
    monkeypatch.setattr(claims, "select", lambda *_: [old, new])
    monkeypatch.setattr(claims, "all_claims", lambda: [old, new])
    monkeypatch.setattr(attacks, "read", lambda: {old.id: kept})
    monkeypatch.setattr(attacks, "current", lambda claim: claim is old)
    monkeypatch.setattr(attacks, "FILE", tmp_path / "attacks.json")
    asked = []
    monkeypatch.setattr(adversary, "attack", lambda name, *_, **__: asked.append(name) or found)
    code, _, _ = call("verify", "--attack", "--renew", "--claims", "p/*")
    assert (code, asked) == (0, [new.id])
    written = json.loads((tmp_path / "attacks.json").read_text())
    assert [a["id"] for a in written["attacks"]] == [old.id, new.id]
    assert written["claims"] == "*"


def test_an_interrupted_attack_prints_what_it_found(call, monkeypatch):
    made = [_attackable(f"p/{name}/ours", 0.9) for name in "abc"]
    found = iter([made[0][1], KeyboardInterrupt()])

    def attack(*args, **options):
        if isinstance(one := next(found), KeyboardInterrupt):
            raise one
        return one

    monkeypatch.setattr(claims, "select", lambda *_: [one for one, _ in made])
    monkeypatch.setattr(adversary, "attack", attack)
    code, out, _ = call("verify", "--attack")
    assert code == 130
    assert "within 1.11 x" in out
    assert "Interrupted after 1 of 3 attacks.\n" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "3"], "--budget needs --attack"),
        (
            ["--attack", "--quick"],
            "--attack allows only --claims, --from, --budget, --renew, --seed and --json",
        ),
        (["--renew"], "--renew needs --attack"),
        (["--attack", "--renew", "--budget", "3"], "--renew needs --attack, and allows only"),
        (["--attack", "--budget", "1,2"], "expected one number of seconds"),
        (["--attack", "--budget", "nan"], "expected positive numbers"),
    ],
)
def test_verify_refuses_attacks_that_make_no_sense(call, options, said):
    code, _, err = call("verify", *options)
    assert code == 2
    assert said in err


def test_verify_says_what_holds(verdicts, call, tmp_path):
    asked = verdicts(GOOD)
    file = tmp_path / "ledger.json"
    code, out, err = call("verify", "--json", str(file), "--seed", "5", "--quick")
    assert code == 0
    assert asked == [(one.claim.id, 5, True) for one in GOOD]
    assert "p/one/exact ..." in err
    assert "1.1 ± 0.05" in out
    assert "wrong as printed" in out
    assert "fails, as expected" in out
    assert "2 claims hold. 1 claim fails as printed, as expected (a known misprint)." in out
    assert "exact as printed 2, wrong as printed 1." in out
    found = json.loads(file.read_text())
    assert found["schema"] == SCHEMA
    assert (found["seed"], found["quick"], found["claims"]) == (5, True, "*")
    assert "jax" in found["versions"]
    assert [v["id"] for v in found["verdicts"]] == [one.claim.id for one in GOOD]
    assert found["verdicts"][1] | {"seconds": 0} == {
        "id": "p/two/printed", "status": "wrong as printed", "statement": "a < b & c",
        "source": "paper, eq. (1)", "domain": "n=2", "relation": "=", "predicted": 1.0,
        "simulated": 1.1, "stderr": None, "score": "-inf", "score_name": "err/tol",
        "note": "", "seconds": 0, "expected": False, "holds": False, "ok": True,
        "effect": 0.05, "sees": 0.3, "false_alarm": 6e-5, "miss": 0.5,
        "slack": 0.0, "unnoticed": [], "kind": "", "sharpness": "", "nearest": "",
    }  # fmt: skip


def test_verify_fails_when_a_claim_does(verdicts, call, tmp_path):
    verdicts(WRONG)
    file = tmp_path / "ledger.json"
    code, out, _ = call("verify", "--json", str(file))
    assert code == 1
    assert "FAILS" in out
    assert "NOT as expected: p/three/exact." in out
    assert json.loads(file.read_text())["verdicts"][3]["ok"] is False
    verdicts([_verdict("p/four", holds=True, expected=False)])
    code, out, _ = call("verify", "--json", str(file))  # a ledger may replace a ledger
    assert code == 1
    assert "HOLDS, expected to fail" in out
    assert len(json.loads(file.read_text())["verdicts"]) == 1


def test_verify_replaces_nothing_but_a_ledger(verdicts, call, tmp_path):
    asked = verdicts(GOOD)
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    code, _, err = call("verify", "--json", str(file))
    assert code == 2
    assert "exists and is not a ledger" in err
    code, _, err = call("verify", "--json", str(tmp_path / "no/such/place.json"))
    assert code == 2
    assert err.count("\n") == 1
    assert asked == []
    assert file.read_text() == '{"mine": 1}'


def test_verify_with_real_claims(call):
    code, out, _ = call("verify", "--claims", "features-are-fate/eq44/*", "--quick")
    assert code == 0
    assert "Every verdict is as expected." in out


@pytest.mark.slow
def test_verify_coverage_lists_statements_and_simulates_nothing(verdicts, call):
    asked = verdicts(GOOD)
    code, out, _ = call("verify", "--coverage")
    assert (code, asked) == (0, [])
    for paper in coverage.EQUATIONS:
        assert f"{paper}: {coverage.EQUATIONS[paper]} numbered equations" in out
    assert "Theorem 1, eq. 13: T1/printed, T1/corrected" in out
    assert "no claims: " in out


@pytest.mark.slow
def test_verify_coverage_fails_where_something_is_missing(call, monkeypatch):
    known = claims.all_claims()
    left = [c for c in known if not c.id.startswith("unified-merging/L4/")]
    monkeypatch.setattr(claims, "all_claims", lambda: left)
    code, out, _ = call("verify", "--coverage")
    assert code == 1
    gap = "unified-merging: Assumption 6 and Lemma 4: no claim's source names Lemma 4"
    assert out.endswith(f"Gaps:\n  {gap}\n")
    new = _stated("sail/T99", source="sail Theorem 99")
    monkeypatch.setattr(claims, "all_claims", lambda: [*known, new.claim])
    code, out, _ = call("verify", "--coverage")
    assert code == 1
    assert "answer to no statement:\n  sail/T99/exact: its source, 'sail Theorem 99'" in out


def test_verify_writes_tables_to_paste(verdicts, call, tmp_path):
    verdicts([_stated("sail/T1", statement="50 % of $x_i$ & {y}~^ \\", source="sail Thm 1")])
    for name in ("t.csv", "t.tex"):
        for _ in range(2):  # a ledger may be written over
            assert call("verify", "--table", str(tmp_path / name))[0] == 0
    header, row = csv.reader((tmp_path / "t.csv").read_text().splitlines())
    read = dict(zip(header, row, strict=True))
    assert read["statement"] == "50 % of $x_i$ & {y}~^ \\"
    assert float(read["predicted"]) == 1
    row = (tmp_path / "t.tex").read_text().splitlines()[-2]
    special = r"50 \% of \$x\_i\$ \& \{y\}\textasciitilde{}\textasciicircum{} \textbackslash{}"
    assert row.startswith(rf"exact as printed & {special} & \cite[{{Thm 1}}]{{sail}} & 1 & ")
    (tmp_path / "mine.tex").write_text("my thesis")
    for name in ("mine.tex", "t.xlsx"):
        code, _, err = call("verify", "--table", str(tmp_path / name))
        assert code == 2
        assert name in err
    assert (tmp_path / "mine.tex").read_text() == "my thesis"


def test_bench_hands_over(monkeypatch, call, tmp_path):
    monkeypatch.chdir(tmp_path)
    listed = dict(line.split(maxsplit=1) for line in call("bench")[1].splitlines()[2:])
    assert listed.keys() == set(bench.benchmarks())
    assert all(about.endswith(".") for about in listed.values())
    module = SimpleNamespace(
        __doc__="",
        options=lambda parser: parser.add_argument("--size", type=int),
        measure=lambda args: {"size": args.size, "good": args.size < 4},
    )
    monkeypatch.setattr(bench, "benchmarks", lambda: ["speed"])
    monkeypatch.setitem(sys.modules, "experiments.bench.speed", module)
    out = call("bench", "speed", "--help")[1]
    assert out.endswith("example:\n  sail-jax bench speed --json speed.json\n")
    assert call("bench", "speed", "--size", "3")[0] == 0
    assert call("bench", "speed", "--size", "4", "--json", "record.json")[0] == 1
    record = json.loads(Path("record.json").read_text())
    assert record["schema"] == "sail-jax bench speed 1"
    assert record["argv"] == ["--size", "4", "--json", "record.json"]
    assert record["size"] == 4
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["jax"]


class Page(html.parser.HTMLParser):
    """Collects the tags of a page and checks that they are balanced."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.slow
def test_quickstart_writes_one_self_contained_page(fake, verdicts, call, tmp_path):
    verdicts(GOOD)
    code, out, err = call("quickstart")
    assert code == 0
    assert "s in total" in err
    text = (tmp_path / "quickstart/index.html").read_text()
    page = Page(text)
    # The page begins with what the terminal ends with.
    *printed, last = out.splitlines()
    assert last == "Look at quickstart/index.html"
    assert printed[0] == "Transfer against training from scratch: x < y"
    assert len(printed) == 4
    assert set(printed) <= set(page.text.split("\n"))
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "b"})
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags
    assert "prefers-color-scheme: dark" in text
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 2  # there is none for the ledger
    for image in images:
        assert image["alt"]
        kind, data = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(data, validate=True)
    assert images[0]["alt"] == 'x: n & "m"'
    assert "sum <b>1.167</b>" in page.text  # escaped: shown, not obeyed
    assert len([tag for tag, _ in page.tags if tag == "details"]) == 3
    assert "a < b & c" in page.text
    assert len([tag for tag, _ in page.tags if tag == "tr"]) == 1 + len(GOOD)
    assert "a checkpoint, grown" in page.text
    for part in quickstart.STUDIES.values():
        assert {part.heading, part.about, f"Next: {part.more}"} <= set(page.text.split("\n"))
    for word in ("jax ", "seed", "computing time"):
        assert word in page.text


def test_an_option_may_stand_between_two_paths():
    parser = Parser("grow", "")
    for name in ("checkpoint", "out"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--width")
    args = parser.read(["a", "--width", "2x", "b"])
    assert (args.checkpoint, args.width, args.out) == ("a", "2x", "b")


@pytest.mark.slow
def test_quickstart_grows_a_network_that_reads_digits(tmp_path):
    """In float32, whose rounding may turn a digit that is nearly a tie: 1 of some 500."""
    section = quickstart.grown(tmp_path, 1)
    header, trained, grown = section.tables[0]
    assert header[:2] == ("network", "parameters")
    assert int(grown[1].replace(",", "")) > 4 * int(trained[1].replace(",", ""))
    np.testing.assert_allclose(
        *(np.asarray(row[2:], float) for row in (trained, grown)), atol=0.005
    )
    assert float(trained[2]) > 0.9
    assert re.search("computes the same function.* is within rounding", section.verdict)
    assert quickstart.grown(tmp_path, 1) == section


@pytest.mark.slow
def test_quickstart_fails_with_a_claim_but_still_writes_the_page(fake, verdicts, call, tmp_path):
    verdicts(WRONG)
    assert call("quickstart", "--out", "q")[0] == 1
    assert "FAILS" in (tmp_path / "q/index.html").read_text()


@pytest.mark.slow
def test_quickstart_resumes_and_refuses(fake, verdicts, call, tmp_path):
    verdicts(GOOD)
    fake.stop = KeyboardInterrupt()
    code, _, err = call("quickstart", "--out", "q", "--seed", "3")
    assert code == 130
    assert err.endswith("continue with: sail-jax quickstart --out q --seed 3 --resume\n")
    assert call("quickstart", "--out", "q", "--seed", "3")[0] == 2
    code, _, err = call("quickstart", "--out", "q", "--seed", "4", "--resume")
    assert code == 2
    assert "config.seed was 3, now 4" in err
    fake.stop, fake.computed = None, ()
    assert call("quickstart", "--out", "q", "--seed", "3", "--resume")[0] == 0
    assert fake.computed == ("second", "first", "second")
    fake.computed = ()
    assert call("quickstart", "--out", "q", "--seed", "3", "--resume")[0] == 0
    assert fake.computed == ()
    (tmp_path / "q/thesis.tex").write_text("")
    assert call("quickstart", "--out", "q", "--seed", "3", "--resume")[0] == 2
