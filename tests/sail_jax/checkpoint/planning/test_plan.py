"""From recipes and headers to the treatment of every tensor; no entry is read."""

import json
import random
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_checkpoints import WIDTH, Array, Fake, beside, config, entries, llama

from sail_jax.checkpoint.contents.layers import position, role, stacks
from sail_jax.checkpoint.planning.cards import describe, growth_card, model_card, render
from sail_jax.checkpoint.planning.plan import fingerprint, plan
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.recipes import RecipeError, parse, simple
from sail_jax.checkpoint.recipe.yaml_tree import Where
from sail_jax.merging.tensors import Tensor

BF16 = np.dtype(ml_dtypes.bfloat16)


def store(**checkpoints):
    return lambda path: checkpoints[path]


def models(**options):
    names = ("base", "one", "two", "three")
    return {name: llama(name, seed, **options) for seed, name in enumerate(names)}


def planned(text, checkpoints=None):
    checkpoints = checkpoints or models()
    found = plan(parse(text, "r"), checkpoints.__getitem__)
    read = sum(x.read_entries for one in checkpoints.values() for x in one.tensors.values())
    assert read == 0
    return found, {t.name: t for t in found.treatments}


WEIGHTED = "\n".join(
    f"- model: {name}\n  parameters: {{weight: {w}}}" for name, w in (("one", 0.5), ("two", 0.25))
)
PLAIN = "- model: one\n- model: two"
BASE = "base_model: base\n"
RECIPES = {
    "linear": f"models:\n{WEIGHTED}",
    "slerp": f"{BASE}models:\n- model: base\n- model: one\nparameters:\n  t:\n"
    "  - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}\n"
    "  - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}\n  - value: 0.5",
    "nuslerp": f"models:\n{WEIGHTED}\nparameters: {{nuslerp_flatten: no, nuslerp_row_wise: yes}}",
    "multislerp": f"{BASE}models:\n{WEIGHTED}\nparameters: {{normalize_weights: true, eps: 1e-8}}",
    "karcher": f"models:\n{PLAIN}\nparameters: {{max_iter: 20, tol: 1e-6}}",
    **{
        name: f"{BASE}models:\n- model: base\n{WEIGHTED}\nparameters: {more}"
        for name, more in {
            "task_arithmetic": "{lambda: 0.7, int8_mask: true}",
            "ties": "{density: 0.5, normalize: true}",
            "dare_linear": "{density: 0.53}",
            "dare_ties": "{density: [0.3, 0.6], int8_mask: true}",
            "breadcrumbs": "{density: 0.9, gamma: 0.01}",
            "breadcrumbs_ties": "{density: 0.9, gamma: 0.01}",
            "della": "{density: 0.7, epsilon: 0.1, lambda: 1.1}",
            "della_linear": "{density: 0.7, epsilon: 0.1}",
        }.items()
    },
    "model_stock": f"{BASE}models:\n{PLAIN}\nparameters: {{filter_wise: true}}",
    "nearswap": f"{BASE}models:\n- model: one\nparameters: {{t: 0.001}}",
    "arcee_fusion": f"{BASE}models:\n- model: base\n- model: one",
    "sce": f"{BASE}models:\n{PLAIN}\nparameters: {{select_topk: 0.1}}",
    "ram": f"{BASE}models:\n{PLAIN}",
    "ramplus_tl": f"{BASE}models:\n{PLAIN}\nparameters: {{r: 0.1, alpha: 0.2}}",
    "passthrough": "slices:\n- sources: [{model: one, layer_range: [0, 2]}]\n"
    "- sources:\n  - model: two\n    layer_range: [1, 2]\n    parameters:\n      scale:\n"
    "      - {filter: o_proj, value: 0}\n      - {filter: down_proj, value: 0}\n      - value: 1",
}


@pytest.mark.parametrize("name", sorted(mergekit.MERGEKIT))
def test_a_recipe_of_every_method_plans(name):
    checkpoints = models()
    found, tensors = planned(
        f"merge_method: {name}\ndtype: bfloat16\n{RECIPES[name]}\n", checkpoints
    )
    if name != "passthrough":
        assert list(tensors) == [
            *(n for n in checkpoints["base"].tensors if n != "lm_head.weight"),
            "lm_head.weight",
        ]
    for t in found.treatments:
        assert t.method in (name, "copy", "passthrough")
        assert t.dtype == BF16
        assert t.weights is None or len(t.weights) == len(t.models)
        assert [x.source.split("/")[0] for x in t.models] == list(t.owners)
        for value in t.options.values():
            assert not isinstance(value, tuple) or len(value) == len(t.models)
        for tensor in (*t.models, *([t.base] if t.base is not None else [])):
            assert isinstance(tensor, Tensor)
            assert tensor.shape == t.shape
    assert json.loads(json.dumps(describe(found)))["write"] > 0
    assert found.method in render(found)


