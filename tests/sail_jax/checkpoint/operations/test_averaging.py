"""Averages of runs on disk: values in float64, other files, and restoring by trainers."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import many_devices
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import sharded_runs
import tensorstore as ts
from flax.training.train_state import TrainState

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    average_checkpoints,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.formats import rewritten, stores
from sail_jax.checkpoint.formats.written import RECORD
from sail_jax.checkpoint.operations import averaging as module
from sail_jax.checkpoint.operations.running import planned
from sail_jax.cli.main import main

STEPS = (100, 200, 300, 400)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1)))


def trained(seed=0):
    """A state whose tree has dictionaries, lists, tuples and empty states."""
    rng = np.random.default_rng(seed)
    params = {
        "a": [{"kernel": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)}, {"b": jnp.ones(3)}],
        "half": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
    }
    return TrainState.create(apply_fn=None, params=params, tx=TX)


@jax.jit
def stepped(state, t):
    return state.apply_gradients(grads=jax.tree.map(lambda x: jnp.sin(x * t), state.params))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of orbax as a trainer leaves it, and its states."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    state, states = trained(), []
    with ocp.CheckpointManager(folder) as manager:
        for step in STEPS:
            state = stepped(state, step)
            states.append(state)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"at": step})
            )
            manager.save(step, args=args, custom_metadata={"step": step})
    return folder, states


def mean(arrays, c):
    return sum(w * np.asarray(x, np.float64) for w, x in zip(c, arrays, strict=True))


def assert_average(got, states, c, field="params"):
    """Each term is rounded to float32 twice, then the sum to its dtype."""
    trees = [jax.tree.leaves(getattr(state, field)) for state in states]
    for x, arrays in zip(jax.tree.leaves(got), zip(*trees, strict=True), strict=True):
        assert x.dtype == arrays[0].dtype
        eps = float(jnp.finfo(x.dtype).eps)
        error = np.abs(np.asarray(x, np.float64) - mean(arrays, c))
        size = max(np.abs(np.asarray(a, float)).max() for a in arrays)
        assert error.max() <= (eps / 2 + len(c) * 2.0**-24 * 2) * size


def restored(out, step=400):
    with ocp.CheckpointManager(out) as manager:
        assert manager.latest_step() == step
        state = ocp.args.StandardRestore(trained())
        return manager.restore(
            step, args=ocp.args.Composite(state=state, data=ocp.args.JsonRestore())
        )


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stored(item):
    """Every key of a store with its bytes."""
    spec = {"driver": "ocdbt", "base": f"file://{item}/"}
    store = ts.KvStore.open(spec).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


@pytest.mark.slow
def test_a_trainer_restores_the_run(run, tmp_path):
    folder, states = run
    done = average_checkpoints(f"{folder}@200:400", tmp_path / "out", shape="1-sqrt")
    c = (np.sqrt(np.arange(1, 4)) - np.sqrt(np.arange(3))) / np.sqrt(3)
    np.testing.assert_allclose(done.weights, c, rtol=1e-15)
    got = restored(tmp_path / "out")
    assert got["data"] == {"at": 400}
    assert jax.tree.structure(got["state"]) == jax.tree.structure(trained())
    assert_average(got["state"].params, states[1:], c)
    same = jax.tree.map(np.array_equal, got["state"].opt_state, states[-1].opt_state)
    assert all(jax.tree.leaves(same))
    assert got["state"].step == states[-1].step
    assert "out" not in {p.name for p in folder.iterdir()}


@pytest.mark.slow
def test_all_else_is_byte_for_byte(run, tmp_path):
    folder, _ = run
    average_checkpoints(f"{folder}@last:2", tmp_path / "out")
    old, new = folder / "400", tmp_path / "out" / "400"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"400", RECORD}
    beside = [{n: b for n, b in files(p).items() if "ocdbt" not in n and "/d/" not in n}
              for p in (old, new)]  # fmt: skip
    assert "state/_METADATA" in beside[0]
    assert "_CHECKPOINT_METADATA" in beside[0]
    assert beside[0] == beside[1]
    before, after = stored(old / "state"), stored(new / "state")
    assert before.keys() == after.keys()
    changed = {key for key in before if before[key] != after[key]}
    # only b, which is all ones, may be unchanged by chance
    assert changed <= {k for k in before if k.startswith("params.") and ".z" not in k}
    assert {key.rpartition("/")[0] for key in changed} >= {"params.a.0.kernel", "params.half"}


@pytest.mark.slow
def test_state_of_the_optimiser(run, tmp_path):
    folder, states = run
    average_checkpoints(folder, tmp_path / "zero", state="zero")
    got = restored(tmp_path / "zero")["state"]
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(got.opt_state))
    assert got.step == 4
    # chunks of zeros are stored, since a reader may take missing ones for damage
    assert stored(tmp_path / "zero/400/state").keys() == stored(folder / "400/state").keys()
    assert not load_checkpoint(tmp_path / "zero")["opt_state/1/0/count"]
    c = np.full(4, 1 / 4)
    average_checkpoints(folder, tmp_path / "moments", state="average-moments")
    got = restored(tmp_path / "moments")["state"]
    adam, old = got.opt_state[1][0], [state.opt_state[1][0] for state in states]
    assert adam.count == 4
    assert_average(adam.mu, old, c, "mu")
    assert_average(adam.nu, old, c, "nu")
    assert min(x.min() for x in jax.tree.leaves(adam.nu)) >= 0


def test_parameters_alone(run, tmp_path):
    folder, states = run
    average_checkpoints(folder, tmp_path / "p.safetensors", weights=[0, 0, 1, 3])
    got = load_checkpoint(tmp_path / "p.safetensors")
    assert list(got) == ["params/a/0/kernel", "params/a/1/b", "params/half"]
    kernels = [state.params["a"][0]["kernel"] for state in states]
    np.testing.assert_allclose(
        got["params/a/0/kernel"], mean(kernels, [0, 0, 1 / 4, 3 / 4]), rtol=1e-6
    )
    done = average_checkpoints(folder, tmp_path / "npz", write_as="params",
                               run=RunOptions(format="npz", select="params/a"))  # fmt: skip
    assert list(load_checkpoint(tmp_path / "npz")) == ["params/a/0/kernel", "params/a/1/b"]
    assert done.gets["params/half"] == "left out"


def test_resumed(run, tmp_path, monkeypatch):
    """Stopped after one tensor; its work is kept, and the result equals that of a single run."""
    folder, _ = run
    read = module.Averaged.read

    def stops(self, out, start=0):
        if self.name == "params/half":
            raise KeyboardInterrupt
        return read(self, out, start)

    one = RunOptions(threads=1)
    monkeypatch.setattr(module.Averaged, "read", stops)
    with pytest.raises(KeyboardInterrupt):
        average_checkpoints(folder, tmp_path / "out", run=one)
    assert not (tmp_path / "out").exists()
    seen = []

    def counts(self, out, start=0):
        seen.append(self.name)
        return read(self, out, start)

    monkeypatch.setattr(module.Averaged, "read", counts)
    with pytest.raises(CheckpointError, match="same run; continue it with resume=True"):
        average_checkpoints(folder, tmp_path / "out", run=one)
    done = average_checkpoints(folder, tmp_path / "out", run=RunOptions(threads=1, resume=True))
    assert not done.unchanged
    assert "params/half" in seen
    assert len(set(seen)) < 3
    average_checkpoints(folder, tmp_path / "again")
    assert stored(tmp_path / "out/400/state") == stored(tmp_path / "again/400/state")
    assert average_checkpoints(folder, tmp_path / "out", run=RunOptions(resume=True)).unchanged
    with pytest.raises(CheckpointError, match="exists already"):
        average_checkpoints(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"exists already with a different "):
        average_checkpoints(folder, tmp_path / "out", shape="wma", run=RunOptions(resume=True))


def test_stopped_while_it_is_copied(run, tmp_path, monkeypatch):
    folder, states = run
    rewrite = stores.rewrite

    def stops(*args):
        rewrite(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(stores, "rewrite", stops)
    with pytest.raises(KeyboardInterrupt):
        average_checkpoints(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    average_checkpoints(folder, tmp_path / "out", run=RunOptions(resume=True))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert_average(restored(tmp_path / "out")["state"].params, states, np.full(4, 1 / 4))


def hugging_face(folder):
    """checkpoint-* of a trainer: weights in bfloat16, and what belongs to its state."""
    rng = np.random.default_rng(0)
    trees = []
    for step in (10, 20, 60):
        trees.append({"w": rng.normal(size=(4, 3)).astype(ml_dtypes.bfloat16), "n": np.arange(2)})
        extras = {"config.json": b"{}", "trainer_state.json": b'{"step": %d}' % step}
        place = folder / f"checkpoint-{step}"
        metadata = {"format": "pt"}
        save_checkpoint(place, trees[-1], extras=extras, metadata=metadata, shard_bytes=24)
        (place / "optimizer.pt").write_bytes(b"moments of step %d" % step)
    return trees


def test_folders_of_hugging_face(tmp_path):
    trees = hugging_face(tmp_path / "run")
    pattern = str(tmp_path / "run" / "checkpoint-*")
    done = average_checkpoints(pattern, shape="linear")
    assert done.out == tmp_path / "run-average"
    # distances 10 and 40, and their mean 25: 10/75, 40/75, 25/75
    c = np.array([10, 40, 25]) / 75
    np.testing.assert_allclose(done.weights, c)
    got = load_checkpoint(done.out)
    want = mean([tree["w"] for tree in trees], c)
    assert got["w"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(got["w"].astype(float), want, rtol=2.0**-8)
    assert {p.name for p in done.out.iterdir()} == {"model.safetensors", "config.json", RECORD}
    average_checkpoints(pattern, tmp_path / "whole", shape="linear", write_as="run")
    copied = tmp_path / "whole" / "checkpoint-60"
    np.testing.assert_array_equal(load_checkpoint(copied)["w"], got["w"])
    old, new = files(tmp_path / "run" / "checkpoint-60"), files(copied)
    assert len([n for n in old if n.endswith(".safetensors")]) == 2
    (shard,) = (n for n in old if old[n] != new[n])
    assert new["optimizer.pt"] == b"moments of step 60"
    header = 8 + int.from_bytes(old[shard][:8], "little")
    assert old[shard][:header] == new[shard][:header]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    hugging_face(tmp_path / "run")
    (tmp_path / "secret").write_bytes(b"of another user")
    (tmp_path / "run" / "checkpoint-60" / "optimizer.pt").unlink()
    (tmp_path / "run" / "checkpoint-60" / "optimizer.pt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"optimizer.pt is a link that leads out"):
        average_checkpoints(tmp_path / "run", tmp_path / "out", write_as="run")
    assert not (tmp_path / "out").exists()


def test_levanter(tmp_path):
    """A folder for each array, one of zeros; other files stay."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"step-{step}"
        for name, value in (("model/w", 2.0 * step), ("model/z", 0.0), ("opt_state/mu/w", 1.0)):
            spec = {"driver": "zarr3", "kvstore": f"file://{folder}/{name}/"}
            array = ts.open(spec, create=True, dtype=ts.float32, shape=[3, 2]).result()
            array.write(np.full((3, 2), value, np.float32)).result()
        (folder / "metadata.json").write_text(f'{{"step": {step}}}')
    average_checkpoints(tmp_path / "run")
    old, new = (tmp_path / "run" / "step-2"), (tmp_path / "run-average" / "step-2")
    assert (load_checkpoint(new)["model/w"] == 3).all()
    changed = {n for n, b in files(new).items() if files(old).get(n) != b}
    # TensorStore left out the chunk of zeros, which a reader may take for a fault
    assert changed == {"model/w/c/0/0", "model/z/c/0/0"}


