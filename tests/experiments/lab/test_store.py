"""A stored run is read back bit for bit, or an error contains the file."""

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from cells import diagonal, slow

from experiments.lab import stages, store
from experiments.lab.progress import reporting
from experiments.lab.sweep import sweep
from sail_jax import disk
from sail_jax.drawing import style


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = 3
    points: int = 6
    rates: tuple[float, ...] = (0.1, 0.3)


def _squares(n):
    return {"square": jnp.asarray(n, jnp.float32) ** 2, "part": {"third": np.asarray(n) / 3}}


def _run(config, stage=store.direct):
    noise = stage("noise", lambda: {"e": np.random.default_rng(config.seed).normal(size=6)})
    parts = sweep(_squares, np.arange(config.points), stage, "draws", chunk=2)
    last = stage("last", lambda: {"sum": parts["square"].sum() + noise["e"].sum()})
    return xr.Dataset(
        {
            "square": ("n", parts["square"]),
            "third": ("n", parts["part"]["third"] + noise["e"], {"units": "days"}),
            "gap": ("n", np.where(np.arange(6) > 3, np.nan, 1.0)),
            "flag": ("n", np.arange(6) % 2 == 0),
            "word": ("n", np.array(["α", "b", "", "dd", "e e", "f"])),
            "sum": last["sum"],
        },
        {"n": np.arange(6)},
    )


def _plot(dataset):
    fig, axes = style.figure()
    axes[0, 0].plot(dataset["n"], dataset["square"])
    return {"squares": fig}


FAKE = SimpleNamespace(Config=Config, run=_run, plot=_plot, summary=lambda ds: "done")


def _complete(path, resume=False, experiment=FAKE, config=Config()):
    with store.Run.open(path, "fake", config, resume=resume) as run:
        return store.complete(run, experiment, config)[0]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "run"
    _complete(path)
    return path


@pytest.fixture
def finished(first_run, tmp_path):
    return Path(shutil.copytree(first_run, tmp_path / "run"))


def _same(a, b):
    """Checks that bits, dtypes, names and coordinates are equal, except for provenance and its
    times.
    """
    assert a.drop_attrs(deep=False).identical(b.drop_attrs(deep=False))
    for name in a.variables:
        if a[name].dtype.kind != "O":
            assert a[name].values.tobytes() == b[name].values.tobytes()


def _flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset % len(data)] ^= 0x10
    file.write_bytes(data)


