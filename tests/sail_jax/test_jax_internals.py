"""The used internals of JAX exist in the installed version, and a version without them is
reported."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rule_cases import CASES, LACKING

from experiments.pages.explorer.javascript import javascript
from sail_jax import jax_internals, spec_of
from sail_jax.jax_internals import LAYOUTS, Literal, Operation, UnknownLayoutError, operation

FACTS = [name for name, of in inspect.getmembers(Operation, lambda x: isinstance(x, property))]
# One primitive, which another version calls differently.
EITHER = {"closed_call", "eval_jaxpr"}


def equations(jaxpr):
    """All equations of a jaxpr, and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in operation(eqn).inner_jaxprs:
            yield from equations(inner)


@pytest.fixture(scope="module")
def traced():
    """Equations of small functions, by primitive."""
    found = {}
    for case in CASES.values():
        jaxpr = jax.make_jaxpr(case.f)(*(jnp.ones(shape) for shape in case.shapes))
        for eqn in equations(jaxpr):
            found.setdefault(eqn.primitive.name, eqn)
    return found


@pytest.mark.slow
def test_there_is_an_example_of_each_primitive(traced):
    lacking = LAYOUTS.keys() - traced.keys()
    assert lacking <= LACKING | EITHER, f"JAX {jax.__version__} does not make {lacking}"
    assert EITHER - lacking


@pytest.mark.parametrize("name", LAYOUTS)
def test_jax_has_the_parameters_that_are_read(name, traced):
    if name not in LACKING | EITHER or name in traced:
        names = {*traced[name].params}
        assert any(layout <= names for layout in LAYOUTS[name]), (
            f"JAX {jax.__version__} gives {name!r} the parameters {sorted(names)}, and sail_jax "
            f"reads {' or '.join(str(sorted(layout)) for layout in LAYOUTS[name])}"
        )


class Recorded(dict):
    """Parameters that remember which of them were read."""

    def __init__(self, params):
        super().__init__(params)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def read_by_facts(name, params):
    """The parameters that all facts about a primitive read together."""
    primitive, params = type("Primitive", (), {"name": name}), Recorded(params)
    for fact in FACTS:
        try:
            getattr(Operation(primitive, params), fact)
        except ValueError as error:
            if isinstance(error, UnknownLayoutError) or "unpack" not in str(error):
                raise
            # a fact about another primitive
    return params.read


class Parts:
    """Operands as JAX 0.11 has them."""

    def unpack(self):
        return "c", "cc", "ccc"


EXAMPLES = {"ft_in": Parts(), "dimension_numbers": (((), ()), ((), ())), "new_dtype": np.float32}


def params_of(layout):
    return {key: EXAMPLES.get(key, ()) for key in layout}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_table_has_what_is_read_and_nothing_else(name):
    for layout in LAYOUTS[name]:
        # an equation has other parameters, too
        assert read_by_facts(name, params_of(layout) | {"other": 1}) == layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_parameter_is_named(name):
    (layout, *_) = LAYOUTS[name]
    for lost in layout:
        with pytest.raises(UnknownLayoutError) as raised:
            read_by_facts(name, params_of(layout - {lost}))
        text = str(raised.value)
        assert f"JAX {jax.__version__} describes the primitive {name!r}" in text
        assert f"{lost!r} is missing" in text or len(LAYOUTS[name]) > 1
        assert "missing" in text
        assert "\n" not in text


def test_several_missing_parameters_are_named():
    with pytest.raises(UnknownLayoutError, match="way: 'axis' and 'sizes' are missing"):
        read_by_facts("split", {})


def test_operands_of_a_scan_in_an_unknown_form_are_named():
    params = {"jaxpr": 0, "length": 1, "reverse": False, "ft_in": (1, 2, 3)}
    with pytest.raises(UnknownLayoutError, match="'scan' in an unknown way: 'ft_in'"):
        read_by_facts("scan", params)


@pytest.mark.parametrize("name", ["scan", "dot_general", "jit", "reshape", "reduce_sum"])
def test_who_infers_spaces_is_told_of_an_unknown_layout(name, monkeypatch):
    """Simulates a later JAX with other parameters: the message, and no other error."""

    def network(p, x):
        layers = jnp.stack([p["a"], p["b"]])
        y, _ = lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x.reshape(4), layers)
        return jax.jit(jnp.sum)(y)

    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    spec_of(network, params, jnp.ones((2, 2)))
    monkeypatch.setitem(LAYOUTS, name, (frozenset({"of_old"}),))
    text = f"describes the primitive '{name}' in an unknown way: 'of_old' is missing"
    with pytest.raises(UnknownLayoutError, match=text):
        spec_of(network, params, jnp.ones((2, 2)))


def test_who_translates_to_javascript_is_told_of_an_unknown_layout(monkeypatch):
    monkeypatch.setitem(LAYOUTS, "reduce_sum", (frozenset({"of_old"}),))
    with pytest.raises(UnknownLayoutError, match="the primitive 'reduce_sum' in an unknown way"):
        javascript(lambda x: {"sum": x.sum()}, (3,))


def step(c, x):
    w, h = c
    return (w, jnp.tanh(w @ h) + x[0]), (h.sum(), x[1])


def scanned(w, xs, b):
    def layer(c, x):
        return step(c, (x[0], x[1] * b))

    (_, h), ys = lax.scan(layer, (w, jnp.ones(3)), xs, reverse=True)
    return h, ys


ARGUMENTS = jnp.ones((3, 3)), (jnp.ones((5, 3)), jnp.ones((5, 2))), jnp.ones(2)


