"""`sail-jax merge`, `grow` and `inspect` of the steps of a training run."""

import logging

import jax
import numpy as np
import optax
import pytest

from sail_jax.checkpoint import RunOptions, load_checkpoint, merge_checkpoints, save_checkpoint
from sail_jax.cli import main as cli

ocp = pytest.importorskip("orbax.checkpoint")
W = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps of a training with Adam, as a CheckpointManager keeps them."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    rule = optax.adamw(optax.constant_schedule(0.1))
    with ocp.CheckpointManager(folder) as manager:
        for i, w in enumerate(W):
            opt_state = jax.tree.map(lambda x, i=i: x + i, rule.init({"w": w}))
            state = {"params": {"w": w}, "opt_state": opt_state, "step": 100 * (i + 1)}
            manager.save(100 * (i + 1), args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return folder


@pytest.fixture
def merge(tmp_path, capsys):
    def merged(*models, more="", method="linear", options=()):
        listed = "".join(f"  - {{model: '{m}', parameters: {{weight: 1}}}}\n" for m in models)
        (tmp_path / "r.yaml").write_text(f"merge_method: {method}\nmodels:\n{listed}{more}\n")
        out = tmp_path / "out"
        code = cli.main(["merge", str(tmp_path / "r.yaml"), str(out), "--quiet", *options])
        return code, capsys.readouterr(), out

    return merged


@pytest.mark.slow
def test_a_range_of_steps_is_merged_by_its_params(run, merge):
    code, printed, out = merge(f"{run}@last:3", options=["--format", "orbax"])
    assert code == 0
    rest = f"'opt_state/0/count' and 4 more; copied from the last model, {run / '400'}"
    selected = "selected: params of a TrainState, 1 of 6 leaves"
    assert printed.err.splitlines() == [f"note: {selected}", f"note: not selected: {rest}"]
    got, last = load_checkpoint(out), load_checkpoint(run / "400")
    np.testing.assert_allclose(got.pop("params/w"), W[1:].mean(0), atol=1e-6)
    assert got.keys() == last.keys() - {"params/w"}
    assert all(got[name].tobytes() == last[name].tobytes() for name in got)


@pytest.mark.slow
def test_the_step_that_is_taken_is_printed(run, merge):
    code, printed, out = merge(f"{run}@100", run, more="rest: first")
    assert code == 0
    assert f"{run}: step 400 is read, of 4 checkpoints, steps 100 to 400" in printed.err
    got = load_checkpoint(out)
    np.testing.assert_allclose(got["params/w"], (W[0] + W[3]) / 2, atol=1e-6)
    assert (got["step"], got["opt_state/0/count"]) == (100, 0)


@pytest.mark.slow
def test_what_happens_to_the_rest(run, merge, tmp_path):
    code, printed, out = merge(f"{run}/[12]00", more="rest: drop")
    assert (code, [*load_checkpoint(out)]) == (0, ["params/w"])
    assert "lost: opt_state/0/count and 4 more: not selected" in printed.err
    code, printed, _ = merge(f"{run}/[12]00", more="rest: error")
    assert (code, "are not selected, which rest: error refuses" in printed.err) == (2, True)
    select = RunOptions(select="params/*")
    merge_checkpoints([run / "100", run], tmp_path / "python", rest="drop", run=select)
    assert [*load_checkpoint(tmp_path / "python")] == ["params/w"]


def test_an_optimiser_is_not_merged(run, merge):
    more = f"base_model: '{run}@100'\nselect: '*'"
    models = f"{run}@200", f"{run}@300"
    code, printed, out = merge(*models, more=more, method="task_arithmetic")
    assert (code, out.exists()) == (2, False)
    assert "'opt_state/0/count' is the state of an optimiser" in printed.err
    assert "select: params leaves it out" in printed.err
    code, printed, _ = merge(*models, options=["--params", "opt_state"])
    assert (code, "select: params leaves it out" in printed.err) == (2, True)
    code, printed, _ = merge(*models, options=["--params", "weights"])
    assert (code, "'weights' selects no leaf" in printed.err) == (2, True)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("@last:9", "got '@last:9'"),
        ("@700", "step 700 is missing"),
        ("/x*", "no checkpoint matches"),
    ],
)
def test_steps_that_are_not_there(run, merge, choice, message):
    code, printed, _ = merge(f"{run}{choice}", run)
    assert (code, len(printed.err.splitlines())) == (2, 1)
    assert message in printed.err


def test_inspect_shows_what_is_selected(run, capsys):
    assert cli.main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "1 tensors, 6 parameters" in shown
    assert "note: step 400 is read, of 4 checkpoints, steps 100 to 400" in shown
    assert "note: selected: params of a TrainState, 1 of 6 leaves" in shown


def test_growth_leaves_the_optimiser_out_and_prints_so(tmp_path, capsys):
    weights = {"params/in": W[0].reshape(3, 2), "params/out": W[1].reshape(2, 3)}
    rest = {"opt_state/0/nu/in": W[0].reshape(3, 2), "step": np.int64(7)}
    save_checkpoint(tmp_path / "state.npz", weights | rest)
    axes = '{"params/in": "hidden x*", "params/out": "y hidden*"}'
    spaces = "{hidden: relu, x: outer, y: outer}"
    (tmp_path / "spec.yaml").write_text(f"axes: {axes}\nspaces: {spaces}\n")
    spec = ["--spec", str(tmp_path / "spec.yaml"), "--to", "hidden=6", "--quiet"]
    assert cli.main(["grow", str(tmp_path / "state.npz"), str(tmp_path / "out"), *spec]) == 0
    printed = capsys.readouterr().err
    assert "note: left out, as not selected: 'opt_state/0/nu/in' and 1 more" in printed
    got = load_checkpoint(tmp_path / "out")
    assert {name: x.shape for name, x in got.items()} == {
        "params/in": (6, 2),
        "params/out": (2, 6),
    }


def test_no_warnings_of_other_libraries(run, merge, caplog, tmp_path):
    """Orbax logs by absl, which prints to stderr."""
    before = logging.getLogger("absl").filters[:], logging.getLogger("absl").level
    with caplog.at_level(logging.DEBUG, "absl"):
        code, printed, _ = merge(f"{run}@last:2", options=["--format", "orbax"])
        save_checkpoint(tmp_path / "x", {"w": np.ones(3)}, format="orbax")
        load_checkpoint(tmp_path / "x")
    assert (code, caplog.records) == (0, [])
    assert "WARNING" not in printed.err
    assert (logging.getLogger("absl").filters, logging.getLogger("absl").level) == before
