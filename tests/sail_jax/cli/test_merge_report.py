"""The report of a merge: its numbers compared with sums over all entries, and its HTML page."""

import base64
import dataclasses
import hashlib
import itertools
import json
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sail_jax import Merge, disk
from sail_jax.checkpoint.executor import Record
from sail_jax.checkpoint.planning.plan import InputSummary, Plan, Treatment
from sail_jax.cli import merge_report
from sail_jax.cli.merge_report import measures, pages, record
from sail_jax.merging.work import Work, copy

ABOUT = {
    "recipe": "merge_method: ties\nmodels: [<b>bold</b>]\n",
    "versions": {"sail-jax": "0.1.0", "jax": "0.10.2"},
    "device": {"platform": "cpu", "count": 1},
    "wall_seconds": 12.5,
}
MODELS = ("models/math-7b", "models/code-7b", "models/chat-7b")


def llama(layers=24, width=16):
    """Returns names and shapes of a small Llama."""
    block = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    block |= {f"mlp.{x}_proj": (2 * width, width) for x in ("gate", "up")}
    block |= {"mlp.down_proj": (width, 2 * width)}
    block |= {f"{x}_layernorm": (width,) for x in ("input", "post_attention")}
    shapes = {"model.embed_tokens.weight": (64, width)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return {**shapes, "model.norm.weight": (width,), "lm_head.weight": (64, width)}


def merged(
    shapes, models=MODELS, *, scales=None, based=True, method="ties", density=0.4, copied=(),
    change=lambda deltas: deltas, notes=(), seed=0,
):  # fmt: skip
    """A plan, its records and the task vectors behind them: models that share a direction, of
    which the largest `density` entries of each are kept and averaged."""
    rng = np.random.default_rng(seed)
    scales = [1.0 - 0.2 * k for k in range(len(models))] if scales is None else scales
    merge = Merge(name=method, options={"density": density, "normalize": True, "compat": "paper"})
    treatments, records, arrays = [], {}, {}
    for i, (name, shape) in enumerate(shapes.items()):
        dtype = np.dtype(ml_dtypes.bfloat16)
        tensors = tuple(_Lies(name, dtype, shape, f"/data/{m}/model.safetensors") for m in models)
        base = _Lies(name, dtype, shape, "/data/models/base/model.safetensors") if based else None
        if name in copied:
            note = "non-float: copied"
            treatments.append(Treatment(copy(name, dtype, tensors[0]), models, None, None, 1, note))
            continue
        size, common = int(np.prod(shape)), rng.normal(size=shape)
        grow = 1e-3 * (0.5 + i / len(shapes)) * (20 if shape[:1] == (64,) else 1)
        deltas = [
            s * grow * (0.4 * common + rng.normal(size=shape)) * (rng.random(shape) > 0.1)
            for s in scales
        ]
        deltas = np.stack(change(deltas))
        cut = np.quantile(np.abs(deltas).reshape(len(models), -1), 1 - density, axis=1)
        kept = deltas * (np.abs(deltas) >= cut.reshape(-1, *[1] * len(shape)))
        update = kept.sum(0) / np.maximum(1, (kept != 0).sum(0))
        arrays[name] = (deltas, kept, update)
        records[name] = _record(name, deltas, kept, update)
        weights = tuple(0.5 for _ in models)
        note = "rows 64 to 71 of models/code-7b left out" if shape[:1] == (64,) else ""
        work = Work(name, shape, dtype, tensors, base, np.array(weights), merge)
        treatments.append(Treatment(work, models, base, weights, 0, note))
        assert size == records[name].size
    inputs = [InputSummary(m, "model", len(shapes), 10**9) for m in models]
    if based:
        inputs = [InputSummary("models/base", "base", len(shapes), 10**9), *inputs]
    extras: dict[str, bytes | Path] = {"config.json": b"{}"}
    plan = Plan(method, tuple(treatments), {}, extras, tuple(inputs), "paper", 7, tuple(notes))
    return SimpleNamespace(plan=plan, records=records, arrays=arrays)


class _Lies:
    def __init__(self, name, dtype, shape, source):
        self.name, self.dtype, self.shape, self.source = name, dtype, shape, source

    def read(self, out, start=0):
        raise AssertionError("a report reads no tensors")


def _norm(x):
    return float(np.sqrt((np.asarray(x) ** 2).sum()))


def _cosine(x, y):
    return float((x * y).sum() / (_norm(x) * _norm(y))) if _norm(x) * _norm(y) else 0.0


def _record(name, deltas, trimmed, update):
    moved = (deltas != 0).reshape(len(deltas), -1).sum(1)
    kept = (trimmed != 0).reshape(len(deltas), -1).sum(1)
    return Record(
        name,
        update.size,
        [_norm(x) for x in deltas],
        [[_cosine(x, y) for y in deltas] for x in deltas],
        _norm(update),
        [_cosine(x, update) for x in deltas],
        float(((deltas > 0).any(0) & (deltas < 0).any(0)).mean()),
        float((update != 0).mean()),
        moved.astype(float).tolist(),
        (kept / np.maximum(1, moved)).tolist(),
    )


def report(case):
    return json.loads(record.as_json(case.plan, case.records, ABOUT))


def page(case, about=ABOUT):
    return pages.page(case.plan, case.records, about)


class _Page(HTMLParser):
    """Every tag with its attributes, all text, and the cells of every row of a table."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.rows, self.text, self.scripts, self.styles = [], [], "", [], []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        {"script": self.scripts, "style": self.styles}.get(self._inside, []).append(data)
        self.text += data


SMALL = {"a.weight": (6, 5), "b.weight": (40,), "count": (), "c.bias": (3,)}


@pytest.fixture(scope="module")
def large():
    return merged(llama(), copied=("model.layers.3.input_layernorm.weight",), notes=("a note",))


@pytest.fixture(scope="module")
def large_page(large):
    return page(large)


# --- numbers


@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("shapes", [SMALL, llama(2)], ids=["small", "llama"])
def test_whole_model_numbers_are_those_of_all_entries_at_once(shapes, based):
    case = merged(shapes, based=based)
    total = report(case)["summary"]["total"]
    deltas, kept, update = (
        np.concatenate([parts[k].reshape(*lead, -1) for parts in case.arrays.values()], axis=-1)
        for k, lead in enumerate(((3,), (3,), ()))
    )
    # sums of float64 squares and square roots of them, in another order: 1e-12
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    close(total["norms"], [_norm(x) for x in deltas])
    close(total["rms"], [np.sqrt((x**2).mean()) for x in deltas])
    close(total["cosines"], [[_cosine(x, y) for y in deltas] for x in deltas])
    close(total["update"], _norm(update))
    close(total["alignment"], [_cosine(x, update) for x in deltas])
    close(total["conflicts"], ((deltas > 0).any(0) & (deltas < 0).any(0)).mean())
    close(total["chance"], _by_chance(case))
    close(total["changed"], (update != 0).mean())
    assert total["moved"] == (deltas != 0).sum(1).tolist()
    close(total["kept"], (kept != 0).sum(1) / (deltas != 0).sum(1))
    assert total["models"] == list(MODELS)
    assert total["from"] == ("base" if based else "zero")


def _by_chance(case):
    """The chance of a conflict, added up over all signs that the models may have in an entry."""
    conflicts = 0.0
    for deltas, _, _ in case.arrays.values():
        moved = (deltas != 0).reshape(len(deltas), -1).mean(1)
        for signs in itertools.product((-1, 0, 1), repeat=len(deltas)):
            odds = np.prod([p / 2 if s else 1 - p for s, p in zip(signs, moved, strict=True)])
            conflicts += odds * ({-1, 1} <= set(signs)) * deltas[0].size
    return conflicts / sum(x[0][0].size for x in case.arrays.values())


@pytest.mark.slow
def test_models_that_move_everything_conflict_by_chance_in_half_and_in_three_quarters():
    for models, chance in ((MODELS[:2], 0.5), (MODELS, 0.75)):
        case = merged(SMALL, models=models, change=lambda deltas: [abs(d) + 1 for d in deltas])
        total = report(case)["summary"]["total"]
        assert (total["chance"], total["conflicts"]) == (pytest.approx(chance), 0)
    less = "Signs conflict at 0 % of the entries, less than by chance (chance: 75.0 %)"
    assert less in page(case)


def test_layers_and_kinds_partition_the_tensors(large):
    data = measures.measured(large.plan, large.records)
    bins = measures.by_depth(data.names)
    assert [one.label for one in bins] == ["in", *map(str, range(24)), "out"]
    assert sorted(i for one in bins for i in one.members) == list(range(len(data.names)))
    whole = sum(data.total(one.members).norms ** 2 for one in bins)
    np.testing.assert_allclose(whole, data.total().norms ** 2, rtol=1e-12)
    layer = [large.arrays[n][0] for n in data.names if n.startswith("model.layers.7.")]
    flat = np.concatenate([x.reshape(3, -1) for x in layer], axis=1)
    got = data.total(bins[8].members).cosines[0, 2]
    np.testing.assert_allclose(got, _cosine(flat[0], flat[2]), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norm"),
        ("transformer.h.3.ln_1.bias", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.self_attn.o_proj.weight", "attention"),
        ("encoder.layer.3.attention.output.dense.weight", "attention"),
        ("encoder.layer.3.output.dense.weight", "MLP"),
        ("decoder.block.1.layer.2.DenseReluDense.wi.weight", "MLP"),
        ("model.layers.2.block_sparse_moe.experts.3.w1.weight", "MLP"),
        ("params/Conv_0/kernel", "convolution"),
        ("params/scale", "other"),
        ("out.kernel", "head"),
        ("model.layers.0.attention.wq.weight", "attention"),
        ("layers.0.kernel", "MLP"),
        ("model.layers.2.block_sparse_moe.gate.weight", "router"),
        ("model.layers.2.mlp.gate_proj.weight", "MLP"),
        ("backbone.layers.0.mixer.in_proj.weight", "recurrent"),
    ],
)
def test_kinds_are_read_off_names(name, kind):
    assert measures.kind(name) == kind


def test_modules_are_gathered_where_there_are_no_layers():
    names = [f"part{i}.{x}" for i in range(1000) for x in ("w", "b")]
    bins = measures.by_depth(names)
    assert len(bins) <= 48
    assert [i for one in bins for i in one.members] == list(range(2000))
    assert [one.label for one in measures.by_depth(names[:4])] == ["part0", "part1"]


def test_models_are_told_apart_in_whatever_order():
    """The column of an omitted model is empty."""
    case = merged(SMALL)
    first, *rest = case.plan.treatments
    deltas, kept, update = case.arrays[first.name]
    some = [2, 0]
    first = first._replace(
        work=dataclasses.replace(first.work, models=tuple(first.models[k] for k in some)),
        owners=tuple(first.owners[k] for k in some),
        weights=(0.5, 0.5),
    )
    case.records[first.name] = _record(first.name, deltas[some], kept[some], update)
    case.plan = case.plan._replace(treatments=(first, *rest))
    found = report(case)
    assert found["tensors"][0]["models"] == [MODELS[2], MODELS[0]]
    norms = [
        np.sqrt(
            sum(_norm(x[0][k]) ** 2 for n, x in case.arrays.items() if n != first.name or k != 1)
        )
        for k in range(3)
    ]
    np.testing.assert_allclose(found["summary"]["total"]["norms"], norms, rtol=1e-12)


def test_a_model_that_is_listed_twice_has_two_columns():
    case = merged(SMALL, models=("m/self", "m/other", "m/self"))
    total = report(case)["summary"]["total"]
    assert total["models"] == ["m/self", "m/other", "m/self (2)"]
    want = report(merged(SMALL))["summary"]["total"]
    assert {**want, "models": total["models"]} == total


@pytest.mark.slow
def test_a_base_that_is_merged_has_the_first_column():
    case = merged(SMALL, method="slerp")
    for t in case.plan.treatments:
        deltas, kept, update = case.arrays[t.name]
        both = np.stack([update + 1, *deltas])
        case.records[t.name] = _record(t.name, both, np.stack([update + 1, *kept]), update)
    found = report(case)
    total = found["summary"]["total"]
    assert total["models"] == ["models/base", *MODELS]
    assert total["from"] == found["tensors"][0]["from"] == "zero"
    flat = np.concatenate([x[2].ravel() for x in case.arrays.values()])
    np.testing.assert_allclose(total["norms"][0], _norm(flat + 1), rtol=1e-12)
    assert "norm of the weights" in page(case)


# --- JSON


FIELDS = ("norms", "cosines", "update", "alignment", "conflicts", "changed", "moved", "kept")


def test_json_has_a_row_for_every_tensor_and_the_recipe(large):
    found = report(large)
    assert list(found) == ["schema", "about", "summary", "tensors"]
    assert found["schema"] == "sail-jax merge report 1"
    assert found["about"] == ABOUT
    rows = {row["name"]: row for row in found["tensors"]}
    assert list(rows) == list(llama())
    assert found["summary"]["copied"] == 1
    assert found["summary"]["notes"] == ["a note"]
    copy = rows["model.layers.3.input_layernorm.weight"]
    assert {copy[field] for field in FIELDS} == {None}
    assert copy["note"].startswith("non-float")
    for name, one in large.records.items():
        row = rows[name]
        assert row["size"] == one.size
        assert all(row[field] == getattr(one, field) for field in FIELDS)
        assert row["weights"] == [0.5] * 3
        assert row["options"] == {"density": 0.4, "normalize": True, "compat": "paper"}
        assert (row["models"], row["dtype"]) == (list(MODELS), "bfloat16")


def test_what_is_undefined_or_not_finite_is_null():
    case = merged(SMALL, scales=[1, 0, 0.5])
    name = "b.weight"
    case.records[name] = case.records[name]._replace(norms=[float("inf"), 0.0, float("nan")])
    found = report(case)
    row = found["tensors"][0]
    assert row["norms"][1] == 0
    assert (row["alignment"][1], row["kept"][1], row["cosines"][0][1]) == (None, None, None)
    assert row["cosines"][0][2] == pytest.approx(case.records["a.weight"].cosines[0][2])
    assert found["tensors"][1]["norms"] == [None, 0, None]
    assert any("NaN or infinity" in w and name in w for w in found["summary"]["warnings"])
    assert np.isfinite(found["summary"]["total"]["norms"]).all()


# --- warnings


def _equal(deltas):
    return [deltas[0], deltas[0] * 1.01, deltas[2]]


def _opposed(deltas):
    return [deltas[0], -deltas[0] + 0.3 * deltas[1], deltas[2]]


def _contrary(deltas):
    """A third model that undoes some of the first."""
    return [deltas[0], deltas[1], deltas[2] - 0.3 * deltas[0]]


def _apart(deltas):
    """Models that move disjoint entries: nothing to conflict."""
    which = np.arange(deltas[0].size).reshape(deltas[0].shape) % len(deltas)
    return [np.where(which == k, d, 0) for k, d in enumerate(deltas)]


BASE = {"a.weight": (30, 31), "b.weight": (400,)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": [1, 0, 1]}, "B · code-7b equals the base in every"),
        ({"change": _equal}, "A · math-7b and B · code-7b are duplicates"),
        ({"change": _opposed}, "A · math-7b and B · code-7b point in opposite directions"),
        ({"change": _contrary}, "more than by chance (chance: "),
        ({"scales": [1, 0.05, 1]}, "times as far from the base as B · code-7b"),
    ],
)
def test_warnings_fire_alone(options, words):
    """Each warning has a separate cause. Opposed models also have more conflicts than by chance."""
    found = report(merged(BASE, **options))["summary"]["warnings"]
    others = [w for w in found if words not in w and "Signs conflict" not in w]
    assert sum(words in w for w in found) == 1, found
    assert not others


@pytest.mark.slow
def test_no_warning_where_nothing_stands_out():
    for case in (merged(BASE, change=_apart), merged(BASE, models=MODELS[:1])):
        assert report(case)["summary"]["warnings"] == []
    assert "Nothing stands out." in page(case)


def test_warnings_about_the_outcome():
    def told(**changes):
        case = merged(BASE, change=_apart)
        case.records = {n: r._replace(**changes) for n, r in case.records.items()}
        return report(case)["summary"]["warnings"]

    assert any("equals the base in every measured tensor" in w for w in told(update=0.0))
    assert any("times as far from the base as the farthest" in w for w in told(update=100.0))
    assert told(kept=[0.0, 0.4, 0.4]) == ["The merge kept no entry that A · math-7b moved."]
    away = told(alignment=[0.5, -0.3, 0.5])
    assert [w for w in away if "points away from B" in w] == away != []


def test_tensors_that_were_not_measured_are_told_of():
    case = merged(SMALL)
    del case.records["a.weight"]
    without = case.plan.treatments[1]._replace(base=None)
    rest = [t for t in case.plan.treatments if t.name != without.name]
    case.plan = case.plan._replace(treatments=(*rest, without))
    found = " ".join(report(case)["summary"]["warnings"])
    assert "1 merged tensor were not measured" not in found
    assert "1 merged tensor was not measured" in found
    assert "1 tensor was merged without the base" in found
    case.records = {}
    assert report(case)["summary"]["warnings"] == []  # nothing had to be measured
    assert "Nothing was measured." in page(case)


# --- the page


@pytest.mark.slow
def test_page_lists_every_tensor_and_fetches_nothing(large, large_page):
    found = _Page(large_page)
    cells = {row[0] for row in found.rows}
    assert set(llama()) <= cells
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "base", "form", "embed")
        assert not {"href", "srcset", "style", "onclick", "onload"} & set(attributes)
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    bare = re.sub(r"base64,[^\"]+\"", "", large_page)
    assert len(bare) < len(large_page) / 2
    assert not re.search(r"//|url\(|@import|fetch|XMLHttp|WebSocket|import\(", bare)
    for picture in re.findall(r"base64,([^\"]+)\"", large_page):
        assert base64.b64decode(picture, validate=True).startswith(b"\x89PNG")
    alternatives = [a["alt"] for tag, a in found.tags if tag == "img"]
    assert len(alternatives) == 3
    assert all(alternatives)


@pytest.mark.slow
def test_policy_allows_the_page_its_own_script_and_style_only(large_page):
    found = _Page(large_page)
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
    (script,), (style,) = found.scripts, found.styles
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy


HOSTILE = "</td><script>alert(1)</script>&\"'$\\alpha_{$\n\x00\ud800数学"


@pytest.mark.slow
def test_hostile_names_stay_text():
    shapes = {f"{HOSTILE}.weight": (8, 4), f"model.layers.0.{HOSTILE}": (4, 4)}
    case = merged(shapes, models=(HOSTILE, "b" * 300), notes=(HOSTILE,))
    treatment = case.plan.treatments[0]
    hostile = dataclasses.replace(
        treatment.work, merge=Merge(name=HOSTILE, options={HOSTILE: HOSTILE})
    )
    treatment = treatment._replace(note=HOSTILE, work=hostile)
    case.plan = case.plan._replace(
        treatments=(treatment, *case.plan.treatments[1:]), method=HOSTILE,
        aliases={HOSTILE: HOSTILE}, extras={HOSTILE: b""},
    )  # fmt: skip
    html = pages.page(case.plan, case.records, {HOSTILE: HOSTILE, "recipe": HOSTILE + "\n"})
    found = _Page(html)
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert "alert" not in found.scripts[0]
    shown = HOSTILE.replace("\x00\ud800", r"\x00\ud800")  # which would not be shown on a page
    assert f"{shown}.weight" in {row[0] for row in found.rows}
    data = json.loads(record.as_json(case.plan, case.records, {HOSTILE: HOSTILE}))
    assert data["tensors"][0]["name"] == f"{HOSTILE}.weight"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 1, 8])
def test_any_number_of_models_has_its_columns(count):
    case = merged(llama(1), models=tuple(f"m/{k}" for k in range(count)))
    rows = [row for row in _Page(page(case)).rows if row]
    header = next(row for row in rows if row[0] == "tensor")
    letters = "ABCDEFGH"[:count]
    assert [x for x in header if x.startswith("kept")] == [f"kept {x}" for x in letters]
    assert all(len(row) == len(header) for row in rows[rows.index(header) :])


ODD = {
    "scalars": {"s": (), "empty": (0, 3)},
    "stacks": {
        f"{part}.block.{k}.a": (3, 3)
        for part, k in (("encoder", 0), ("decoder", 0), ("decoder", 1))
    },
    "modules": {f"part{k}.w": (3,) for k in range(70)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(ODD["scalars"], id="scalars"),
        *(pytest.param(ODD[n], id=n) for n in ("stacks", "modules")),
    ],
)
def test_odd_models_have_a_page(shapes):
    case = merged({k: v for k, v in shapes.items() if 0 not in v})
    for name, shape in shapes.items():
        if 0 in shape:
            empty = case.plan.treatments[0]
            empty = empty._replace(work=dataclasses.replace(empty.work, name=name, shape=shape))
            case.plan = case.plan._replace(treatments=(*case.plan.treatments, empty))
            zeros = [0.0] * 3
            case.records[name] = Record(
                name, 0, zeros, [zeros] * 3, 0.0, zeros, 0.0, 0.0, zeros, zeros
            )
    assert set(shapes) <= {row[0] for row in _Page(page(case)).rows if row}


@pytest.mark.slow
def test_models_that_all_equal_the_base_have_a_page():
    case = merged(llama(1), models=MODELS[:2], scales=[0, 0])
    text = _Page(page(case)).text
    for label in ("A · math-7b", "B · code-7b"):
        assert f"{label} equals the base in every merged tensor" in text
    assert report(case)["summary"]["total"]["cosines"] == [[None, None], [None, None]]


# --- files


@pytest.mark.soak
def test_report_replaces_a_report_and_nothing_else(tmp_path):
    case, folder = merged(SMALL), tmp_path / "new" / "report"
    for _ in range(2):
        paths = merge_report.write(folder, case.plan, case.records, ABOUT)
        assert [path.name for path in paths] == ["report.json", "report.html"]
        assert sorted(folder.iterdir()) == sorted(paths)
    assert json.loads(paths[0].read_bytes()) == report(case)
    assert paths[1].read_text() == page(case)
    for name in ("report.json", "report.html"):
        other = tmp_path / name[-4:]
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(disk.RefusedError, match=f"{name} exists and is not a merge report"):
            merge_report.admit(other)
        with pytest.raises(disk.RefusedError):
            merge_report.write(other, case.plan, case.records, ABOUT)
        assert [(p.name, p.read_text()) for p in other.iterdir()] == [(name, "mine")]
    with pytest.raises(disk.RefusedError, match="not a folder"):
        merge_report.admit(paths[0])


@pytest.mark.soak
def test_equal_merges_have_equal_reports(large, large_page):
    assert page(large) == large_page
