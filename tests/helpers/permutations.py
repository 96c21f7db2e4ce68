"""Arrays permuted as the labels of their axes allow."""

import numpy as np

from sail_jax.tracing.interpreter import Interpreter
from sail_jax.tracing.terms import Fixed, Product, Sum, Variable, leaves, resolve
from sail_jax.tracing.values import Value, settled


def free(labels, letters):
    """Describes the free parts of labels as a word: a letter for each space, "_" for an order."""

    def word(label):
        term = resolve(label)
        if isinstance(term, Fixed):
            return "_"
        if isinstance(term, Variable):
            return letters.setdefault(id(term), "abcdefghijklmnop"[len(letters)])
        joint = "+" if isinstance(term, Sum) else ""
        return f"({joint.join(map(word, term.parts))})"

    return "".join(map(word, labels))


def labelled(jaxpr, *arrays):
    """Labels of arrays whose axes are all free, the same as values, and what a jaxpr makes of it.

    The last item is the interpreter that was run.
    """
    labels = [tuple(Variable(n) for n in np.shape(x)) for x in arrays]
    interpreter = Interpreter()
    values = [
        Value(tuple(None if n == 1 else t for t, n in zip(own, np.shape(x), strict=True)))
        for own, x in zip(labels, arrays, strict=True)
    ]
    outs = [settled(interpreter, out) for out in interpreter.run(jaxpr, values)]
    return labels, values, outs, interpreter


def place(label, size, orders):
    """Returns the old position for each new one of an axis whose free units are in these orders."""
    if label is None:
        return np.arange(size)
    term = resolve(label)
    if isinstance(term, Fixed):
        return np.arange(size)
    if isinstance(term, Variable):
        return orders[id(term)]
    parts = [place(part, part.size, orders) for part in term.parts]
    if isinstance(term, Product):
        out = np.zeros(1, int)
        for part in parts:
            out = (out[:, None] * len(part) + part).reshape(-1)
        return out
    ends = np.cumsum([0, *map(len, parts)])
    return np.concatenate([part + end for part, end in zip(parts, ends, strict=False)])


def moved(x, value, orders):
    """Permutes the axes of an array, and renumbers its integers if they number units."""
    x = np.asarray(x)
    for k, label in enumerate(value.axes):
        x = np.take(x, place(label, x.shape[k], orders), axis=k)
    if value.numbers is not None:
        x = np.argsort(place(value.numbers, value.numbers.size, orders))[x]
    return x


def orders_of(rng, labels):
    """Draws an order for each free part, never the identity."""
    orders = {}
    for label in labels:
        for leaf in leaves(label):
            while (order := rng.permutation(leaf.size)).tolist() == list(range(leaf.size)):
                pass
            orders.setdefault(id(leaf), order)
    return orders
