"""Specs: the grammars, the properties of a spec, and every message of its checks."""

import jax
import jax.numpy as jnp
import pytest

from sail_jax.basis.axes import format_axes, parse_axes, path_pattern
from sail_jax.basis.spaces import spec
from sail_jax.growth import widen
from sail_jax.trees import leaf_paths, path_str


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def block(resid=6, head=2, qk=3, v=4, hidden=8):
    return {
        "norm": {"scale": shape(resid), "bias": shape(resid)},
        "q": shape(resid, head, qk),
        "k": shape(resid, head, qk),
        "v": shape(resid, head * v),
        "o": shape(head * v, resid),
        "in": {"kernel": shape(resid, hidden), "bias": shape(hidden)},
        "out": {"kernel": shape(hidden, resid)},
    }


PARAMS = {
    "embed": shape(10, 6),
    "blocks": [block(), block(hidden=12)],
    "head": shape(6, 10),
    "step": shape(dtype=jnp.int32),
}
RULES = {
    "embed": "tokens* resid",
    "**/norm/scale": "diag(resid)",
    "**/norm/bias": "resid",
    "blocks/*/q": "resid* head qk",
    "blocks/*/k": "resid* head qk*",
    "blocks/*/v": "resid* (head v)",
    "blocks/*/o": "(head v)* resid",
    "blocks/{i}/in/kernel": "resid* hidden{i}",
    "blocks/{i}/in/bias": "hidden{i}",
    "blocks/{i}/out/{kernel,weight}": "hidden{i}* resid",
    "head": "resid* logits",
    "step": "",
}
SPACES = {
    "resid": "layernorm",
    "head": "odd",
    "{qk,v}": "linear",
    "hidden{i}": "relu",
    "tokens": "outer",
    "logits": "softmax outer",
}


def test_a_transformer():
    s = spec(PARAMS, RULES, spaces=SPACES)
    assert {x.name: x.size for x in s.spaces} == {
        "head": 2,
        "hidden0": 8,
        "hidden1": 12,
        "logits": 10,
        "qk": 3,
        "resid": 6,
        "tokens": 10,
        "v": 4,
    }
    assert s.space("hidden1").nonlinearity == "relu"
    assert format_axes(s.axes("blocks/1/o")) == "(head* v*) resid"
    assert [(u.path, u.axis, u.factor, u.role) for u in s.uses("v")] == [
        ("blocks/0/o", 0, 1, "read"),
        ("blocks/0/v", 1, 1, "write"),
        ("blocks/1/o", 0, 1, "read"),
        ("blocks/1/v", 1, 1, "write"),
    ]
    lines = str(s).splitlines()
    assert len(lines) == 1 + len(s.spaces)
    assert lines[0].split() == ["space", "size", "nonlinearity", "writers", "readers", "gains"]
    columns = [c.strip() for c in lines[2].split("  ") if c]
    written = "blocks/0/in/bias, blocks/0/in/kernel"
    assert columns == ["hidden0", "8", "relu", written, "blocks/0/out/kernel", "-"]
    assert "blocks/0/out/kernel, +4  " in lines[6]
    assert lines[6].endswith("+6  blocks/0/norm/scale, blocks/1/norm/scale")
    assert repr(s) == "Spec(21 leaves, 8 spaces)"


def test_rules_as_pairs_and_values_give_the_same_spec():
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), PARAMS)
    one = spec(PARAMS, RULES, spaces=SPACES)
    two = spec(arrays, list(RULES.items()), spaces=SPACES)
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two}) == 1


def test_spec_is_static():
    s = spec(PARAMS, RULES, spaces=SPACES)
    traces = []

    def f(s, x):
        traces.append(s)
        return x * s.space("resid").size

    same = spec(PARAMS, RULES, spaces=SPACES)
    for g in (jax.jit(f, static_argnums=0), jax.jit(f)):  # static, or a pytree without leaves
        assert g(s, 2.0) == g(same, 2.0) == 12
    assert len(traces) == 2
    with pytest.raises(AttributeError):
        s.spaces = ()


