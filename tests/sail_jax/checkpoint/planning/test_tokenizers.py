"""Vocabularies brought to one, and the rows that follow."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_checkpoints import WIDTH, Array, beside, config, entries, llama

from sail_jax.checkpoint.planning.plan import plan
from sail_jax.checkpoint.recipe.recipes import RecipeError, parse
from sail_jax.checkpoint.sources.rows import FILL, ZERO, Rows

CORE = ["<s>", "a", "b", "ab", "c"]
EMBEDDING = "model.embed_tokens.weight"


def entry(text, i, **more):
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": i, "content": text, **plain, "normalized": False, "special": True, **more}


def document(core=CORE, added=(), kind="BPE"):
    """A tokenizer.json; added: texts with their ids, after the core."""
    ids = dict(core) if isinstance(core, dict) else {text: i for i, text in enumerate(core)}
    model = {"type": kind, "vocab": ids, "merges": [["a", "b"]]}
    return {"version": "1.0", "model": model, "added_tokens": [entry(t, i) for t, i in added]}


@pytest.fixture
def model(tmp_path):
    """A model with 8 rows and this tokenizer."""

    def make(name, seed, rows=8, tokenizer=None, **documents):
        fake = llama(name, seed, vocab=rows, dtype=np.float32)
        documents = {"config": config(vocab_size=rows, torch_dtype="float32")} | documents
        if tokenizer is not None:
            documents["tokenizer"] = tokenizer
        return beside(fake, tmp_path / name, **documents)

    return make


def merged(recipe, **checkpoints):
    """The plan, the embedding's treatment, each model's rows, and the old embeddings."""
    found = plan(parse(recipe, "r"), checkpoints.__getitem__)
    t = next(t for t in found.treatments if t.name == EMBEDDING)
    names = [n for n in checkpoints if n != "base" or t.base is None]
    rows = {n: entries(x) for n, x in zip(names, t.models, strict=True)}
    if t.base is not None:
        rows["base"] = entries(t.base)
    old = {n: one.tensors[EMBEDDING].array for n, one in checkpoints.items()}
    return found, t, rows, old


LINEAR = "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: one}, {model: two}]\n"
DELTAS = (
    "merge_method: task_arithmetic\nbase_model: base\nparameters: {weight: 1}\n"
    "models: [{model: one}, {model: two}]\n"
)


@pytest.mark.parametrize("source", ["union", "base", "one"])
def test_equal_vocabularies_leave_rows_where_they_are(model, source):
    """This keeps the padding rows beyond the tokenizer, which mergekit removes."""
    one, two = model("one", 1, tokenizer=document()), model("two", 2, tokenizer=document())
    found, t, rows, old = merged(LINEAR + f"tokenizer_source: {source}", one=one, two=two)
    assert t.shape == (8, WIDTH)
    assert isinstance(found.extras["tokenizer.json"], Path)
    assert "config.json" in found.extras
    assert isinstance(found.extras["config.json"], Path)
    for name in rows:
        np.testing.assert_array_equal(rows[name], old[name])


def test_union_appends_added_tokens(model):
    base = model("base", 0, tokenizer=document(), tokenizer_config={"added_tokens_decoder": {}})
    one = model("one", 1, tokenizer=document(added=[("<x>", 5)]))
    two = model("two", 2, rows=9, tokenizer=document(added=[("<y>", 5), ("<x>", 8)]))
    found, t, rows, old = merged(DELTAS + "tokenizer_source: union", base=base, one=one, two=two)
    written = json.loads(found.extras["tokenizer.json"])
    assert [(e["content"], e["id"]) for e in written["added_tokens"]] == [("<x>", 5), ("<y>", 6)]
    assert written["model"] == document()["model"]
    decoder = json.loads(found.extras["tokenizer_config.json"])["added_tokens_decoder"]
    assert {i: e["content"] for i, e in decoder.items()} == {"5": "<x>", "6": "<y>"}
    assert t.shape == (8, WIDTH)  # the new ids lie in the base's padding
    mean = ((old["one"][5].astype(np.float64) + old["two"][8]) / 2).astype(np.float32)
    for name, array in rows.items():
        np.testing.assert_array_equal(array[:5], old[name][:5])
    np.testing.assert_array_equal(rows["one"][5], old["one"][5])
    np.testing.assert_array_equal(rows["two"][5], old["two"][8])
    np.testing.assert_array_equal(rows["base"][5], mean)  # two models have it, the base has not
    np.testing.assert_array_equal(rows["two"][6], old["two"][5])
    np.testing.assert_array_equal(rows["one"][6], old["two"][5])  # one model has it
    np.testing.assert_array_equal(rows["one"][7], old["one"][7])  # padding stays


def test_a_token_only_the_base_and_another_have_comes_from_the_base(model):
    added = document(added=[("<x>", 5)])
    base, one = model("base", 0, tokenizer=added), model("one", 1, tokenizer=added)
    two = model("two", 2, tokenizer=document())
    _, _, rows, old = merged(DELTAS + "tokenizer_source: union", base=base, one=one, two=two)
    np.testing.assert_array_equal(rows["two"][5], old["base"][5])


def test_rows_follow_tokens_whatever_their_ids(model):
    """Against a plain reference, for random vocabularies over the donor's."""
    rng = np.random.default_rng(0)
    words = [f"t{i}" for i in range(20)]
    core = {text: i for i, text in enumerate(words)}
    shuffled = [dict(zip(words, rng.permutation(24)[:20].tolist(), strict=True)) for _ in range(2)]
    for ids in shuffled:
        for text in rng.choice(words, 4, replace=False):
            del ids[text]
    one = model("one", 1, rows=20, tokenizer=document(core))
    two = model("two", 2, rows=24, tokenizer=document(shuffled[0]))
    three = model("three", 3, rows=24, tokenizer=document(shuffled[1]))
    text = LINEAR.replace("two}]", "two}, {model: three}]") + "tokenizer_source: base"
    _, _, rows, old = merged(text, one=one, two=two, three=three)
    vocabularies = {"one": core, "two": shuffled[0], "three": shuffled[1]}
    for name in vocabularies:
        for word, i in core.items():
            have = {n: old[n][v[word]] for n, v in vocabularies.items() if word in v}
            expected = have.get(name)
            if expected is None:
                expected = np.mean([x.astype(np.float64) for x in have.values()], 0)
            # one rounding to float32 after a mean in float64
            np.testing.assert_allclose(rows[name][i], expected, rtol=2**-23)


