"""Arrays permuted as the labels of their axes allow."""

import numpy as np

from sail_jax.tracing.terms import Fixed, Product, Variable, leaves, resolve


def place(label, size, orders):
    """For each new position of an axis the old one, when free units are put in these orders."""
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
    """An array whose axes are permuted, and whose integers number units that were."""
    x = np.asarray(x)
    for k, label in enumerate(value.axes):
        x = np.take(x, place(label, x.shape[k], orders), axis=k)
    if value.numbers is not None:
        x = np.argsort(place(value.numbers, value.numbers.size, orders))[x]
    return x


def orders_of(rng, labels):
    """An order for each free part, never the one that changes nothing."""
    orders = {}
    for label in labels:
        for leaf in leaves(label):
            while (order := rng.permutation(leaf.size)).tolist() == list(range(leaf.size)):
                pass
            orders.setdefault(id(leaf), order)
    return orders