def test_leaves_used_alike_are_equal_alone():
    s = spec(PARAMS | {"blocks": [block(), block()]}, RULES, spaces=SPACES)
    (one, names), (two, others) = (s.alone(f"blocks/{i}/in/kernel") for i in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert names == {"resid": "s0", "hidden0": "s1"}
    assert others == {"resid": "s0", "hidden1": "s1"}
    assert one.shape("leaf") == s.shape("blocks/0/in/kernel")
    assert one != s.alone("blocks/0/out/kernel")[0]


def test_resized():
    s = spec(PARAMS, RULES, spaces=SPACES)
    bigger = s.resized({"resid": widen(6, 12), "head": widen(2, 4)})
    sizes = {x.name: x.size for x in bigger.spaces}
    assert (sizes["resid"], sizes["head"], sizes["v"]) == (12, 4, 4)
    assert bigger.leaves == s.leaves


def test_tied_leaves_write_and_read():
    rules = {"embed": "vocab* resid | vocab resid*"}
    s = spec({"embed": shape(5, 3)}, rules, spaces={"resid": "rmsnorm"})
    use = s.uses("resid")[0]
    assert use.tied
    assert use.role == "write"
    assert s.uses("vocab")[0].role == "read"


def test_group_sizes_given_or_inferred():
    rules = {"a": "x* (head v)", "b": "(head v)* y"}
    params = {"a": shape(2, 12), "b": shape(12, 3)}
    outer = {"{x,y}": "outer"}
    assert spec(params, rules, spaces=outer, sizes={"head": 3}).space("v").size == 4
    # another axis determines it, in any order of the leaves
    params["c"] = shape(4, 4)
    s = spec(params, rules | {"c": "v* v"}, spaces=outer)
    assert s.space("head").size == 3
    # keys of sizes are patterns, as those of spaces
    assert spec(params, rules | {"c": "_ _"}, spaces=outer, sizes={"{head,h}": 2}).space("v").size


def test_fused_axes():
    assert parse_axes("(a + b)* x") == parse_axes("(a* + b*) x")
    fused = [(0,), (0,), (1,), (1,), (2,)]
    assert [f.block for f in parse_axes("(h q + h q* + v)")[0]] == fused
    rules = {"in": "x* (h q + h q* + h v)", "out": "(h v)* y"}
    params = {"in": shape(3, 2 * 3 + 2 * 3 + 2 * 4), "out": shape(8, 5)}
    outer = {"{x,y}": "outer"}
    s = spec(params, rules, spaces=outer, sizes={"h": 2})
    assert (s.space("v").size, s.space("q").size) == (4, 3)
    assert s.shape("in") == (3, 20)
    assert [u.factor for u in s.uses("q")] == [1, 3]
    # one unknown in several blocks
    gated = {"in": shape(3, 16), "out": shape(8, 5)}
    s = spec(gated, {"in": "x* (h + h)", "out": "h* y"}, spaces=outer)
    assert s.space("h").size == 8
    s = spec(gated, {"in": "x* (h + h)", "out": "_ y"}, spaces=outer | {"h": "outer"})
    assert s.space("h").size == 8
    for n, m in ((15, r"15 units of '\(h \+ h\)'"), (6, r"8 units of 'h\*', .* 3 in leaf 'in'")):
        with pytest.raises(ValueError, match=m):
            spec(gated | {"in": shape(3, n)}, {"in": "x* (h + h)", "out": "h* y"}, spaces=outer)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("a/*/c", "a/b/c", True),
        ("a/*/c", "a/b/b/c", False),
        ("a/*/c", "a/b.d/c", False),
        ("a/*/c", "a//c", False),
        ("a/**/c", "a/b/d.e/c", True),
        ("**c", "abc", True),
        ("b", "abc", False),
        ("a.b", "axb", False),
        ("model.layers.{i}.{q,k}_proj.weight", "model.layers.10.k_proj.weight", True),
        ("model.layers.{i}.{q,k}_proj.weight", "model.layers.10.v_proj.weight", False),
        ("{i}/to/{i}", "1/to/1", True),
        ("{i}/to/{i}", "1/to/2", False),
    ],
)
def test_path_patterns(pattern, path, matches):
    assert bool(path_pattern(pattern).fullmatch(path)) == matches


