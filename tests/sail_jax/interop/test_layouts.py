"""Trees of MaxText and Tunix: their spaces, and their way to Hugging Face's tensors and back."""

import re

import framework_trees as trees
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from sail_jax import architectures, check_spec, spec_of
from sail_jax.architectures.frameworks import of_tree
from sail_jax.interop.layouts import from_hugging_face, links, to_hugging_face

TOKENS = jnp.array([1, 5, 3, 9, 2, 7, 0])
# The kinds of networks, and how their trees lie.
LAYOUTS = [
    *((kind, "maxtext", {"param_scan_axis": n % 2}) for n, kind in enumerate(trees.CONFIGS)),
    *((kind, "maxtext", {"scan_layers": False}) for kind in ("llama31", "gemma2", "gemma3_text")),
    *((kind, "tunix", {}) for kind in trees.CONFIGS if kind != "mistral"),
]
NAMES = [f"{k}-{f}-{'-'.join(map(str, o.values()))}" for k, f, o in LAYOUTS]


def run(framework, tree, tokens, config, options=None):
    if framework == "tunix":
        return trees.tunix(tree, tokens, config)
    return trees.maxtext(tree, tokens, config, (options or {}).get("param_scan_axis", 1))


@pytest.mark.parametrize(("kind", "framework", "options"), LAYOUTS, ids=NAMES)
def test_bfloat16_comes_back_bit_for_bit_by_way_of_float32(kind, framework, options):
    config = trees.config(kind)
    before = trees.tensors(config, ml_dtypes.bfloat16)
    wide = {name: x.astype(np.float32) for name, x in before.items()}
    tree = from_hugging_face(wide, framework, config, vocab_size=16, **options)
    (table,) = tree["token_embedder" if framework == "maxtext" else "embedder"].values()
    assert table.shape == (16, 12)
    after = to_hugging_face(tree, config)
    assert after.keys() == before.keys()
    for name, x in before.items():
        back = after[name].astype(ml_dtypes.bfloat16)
        # Bits, so that -0 and 0 differ. A shift by 1 keeps what is not below 2^-16.
        np.testing.assert_array_equal(back.view(np.uint16), x.view(np.uint16), name)


@pytest.mark.parametrize(("kind", "framework", "options"), LAYOUTS, ids=NAMES)
def test_float32_comes_back_but_for_one_rounding_of_what_is_scaled_or_shifted(
    kind, framework, options
):
    config = trees.config(kind)
    before = trees.tensors(config)
    tree = from_hugging_face(before, framework, config, **options)
    after = to_hugging_face(tree, config)
    exact = {name for x in links(framework, config, **options) if x.exact for name in x.tensors}
    if framework == "tunix" or kind.startswith("qwen"):
        assert exact >= before.keys()
    for name, x in before.items():
        if name in exact:
            np.testing.assert_array_equal(after[name], x, name)
        elif "norm" in name:  # x + 1 is rounded at the size of x + 1
            assert np.abs(after[name] - x).max() <= np.spacing(np.float32(1 + np.abs(x).max()))
        else:
            assert (np.abs(after[name] - x) <= np.spacing(np.abs(x))).all(), name
    # A second round trip changes nothing.
    again = from_hugging_face(after, framework, config, **options)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


def test_every_entry_lies_where_maxtext_reads_it():
    config = trees.config("llama31")
    tensors = trees.tensors(config, np.float64)
    tree = from_hugging_face(tensors, "maxtext", config)
    query = tree["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    weight = [tensors[f"model.layers.{n}.self_attn.q_proj.weight"] for n in range(2)]
    assert query.shape == (12, 2, 4, 8)
    for e, layer, head, j, half in np.ndindex(12, 2, 4, 4, 2):
        # Pair j of a head: its halves are 4 apart at Hugging Face, neighbours in MaxText.
        want = weight[layer][head * 8 + half * 4 + j, e] / np.sqrt(8)
        assert query[e, layer, head, 2 * j + half] == pytest.approx(want, rel=1e-15)
    out = tree["decoder"]["layers"]["self_attention"]["out"]["kernel"]
    o_proj = tensors["model.layers.1.self_attn.o_proj.weight"]
    assert out.shape == (4, 2, 8, 12)
    assert out[3, 1, 5, 7] == o_proj[7, 3 * 8 + 5]
    gemma = trees.config("gemma")
    tensors = trees.tensors(gemma, np.float64)
    tree = from_hugging_face(tensors, "maxtext", gemma)
    np.testing.assert_allclose(
        tree["token_embedder"]["embedding"],
        tensors["model.embed_tokens.weight"] * np.sqrt(12),
        rtol=1e-15,
    )
    np.testing.assert_array_equal(
        tree["decoder"]["decoder_norm"]["scale"], tensors["model.norm.weight"] + 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        (framework, kind)
        for framework in ("maxtext", "tunix")
        for kind in ("llama", "llama31", "qwen2", "qwen3")
    ],
)
def test_a_tree_computes_what_hugging_faces_network_does(framework, kind):
    config = trees.config(kind)
    tensors = trees.tensors(config)
    tree = from_hugging_face(tensors, framework, config)
    outputs = architectures.of(config).logits
    assert outputs is not None
    want = np.asarray(jax.jit(lambda tensors: outputs(tensors, config, TOKENS[None]))(tensors))[0]
    got = np.asarray(jax.jit(lambda tree: run(framework, tree, TOKENS, config))(tree))
    # About 40 operations follow one another, each rounds once, at the size of the largest logit.
    np.testing.assert_allclose(got, want, atol=40 * np.finfo(np.float32).eps * np.abs(want).max())


