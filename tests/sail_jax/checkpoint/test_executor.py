"""Methods streamed from tensors read piece by piece, compared with the same methods in memory."""

import dataclasses
import functools
import threading
import weakref

import jax
import merge_cases
import ml_dtypes
import numpy as np
import pytest
from cells import slow
from merge_cases import KEY, NAMES, Held, Sink, streamed

from sail_jax import Merge, methods, transforms
from sail_jax.checkpoint.executor import CONSTANT, Limits, MergeError, execute, limits, memory, peak
from sail_jax.merging import random_bits, ranking, streaming
from sail_jax.merging.buffers import Buffers
from sail_jax.merging.combining import chain, masked, reduce
from sail_jax.merging.extremes import finite
from sail_jax.merging.pulse import Pulse
from sail_jax.merging.reductions import weighted_mean
from sail_jax.merging.steps import Piece, fingerprint, kernel
from sail_jax.merging.work import ENTRIES, FEW, SOME, is_crowd, passes, pieces, tree_bits

EPS = float(np.finfo(np.float32).eps)
OPTIONS = {
    "expo": {"alpha": 0.3},
    "passthrough": {"scale": 0.5},
    "breadcrumbs": {"density": 0.6},
    "wudi": {"steps": 5},
}
WHOLE = ("tsv_m", "iso_c", "iso_cts", "wudi", "opcm")  # need a matrix at once: small ones
SHAPES = {"b": (600,), "c": (), "d": (40, 50), "e/f": (3, 4, 5), "g": (7,), "empty": (0, 3)}
LONG = {"a": (1100, 1000)}  # two pieces, of which the second is cut short


def problem(shapes, models=3, dtype=np.float32):
    rng = np.random.default_rng(0)
    draw = lambda scale, like=0.0: {  # noqa: E731
        name: np.asarray(
            np.asarray(like[name] if like else 0, np.float32) + scale * rng.normal(size=shape)
        ).astype(dtype)
        for name, shape in shapes.items()
    }
    base = draw(1.0)
    return [draw(0.1, base) for _ in range(models)], base


def make(name, **options):
    return merge_cases.make(name, **{**OPTIONS.get(name, {}), **options})


def models_of(merge):
    least, most = merge.models
    return min(3, most or 3) if least <= 3 else least


@pytest.mark.slow
@merge_cases.each_method(
    quick=("linear", "karcher"),
    slow=(*merge_cases.KINDS, "breadcrumbs", "model_stock", "pcb", "opcm"),
)
def test_streamed_is_what_memory_gives(name):
    """To 16 ulp of the largest value: kernels are fused differently, sums are cut into pieces."""
    shapes = SHAPES if name in WHOLE else SHAPES | LONG
    merge = make(name)
    models, base = problem(shapes, models_of(merge))
    want = merge(models, base)
    got, _ = streamed(merge, models, base)
    assert got.keys() == base.keys()
    moved = 0.0
    for leaf in base.keys() - {"empty"}:
        expected = np.asarray(want[leaf]).reshape(-1)
        np.testing.assert_allclose(got[leaf], expected, rtol=0, atol=16 * EPS * 6, err_msg=leaf)
        moved = max(moved, float(np.abs(expected - base[leaf].reshape(-1)).max()))
    assert moved > 0.003  # the merge changes the values


def reads(merge, shape):
    """Returns how often the first model is read, and how often it should be, without caching."""
    models, base = problem({"d": shape}, models_of(merge))
    first, *rest = (Held("d", m["d"]) for m in models)
    one = merge.work("d", shape, base["d"].dtype, [first, *rest], Held("d", base["d"]), None)
    execute([one], Sink(), Limits(1, 0))
    return first.reads, passes(one, tree_bits([one])) * len(pieces(shape, merge.needs))


@pytest.mark.slow
@merge_cases.each_method(slow=("breadcrumbs", "model_stock", "pcb", "opcm"))
def test_passes_are_counted_before_they_are_made(name):
    """The number of reads that --plan states."""
    shapes = [(40, 50)] if name in WHOLE else [(40, 50), (3, 4, 5), (1100, 1000)]
    for shape in shapes:
        read, said = reads(make(name), shape)
        assert read == said, shape


