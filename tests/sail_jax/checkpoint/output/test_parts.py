"""An output made in parts has the bytes of one made by one process."""

import itertools
import json
import shutil
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small_checkpoints

from sail_jax import methods
from sail_jax.checkpoint import RunOptions, merge_checkpoints, save_checkpoint
from sail_jax.checkpoint.executor import MergeError
from sail_jax.checkpoint.formats import written
from sail_jax.checkpoint.formats.files import CheckpointError, StoredTensor
from sail_jax.checkpoint.operations import running
from sail_jax.checkpoint.operations.adapting import extract_adapter
from sail_jax.checkpoint.operations.averaging import average_checkpoints
from sail_jax.checkpoint.output import parts
from sail_jax.checkpoint.output.parts import WaitedError, divided
from sail_jax.checkpoint.output.writer import Writer
from sail_jax.cli import main as cli
from sail_jax.merging import streaming
from sail_jax.merging.combining import chain, transform
from sail_jax.merging.merge import Merge
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Fold, kernel
from sail_jax.merging.transforms import rescale_l1, trim


def _mass(piece, delta, weight):
    return jnp.abs(delta).sum(tuple(range(1, delta.ndim)))


def _scaled(mass, piece, delta, weight):
    return delta * mass.reshape(-1, *(1,) * (delta.ndim - 1)), weight


