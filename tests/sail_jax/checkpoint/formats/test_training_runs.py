"""Checkpoints of trainers: nested containers, chunks, steps, and Levanter's format."""

import collections
import itertools
import json
import math
import random
import shutil

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from sail_jax.checkpoint.formats import runs, stores
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.formats.open import load_checkpoint, open_checkpoint
from sail_jax.checkpoint.formats.stores import StoredArray
from sail_jax.checkpoint.output.writer import save_checkpoint
from sail_jax.merging.tensors import held
from sail_jax.trees import leaf_paths

ocp = pytest.importorskip("orbax.checkpoint")
ts = pytest.importorskip("tensorstore")
Pair = collections.namedtuple("Pair", "p q")


def _same(found, tree):
    expected = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        leaf = np.asarray(leaf)
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        assert found[name].tobytes() == leaf.tobytes(), name


def refused(read, path, message):
    with pytest.raises(CheckpointError, match=message):
        read(path)


def _tree(rng, depth=3):
    """A random tree: containers of every kind within one another, and leaves of several types."""
    kinds = ["array", "scalar", "none", "empty"]
    kind = rng.choice(["dict", "list", "tuple", "pair", *kinds][: 8 if depth < 3 else 4])
    if depth == 0 or kind in kinds:
        dtype = rng.choice([np.float32, ml_dtypes.bfloat16, np.int32])
        kind = rng.choice(kinds) if kind not in kinds else kind
        array = np.asarray(np.arange(6).reshape(2, 3), dtype) + rng.randrange(9)
        empty = rng.choice([{}, [], (), optax.EmptyState()])
        return {"array": array, "scalar": rng.randrange(99), "none": None, "empty": empty}[kind]
    children = [_tree(rng, depth - 1) for _ in range(2 if kind == "pair" else rng.randint(1, 3))]
    if kind == "dict":
        return {rng.choice("ab") + str(i): child for i, child in enumerate(children)}
    return Pair(*children) if kind == "pair" else (list if kind == "list" else tuple)(children)


@pytest.mark.slow
def test_containers_within_one_another(tmp_path):
    rng = random.Random(0)
    with ocp.PyTreeCheckpointer() as checkpointer:
        for i in range(8):
            tree = {"top": _tree(rng), "w": np.ones(2, np.float32)}
            checkpointer.save(tmp_path / str(i), tree)
            _same(load_checkpoint(tmp_path / str(i)), tree)


@pytest.mark.parametrize("how", ["standard", "zarr3", "no_ocdbt", "manager"])
def test_states_of_optax(tmp_path, how):
    params = {"w": np.ones((3, 2), np.float32), "l": [{"b": np.ones(2)}, {"c": np.zeros(2)}]}
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 5))
    )
    state = {"params": params, "opt_state": rule.init(params), "step": 3}
    path = tmp_path / "x"
    if how == "manager":
        with ocp.CheckpointManager(path) as manager:
            for step in (9, 10):
                args = ocp.args.StandardSave({**state, "step": step})
                manager.save(step, args=args)
            manager.wait_until_finished()
        state["step"] = 10
    elif how == "standard":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
    else:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=how != "no_ocdbt", use_zarr3=how == "zarr3")
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, state)
    _same(load_checkpoint(path), state)