@pytest.mark.slow
def test_result_round_trip(finished):
    with store.reopen(finished) as run:
        back = store.load_result(run.path, run.record)
    fresh = _run(Config())
    for name in fresh.variables:
        np.testing.assert_array_equal(back[name].values, fresh[name].values)
    assert back["third"].attrs == {"units": "days"}
    assert back["square"].dtype == np.float32
    assert back["flag"].dtype == bool
    config = json.loads(back.attrs["config"])
    assert config == {"seed": 3, "points": 6, "rates": [0.1, 0.3]}
    assert back.attrs["experiment"] == "fake"
    assert back.attrs["seed"] == 3
    assert {"jax", "jaxlib", "numpy", "python", "sail-jax"} == json.loads(
        back.attrs["versions"]
    ).keys()
    assert back.attrs["wall_seconds"] > 0
    assert (finished / "squares.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished.rglob("*.part"))


@pytest.mark.slow
def test_redrawing_gives_the_same_picture_without_running(finished):
    def run(config, stage):
        raise AssertionError("a finished run was run again")

    before = (finished / "squares.png").read_bytes()
    (finished / "squares.png").unlink()
    _complete(finished, resume=True, experiment=SimpleNamespace(run=run, plot=_plot))
    assert (finished / "squares.png").read_bytes() == before


ARRAYS = {
    "deep": {"er": {"f64": np.arange(6.0).reshape(2, 3)}},
    "f32": np.float32(1 / 3),
    "bf16": jnp.arange(3, dtype=jnp.bfloat16),
    "c64": np.array([1 + 2j, np.nan], np.complex64),
    "i8": np.array([[-128, 127]], np.int8),
    "u8": np.frombuffer(b"text", np.uint8),
    "bool": np.array([True, False]),
    "nan": np.array([np.nan, -0.0, np.inf]),
    "python": 3,
    "text": np.array(["α", ""]),
    "file": "one word",
}


def test_stage_round_trip(tmp_path):
    expected = store.direct("all", lambda: ARRAYS)
    with store.Run.open(tmp_path, "fake", Config()) as run:
        fresh = run.stage("all", lambda: ARRAYS)
    with store.Run.open(tmp_path, "fake", Config(), resume=True) as run:
        kept = run.stage("all", lambda: pytest.fail("computed again"))
    assert _bits(expected) == _bits(fresh) == _bits(kept)
    assert list(expected) == list(kept)  # a resumed run also restores the order of the keys


def test_an_unfinished_stage_keeps_its_folder(tmp_path):
    def compute(folder):
        done = folder / "done"
        if not done.exists():
            done.write_text("half")
            (folder / "one").mkdir()
            (folder / "one" / "metrics.jsonl").write_text("{}")
            raise KeyboardInterrupt
        return {"found": len(done.read_text())}

    with store.Run.open(tmp_path, "fake", Config()) as run, pytest.raises(KeyboardInterrupt):
        reporting(run.stage)("long", compute, folder=True)
    for _ in range(2):
        with store.Run.open(tmp_path, "fake", Config(), resume=True) as run:
            kept = run.path / "work" / "long"
            found = reporting(run.stage)("long", compute, folder=True)
        assert found["found"] == 4
        assert not kept.parent.exists()
        assert (run.path / "metrics" / "long" / "one" / "metrics.jsonl").read_text() == "{}"
        kept.mkdir(parents=True)  # as if the process had died just before removing it


def test_what_is_refused_at_once_leaves_its_folder_to_others(tmp_path):
    with pytest.raises(ValueError, match="no data"), store.Run.open(tmp_path, "fake", Config()):
        raise ValueError("no data")
    deep = tmp_path / "results" / "fake"
    with pytest.raises(ValueError, match="no data"), store.Run.open(deep, "fake", Config()):
        raise ValueError("no data")
    assert not list(tmp_path.iterdir())  # existing files are kept, and created ones are removed
    with store.Run.open(tmp_path, "fake", Config(seed=4)) as run:
        run.stage("one", lambda: {"x": 1})
    with (
        pytest.raises(ValueError, match="late"),
        store.Run.open(tmp_path, "fake", Config(seed=4), resume=True),
    ):
        raise ValueError("late")
    assert store.Run.open(tmp_path, "fake", Config(seed=4), resume=True).stage(
        "one", lambda: pytest.fail("computed again")
    )


def test_without_a_store_there_is_no_folder():
    assert store.direct("long", lambda folder: {"none": folder is None}, folder=True)["none"]


def test_a_long_stage_is_told_in_whole_lines(capsys):
    reporting(store.direct)("long", lambda _: {"one": 1}, folder=True)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "  long ..."
    assert re.fullmatch(r"  long: [\d.]+ s", last)


def _bits(tree):
    return {
        key: _bits(leaf) if isinstance(leaf, dict) else (leaf.dtype, leaf.shape, leaf.tobytes())
        for key, leaf in tree.items()
    }


@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        ([1, 2], TypeError, "dict of arrays, got list"),
        ({}, ValueError, "empty"),
        ({"a": {}}, ValueError, "a/"),
        ({"a": {"b/c": 1}}, ValueError, "a/'b/c'"),
        ({"..": 1}, ValueError, "'..'"),
        ({3: 1}, ValueError, "3"),
        ({"a": {"b": b"text"}}, TypeError, "a/b"),
        ({"a": None}, TypeError, "a"),
        ({"a": np.array([1, "x"], object)}, TypeError, "object"),
        ({"a": np.zeros((0, 3))}, ValueError, r"\(0, 3\)"),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_stage_refuses_what_it_could_not_give_back(tmp_path, tree, error, says, kept):
    stage = store.Run.open(tmp_path, "fake", Config()).stage if kept else store.direct
    with pytest.raises(error, match=says):
        stage("s", lambda: tree)


@pytest.mark.parametrize(
    "name", ["../up", "/etc/x", "", ".hidden", "a\nb", "a\0b", "x" * 81, "a\\b"]
)
def test_stage_names_that_are_not_plain_text_are_refused(tmp_path, name):
    with (
        store.Run.open(tmp_path, "fake", Config()) as run,
        pytest.raises(ValueError, match="stage name"),
    ):
        run.stage(name, lambda: {"x": 1})
    assert os.listdir(tmp_path) == ["config.json"]


def test_stage_names_never_leave_their_folder(tmp_path):
    names = ["a/../../b", "draws 3/20", "draws 3-20", "a b", "a+b", "1.5", "z=0,5"]
    with store.Run.open(tmp_path, "fake", Config()) as run:
        for i, name in enumerate(names):
            run.stage(name, lambda i=i: {"x": i})
        with pytest.raises(ValueError, match="twice"):
            run.stage("a b", lambda: {"x": 0})
    assert len(list((tmp_path / "stages").glob("*.npz"))) == len(names)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "stages"]