def test_ties_reads_as_mergekit_does():
    found, tensors = planned("merge_method: ties\n" + RECIPES["ties"])
    t = tensors["model.layers.1.mlp.up_proj.weight"]
    assert [x.source.split("/")[0] for x in t.models] == ["one", "two"]
    assert t.base is not None
    assert t.base.source.startswith("base/")
    assert t.weights == (0.5, 0.25)
    set_here = {"density": 0.5, "normalize": True, "rescale": False, "scale": 1.0}
    assert t.options == {**set_here, "compat": "mergekit"}
    assert {t.group for t in found.treatments} == {0}


def test_scale_and_mergekits_lambda_make_the_same_output():
    text = "merge_method: ties\n" + RECIPES["ties"].replace(
        "density: 0.5", "density: 0.5, KEY: 0.7"
    )
    ours, theirs = (planned(text.replace("KEY", key)) for key in ("scale", "lambda"))
    assert next(iter(ours[1].values())).options["scale"] == 0.7
    assert fingerprint(ours[0]) == fingerprint(theirs[0])


def test_slerp_starts_at_the_base_whichever_is_listed_first():
    text = "merge_method: slerp\nbase_model: base\nmodels: [{model: one}, {model: base}]\n"
    _, tensors = planned(text + "parameters: {t: [0, 1]}")
    first, last = tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    assert [x.source.split("/")[0] for x in first.models] == ["base", "one"]
    assert tensors["model.layers.1.mlp.up_proj.weight"].options["t"] == 1.0
    assert (first.options["t"], last.options["t"]) == (0.0, 0.0)


def test_slerp_without_a_base_starts_at_the_first_model():
    recipe = simple(["two", "one"], method="slerp", t=0.25)
    t = plan(recipe, models().__getitem__).treatments[0]
    assert [x.source.split("/")[0] for x in t.models] == ["two", "one"]
    with pytest.raises(RecipeError, match="slerp needs base_model"):
        simple(["two", "one"], method="slerp", t=0.25, compat="mergekit")


def test_gradients_run_over_the_layers_of_a_slice():
    checkpoints = {"a": llama("a", 0, layers=5), "b": llama("b", 1, layers=5)}
    text = "merge_method: linear\nslices:\n"
    for a, b in ((0, 3), (4, 5)):
        text += "- sources:\n" + "".join(
            f"  - {{model: {m}, layer_range: [{a}, {b}], parameters: {{weight: {w}}}}}\n"
            for m, w in (("a", "[0, 1]"), ("b", 1))
        )
    found, tensors = planned(text, checkpoints)
    weights = [tensors[f"model.layers.{i}.mlp.up_proj.weight"].weights[0] for i in range(4)]
    assert weights == [0.0, 0.5, 1.0, 1.0]  # t = i / (n - 1), and 1 for the only layer of a slice
    assert tensors["model.embed_tokens.weight"].weights[0] == 0.0
    sources = [x.source for x in tensors["model.layers.3.mlp.up_proj.weight"].models]
    assert sources == [f"{m}/model.layers.4.mlp.up_proj.weight" for m in "ab"]
    assert stacks(t.name for t in found.treatments) == {"model.layers": 4}


def test_the_last_slice_keeps_all_its_sources_after_the_layers():
    """mergekit 0.1.4 pairs them with the first slice's, and silently drops the second model."""
    text = """
merge_method: linear
parameters: {weight: 1}
slices:
- sources: [{model: one, layer_range: [0, 1]}]
- sources: [{model: one, layer_range: [1, 2]}, {model: two, layer_range: [1, 2]}]
"""
    _, tensors = planned(text)
    assert len(tensors["lm_head.weight"].models) == 2
    assert len(tensors["model.norm.weight"].models) == 2
    assert len(tensors["model.embed_tokens.weight"].models) == 1