@pytest.mark.parametrize("shape", [(7, 5), (1, 9, 4), (40,), ()])
def test_a_tensor_is_read_by_blocks(tmp_path, monkeypatch, shape):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    args = {"w": ocp.SaveArgs(chunk_byte_size=32)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": array}, save_args=args)
    reads, read = [], StoredArray._read
    monkeypatch.setattr(
        StoredArray, "_read", lambda self, a, b: reads.append((a, b)) or read(self, a, b)
    )
    with open_checkpoint(tmp_path / "x") as checkpoint:
        tensor = checkpoint.tensors["w"]
        assert isinstance(tensor, StoredArray)
        for count in (1, 3, array.size):
            for start in range(0, array.size, count):
                out = np.zeros(min(count, array.size - start), np.float32)
                tensor.read(out, start)
                np.testing.assert_array_equal(out, array.reshape(-1)[start : start + count])
    # In pieces of 1 and of 3 entries each block was read once, and then all of them at once.
    blocks = max(end for _, end in reads)
    assert (blocks > 1) == bool(shape)
    assert sum(end - start for start, end in reads) <= 3 * blocks
    assert reads[-1] == (0, blocks)
    assert not tensor._last.held  # nothing is held after the last entry


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 80, 1 << 20])
def test_every_range_of_every_chunking_is_read(tmp_path, monkeypatch, run):
    """Rows that are larger than one read are read in separate blocks."""
    monkeypatch.setattr(stores, "_RUN", run)
    rng = np.random.default_rng(run)
    for i in range(12):
        shape = tuple(rng.integers(1, 5, size=rng.integers(0, 5)).tolist())
        chunks = [int(rng.integers(1, n + 1)) for n in shape]
        array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/step-{i}/w/"}
        made = {**spec, "metadata": {"chunks": chunks}}
        ts.open(made, create=True, dtype=ts.int16, shape=shape).result().write(array).result()
        (tmp_path / f"step-{i}/metadata.json").write_text("{}")
        with open_checkpoint(tmp_path / f"step-{i}") as checkpoint:
            tensor = checkpoint.tensors["w"]
            for start in range(array.size):
                for end in {start + 1, start + (array.size - start + 1) // 2, array.size}:
                    out = np.zeros(end - start, np.int16)
                    tensor.read(out, start)
                    np.testing.assert_array_equal(out, array.reshape(-1)[start:end])
            reach = [(first, end) for _, first, end in tensor.bands()]
            assert reach[0][0] == 0
            assert reach[-1][1] == array.size
            assert all(a[1] == b[0] for a, b in itertools.pairwise(reach))


def test_chunks_far_larger_than_their_array_are_refused(tmp_path):
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/step-1/w/"}
    chunks = {"metadata": {"chunks": [1 << 40]}}
    ts.open({**spec, **chunks}, create=True, dtype=ts.float32, shape=[3]).result()
    (tmp_path / "step-1/metadata.json").write_text("{}")
    refused(open_checkpoint, tmp_path / "step-1", "'w' has 12 bytes in chunks of 4398046511104")


def test_a_chunk_that_is_missing_is_an_error(tmp_path):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": np.ones(4, np.float32)})
    (tmp_path / "x/w/0").unlink()
    refused(load_checkpoint, tmp_path / "x", r"cannot read .*x: 'w'")


def test_a_key_cannot_lead_out_of_the_folder(tmp_path):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "out", {"w": np.ones(4, np.float32)})
        checkpointer.save(tmp_path / "x", {"w": np.ones(4, np.float32)})
    text = (tmp_path / "x/_METADATA").read_text()
    (tmp_path / "x/_METADATA").write_text(text.replace('"w"', '"../out/w"'))
    refused(open_checkpoint, tmp_path / "x", "not a valid name of an array")