@pytest.mark.parametrize("compat", ["mergekit", *slow("paper")])
@merge_cases.each_method(
    [n for n in NAMES if "compat" in methods.options_of(n) and n not in WHOLE],
    quick=(),
    slow=("ties", "della", "multislerp"),
)
def test_bytes_do_not_depend_on_threads_or_memory(name, compat):
    merge = functools.partial(make, name, compat=compat)
    models, base = problem(SHAPES | LONG, models_of(merge()), ml_dtypes.bfloat16)
    one, _ = streamed(merge(), models, base, limits=Limits(1, 0))
    other, _ = streamed(merge(), models, base, limits=Limits(3, 1 << 28))
    for leaf in base:
        assert one[leaf].tobytes() == other[leaf].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ties", {"scope": "tree"}),
        ("ties", {"scope": "tensor"}),
        ("dare_ties", {}),
    ],
)
def test_exactly_as_many_entries_are_kept_as_in_memory(name, options, monkeypatch):
    """bfloat16 deltas have few magnitudes: who is kept at the threshold is settled by position,
    within and between pieces and tensors. Of many entries the threshold is guessed."""
    guessed, guess = [], ranking.guess
    monkeypatch.setattr(ranking, "guess", lambda *x: guessed.append(guess(*x)) or guessed[-1])
    merge = make(name, density=0.3, **options)
    trees = problem(SHAPES | {"a": (2200, 1000)}, 3)
    eighths = lambda x: (np.round(8 * x) / 8).astype(ml_dtypes.bfloat16)  # noqa: E731
    models, base = jax.tree.map(eighths, trees)
    want = merge(models, base)
    guessed.clear()
    got, _ = streamed(merge, models, base)
    assert (name != "ties") == (not any(guessed))
    for leaf in base:
        expected = np.asarray(want[leaf]).reshape(-1).astype(np.float32)
        apart = np.abs(got[leaf].astype(np.float32) - expected)
        # a sum of three at a rounding boundary may fall on its other side, one bfloat16 away
        assert (apart <= 2.0**-7 * np.maximum(np.abs(expected), 2.0**-7)).all()
        assert apart.size == 0 or (apart > 0).mean() < 1e-3


@pytest.mark.soak
def test_transforms_of_every_form():
    """Masked, chained and majority-electing ones over several tensors, of the whole tree."""
    some = chain(
        masked(transforms.trim(0.5), "e/*"), transforms.drop(0.2, KEY), transforms.trim(0.4),
        transforms.trim(0.9, "tensor"), transforms.elect(tie="majority"),
    )  # fmt: skip
    merge = Merge(some, weighted_mean)
    models, base = problem(SHAPES | LONG)
    want = merge(models, base, weights=[1.0, 2.0, 0.5])
    got, _ = streamed(merge, models, base, [1.0, 2.0, 0.5])
    for leaf in base:
        expected = np.asarray(want[leaf]).reshape(-1)
        np.testing.assert_allclose(got[leaf], expected, rtol=0, atol=16 * EPS * 6)
    with pytest.raises(MergeError, match="chooses none of the leaves"):
        streamed(Merge(masked(transforms.trim(0.5), "z*")), models, base)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ties", {"scope": "tree"}),
        ("ties", {"scope": "tensor"}),
        ("breadcrumbs", {"scope": "tree"}),
        ("breadcrumbs", {"scope": "tensor"}),
        ("della", {"compat": "mergekit", "epsilon": 0.1}),
    ],
)
def test_pieces_of_any_size_give_the_same(name, options, monkeypatch):
    """Equal magnitudes everywhere: who is kept is decided across pieces, batches and tensors."""
    rng = np.random.default_rng(3)
    shapes = {f"w{i}": (i % 3 + 1, 5) for i in range(9)} | {"v": (), "t": (1,), "s": (2,)}
    draw = lambda: {n: np.float32(rng.integers(-3, 4, s) / 4) for n, s in shapes.items()}  # noqa: E731
    models, base = (
        [draw() for _ in range(3)],
        {n: np.zeros(s, np.float32) for n, s in shapes.items()},
    )
    merge = make(name, density=0.4, **options)
    want = merge(models, base)
    merge_cases.in_small_pieces(monkeypatch)
    got, _ = streamed(merge, models, base)
    for leaf in base:
        np.testing.assert_allclose(got[leaf], np.asarray(want[leaf]).reshape(-1), atol=8 * EPS * 4)


