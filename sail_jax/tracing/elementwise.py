"""Rules of primitives that act entry by entry."""

from dataclasses import replace
from fractions import Fraction

from sail_jax.jax_internals import JaxprEqn, operation
from sail_jax.tracing.terms import Label
from sail_jax.tracing.values import (
    RULES,
    Rule,
    Tracer,
    Value,
    is_floating,
    parametric,
    rule,
    scaled,
    settled,
    shape,
    whole,
)

LINEAR = (
    "convert_element_type", "stop_gradient", "copy", "optimization_barrier",
    "sharding_constraint", "device_put", "name", "pvary", "reshard", "reduce_precision",
)  # fmt: skip
ODD = ("tanh", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh", "erf", "erf_inv")
CURVES = (
    "cos", "exp", "exp2", "log1p", "expm1", "logistic", "erfc", "floor", "ceil", "round",
    "is_finite", "not", "cosh", "acos", "population_count", "clz", "bessel_i0e", "bessel_i1e",
    "real", "imag", "conj",
)  # fmt: skip
ABOVE_ZERO = ("exp", "exp2", "logistic", "cosh")
INFINITE = ("log", "log2", "lgamma", "digamma", "acosh")
POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}
ORDERED = ("lt", "le", "gt", "ge")
CURVES_OF_SEVERAL = (
    "rem", "atan2", "nextafter", "and", "or", "xor", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "igamma", "igammac", "complex", "clamp", "polynomial",
)  # fmt: skip


