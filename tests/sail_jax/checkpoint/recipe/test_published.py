"""Parameters that mergekit 0.1.5 accepts and ignores cause a note, and those that it reads
do not."""

import pytest

from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.published import KEYS, PARAMETERS
from sail_jax.checkpoint.recipe.recipes import RecipeError, parse
from sail_jax.checks import mistyped

DELTAS = "int8_mask normalize rescale lambda", "weight density"
READ = {  # by method, the parameters of mergekit 0.1.5: of the whole merge; of each model
    "linear": ("normalize", "weight"),
    "slerp": ("t", ""),
    "nuslerp": ("nuslerp_row_wise nuslerp_flatten", "weight"),
    "multislerp": ("normalize_weights eps", "weight"),
    "karcher": ("max_iter tol", ""),
    "task_arithmetic": DELTAS,
    "ties": DELTAS,
    "dare_linear": DELTAS,
    "dare_ties": DELTAS,
    "breadcrumbs": (DELTAS[0], f"{DELTAS[1]} gamma"),
    "breadcrumbs_ties": (DELTAS[0], f"{DELTAS[1]} gamma"),
    "della": (DELTAS[0], f"{DELTAS[1]} epsilon"),
    "della_linear": (DELTAS[0], f"{DELTAS[1]} epsilon"),
    "model_stock": ("filter_wise", ""),
    "nearswap": ("t", ""),
    "arcee_fusion": ("", ""),
    "sce": ("int8_mask select_topk", ""),
    "ram": ("epsilon", ""),
    "ramplus_tl": ("r alpha epsilon", ""),
    "passthrough": ("", "scale"),
}
INERT = {"task_arithmetic": {"density", "rescale"}}  # read, but only by methods that leave out
FLAGS = "filter_wise int8_mask normalize normalize_weights nuslerp_flatten nuslerp_row_wise rescale"
UNDER_PAPER = {"karcher": {"weight": "; compat: paper reads it"}}


def recipe(method, all_models="", one_model="", base="base_model: c\n"):
    """A recipe of as many models as the method takes, with a text for its parameters."""
    entry = mergekit.entry(method)
    models = "abc"[: 1 if entry.most == 1 else 2]
    if entry.base == "first":
        models = "ac"
    listed = "".join(f"- {{model: {m}, parameters: {{{one_model}}}}}\n" for m in models)
    return f"merge_method: {method}\n{base}models:\n{listed}parameters: {{{all_models}}}\n"


def test_methods_take_as_many_models_as_in_mergekit():
    two, one = dict.fromkeys(["slerp", "nuslerp"], (2, 2)), ["nearswap", "arcee_fusion"]
    counts = {**two, "model_stock": (2, None), **dict.fromkeys([*one, "passthrough"], (1, 1))}
    for name in mergekit.MERGEKIT:
        entry = mergekit.entry(name)
        assert (entry.least, entry.most) == counts.get(name, (1, None))


def values(names):
    return ", ".join(f"{n}: {'true' if n in FLAGS.split() else 1}" for n in names)


def said(text):
    return [note.text for note in parse(text, "r").notes]


def test_the_words_are_those_of_the_methods():
    assert set(READ) == set(mergekit.MERGEKIT)
    theirs = {p.theirs or p.name for e in mergekit.MERGEKIT.values() for p in e.parameters.values()}
    assert theirs == set(PARAMETERS)
    assert {p for words in READ.values() for w in words for p in w.split()} == set(PARAMETERS)
    for name, (shared, each) in READ.items():
        own = {p.theirs or p.name: p for p in mergekit.MERGEKIT[name].parameters.values()}
        assert {p for p in own if own[p].per_model} == set(each.split())
        assert {p for p in own if not own[p].per_model} == set(shared.split())
        # Parameters that are read correspond to an option here, or do not change any number in
        # mergekit.
        options = {p.option for p in own.values()} - {None, "weights"}
        assert all(mergekit.accepts(name, option) for option in options)
        idle = {p.name for p in own.values() if p.option is None}
        assert idle <= INERT.get(name, set()) | {"int8_mask"}


@pytest.mark.parametrize("method", READ)
def test_a_parameter_is_read_or_noted(method):
    shared, each = (set(words.split()) for words in READ[method])
    words = [*PARAMETERS, "int_space", "dtype"]
    inert, here = INERT.get(method, set()), UNDER_PAPER.get(method, {})
    more = {"dtype": "; it belongs at the top", **here}
    none = {p: f"{p} has no effect under {method}{more.get(p, '')}" for p in words}
    # Our name of lambda is read where lambda is.
    ours = {"scale"} if "lambda" in shared else set()
    expected = {none[p] for p in words if p not in shared | each | ours or p in inert}
    base = "" if method == "linear" else "base_model: c\n"
    found = said(recipe(method, values(words), base=base))
    assert set(found) == expected
    assert len(found) == len(expected)  # once, and not once for each model
    # The same among the parameters of a model, where those of the whole merge have no effect.
    found = said(recipe(method, values(shared), values(words), base))
    alone = {f"{p} of one model has no effect under {method}" for p in shared | ours}
    assert {text.split("; set it")[0] for text in found} == alone | expected