def test_dtypes_mix_and_widen():
    """float16, bfloat16, float32 and float8 inputs are computed with in float32, float64 in its
    own; the output has the dtype asked for."""
    models, base = problem({"d": (40, 50)})
    types = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    mixed = [{"d": m["d"].astype(t)} for m, t in zip(models, types, strict=True)]
    want = sum(m["d"].astype(np.float64) for m in mixed) / 3
    got, _ = streamed(methods.linear(), mixed, base, dtype=np.dtype(np.float32))
    np.testing.assert_allclose(got["d"].reshape(40, 50), want, rtol=0, atol=8 * EPS * 4)
    double = [{"d": m["d"].astype(np.float64)} for m in models]
    got, _ = streamed(methods.linear(), double, {"d": base["d"].astype(np.float64)})
    want = sum(m["d"] for m in double) / 3
    assert got["d"].dtype == np.float64
    np.testing.assert_allclose(got["d"].reshape(40, 50), want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [1, 7, 3000])
def test_powers_of_two_without_a_zero(size):
    """float8_e8m0fnu has none to pad with: what is behind the last entry is looked at by nobody."""
    kind = np.dtype(ml_dtypes.float8_e8m0fnu)
    rng = np.random.default_rng(size)
    codes = rng.integers(8, 248, size).astype(np.uint8)
    models = [{"w": codes.view(kind), "v": codes[:1].view(kind)} for _ in range(2)]
    for base in (None, models[0]):
        got, _ = streamed(methods.linear(), models, base)
        assert (got["w"].view(np.uint8) == codes).all()
    models[1]["w"] = models[1]["w"].copy()
    models[1]["w"].view(np.uint8)[-1] = 255
    with pytest.raises(MergeError, match="NaN or infinity in w"):
        streamed(methods.linear(), models, None)


NEAR_0 = np.array([0, 1e-42, -3e-39, 1.1e-38, 1.3e-38, -1e-37, 2e-29, 1.0])
"""Float32 and bfloat16 hold no normal numbers below 1.2e-38."""


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_subnormal_numbers_are_kept(dtype):
    """Outcomes are off by their rounding and no more, where XLA takes inputs and outcomes for 0."""
    values = NEAR_0.astype(dtype)
    models = [{"w": values, "v": values}, {"w": -values[::-1].copy(), "v": values}]
    about = ml_dtypes.finfo(dtype)
    for weights in ([1.0, 0.0], [0.5, 0.5], [3.0, -2.0]):
        got, _ = streamed(
            methods.task_arithmetic(), models, dict.fromkeys("wv", 0 * values), weights
        )
        for name in "wv":
            exact = sum(w * m[name].astype(float) for w, m in zip(weights, models, strict=True))
            apart = np.abs(got[name].astype(float) - exact)
            # to a float32 first, then to a bfloat16: two roundings, of which one may be subnormal
            rounding = float(about.eps) * np.abs(exact) + float(about.smallest_subnormal)
            assert (apart <= rounding).all()
        if sum(weights) == 1:
            assert (got["v"] == values).all()


@pytest.mark.slow
@merge_cases.each_method(quick=("ties",), slow=("slerp", "della", "iso_c"))
def test_subnormal_numbers_are_kept_by_all(name):
    """Results equal those of float64: trimmed, rotated, and for norms whose squares underflow."""
    merge, kind = make(name), np.dtype(np.float32)
    models, base = problem({"d": (40, 50), "g": (7,)}, models_of(merge))
    small = lambda tree: {n: (x * np.float32(1e-38)).astype(kind) for n, x in tree.items()}  # noqa: E731
    models, base = [small(m) for m in models], small(base)
    wide = [{n: x.astype(float) for n, x in m.items()} for m in [base, *models]]
    want, _ = streamed(merge, wide[1:], wide[0])
    got, _ = streamed(merge, models, base)
    for leaf in base:
        assert got[leaf].tobytes() == want[leaf].astype(kind).tobytes()
        assert got[leaf].any()