@rule(*LINEAR, view=True)
def _kept(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    if is_floating(eqn.outvars[0]) and any(x.numbers is not None for x in ins):
        # A number used in arithmetic.
        whole(tracer, *ins)
        ins = [replace(x, numbers=None) for x in ins]
    return ins


@rule("neg")
def _negated(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,) = ins
    return [Value(x.axes, parametric=x.parametric, zero=x.zero)]


def _unary(scale: bool, sign: bool, finite: bool = True) -> Rule:
    def act(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        (x,) = ins
        for label in x.axes:
            tracer.algebra.curved(label, x.parametric, scale=scale, sign=sign, finite=finite)
        known = eqn.primitive.name in ABOVE_ZERO
        return [Value(x.axes, parametric=x.parametric, positive=known, nonzero=known)]

    return act


rule(*ODD)(_unary(scale=False, sign=True))
rule(*CURVES)(_unary(scale=False, sign=False))
rule(*INFINITE)(_unary(scale=False, sign=False, finite=False))


@rule("sign", "abs")
def _magnitude(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    (x,) = ins
    of_sign = eqn.primitive.name == "sign"
    axes = (tracer.algebra.magnitude(t, x.parametric, of_sign=of_sign) for t in x.axes)
    return [Value(tuple(axes), parametric=x.parametric, positive=not of_sign)]


def _to_the(tracer: Tracer, x: Value, power: Fraction) -> Value:
    """Computes x to a power; a square is resolved where it is used."""
    if power == 2 and not x.square and x.pending is None:
        return replace(x, square=True, numbers=None, view=False, positive=True)
    x = settled(tracer, x)
    flags = [x.parametric]
    axes = (tracer.algebra.multiplied([(t, power)], flags, finite=x.nonzero) for t in x.axes)
    positive = power.denominator > 1 or x.positive
    return Value(tuple(axes), parametric=x.parametric, positive=positive, nonzero=x.nonzero)


@rule("sqrt", "rsqrt", "cbrt", "square", "integer_pow", lazy=True)
def _powered(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name == "cbrt":
        x = settled(tracer, ins[0])
        return _unary(scale=False, sign=True)(tracer, eqn, [x])
    power = Fraction(operation(eqn).exponent if name == "integer_pow" else POWERS.get(name, 2))
    return [_to_the(tracer, ins[0], power)]


@rule("one_minus_square")
def _one_minus_square(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Treats 1 - x^2 as a square and a difference, which JAX 0.10 uses instead."""
    x = settled(tracer, _to_the(tracer, ins[0], Fraction(2)))
    for label in x.axes:
        tracer.algebra.curved(label, x.parametric, shift=True)
    return [Value(x.axes, parametric=x.parametric)]


@rule("pow", lazy=True)
def _pow(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    exponent = ins[1].number
    if exponent is not None and exponent.is_integer():
        return [_to_the(tracer, ins[0], Fraction(int(exponent)))]
    return _mixed(tracer, eqn, [settled(tracer, x) for x in ins])


def _columns(eqn: JaxprEqn, ins: list[Value]) -> list[list[tuple[Value, Label]]]:
    """Lists, for each axis of the result, the operands with this axis; scalars have no axes."""
    rank = len(shape(eqn.outvars[0]))
    full = [x for x, v in zip(ins, eqn.invars, strict=True) if len(shape(v)) == rank]
    return [[(x, x.axes[k]) for x in full] for k in range(rank)]


def _alike(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> tuple[Label, ...]:
    """Unifies the labels of operands that must scale equally."""
    axes = []
    for column in _columns(eqn, ins):
        label = tracer.algebra.same(*(t for _, t in column))
        axes.append(label)
        varying = [x for x, t in column if t is not None]
        if label is not None and not all(x.zero for x in ins if x not in varying):
            # A nonzero summand that is constant along the axis fixes scale and sign.
            tracer.algebra.curved(label, parametric(ins), shift=True)
    return tuple(axes)


@rule("add", "sub", "add_any", numbered=True)
def _added(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    x, number = ins[0], ins[1].number
    if x.numbers is not None and number == x.numbers.size and eqn.primitive.name == "add":
        # An index that may count from the end. A later operation shows whether this is used.
        return [replace(x, beyond=True)]
    whole(tracer, *ins)
    positive = eqn.primitive.name != "sub" and all(x.positive for x in ins)
    nonzero = positive and any(x.nonzero for x in ins)
    axes = _alike(tracer, eqn, ins)
    return [Value(axes, parametric=parametric(ins), positive=positive, nonzero=nonzero)]


@rule("max", "min")
def _extreme(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axes = _alike(tracer, eqn, ins)
    for label in axes:
        tracer.algebra.curved(label, parametric(ins), scale=True)
    positive = eqn.primitive.name == "max" and any(x.positive for x in ins)
    nonzero = eqn.primitive.name == "max" and any(x.positive and x.nonzero for x in ins)
    return [Value(axes, parametric=parametric(ins), positive=positive, nonzero=nonzero)]


def _mixed(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    """Handles any function of several operands."""
    axes = tuple(tracer.algebra.same(*(t for _, t in c)) for c in _columns(eqn, ins))
    for label in axes:
        tracer.algebra.curved(label, parametric(ins))
    return [Value(axes, parametric=parametric(ins))]


rule(*CURVES_OF_SEVERAL)(_mixed)


@rule("eq", "ne", numbered=True)
def _equal(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    numbers = [x.numbers for x in ins if x.numbers is not None]
    if len(numbers) == len(ins) and len({t.size for t in numbers}) == 1:
        # Equality of two unit numbers does not depend on the order of units.
        label = tracer.algebra.same(*numbers)
        tracer.algebra.counted(label)
    else:
        whole(tracer, *ins)
    return _mixed(tracer, eqn, ins)


@rule(*ORDERED, numbered=True)
def _compared(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    a, b = ins
    if eqn.primitive.name == "lt" and a.positive and b.zero:
        # An index that does not count from the end.
        return [Value((None,) * len(shape(eqn.outvars[0])), zero=True)]
    whole(tracer, *ins)
    if not (a.zero or b.zero):
        return _mixed(tracer, eqn, ins)
    x = b if a.zero else a
    # The comparison removes the scale and keeps the sign.
    rank = len(shape(eqn.outvars[0]))
    labels = x.axes if len(x.axes) == rank else (None,) * rank
    axes = tuple(tracer.algebra.magnitude(t, x.parametric, of_sign=True) for t in labels)
    for label in axes:
        tracer.algebra.curved(label, x.parametric)
    return [Value(axes, parametric=x.parametric)]


@rule("select_n", lazy=True, numbered=True)
def _selected(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    which, *cases = ins
    rank = len(shape(eqn.outvars[0]))
    if which.zero:
        return [cases[0]]
    if which.number is not None:
        return [cases[int(which.number)]]
    which, *cases = ins = [settled(tracer, x) for x in ins]
    whole(tracer, which)
    numbers = [x.numbers for x in cases if x.numbers is not None]
    together = None
    if numbers and len(numbers) == len(cases) and len({t.size for t in numbers}) == 1:
        together = tracer.algebra.same(*numbers)
    else:
        whole(tracer, *cases)
    alone = parametric(ins)
    axes = []
    for k in range(rank):
        label = tracer.algebra.same(*(x.axes[k] for x in cases))
        chosen = which.axes[k] if which.axes else None
        if label is not None and any(x.axes[k] is None and not x.zero for x in cases):
            tracer.algebra.curved(label, alone)
        if chosen is not None and label is not None:
            # A selection per unit has exponent 0.
            label = tracer.algebra.multiplied(
                [(label, 1), (chosen, 1)], [parametric(cases), which.parametric]
            )
        axes.append(label if label is not None else chosen)
    positive = all(x.positive for x in cases)
    return [Value(tuple(axes), numbers=together, parametric=alone, positive=positive)]


@rule("mul", "div", lazy=True)
def _multiplied(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    if eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return [_to_the(tracer, ins[0], Fraction(2))]
    multiple = _by_a_number(tracer, eqn, ins)
    if multiple is not None:
        return [multiple]
    ins = [settled(tracer, x) for x in ins]
    power = 1 if eqn.primitive.name == "mul" else -1
    flags, axes = [x.parametric for x in ins], []
    rank = len(shape(eqn.outvars[0]))
    for k in range(rank):
        labels = [x.axes[k] if len(x.axes) == rank else None for x in ins]
        factors = list(zip(labels, (1, power), strict=True))
        axes.append(tracer.algebra.multiplied(factors, flags, finite=ins[1].nonzero))
    return [
        Value(
            tuple(axes),
            parametric=scaled(ins),
            zero=ins[0].zero or (power == 1 and ins[1].zero),
            positive=all(x.positive for x in ins),
            nonzero=all(x.nonzero for x in ins),
        )
    ]


def _by_a_number(tracer: Tracer, eqn: JaxprEqn, ins: list[Value]) -> Value | None:
    """Multiplies or divides a value by a number; a sum divided by its count is a mean."""
    numbers = [x.number for x in ins]
    known = [k for k, number in enumerate(numbers) if number is not None]
    divides = eqn.primitive.name == "div"
    if len(known) != 1 or (divides and known[0] == 0):
        return None
    x, number = ins[1 - known[0]], numbers[known[0]]
    assert number is not None
    x = replace(
        x,
        numbers=None,
        view=False,
        positive=x.positive and number >= 0,
        nonzero=x.nonzero and number != 0,
    )
    if x.pending is None or number <= 0:
        return x
    count = x.pending.count
    if abs((number if divides else 1 / number) - count) > 1e-6 * count:
        return x
    for label in x.pending.labels:
        if x.pending.squares:
            tracer.algebra.squares(label, x.parametric, mean=True)
        else:
            tracer.algebra.averaged(label, x.parametric, x.pending.of)
    return replace(x, pending=None)


# All except the primitive that keeps several arrays of any shapes.
ENTRY_BY_ENTRY = frozenset(
    name for name, act in RULES.rules.items() if act.__module__ == __name__
) - {"optimization_barrier"}