PLACES = {  # where a word stands: a recipe with WORD for a key
    "at the top": "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\nWORD: 1",
    "in a module": "merge_method: linear\nmodules: {m: {WORD: 1, "
    "models: [{model: a, parameters: {weight: 1}}]}}",
    "in a slice": "merge_method: passthrough\n"
    "slices: [{WORD: 1, sources: [{model: a, layer_range: [0, 1]}]}]",
    "in a source": "merge_method: passthrough\nmodels: [{model: a, WORD: 1}]",
    "in a model": "merge_method: passthrough\nmodels: [{model: {model: a, WORD: 1}}]",
    "in a location": "merge_method: passthrough\nmodels: [{model: {model: {path: a, WORD: 1}}}]",
    "in a condition": "merge_method: passthrough\nmodels: [{model: a}]\n"
    "parameters: {scale: [{filter: x, value: 1, WORD: 1}]}",
    "in a tokenizer": "merge_method: passthrough\nmodels: [{model: a}]\ntokenizer: {WORD: 1}",
    "in a token": "merge_method: passthrough\nmodels: [{model: a}]\n"
    "tokenizer: {tokens: {x: {source: a, WORD: 1}}}",
    "in a row": "merge_method: passthrough\nmodels: [{model: a}]\n"
    "tokenizer: {tokens: {x: {source: {kind: model_token, model: a, token: b, WORD: 1}}}}",
}
OWN = dict(zip(PLACES, KEYS.values(), strict=True))
OURS = {"in a source": {"grow", "align"}, "in a model": {"grow", "align"}}


@pytest.mark.parametrize("place", PLACES)
def test_a_key_is_read_or_noted_or_unknown(place):
    every = {word for keys in KEYS.values() for word in keys} | set(PARAMETERS)
    # Within one place, no key that belongs elsewhere is taken for a typing error, except these.
    near = {word for word in every - set(OWN[place]) if mistyped(word, OWN[place])}
    assert near <= {"model", "models", "source", "sources", "token", "tokens"}
    unread = {"int_space", "residual_weight", "allow_negative_weights", "wihgt"}
    for word in sorted((every | unread) - set(OWN[place]) - near):
        text = PLACES[place].replace("WORD", word)
        (note,) = parse(text, "r").notes
        assert note.text.startswith(f"{word} has no effect {place}")
        assert note.where.path.endswith(word)
        assert note.where.line
    for key in set(OWN[place]) - {"model", "path"}:  # lost, doubled, wrong and swapped letters
        swapped = key[:-2] + key[:-3:-1]
        for typing_error in {key[:-1], key[0] + key, key[:-1] + "-", swapped, key.upper()} - every:
            unknown = rf"r:\d+:\d+: .* unknown key '{typing_error}' .*'{key}'"
            with pytest.raises(RecipeError, match=unknown):
                parse(PLACES[place].replace("WORD", typing_error), "r")


@pytest.mark.parametrize("method", ["sce", "tsv_m"])
def test_a_parameter_that_nobody_reads_is_noted_and_a_typing_error_refused(method):
    words = {"smooth": "false", "allow_negative_weights": "false"}
    text = recipe(method, ", ".join(f"{word}: {value}" for word, value in words.items()))
    assert said(text) == [f"{word} has no effect under {method}" for word in words]
    known = "select_topk" if method == "sce" else "scale"
    for typing_error in (known[:-1], known + "s", known[1] + known[0] + known[2:]):
        with pytest.raises(RecipeError, match=rf"r:\d+:\d+: .*'{typing_error}' .*'{known}'"):
            parse(recipe(method, f"{typing_error}: 1"), "r")


def test_what_only_the_place_or_the_rest_makes_idle():
    assert said("name: x\n" + recipe("linear", "weight: 1")) == [
        "name has no effect in a file of one document"
    ]
    text = recipe("ties", "", "weight: 1").replace("model: a,", "model: c,")
    assert said(text) == ["weight of the base has no effect under ties"]
    assert parse(text).modules[0].slices[0].sources[0].parameters == {}
    whole = recipe("linear", "", "weight: 1").replace("model: a,", "model: a, layer_range: [0, 1],")
    assert said(whole) == [
        "layer_range has no effect outside of slices",
        "base_model has no effect under linear: it is not among the models",
    ]
    assert said(recipe("karcher", "weight: 1") + "compat: paper") == []
    # In mergekit the base joins whole models only.
    layers = "merge_method: karcher\nbase_model: c\n"
    layers += "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]"
    assert said(layers) == ["base_model has no effect under karcher: it is not among the models"]