def test_frankenmerge_renumbers_and_patches_the_config(tmp_path):
    checkpoints = models(layers=4)
    kinds = ["full", "sliding", "full", "sliding"]
    beside(checkpoints["one"], tmp_path, config=config(num_hidden_layers=4, layer_types=kinds))
    text = (
        "merge_method: passthrough\ndtype: float16\nslices:\n"
        "- sources: [{model: one, layer_range: [0, 3]}]\n"
        "- sources: [{model: two, layer_range: [1, 4]}]\n"
    )
    found, tensors = planned(text, checkpoints)
    new = json.loads(found.extras["config.json"])
    assert new["num_hidden_layers"] == 6
    assert new["layer_types"] == ["full", "sliding", "full", "sliding", "full", "sliding"]
    assert new["torch_dtype"] == "float16"
    beside(checkpoints["one"], tmp_path, config=config(num_hidden_layers=4, layer_group_size=3))
    with pytest.raises(RecipeError, match=r"cannot state the layers in .*: 'layer_group_size' 3"):
        planned(text, checkpoints)
    t = tensors["model.layers.4.mlp.up_proj.weight"]
    assert t.models[0].source == "two/model.layers.2.mlp.up_proj.weight"
    assert (t.method, t.dtype, t.options) == ("passthrough", np.dtype("float16"), {"scale": 1.0})


def test_modules_split_towers():
    def tower(name, seed):
        text = llama(name, seed, prefix="language_model.")
        vision = llama(name, seed + 10, layers=3, tied=True, prefix="vision_tower.")
        arrays = {k: x.array for one in (text, vision) for k, x in one.tensors.items()}
        return Fake(name, arrays)

    checkpoints = {"one": tower("one", 0), "two": tower("two", 1)}
    text = """
merge_method: linear
modules:
  text_decoder:
    models: [{model: one, parameters: {weight: [0, 1]}}, {model: two, parameters: {weight: 1}}]
  vision_tower:
    slices:
    - sources:
      - {model: two, layer_range: [0, 3], parameters: {weight: 3}}
"""
    _, tensors = planned(text, checkpoints)
    assert len(tensors) == len(checkpoints["one"].tensors)
    vision = tensors["vision_tower.model.layers.2.mlp.up_proj.weight"]
    assert (len(vision.models), vision.weights) == (1, (3.0,))
    assert tensors["language_model.model.layers.1.mlp.up_proj.weight"].weights == (1.0, 1.0)
    with pytest.raises(RecipeError, match="no tensor of two belongs to the module"):
        planned(text.replace("vision_tower:", "visoin_tower:"), checkpoints)