def test_padding_asked_for_is_the_mean_of_the_rows(model):
    one, two = model("one", 1, tokenizer=document()), model("two", 2, tokenizer=document())
    found, t, rows, old = merged(LINEAR + "tokenizer: {pad_to_multiple_of: 6}", one=one, two=two)
    assert t.shape == (6, WIDTH)
    mean = old["one"][:5].astype(np.float64).mean(0)
    np.testing.assert_allclose(rows["one"][5], mean, rtol=2**-23)
    assert json.loads(found.extras["config.json"])["vocab_size"] == 6


TOKENS = """
tokenizer:
  source: union
  tokens:
    <zero>: {source: {kind: zero}}
    <id>: {source: {kind: model_token, model: two, token_id: 3}}
    <word>: {source: {kind: model_token, model: two, token: b}}
    a: {source: two, force: true}
    b: {source: two}
"""


def test_rows_named_by_the_recipe(model):
    one, two = model("one", 1, tokenizer=document()), model("two", 2, tokenizer=document())
    found, _, rows, old = merged(LINEAR + TOKENS, one=one, two=two)
    written = json.loads(found.extras["tokenizer.json"])
    assert [e["content"] for e in written["added_tokens"]] == ["<zero>", "<id>", "<word>"]
    for name in ("one", "two"):
        np.testing.assert_array_equal(rows[name][5], 0)
        np.testing.assert_array_equal(rows[name][6], old["two"][3])
        np.testing.assert_array_equal(rows[name][7], old["two"][2])
        np.testing.assert_array_equal(rows[name][1], old["two"][1])  # forced
        np.testing.assert_array_equal(rows[name][2], old[name][2])  # every model has its own
    assert any("'b'; it has no effect without force" in note for note in found.notes)
    head = next(t for t in found.treatments if t.name == "lm_head.weight")
    np.testing.assert_array_equal(entries(head.models[0])[5], 0)


def test_ids_beyond_the_embedding(model):
    """A token without a row in any model is omitted; one with a row in another model is kept."""
    added = [("<pad>", 8), ("<x>", 9)]
    one = model("one", 1, tokenizer=document(added=added))
    two = model("two", 2, rows=10, tokenizer=document(added=[("<x>", 9)]))
    found, t, rows, old = merged(LINEAR + "tokenizer_source: base", one=one, two=two)
    written = json.loads(found.extras["tokenizer.json"])
    assert [(e["content"], e["id"]) for e in written["added_tokens"]] == [("<x>", 9)]
    assert t.shape == (10, WIDTH)
    np.testing.assert_array_equal(rows["one"][9], old["two"][9])
    assert any("'<pad>' (id 8) has no row anywhere" in note for note in found.notes)
    short = model("short", 3, rows=4, tokenizer=document())
    with pytest.raises(
        RecipeError, match="tokens of the tokenizer's core, such as 'c', have ids beyond"
    ):
        merged(LINEAR.replace("one", "short") + "tokenizer_source: base", short=short, two=short)


