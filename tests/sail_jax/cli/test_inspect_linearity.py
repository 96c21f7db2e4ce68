"""`inspect --linearity` on linear networks, by hand, and on networks of every kind."""

import json

import jax
import numpy as np
import pytest
from known_networks import EPS, GOLDEN, PAIRS, TOKENS, model
from pictures import flaws
from small_checkpoints import save, tuned

from sail_jax import architectures
from sail_jax.checkpoint import CheckpointError
from sail_jax.checkpoint.operations.linearity import measure_linearity
from sail_jax.checkpoint.operations.trying import Examples, read_examples
from sail_jax.cli import compare_linearity
from sail_jax.cli.main import main

CONFIG = {"model_type": "mlp", "widths": [6, 5], "inputs": 4}


def mlp(seed, *moved):
    """An MLP in which the given tensors depend on the seed."""
    shapes = {
        "layers.0.kernel": (4, 6), "layers.0.bias": (6,), "layers.1.kernel": (6, 5),
        "layers.1.bias": (5,), "out.kernel": (5, 3), "out.bias": (3,),
    }  # fmt: skip
    rngs = {name: np.random.default_rng((k, seed if name in moved else 0))
            for k, name in enumerate(shapes)}  # fmt: skip
    return {name: r.standard_normal(shapes[name]).astype(np.float32) for name, r in rngs.items()}