BAD = {
    "no such tensor": ("{filter: mlpp, value: 1}", "fits no tensor (nearest: 'mlp'"),
    "shadowed": (
        "{filter: mlp, value: 1}, {filter: up_proj, value: 1}",
        "never reached: an earlier condition ('mlp') takes all 12 tensors",
    ),
    "ambiguous": (
        "{filter: layers.1, value: 1}",
        (
            "ambiguous: as a substring it fits 16 tensors in which the number is longer (as"
            " 'model.layers.10.self_attn.q_proj.weight') and 8 in which it is not"
        ),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_filters_that_mislead(case):
    conditions, what = BAD[case]
    checkpoints = {"a": llama("a", layers=12)}
    text = f"""
merge_method: linear
models: [{{model: a, parameters: {{weight: [{conditions}, {{value: 1}}]}}}}]
"""
    with pytest.raises(RecipeError, match=re.escape(what)) as caught:
        planned(text, checkpoints)
    assert caught.value.where.path.startswith("models[0].parameters.weight[")
    for advised in re.findall(r"'(re:.*?)'", str(caught.value)):
        planned(
            text.replace("filter: layers.1,", f"filter: '{advised}',".replace("\\\\", "\\")),
            checkpoints,
        )


@pytest.mark.parametrize(
    ("filter", "layers"),
    [
        ("layers.1.", [1]),
        (r"re:layers\.1(\D|$)", [1]),
        (r"re:layers\.1", [1, 10, 11]),
        ("glob:*.1.*", [1]),
    ],
)
def test_filters_that_are_exact(filter, layers):
    text = f"""
merge_method: linear
models: [{{model: a, parameters: {{weight: [{{filter: '{filter}', value: 2}}, {{value: 1}}]}}}}]
"""
    _, tensors = planned(text, {"a": llama("a", layers=12)})
    twos = [position(n).index for n, t in tensors.items() if t.weights == (2.0,) and position(n)]
    assert sorted(set(twos)) == layers


def test_required_parameter_that_no_condition_sets():
    text = f"merge_method: slerp\n{BASE}models: [{{model: one}}]\n"
    with pytest.raises(RecipeError, match=r"needs 't', but no condition sets it for the tensor"):
        planned(text + "parameters: {t: [{filter: mlp, value: 1}]}")


def linear(*names):
    return simple(list(names), method="linear")


def test_tied_and_untied_heads(tmp_path):
    tied = beside(
        llama("tied", 1, tied=True), tmp_path / "t", config=config(tie_word_embeddings=True)
    )
    own = beside(llama("own", 2), tmp_path / "o", config=config())
    found = plan(linear("tied", "own"), store(tied=tied, own=own))
    head = next(t for t in found.treatments if t.name == "lm_head.weight")
    assert [x.source for x in head.models] == [
        "tied/model.embed_tokens.weight",
        "own/lm_head.weight",
    ]
    assert "merged by its embedding" in head.note
    assert json.loads(found.extras["config.json"])["tie_word_embeddings"] is False
    assert found.aliases == {}


def test_a_stored_copy_of_a_tied_head_is_not_written(tmp_path):
    documents = {"config": config(tie_word_embeddings=True)}
    a = beside(llama("a", 1), tmp_path / "a", **documents)
    a.tensors["lm_head.weight"].array = a.tensors["model.embed_tokens.weight"].array.copy()
    b = beside(llama("b", 2, tied=True), tmp_path / "b", **documents)
    found = plan(linear("a", "b"), store(a=a, b=b))
    assert "lm_head.weight" not in {t.name for t in found.treatments}
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_head_of_its_own_is_merged_although_its_config_calls_it_tied(tmp_path):
    """As in transformers: a head that is stored with different values is not tied."""
    documents = {"config": config(tie_word_embeddings=True)}
    a = beside(llama("a", 1), tmp_path / "a", **documents)
    b = beside(llama("b", 2, tied=True), tmp_path / "b", **documents)
    found = plan(linear("a", "b"), store(a=a, b=b))
    head = next(t for t in found.treatments if t.name == "lm_head.weight")
    assert [x.source for x in head.models] == ["a/lm_head.weight", "b/model.embed_tokens.weight"]
    assert json.loads(found.extras["config.json"])["tie_word_embeddings"] is False
    assert any("tie_word_embeddings True, but 'lm_head.weight' has" in n for n in found.notes)


def test_untied_model_without_its_head_is_refused(tmp_path):
    a = beside(llama("a", 1, tied=True), tmp_path, config=config(tie_word_embeddings=False))
    with pytest.raises(RecipeError, match=r"'lm_head\.weight' is missing in a"):
        plan(linear("a", "b"), store(a=a, b=llama("b", 2)))


@pytest.mark.parametrize("rows", [7, 13])
def test_embeddings_of_other_sizes_by_number_against_a_base(rows):
    """mergekit subtracts and fails where the tuned embedding is the smaller."""
    checkpoints = {"base": llama("base", 0), "one": llama("one", 1, vocab=rows)}
    found = plan(simple(["one"], "base", "task_arithmetic"), checkpoints.__getitem__)
    t = found.treatments[0]
    base, one = (checkpoints[k].tensors[t.name].array for k in ("base", "one"))
    assert t.shape == (10, WIDTH)
    assert t.note
    np.testing.assert_array_equal(entries(t.models[0])[: min(rows, 10)], one[:10])
    np.testing.assert_array_equal(entries(t.models[0])[rows:], base[rows:])


def test_common_rows_without_a_base(tmp_path):
    a = beside(llama("a", 0, vocab=12), tmp_path, config=config(vocab_size=12))
    found = plan(linear("a", "b"), store(a=a, b=llama("b", 1, vocab=9)))
    assert {t.shape for t in found.treatments if role(t.name)} == {(9, WIDTH)}
    assert json.loads(found.extras["config.json"])["vocab_size"] == 9


def test_missing_tensors():
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoints = models()
    del checkpoints["two"].tensors[name]
    arguments = (["one", "two"], "base", "ties")

    def treated(**more):
        found = plan(simple(*arguments, weights=[1.0, 3.0], **more), checkpoints.__getitem__)
        return next(t for t in found.treatments if t.name == name)

    with pytest.raises(RecipeError, match=re.escape(f"'{name}' is missing in two")):
        treated()
    skipped = treated(missing="skip", density=[0.1, 0.2])
    assert (skipped.owners, skipped.weights, skipped.options["density"]) == (("one",), (1.0,), 0.1)
    assert len(skipped.models) == 1
    del checkpoints["one"].tensors[name]
    nobody = treated(missing="skip", density=[0.1, 0.2])
    assert (nobody.method, nobody.weights) == ("copy", None)
    assert nobody.models == (checkpoints["base"].tensors[name],)
    assert nobody.owners == ("base",)
    based = treated(missing="base")
    assert based.models[1] is based.base
    assert based.owners == ("one", "two")
    assert based.weights == (1.0, 3.0)


def test_extra_tensors():
    checkpoints = models()
    checkpoints["two"].tensors["adapter.weight"] = Array("adapter.weight", np.ones(3), "two/x")
    open_ = checkpoints.__getitem__
    with pytest.raises(RecipeError, match=r"two has 1 tensors that base lacks, such as 'adapter"):
        plan(simple(["one", "two"], "base", "ties"), open_)
    found = plan(simple(["one", "two"], "base", "ties", extra="ignore"), open_)
    assert any("left out: adapter.weight" in loss for loss in found.losses)
    # derived buffers of older files are no reason to refuse
    del checkpoints["two"].tensors["adapter.weight"]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoints["two"].tensors[name] = Array(name, np.ones(3), "two/x")
    assert plan(simple(["one", "two"], "base", "ties"), open_)


def test_renamed_tensors():
    checkpoints = {"a": llama("a", 0), "b": llama("b", 1, prefix="wrapped.")}
    recipe = simple(["a", "b"], method="linear", rename={r"^wrapped\.": ""})
    found = plan(recipe, checkpoints.__getitem__)
    assert found.treatments[0].models[1].source == "b/wrapped.model.embed_tokens.weight"
    with pytest.raises(RecipeError, match=r"the pattern 'nothing' matches no tensor"):
        plan(recipe.model_copy(update={"rename": {"nothing": "x"}}), checkpoints.__getitem__)
    swapped = simple(
        ["a", "b"],
        method="linear",
        rename={r"^(?:wrapped\.)?(?P<root>\w+)\.(.*)": r"ä\\\2.\g<root>"},
    )
    names = [t.name for t in plan(swapped, checkpoints.__getitem__).treatments]
    assert names[0] == "ä\\embed_tokens.weight.model"
    with pytest.raises(RecipeError, match="two tensors would be called"):
        plan(
            recipe.model_copy(update={"rename": {r"layers\.\d": "layers.0"}}),
            checkpoints.__getitem__,
        )


def test_integers_are_copied_and_dtypes_may_differ():
    more = {"steps": np.arange(3), "mask": np.ones(2, bool)}
    a = llama("a", 0, dtype=np.float32, **more)
    b = llama("b", 1, dtype=np.float16, **more)
    found = {t.name: t for t in plan(linear("a", "b"), store(a=a, b=b)).treatments}
    assert found["steps"].method == "copy"
    assert found["steps"].owners == ("a", "b")
    with_base = plan(simple(["a"], "b", "task_arithmetic"), store(a=a, b=b)).treatments
    assert {t.owners for t in with_base if t.method == "copy"} == {("b", "a")}
    assert found["model.norm.weight"].dtype == np.float32
    b.tensors["steps"] = Array("steps", np.arange(4), "b/steps")
    with pytest.raises(RecipeError, match="non-float tensors must have equal dtypes"):
        plan(linear("a", "b"), store(a=a, b=b))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"vocab": 10, "layers": 3}, "b has 3 layers in model.layers, not 2"),
        ({"layers": 1}, "b has 1 layers in model.layers, not 2"),
    ],
)
def test_models_of_other_depth(change, what):
    with pytest.raises(RecipeError, match=re.escape(what)):
        plan(linear("a", "b"), store(a=llama("a"), b=llama("b", 1, **change)))


