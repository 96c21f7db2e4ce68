"""Comparison of models before a merge: streamed statistics equal those of the trees and are
printed.
"""

import itertools
import json
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_networks import GOLDEN, model
from small_checkpoints import save, tuned

from sail_jax import architectures, methods, probe
from sail_jax.checkpoint import CheckpointError, compare_checkpoints
from sail_jax.checkpoint.operations import comparing, trying
from sail_jax.cli import compare_figure, merge_odds
from sail_jax.cli.compare import FIGURE, described, render
from sail_jax.cli.main import main
from sail_jax.drawing import style

CONFIG = GOLDEN["llama"]["config"]
EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base and three models tuned from it, and the same as trees."""
    root = tmp_path_factory.mktemp("pairs")
    base = {name: np.asarray(x) for name, x in model("llama").params.items()}
    trees = {"base": base} | {n: tuned(base, i) for i, n in enumerate("ABC")}
    return {name: save(root / name, tree, CONFIG) for name, tree in trees.items()}, trees


@pytest.fixture
def call(capsys):
    def call(*argv):
        code = main(["inspect", *map(str, argv)])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("k", "piece"),
    [
        (3, 50),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, 1 << 20), (2, 50), (3, 1 << 20))),
    ],
)
def test_streamed_is_what_the_probe_finds(k, piece, saved, monkeypatch):
    folders, trees = saved
    monkeypatch.setattr(comparing, "PIECE", piece)
    monkeypatch.setattr(comparing, "FEW", min(piece, comparing.FEW))
    names = "ABC"[:k]
    found = compare_checkpoints([folders[n] for n in names], folders["base"])
    zero = jax.tree.map(np.zeros_like, trees["base"])
    for ours, origin in ((found.tasks, trees["base"]), (found.weights, zero)):
        theirs = probe.interference(origin, [trees[n] for n in names])
        assert ours is not None
        order = [theirs.leaves.index(n) for n in found.tensors]
        each = jax.tree.map(lambda x, order=order: np.asarray(x)[order], theirs.each)
        for mine, other in ((ours.total, theirs.total), (ours.each, each)):
            for a, b in zip(mine, other, strict=True):
                # sums of some hundreds of squares in float32, in another order
                np.testing.assert_allclose(a, b, rtol=50 * EPS, atol=50 * EPS)
    assert found.tasks is not None
    assert found.base_norms is not None
    size = np.sqrt(sum((x.astype(float) ** 2).sum() for x in trees["base"].values()))
    np.testing.assert_allclose(np.linalg.norm(found.base_norms), size, rtol=50 * EPS)
    np.testing.assert_allclose(found.relative_norms, found.tasks.total.norms / size, rtol=50 * EPS)
    everything = comparing.pooled(found.tasks, found.sizes, range(len(found.tensors)))
    for a, b in zip(everything, found.tasks.total, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)  # the same sums, in float64
    assert not found.differences
    assert (found.equal == np.eye(k, dtype=bool)).all()


def test_unrelated_changes_show_the_baseline(tmp_path):
    """Independent Gaussian changes: signs differ with probability 1 - 2^(1 - k), cosines are
    N(0, 1 / n); |z| < 4."""
    n = 40_000
    base = {"w": np.random.default_rng(9).standard_normal((n // 100, 100)).astype(np.float32)}
    folders = [save(tmp_path / str(i), tuned(base, i)) for i in range(3)]
    found = compare_checkpoints(folders, save(tmp_path / "base", base))
    expected = described(found)["tasks"]["unrelated sign conflict"]
    assert found.tasks is not None
    assert expected == 0.75
    z = (float(found.tasks.total.sign_conflict) - expected) / np.sqrt(expected * (1 - expected) / n)
    assert abs(z) < 4
    for i, j in itertools.combinations(range(3), 2):
        assert abs(found.tasks.total.cosines[i, j]) * np.sqrt(n) < 4


@pytest.mark.slow
def test_half_precision_is_read_as_it_is(tmp_path):
    rng = np.random.default_rng(0)
    trees = [{"w": rng.standard_normal((8, 9)).astype(jnp.bfloat16)} for _ in range(3)]
    folders = [save(tmp_path / str(i), tree) for i, tree in enumerate(trees)]
    found = compare_checkpoints(folders[1:], folders[0])
    theirs = probe.interference(trees[0], trees[1:]).total
    assert found.tasks is not None
    np.testing.assert_allclose(found.tasks.total.cosines, theirs.cosines, atol=50 * EPS)


@pytest.mark.slow
def test_without_a_base_there_are_no_task_vectors(saved):
    folders, _ = saved
    found = compare_checkpoints([folders["A"], folders["B"]])
    assert found.tasks is None
    assert found.base_norms is None
    with pytest.raises(ValueError, match="task vectors need a base"):
        _ = found.relative_norms
    said = render({**described(found), "verdict": ["so"]})
    assert "without --base there are no task vectors" in said
    assert "sign conflict 0" not in said


def changed(saved, tmp_path, **tensors):
    """A with some tensors replaced; None omits one."""
    tree = {k: v for k, v in {**saved[1]["A"], **tensors}.items() if v is not None}
    return save(tmp_path / "changed", tree, CONFIG)


BAD = {
    "shape": (
        {"model.norm.weight": np.ones(9, np.float32)},
        r"'model.norm.weight' is float32\[8\]",
    ),
    "missing": ({"model.norm.weight": None}, r"changed lacks the tensor 'model.norm.weight'"),
    "more": ({"extra": np.ones(3, np.float32)}, r"A lacks the tensor 'extra'"),
    "nan": ({"model.norm.weight": np.full(8, np.nan, np.float32)}, r"not finite"),
    "huge": ({"model.norm.weight": np.full(8, 1e200)}, r"overflow float64"),
    "integers": ({"model.norm.weight": np.ones(8, np.int32)}, r"but int32\[8\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_named(case, saved, tmp_path, call):
    tensors, says = BAD[case]
    other = changed(saved, tmp_path, **tensors)
    with pytest.raises(CheckpointError, match=says):
        compare_checkpoints([saved[0]["A"], other])
    code, _, err = call(saved[0]["A"], other)
    assert code == 2
    assert err.count("\n") == 1


def test_squares_beyond_float32_are_compared(saved, tmp_path):
    """For a checkpoint multiplied by 2^80 or 2^-70, only the norms differ."""
    tree = saved[1]["A"]
    for k in (80, -70):
        scaled = {n: np.ldexp(x, k) for n, x in tree.items()}
        found = compare_checkpoints([saved[0]["A"], save(tmp_path / str(k), scaled, CONFIG)])
        assert found.weights.total.cosines[0, 1] == pytest.approx(1, abs=50 * EPS)
        lengths = found.weights.total.norms
        assert math.ldexp(lengths[1], -k) == pytest.approx(lengths[0], rel=50 * EPS)


def test_one_model_twice(saved, tmp_path, call):
    folders, trees = saved
    with pytest.raises(CheckpointError, match="given twice"):
        compare_checkpoints([folders["A"], folders["A"]])
    with pytest.raises(CheckpointError, match="given twice"):
        compare_checkpoints([folders["A"], folders["B"]], folders["A"])
    with pytest.raises(CheckpointError, match="at least two"):
        compare_checkpoints([folders["A"]])
    copy = save(tmp_path / "copy", trees["A"], CONFIG)
    code, out, _ = call(folders["A"], copy, "--base", folders["base"])
    assert code == 0
    assert "hold the same values" in out


def test_differences_of_config_and_tokenizer_are_told(saved, tmp_path):
    folders, trees = saved
    other = save(
        tmp_path / "other", trees["B"], CONFIG | {"rms_norm_eps": 1e-3, "use_cache": False}
    )
    for folder, ids in ((folders["A"], {"a": 0, "b": 1}), (other, {"a": 1, "b": 0})):
        (folder / "vocab.json").write_text(json.dumps(ids))
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}, "added_tokens": []})
        )
    found = compare_checkpoints([folders["A"], other])
    said = "\n".join(found.differences)
    assert "'rms_norm_eps' is 1e-06" in said
    assert "use_cache" not in said
    assert "2 of 2 tokens" in said
    for name in ("vocab.json", "tokenizer.json"):
        (folders["A"] / name).unlink()


@pytest.mark.slow
def test_the_command(saved, tmp_path, call):
    folders, trees = saved
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (6, 8))
    data, record, out = tmp_path / "d.npz", tmp_path / "r.json", tmp_path / "figure"
    np.savez(data, tokens=tokens)
    code, said, err = call(
        folders["A"], folders["B"], "--base", folders["base"], "--data", data, "--json", record,
        "--out", out,
    )  # fmt: skip
    assert (code, err) == (0, "  the models and their average, on 6 examples\n")
    about = json.loads(record.read_text())
    assert said.rstrip().endswith(str(out / FIGURE))
    assert "\n".join(about["verdict"]) in said
    assert (out / FIGURE).read_bytes()[:4] == b"\x89PNG"
    # the loss of the average, by hand
    forward: Any = architectures.of(CONFIG).logits
    logits = jax.jit(lambda p: forward(p, CONFIG, tokens))
    average = methods.linear()([trees["A"], trees["B"]])

    def loss(out):
        logs = jax.nn.log_softmax(out[:, :-1])
        return -float(jnp.take_along_axis(logs, jnp.asarray(tokens[:, 1:])[..., None], -1).mean())

    # a mean of 42 terms of order 3
    slack = 20 * EPS * loss(logits(average))
    assert abs(about["data"]["average"] - loss(logits(average))) < slack
    for name, found in zip("AB", about["data"]["losses"], strict=True):
        assert abs(found - loss(logits(trees[name]))) < slack
    both = (logits(trees["A"]) + logits(trees["B"])) / 2
    assert abs(about["data"]["ensemble"] - loss(both)) < slack
    assert call(folders["A"], folders["B"], "--json", data)[0] == 2  # no record: kept
    assert call(folders["A"], folders["B"], "--draft")[0] == 2
    code, _, err = call(folders["A"], "--base", folders["base"])
    assert (code, "two checkpoints or more" in err) == (2, True)


EXAMPLES = {
    "neither": ({"x": np.ones((2, 3))}, "expected 'tokens' or 'inputs'"),
    "both": ({"tokens": np.ones((2, 3), int), "inputs": np.ones((2, 3))}, "expected 'tokens' or"),
    "floating tokens": ({"tokens": np.ones((2, 3))}, "expected integers"),
    "one example": ({"tokens": np.ones((1, 3), int)}, "n >= 2"),
    "labels": ({"tokens": np.ones((2, 3), int), "labels": np.ones(3, int)}, "'labels': expected"),
    "nan": ({"inputs": np.full((2, 3), np.nan)}, "not finite"),
    "a pickle": ({"tokens": np.array([["a", None]], object)}, "never unpickled"),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_examples_that_are_none(case, tmp_path):
    arrays, says = EXAMPLES[case]
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(CheckpointError, match=says):
        trying.read_examples(tmp_path / "d.npz")


def test_too_many_examples_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trying, "MOST", 100)
    np.savez(tmp_path / "d.npz", tokens=np.ones((20, 3), np.int64))
    with pytest.raises(CheckpointError, match=r"expected an \.npz of at most"):
        trying.read_examples(tmp_path / "d.npz")
    np.save(tmp_path / "d.npy", np.ones((2, 3)))
    with pytest.raises(CheckpointError, match=r"d\.npy"):
        trying.read_examples(tmp_path / "d.npy")


def test_examples_that_do_not_fit_the_model(saved):
    folders, _ = saved
    pair = [folders["A"], folders["B"]]
    with pytest.raises(CheckpointError, match="expected 0 to 16, got 0 to 17"):
        trying.try_average(pair, trying.Examples(np.array([[0, 17], [1, 2]]), None))
    with pytest.raises(CheckpointError, match="do not fit outputs"):
        trying.try_average(pair, trying.Examples(np.ones((2, 3), int), np.zeros(2, int)))
    with pytest.raises(CheckpointError, match="cannot be run"):
        trying.try_average(pair, trying.Examples(np.ones((2, 3, 4, 4)), None))


@pytest.mark.slow
def test_the_figure_is_labelled_and_inside():
    rng = np.random.default_rng(0)
    groups = [
        {"layer": str(i), "module": f"self_attn.{m}_proj", "cosine": c, "sign conflict": s}
        for i in range(24)
        for m, c, s in zip("qkvo", rng.uniform(-1, 1, 4), rng.uniform(0, 1, 4), strict=True)
    ]
    figure = compare_figure.draw(groups, 2)
    figure.canvas.draw()
    page = figure.bbox
    for ax in figure.axes:
        for label in (*ax.get_xticklabels(), *ax.get_yticklabels(), ax.title, ax.xaxis.label):
            box = label.get_window_extent()
            if label.get_text():
                assert page.x0 <= box.x0
                assert box.x1 <= page.x1


def test_names_that_look_like_mathematics_are_drawn():
    names = [r"a$\frac$", "$x$", "d" * 9999]
    groups = [{"layer": name, "module": name, "cosine": 0.5} for name in names]
    figure = compare_figure.draw(groups, 2)
    assert figure.get_size_inches().max() < 20
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[:2] == [r"a\$\frac\$", r"\$x\$"]
    assert style.png(figure)[:4] == b"\x89PNG"


def test_the_record_is_written_before_the_figure(saved, tmp_path, call):
    """An error in the figure does not affect the record."""
    (tmp_path / "file").write_text("")
    models = [saved[0][name] for name in "AB"]
    for some in (models[:1], models):
        record = tmp_path / f"{len(some)}.json"
        assert call(*some, "--out", tmp_path / "file", "--json", record)[0] == 1
        assert record.exists()


@pytest.mark.parametrize(("size", "at_once"), [(20, True), (200, False)])
def test_packed_tensors_are_held_one_after_another(size, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(comparing, "_HELD", 1000)
    whole, both, held, most = comparing._compared, threading.Barrier(2), [], []

    def compared(with_base, column):
        held.append(column)
        if at_once:
            both.wait(20)  # an error if no other thread comes
        most.append(len(held))
        rows = whole(with_base, column)
        held.pop()
        return rows

    monkeypatch.setattr(comparing, "_compared", compared)
    arrays: Any = {f"w{k}": np.full(size, k + 1, np.float32) for k in range(4)}
    for name in "ab":
        np.savez_compressed(tmp_path / f"{name}.npz", **arrays)
    compare_checkpoints([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert len(most) == 4
    assert at_once or max(most) == 1


@pytest.mark.parametrize(
    ("apart", "row"), [(0.0, 0), (9e-4, 0), (1.1e-3, 1), (0.011, 2), (0.09, 2), (0.11, 3), (1.2, 3)]
)
def test_odds_are_those_of_merges_that_lay_as_far_apart(apart, row):
    cosine, band = 1 - apart, merge_odds.TABLE[row]
    record = {"models": ["a", "b"], "pairs": [], "differences": [], "weights": {"cosine": cosine}}
    first = merge_odds.verdict(record)[0]
    assert f" {sum(band.merges)} earlier merges" in first
    assert f" in {sum(band.averaging)} of them" in first