class _Crash(BaseException):
    pass


def test_a_crash_between_write_and_rename_leaves_the_old_state(tmp_path, monkeypatch):
    file = tmp_path / "f"
    disk.write_atomic(file, b"old")

    def crash(*_):
        raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(_Crash):
            disk.write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_process_that_dies_at_once_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / ".config.json.4.part").write_text("{")
    with store.Run.open(tmp_path, "fake", Config()):
        pass


@pytest.mark.slow
def test_a_process_that_dies_while_saving_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    fresh = _complete(tmp_path / "whole")
    for target in ("draws 2%2F3.npz", "draws 2%2F3.npz.json", "result.nc", "config.json"):
        path = tmp_path / target.replace("%", "")
        replace = os.replace

        def die(src, dst, target=target, replace=replace):
            if os.path.basename(dst) == target:
                raise _Crash
            replace(src, dst)

        run = store.Run.open(path, "fake", Config())
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", die)
            # a process that has died cleans nothing up
            patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
            with run, pytest.raises(_Crash):
                store.complete(run, FAKE, Config())
        assert list(path.rglob("*.part"))
        with pytest.raises(disk.RefusedError, match="unfinished"):
            store.reopen(path)
        _same(_complete(path, resume=True), fresh)
        assert not list(path.rglob("*.part"))


@pytest.mark.slow
def test_interrupted_and_resumed_is_bit_identical(tmp_path):
    fresh = _complete(tmp_path / "whole")
    computed = []

    def stopping(at):
        def run(config, stage):
            def counted(name, compute):
                def noted():
                    if name == at:
                        raise KeyboardInterrupt
                    computed.append(name)
                    return compute()

                return stage(name, noted)

            return _run(config, counted)

        return SimpleNamespace(run=run, plot=_plot)

    path = tmp_path / "parts"
    for at in ("noise", "draws 2/3", "last"):
        with pytest.raises(KeyboardInterrupt):
            _complete(path, resume=True, experiment=stopping(at))
    resumed = _complete(path, resume=True, experiment=stopping(None))
    assert computed == ["noise", "draws 1/3", "draws 2/3", "draws 3/3", "last"]  # each once
    _same(resumed, fresh)


@pytest.mark.parametrize("where", [0.5, *slow(0, 0.1, 0.3, 0.7, 0.9, 1)])
def test_a_flipped_byte_of_the_result_is_noticed(finished, where):
    file = finished / "result.nc"
    _flip(file, int(where * (file.stat().st_size - 1)))
    with pytest.raises(disk.StoreError, match=r"result\.nc is damaged"):
        _complete(finished, resume=True)