def test_shapes_that_differ():
    b = llama("b", 1)
    b.tensors["model.norm.weight"] = Array("n", np.ones(5, BF16), "b/n")
    with pytest.raises(RecipeError, match=r"norm.weight has shape \[4\] in a/.* and \[5\] in b/n"):
        plan(linear("a", "b"), store(a=llama("a"), b=b))


def test_numbers_a_method_refuses_are_refused_before_reading():
    with pytest.raises(RecipeError, match=r"della, for model\.embed_tokens\.weight: .*epsilon"):
        plan(simple(["one"], "base", "della", density=0.5, epsilon=0.9), models().__getitem__)
    with pytest.raises(RecipeError, match="weights of linear sum to 0"):
        plan(simple(["one", "two"], method="linear", weights=[1, -1]), models().__getitem__)


def test_karcher_joins_its_base_only_as_mergekit_does():
    for compat, count in (("mergekit", 3), ("paper", 2)):
        recipe = simple(["one", "two"], "base", "karcher", compat=compat)
        assert len(plan(recipe, models().__getitem__).treatments[0].models) == count


def test_groups_share_what_they_are_trimmed_by():
    text = "merge_method: ties\ncompat: paper\nscope: tree\nbase_model: base\nmodels:\n" + WEIGHTED
    found, _ = planned(text + "\nparameters: {density: [{filter: mlp, value: 0.1}, {value: 0.5}]}")
    groups = {(t.group, t.options["density"], t.options["scope"]) for t in found.treatments}
    assert groups == {(0, 0.5, "tree"), (1, 0.1, "tree")}