def uses(spec):
    """The space and whether it is read, by place, without those that cannot change."""
    fixed = {s.name for s in spec.spaces if {"outer", "stack"} & set(s.nonlinearity.split())}
    return {
        (leaf.path, n, k): (factor.space, factor.role == "read")
        for leaf in spec.leaves
        for n, axis in enumerate(leaf.axes)
        for k, factor in enumerate(axis)
        if factor.space not in fixed
    }


@pytest.mark.parametrize(("kind", "framework", "options"), LAYOUTS, ids=NAMES)
def test_tables_are_what_is_inferred_from_the_forward_pass(kind, framework, options):
    config = trees.config(kind)
    tree = from_hugging_face(trees.tensors(config), framework, config, **options)
    about = of_tree(tree)
    assert about is not None
    table = uses(architectures.of(about).rules(about).spec(tree))
    inferred = uses(spec_of(lambda p, x: run(framework, p, x, config, options), tree, TOKENS).spec)
    assert table.keys() == inferred.keys()
    pairs = {(table[place], inferred[place]) for place in table}
    # The same partition of axes into spaces: names differ, one to one.
    names = {(ours[0], theirs[0]) for ours, theirs in pairs}
    assert len({a for a, _ in names}) == len(names) == len({b for _, b in names})
    assert all(ours[1] == theirs[1] for ours, theirs in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "framework", "options"),
    [("qwen3", "maxtext", {}), ("gemma2", "maxtext", {}), ("gemma", "tunix", {})],
)
def test_every_basis_that_a_table_allows_keeps_the_outputs(kind, framework, options):
    config = trees.config(kind)
    tree = from_hugging_face(trees.tensors(config), framework, config, **options)
    about = of_tree(tree)
    spec = architectures.of(about).rules(about).spec(tree)
    done = check_spec(spec, lambda p, x: run(framework, p, x, config), tree, TOKENS)
    assert not done.failed, str(done)
    assert len(done.trials) > 5


def test_trees_are_found_inside_of_training_states():
    config = trees.config("qwen3")
    tensors = trees.tensors(config)
    tree = from_hugging_face(tensors, "maxtext", config)
    state = {"params": {"params": tree}, "opt_state": [{"mu": {"params": tree}}], "step": 3}
    assert to_hugging_face(state, config).keys() == tensors.keys()
    with pytest.raises(ValueError, match=r"one leaf 'token_embedder/embedding'.*ema/token"):
        to_hugging_face({**state, "ema": tree}, config)


def test_states_of_nnx_have_tensors_too():
    config = trees.config("qwen2")
    tensors = trees.tensors(config)
    tree = from_hugging_face(tensors, "tunix", config)
    state = nnx.State(jax.tree.map(nnx.Param, tree))
    back = to_hugging_face(state, config)
    assert all((back[name] == x).all() for name, x in tensors.items())


def test_as_many_heads_of_keys_as_of_queries_are_one_array_in_tunix():
    config = trees.config("gemma", num_key_value_heads=4)
    tensors = trees.tensors(config)
    tree = from_hugging_face(tensors, "tunix", config)
    assert tree["layers"]["0"]["attn"]["qkv_einsum"]["w"].shape == (3, 4, 12, 8)
    back = to_hugging_face(tree, config)
    assert all((back[name] == x).all() for name, x in tensors.items())


def changed(config, **others):
    return lambda: from_hugging_face(trees.tensors(config), "maxtext", {**config, **others})