# Every task vector times its mass over the tree: one round, of floats.
SUMS = Merge(transform(kernel(_scaled), Fold(kernel(_mass)), scope="tree"), weighted_mean)
RUN = RunOptions(shard_bytes=1000, threads=1, wait=0, sync=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base and two models of 21 tensors, in which many entries have the same size. And in float32
    two that differ by so much in the first tensor by name that a sum of masses loses all others, if
    these are added to it one by one.
    """
    folder = tmp_path_factory.mktemp("models")
    base = small_checkpoints.tensors(0, 0.3, np.float32)
    small_checkpoints.save(folder / "fine-base", base)
    for seed, name in enumerate(["fine-a", "fine-b"]):
        tuned = small_checkpoints.tuned(base, seed)
        tuned["lm_head.weight"] = tuned["lm_head.weight"] * np.float32(1e7)
        small_checkpoints.save(folder / name, tuned)
    for seed, name in enumerate(["base", "a", "b"]):
        rounded = {
            n: (np.round(4 * x.astype(np.float32)) / 4).astype(ml_dtypes.bfloat16)
            for n, x in small_checkpoints.tensors(seed).items()
        }
        small_checkpoints.save(folder / name, rounded, small_checkpoints.CONFIG)
    return folder


def files(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def in_parts(count, carry_out, run=RUN):
    """Makes all parts, repeatedly for those that wait for others, then joins them."""
    left, attempts = [*range(1, count + 1)], 0
    while left:
        attempts += 1
        assert attempts < 9
        for number in left.copy():
            try:
                carry_out(replace(run, part=(number, count), resume=True))
                left.remove(number)
            except WaitedError:
                pass
    carry_out(replace(run, join=True))
    return attempts


def merging(models, out, run=RUN, method: Any = "linear", kind: str = "", **options: Any):
    both = [models / f"{kind}{name}" for name in "ab"]
    base = models / f"{kind}base"
    return merge_checkpoints(both, out, base=base, method=method, run=run, **options)


def refused(message, *given, **options):
    with pytest.raises(CheckpointError, match=message):
        merging(*given, **options)


def both(folder, count, carry_out, run=RUN):
    """Returns the files of one process and those of parts, and how often parts were started."""
    carry_out(folder / "one" / "out", run)
    attempts = in_parts(count, lambda how: carry_out(folder / "many" / "out", how), run)
    assert [path.name for path in (folder / "many").iterdir()] == ["out"]
    return files(folder / "one" / "out"), files(folder / "many" / "out"), attempts


def test_runs_of_files_have_the_least_largest():
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes = rng.integers(1, 9, rng.integers(1, 8)).tolist()
        count = int(rng.integers(1, len(sizes) + 1))
        cuts = itertools.combinations(range(1, len(sizes)), count - 1)
        ends = ([0, *cut, len(sizes)] for cut in cuts)
        least = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(end)) for end in ends)
        runs = divided(sizes, count)
        assert runs == sorted(runs)
        assert {*runs} == {*range(count)}
        assert max(np.bincount(runs, sizes)) == least


@pytest.fixture
def apart(monkeypatch):
    """Small tensors are merged one at a time, like large ones."""
    monkeypatch.setattr(streaming, "at_a_time", lambda *_: 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "attempts"),
    [
        ("linear", "linear", 1),
        # Sums of floats over the tree, which depend on their order; and one round.
        ("sums", SUMS, 2),
        # Four digits, then equal keys: rounds that no part can pass without the others.
        ("ties", methods.ties(density=0.3), 3),
        pytest.param(
            "steps",
            Merge(chain(rescale_l1("tensor"), trim(0.5, scope="tree")), weighted_mean),
            3,
            marks=pytest.mark.soak,
        ),
    ],
)
def test_parts_make_the_bytes_of_one_process(models, tmp_path, name, method, attempts, request):
    def merge(out, run):
        merging(models, out, run, method, "fine-" if name == "sums" else "")

    # Elsewhere small tensors of several parts are merged at a time.
    if name == "sums":
        request.getfixturevalue("apart")
    one, many, begun = both(tmp_path, 3, merge)
    assert len(one) > 6
    assert many == one
    assert (begun > 1) == (attempts > 1)


def test_a_part_reads_its_own_tensors_for_statistics(models, tmp_path, monkeypatch, apart):
    """It has read exactly its own tensors when it waits, which are far fewer than all."""
    read, own = set(), StoredTensor.read

    def noted(self, out, start=0):
        read.add(self.name)
        own(self, out, start)

    monkeypatch.setattr(StoredTensor, "read", noted)
    run = replace(RUN, part=(2, 3), shard_bytes=1)
    with pytest.raises(WaitedError, match="not running: parts 1, 3 of 3; start the missing parts"):
        merging(models, tmp_path / "out", run, SUMS)
    mine = {path.name for path in (tmp_path / ".out.partial" / "data").iterdir()}
    # Each tensor has a file of its own here.
    assert 3 < len(mine) < 12
    assert len(read) == len(mine)


def test_weights_in_codes_lie_with_their_scales(tmp_path):
    rng, stored = np.random.default_rng(0), {}
    for k in range(4):
        codes = rng.integers(-90, 90, (8, 16)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        scales = np.exp(rng.normal(size=(8, 1))).astype(np.float32)
        stored |= {f"{k}.q.weight": codes, f"{k}.q.weight_scale": scales}
    config = {"quantization_config": {"quant_method": "fp8"}}
    small_checkpoints.save(tmp_path / "a", stored, config)

    def merge(out, run):
        merge_checkpoints([tmp_path / "a"], out, run=run)

    run = replace(RUN, requantize="fp8", shard_bytes=130)
    one, many, _ = both(tmp_path, 3, merge, run)
    assert "requantization.json" in one
    assert len([name for name in one if name.endswith(".safetensors")]) == 8
    assert many == one


@pytest.mark.slow
def test_a_part_that_was_killed_goes_on(models, tmp_path):
    out = tmp_path / "out"
    merging(models, tmp_path / "one" / "out", measure=True)

    def stop(done, total, name):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merging(models, out, replace(RUN, part=(1, 2), progress=stop), measure=True)
    again, finished = [], [*map(json.loads, journal(out, 1)[1:])]
    assert finished
    refused("continue it with resume=True", models, out, replace(RUN, part=(1, 2)))
    run = replace(RUN, resume=True, progress=lambda done, total, name: again.append(name))
    merging(models, out, replace(run, part=(1, 2)), measure=True)
    assert again
    assert not {*again} & {record["name"] for record in finished}
    merging(models, out, replace(RUN, part=(2, 2)), measure=True)
    joined = merging(models, out, replace(RUN, join=True), measure=True)
    assert files(out) == files(tmp_path / "one" / "out")
    # Measurements before the kill are included.
    assert {*joined.records} == {treatment.work.name for treatment in joined.plan.treatments}


def journal(out, number):
    """The records of a part's journal."""
    path = parts.place(out.with_name(f".{out.name}.partial"), number) / "journal"
    return [line.partition(b" ")[2] for line in path.read_bytes().splitlines()]


@pytest.mark.slow
def test_what_is_not_a_whole_set_of_parts_is_not_joined(models, tmp_path, monkeypatch):
    out = tmp_path / "out"
    join = replace(RUN, join=True)
    refused(r"join=True: .* holds no part of out; make the ", models, out, join)
    assert not [*tmp_path.iterdir()]
    merging(models, out, replace(RUN, part=(1, 3)))
    shutil.copytree(tmp_path, saved := tmp_path.with_name(f"{tmp_path.name}-saved"))

    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merging(models, out, replace(RUN, part=(3, 3), progress=stop))
    refused(r"\(missing: part 2 of 3, unfinished: part 3 of 3\)", models, out, join)
    # Another part never writes beside this one if it does not belong with it.
    wrong: list[tuple[RunOptions, dict[str, Any], str]] = [
        (replace(RUN, part=(2, 4)), {}, r"part 1 and part 2 of 4 do not .* \(of 3 and of 4 parts"),
        (replace(RUN, part=(2, 3)), {"weights": [1, 2]}, "part 1 of 3 belongs to another run"),
        (replace(RUN, part=(2, 3), shard_bytes=2000), {}, "part 1 of 3 belongs to another run"),
        (RUN, {}, "holds parts of an output; join them with join=True"),
    ]
    for run, options, why in wrong:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        refused(why, models, out, run, **options)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    computing = running._computing()
    for number in (2, 3):
        merging(models, out, replace(RUN, part=(number, 3), resume=True))
    refused("part 1 of 3 belongs to another run", models, out, join, weights=[1, 2])
    # If no part saw the other, the join does.
    other = saved / "out"
    monkeypatch.setattr(running, "_computing", lambda: computing | {"jax": "0.0.1"})
    refused(
        r"do not belong together \(jax .* and 0.0.1\)", models, other, replace(RUN, part=(2, 3))
    )
    monkeypatch.setattr(parts, "check_beside", lambda *_: None)
    merging(models, other, replace(RUN, part=(2, 3)))
    refused(r"part 2 and part 1 of 3 do not .* \(jax 0.0.1 and", models, other, join)
    merging(models, out, join)
    refused("exists already", models, out, join)
    done = merging(models, out, replace(RUN, part=(2, 3), resume=True))
    assert done.unchanged
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["seal", "tidy"])
def test_a_join_that_was_killed_is_joined_again(models, tmp_path, monkeypatch, at):
    out, join = tmp_path / "out", replace(RUN, join=True)
    for number in (1, 2):
        merging(models, out, replace(RUN, part=(number, 2)))
    merging(models, one := tmp_path.with_name(f"{tmp_path.name}-one") / "out")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Before the output has its name, and after that.
        patch.setattr(*((written, "seal") if at == "seal" else (Writer, "_remove")), stop)
        with pytest.raises(KeyboardInterrupt):
            merging(models, out, join)
    if at == "seal":
        with pytest.raises(CheckpointError, match="is being joined; continue with join=True"):
            merging(models, out, replace(RUN, part=(1, 2), resume=True))
    assert merging(models, out, replace(join, resume=True)).unchanged == (at == "tidy")
    assert files(out) == files(one)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("out", "run", "why"),
    [
        ("out.npz", {}, "part divides the files of an output, but .* is written as one"),
        ("out", {"format": "orbax"}, "is written as one"),
        ("out", {"shard_bytes": 10**6}, "is written as one"),
        ("out", {"shard_bytes": 3000}, r"has \d files that can be parted.*shard_bytes"),
    ],
)
def test_outputs_of_fewer_files_than_parts_are_refused(models, tmp_path, out, run, why):
    refused(why, models, tmp_path / out, replace(RUN, part=(1, 9), **run))
    assert not [*tmp_path.iterdir()]