def test_links_to_folders_are_not_copied(run, tmp_path):
    """Links to a parent folder would be copied as 2^40 folders."""
    folder, _ = run
    shutil.copytree(folder, tmp_path / "run")
    newest = max((tmp_path / "run").iterdir(), key=lambda path: int(path.name))
    for name in ("a", "b"):
        (newest / name).symlink_to(".")
    with pytest.raises(CheckpointError, match=f"{newest}/[ab] is a link to a folder, which is not"):
        average_checkpoints(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_list_of_files(tmp_path, monkeypatch):
    """msgpack files of a state, oldest first; the outcome is a copy of the last but for params."""
    from flax import serialization

    # A tensor in several runs of bytes, which is copied in parts that end within them.
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 20)
    monkeypatch.setattr(rewritten, "_BLOCK", 12)
    paths = []
    for k, value in enumerate((1.0, 2.0, 6.0)):
        paths.append(tmp_path / f"{'abc'[k]}.msgpack")
        tree = {"step": 7 * k, "params": {"w": value * np.arange(9, dtype=np.float32)}}
        paths[-1].write_bytes(serialization.msgpack_serialize(tree))
    average_checkpoints(paths, tmp_path / "out.msgpack", write_as="run", shape="wma")
    got = serialization.msgpack_restore((tmp_path / "out.msgpack").read_bytes())
    assert got["step"] == 14
    want = np.arange(9) * (1 * 1 + 2 * 2 + 3 * 6) / 6
    np.testing.assert_allclose(got["params"]["w"], want, rtol=1e-6)