@pytest.mark.parametrize(
    "pattern", ["**a**a**b", "a.*a*a*a*b", "{a}{b}{c}{d}", "{a.a,a}." * 3 + "b"]
)
def test_patterns_that_would_take_for_ever_are_refused(pattern):
    with pytest.raises(ValueError, match="is too loose: at most 3"):
        path_pattern(pattern)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a* b", "_ a", "a (b* c) _", "diag(a)", "diag(a b)", "(head* v*) resid"),
        *("x* (h q + h q* + h v)", "(a + a)", "diag(a + b c)"),
    ],
)
def test_axes_strings_round_trip(text):
    assert format_axes(parse_axes(text)) == text


def test_axes_strings():
    assert parse_axes("(head v)* x") == parse_axes("(head* v*) x")
    assert parse_axes("  a   b ") == parse_axes("a b")
    assert parse_axes("_") == ((),)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a** b", r"cannot read 'a\*\* b'"),
        ("a (b", r"cannot read '\(b'"),
        ("(a)(b)", r"cannot read '\(a\)\(b\)'"),
        ("()", "empty group"),
        ("(a _)", "'_' is not the name of a space"),
        ("_* a", "'_\\*' is not the name of a space"),
        ("(a* b)*", "two roles"),
        ("diag(a*)", "two roles"),
        ("diag(a)*", "two roles"),
        ("a* b | a* c", "same spaces"),
        ("(a b) | (a + b)", "same spaces"),
        ("(a + )", "empty group"),
        ("(a + b* c)*", "two roles"),
        ("a b | a", "same spaces"),
    ],
)
def test_bad_axes_strings_are_quoted(text, match):
    with pytest.raises(ValueError, match=match):
        parse_axes(text)


NET = {"in": shape(3, 8), "bias": shape(8), "out": shape(8, 2)}
NET_RULES = {"in": "x* hidden", "bias": "hidden", "out": "hidden* y"}
NET_SPACES = {"x": "outer", "y": "outer"}


