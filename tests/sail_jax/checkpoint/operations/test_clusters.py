"""An output made by the workers of a cluster has the bytes of one process, whatever is lost."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax.numpy as jnp
import many_devices
import numpy as np
import pytest
import repeated_commands
import small_checkpoints
from cells import slow

from sail_jax import cluster
from sail_jax.checkpoint import RunOptions, merge_checkpoints, save_checkpoint
from sail_jax.checkpoint.executor import MergeError
from sail_jax.checkpoint.formats import written
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.operations import running
from sail_jax.checkpoint.operations.adapting import extract_adapter
from sail_jax.checkpoint.operations.aligning import align_checkpoints
from sail_jax.checkpoint.operations.averaging import average_checkpoints
from sail_jax.checkpoint.output.writer import DiffersError, Writer
from sail_jax.cli import main as cli
from sail_jax.merging.combining import transform
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Fold, kernel


def _mass(piece, delta, weight):
    return jnp.abs(delta).sum(tuple(range(1, delta.ndim)))


def _scaled(mass, piece, delta, weight):
    return delta * mass.reshape(-1, *(1,) * (delta.ndim - 1)), weight


# Every task vector times its mass over the tree: each part needs all others' statistics.
SUMS = Merge(transform(kernel(_scaled), Fold(kernel(_mass)), scope="tree"), weighted_mean)
RUN = RunOptions(shard_bytes=1000, threads=1, sync=False)
ON = replace(RUN, on=cluster.HERE)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = small_checkpoints.tensors(0, 0.3, np.float32)
    small_checkpoints.save(folder / "base", base)
    for seed, name in enumerate("ab"):
        small_checkpoints.save(folder / name, small_checkpoints.tuned(base, seed))
    return folder


def files(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def merged(models, out, run, method="linear"):
    both = [models / name for name in "ab"]
    return merge_checkpoints(both, out, base=models / "base", method=method, run=run)


@pytest.mark.parametrize("method", [*slow("linear"), SUMS], ids=["linear", "sums"])
def test_tasks_make_the_bytes_of_one_process(models, tmp_path, method):
    (tmp_path / "one").mkdir()
    heard = []
    plain = merged(models, tmp_path / "one/out", RUN, method)
    on = replace(ON, progress=lambda *said: heard.append(said))
    done = merged(models, tmp_path / "out", on, method)
    assert done.tensors == plain.tensors
    assert len(files(tmp_path / "out")) > 6
    assert files(tmp_path / "out") == files(tmp_path / "one/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]
    assert all(0 <= read <= total for read, total, _ in heard)


@pytest.mark.slow
def test_a_finished_output_is_compared_and_replaced_on_request(models, tmp_path):
    out = tmp_path / "out"
    first = merged(models, out, ON)
    assert not first.unchanged
    with pytest.raises(CheckpointError, match="exists already"):
        merged(models, out, ON)
    assert merged(models, out, replace(ON, resume=True)).unchanged
    inode = out.stat().st_ino
    with pytest.raises((DiffersError, CheckpointError)):
        merged(models, out, replace(ON, resume=True), SUMS)
    assert out.stat().st_ino == inode
    merged(models, out, replace(ON, force=True), SUMS)
    merged(models, tmp_path / "other", RUN, SUMS)
    # Each part is compared with the help of all others' statistics.
    assert merged(models, out, replace(ON, resume=True), SUMS).unchanged
    tensors = [name for name in files(out) if name.endswith(".safetensors")]
    assert {n: files(out)[n] for n in tensors} == {n: files(tmp_path / "other")[n] for n in tensors}
    assert [*tmp_path.glob(".*partial*")] == []


@pytest.mark.slow
def test_an_error_of_a_task_is_the_error_of_the_command(models, tmp_path):
    """And unfinished parts are continued on request only."""
    arrays = small_checkpoints.tensors(1) | {"lm_head.weight": np.full((20, 16), np.nan, "f")}
    save_checkpoint(tmp_path / "bad", arrays, shard_bytes=1000)
    with pytest.raises(MergeError, match="NaN or infinity in lm_head"):
        merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=ON)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="holds unfinished parts; continue them with resume"):
        merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=ON)
    run = replace(ON, resume=True, allow_nonfinite=True)
    merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=run)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [*slow("seal", "tidy"), "tidied"])
def test_a_join_that_was_interrupted_is_resumed(models, tmp_path, monkeypatch, at):
    out = tmp_path / "out"
    merged(models, one := tmp_path.with_name(f"{tmp_path.name}-one") / "out", RUN)
    remove = Writer._remove

    def stop(*writer):
        # The parts end as usual.
        if writer and isinstance(writer[0], Writer) and writer[0]._part is not None:
            remove(*writer)
        else:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Before the output has its name, and after that.
        patch.setattr(*((written, "seal") if at == "seal" else (Writer, "_remove")), stop)
        with pytest.raises(KeyboardInterrupt):
            merged(models, out, ON)
    assert out.exists() == (at != "seal")
    if at == "tidied":  # the journal is removed last
        shutil.rmtree(tmp_path / ".out.partial/parts")
    monkeypatch.setattr(running, "_in_rounds", None)  # nothing is computed again
    merged(models, out, replace(ON, resume=True))
    assert files(out) == files(one)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_averages_are_made_by_tasks(models, tmp_path):
    for run, place in ((RUN, "one"), (ON, "many")):
        both = [models / "a", models / "b"]
        average_checkpoints(both, tmp_path / place / "out", write_as="params", run=run)
    assert files(tmp_path / "many/out") == files(tmp_path / "one/out")


def test_an_alignment_is_solved_once(tmp_path, monkeypatch):
    from sail_jax import spec
    from sail_jax.checkpoint.operations import aligning

    a = {"in": np.diag(np.float32([1, 2, 3])), "out": np.ones((1, 3), np.float32)}
    save_checkpoint(tmp_path / "a", a)
    save_checkpoint(tmp_path / "b", {"in": a["in"][[2, 0, 1]], "out": a["out"]})
    axes = {"in": "hidden x*", "out": "y hidden*"}
    spaces = spec(a, axes, spaces={"{x,y}": "outer", "hidden": "relu"})
    solved = []
    real = aligning.align_maps
    monkeypatch.setattr(
        aligning,
        "align_maps",
        lambda *given, **options: solved.append(1) or real(*given, **options),
    )
    for run, place in ((RUN, "one"), (replace(ON, shard_bytes=20), "many")):
        align_checkpoints(tmp_path / "a", tmp_path / "b", tmp_path / place, spec=spaces, run=run)
    assert len(solved) == 2
    assert len([*(tmp_path / "many").glob("*.safetensors")]) == 2


def test_what_cannot_be_divided_is_refused(models, tmp_path):
    with pytest.raises(CheckpointError, match="on: this operation cannot be done in parts"):
        extract_adapter(models / "base", models / "a", tmp_path / "out", rank=2, run=ON)
    with pytest.raises(CheckpointError, match="is written as one"):
        merged(models, tmp_path / "x.npz", ON)
    with pytest.raises(ValueError, match="keep_old requires force=True"):
        replace(ON, keep_old=True)
    with pytest.raises(CheckpointError, match="part: on makes all parts"):
        merged(models, tmp_path / "out", replace(ON, part=(1, 2)))
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Small networks, and command lines on them; see `repeated_commands`."""
    folder = tmp_path_factory.mktemp("commands")
    with contextlib.chdir(folder):
        return folder, repeated_commands.prepare(folder)