def test_fingerprint_changes_with_what_is_done():
    def of(**more):
        recipe = simple(["one", "two"], "base", "dare_ties", **more)
        return fingerprint(plan(recipe, models().__getitem__))

    assert of() == of()
    assert len({of(), of(seed=1), of(density=0.4), of(dtype="float32"), of(weights=[1, 2])}) == 5


def test_render_and_describe():
    found, tensors = planned("merge_method: ties\n" + RECIPES["ties"])
    twice = dict.fromkeys(tensors, 2)
    short, full = render(found), render(found, full=True, passes=twice)
    assert "model.layers.{0-1}.mlp.up_proj.weight  6x4 bfloat16  ties  weights 0.5 0.25" in short
    assert "in 2 passes" in full
    assert all(name in full for name in tensors)
    data = describe(found, twice)
    size = 2 * sum(int(np.prod(t.shape)) for t in found.treatments)
    assert (data["write"], data["read"]) == (size, 2 * 3 * size)
    assert len(data["tensors"]) == len(tensors)


def test_model_card(tmp_path):
    yaml = pytest.importorskip("yaml")
    checkpoints = models()
    beside(checkpoints["base"], tmp_path, config=config())
    recipe = parse("merge_method: ties\n" + RECIPES["ties"])
    card = model_card(recipe, plan(recipe, checkpoints.__getitem__), "it")
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["merge", "sail-jax"]}
    assert "[TIES](https://arxiv.org/abs/2306.01708)" in card
    assert recipe.text.strip() in card


def test_the_card_of_a_grown_network_names_no_folder_of_this_machine():
    about = {"method": "lemon", "seed": 0, "options": {}, "spaces": [], "changes": {}}
    about |= {"exactness": "not run", "agreement": [], "notes": []}
    for source, shown in (("/home/me/small", "small"), ("models/small", "models/small")):
        card = growth_card({**about, "source": source}, "large", True)
        assert f"Source: `{shown}`." in card


def test_files_are_carried(tmp_path):
    checkpoints = models()
    documents = {"config": config(), "generation_config": {}, "tokenizer_config": {}}
    beside(checkpoints["base"], tmp_path, **documents)
    beside(checkpoints["base"], tmp_path, **{"model.safetensors.index": {}})
    found, _ = planned("merge_method: ties\nchat_template: chatml\n" + RECIPES["ties"], checkpoints)
    assert set(found.extras) == {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert isinstance(found.extras["generation_config.json"], Path)
    assert "<|im_start|>" in json.loads(found.extras["tokenizer_config.json"])["chat_template"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.mlp.w", ("model.layers", 12)),
        ("transformer.h.3.attn.weight", ("transformer.h", 3)),
        ("blocks/3/mlp/kernel", ("blocks", 3)),
        ("EncoderBlock_4/Dense_0/kernel", ("EncoderBlock", 4)),
        ("bert.encoder.layer.5.output.dense.weight", ("bert.encoder.layer", 5)),
        ("gpt_neox.layers.1.attention.weight", ("gpt_neox.layers", 1)),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", ("model.layers", 0)),
        ("model.layers.0", ("model.layers", 0)),
        ("visual.merger.mlp.0.weight", None),
        ("lm_head.weight", None),
        ("graph.3.weight", None),
    ],
)
def test_layers(name, expected):
    place = position(name)
    assert (None if place is None else (place.stack, place.index)) == expected


