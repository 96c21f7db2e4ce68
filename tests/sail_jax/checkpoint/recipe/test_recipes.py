"""Recipes: mergekit's grammar read strictly, every error with its place and remedy."""

import re
import time

import pytest
from cells import slow_unless

from sail_jax.checkpoint.recipe import mergekit, yaml_tree
from sail_jax.checkpoint.recipe.patterns import renaming
from sail_jax.checkpoint.recipe.recipes import RecipeError, Ref, parse, simple
from sail_jax.checkpoint.recipe.settings import Condition, Ledger, interpolate, matcher
from sail_jax.checkpoint.recipe.yaml_tree import LIMIT, Where, compose

TIES = """\
merge_method: ties
base_model: org/base
dtype: bfloat16
models:
  - model: org/base   # no parameters for the base
  - model: org/one@main
    parameters:
      weight: 0.5
      density: [0.2, 0.8]
  - model: org/two+some/lora@v1
    parameters:
      weight:
        - filter: mlp
          value: [0, 1e-1]
        - value: 0.3
parameters:
  normalize: true
  lambda: 0.7
  int8_mask: true
"""


def test_reads_what_mergekit_reads():
    recipe = parse(TIES, "r.yaml")
    (part,) = recipe.modules[0].slices
    assert recipe.method == "ties"
    assert recipe.compat == "mergekit"
    assert [source.model for source in part.sources] == [
        Ref("org/base"),
        Ref("org/one", "main"),
        Ref("org/two", None, "some/lora", "v1"),
    ]
    assert [str(ref) for ref in recipe.models()] == [
        "org/base",
        "org/one@main",
        "org/two+some/lora@v1",
    ]
    weight = part.sources[2].parameters["weight"]
    assert [(c.filter, c.values) for c in weight] == [("mlp", (0.0, 0.1)), (None, (0.3,))]
    assert weight[0].where == Where("models[2].parameters.weight[0]", "r.yaml", 13, 11)
    assert recipe.parameters["normalize"][0].values == (True,)


def test_scale_and_lambda_are_one_parameter():
    for keys in ("scale: 0.7", "lambda: 0.7", "scale: 0.7, lambda: 0.7"):
        recipe = parse(two("ties", LINEAR, f"base_model: c\nparameters: {{{keys}}}"))
        (named,) = [x for x in recipe.settings() if x[0] in ("scale", "lambda")]
        assert named[0] == keys.partition(":")[0]  # messages have the name that was written
        assert named[1][0].values == (0.7,)
    text = two("ties", LINEAR, "base_model: c\nparameters: {scale: 0.7, lambda: 0.8}")
    with pytest.raises(RecipeError, match="scale and lambda are the same parameter, but their va"):
        parse(text)
    with pytest.raises(RecipeError, match="same parameter"):
        simple(["a", "b"], "c", "ties", scale=0.7, **{"lambda": 0.8})


def test_single_condition_is_a_setting():
    recipe = parse(
        "merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\n"
        "parameters: {t: {filter: mlp, value: 0.25}}\n"
    )
    (condition,) = recipe.parameters["t"]
    assert (condition.filter, condition.values) == ("mlp", (0.25,))


def two(method="linear", models="[{model: a}, {model: b}]", more=""):
    return f"merge_method: {method}\nmodels: {models}\n{more}"