LLAMA, GEMMA2 = trees.config("llama"), trees.config("gemma2")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (changed(LLAMA, num_attention_heads=8), r"q_proj.*h = 8, d = 8, got.*32, 12"),
        (changed(LLAMA, num_hidden_layers=3), "layers.2.self_attn.q_proj.weight', which"),
        (changed(LLAMA, num_hidden_layers=1), "no leaf for 'model.layers.1"),
        (changed(LLAMA, model_type="bert"), "model type 'bert'.*known: llama"),
        (changed(LLAMA, text_config={}), "of text alone"),
        (changed(GEMMA2, num_hidden_layers=1), "pairs the layers of Gemma 2: .*got 1"),
        (lambda: links("tunix", trees.config("mistral")), "model type 'mistral'"),
        (lambda: links("jaxformer", LLAMA), "expected one of 'maxtext', 'tunix'; got 'jaxformer'"),
        (lambda: links("maxtext", LLAMA, vocab_size=3), "at least the 11 rows.*got 3"),
        (lambda: links("maxtext", LLAMA, rope="pairs"), "'halves', 'interleaved'; got 'pairs'"),
        (lambda: links("maxtext", LLAMA, param_scan_axis=2), "expected one of 0, 1; got 2"),
        (changed(LLAMA, num_hidden_layers=10**9), "at most 10000, got 1000000000"),
        (changed(LLAMA, head_dim=10**400), "head_dim: expected less than 2"),
        (changed(LLAMA, model_type=["llama"]), "model type"),
        (changed(GEMMA2, hidden_size=10**400), "'hidden_size' must be a positive number"),
        (changed(GEMMA2, query_pre_attn_scalar="6"), "must be a positive number, got '6'"),
        (changed(GEMMA2, query_pre_attn_scalar=0), "must be a positive number, got 0"),
        (changed(LLAMA, rope_scaling={"rope_type": "llama3"}, head_dim=3), "pairs in head_dim"),
        (lambda: to_hugging_face({"w": np.ones(2)}, LLAMA), "expected a tree of MaxText.*got 'w'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_trees_of_other_shapes_are_named():
    tree = from_hugging_face(trees.tensors(LLAMA), "maxtext", LLAMA)
    layer = tree["decoder"]["layers"]["mlp"]["wi_0"]
    layer["kernel"] = layer["kernel"][:, :1]
    with pytest.raises(ValueError, match=r"wi_0/kernel': expected 2 tensors on axis 1 of 3"):
        to_hugging_face(tree, LLAMA)
    tree["token_embedder"]["embedding"] = np.float32(1)
    with pytest.raises(ValueError, match=r"embedding': expected two axes, got shape \(\)"):
        to_hugging_face(tree, LLAMA)
    tree["decoder"]["decoder_norm"]["scale"] = np.float32(1)
    with pytest.raises(ValueError, match="expected a tree of MaxText"):
        to_hugging_face(tree, LLAMA)


def test_leaves_without_a_tensor_are_named():
    tree = from_hugging_face(trees.tensors(LLAMA), "maxtext", LLAMA)
    mlp = tree["decoder"]["layers"]["mlp"]
    mlp["wi_0"]["bias"] = np.ones((2, 10))
    with pytest.raises(
        ValueError, match=r"'decoder/layers/mlp/wi_0/bias' has no Hugging Face tensor"
    ):
        to_hugging_face(tree, LLAMA)
    del mlp["wi_0"]["bias"]
    mlp["wi_0"]["kernel_lora_a"] = np.ones((12, 2, 1))
    with pytest.raises(ValueError, match=r"kernel_lora_a' is a factor.*lora_alpha"):
        to_hugging_face(tree, LLAMA)


def test_a_stack_that_cannot_be_told_from_the_stream_is_asked_for():
    config = trees.config("llama", num_hidden_layers=12)
    shapes = {x.leaf: (12, 12) for x in links("maxtext", config)}
    shapes["decoder/decoder_norm/scale"] = (12,)
    with pytest.raises(
        ValueError, match=r"numbers of layers and units are equal.*'param_scan_axis'"
    ):
        of_tree({k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shapes.items()})
    assert of_tree({"kernel": np.ones(2)}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "maxtext"}, "has no 'decoder_block'"),
        ({"model_type": "maxtext", "decoder_block": "gpt3"}, "one of 'llama2',.*got 'gpt3'"),
        ({"model_type": "maxtext", "decoder_block": "llama2", "param_scan_axis": 2}, "one of 0, 1"),
        ({"model_type": "tunix", "decoder": "mistral"}, "one of 'llama3',.*got 'mistral'"),
    ],
)
def test_configurations_of_trees_are_checked(config, message):
    with pytest.raises(ValueError, match=message):
        architectures.of(config).rules(config)


def test_tied_networks_may_have_a_copy_of_their_table():
    config = trees.config("qwen2")
    tensors = trees.tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tree = from_hugging_face(tensors, "maxtext", config)
    assert not any(re.search("logits_dense", x) for x in tree["decoder"])