def adapter(tmp_path, rank=2, **more):
    rng = np.random.default_rng(5)
    at = "base_model.model.model.layers.1.mlp.up_proj"
    arrays = {
        f"{at}.lora_A.weight": rng.normal(size=(rank, WIDTH)).astype(np.float32),
        f"{at}.lora_B.weight": rng.normal(size=(6, rank)).astype(np.float32),
        "base_model.model.lm_head.weight": rng.normal(size=(10, WIDTH)).astype(np.float32),
    }
    documents = {"adapter_config": {"peft_type": "LORA", "r": rank, "lora_alpha": 3} | more}
    return beside(Fake("lora", arrays), tmp_path, **documents)


def test_adapters_are_in_their_model(tmp_path):
    checkpoints = models(dtype=np.float32) | {"lora": adapter(tmp_path)}
    found = plan(
        parse("merge_method: linear\nmodels: [{model: one+lora, parameters: {weight: 1}}]"),
        checkpoints.__getitem__,
    )
    tensors = {t.name: t for t in found.treatments}
    a, b, head = (x.array for x in checkpoints["lora"].tensors.values())
    name = "model.layers.1.mlp.up_proj.weight"
    expected = checkpoints["one"].tensors[name].array + 1.5 * b.astype(np.float64) @ a
    # three float32 roundings of terms below 8
    np.testing.assert_allclose(entries(tensors[name].models[0]), expected, rtol=0, atol=3 * 2**-21)
    np.testing.assert_array_equal(entries(tensors["lm_head.weight"].models[0]), head)
    plain = tensors["model.layers.0.mlp.up_proj.weight"].models[0]
    assert plain is checkpoints["one"].tensors[plain.name]
    assert {t.owners for t in found.treatments} == {("one+lora",)}


def renamed_adapter(tmp_path, old, new, **more):
    made = adapter(tmp_path, **more)
    made.tensors = {key.replace(old, new): x for key, x in made.tensors.items()}
    return made


RENAMED = "{rename}\nmerge_method: passthrough\nmodels: [{{model: one+lora}}]"


@pytest.mark.parametrize(
    ("new", "rename"),
    [
        (".model.text.model.layers", r"'^text\.model\.': model."),
        (".model.layers", r"'^layers\.': model.layers."),
    ],
)
def test_a_recipe_renames_what_an_adapter_names_otherwise(tmp_path, new, rename):
    """Another prefix, and one model. too few. A name that the base has is not renamed."""
    rename = f"rename: {{{rename}}}"
    checkpoints = models(dtype=np.float32)
    read = []
    for lora, lines in (
        (adapter(tmp_path / "a"), ""),
        (renamed_adapter(tmp_path / "b", ".model.model.layers", new), rename),
    ):
        found = plan(parse(RENAMED.format(rename=lines)), {**checkpoints, "lora": lora}.__getitem__)
        read.append({t.name: entries(t.models[0]) for t in found.treatments})
    assert read[0].keys() == read[1].keys()
    for name, expected in read[0].items():
        np.testing.assert_array_equal(read[1][name], expected)


@pytest.mark.parametrize("first", [0, 1])
def test_a_renamed_tensor_replaces_no_other(tmp_path, first):
    lora = adapter(tmp_path)
    short = {k.replace(".model.model.", ".model."): x for k, x in lora.tensors.items()}
    lora.tensors = {**short, **lora.tensors} if first else {**lora.tensors, **short}
    rename = r"rename: {'^layers\.': model.layers.}"
    with pytest.raises(ValueError, match=r"two tensors would be called .*mlp\.up_proj\.lora_A"):
        plan(parse(RENAMED.format(rename=rename)), {**models(), "lora": lora}.__getitem__)