def examples(n=40):
    rng = np.random.default_rng(5)
    return Examples(rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves base, A, B and C that differ everywhere, and others that differ only in the head."""
    root = tmp_path_factory.mktemp("linearity")
    kinds = {"deep": tuple(mlp(0)), "head": ("out.kernel", "out.bias")}
    return {
        kind: [save(root / f"{kind}{i}", mlp(i, *moved), CONFIG) for i in range(4)]
        for kind, moved in kinds.items()
    }


@pytest.mark.soak
def test_what_is_linear_in_the_head_is_linear(saved):
    base, *models = saved["head"]
    found = measure_linearity(models, examples(), base, every_layer=True)
    assert [it.name for it in found.identities] == [
        *["interpolation"] * 3, "average", *["addition"] * 3, *["midpoint", "reflection"] * 3,
    ]  # fmt: skip
    for it in found.identities:
        assert it.found.layers == ("layers.0", "layers.1", "output")
        np.testing.assert_allclose(it.found.gap, 0, atol=50 * EPS)
        np.testing.assert_allclose(it.found.coefficient.value, 1, atol=50 * EPS)
    assert found.metric == "accuracy"
    assert found.sets == ((0, 1), (0, 2), (1, 2), (0, 1, 2))
    assert found.averaging is not None
    np.testing.assert_array_equal(found.averaging.agreement.value, 1)
    for it in found.stitched:  # features below the head are all alike
        np.testing.assert_allclose(it.metric.value, float(it.upper.value), atol=EPS)


@pytest.mark.soak
def test_layers_keep_their_order(tmp_path):
    """Ten or more layers: neither the names nor the stitched features are in alphabetical order."""
    widths, rng = [3] * 12, np.random.default_rng(0)
    names = [f"layers.{k}" for k in range(12)] + ["out"]
    sizes = [*zip([4, *widths], [*widths, 3], strict=True)]
    params = {f"{n}.kernel": rng.standard_normal(s) / 2 for n, s in zip(names, sizes, strict=True)}
    params |= {f"{n}.bias": np.ones(s[1]) for n, s in zip(names, sizes, strict=True)}
    params = {n: x.astype(np.float32) for n, x in params.items()}
    config = CONFIG | {"widths": widths}
    one, two = (save(tmp_path / n, tuned(params, k), config) for k, n in enumerate("AB"))
    found = measure_linearity([one, two], examples(8))
    assert found.identities[0].found.layers == (*names[:-1], "output")
    assert found.stitched[0].layers == ("layers.2", "layers.5", "layers.8")


@pytest.mark.slow
def test_by_hand(saved):
    base, one, two, _ = saved["deep"]
    given, s = examples(), 0.3
    found = measure_linearity([one, two], given, base, scales=(s,), every_layer=True)
    theta, a, b = (mlp(i, *mlp(0)) for i in range(3))

    def hidden(params, x):
        for k in range(2):
            x = np.maximum(x @ params[f"layers.{k}.kernel"] + params[f"layers.{k}.bias"], 0)
        return x

    def at(*shares):
        """base + shares of both task vectors, in float64."""
        return {
            n: t.astype(float) + sum(c * (m[n] - t) for c, m in zip(shares, (a, b), strict=True))
            for n, t in theta.items()
        }

    def compared(left, right):
        norms = [np.linalg.norm(v, axis=1) for v in (left, right)]
        both = np.where(norms[0] * norms[1] > 0, norms[0] * norms[1], 1)
        cosine = (left * right).sum(1) / both
        return cosine.mean(), (cosine * norms[0] / np.where(norms[1] > 0, norms[1], 1)).mean()

    x = given.inputs.astype(float)
    f = lambda *shares: hidden(at(*shares), x)  # noqa: E731
    sides = {
        "interpolation": (f(0.5, 0.5), (f(1, 0) + f(0, 1)) / 2),
        "addition": (f(s, s), (f(2 * s, 0) + f(0, 2 * s)) / 2),
        "midpoint": (f(0, 0), (f(s, 0) + f(-s, 0)) / 2),
        "reflection": (f(-s, 0), 2 * f(0, 0) - f(s, 0)),
    }
    for it in found.identities:
        if it.models == (1,):
            continue
        k = it.points.index(0.5) if it.name == "interpolation" else 0
        cosine, coefficient = compared(*sides[it.name])
        assert abs(it.found.cosine.value[1, k] - cosine) < 100 * EPS
        assert abs(it.found.coefficient.value[1, k] - coefficient) < 100 * EPS
        assert 0 < it.found.cosine.stderr[1, k] < 1
    # stitched after the last layer: the base's head on combined features
    own = {(it.name, it.models): it for it in found.stitched}
    head = lambda h: (h @ theta["out.kernel"] + theta["out.bias"]).argmax(1)  # noqa: E731
    for name, models, features in (
        ("addition", (0, 1), (f(s, 0) + f(0, s)) / 2),
        ("addition, weights", (0, 1), f(s / 2, s / 2)),
        ("negation", (0,), 2 * f(0, 0) - f(s, 0)),
        ("single", (1,), f(0, s)),
    ):
        right = (head(features) == given.labels).mean()
        assert abs(own[name, models].metric.value[1] - right) < EPS


def calling(saved, tmp_path):
    base, *models = saved["deep"]
    data, given = tmp_path / "d.npz", examples()
    np.savez(data, inputs=given.inputs, labels=given.labels)
    return ["inspect", *map(str, models[:2]), "--data", str(data), "--linearity"], base


@pytest.mark.slow
def test_the_command(saved, tmp_path, capsys):
    record, out = tmp_path / "r.json", tmp_path / "out"
    call, base = calling(saved, tmp_path)
    more = ["--base", str(base), "--scales", "0.2,0.4", "--out", str(out), "--json", str(record)]
    assert main([*call, *more]) == 0
    said = capsys.readouterr().out
    about = json.loads(record.read_text())["linearity"]
    assert "interpolation: " in said
    assert "two models' mean features in the base" in said
    kinds = {(r["identity"], r["point"]) for r in about["identities"]}
    assert {p for name, p in kinds if name == "addition"} == {0.2, 0.4}
    assert len(about["averaging"]) == 1
    assert (out / compare_linearity.FIGURE).read_bytes()[:4] == b"\x89PNG"
    assert not flaws(compare_linearity.draw(about))


def test_wrong_options(saved, tmp_path, capsys):
    call, base = calling(saved, tmp_path)
    for wrong, says in (
        (["inspect", str(base), "--linearity"], "two checkpoints or more"),
        ([*call[:3], "--linearity"], "--data FILE"),
        ([*call, "--scales", "0.1"], "--base"),
        ([*call, "--base", str(base), "--scales", "0,1"], "positive numbers"),
    ):
        assert main(wrong) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1


NAMES = [name for name in GOLDEN if architectures.of(GOLDEN[name]["config"]).logits is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *(
    n for n in NAMES if n != "gpt2")])  # fmt: skip
def test_layers_are_seen_and_replaced(name):
    """A network's own features, inserted again, change nothing; others change the outputs."""
    m, config = model(name), GOLDEN[name]["config"]
    family = architectures.of(config)
    inputs = PAIRS.get(family.name, TOKENS)

    def run(params, of=None):
        seen = {}

        def see(name, x):
            seen[name] = x = x if of is None else of(name, x)
            return x

        return family.logits(params, config, inputs, see), seen

    out, seen = jax.jit(run)(m.params)
    layers = [v for k, v in config.items() if k in ("n_layer", "num_hidden_layers", "num_layers")]
    assert not layers or len(seen) >= layers[0]
    again = jax.jit(lambda p: run(p, lambda name, x: seen[name])[0])(m.params)
    np.testing.assert_allclose(again, out, 0, 100 * EPS * np.abs(out).max())
    last = list(seen)[-1]
    other = jax.jit(lambda p: run(p, lambda n, x: x.at[..., 0].add(1) if n == last else x)[0])(
        m.params
    )
    assert np.abs(other - out).max() > 1e-3


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "clip", "t5", "vit"])
def test_other_networks(name, tmp_path):
    rng, n, config = np.random.default_rng(0), 6, GOLDEN[name]["config"]
    base = {k: np.asarray(x) for k, x in model(name).params.items()}
    images = rng.standard_normal((n, 3, 8, 8)).astype(np.float32)
    arrays = {
        "t5": {"tokens": rng.integers(0, 17, (n, 8)), "labels": rng.integers(0, 17, (n, 5))},
        "clip": {"inputs": images, "tokens": rng.integers(0, 17, (5, 6)),
                 "labels": rng.integers(0, 5, n)},
        "vit": {"inputs": images, "labels": rng.integers(0, 2, n)},
        "llama": {"tokens": rng.integers(0, 17, (n, 8))},
    }[name]  # fmt: skip
    np.savez(tmp_path / "d.npz", **arrays)
    trees = {"base": base} | {x: tuned(base, i, 0.01) for i, x in enumerate("AB")}
    base, *models = (save(tmp_path / x, tree, config) for x, tree in trees.items())
    data = tmp_path / "d.npz"
    found = measure_linearity(models, read_examples(data), base)
    assert found.metric == ("accuracy" if name in ("clip", "vit") else "loss")
    layers = found.identities[0].found.layers
    assert not any(layer.startswith("text_model") for layer in layers)
    for it in found.identities:
        ratio = (1 - it.found.cosine.value) / (1 - it.baseline.value)
        # to second order both sides differ by less than the models do
        assert np.all(ratio < 1)
    assert not any(x.startswith("decoder") for it in found.stitched for x in it.layers)
    if name == "t5":
        with pytest.raises(CheckpointError, match="'labels', both"):
            measure_linearity(models, Examples(arrays["tokens"], None), base)
    if name == "clip":
        with pytest.raises(CheckpointError, match="one of them is missing"):
            measure_linearity(models, Examples(images, arrays["labels"]), base)
