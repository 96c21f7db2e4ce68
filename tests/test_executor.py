"""Methods streamed from tensors read piece by piece, against the same methods in memory."""

import functools
import inspect
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sail_jax import methods
from sail_jax.checkpoint.executor import (
    CONSTANT,
    Limits,
    MergeError,
    execute,
    limits,
    memory,
)
from sail_jax.checkpoint.streaming import ENTRIES, finite, passes, pieces, work
from sail_jax.merging import sparsifiers
from sail_jax.merging import transforms as rules
from sail_jax.merging.merge import Expression
from sail_jax.merging.reductions import average
from sail_jax.merging.task_vectors import chain, masked

KEY = jax.random.key(5)
EPS = float(np.finfo(np.float32).eps)
KNOBS = {
    "slerp": {"t": 0.3},
    "nearswap": {"t": 0.5},
    "expo": {"alpha": 0.3},
    "passthrough": {"scale": 0.5},
    "breadcrumbs": {"density": 0.6},
    "wudi": {"steps": 5},
}
WHOLE = ("tsv_m", "iso_c", "iso_cts", "wudi", "opcm")  # need a matrix at once: small ones
SHAPES = {"b": (300,), "c": (), "d": (40, 50), "e/f": (3, 4, 5)}
TWO = Limits(2, 1 << 20)
LONG = {"a": (1100, 1000)}  # two pieces, of which the second is cut short


class Held:
    """A tensor in memory that is read like one on disk."""

    def __init__(self, name, array):
        self.name, self.dtype, self.shape = name, array.dtype, array.shape
        self.source, self.flat = "memory", np.ascontiguousarray(array).reshape(-1)
        self.reads = 0

    def read(self, out, start=0):
        self.reads += 1
        out[:] = self.flat[start : start + len(out)]


class Sink:
    def __init__(self, finished=()):
        self.finished, self.parts, self.tensors = frozenset(finished), {}, {}

    def write(self, name, array, start=0):
        self.parts.setdefault(name, {})[start] = array.copy()

    def done(self, name):
        parts = self.parts.pop(name, {})
        self.tensors[name] = np.concatenate([parts[k] for k in sorted(parts)] or [np.zeros(0)])


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


def streamed(expression, models, base, weights=None, limits=TWO, **options):
    sink = Sink(options.pop("finished", ()))
    works = [
        work(n, base[n].shape, options.get("dtype", base[n].dtype), [Held(n, m[n]) for m in models],
             Held(n, base[n]), weights, expression)
        for n in base
    ]  # fmt: skip
    options.pop("dtype", None)
    records = execute(works, sink, limits, **options)
    return sink.tensors, records


def models_of(name):
    least, most = methods.expression(name, key=KEY, **KNOBS.get(name, {})).models
    return min(3, most or 3) if least <= 3 else least


@pytest.mark.parametrize("name", methods.METHODS)
def test_streamed_is_what_memory_gives(name):
    """To 16 ulp of the largest value: kernels are fused differently, sums are cut into pieces."""
    knobs = KNOBS.get(name, {})
    shapes = SHAPES if name in WHOLE else SHAPES | LONG
    models, base = problem(shapes, models_of(name))
    want = methods.get(name)(models, base, key=KEY, **knobs)
    got, _ = streamed(methods.expression(name, key=KEY, **knobs), models, base)
    assert got.keys() == base.keys()
    moved = 0.0
    for leaf in base:
        expected = np.asarray(want[leaf]).reshape(-1)
        np.testing.assert_allclose(got[leaf], expected, rtol=0, atol=16 * EPS * 6, err_msg=leaf)
        moved = max(moved, float(np.abs(expected - base[leaf].reshape(-1)).max()))
    assert moved > 0.003  # there was something to get wrong


@pytest.mark.parametrize("name", methods.METHODS)
def test_passes_are_counted_before_they_are_made(name):
    """What --plan says of reading, where nothing is kept; one tensor of one piece."""
    models, base = problem({"d": (40, 50)}, models_of(name))
    expression = methods.expression(name, key=KEY, **KNOBS.get(name, {}))
    first, *rest = (Held("d", m["d"]) for m in models)
    one = work(
        "d", (40, 50), base["d"].dtype, [first, *rest], Held("d", base["d"]), None, expression
    )
    execute([one], Sink(), Limits(1, 0))
    assert passes(one.program) == first.reads


@pytest.mark.parametrize("compat", ["paper", "mergekit"])
@pytest.mark.parametrize(
    "name", [n for n in methods.METHODS if "compat" in methods.knobs(n) and n not in WHOLE]
)
def test_bytes_do_not_depend_on_threads_or_memory(name, compat):
    knobs = {**KNOBS.get(name, {}), "compat": compat}
    models, base = problem(SHAPES | LONG, models_of(name), ml_dtypes.bfloat16)
    expression = functools.partial(methods.expression, name, key=KEY, **knobs)
    one, _ = streamed(expression(), models, base, limits=Limits(1, 0))
    other, _ = streamed(expression(), models, base, limits=Limits(3, 1 << 28))
    for leaf in base:
        assert one[leaf].tobytes() == other[leaf].tobytes()