LINEAR = "[{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]"
BAD = {  # what is wrong: (text, where it is said, what is said)
    "unknown key": (two(more="paramters: {}"), "r:3:1: paramters", "nearest: 'parameters'"),
    "a method of growth that is a mapping": (
        two(models="[{model: a, grow: {to: {width: 2}, method: {x: y}}}]"),
        "models[0].grow.method",
        "expected one of",
    ),
    "unknown method": (two("tise"), "r:1:15: merge_method", "nearest: 'ties'"),
    "no method": ("models: [{model: a}]", "r:1:1", "needs 'merge_method'"),
    "empty modules": (
        "merge_method: linear\nmodules: {}",
        "r:2:10: modules",
        "modules by name; got none",
    ),
    "no models": ("merge_method: linear", "r:1:1", "exactly one of models, slices, modules"),
    "two forms": (two(more="slices: []"), "r:3:1: slices", "got models and slices"),
    "unknown parameter": (
        two(models="[{model: a, parameters: {wieght: 1}}]"),
        "r:2:34: models[0].parameters.wieght",
        "nearest: 'weight'",
    ),
    "weight missing": (
        two(models="[{model: a, parameters: {weight: 1}}, {model: b}]"),
        "models[1]",
        "requires 'weight' for b",
    ),
    "not per model": (
        two("slerp", "[{model: a}, {model: b, parameters: {t: 1}}]", "base_model: a"),
        "merge_method",
        "requires 't'",
    ),
    "ours, not per model": (
        two("ties", "[{model: a, parameters: {weight: 1, tie: zero}}]", "base_model: b"),
        "models[0].parameters.tie",
        "does not read 'tie' per model",
    ),
    "near a known word": (
        two("model_stock", more="base_model: c\nparameters: {filter_wize: true}"),
        "r:4:14: parameters.filter_wize",
        "nearest: 'filter_wise'",
    ),
    "within a condition": (
        two(models=LINEAR, more="parameters: {weight: [{filtre: mlp, value: 1}]}"),
        "parameters.weight[0].filtre",
        "nearest: 'filter'",
    ),
    "within what mergekit lacks": (
        two(models="[{model: a, align: {to: b, weight: 1}}]"),
        "models[0].align.weight",
        "in an alignment",
    ),
    "t missing": (two("slerp", more="base_model: a"), "merge_method", "requires 't'"),
    "slerp of three": (
        two("slerp", "[{model: a}, {model: b}, {model: c}]", "base_model: a\nparameters: {t: 1}"),
        "models",
        "slerp merges 2 model(s), base_model included; got 3",
    ),
    "nearswap of two": (
        two("nearswap", more="base_model: c\nparameters: {t: 1}"),
        "models",
        "got 2",
    ),
    "stock of one": (two("model_stock", more="base_model: a"), "models", "at least 2"),
    "no base": (two("ties", LINEAR), "models", "ties needs base_model"),
    "key twice": (two(more="dtype: float32\ndtype: float32"), "r:4:1: dtype", "twice"),
    "bool for number": (
        two(models="[{model: a, parameters: {weight: true}}]"),
        "weight",
        "expected a number",
    ),
    "infinite": (two(models="[{model: a, parameters: {weight: .inf}}]"), "weight", "finite number"),
    "density": (
        two("ties", "[{model: a, parameters: {weight: 1, density: 0}}]", "base_model: b"),
        "density",
        "(0, 1]",
    ),
    "dtype": (two(models=LINEAR, more="dtype: int64"), "r:3:8: dtype", "cut the weights"),
    "after everything": (
        two(models=LINEAR, more="parameters:\n  weight: [{value: 1}, {filter: mlp, value: 2}]"),
        "parameters.weight[1]",
        "never reached",
    ),
    "regular expression": (
        two(models=LINEAR, more="parameters: {weight: [{filter: 're:(', value: 1}]}"),
        "parameters.weight[0].filter",
        "not a regular expression",
    ),
    "looking around": (
        two(models=LINEAR, more="parameters: {weight: [{filter: 're:1(?!0)', value: 1}]}"),
        "parameters.weight[0].filter",
        "not a regular expression of RE2",
    ),
    "renaming by no expression": (two(models=LINEAR, more="rename: {'(': b}"), "rename", "RE2"),
    "renaming by a bomb": (
        two(models=LINEAR, more="rename: {'((a{1000}){1000}){1000}': b}"),
        "rename",
        "RE2",
    ),
    "no such group": (two(models=LINEAR, more=r"rename: {'(a)': '\2'}"), "rename", "is missing in"),
    "no such name": (
        two(models=LINEAR, more=r"rename: {'(a)': '\g<b>'}"),
        "rename",
        "is missing in",
    ),
    "an escape": (two(models=LINEAR, more=r"rename: {'(a)': '\n'}"), "rename", "for '\\\\n'"),
    "python tag": (
        two(models=LINEAR, more="seed: !!python/object/apply:os.getcwd []"),
        "seed",
        "tag 'tag:yaml.org,2002:python/object/apply:os.getcwd' is not allowed",
    ),
    "billion laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
            for a, b in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "",
        "aliases expand to more than",
    ),
    "itself": ("models: &a [*a]", "", "nested deeper"),
    "deep": ("[" * 1500, "r", "nested too deeply"),
    "long": ("#" * (LIMIT + 1), "r", "longer than"),
    "not yaml": ("a: [1", "r:1:", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2", "r:3:1", "another document"),
    "empty": ("", "r", "empty"),
    "slice lengths": (
        (
            "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]},"
            " {model: b, layer_range: [0, 3]}]"
        ),
        "slices[0].sources",
        "equally many layers; got [2, 3]",
    ),
    "layer range": (
        "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [3, 2]}]}]",
        "layer_range",
        "0 <= first <= last + 1",
    ),
    "reference": (two(models="[{model: a@b@c}]"), "models[0].model", "path[@revision]"),
    "token": (
        two(
            models=LINEAR, more="tokenizer: {tokens: {x: {source: {kind: model_token, model: a}}}}"
        ),
        "tokenizer.tokens.x.source",
        "one of token, token_id",
    ),
    "tokenizer twice": (
        two(models=LINEAR, more="tokenizer_source: union\ntokenizer: {source: base}"),
        "tokenizer_source",
        "not allowed with tokenizer",
    ),
    "template": (two(models=LINEAR, more="chat_template: chatlm"), "chat_template", "'chatml'"),
    "scope": (two(models=LINEAR, more="scope: tree"), "scope", "linear does not have a scope"),
}


@pytest.mark.parametrize("expression", ["(a+)+$", "(a|aa)+$", "(.*)*x", "(a*a*)*c"])
def test_expressions_of_strangers_are_quick(expression):
    """The name would make a backtracking engine try about 2^30 ways."""
    began = time.process_time()
    name = "a" * 30 + "b"
    assert not matcher(f"re:^{expression}$")(name)
    assert renaming(f"^{expression}$", "c")(name) == name
    assert time.process_time() - began < 1


