"""Checkpoints aligned on disk: whole networks of known architectures, by table, by command."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from known_networks import GOLDEN, model
from small_checkpoints import save

from sail_jax import align, growth
from sail_jax.align import nested
from sail_jax.architectures import Rules
from sail_jax.basis.families import Family
from sail_jax.checkpoint import RunOptions, load_checkpoint, open_checkpoint
from sail_jax.checkpoint.operations.aligning import align_checkpoints
from sail_jax.checkpoint.recipe.parts import ALIGNMENT
from sail_jax.checkpoint.sources.aligned import align_maps, matchable
from sail_jax.cli.commands import align as align_command
from sail_jax.cli.main import main

EPS = float(jnp.finfo(jnp.float32).eps)


def hidden(name, seed=0):
    """The network with every inner space permuted, heads' units differently in each head."""
    m = model(name)
    within, random, maps = nested(m.spec), np.random.default_rng(seed), {}
    for s in m.spec.spaces:
        if "outer" in s.nonlinearity.split():
            continue
        count = m.spec.space(within[s.name]).size if s.name in within else 0
        each = [growth.permute(random.permutation(s.size)) for _ in range(count or 1)]
        maps[s.name] = jax.tree.map(lambda *x: np.stack(x), *each) if count else each[0]
    return jax.jit(lambda p, maps: align.change_blocks(p, m.spec, maps, within))(m.params, maps)


def test_recipes_take_what_alignment_takes():
    options = inspect.signature(align_maps).parameters.values()
    of_a_run = {"spec", "max_memory", "progress"}
    named = {one.name for one in options if one.kind is one.KEYWORD_ONLY}
    assert set(ALIGNMENT) == named - of_a_run


@pytest.fixture
def pair(tmp_path):
    def make(name, dtype="float32"):
        m, config = model(name), GOLDEN[name]["config"]
        sides = (m.params, hidden(name))
        return [
            save(tmp_path / side, jax.tree.map(lambda x: x.astype(dtype), params), config)
            for side, params in zip("ab", sides, strict=True)
        ]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", "float32"),
        ("llama", "bfloat16"),
        ("bert", "float32"),
    ],
)
def test_a_hidden_network_is_written_as_the_reference(name, dtype, pair, tmp_path):
    a, b = pair(name, dtype)
    # forward passes of one architecture only: each is compiled
    done = align_checkpoints(a, b, tmp_path / "out", certify=None if name == "llama" else False)
    one, other, out = map(load_checkpoint, (a, b, tmp_path / "out"))
    assert list(out) == list(other)
    assert any(not np.array_equal(one[k], other[k]) for k in one)
    for k in one:
        np.testing.assert_array_equal(out[k], one[k])  # gathers: to the last bit
        assert out[k].dtype == other[k].dtype
    before, after = done.aligned.distance
    assert before > 0.1
    assert after == 0
    assert not done.aligned.report.lost
    assert all(m.after == pytest.approx(1, abs=4 * EPS**0.5) for m in done.aligned.matches)
    assert any(m.moved for m in done.aligned.matches)
    assert [x.dtype for x in done.agreement] == ["float32", "bfloat16"][: 2 * (name == "llama")]
    assert all(x.preserved and x.mean <= x.largest for x in done.agreement)
    about = json.loads((tmp_path / "out" / "align.json").read_text())
    assert about["exact"] is (True if done.agreement else None)
    assert about["exactness"] == str(done.verdict)
    assert (about["exactness"] == "not run") == (not done.agreement)
    assert about["distance"]["after"] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == GOLDEN[name]["config"]
    notes = " ".join(done.aligned.notes)
    assert ("cls.predictions.transform.dense.weight reads and writes resid" in notes) == (
        name == "bert"
    )


@pytest.mark.slow
def test_similarities_are_cosines_and_distances_relative(pair):
    a, b = pair("llama")
    with open_checkpoint(a) as one, open_checkpoint(b) as two:
        found = align_maps(one, two, spaces="hidden.*", max_sweeps=1)
    assert set(found.maps) == {"hidden.0", "hidden.1"}
    x, y = load_checkpoint(a), load_checkpoint(b)
    moved = align.change_blocks(
        {k: jnp.asarray(v) for k, v in y.items()}, found.spec, found.maps, found.within
    )
    names = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]

    def cosine(u, v):
        u, v = np.ravel(u).astype(float), np.ravel(v).astype(float)
        return u @ v / np.sqrt((u @ u) * (v @ v))

    match = found.matches[0]
    assert match.before == pytest.approx(np.mean([cosine(x[n], y[n]) for n in names]), abs=1e-5)
    assert match.after == pytest.approx(np.mean([cosine(x[n], moved[n]) for n in names]), abs=1e-5)
    norm = np.sqrt(sum(np.sum(v.astype(float) ** 2) for v in x.values()))
    apart = np.sqrt(sum(np.sum((x[k] - np.asarray(moved[k], float)) ** 2) for k in x))
    assert found.distance[1] == pytest.approx(apart / norm, rel=1e-5)