def test_levanters_folders(tmp_path):
    tree = {"model": {"w": np.ones((2, 3), np.float32)}, "optimizer": {"mu": np.zeros(3)}}
    for path, leaf in {"model/w": tree["model"]["w"], "optimizer/mu": np.zeros(3)}.items():
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/run/step-20/{path}/"}
        store = ts.open(spec, create=True, dtype=leaf.dtype, shape=leaf.shape).result()
        store.write(leaf).result()
    (tmp_path / "run/step-20/metadata.json").write_text('{"step": 20}')
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.format == "levanter"
        assert checkpoint.step == "step 20 is read, of step 20 alone"
    _same(load_checkpoint(tmp_path / "run"), tree)
    assert load_checkpoint(tmp_path / "run/step-20/model").keys() == {"w"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps, one that is being written, and two that were not finished."""
    folder = tmp_path_factory.mktemp("run")
    for step in (200, 1000, 300):
        save_checkpoint(folder / f"ckpt_{step}", {"w": np.full(2, step)}, format="orbax")
    shutil.copytree(folder / "ckpt_300", folder / "ckpt_2000.orbax-checkpoint-tmp-77")
    shutil.copytree(folder / "ckpt_300", folder / "tmp-ckpt_2001")
    shutil.copytree(folder / "ckpt_300", folder / "ckpt_2002/default.orbax-checkpoint-tmp-78")
    shutil.copytree(folder / "ckpt_300", folder / "ckpt_2003")
    about = json.loads((folder / "ckpt_2003/_CHECKPOINT_METADATA").read_text())
    about["commit_timestamp_nsecs"] = None
    (folder / "ckpt_2003/_CHECKPOINT_METADATA").write_text(json.dumps(about))
    (folder / "plots_7").mkdir()
    return folder


def test_what_is_not_finished_is_no_step(run):
    assert [step.number for step in runs.steps(run)] == [200, 300, 1000]
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.step == "step 1000 is read, of 3 checkpoints, steps 200 to 1000"
        assert all("ckpt_1000" in str(path) for path in checkpoint.files)
    assert load_checkpoint(run)["w"].tolist() == [1000, 1000]


@pytest.mark.parametrize(
    ("choice", "numbers"),
    [
        ("", [200, 300, 1000]),
        ("@last", [1000]),
        ("@last:2", [300, 1000]),
        ("@300", [300]),
        ("@250:", [300, 1000]),
        (":300", None),
        ("@:300", [200, 300]),
        ("@200:300:100", [200, 300]),
        ("/ckpt_?00", [200, 300]),
        ("/ckpt_*@last:2", [300, 1000]),
    ],
)
def test_a_text_names_steps(run, choice, numbers):
    if numbers is None:
        refused(runs.named, f"{run}{choice}", "does not exist")
        return
    assert [step.number for step in runs.named(f"{run}{choice}")] == numbers


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("@400", "step 400 is missing: it has 3 checkpoints, steps 200 to 1000"),
        ("@200:1000:100", "step 400 is missing"),
        ("@last:4", "expected 1 to 3 of them, got '@last:4'"),
        ("@last:0", "got '@last:0'"),
        ("@200:1000:0", "a stride of 0"),
        ("@400:900", "matches none"),
        ("/nothing*", "no checkpoint matches"),
        ("/plots_7@last", "holds no numbered checkpoints"),
        ("@0:999999999999999999:1", "step 0 is missing"),
    ],
)
def test_a_step_that_is_not_there_is_an_error(run, choice, message):
    refused(runs.named, f"{run}{choice}", message)


def test_steps_hold_no_steps(tmp_path):
    """Links to the folder that holds them made this 2^40 paths."""
    loop = tmp_path / "loop"
    (loop / "9" / "9").mkdir(parents=True)
    for link in ("0", "1"):
        (loop / link).symlink_to(".")
    for folder in (loop, loop / "9", loop / "9" / "9"):
        (folder / "metadata.json").write_text("{}")
    save_checkpoint(loop / "9" / "9" / "8", {"w": np.ones(2)}, format="orbax")
    refused(open_checkpoint, loop, r"loop/9 holds no checkpoint .*: found 9, metadata")


def test_a_folder_of_everything_is_no_checkpoint(tmp_path, monkeypatch):
    """A home folder that happens to contain a metadata.json is not searched completely."""
    monkeypatch.setattr(stores, "_FOLDERS", 20)
    for i in range(30):
        (tmp_path / f"x{i}").mkdir()
    (tmp_path / "metadata.json").write_text("{}")
    refused(open_checkpoint, tmp_path, "more than 20 folders; no checkpoint has")


def test_one_checkpoint_of_several(run, tmp_path):
    assert load_checkpoint(f"{run}@200")["w"].tolist() == [200, 200]
    refused(open_checkpoint, f"{run}@last:2", "matches 2 checkpoints; expected one")
    for name in ("ckpt_1", "best_1"):
        save_checkpoint(tmp_path / name, {"w": np.ones(2)}, format="orbax")
    refused(open_checkpoint, tmp_path, r"of several names: choose one of .*best_\*, .*ckpt")
    (tmp_path / "odd@7").mkdir()
    save_checkpoint(tmp_path / "odd@7/model.safetensors", {"w": np.ones(2)})
    assert load_checkpoint(tmp_path / "odd@7").keys() == {"w"}  # what exists is taken as it is


def test_a_text_too_long_for_a_path_names_nothing():
    for text in ("n" * 5000, "n" * 5000 + "@last:2", "*" + "n" * 5000, "a\0b"):
        assert runs.several(text) == (":" in text or "*" in text)
        refused(runs.named, text, r"not exist|no checkpoint match|name too long")


def test_files_and_folders_of_hugging_face(tmp_path):
    for step in (500, 1500, 1000):
        save_checkpoint(tmp_path / f"checkpoint-{step}", {"w": np.full(2, float(step))})
        save_checkpoint(tmp_path / f"model-{step}.safetensors", {"w": np.full(2, float(step))})
    assert load_checkpoint(f"{tmp_path}@1000")["w"][0] == 1000
    found = runs.named(f"{tmp_path}/model-*.safetensors@last:2")
    assert [(step.number, step.path.suffix) for step in found] == [
        (1000, ".safetensors"),
        (1500, ".safetensors"),
    ]


@pytest.mark.parametrize(
    "shape",
    [(7, 5), (1, 9, 4), (40,), (), (0, 3), (3, 0), (1, 1), (3, 4, 5), (2, 40), (2, 3, 7, 2)],
)
def test_a_tensor_is_written_in_chunks_that_orbax_reads(tmp_path, monkeypatch, shape):
    """A chunk of any shape has at most `_CHUNK` bytes, and is read at once."""
    monkeypatch.setattr(stores, "_CHUNK", 32)
    monkeypatch.setattr(stores, "_RUN", 32)
    monkeypatch.setattr(stores, "_IN_FLIGHT", 40)  # two commits for the larger ones
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    save_checkpoint(tmp_path / "x", {"a/w": array, "b": np.full(1, 3, np.int8)}, format="orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "x")
    assert found["a"]["w"].tobytes() == array.tobytes()
    assert (found["a"]["w"].shape, found["b"].tolist()) == (shape, [3])
    _same(load_checkpoint(tmp_path / "x"), {"a": {"w": array}, "b": np.full(1, 3, np.int8)})
    with open_checkpoint(tmp_path / "x") as checkpoint:
        tensor = checkpoint.tensors["a/w"]
        assert held(tensor) <= 2 * 32
        assert math.prod(tensor._store.chunk_layout.read_chunk.shape or ()) * 4 <= 32