def test_other_cores_are_not_appended(model):
    one = model("one", 1, tokenizer=document())
    two = model("two", 2, tokenizer=document([*CORE, "zz"]))
    with pytest.raises(RecipeError, match="core of two's tokenizer has 1 entries that one's lacks"):
        merged(LINEAR + "tokenizer_source: union", one=one, two=two)
    found, *_ = merged(LINEAR + "tokenizer_source: base", one=one, two=two)
    assert any("1 tokens of two are not in the output" in note for note in found.notes)
    foreign = model("two", 2, tokenizer=document(["x", "y"]))
    with pytest.raises(RecipeError, match="share no token"):
        merged(LINEAR + "tokenizer_source: base", one=one, two=foreign)


def test_models_without_a_tokenizer(model):
    one, two = model("one", 1, tokenizer=document(added=[("<x>", 5)])), model("two", 2)
    found, _, rows, old = merged(LINEAR + "tokenizer_source: union", one=one, two=two)
    assert any("two has none that can be read" in note for note in found.notes)
    np.testing.assert_array_equal(rows["two"], old["two"])
    with pytest.raises(RecipeError, match="two has neither tokenizer"):
        merged(LINEAR + "tokenizer_source: two", one=one, two=two)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"model": 3},
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": {"a": 0, "b": 0}}},
        {"model": {"vocab": {}}},
        {"model": {"vocab": [[[], 0]]}},
        {"model": {"vocab": [["a", 0], []]}},
        {"model": {"vocab": [["a", 0], None]}},
        {"model": {"vocab": [[5, 0]]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_broken_tokenizers(model, broken):
    one, two = model("one", 1, tokenizer=broken), model("two", 2, tokenizer=document())
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        merged(LINEAR + "tokenizer_source: union", one=one, two=two)


def test_older_files(model):
    ids = {text: i for i, text in enumerate(CORE)}
    one = model("one", 1, vocab=ids, added_tokens={"<x>": 5})
    two = model("two", 2, tokenizer=document(added=[("<x>", 6)]))
    _, _, rows, old = merged(LINEAR + "tokenizer_source: union", one=one, two=two)
    np.testing.assert_array_equal(rows["two"][5], old["two"][6])
    more = model("two", 2, tokenizer=document(added=[("<y>", 6)]))
    with pytest.raises(RecipeError, match=r"needs a tokenizer\.json"):
        merged(LINEAR + "tokenizer_source: union", one=one, two=more)


def test_the_commonest_chat_template(model):
    tokenizers = [{"chat_template": text} for text in ("{{ first }} ", "{{ x }}", "{{ x }}")]
    names = ("one", "two", "three")
    made = {n: model(n, i, tokenizer_config=tokenizers[i]) for i, n in enumerate(names)}
    text = LINEAR.replace("two}]", "two}, {model: three}]") + "chat_template: auto"
    found = plan(parse(text), made.__getitem__)
    assert json.loads(found.extras["tokenizer_config.json"])["chat_template"] == "{{ x }}"


@pytest.mark.parametrize("name", ["alpaca", "chatml", "exaone", "llama3", "mistral"])
def test_named_templates_render(model, name):
    jinja2 = pytest.importorskip("jinja2")
    one = model("one", 1, tokenizer_config={})
    text = LINEAR.replace(", {model: two}", "") + f"chat_template: {name}"
    found = plan(parse(text), {"one": one}.__getitem__)
    template = json.loads(found.extras["tokenizer_config.json"])["chat_template"]
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    said = jinja2.Template(template).render(
        messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True
    )
    assert said.index("QUESTION") < said.index("ANSWER")


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_rows_are_read_in_any_pieces(dtypes):
    rng = np.random.default_rng(1)
    parts = [
        Array("x", rng.normal(size=(6, 5)).astype(np.dtype(getattr(ml_dtypes, d, d))), d)
        for d in dtypes
    ]
    part = np.array([0, 0, 1, 1, ZERO, 0, 0, FILL, FILL])
    row = np.array([3, 4, 4, 1, 0, 0, 2, 0, 0])
    rows = Rows(parts, part, row, {6: [(0, 1), (1, 5)]})
    assert rows.dtype == np.float32 if len(set(dtypes)) > 1 else rows.dtype == parts[0].dtype
    wide = [x.array.astype(np.float64) for x in parts]
    expected = np.stack(
        [wide[p][r] if p >= 0 else np.zeros(5) for p, r in zip(part, row, strict=True)]
    )
    expected[6] = (wide[0][1] + wide[1][5]) / 2
    expected[6] = expected[6].astype(np.float32)
    expected[7:] = expected[:7].mean(0)
    for start in range(45):
        for size in (1, 4, 7, 45 - start):
            if start + size <= 45:
                out = np.empty(size, np.float32)
                rows.read(out, start)
                got = expected.reshape(-1)[start : start + size]
                # one rounding to float32; the mean is summed in another order
                np.testing.assert_allclose(out, got, rtol=2**-22, atol=0)
    with pytest.raises(ValueError, match="cannot read entries 40 to 46, has 45"):
        rows.read(np.empty(6, np.float32), 40)