@pytest.mark.soak
def test_only_pieces_near_0_are_computed_again():
    """The second piece of a, none of b and one of two tensors of a batch; sums for reports, too."""
    models, base = problem({"a": (300, 1000), "b": (300, 1000), "c": (40, 50), "d": (40, 50)})
    plain, _ = streamed(methods.linear(), models, None, measure=True)  # one program, then
    faint = [{n: x.copy() for n, x in m.items()} for m in models]
    for m in faint:
        m["a"].reshape(-1)[-1], m["d"][0, 0], m["b"][3, 3] = 1e-42, 1e-42, 0
    got, records = streamed(methods.linear(), faint, None, measure=True)
    assert got["a"][-1] == got["d"][0] == np.float32(1e-42)
    assert (got["a"][:SOME] == plain["a"][:SOME]).all()
    assert (got["c"] == plain["c"]).all()
    np.testing.assert_allclose(got["a"][:-1], plain["a"][:-1], rtol=0, atol=16 * EPS)
    for n in base:
        # sums in float32, of pieces in float64 where they are near 0
        np.testing.assert_allclose(
            records[n].update, np.linalg.norm(got[n].astype(float)), rtol=1e-5
        )
    reads = merge_cases.works(methods.linear(), faint, None)
    execute(reads, Sink(), Limits(1, 0))
    assert [work.models[0].reads for work in reads] == [3, 2, 1, 2]


@pytest.mark.slow
def test_statistics_of_the_tree_are_taken_again():
    """A start near 0 stays where task vectors are trimmed; other tensors are as they were."""
    models, base = problem({"d": (40, 50), "g": (3000,)})
    for m in (base, *models):
        m["d"][0, 0], m["g"][0] = 1e-42, 0
    ties = methods.ties(density=0.9, scope="tree")
    got, _ = streamed(ties, models, base)
    assert got["d"][0] == np.float32(1e-42)
    for m in (base, *models):
        m["d"][0, 0] = 0
    plain, _ = streamed(ties, models, base)
    assert got["g"].tobytes() == plain["g"].tobytes()
    np.testing.assert_allclose(got["d"], plain["d"], rtol=0, atol=16 * EPS)


def test_too_little_memory_for_float64_is_said():
    models = [{"w": np.full((600, 1000), 1e-42, np.float32)}] * 2
    works = merge_cases.works(methods.linear(), models, None)
    room = CONSTANT + memory(works[0])
    with pytest.raises(MergeError, match=r"^w: .* float32 would lose.*max_memory: w needs \d+ MiB"):
        execute(works, Sink(), limits(works, room, 1))
    execute(works, sink := Sink(), limits(works, CONSTANT + memory(works[0], wide=True), 1))
    assert (sink.tensors["w"] == np.float32(1e-42)).all()


def test_non_finite_inputs_are_all_named():
    models, base = problem(SHAPES)
    models[1]["d"][3, 4] = np.nan
    models[2]["b"][7] = np.inf
    with pytest.raises(MergeError, match="NaN or infinity") as error:
        streamed(methods.linear(), models, base)
    assert "b in memory" in str(error.value)
    assert "d in memory" in str(error.value)
    got, _ = streamed(methods.linear(), models, base, allow_nonfinite=True)
    assert np.isnan(got["d"]).sum() == 1


SHOWING = (
    "linear", "task_arithmetic", "passthrough", "expo",
    "slerp", "multislerp", "karcher", "nuslerp", "model_stock",
)  # fmt: skip
"""Methods whose outcomes show what their inputs hold, so that inputs are not looked at."""


def test_which_methods_do_not_look_at_their_inputs():
    found = [n for n in NAMES if all(s.propagates_nonfinite for s in make(n).steps)]
    assert sorted(found) == sorted(SHOWING)


@pytest.mark.slow
@merge_cases.each_method(SHOWING, quick=("linear", "slerp"), slow=SHOWING)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_bad_input_is_found_from_the_outcome_and_named(name, dtype, monkeypatch):
    """In any model or the base, in the first or the last piece, for any weights."""
    merge_cases.in_small_pieces(monkeypatch)
    merge = make(name)
    shapes = {"v": (37,), "w": (3, 20), "b": (2,)}
    count = models_of(merge)
    for who in range(count + (merge.base != "unused")):
        for leaf, at, bad in (("v", 0, np.nan), ("w", 59, np.inf), ("b", 1, -np.inf)):
            models, base = problem(shapes, count, dtype)
            tree = [*models, base][who]
            tree[leaf].reshape(-1)[at] = bad
            weights = np.ones(count)
            # An input without a weight is an input all the same.
            if who < count and name != "slerp":
                weights[who] = 0
            with pytest.raises(MergeError, match=f"^NaN or infinity in {leaf} in memory; "):
                streamed(merge, models, base, weights)
            source = f"model {who}" if who < count else "base"
            with pytest.raises(ValueError, match=f"{source}, leaf '{leaf}': expected finite"):
                merge(models, base, weights=weights)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_finite_reads_bits(dtype):
    x = np.array([0.0, -1.5, float(ml_dtypes.finfo(dtype).max)]).astype(dtype)
    assert finite(x)
    for bad in (np.nan, -np.nan):
        y = np.append(x, np.array([bad]).astype(dtype))
        assert not finite(y)
    assert finite(x[:0])