@pytest.fixture(scope="module")
def scheduler():
    """The address of a cluster of two workers, which lasts for all tests."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    ) as own:
        yield own.scheduler_address


ALONE = {"extract", "apply", "merge adapters"}
"""Commands that have no parts."""
DIVIDED = [name for name in repeated_commands.COMMANDS if name not in ALONE]


def made(command, folder, out, *more):
    words = [*command, str(out), "--quiet", "--shard-size=20KB", "--threads=1", *more]
    with contextlib.chdir(folder):
        assert cli.main(words) == 0
    return {n: data for n, data in files(out).items() if n.endswith((".safetensors", ".json"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_each_command_makes_its_bytes_on_a_cluster(name, commands, scheduler, tmp_path):
    (tmp_path / "one").mkdir()
    folder, known = commands
    here = made(known[name], folder, tmp_path / "one/out")
    there = made(known[name], folder, tmp_path / "out", "--on", scheduler)
    assert len([n for n in here if n.endswith(".safetensors")]) > 1
    assert there.keys() == here.keys()
    assert [n for n in here if n.endswith(".safetensors") and there[n] != here[n]] == []


@pytest.mark.soak
def test_each_method_makes_its_bytes_on_a_cluster(commands, scheduler, tmp_path):
    folder, known = commands
    for name in (name for name in known if name.startswith("merge ") and known[name]):
        if name not in ALONE:
            here = made(known[name], folder, tmp_path / f"{name} one")
            assert made(known[name], folder, tmp_path / name, "--on", scheduler) == here, name


BIG = {f"layer.{i}.weight": (64, 512) for i in range(48)}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Recipes of merges that take some seconds on a cluster, and their outputs by one process."""
    folder = tmp_path_factory.mktemp("recipes")
    rng = np.random.default_rng(0)
    for name in ("base", "a", "b"):
        save_checkpoint(folder / name, {k: rng.normal(size=v).astype("f") for k, v in BIG.items()})
    for method in ("linear", "ties"):
        base = f"base_model: {folder}/base\n" if method == "ties" else ""
        models = "".join(f"- {{model: {folder}/{n}, parameters: {{weight: .5}}}}\n" for n in "ab")
        text = f"merge_method: {method}\n{base}parameters: {{density: .4}}\nmodels:\n{models}"
        (folder / f"{method}.yaml").write_text(
            text.replace("parameters: {density: .4}\n", "") if method == "linear" else text
        )
        whole(folder, method, folder / "made" / method)
    return folder