def test_operands_of_a_scan_are_told_apart():
    """`b` is a constant. `w` is carried, or a constant where JAX sees that it stays the same."""
    (eqn,) = [
        e for e in equations(jax.make_jaxpr(scanned)(*ARGUMENTS)) if e.primitive.name == "scan"
    ]
    scan = operation(eqn).scan
    constants, carries, inputs = scan.parted(eqn.invars)
    assert [v.aval.shape for v in inputs] == [(5, 3), (5, 2)]
    assert {v.aval.shape for v in constants} <= {(2,), (3, 3)}
    assert [v.aval.shape for v in carries][-1:] == [(3,)]
    assert len(constants) + len(carries) == 3
    assert (scan.length, scan.reverse) == (5, True)
    assert len(scan.body.jaxpr.invars) == 5


@pytest.mark.parametrize(
    "change",
    [
        jax.grad(lambda *a: scanned(*a)[0].sum(), argnums=(0, 2)),
        jax.grad(lambda *a: jax.checkpoint(scanned)(*a)[1][0].sum()),
        lambda w, xs, b: jax.vmap(scanned, (None, None, 0))(w, xs, jnp.stack([b, b])),
        lambda *a: jax.jvp(scanned, a, a),
        jax.jit(lambda *a: scanned(*a)[0]),
    ],
    ids=["grad", "checkpoint", "vmap", "jvp", "jit"],
)
def test_operands_of_a_changed_scan_are_told_apart(change):
    """A step takes constants, carries and rows, and returns carries and rows, of equal shapes."""
    scans = [e for e in equations(jax.make_jaxpr(change)(*ARGUMENTS)) if e.primitive.name == "scan"]
    assert scans
    for eqn in scans:
        scan = operation(eqn).scan
        constants, carries, inputs = scan.parted([v.aval.shape for v in eqn.invars])
        rows = [shape[1:] for shape in inputs]
        assert {shape[0] for shape in inputs} <= {scan.length}
        inner = scan.body.jaxpr
        assert [v.aval.shape for v in inner.invars] == [*constants, *carries, *rows]
        assert [v.aval.shape for v in inner.outvars][: scan.carries] == carries
        outs = [v.aval.shape for v in eqn.outvars]
        assert outs[: scan.carries] == carries
        assert {shape[0] for shape in outs[scan.carries :]} <= {scan.length}


def test_operands_of_a_loop_are_told_apart():
    def f(limit, w, h):
        return lax.while_loop(lambda h: h.sum() < limit, lambda h: h @ w + h, h)

    jaxpr = jax.make_jaxpr(f)(jnp.ones(()), jnp.ones((3, 3)), jnp.ones(3))
    (eqn,) = [e for e in equations(jaxpr) if e.primitive.name == "while"]
    loop = operation(eqn).loop
    first, second, carries = ([v.aval.shape for v in part] for part in loop.parted(eqn.invars))
    assert (first, second, carries) == ([()], [(3, 3)], [(3,)])
    assert len(loop.condition.jaxpr.invars) == 2
    assert [v.aval.shape for v in loop.body.jaxpr.invars] == [(3, 3), (3,)]


X = np.arange(12.0, dtype=np.float32).reshape(3, 4)
MADE = {
    "concatenating": (Operation.concatenating(1), lambda x, y: lax.concatenate([x, y], 1), (X, X)),
    "squeezing": (Operation.squeezing(1), lambda x: lax.squeeze(x, (1,)), (X[:, :1],)),
    "broadcasting": (
        Operation.broadcasting((3, 2, 4), (0, 2)),
        lambda x: lax.broadcast_in_dim(x, (3, 2, 4), (0, 2)),
        (X,),
    ),
    "slicing": (
        Operation.slicing((1, 0), (3, 2)), lambda x: lax.slice(x, (1, 0), (3, 2)), (X,)
    ),
    "converting": (
        Operation.converting(np.dtype(np.int32)),
        lambda x: lax.convert_element_type(x, np.int32),
        (X,),
    ),
    "adding": (Operation.adding(), lax.add, (X, X)),
    "clamping": (Operation.clamping(), lax.clamp, (np.float32(2), X, np.float32(5))),
    "resized broadcast": (
        Operation.broadcasting((3, 2, 4), (0, 2)).resized((3, 5, 4)),
        lambda x: lax.broadcast_in_dim(x, (3, 5, 4), (0, 2)),
        (X,),
    ),
    "moved slice": (
        Operation.slicing((1, 0), (3, 2)).moved((0, 1), (2, 4)),
        lambda x: lax.slice(x, (0, 1), (2, 4)),
        (X,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_an_operation_is_the_one_that_jax_makes(name):
    of, function, arguments = MADE[name]
    (eqn,) = jax.make_jaxpr(function)(*arguments).eqns
    assert of == operation(eqn)
    (found,) = of.bind(*arguments)
    np.testing.assert_array_equal(found, function(*arguments))


def test_results_are_a_list_however_many_there_are():
    (eqn,) = jax.make_jaxpr(lambda x: lax.split(x, (1, 2)))(X).eqns
    assert [part.shape for part in operation(eqn).bind(X)] == [(1, 4), (2, 4)]


def test_types_are_those_of_jax():
    jaxpr = jax.make_jaxpr(lambda x: x + 1)(1.0)
    assert isinstance(jaxpr.jaxpr, jax_internals.Jaxpr)
    assert isinstance(jaxpr.eqns[0], jax_internals.JaxprEqn)
    assert [isinstance(v, Literal) for v in jaxpr.eqns[0].invars] == [False, True]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jax_internals.Nothing  # noqa: B018