@pytest.mark.parametrize(("name", "size"), diagonal(["result.nc", "config.json"], [-1, 0, 1, 100]))
def test_a_truncated_file_is_noticed(finished, name, size):
    data = (finished / name).read_bytes()
    (finished / name).write_bytes(data[:size] if size >= 0 else data[:-2])
    with pytest.raises(disk.StoreError, match=f"{name} is damaged"):
        _complete(finished, resume=True)


def test_a_longer_or_missing_result_is_noticed(finished):
    file = finished / "result.nc"
    data = file.read_bytes()
    file.write_bytes(data + b"\0")
    with pytest.raises(disk.StoreError, match=r"result\.nc is damaged"):
        _complete(finished, resume=True)
    file.unlink()
    with pytest.raises(disk.StoreError, match=r"result\.nc is missing"):
        _complete(finished, resume=True)


def test_every_flipped_byte_of_the_record_is_noticed_or_harmless(finished):
    file = finished / "config.json"
    data = file.read_bytes()
    for offset in range(0, len(data), 7):
        _flip(file, offset)
        if file.read_bytes() == data:
            continue
        with pytest.raises(disk.StoreError, match=r"config\.json"):
            store.reopen(finished)
        file.write_bytes(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "\xff",
        '{"sha256": 3}',
    ],
)
def test_a_record_that_is_not_one_is_refused(finished, text):
    (finished / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(disk.StoreError, match=r"config\.json"):
        store.reopen(finished)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"seed": "3"},
        {"status": "unfinished"},
        {"result": None},
        {"result": {"bytes": "9", "sha256": ""}},
        {"extra": 1},
    ],
)
def test_a_record_with_wrong_fields_is_refused_even_if_sealed(finished, change):
    file = finished / "config.json"
    record = json.loads(file.read_text())
    del record["sha256"]
    disk.write_record(file, {**record, **change})
    with pytest.raises(disk.StoreError, match=r"config\.json"):
        store.reopen(finished)


def test_a_huge_record_is_not_read(finished):
    with open(finished / "config.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(disk.StoreError, match=r"config\.json is damaged: it has"):
        store.reopen(finished)


def test_every_byte_of_a_stage_is_checked(tmp_path):
    with store.Run.open(tmp_path, "fake", Config()) as run:
        run.stage("all", lambda: ARRAYS)
    arrays, record = tmp_path / "stages" / "all.npz", tmp_path / "stages" / "all.npz.json"
    assert set((tmp_path / "stages").iterdir()) == {arrays, record}

    def refused(says):
        with (
            store.Run.open(tmp_path, "fake", Config(), resume=True) as run,
            pytest.raises(disk.StoreError, match=f"{says}.*remove .*all.* to compute it again"),
        ):
            run.stage("all", lambda: pytest.fail("computed again"))

    for file in (arrays, record):
        data = file.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 50)):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            refused(file.name)
        for damaged in (b"", data[:-2], data + b"\0"):
            file.write_bytes(damaged)
            refused(file.name)
        file.write_bytes(data)
    data = arrays.read_bytes()
    arrays.unlink()
    refused("all.npz is missing")
    arrays.write_bytes(data)
    for file in (arrays, record):
        file.rename(file.with_name(file.name.replace("all", "other")))
    with (
        store.Run.open(tmp_path, "fake", Config(), resume=True) as run,
        pytest.raises(disk.StoreError, match="holds stage 'all', not 'other'"),
    ):
        run.stage("other", lambda: pytest.fail("computed again"))


def test_arrays_without_their_record_are_computed_again(tmp_path):
    with store.Run.open(tmp_path, "fake", Config()) as run:
        run.stage("all", lambda: ARRAYS)
    (tmp_path / "stages" / "all.npz.json").unlink()
    with store.Run.open(tmp_path, "fake", Config(), resume=True) as run:
        assert run.stage("all", lambda: {"x": 1})["x"] == 1