@pytest.mark.slow
def test_outcomes_that_overflow_are_refused():
    big = {"d": np.full((4, 4), 6e4, np.float16)}
    base = {"d": np.zeros((4, 4), np.float16)}
    with pytest.raises(MergeError, match=r"d: the merged values do not fit float16.*6.55e\+04"):
        streamed(methods.task_arithmetic(), [big, big], base)
    got, _ = streamed(methods.linear(), [big, big], base)  # sums in float32
    assert (got["d"] == big["d"].reshape(-1)).all()
    indefinite = methods.regmean(grams=[{"d": np.eye(4) + 9 * (1 - np.eye(4))}])
    with pytest.raises(MergeError, match=r"^d: the Grams may not add up to a positive definite"):
        streamed(indefinite, [base], None)


@pytest.mark.slow
def test_what_is_finished_is_not_written_again_but_counts():
    """A tree-scope threshold belongs to all tensors, also to those an earlier run has written."""
    models, base = problem(SHAPES)
    whole, _ = streamed(methods.ties(scope="tree"), models, base)
    rest, _ = streamed(methods.ties(scope="tree"), models, base, finished=["d"])
    assert rest.keys() == base.keys() - {"d"}
    for leaf in rest:
        assert rest[leaf].tobytes() == whole[leaf].tobytes()


@pytest.mark.slow
def test_progress_reaches_the_end_and_records_what_is_measured():
    models, base = problem({"d": (40, 50)})
    seen = []
    _, records = streamed(
        methods.ties(density=0.3, scope="tensor"), models, base,
        measure=True, progress=lambda *now: seen.append(now),
    )  # fmt: skip
    size = 4 * 40 * 50 * 4
    assert seen == [(size, size, "d")]
    delta = np.stack([m["d"] - base["d"] for m in models]).reshape(3, -1).astype(float)
    record = records["d"]
    np.testing.assert_allclose(record.norms, np.linalg.norm(delta, axis=1), rtol=1e-5)
    unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
    np.testing.assert_allclose(record.cosines, unit @ unit.T, rtol=0, atol=1e-5)
    assert record.conflicts == np.mean((delta > 0).any(0) & (delta < 0).any(0))
    assert record.moved == (delta != 0).sum(1).tolist()
    assert all(0 < kept <= 0.3 for kept in record.kept)


def test_an_error_stops_every_worker():
    models, base = problem(SHAPES | LONG)

    class Full(Sink):
        def write(self, name, array, start=0):
            raise OSError("no space left on device")

    works = merge_cases.works(methods.linear(), models, base)
    with pytest.raises(OSError, match="no space"):
        execute(works, Full(), Limits(2, 0))
    assert not [t for t in threading.enumerate() if t.name.startswith("merge")]


def test_memory_limits_threads_and_refuses_by_name():
    models, base = problem(SHAPES | LONG)
    works = merge_cases.works(methods.linear(), models, base)
    need = max(map(memory, works))
    assert limits(works, CONSTANT + 4 * need, 4).threads == 4
    one = limits(works, CONSTANT + need, 4)
    assert one.threads >= 1
    with pytest.raises(MergeError, match=r"max_memory: a needs \d+ MiB .* got 100 MiB"):
        limits(works, 100 << 20)


def test_what_makes_the_output_is_counted():
    """A library that holds much while it writes orbax's folders, after all tensors are merged."""
    models, base = problem(SHAPES | LONG)
    works = merge_cases.works(methods.linear(), models, base)
    need, output = max(map(memory, works)), 1 << 30
    with pytest.raises(MergeError, match="max_memory: an output of this format needs 1354 MiB"):
        limits(works, CONSTANT + output - 1, output=output)
    least = limits(works, CONSTANT + output, 1, output=output)
    assert peak(works, least) == CONSTANT + output > peak(works, limits(works, None, 1))
    assert limits(works, CONSTANT + need, 1).output == 0