def test_a_renamed_module_keeps_what_its_config_says(tmp_path):
    new, rename = ".model.layers", r"rename: {'^layers\.': model.layers.}"
    said = {"alpha_pattern": {r"^layers\.1\.mlp\.up_proj": 7}}
    lora = renamed_adapter(tmp_path, ".model.model.layers", new, **said)
    with pytest.raises(ValueError, match=r"entry for 'layers\.1\.mlp\.up_proj'.*in the config"):
        plan(parse(RENAMED.format(rename=rename)), {**models(), "lora": lora}.__getitem__)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r: "),
        ({"use_qalora": True}, "use_qalora"),
    ],
)
def test_adapters_that_do_not_fit(tmp_path, change, what):
    checkpoints = models() | {"lora": adapter(tmp_path, **change)}
    with pytest.raises(ValueError, match=what):
        plan(
            parse("merge_method: passthrough\nmodels: [{model: one+lora}]"), checkpoints.__getitem__
        )


def test_on_files(tmp_path):
    """A plan made from a folder of safetensors can be read by the readers."""
    numpy = pytest.importorskip("safetensors.numpy")
    from sail_jax.checkpoint.formats.open import open_checkpoint

    for name, seed in (("base", 0), ("one", 1)):
        folder = tmp_path / name
        fake = beside(llama(name, seed, dtype=np.float32, vocab=10 + seed), folder, config=config())
        numpy.save_file({k: x.array for k, x in fake.tensors.items()}, folder / "model.safetensors")
    opened = []

    def open_(path):
        opened.append(open_checkpoint(path))
        return opened[-1]

    found = plan(simple([tmp_path / "one"], tmp_path / "base", "ties"), open_)
    one = llama("one", 1, dtype=np.float32, vocab=11)
    for t in found.treatments:
        rows = one.tensors[t.name].array[: t.shape[0]]
        np.testing.assert_array_equal(entries(t.models[0]), rows)
    assert set(found.extras) == {"config.json"}
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.slow
def test_mutated_recipes_plan_or_are_refused():
    rng = random.Random(1)
    checkpoints = models()

    def open_(path):
        if path not in checkpoints:
            raise RecipeError(Where(), f"no {path}")
        return checkpoints[path]

    texts = [f"merge_method: {name}\n{RECIPES[name]}\n" for name in sorted(RECIPES)]
    extra = ["compat: paper\n", "missing: skip\n", "scope: tree\n", "rename: {a: b}\n", "seed: 7\n"]
    words = ["0", "1", "-1", "0.5", "2", "[0, 1]", "true", "mlp", "base", "one", "x", "{}", "[]"]
    planned_, refused = 0, 0
    for _ in range(400):
        text = rng.choice(texts) + rng.choice(["", *extra])
        for _ in range(rng.randint(0, 2)):
            tokens = re.split(r"(\W+)", text)
            tokens[rng.randrange(len(tokens))] = rng.choice(words)
            text = "".join(tokens)
        try:
            plan(parse(text), open_)
            planned_ += 1
        except RecipeError:
            refused += 1
    assert min(planned_, refused) > 50


@pytest.mark.slow
def test_the_convention_is_said_where_it_matters_and_none_is_named():
    """The difference matters if the two plans differ in weights, merges or models."""
    matters = set()
    for name, recipe in RECIPES.items():
        text = f"merge_method: {name}\n{recipe}\n"

        def of(compat, text=text):
            try:
                found, _ = planned(text + compat)
            except RecipeError:
                return None, []
            does = [(t.weights or (1.0,) * len(t.models), len(t.models), t.merge and
                     t.merge.identity) for t in found.treatments]  # fmt: skip
            return does, [note for note in found.notes if note.startswith("compat: ")]

        paper, no = of("compat: paper\n")
        mergekit, none = of("compat: mergekit\n")
        default, said = of("")
        assert default == mergekit
        assert no == none == []
        assert len(said) == (paper is not None and paper != mergekit), name
        for note in said:
            assert note.startswith("compat: using mergekit's conventions; `compat: paper` gives")
        matters |= {name} if said else set()
    assert {"ties", "slerp"} <= matters
    assert "linear" not in matters


def test_pytrees_convention_is_said_of_files_too():
    for compat, said in ((None, 1), ("paper", 0), ("mergekit", 0)):
        recipe = simple(["one", "two"], "base", "ties", compat=compat)
        notes = plan(recipe, models().__getitem__).notes
        assert sum(note.startswith("compat: using paper's") for note in notes) == said
        assert recipe.compat == (compat or "paper")