def _refused(path, says, config=Config(), resume=False, name="fake"):
    with pytest.raises(disk.RefusedError, match=says) as caught:
        store.Run.open(path, name, config, resume=resume)
    assert "\n" not in str(caught.value)


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        _refused(tmp_path, "not empty and holds no run", resume=resume)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_an_existing_run_is_refused_without_resume(tmp_path, finished):
    _refused(finished, "finished; choose another --out, or redraw")
    with store.Run.open(tmp_path / "new", "fake", Config()):
        pass
    _refused(tmp_path / "new", "add --resume")


def test_another_run_is_refused_field_by_field(tmp_path):
    with store.Run.open(tmp_path, "fake", Config()):
        pass
    other = Config(points=8, rates=(0.1, 0.5))
    says = r"config.points was 6, now 8; config.rates was \[0.1, 0.3\], now \[0.1, 0.5\]"
    for resume in (False, True):
        _refused(tmp_path, says, other, resume)
    _refused(tmp_path, 'experiment was "fake", now "fame"', resume=True, name="fame")


def test_other_versions_are_refused(tmp_path, monkeypatch):
    with store.Run.open(tmp_path, "fake", Config()):
        pass
    now = store.provenance()
    now["versions"]["jax"] = "99.0"
    monkeypatch.setattr(store, "provenance", lambda: now)
    _refused(tmp_path, r"versions.jax was .*, now \"99.0\"", resume=True)


def test_a_run_that_others_may_have_laid_out_is_refused(tmp_path, monkeypatch):
    """Its stages would be used as this run's, and results would be written through its links."""
    folder = tmp_path / "run"
    with store.Run.open(folder, "fake", Config()) as run:
        run.stage("one", lambda: {"x": np.zeros(2)})
    folder.chmod(0o777)
    _refused(folder, "run can be written to by all users", resume=True)
    folder.chmod(0o700)
    (folder / "stages").rename(tmp_path / "elsewhere")
    (folder / "stages").symlink_to(tmp_path / "elsewhere")
    _refused(folder, "stages is a link, which no run leaves there", resume=True)
    (folder / "stages").unlink()
    (tmp_path / "elsewhere").rename(folder / "stages")
    with store.Run.open(folder, "fake", Config(), resume=True):
        pass
    monkeypatch.setattr(disk, "_USER", lambda: os.geteuid() + 1)
    _refused(folder, "run belongs to another user", resume=True)


def test_a_file_where_a_folder_should_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    _refused(tmp_path / "file", "file is not a directory")
    _refused(tmp_path / "file" / "below", "cannot write to .*below")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk, "create", refuse)
    _refused(tmp_path, "cannot write to .*Read-only file system; choose another place")


def test_a_run_holds_its_folder(tmp_path):
    with store.Run.open(tmp_path, "fake", Config()):
        _refused(tmp_path, "in use by another process", resume=True)
    store.Run.open(tmp_path, "fake", Config(), resume=True)


def test_a_full_disk_is_one_line_with_a_remedy(tmp_path, monkeypatch):
    with store.Run.open(tmp_path, "fake", Config()) as run:
        monkeypatch.setattr(os, "fsync", _full)
        with pytest.raises(disk.StoreError) as caught:
            run.stage("s", lambda: {"x": 1})
        assert str(tmp_path) in str(caught.value)
        assert "No space left" in str(caught.value)
        assert "resume=True" in str(caught.value)
        assert not any((tmp_path / "stages").iterdir())
        with pytest.raises(disk.StoreError, match=r"result\.nc: No space left"):
            run.finish(_run(Config()))
    assert os.listdir(tmp_path / "stages") == []
    assert not (tmp_path / "result.nc").exists()


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_figures_stay_in_the_folder(tmp_path):
    with (
        store.Run.open(tmp_path, "fake", Config()) as run,
        pytest.raises(ValueError, match="figure name"),
    ):
        run.draw({"../escape": b""})