def test_statistics_of_another_output_are_not_read(tmp_path):
    (tmp_path / "parts/1").mkdir(parents=True)
    made = []

    def compute():
        made.append(np.full(2, len(made), np.float32))
        return [made[-1]]

    def gathered(fingerprint):
        head = {"fingerprint": fingerprint, "layout": "l", "versions": {"jax": "1"}}
        gathering = parts.Gathering(tmp_path, parts.Part(1, 1), {}, head, 0, print)
        return gathering.gather("norms", [0], compute)[0][0].tolist()

    found = [gathered(fingerprint) for fingerprint in ("a", "a", "b", "b", "a")]
    assert found == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2]]


def test_numbers_of_parts_are_checked():
    for part in [(0, 2), (3, 2), (1, 0), (1,), (1.0, 2)]:
        with pytest.raises(ValueError, match="part: expected a number from 1"):
            RunOptions(part=part)
    with pytest.raises(ValueError, match="part and join: expected only one"):
        RunOptions(part=(1, 2), join=True)


def test_other_operations_refuse_parts_before_they_read(models, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError

    monkeypatch.setattr(StoredTensor, "read", read)
    for run in (RunOptions(part=(1, 2)), RunOptions(join=True)):
        with pytest.raises(CheckpointError, match="this operation cannot be done in parts"):
            extract_adapter(models / "base", models / "a", tmp_path / "out", rank=2, run=run)
    assert not [*tmp_path.iterdir()]


def test_averages_are_made_in_parts(models, tmp_path):
    def average(out, run):
        average_checkpoints([models / "a", models / "b"], out, write_as="params", run=run)

    one, many, _ = both(tmp_path, 3, average)
    assert many == one


@pytest.mark.parametrize(
    ("name", "record"),
    [
        pytest.param(("grow", "a", "--width", "2x"), "growth.json", marks=pytest.mark.soak),
        pytest.param(("align", "a", "b"), "align.json", marks=pytest.mark.soak),
    ],
)
def test_networks_are_grown_and_aligned_in_parts(models, tmp_path, name, record, monkeypatch):
    """The networks are run when the parts are joined."""
    monkeypatch.chdir(models)
    words = [*name, "--shard-size", "1KB", "--quiet"]

    def run(out, *more):
        assert cli.main([*words[:2], *more, *words[2:], str(tmp_path / out / "out")]) == 0

    run("one")
    for number in (1, 2):
        run("many", "--part", f"{number}/2")
    run("many", "--join")
    one = files(tmp_path / "one" / "out")
    assert json.loads(one[record])["agreement"]
    assert files(tmp_path / "many" / "out") == one


def test_a_part_says_for_whom_it_waits(models, tmp_path, monkeypatch):
    """It waits as long as another part makes progress, and then gives up."""
    out, said = tmp_path / "out", []
    method = SUMS
    clock = itertools.count()
    monkeypatch.setattr(parts.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(parts.time, "monotonic", lambda: float(next(clock)))
    sign = parts.place(tmp_path / ".out.partial", 2) / parts.ALIVE

    def progress(done, total, what):
        said.append(what)
        if len(said) == 5:
            sign.parent.mkdir()
            sign.write_bytes(b"")

    with pytest.raises(WaitedError):
        merging(models, out, replace(RUN, part=(1, 2), wait=8, progress=progress), method)
    assert {*said} == {"waiting for statistics of part 2 of 2"}
    # Eight ticks from the first check, and eight more from the sign of progress.
    assert len(said) in range(10, 15)


def test_nothing_is_left_of_a_part_that_found_bad_values(models, tmp_path):
    arrays = small_checkpoints.tensors(1) | {"lm_head.weight": np.full((20, 16), np.nan, "f")}
    save_checkpoint(tmp_path / "bad", arrays, shard_bytes=1000)
    for number, fails in ((1, False), (2, True)):
        run = replace(RUN, part=(number, 2))
        if fails:
            with pytest.raises(MergeError, match="NaN or infinity in lm_head"):
                merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=run)
        else:
            merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=run)
    with pytest.raises(CheckpointError, match="unfinished: part 2 of 2"):
        merge_checkpoints([tmp_path / "bad"], tmp_path / "out", run=replace(RUN, join=True))