# These two reach the bounds on nodes and on depth, which takes half a second each.
@pytest.mark.parametrize("case", [slow_unless(c not in ("billion laughs", "deep"), c) for c in BAD])
def test_bad_recipes_say_where_and_what(case):
    text, where, what = BAD[case]
    with pytest.raises(RecipeError) as caught:
        parse(text, "r")
    assert where in str(caught.value)
    assert what in str(caught.value)


def test_what_says_nothing_is_harmless():
    text = two(models=LINEAR, more="parameters: {}\ndtype: ~\nslices: ~\nrename: {}\n")
    assert parse(text.replace("slices: ~\n", "")).parameters == {}
    with pytest.raises(RecipeError, match="got models and slices"):
        parse(text)


def test_a_text_of_many_nodes_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(yaml_tree, "_NODES", 50)
    with pytest.raises(RecipeError, match="recipe: more than 50 nodes"):
        compose("- a\n" * 99 + "]")  # the end is no YAML


def test_merge_keys_and_aliases():
    recipe = parse(
        "merge_method: linear\nmodels:\n- &m {model: a, parameters: {weight: 1}}\n"
        "- {<<: *m, model: b}\n"
    )
    assert [source.model.path for source in recipe.modules[0].slices[0].sources] == ["a", "b"]


@pytest.mark.parametrize(
    ("values", "t", "expected"),
    [
        ([2.0], 0.3, 2.0),
        ([0.0, 1.0], 0.3, 0.3),
        ([0.0, 1.0, 0.0], 0.5, 1.0),
        ([0.0, 1.0, 0.0], 0.75, 0.5),
        ([1.0, 3.0], 1.0, 3.0),
        ([False, True], 0.99, False),  # a step: mergekit 0.1.4 interpolated bools as numbers
        ([False, True], 1.0, True),
        (["rank", "magnitude"], 1.0, "magnitude"),
    ],
)
def test_gradients(values, t, expected):
    found = interpolate(values, t)
    assert found == expected or abs(found - expected) <= 2.3e-16  # 1 ulp of 1


def test_the_innermost_fitting_condition_decides():
    inner = (Condition(filter="mlp", values=(1.0,), where=Where("inner")),)
    outer = (
        Condition(filter="attn", values=(2.0,), where=Where("o0")),
        Condition(filter=None, values=(3.0,), where=Where("o1")),
    )
    ledger = Ledger()
    found = [ledger.resolve([inner, None, outer], name, 0) for name in ("mlp", "attn", "norm")]
    assert found == [1.0, 2.0, 3.0]
    assert ledger.check([("x", inner), ("x", outer)]) == []


@pytest.mark.parametrize(
    "name", [s for s in sorted(mergekit.names()) if s not in ("slerp", "nearswap")]
)
def test_simple_makes_what_yaml_makes(name):
    entry = mergekit.entry(name)
    models = ["a", "b"][: entry.most or 2]
    base = None if entry.base in ("input", "joins") else "base"
    weights = [1.0] * len(models) if "weight" in entry.parameters else None
    recipe = simple(models, base, name, weights=weights, compat="mergekit")
    listed = "".join(
        f"\n- model: {m}" + ("\n  parameters: {weight: 1}" if weights else "") for m in models
    )
    text = f"merge_method: {name}\nmodels:{listed}\n" + (f"base_model: {base}\n" if base else "")
    same = parse(text)
    plain = re.compile(r"where=Where\([^)]*\)").sub
    assert plain("", repr(recipe.modules[0].slices[0].sources)) == plain(
        "", repr(same.modules[0].slices[0].sources)
    )
    assert recipe.models() == same.models()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"method": "tise"}, "nearest: 'ties'"),
        (
            {"densty": 0.5},
            "densty: unknown hyperparameter 'densty' of ties (nearest: ",
        ),
        ({"density": [0.1, 0.2, 0.3]}, "density: expected one number per model (2), got 3"),
        ({"weights": [1.0]}, "expected one number per model (2), got 1"),
        ({"scale": [1.0, 2.0]}, "expected one value, got 2"),
        ({"density": "much"}, "density: expected a number"),
        ({"base": None}, "ties needs base_model"),
        ({"seed": -1}, "seed"),
        ({"compat": "merge"}, "compat: expected one of mergekit, paper"),
        ({"models": "a"}, "models: expected a sequence"),
        ({"models": []}, "merges at least 1"),
    ],
)
def test_simple_refuses(arguments, what):
    with pytest.raises(RecipeError, match=re.escape(what)):
        simple(**({"models": ["a", "b"], "base": "c", "method": "ties"} | arguments))


def test_simple_takes_paths_as_they_are():
    recipe = simple(["x+y@z"], method="linear")
    assert recipe.models() == [Ref("x+y@z")]


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x00" * 9, bytes(range(256))])
def test_bytes_that_are_no_text(data):
    with pytest.raises(RecipeError):
        compose(data)