@pytest.mark.slow
def test_one_family_for_all_goes_where_it_may(pair):
    a, b = pair("gpt2")
    with open_checkpoint(a) as one, open_checkpoint(b) as two:
        found = align_maps(one, two, family="orthogonal")
        assert {m.space for m in found.matches if m.family == "orthogonal"} == {
            "qk.0", "qk.1", "v.0", "v.1",
        }  # fmt: skip
        assert any("permuted only: space 'resid' cannot be matched" in n for n in found.notes)
        assert not found.report.lost
        with pytest.raises(ValueError, match=r"'hidden.0' cannot be matched by orthogonal"):
            align_maps(one, two, family={"hidden.{i}": Family.ORTHOGONAL})
        with pytest.raises(
            ValueError, match=r"unknown family 'permutaton' .nearest: 'permutation'"
        ):
            align_maps(one, two, family="permutaton")


@pytest.mark.slow
def test_refusals(pair, tmp_path):
    a, b = pair("llama")
    tensors, config = load_checkpoint(b), GOLDEN["llama"]["config"]
    fewer = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    wider = tensors | {"model.norm.weight": np.ones(9, np.float32)}
    cases = {
        "'lm_head.weight' of ": save(tmp_path / "fewer", fewer, config),
        r"norm.weight' has shape \[8\] in .* and \[9\] in": save(tmp_path / "wider", wider, config),
    }
    cases["config.json is missing: give its path"] = save(tmp_path / "bare", tensors)
    for message, other in cases.items():
        with pytest.raises(ValueError, match=message):
            align_checkpoints(a, other, tmp_path / "out")
    one_head = config | {"num_key_value_heads": 1}
    cases = {"states 'num_key_value_heads': 1, but the tensors 2|units of": one_head}
    cases["states 'num_hidden_layers': 3, but the tensors 2"] = config | {"num_hidden_layers": 3}
    for k, (message, other) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            align_checkpoints(a, save(tmp_path / f"c{k}", tensors, other), tmp_path / "out")
    stated = save(tmp_path / "stated", tensors, config | {"num_key_value_heads": 4})
    with pytest.raises(ValueError, match=r"'num_key_value_heads' is 4 in .* and 2 in .*: only"):
        align_checkpoints(stated, b, tmp_path / "out")
    with pytest.raises(ValueError, match=r"out lies in the input .*a"):
        align_checkpoints(a, b, a / "out")
    with pytest.raises(ValueError, match="b exists already"):
        align_checkpoints(a, b, b)
    for options in ({"max_sweeps": "many"}, {"seed": -1}, {"spaces": 3}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            align_checkpoints(a, b, tmp_path / "out", **options)
    complex_ = {k: v.astype(np.complex64) for k, v in tensors.items()}
    with pytest.raises(ValueError, match="is complex64: only real floats"):
        align_checkpoints(a, save(tmp_path / "complex", complex_, config), tmp_path / "out")
    with pytest.raises(ValueError, match=r"only 'qk.0', which cannot be matched.*rotary"):
        align_checkpoints(a, b, tmp_path / "out", spaces="qk.*")
    with pytest.raises(ValueError, match=r"'hiden.\*' matches no space .nearest: 'hidden"):
        align_checkpoints(a, b, tmp_path / "out", spaces=["hiden.*"])
    with pytest.raises(ValueError, match=r"unknown method 'activations'.*needs data"):
        align_checkpoints(a, b, tmp_path / "out", method="activations")
    with pytest.raises(ValueError, match=r"spaces takes at least \d+ MiB, got 0 MiB") as refused:
        align_checkpoints(a, b, tmp_path / "out", run=RunOptions(max_memory=10**6))
    # A limit equal to the stated one is accepted.
    named = int(re.search(r"least (\d+)", str(refused.value))[1])
    with pytest.raises(ValueError, match="takes at least"):
        align_checkpoints(a, b, tmp_path / "no", run=RunOptions(max_memory=(named - 1) << 20))
    from sail_jax.checkpoint.sources.aligned import align_maps

    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        align_maps(first, second, config, max_memory=named << 20)
    poisoned = tensors | {"model.norm.weight": np.full(8, np.nan, np.float32)}
    with pytest.raises(ValueError, match=r"'model.norm.weight' has values that are not finite"):
        align_checkpoints(a, save(tmp_path / "nan", poisoned, config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_configurations_state_differently_is_said(pair, tmp_path):
    a, b = pair("llama")
    config = GOLDEN["llama"]["config"] | {"rms_norm_eps": 1e-3, "use_cache": False}
    other = save(tmp_path / "other", load_checkpoint(b), config)
    done = align_checkpoints(a, other, tmp_path / "out", certify=False)
    note = "'rms_norm_eps' differs between the two configurations: 1e-06 and 0.001"
    assert done.aligned.notes == (note,)


@pytest.mark.slow
def test_double_precision_is_kept(pair, tmp_path):
    with jax.enable_x64(True):
        a, b = pair("llama", "float64")
    done = align_checkpoints(a, b, tmp_path / "out")
    out, want = load_checkpoint(tmp_path / "out"), load_checkpoint(a)
    assert all(x.dtype == np.float64 and x.tobytes() == want[k].tobytes() for k, x in out.items())
    assert [one.dtype for one in done.agreement] == ["float32", "float64"]
    assert done.agreement[1].largest <= 1e-12 * done.agreement[1].scale  # eps is 2e-16


TABLE = """
axes:
  layers.{i}.in: x* hidden.{i}
  layers.{i}.bias: hidden.{i}
  layers.{i}.out: hidden.{i}* x
  cell: memory memory*
  enter: x* memory
spaces: {"hidden.{i}": relu, x: outer, memory: odd}
"""


@pytest.mark.slow
def test_an_architecture_known_only_by_a_table(tmp_path):
    random = np.random.default_rng(0)
    shapes = {"cell": (5, 5), "enter": (4, 5)}
    for i in range(2):
        shapes |= {f"layers.{i}.in": (4, 6), f"layers.{i}.bias": (6,), f"layers.{i}.out": (6, 4)}
    one = {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}
    order = random.permutation(6)
    two = dict(one)
    for name, axis in (("in", 1), ("bias", 0), ("out", 0)):
        two[f"layers.1.{name}"] = np.take(one[f"layers.1.{name}"], order, axis)
    a, b = save(tmp_path / "a", one), save(tmp_path / "b", two)
    (tmp_path / "table.yaml").write_text(TABLE)
    command = ["align", str(a), str(b), str(tmp_path / "out"), "--quiet"]
    table = ["--spec", str(tmp_path / "table.yaml")]
    assert main([*command, *table, "--spaces", "hidden.*"]) == 0
    for name, x in load_checkpoint(tmp_path / "out").items():
        np.testing.assert_array_equal(x, one[name])
    # a recurrent space can be matched without its recurrent leaf
    assert main([*command[:-2], str(tmp_path / "again"), *table, "--weights", "cell=0"]) == 0


def scaled(tmp_path, dtype):
    """Two networks, equal but for the order of units, and for entries in tensors without axes."""
    rng = np.random.default_rng(0)
    one = {"in": rng.normal(size=(6, 3)), "out": rng.normal(size=(2, 6)), "scale": np.array(2.5)}
    one = {name: x.astype(dtype) for name, x in one.items()} | {"steps": np.array(7)}
    order = np.array([2, 0, 1, 5, 3, 4])
    two = one | {"in": one["in"][order], "out": one["out"][:, order], "steps": np.array(8)}
    two["scale"] = np.array(3.5, dtype)
    want = two | {"in": one["in"], "out": one["out"]}
    return save(tmp_path / "a", one), save(tmp_path / "b", two), one, want


def bits(tensors):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "float32"])
def test_tensors_without_axes_are_compared(dtype, tmp_path):
    """CLIP has one, logit_scale. A count is not compared."""
    a, b, one, want = scaled(tmp_path, dtype)
    axes = (("in", "hidden x*"), ("out", "y hidden*"), ("scale", ""), ("steps", ""))
    rules = Rules(axes, {"x": "outer", "y": "outer", "hidden": "relu"})
    done = align_checkpoints(a, b, tmp_path / "out", spec=rules)
    assert str(done.verdict) == "not run"
    # the two now differ only in scale
    squares = sum(np.sum(one[n].astype(float) ** 2) for n in ("in", "out", "scale"))
    assert done.aligned.distance[1] == pytest.approx(1 / squares**0.5, rel=1e-5)
    assert bits(load_checkpoint(tmp_path / "out")) == bits(want)


@pytest.mark.slow
def test_the_command_takes_tensors_without_axes(tmp_path, capsys):
    a, b, _, want = scaled(tmp_path, ml_dtypes.bfloat16)
    table = "axes: {in: hidden x*, out: y hidden*, scale: '', steps: ''}\n"
    (tmp_path / "t.yaml").write_text(table + "spaces: {x: outer, y: outer, hidden: relu}\n")
    command = ["align", a, b, tmp_path / "out", "--spec", tmp_path / "t.yaml", "--quiet"]
    assert main([*map(str, command), "--no-normalize", "--weights", "in=2"]) == 0
    printed = capsys.readouterr()
    assert "sum_t |A_t - B_t|^2, except 1 tensor by --weights; 0 before the" in printed.out
    assert printed.out.splitlines()[-1].endswith("; exactness: not run")
    assert bits(load_checkpoint(tmp_path / "out")) == bits(want)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_objective_is_the_weighted_squared_distance(tmp_path, normalize):
    a, b, one, _ = scaled(tmp_path, "float32")
    far = load_checkpoint(b) | {"out": 3 * load_checkpoint(b)["out"]}
    axes = (("in", "hidden x*"), ("out", "y hidden*"), ("scale", ""), ("steps", ""))
    rules = Rules(axes, {"x": "outer", "y": "outer", "hidden": "relu"})
    c = save(tmp_path / "c", far)
    done = align_checkpoints(a, c, None, spec=rules, normalize=normalize)
    square = np.sum(one["out"].astype(float) ** 2)
    weight = 1 / (3 * square) if normalize else 1
    assert done.aligned.history[-1] == pytest.approx(weight * 4 * square, rel=1e-5)
    with pytest.raises(ValueError, match="normalize must be True or False, got 1"):
        align_checkpoints(a, c, None, spec=rules, normalize=1)


@pytest.mark.soak
def test_clip_is_aligned_with_its_scale(pair, tmp_path):
    a, b = pair("clip")
    assert load_checkpoint(a)["logit_scale"].shape == ()
    done = align_checkpoints(a, b, tmp_path / "out")
    assert done.verdict.exact
    one, out = load_checkpoint(a), load_checkpoint(tmp_path / "out")
    assert all(np.array_equal(out[name], x) for name, x in one.items())


@pytest.mark.slow
def test_a_recurrent_space_of_a_table_is_aligned(tmp_path):
    rng, order = np.random.default_rng(0), np.array([2, 0, 4, 1, 3])
    one = {
        "cell": np.float32(rng.normal(size=(5, 5))),
        "enter": np.float32(rng.normal(size=(4, 5))),
    }
    two = {"cell": one["cell"][order][:, order], "enter": one["enter"][:, order]}
    a, b = save(tmp_path / "a", one), save(tmp_path / "b", two)
    table = "axes: {cell: memory memory*, enter: x* memory}\nspaces: {x: outer, memory: odd}\n"
    (tmp_path / "t.yaml").write_text(table)
    out = str(tmp_path / "out")
    assert main(["align", str(a), str(b), out, "--quiet", "--spec", str(tmp_path / "t.yaml")]) == 0
    for name, x in load_checkpoint(out).items():
        np.testing.assert_array_equal(x, one[name])


@pytest.mark.slow
def test_the_command(pair, tmp_path, capsys):
    a, b = pair("llama")
    out = str(tmp_path / "out")
    assert main(["align", str(a), str(b), "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "hidden.0" in shown
    assert "qk.0" not in shown
    assert main(["align", str(a), str(b), out, "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("hidden.")}
    assert rows["hidden.0"][1:3] == ["permutation", "12"]
    assert rows["hidden.0"][5:] == ["1.0000", "none"]
    objective = (
        r"objective \(weight matching\): sum_t \|A_t - B_t\|\^2 / \(\|A_t\| \|B_t\|\); .* 0 after"
    )
    assert any(re.match(objective, x) for x in lines)
    assert any(re.match(r"distance \|A - B\| / \|A\|: .* before, 0 after", x) for x in lines)
    assert "; exactness: the function is preserved" in lines[-1]  # as confirmed by a run
    assert any(
        line.startswith("B before and after, outputs in float32: ") and "within" in line
        for line in lines
    )
    assert main(["align", str(a), str(b)]) == 2
    assert "OUT is missing" in capsys.readouterr().err
    assert main(["align", str(a), str(b), out, "--family", "hidden.{i}=rotation"]) == 2
    assert "expected one of permutation, signed" in capsys.readouterr().err
    assert main(["align", str(a), str(b), f"{out}2", "--spaces", "qk.0"]) == 2
    assert "rotary" in capsys.readouterr().err


def test_layers_are_shown_together_where_there_are_many():
    names = [f"hidden.{i}" for i in range(24)] + ["resid"]
    assert list(align_command._grouped(names, False)) == ["hidden.{i} x 24", "resid"]
    assert list(align_command._grouped(names, True)) == names
    assert list(align_command._grouped(names[:3], False)) == names[:3]


def test_patterns_choose_inner_spaces():
    s = model("llama").spec
    assert matchable(s, "hidden.*") == ["hidden.0", "hidden.1"]
    assert "vocab" not in matchable(s)