def whole(folder, method, out, *more, **options):
    words = ["merge", f"{folder}/{method}.yaml", str(out), "--shard-size=150KB", "--quiet", *more]
    command = [sys.executable, "-m", "sail_jax.cli", *words]
    return subprocess.run(
        command, env=many_devices.environment(1), capture_output=True, text=True, timeout=300,
        **options,
    )  # fmt: skip


def same(folder, method, out):
    """No tensor differs from the output of one process, and nothing else is left."""
    wanted = files(folder / "made" / method)
    found = files(out)
    assert found.keys() == wanted.keys()
    return all(found[n] == wanted[n] for n in wanted if n.endswith(".safetensors"))


def worker_processes(parent):
    """The processes below the nannies of a local cluster."""
    found = subprocess.run(
        ["ps", "-ewwo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in found]
    return [int(pid) for pid, above, args in rows if int(above) == parent and "spawn_main" in args]


def begun(folder, method, out, *more):
    """A merge on a cluster of its own, once it has begun its parts."""
    words = ["merge", f"{folder}/{method}.yaml", str(out), "--shard-size=150KB", "--quiet", *more]
    # Where the tests run in the background, a shell has interrupts ignored.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sail_jax.cli.main import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words, "--on", "local:2"],
        env=many_devices.environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not [*out.parent.glob(f".{out.name}.partial/parts/*")]:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.soak
def test_an_interrupted_command_leaves_no_worker_and_is_continued(recipes, tmp_path):
    process = begun(recipes, "ties", tmp_path / "out")
    workers = worker_processes(process.pid)
    assert workers
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "--resume" in said
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert [pid for pid in workers if os.path.exists(f"/proc/{pid}")] == []
    again = begun(recipes, "ties", tmp_path / "out", "--resume")
    said = again.communicate(timeout=120)[1]
    assert again.returncode == 0, said
    assert same(recipes, "ties", tmp_path / "out")


@pytest.mark.soak
def test_workers_that_are_killed_at_random_lose_nothing(recipes, tmp_path):
    """100 kills: nothing is lost, and nothing mixed."""
    rng, kills, rounds = random.Random(0), 0, 0
    while kills < 100:
        method, out = ("linear", "ties")[rounds % 2], tmp_path / str(rounds)
        process = begun(recipes, method, out)
        lost = 0
        while process.poll() is None and lost < 8:
            time.sleep(rng.uniform(0.2, 1.2))
            if workers := worker_processes(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(workers), signal.SIGKILL)
                    lost += 1
        said = process.communicate(timeout=300)[1]
        kills, rounds = kills + lost, rounds + 1
        assert process.returncode == 0, said
        assert same(recipes, method, out)
        assert not [*tmp_path.glob(".*partial*")]


@pytest.mark.soak
def test_schedulers_that_are_killed_cost_what_is_unfinished(recipes, tmp_path):
    """20 kills: each command ends with a sentence, and is continued by --resume."""
    rng = random.Random(1)
    for kill in range(20):
        method, out = ("linear", "ties")[kill % 2], tmp_path / str(kill)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        for resumed in (False, True):
            scheduler = subprocess.Popen(
                [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port",
                 str(port), "--no-dashboard"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            worker = subprocess.Popen(
                [sys.executable, "-m", "dask", "worker", address, "--no-dashboard", "--nthreads=1",
                 "--nworkers=2", "--local-directory", str(tmp_path / "scratch")],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                if not resumed:
                    delay = rng.uniform(3, 9)
                    timer = threading.Timer(delay, scheduler.kill)
                    timer.start()
                ended = whole(recipes, method, out, "--on", address, *["--resume"] * resumed)
            finally:
                scheduler.kill()
                os.killpg(worker.pid, signal.SIGKILL)
                scheduler.wait()
                worker.wait()
            if ended.returncode == 0:
                break
            assert not resumed, ended.stderr
            assert "Traceback" not in ended.stderr
            assert re.search("scheduler", ended.stderr), ended.stderr
        assert same(recipes, method, out)
        assert not [*tmp_path.glob(".*partial*")]
