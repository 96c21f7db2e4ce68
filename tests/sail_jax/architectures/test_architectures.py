"""Tables of architectures: a list of models x the laws that their specs must obey.

The models are those of `known_networks`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import chosen, diagonal, soak, soak_unless
from known_networks import (
    BASES,
    EPS,
    GOLDEN,
    HEADS,
    NAMES,
    TIED,
    TOKENS,
    certify,
    inner,
    model,
    run,
)

from sail_jax import architectures, growth
from sail_jax.architectures import draft
from sail_jax.basis.certificate import exactness
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import spec
from sail_jax.trees import leaf_paths

names = pytest.mark.parametrize("name", NAMES)


RMS = ["llama", "mistral", "qwen3", "t5, gated, untied"]


re_expressed = jax.jit(change_basis, static_argnums=1)


def rolled(n):
    return growth.permute(np.roll(np.arange(n), 1))


@pytest.mark.parametrize("name", GOLDEN)
def test_forward_agrees_with_transformers(name):
    golden, m = GOLDEN[name], model(name)
    found = run(name, m.spec, m.params)
    logits = np.asarray(found["logits_per_image" if name == "clip" else "logits"])
    assert list(logits.shape) == golden["shape"]
    # some ten layers of float32 on either side, each a few roundings of the largest value
    tolerance = 64 * EPS * np.abs(logits).max()
    np.testing.assert_allclose(logits.ravel()[:: golden["step"]], golden["logits"], 0, tolerance)


@pytest.mark.parametrize(
    "name",
    chosen(
        HEADS,
        *("GPT2DoubleHeadsModel", "RobertaForSequenceClassification", "BertForTokenClassification"),
        *("T5ForSequenceClassification", "ViTModel", "CLIPVisionModelWithProjection"),
        "LlamaForTokenClassification",
    ),
)
def test_heads_agree_with_transformers(name):
    """Returns all outputs of a class by name, or the states of a base model."""
    golden, m = HEADS[name]["outputs"], model(name)
    found = run(name, m.spec, m.params)
    assert {k: list(x.shape) for k, x in found.items()} == {
        k: entry["shape"] for k, entry in golden.items()
    }
    for key, entry in golden.items():
        x = np.asarray(found[key])
        assert len(entry["values"]) == len(x.ravel()[:: entry["step"]])
        # As above; outputs have seven decimals.
        tolerance = 64 * EPS * np.abs(x).max()
        np.testing.assert_allclose(x.ravel()[:: entry["step"]], entry["values"], 0, tolerance)


@pytest.mark.parametrize("name", chosen([*NAMES, *HEADS], "gpt2"))
def test_every_space_can_be_permuted(name):
    """All are tested in one program, which any of them would make fail."""
    m = model(name)
    s = m.spec
    assert inner(m)
    maps = {x.name: rolled(x.size) for x in inner(m) if x.size > 1}
    assert not exactness(s, maps).lost, str(exactness(s, maps))
    new = re_expressed(m.params, s, maps)
    seen = certify(name, m.params, s, new, s)
    assert seen.preserved, seen
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), m.params, new)
    for path, has_moved in zip(leaf_paths(moved), jax.tree.leaves(moved), strict=True):
        spaces = {f.space for axis in s.axes(path) for f in axis}
        assert has_moved == bool(spaces & set(maps)), path


@pytest.mark.parametrize("name", chosen([*NAMES, *HEADS], *NAMES))
def test_ends_cannot(name):
    m = model(name)
    ends = [x for x in m.spec.spaces if "outer" in x.nonlinearity.split()]
    assert ends
    for space in ends:
        assert exactness(m.spec, {space.name: rolled(space.size)}).lost


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["flax mlp", "llama", *soak(*(n for n in NAMES if n not in ("flax mlp", "llama")))],
)
def test_hidden_units_and_heads_can_be_duplicated(name):
    """Net2Wider, unevenly: hidden units, heads, queries per head, channels."""
    m = model(name)
    s, maps = m.spec, {}
    for x in inner(m):
        grows = x.name.startswith("stage") or re.search(r"\b(hidden|head|group)\b", x.name)
        if grows:
            # one size per kind, as one configuration states it
            maps[x.name] = growth.widen(
                x.size, x.size + 1 if x.size > 1 else 2, key=jax.random.key(2)
            )
    assert len(maps) >= 2
    report = exactness(s, maps)
    assert not report.lost, str(report)
    new, new_sizes = re_expressed(m.params, s, maps), s.resized(maps)
    seen = certify(name, m.params, s, new, new_sizes)
    assert seen.preserved, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        soak_unless(n in ("llama", "gpt2"), n)
        for n in sorted({*RMS, "vit", "clip", "flax gpt", "flax vit", *TIED[:4]})
    ],
)
def test_the_stream_can_be_duplicated_where_nothing_is_tied(name):
    m = model(name)
    s = m.spec
    streams = [x for x in inner(m) if x.name.endswith("resid")]
    maps = {x.name: growth.widen(x.size, 2 * x.size) for x in streams}
    report = exactness(s, maps)
    assert bool(report.lost) == (name in TIED), str(report)
    new, new_sizes = re_expressed(m.params, s, maps), s.resized(maps)
    seen = certify(name, m.params, s, new, new_sizes)
    assert seen.preserved == (not report.lost)
    if report.lost:
        assert "both writes and reads it" in report.spaces[0].lost


def orthogonal(n):
    return np.linalg.qr(np.random.default_rng(4).normal(size=(n, n)))[0].astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", [soak_unless(n == "llama", n) for n in RMS])
def test_rotation_of_the_stream_after_folding(name):
    m = model(name)
    s = m.spec
    maps = {"resid": growth.rotate(orthogonal(s.space("resid").size))}
    assert "fold the gain" in exactness(s, maps).spaces[0].lost
    params, rules = m.rules.fold(m.params)
    folded = rules.spec(params)
    assert certify(name, m.params, s, params, s).preserved
    assert any(np.any(np.asarray(params[p]) != m.params[p]) for p in params)
    assert not exactness(folded, maps).lost
    new = re_expressed(params, folded, maps)
    seen = certify(name, params, s, new, s)
    assert seen.preserved, seen
    assert not certify(name, m.params, s, re_expressed(m.params, s, maps), s).preserved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "clip", "flax gpt", "flax vit"])
def test_rotation_under_layernorm_is_reported(name):
    m = model(name)
    s = m.spec
    space = next(x for x in s.spaces if x.name.endswith("resid"))
    maps = {space.name: growth.rotate(orthogonal(space.size))}
    assert "(layernorm" in exactness(s, maps).spaces[0].lost
    new = re_expressed(m.params, s, maps)
    assert not certify(name, m.params, s, new, s).preserved
    with pytest.raises(ValueError, match="only scales of RMSNorm"):
        m.rules.fold(m.params)


@pytest.mark.parametrize("name", ["llama, tied, stretched", "qwen2", "t5"])
def test_a_tied_table_cannot_hold_a_scale(name):
    m = model(name)
    with pytest.raises(ValueError, match=r"norm.weight' cannot be folded: .* untie the table"):
        m.rules.fold(m.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "space"),
    [
        *(("gpt2", s) for s in ("qk.0", "v.1")),
        ("llama", "v.0"),
        ("t5", "cross.qk.1"),
        ("t5", "encoder.v.0"),
        ("flax gpt", "qk.1"),
    ],
)
def test_rotation_of_linear_spaces(name, space):
    m = model(name)
    s = m.spec
    maps = {space: growth.rotate(orthogonal(s.space(space).size))}
    assert not exactness(s, maps).lost
    assert certify(name, m.params, s, re_expressed(m.params, s, maps), s).preserved


@pytest.mark.slow
def test_a_dot_product_keeps_its_size():
    """Keys divided by the square root of their number cannot be duplicated, unlike those of T5."""
    m = model("gpt2")
    maps = {f"qk.{i}": growth.widen(4, 8) for i in range(2)}
    assert "(dot) commutes with invertible" in exactness(m.spec, maps).spaces[0].lost
    new = re_expressed(m.params, m.spec, maps)
    assert not certify("gpt2", m.params, m.spec, new, m.spec).preserved
    t5 = model("t5")
    maps = {"encoder.qk.0": growth.widen(3, 6)}
    new = re_expressed(t5.params, t5.spec, maps)
    assert not exactness(t5.spec, maps).lost
    assert certify("t5", t5.params, t5.spec, new, t5.spec).preserved


# Configurations.


def test_resized_configurations():
    m, config = model("llama"), GOLDEN["llama"]["config"]
    assert m.rules.resized(config, m.spec) == config | {"head_dim": 4}
    maps = {"resid": growth.widen(8, 16)}
    maps |= {f"hidden.{i}": growth.widen(12, 20) for i in range(2)}
    maps |= {f"group.{i}": growth.widen(2, 3) for i in range(2)}
    new = m.rules.resized(config, m.spec.resized(maps))
    changed = {k: v for k, v in new.items() if v != config.get(k)}
    assert changed == {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 6}
    # the new configuration also describes the new tensors
    grown = re_expressed(m.params, m.spec, maps)
    assert architectures.of(new).rules(new).spec(grown) == m.spec.resized(maps)
    del maps["hidden.1"]
    with pytest.raises(ValueError, match=r"one 'intermediate_size', .* 20 \(hidden.0\) and 12"):
        m.rules.resized(config, m.spec.resized(maps))
    gpt2 = model("gpt2")
    heads = gpt2.spec.resized({f"head.{i}": growth.widen(2, 4) for i in range(2)})
    with pytest.raises(ValueError, match=r"one 'n_embd', .* 8 \(resid\) and 16 \(head.0 x qk.0\)"):
        gpt2.rules.resized(GOLDEN["gpt2"]["config"], heads)
    clip = model("clip")
    maps = {"text.hidden.0": growth.widen(12, 13), "shared": growth.widen(6, 12)}
    new = clip.rules.resized(GOLDEN["clip"]["config"], clip.spec.resized(maps))
    assert (new["text_config"]["intermediate_size"], new["projection_dim"]) == (13, 12)
    assert GOLDEN["clip"]["config"]["text_config"]["intermediate_size"] == 12


def test_detection():
    of = architectures.of
    kinds = {name: of(golden["config"]).name for name, golden in GOLDEN.items()}
    assert kinds["mistral"] == kinds["qwen2"] == kinds["qwen3"] == "llama"
    assert of({"architectures": ["GPT2LMHeadModel"]}).name == "gpt2"
    assert of({"model_type": "gemma"}).outputs is None
    assert of({"architectures": ["CLIPModel"]}).name == "clip"
    assert of({"model_type": "flax_vit"}).logits is None
    with pytest.raises(ValueError, match=r"'lama' \(known: .*llama"):
        of({"model_type": "lama"})
    with pytest.raises(ValueError, match="neither 'model_type' nor"):
        of({})


@pytest.mark.parametrize(
    ("family", "config", "match"),
    [
        ("gpt2", {"n_embd": 8, "n_head": 3}, "'n_head' must divide 'n_embd': 3 does not divide 8"),
        ("gpt2", {"n_embd": 8, "n_head": "2"}, "'n_head' must be a whole number >= 1, got '2'"),
        (
            "llama",
            {"num_attention_heads": 4, "num_key_value_heads": 3, "hidden_size": 8},
            "'num_key_value_heads' must divide 'num_attention_heads': 3 does not divide 4",
        ),
        ("clip", {"vision_config": {}}, "has no 'text_config'"),
        ("flax_mlp", {}, "has no 'widths'"),
    ],
)
def test_bad_configurations(family, config, match):
    with pytest.raises(ValueError, match=match):
        architectures.of({"model_type": family}).rules(config)


@pytest.mark.slow
def test_bad_checkpoints():
    m, config = model("llama"), GOLDEN["llama"]["config"]
    lost = {k: v for k, v in m.params.items() if "down_proj" not in k}
    with pytest.raises(ValueError, match=r"rule '.*down_proj.weight': .* matches no leaf"):
        m.rules.spec(lost)
    with pytest.raises(ValueError, match=r"no tensor 'model.layers.0.mlp.down_proj.weight'"):
        architectures.forward.llama(lost, config, TOKENS)
    with pytest.raises(ValueError, match=r"no rule matches leaf 'model.layers.0.extra'"):
        m.rules.spec(m.params | {"model.layers.0.extra": np.zeros(3)})
    other = config | {"num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"units of '\(head.0 qk.0.*sizes\['head.0'\]"):
        architectures.of(other).rules(other).spec(m.params)
    scaled = config | {"rope_scaling": {"rope_type": "longrope"}}
    with pytest.raises(ValueError, match="'longrope' are not supported"):
        architectures.forward.llama(m.params, scaled, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer."), ("bert", "bert."), ("roberta", "roberta.")]
)
def test_base_models_hand_out_their_stream(name, prefix):
    """Names have no prefix; the output is the stream, so it cannot be re-expressed."""
    m, config = model(name), GOLDEN[name]["config"]
    base = {k.removeprefix(prefix): v for k, v in m.params.items() if k.startswith(prefix)}
    config = config | {"architectures": [f"{name.upper()}Model"]}
    s = architectures.of(config).rules(config).spec(base)
    assert "outer" in s.space("resid").nonlinearity.split()
    assert not any(u.tied for u in s.uses("resid"))
    if name == "gpt2":  # the same file, as some are saved
        config = config | {"architectures": ["GPT2LMHeadModel"]}
        s = architectures.of(config).rules(config).spec(base)
        assert s.space("resid").nonlinearity == "layernorm"
        logits = architectures.forward.gpt2(base, config, TOKENS)["logits"]
        whole = run(name, m.spec, m.params)["logits"]
        np.testing.assert_allclose(logits, whole, 0, 64 * EPS * np.abs(whole).max())


def test_pooled_states_are_an_end_unless_read():
    m = model("bert")
    pooled = {"bert.pooler.dense.weight": np.zeros((8, 8)), "bert.pooler.dense.bias": np.zeros(8)}
    assert m.rules.spec(m.params | pooled).space("pooled").nonlinearity == "outer odd"
    head = {"cls.seq_relationship.weight": np.zeros((2, 8))}
    s = m.rules.spec(m.params | pooled | head)
    assert s.space("pooled").nonlinearity == "odd"


# Heads.


def states(name, head):
    """Computes the states of the class without a head, with the same tensors."""
    m, config = model(name), HEADS[name]["config"]
    base = {k: v for k, v in m.params.items() if not k.startswith(head)}
    config = config | {"architectures": ["Model"]}
    found = architectures.of(config).outputs(base, config, m.inputs)  # pyright: ignore
    return {k: np.asarray(x, float) for k, x in found.items()}


def at(x, places):
    return x[np.arange(len(places)), places]


def layer(name, head, x):
    """A linear layer in NumPy, without bias where there is none."""
    p = model(name).params
    return x @ p[f"{head}.weight"].T.astype(float) + p.get(f"{head}.bias", 0)


# The ends of the texts in TOKENS: 6 is padding for the decoders, and 16 ends a text for T5. The
# last position is 7.
ENDS = [7, 6], [7, 3]

BY_HAND = {
    "GPT2ForSequenceClassification": lambda n, s: layer(n, "score", at(s, ENDS[0])),
    "LlamaForSequenceClassification": lambda n, s: layer(n, "score", at(s, ENDS[0])),
    "LlamaForTokenClassification": lambda n, s: layer(n, "score", s),
    "MistralForQuestionAnswering": lambda n, s: layer(n, "qa_outputs", s),
    "RobertaForSequenceClassification": lambda n, s: layer(
        n, "classifier.out_proj", np.tanh(layer(n, "classifier.dense", s[:, 0]))
    ),
    "BertForSequenceClassification": lambda n, s: layer(
        n, "classifier", np.tanh(layer(n, "bert.pooler.dense", s[:, 0]))
    ),
    "BertForTokenClassification": lambda n, s: layer(n, "classifier", s),
    "T5ForSequenceClassification": lambda n, s: layer(
        n,
        "classification_head.out_proj",
        np.tanh(layer(n, "classification_head.dense", at(s, ENDS[1]))),
    ),
    "ViTForImageClassification": lambda n, s: layer(n, "classifier", s[:, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_heads_by_their_definition(name):
    m = model(name)
    found = run(name, m.spec, m.params)["logits"]
    stream = states(name, ("score", "classifi", "qa_outputs"))["last_hidden_state"]
    want = BY_HAND[name](name, stream)
    np.testing.assert_allclose(found, want, 0, 64 * EPS * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pad", "tokens", "places"),
    [
        (None, [[1, 2, 3], [4, 5, 6]], [2, 2]),
        (-1, [[1, 2, 3], [4, 5, 6]], [2, 2]),  # what old configurations of Llama state
        (0, [[1, 0, 0], [0, 0, 5]], [0, 2]),
        (0, [[0, 0, 0], [1, 0, 2]], [0, 2]),  # nothing but padding
    ],
)
def test_texts_are_classified_at_their_last_token(pad, tokens, places):
    name = "LlamaForSequenceClassification"
    m, config = model(name), HEADS[name]["config"] | {"pad_token_id": pad}
    tokens = np.array(tokens)
    found = architectures.forward.llama(m.params, config, tokens)["logits"]
    base = config | {"architectures": ["LlamaModel"]}
    stream = architectures.forward.llama(
        {k: v for k, v in m.params.items() if k != "score.weight"}, base, tokens
    )["last_hidden_state"]
    want = layer(name, "score", at(np.asarray(stream, float), places))
    np.testing.assert_allclose(found, want, 0, 64 * EPS * np.abs(want).max())


@pytest.mark.slow
def test_heads_that_are_not_known():
    name = "LlamaForSequenceClassification"
    m, config = model(name), HEADS[name]["config"]
    with pytest.raises(ValueError, match=r"no rule matches leaf 'v_head.summary.weight'"):
        m.rules.spec(m.params | {"v_head.summary.weight": np.zeros((1, 8), np.float32)})
    bare = {k: v for k, v in m.params.items() if k != "score.weight"}
    with pytest.raises(ValueError, match=r"'LlamaForSequenceClassification', but the checkpoint"):
        architectures.forward.llama(bare, config, TOKENS)
    bert, c = model("BertForSequenceClassification"), HEADS["BertForSequenceClassification"]
    lost = {k: v for k, v in bert.params.items() if "pooler" not in k}
    with pytest.raises(ValueError, match=r"but the tensor 'pooler\.dense\.weight' is missing"):
        architectures.forward.bert(lost, c["config"], TOKENS)


@pytest.mark.parametrize("name", BASES)
def test_base_models_end_in_their_stream(name):
    streams = [x for x in model(name).spec.spaces if x.name.endswith("resid")]
    assert all("outer" in x.nonlinearity.split() for x in streams)


@pytest.mark.parametrize("name", [n for n in HEADS if n not in BASES])
def test_heads_keep_the_stream_inside(name):
    for space in model(name).spec.spaces:
        if space.name.endswith(("resid", "pooled")):
            assert "outer" not in space.nonlinearity.split()


# Drafts.


def shapes(**kwargs):
    return {k.replace("__", "/"): jax.ShapeDtypeStruct(v, jnp.float32) for k, v in kwargs.items()}


def test_a_draft_of_a_transformer():
    """A draft from the tensors of Llama, without further information except for the heads."""
    m = model("llama")
    d = draft(m.params, heads=4)
    assert not d.questions
    mine, true = d.rules.spec(m.params), m.spec
    same = {"units17": "vocab"} | {f"units12.{i}": f"hidden.{i}" for i in range(2)}
    for path, axes in true.leaves:
        found = [[(same.get(f.space, f.space), f.role) for f in axis] for axis in mine.axes(path)]
        wanted = [[(f.space, f.role) for f in axis] for axis in axes]
        if "gate_proj" in path or "k_proj" in path:
            # The draft does not see that a gate keeps its scale, nor that rotary embeddings fix
            # units, which may have any role then.
            found, wanted = ([[name for name, _ in x] for x in y] for y in (found, wanted))
        assert found == wanted, path
    maps = {}
    for space in mine.spaces:
        if space.nonlinearity != "outer":
            maps |= {space.name: rolled(space.size)}
    assert not exactness(mine, maps).lost
    assert certify("llama", m.params, true, re_expressed(m.params, mine, maps), true).preserved
    asked = draft(m.params)
    assert [q.path for q in asked.questions] == ["model.layers.{i}.self_attn.q_proj.weight"]
    assert "how many heads?" in str(asked)
    assert "heads" not in {x.name for x in asked.rules.spec(m.params).spaces}


@pytest.mark.parametrize(
    ("heads", "name"),
    diagonal([None, 2], ["gpt2", "bert", "roberta", "vit", "clip", "t5", "qwen3", "flax gpt"]),
)
def test_whatever_a_draft_calls_exact_is(heads, name):
    """The draft is sound without any answers: uncertain spaces are not reported as exact."""
    m = model(name)
    if heads and name == "qwen3":
        heads = 4
    d = draft(m.params, heads=heads)
    assert d.questions
    s = d.rules.spec(m.params)
    each = {x.name: rolled(x.size) for x in s.spaces if x.size > 1}
    maps = {k: v for k, v in each.items() if not exactness(s, {k: v}).lost}
    assert bool(maps) == (name not in ("vit", "t5"))  # for these, every space is uncertain
    new = re_expressed(m.params, s, maps)
    seen = certify(name, m.params, m.spec, new, m.spec)
    assert seen.preserved, (list(maps), seen)


def test_answers_settle_questions():
    m = model("gpt2")
    qkv = "(head.{i} qk.{i} + head.{i} qk.{i}* + head.{i} v.{i})"
    d = draft(
        m.params,
        answers={
            "transformer.h.{i}.attn.c_attn.weight": f"resid* {qkv}",
            "transformer.h.{i}.attn.c_attn.bias": qkv,
            "transformer.h.{i}.attn.c_proj.weight": "(head.{i} v.{i})* resid",
            "transformer.h.{i}.attn.c_proj.bias": "resid",
            "transformer.wte.weight": "vocab* resid | vocab resid*",
        },
    )
    assert not d.questions
    s = d.rules._replace(sizes={"head.{i}": 2, "qk.{i}": 4}).spec(m.params)
    assert s.space("resid").nonlinearity == ""
    assert {x.name for x in s.spaces} >= {"head.0", "v.1", "units32.1", "vocab"}
    with pytest.raises(ValueError, match=r"answer 'wte' matches no leaf"):
        draft(m.params, answers={"wte": "_ _"})
    with pytest.raises(ValueError, match="3 does not divide 16"):
        draft(model("llama").params, heads=3)


def test_a_draft_reads_the_configuration():
    """Heads, and which entry states which space or counts the layers, where no other reading is."""
    m = model("llama")
    said = {
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 17,
        "bos_token_id": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    said |= {"hidden_size": m.spec.space("resid").size}
    d = draft(m.params, config=said)
    assert not d.questions
    assert d.rules.sizes == draft(m.params, heads=4).rules.sizes
    assert dict(d.rules.settings) == {
        "hidden_size": "resid",
        "intermediate_size": "units12.{i}",
        "num_attention_heads": "head.{i} group.{i}",
        "num_key_value_heads": "head.{i}",
        "vocab_size": "units17",
    }
    assert d.rules.layers == {"num_hidden_layers": "model.layers.{i}."}
    assert d.rules.resized(said, d.rules.spec(m.params)) == said
    # two entries with the same value are not guessed, nor are sizes without an entry
    more = said | {"max_position_embeddings": said["hidden_size"], "num_hidden_layers": 3}
    asked = draft(m.params, config=more)
    assert {q.path for q in asked.questions} == {"settings", "layers"}
    assert "hidden_size" not in dict(asked.rules.settings)
    # a number of heads must divide the width
    odd = draft(m.params, config=said | {"num_attention_heads": 3})
    assert any("how many heads?" in q.text for q in odd.questions)


def test_a_draft_of_an_mlp():
    plain = {
        "fc1": {"weight": np.zeros((8, 3)), "bias": np.zeros(8)},
        "fc2": {"weight": np.zeros((5, 8)), "bias": np.zeros(5)},
        "fc3": {"weight": np.zeros((2, 5)), "bias": np.zeros(2)},
    }
    d = draft(plain)
    assert not d.questions
    assert dict(d.rules.axes)["fc2/weight"] == "units5 units8*"
    assert d.rules.spaces == {"units2": "outer", "units3": "outer"}
    # the same, where only the biases distinguish inputs from outputs
    d = draft(shapes(a__w=(3, 8), a__b=(8,), b__w=(8, 2), b__b=(2,)))
    assert not d.questions
    assert dict(d.rules.axes) == {
        "a/w": "units3* units8",
        "a/b": "units8",
        "b/w": "units8* units2",
        "b/b": "units2",
    }


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (shapes(a__w=(3, 8), b__w=(8, 2)), "which axis is read, and which is written?"),
        (
            shapes(a__kernel=(3, 8), b__kernel=(8, 8), c__kernel=(8, 2)),
            "write 8 units each: one space",
        ),
        (shapes(a__kernel=(8, 8), b__kernel=(8, 8)), "the network's input"),
        (shapes(a__kernel=(4, 8), b__kernel=(8, 4)), "the network's output"),
        (shapes(a__kernel=(3, 8), b__kernel=(8, 2), c__thing=(8, 8, 8)), "what are the 3 axes"),
        (
            shapes(a__kernel=(3, 8), b__kernel=(8, 2), mystery=(7,)),
            "to which space do its 7 units belong",
        ),
        (
            shapes(embed__embedding=(9, 4), a__kernel=(4, 6), b__kernel=(6, 4)),
            "also the output's table (tied)",
        ),
    ],
)
def test_drafts_ask(params, text):
    d = draft(params)
    assert any(text in q.text for q in d.questions), str(d)
    d.rules.spec(params)  # holds meanwhile


def test_a_fused_axis_is_its_blocks():
    """GPT-2's fused projection is transformed like three separate ones."""
    m = model("gpt2")
    s, maps = m.spec, {}
    maps["head.0"] = growth.widen(2, 3, key=jax.random.key(0))
    maps["qk.0"] = growth.rotate(orthogonal(4))
    maps["v.0"] = growth.pad(4, 6)
    name = "transformer.h.0.attn.c_attn.weight"
    apart = np.split(m.params[name], 3, axis=1)
    parts = dict(zip("qkv", apart, strict=True))
    rules = {"q": "r* (h qk)", "k": "r* (h qk*)", "v": "r* (h v)"}
    split = spec(parts, rules, spaces={"{r,h,qk,v}": "outer"}, sizes={"h": 2})
    short = {k.removesuffix(".0").replace("head", "h"): v for k, v in maps.items()}
    moved = re_expressed(parts, split, short)
    fused = re_expressed({name: m.params[name]}, s, maps)[name]
    np.testing.assert_array_equal(fused, np.concatenate([moved[k] for k in "qkv"], axis=1))
    assert fused.shape == (8, 3 * 4 + 3 * 4 + 3 * 6)