@pytest.mark.parametrize(
    ("params", "rules", "options", "match"),
    [
        # every leaf one rule, every rule a leaf
        ({"extra": shape(2, 2)}, {}, {}, r"no rule matches leaf 'extra' float32\[2, 2\].*'_ _'"),
        ({"bias2": shape(2)}, {}, {}, r"'bias2'.*nearest: 'bias'"),
        ({}, {"b*": "hidden"}, {}, r"leaf 'bias' float32\[8\] matches 2 rules: 'bias': .*'b\*': "),
        ({}, {"outt": "hidden"}, {}, r"rule 'outt': 'hidden' matches no leaf \(nearest: 'out'"),
        ({}, {"bias": "hidden{i}"}, {}, r"'hidden\{i\}' of leaf 'bias' use \{i\}"),
        # one name per axis
        ({}, {"in": "hidden"}, {}, r"leaf 'in' float32\[3, 8\] has 2 axes, .* 1: .*'hidden _'"),
        ({}, {"bias": "hidden x*"}, {}, r"leaf 'bias' .* has 1 axes, .* 2: .* such as 'hidden'"),
        ({}, {"bias": "hid(den"}, {}, r"leaf 'bias' .* rule 'bias': cannot read"),
        ({"in": shape(3, 8, dtype=jnp.int8)}, {}, {}, r"leaf 'in' int8.*not floating.*'_ _'"),
        # one size per space
        ({"bias": shape(7)}, {}, {}, r"leaf 'in' .*8 units of 'hidden', .* 7 in leaf 'bias'"),
        ({"bias": shape(12)}, {"bias": "(hidden h)"}, {}, r"12 units of '\(hidden h\)', .*8 in"),
        (
            {"bias": shape(12)},
            {"bias": "(g h)"},
            {},
            r"leaf 'bias' .*12 units of '\(g h\)'.*sizes=\{'g': ...\}",
        ),
        (
            {"bias": shape(12)},
            {"bias": "(g h)"},
            {"sizes": {"g": 5}},
            r"leaf 'bias' .*12 units of '\(g h\)', but 'g' has 5 in sizes\['g'\]",
        ),
        ({}, {}, {"sizes": {"hidden": 4}}, r"but 'hidden' has 4 in sizes\['hidden'\]"),
        # a writer and a reader
        ({}, {"bias": "hiden"}, {}, r"'hiden' is written by leaf 'bias', but no leaf reads it"),
        ({}, {"bias": "hiden"}, {}, r"reads it \(nearest: 'hidden'\); .*\{'hiden': 'outer'\}"),
        ({}, {"in": "x* h", "bias": "_"}, {}, r"'hidden' is read by leaf 'out', but no leaf writ"),
        ({}, {"bias": "diag(g)"}, {}, r"'g' is only multiplied by leaf 'bias'"),
        ({}, {}, {"spaces": {"hidden": "stack"}}, r"'hidden' is a stack, but leaf 'out' reads"),
        # descriptions of spaces
        ({}, {}, {"spaces": {"hiden": "relu"}}, r"spaces\['hiden'\] matches no space.*'hidden'"),
        ({}, {}, {"spaces": {"hidden": "rellu"}}, r"spaces\['hidden'\] is 'rellu'; .* relu,"),
        ({}, {}, {"spaces": {"hidden": ""}}, r"spaces\['hidden'\] is ''; write one of"),
        ({}, {}, {"spaces": {"hidden*": "relu"}}, r"'hidden\*': a star marks .* 'hidden\{i\}'"),
        (
            {},
            {},
            {"spaces": {"hidden": "relu", "h{i}": "odd"}},
            r"spaces\['h\{i\}'\] and spaces\['hidden'\] both match 'hidden'",
        ),
        ({}, {}, {"sizes": {"head": 2}}, r"sizes\['head'\] matches no space"),
        # patterns
        ({}, {"{i/x": "a"}, {}, "unbalanced or empty braces in the pattern '{i/x'"),
        ({}, {"{}": "a"}, {}, "unbalanced or empty braces"),
        ({}, {"{1}": "a"}, {}, r"\{1\} in the pattern '\{1\}' is not the name of a capture"),
    ],
)
def test_checks_name_the_leaf(params, rules, options, match):
    spaces = NET_SPACES | options.pop("spaces", {}) if "spaces" in options else NET_SPACES
    with pytest.raises(ValueError, match=match):
        spec(NET | params, NET_RULES | rules, spaces=spaces, **options)


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"'a'(.|\n)*'b'(.|\n)*rule 'bais'"):
        spec({"a": shape(1), "b": shape(1), "c": shape()}, {"c": "", "bais": "h"})
    many = {f"leaf{k}": shape(1) for k in range(12)}
    with pytest.raises(ValueError, match="and 4 more"):
        spec(many, {})


def test_a_rule_is_two_strings():
    with pytest.raises(TypeError, match="a pattern and an axes string"):
        spec(NET, [("in", ("x", "hidden"))])


def test_lookups_name_the_nearest():
    s = spec(NET, NET_RULES, spaces=NET_SPACES)
    with pytest.raises(ValueError, match=r"no leaf 'bais' \(nearest: 'bias'\)"):
        s.axes("bais")
    with pytest.raises(ValueError, match=r"no space 'hiden' \(nearest: 'hidden'\)"):
        s.uses("hiden")


def test_paths():
    tree = {"b": [1, {"kernel": 2}], "a": (3,)}
    assert leaf_paths(tree) == ["a/0", "b/0", "b/1/kernel"]
    assert leaf_paths(1.0) == [""]
    assert path_str(()) == ""
    keys = (jax.tree_util.GetAttrKey("mu"), jax.tree_util.FlattenedIndexKey(2))
    assert path_str(keys) == "mu/2"
    with pytest.raises(ValueError, match="'a/b'"):
        leaf_paths({"a": {"b": 1}, "a/b": 2})