@pytest.mark.parametrize("name", ["ties", "dare_ties"])
@pytest.mark.parametrize("scope", ["tree", "tensor"])
def test_exactly_as_many_votes_are_kept_as_in_memory(name, scope):
    """bfloat16 deltas have few magnitudes: who is kept at the threshold is settled by position,
    within and between pieces and tensors."""
    if name == "dare_ties" and scope == "tree":
        pytest.skip("DARE has no scope")
    knobs = {"scope": scope, "density": 0.3} if name == "ties" else {"density": 0.3}
    models, base = problem(SHAPES | LONG, 3, ml_dtypes.bfloat16)
    want = methods.get(name)(models, base, key=KEY, **knobs)
    got, _ = streamed(methods.expression(name, key=KEY, **knobs), models, base)
    for leaf in base:
        expected = np.asarray(want[leaf]).reshape(-1).astype(np.float32)
        apart = np.abs(got[leaf].astype(np.float32) - expected)
        # a sum of three at a rounding boundary may fall on its other side, one bfloat16 away
        assert (apart <= 2.0**-7 * np.maximum(np.abs(expected), 2.0**-7)).all()
        assert (apart > 0).mean() < 1e-3


def test_rules_of_every_form():
    """Masked, chained and majority-electing rules over several tensors, in tree scope."""
    rule = chain(
        masked(rules.trim(0.5), "e/*"), rules.drop(0.2, KEY), rules.trim(0.4),
        rules.elect(tie="majority"),
    )  # fmt: skip
    models, base = problem(SHAPES | LONG)
    want = methods.merge(models, base, rule=rule, count=average, weights=[1.0, 2.0, 0.5])
    got, _ = streamed(Expression(average, rule), models, base, [1.0, 2.0, 0.5])
    for leaf in base:
        expected = np.asarray(want[leaf]).reshape(-1)
        np.testing.assert_allclose(got[leaf], expected, rtol=0, atol=16 * EPS * 6)


def test_bare_functions_cannot_be_streamed():
    models, base = problem(SHAPES)
    with pytest.raises(TypeError, match="cannot be streamed"):
        streamed(Expression(average, lambda votes: votes), models, base)


def test_dtypes_mix_and_widen():
    """float16, bfloat16, float32 and float8 inputs are computed with in float32, float64 in its
    own; the output has the dtype asked for."""
    models, base = problem({"d": (40, 50)})
    types = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    mixed = [{"d": m["d"].astype(t)} for m, t in zip(models, types, strict=True)]
    want = sum(m["d"].astype(np.float64) for m in mixed) / 3
    got, _ = streamed(methods.expression("linear"), mixed, base, dtype=np.dtype(np.float32))
    np.testing.assert_allclose(got["d"].reshape(40, 50), want, rtol=0, atol=8 * EPS * 4)
    double = [{"d": m["d"].astype(np.float64)} for m in models]
    got, _ = streamed(methods.expression("linear"), double, {"d": base["d"].astype(np.float64)})
    want = sum(m["d"] for m in double) / 3
    assert got["d"].dtype == np.float64
    np.testing.assert_allclose(got["d"].reshape(40, 50), want, rtol=0, atol=1e-15)


def test_non_finite_inputs_are_all_named():
    models, base = problem(SHAPES)
    models[1]["d"][3, 4] = np.nan
    models[2]["b"][7] = np.inf
    with pytest.raises(MergeError, match="NaN or infinity") as error:
        streamed(methods.expression("linear"), models, base)
    assert "b in memory" in str(error.value)
    assert "d in memory" in str(error.value)
    got, _ = streamed(methods.expression("linear"), models, base, allow_nonfinite=True)
    assert np.isnan(got["d"]).sum() == 1


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


def test_outcomes_that_overflow_are_refused():
    big = {"d": np.full((4, 4), 6e4, np.float16)}
    base = {"d": np.zeros((4, 4), np.float16)}
    with pytest.raises(MergeError, match=r"d: the merged values do not fit float16.*6.55e\+04"):
        streamed(methods.expression("task_arithmetic"), [big, big], base)
    got, _ = streamed(methods.expression("linear"), [big, big], base)  # sums in float32
    assert (got["d"] == big["d"].reshape(-1)).all()