def test_a_dataset_that_netcdf_cannot_hold_is_named(tmp_path):
    with (
        store.Run.open(tmp_path, "fake", Config()) as run,
        pytest.raises(TypeError, match="z: expected numbers or text, got complex"),
    ):
        run.finish(xr.Dataset({"z": np.complex64(1j)}))


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 9])
def test_a_sweep_does_not_depend_on_its_chunks(chunk):
    whole = _squares(np.arange(5))
    parts = sweep(_squares, np.arange(5), chunk=chunk)
    np.testing.assert_array_equal(parts["square"], whole["square"])
    np.testing.assert_array_equal(parts["part"]["third"], whole["part"]["third"])


@pytest.mark.parametrize(
    ("points", "chunk", "says"),
    [
        ([1], 0, "chunk must be at least 1, got 0"),
        ([], 1, "points"),
        ([1, 2], 1, "draws.*length 1"),
    ],
)
def test_a_sweep_names_what_is_wrong(points, chunk, says):
    with pytest.raises(ValueError, match=says):
        sweep(lambda n: {"x": np.ones(2)}, points, name="draws", chunk=chunk)


def _crafted(path, change):
    """Changes the result of a run, and updates its checksum."""
    import h5py

    with h5py.File(path / "result.nc", "a") as file:
        change(h5py, file)
    record = json.loads((path / "config.json").read_text())
    del record["sha256"]
    data = (path / "result.nc").read_bytes()
    record["result"] = {"bytes": len(data), "sha256": disk.sha256(data)}
    disk.write_record(path / "config.json", record)


def _packed(h5py, file):
    del file["gap"]
    file.create_dataset("gap", (1 << 40,), "f8", chunks=(1 << 16,), compression="gzip")


def _virtual(h5py, file):
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("/dev/zero", "x", (3,), "f8")
    file.create_virtual_dataset("x", layout)


STRANGE = {
    "unwritten": lambda h5py, file: file.create_dataset("huge", (1 << 45,), "f8"),
    "packed": _packed,
    "outside": lambda h5py, file: file.create_dataset(
        "x", (3,), "u1", external=[("/dev/zero", 0, 3)]
    ),
    "virtual": _virtual,
    "linked": lambda h5py, file: file.__setitem__("x", h5py.ExternalLink("/dev/zero", "x")),
    "alias": lambda h5py, file: file.__setitem__("x", h5py.SoftLink("/square")),
    "group": lambda h5py, file: file.create_group("x"),
}


def test_a_result_that_was_sealed_by_a_stranger_is_refused(finished):
    right = (finished / "result.nc").read_bytes()
    for name, change in STRANGE.items():
        (finished / "result.nc").write_bytes(right)
        _crafted(finished, change)
        with pytest.raises(disk.StoreError, match=r"result\.nc is damaged: ") as error:
            _complete(finished, resume=True)
        assert "\n" not in str(error.value), name


def test_a_result_that_lacks_what_is_drawn_is_one_line(finished):
    _crafted(finished, lambda h5py, file: file.__delitem__("square"))
    with pytest.raises(disk.StoreError, match=r"run: this version cannot show .*square"):
        _complete(finished, resume=True)


@pytest.mark.parametrize("fault", ["packed", "no archive", "below an array", "objects"])
def test_a_stage_that_was_sealed_by_a_stranger_is_refused(tmp_path, fault):
    file = tmp_path / "s.npz"
    stages.write(file, "s", {"a": np.ones(3)}, 1.0)
    record = json.loads((tmp_path / "s.npz.json").read_text())
    if fault == "packed":
        np.savez_compressed(file, a=np.zeros(3))
    elif fault == "no archive":
        file.write_bytes(b"x")
    elif fault == "objects":
        np.savez(file, a=np.array([{}], object), allow_pickle=True)
    else:
        np.savez(file, **{"a": np.ones(3), "a/b": np.ones(3)})
    del record["sha256"]
    record["arrays"] = {"bytes": file.stat().st_size, "sha256": disk.sha256(file.read_bytes())}
    disk.write_record(tmp_path / "s.npz.json", record)
    with pytest.raises(disk.StoreError, match=r"s\.npz is damaged: ") as error:
        stages.read(file, "s")
    assert "\n" not in str(error.value)