def test_one_checkpoint_is_itself(run, tmp_path):
    folder, states = run
    average_checkpoints(f"{folder}@last", tmp_path / "out")
    got = restored(tmp_path / "out")["state"]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got.params, states[-1].params)))


def test_window(run):
    folder, _ = run
    with planned(module.AverageRequest(folder, window=200)) as ready:
        assert [step.number for step in ready.steps] == [300, 400]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": RunOptions(select="opt_state")}, "'opt_state/.*' is the state of an optimiser"),
        ({"run": RunOptions(select="step")}, "no floating tensor is selected"),
        ({"state": "drop"}, "state: a trainer cannot restore .* got 'drop'"),
        ({"state": "zero", "write_as": "params"}, "state: parameters are .* got 'zero'"),
        ({"weights": [1, 2]}, "weights: expected 4 finite numbers"),
        ({"weights": [1, -1, 1, -1]}, "weights: expected a sum other than 0"),
        ({"weights": [1, -1, 1, 1], "state": "average-moments"}, "state: a second moment may not"),
        ({"weights": [1] * 4, "shape": "wma"}, "weights and shape: expected only one"),
        ({"window": 0}, "window: expected a number of steps, got 0"),
        ({"write_as": "model"}, "write_as: expected one of 'run', 'params', .* got 'model'"),
        ({"run": RunOptions(format="npz")}, "format: a run keeps its own, got 'npz'"),
        ({"run": RunOptions(max_memory=1 << 20)}, "max_memory: params/.* needs"),
    ],
)
def test_refusals(run, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        average_checkpoints(run[0], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_outputs_within_the_run(run):
    folder, _ = run
    for name, words in (("500", "would become a step of the run"), ("400", "exists already")):
        with pytest.raises(CheckpointError, match=words):
            average_checkpoints(folder, folder / name)


def test_checkpoints_that_differ(tmp_path):
    for step, size in ((1, 3), (2, 2)):
        save_checkpoint(tmp_path / f"run/ckpt_{step}", {"w": np.zeros(size, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"'w' is float32\[3\] in .*ckpt_1, but float32\[2\] in .*ckpt_2"
    ):
        average_checkpoints(tmp_path / "run", tmp_path / "out")
    save_checkpoint(tmp_path / "run/ckpt_3", {"w": np.array([np.nan, 0], np.float32)})
    with pytest.raises(CheckpointError, match=r"NaN or infinity in w of .*ckpt_3"):
        average_checkpoints(tmp_path / "run@2:3", tmp_path / "out2")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_pieces_and_dtypes(dtype, monkeypatch):
    """Blocks of 7 entries, read from any place; the definition in float64."""
    from merge_cases import Held

    from sail_jax.checkpoint.sources import averaged

    monkeypatch.setattr(averaged, "ENTRIES", 7)
    monkeypatch.setattr(averaged, "_SLICE", 3)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(5, 9)).astype(dtype) for _ in range(3)]
    c = [0.2, 0.3, 0.5]
    tensor = averaged.Averaged([Held("w", x) for x in arrays], c)
    got = np.empty(45, dtype)
    for start, end in ((0, 10), (30, 40), (10, 30), (40, 45)):
        tensor.read(got[start:end], start)
    assert tensor._formed is None, "memory is kept after the last entry"
    want = mean([x.reshape(-1) for x in arrays], c)
    eps = max(float(ml_dtypes.finfo(dtype).eps) / 2, 4 * 2.0**-24 if dtype != np.float64 else 0)
    np.testing.assert_allclose(got.astype(float), want, rtol=0, atol=4 * 4 * eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_negative_zeros_and_least_numbers_are_their_own_averages(dtype):
    from merge_cases import Held

    from sail_jax.checkpoint.sources import averaged

    values = np.array([-0.0, 0.0, ml_dtypes.finfo(dtype).smallest_subnormal, 3.0], dtype)
    got = np.empty(4, dtype)
    averaged.Averaged([Held("w", values)] * 3, [0.2, 0.3, 0.5]).read(got)
    assert got.tobytes() == values.tobytes()


@pytest.mark.filterwarnings("error")
def test_nan_is_averaged_without_a_warning_where_it_is_allowed(tmp_path):
    for step, value in ((1, np.inf), (2, -np.inf), (3, np.nan)):
        tensors = {"w": np.array([value, 1.0], np.float32)}
        save_checkpoint(tmp_path / f"run/checkpoint-{step}", tensors)
    done = average_checkpoints(tmp_path / "run", run=RunOptions(allow_nonfinite=True))
    np.testing.assert_array_equal(load_checkpoint(done.out)["w"], [np.nan, 1.0])


def test_what_only_older_checkpoints_have_and_running_statistics_are_named(tmp_path, capsys):
    w = np.ones(2, np.float32)
    for step in (1, 2, 3):
        tensors = {"w": w, "bn.running_mean": w} | ({"extra": w, "more": w} if step < 3 else {})
        save_checkpoint(tmp_path / f"run/checkpoint-{step}", tensors)
    with pytest.warns(UserWarning, match="left out|again") as said:
        done = average_checkpoints(tmp_path / "run", tmp_path / "out")
    assert [str(one.message) for one in said] == list(done.notes)
    a, b, c = done.notes
    for note, step in ((a, 1), (b, 2)):
        assert f"checkpoint-{step} has 'extra' and 1 more, which " in note
        assert note.endswith("checkpoint-3 lacks: left out")
    assert "'bn.running_mean': compute them again" in c
    assert main(["average", str(tmp_path / "run"), str(tmp_path / "again"), "--quiet"]) == 0
    assert capsys.readouterr().out.count("\nnote: ") == 3


def test_checkpoints_of_one_name_are_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a/last", "b/last", "b/first"):
        save_checkpoint(name, {"w": np.ones(2, np.float32)})
    assert main(["average", "a/last", "b/last", "out", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "a/last   0.500000" in said
    assert "b/last   0.500000" in said
    assert main(["average", "a/last", "b/first", "out", "--plan"]) == 0
    assert "\n last   0.500000" in capsys.readouterr().out


def test_command(run, tmp_path, capsys):
    folder, _ = run
    assert main(["average", str(folder), "--last", "2", "--plan", "--full"]) == 0
    out = capsys.readouterr().out
    assert "300   0.500000   1.000000" in out
    assert "n_eff 2.00, mean age 0.50 checkpoints, 50 steps" in out
    assert "params/half: average\n" in out
    assert f"output: {folder}-average, as run" in out
    given = ["average", str(folder), str(tmp_path / "o"), "--steps", "100:300:100", "--quiet"]
    assert main([*given, "--as", "safetensors", "--weights", "1,1,2"]) == 0
    assert open_checkpoint(tmp_path / "o").format == "safetensors"
    for wrong, words in (
        (["--state", "drop"], "--state: a trainer cannot restore"),
        (["--shape", "ema"], "--decay: expected a number between 0 and 1"),
        (["--steps", "few"], "--steps: expected A:B:S"),
        (["--params", "weights"], "selects no leaf"),
    ):
        assert main(["average", str(folder), str(tmp_path / "no"), *wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.soak
def test_runs_of_four_devices(tmp_path):
    """Trainers' trees, sharded over four devices, averaged here, and restored on four devices."""

    def on_four_devices(command):
        found = subprocess.run(
            [sys.executable, sharded_runs.__file__, command, str(tmp_path)],
            env=many_devices.environment(4), capture_output=True, text=True,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[-3000:]
        return found.stdout

    on_four_devices("save")
    for name in sharded_runs.NAMES:
        average_checkpoints(tmp_path / name, weights=sharded_runs.WEIGHTS)
    assert json.loads(on_four_devices("restore").splitlines()[-1]) == list(sharded_runs.NAMES)