@pytest.mark.slow
def test_what_a_tensor_needed_is_let_go_with_it(monkeypatch):
    """Masks of merged tensors would add up to an eighth of a model in float8."""
    models, base = problem({f"w{k}": (600, 1000) for k in range(4)})
    held, alive = [], []
    before = streaming.Unit.resolve

    def remember(unit, step, reader):
        alive.append(sum(mask() is not None for mask in held))
        before(unit, step, reader)
        held.extend(weakref.ref(own[-1]) for own in unit.own[-1] if own)

    monkeypatch.setattr(streaming.Unit, "resolve", remember)
    della = methods.della(key=KEY, compat="mergekit")
    streamed(della, models, base, limits=Limits(1, 0))
    assert len(held) == 12  # three pieces of four tensors
    assert max(alive) <= 3
    small = lambda model: {"w": model["w0"][:40, :50]}  # noqa: E731
    (one,) = merge_cases.works(della, [small(m) for m in models], small(base))
    assert memory(one) - memory(dataclasses.replace(one, merge=methods.linear())) == 750


@pytest.mark.parametrize("needs", ["entry", "row", "tensor"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (3 * ENTRIES // 2,), (3, ENTRIES), (0, 4)])
def test_pieces_cover_a_tensor_once(shape, needs):
    size = int(np.prod(shape))
    found = pieces(shape, needs)
    ends = 0
    for piece in found:
        assert piece.start == ends
        assert piece.count <= int(np.prod(piece.shape))
        ends += piece.count
    assert ends == size
    if needs == "row" and len(shape) > 1:
        assert all(piece.start % shape[-1] == 0 for piece in found)


def test_every_kernel_lives_as_long_as_the_process():
    """Two merges of equal options share what is compiled for them."""
    for name in NAMES:
        a, b = ([step.compiled() for step in make(name).steps] for _ in range(2))
        assert jax.tree.structure(a) == jax.tree.structure(b), name


@pytest.mark.soak
def test_draws_are_independent_and_fair():
    """Null: uniform, independent between streams and neighbours. 2^20 draws each, |z| < 4."""
    n = 1 << 20
    words = random_bits.key_words(KEY, "a test")

    def drawn(path, start, n):
        draw = transforms.uniform(words, Piece(fingerprint(path), np.uint32(start)), (4, n))
        return np.stack([np.asarray(draw(k), np.float64) for k in range(4)])

    u, v = drawn("one", 0, n), drawn("other", 0, n)
    every = np.concatenate([u, v])
    z = (every.mean(1) - 0.5) * np.sqrt(12 * n)
    assert np.abs(z).max() < 4
    counts = np.stack([np.bincount((x * 256).astype(int), minlength=256) for x in every])
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum(1)
    assert np.abs((chi2 - 255) / np.sqrt(2 * 255)).max() < 4
    pairs = np.corrcoef(every)[np.triu_indices(8, 1)] * np.sqrt(n)
    assert np.abs(pairs).max() < 4
    for lag in (1, 2, 1024, 65536):
        r = np.array([np.corrcoef(x[:-lag], x[lag:])[0, 1] for x in every]) * np.sqrt(n - lag)
        assert np.abs(r).max() < 4
    # low bits alone, which weak hashes get wrong
    bits = (every * 2**24).astype(np.int64)
    for bit in range(24):
        ones = (bits >> bit & 1).mean(1)
        assert np.abs((ones - 0.5) * 2 * np.sqrt(n)).max() < 5  # 192 tests
    np.testing.assert_array_equal(drawn("one", 1000, 50), u[:, 1000:1050])


@pytest.mark.soak
def test_counts_of_short_rows_are_not_kept(monkeypatch):
    """Kept until the last tensor is merged, they would take as much memory as the model; and what
    is taken at the threshold is the same without them."""
    held = []
    before = streaming.Tree.resolve

    def remember(tree, step):
        before(tree, step)
        held.extend(x.size for unit in tree.units for x in jax.tree.leaves(unit.own[-1]))

    monkeypatch.setattr(streaming.Tree, "resolve", remember)
    rows = transforms.drop_by_magnitude(0.9, 0.05, KEY)  # whose pieces are rows
    merge = Merge(chain(rows, transforms.trim(0.4)), weighted_mean)
    models, base = problem({"w": (200, 3), "v": (30, 300)}, dtype=ml_dtypes.bfloat16)
    got, _ = streamed(merge, models, base)
    assert held
    room = SOME // FEW
    assert max(held) <= room * 3 * 30  # a count for each model and row of v, and of w 200 rows none
    want = merge(models, base)
    for leaf in base:
        assert got[leaf].tobytes() == np.asarray(want[leaf]).reshape(-1).tobytes()


def test_memory_is_given_out_again_only_when_its_readers_are_finished(monkeypatch):
    """JAX computes behind the caller's back, over memory that the next piece is read into."""
    merge_cases.in_small_pieces(monkeypatch)
    models, base = problem({"w": (64,)})
    (unit,) = streaming.units(merge_cases.works(methods.task_arithmetic(), models, base), False)
    reader = streaming.Reader(unit, Buffers(), True, Pulse())
    lent = []

    class Pending:
        """Computed only when its result is requested, as late as JAX may."""

        def __init__(self, models):
            self.models = models

        def block_until_ready(self):
            self.value = np.array(self.models[0, 0])

    def compute(piece):
        lent.append(piece.models.unsafe_buffer_pointer())
        return Pending(piece.models)

    computed = [reader(k, compute) for k in range(2)]
    for k in range(2):
        np.testing.assert_array_equal(computed[k].value, models[0]["w"][16 * k : 16 * k + 16])
    assert lent[0] == lent[1]  # the same memory: there was something to wait for

    def fails(piece):
        lent.append(piece)  # which keeps it, as a computation would
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader(0, fails)
    reader(1, compute)
    assert lent[-1] != lent[-2].models.unsafe_buffer_pointer()
    np.testing.assert_array_equal(lent[-2].models[0, 0], models[0]["w"][:16])


def stressed(monkeypatch, times):
    """Merges small pieces with many threads; returns their bytes and those of one thread."""
    merge_cases.in_small_pieces(monkeypatch)
    shapes = {f"w{i}": (i % 5 + 1, 7 * (i % 3) + 3) for i in range(6)} | {"long": (100,)}
    models, base = problem(shapes, 3, ml_dtypes.bfloat16)
    merges = [make("ties", density=0.4, scope="tree"), make("task_arithmetic")]
    whole = [streamed(merge, models, base, limits=Limits(1, 0))[0] for merge in merges]
    for i in range(times):
        j = i % len(merges)
        limits = Limits(8, (0, 1 << 20)[i // 2 % 2])
        got, _ = streamed(merges[j], models, base, limits=limits)
        for name, array in whole[j].items():
            assert array.tobytes() == got[name].tobytes(), (i, name)


@pytest.mark.soak
def test_many_threads_over_small_pieces_write_the_same_bytes(monkeypatch):
    stressed(monkeypatch, 4)


@pytest.mark.soak
def test_many_threads_over_small_pieces_write_the_same_bytes_a_thousand_times(monkeypatch):
    stressed(monkeypatch, 1000)


@pytest.mark.soak
def test_many_tiny_tensors_share_few_programs_and_few_calls():
    """Each alone would cost milliseconds: 10,000 of them are merged 512 at a time."""
    base = {f"w{i}": np.full(1 + i % 3, i, np.float32) for i in range(10_000)}
    for merge in (methods.linear(), methods.ties(), methods.slerp(t=0.3)):
        works = merge_cases.works(merge, [base, base], base)
        together = streaming.units(works, is_crowd(works))
        assert sum(len(unit.works) for unit in together) == len(works)
        assert len(together) == -(-len(works) // 512)


def test_tensors_of_one_piece_share_the_program_of_those_of_many(monkeypatch):
    merge_cases.in_small_pieces(monkeypatch)
    traced = []

    def total(piece, delta, weight):
        traced.append(delta.shape)
        return (weight * delta).sum(0)

    merge = Merge(reduction=reduce(kernel(total)))
    for size in (24, 16, 8):  # pieces of 16 and of 8 entries, then one of each alone
        models, base = problem({"w": (size,)})
        streamed(merge, models, base)
    assert traced == [(3, 16), (3, 8)]


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64), (256, 256)])
def test_grams_of_inputs_are_counted(shape):
    """The Gram matrices of `wudi` have the inputs of a matrix on both sides: those of a wide matrix
    are larger than all models."""
    base, *models = ({"w": np.zeros(shape, np.float32)} for _ in range(4))
    plain, wudi = (
        memory(merge_cases.works(method, models, base)[0])
        for method in (methods.task_arithmetic(), methods.wudi())
    )
    assert wudi - plain >= 4 * 4 * shape[1] ** 2  # those of three models and their sum, in float32