def test_what_is_finished_is_not_written_again_but_counts():
    """A tree-scope threshold belongs to all tensors, also to those an earlier run has written."""
    models, base = problem(SHAPES)
    whole, _ = streamed(methods.expression("ties", scope="tree"), models, base)
    rest, _ = streamed(methods.expression("ties", scope="tree"), models, base, finished=["d"])
    assert rest.keys() == base.keys() - {"d"}
    for leaf in rest:
        assert rest[leaf].tobytes() == whole[leaf].tobytes()


def test_progress_reaches_the_end_and_records_what_is_measured():
    models, base = problem({"d": (40, 50)})
    seen = []
    _, records = streamed(
        methods.expression("ties", density=0.3, scope="tensor"), models, base,
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

    works = [
        work(n, base[n].shape, base[n].dtype, [Held(n, m[n]) for m in models], Held(n, base[n]),
             None, methods.expression("linear"))
        for n in base
    ]  # fmt: skip
    with pytest.raises(OSError, match="no space"):
        execute(works, Full(), Limits(2, 0))
    assert not [t for t in threading.enumerate() if t.name.startswith("merge")]


def test_memory_limits_threads_and_refuses_by_name():
    models, base = problem(SHAPES | LONG)
    works = [
        work(n, base[n].shape, base[n].dtype, [Held(n, m[n]) for m in models], Held(n, base[n]),
             None, methods.expression("linear"))
        for n in base
    ]  # fmt: skip
    need = max(map(memory, works))
    assert limits(works, CONSTANT + 4 * need, 4).threads == 4
    one = limits(works, CONSTANT + need, 4)
    assert one.threads >= 1
    with pytest.raises(MergeError, match=r"--max-memory: a needs \d+ MiB .* got 100 MiB"):
        limits(works, 100 << 20)


def test_what_a_tensor_needed_is_let_go_with_it(monkeypatch):
    """Masks of tensors that are merged would add up to an eighth of a model in float8."""
    models, base = problem({f"w{k}": (40, 50) for k in range(6)})
    held, alive = [], []
    restore = sparsifiers._restore

    def remember(parts, size):
        alive.append(sum(mask() is not None for mask in held))
        held.extend(weakref.ref(part[2]) for part in parts.values())
        return restore(parts, size)

    monkeypatch.setattr(sparsifiers, "_restore", remember)
    della = methods.expression("della", key=KEY, compat="mergekit")
    streamed(della, models, base, limits=Limits(1, 0))
    assert len(alive) == 6
    assert max(alive) <= 1
    one = work("w", (40, 50), base["w0"].dtype, [Held("w0", m["w0"]) for m in models],
               Held("w0", base["w0"]), None, della)  # fmt: skip
    assert memory(one) - memory(one._replace(expression=methods.expression("linear"))) == 750


@pytest.mark.parametrize("grain", ["entry", "row", "leaf"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (3 * ENTRIES // 2,), (3, ENTRIES), (0, 4)])
def test_pieces_cover_a_tensor_once(shape, grain):
    size = int(np.prod(shape))
    found = pieces(shape, grain)
    ends = 0
    for piece in found:
        assert piece.start == ends
        assert piece.count <= int(np.prod(piece.shape))
        ends += piece.count
    assert ends == size
    if grain == "row" and len(shape) > 1:
        assert all(piece.start % shape[-1] == 0 for piece in found)


def test_every_kernel_lives_as_long_as_the_process():
    """Two expressions of equal knobs, and of other numbers, share what is compiled for them."""
    for name in methods.METHODS:
        knobs = KNOBS.get(name, {})
        a, b = (methods.expression(name, key=KEY, **knobs) for _ in range(2))
        for x, y in zip(kernels(a), kernels(b), strict=True):
            assert jax.tree.structure(x) == jax.tree.structure(y), name


def kernels(expression):
    found = []
    todo = [expression.rule, expression.count]
    while todo:
        part = todo.pop()
        if hasattr(part, "rules"):
            todo += part.rules
        elif hasattr(part, "rule"):
            todo.append(part.rule)
        else:
            kernel = getattr(part, "summary", None) or getattr(part, "kernel", None)
            assert kernel is not None or inspect.isfunction(part)
            found.append(kernel)
    return found


def test_draws_are_independent_and_fair():
    """Null: uniform, independent between streams and neighbours. 2^20 draws each, |z| < 4."""
    n = 1 << 20
    delta = jnp.zeros((4, n))
    place = lambda name, start: rules.Place(np.uint32(name), np.uint32(start), n)  # noqa: E731
    u = np.asarray(rules.drawn(lambda u: u, KEY, place(1, 0), delta), np.float64)
    v = np.asarray(rules.drawn(lambda u: u, KEY, place(2, 0), delta), np.float64)
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
    piece = np.asarray(rules.drawn(lambda u: u, KEY, place(1, 1000), delta[:, :50]), np.float64)
    np.testing.assert_array_equal(piece, u[:, 1000:1050])
