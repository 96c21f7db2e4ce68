"""Transport of activations against its definition, and on networks with hidden copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from sail_jax import align, growth
from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import spec

PLANT = [0, 0, 1, 2, 2]  # the old layer that each new one repeats, or follows with an identity
INSERTED = [1, 4]


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    return rng.uniform(size=(4, 6)), rng.dirichlet(np.full(4, 3.0)), rng.dirichlet(np.full(6, 3.0))


@pytest.mark.slow
def test_sinkhorn_has_its_marginals_and_is_the_fixed_point(problem):
    cost, a, b = problem
    got = align.sinkhorn(cost, a, b, entropy=0.1)
    # Sinkhorn's own steps, in float64 and without logarithms.
    K, v = np.exp(-cost / 0.1), np.ones(6)
    for _ in range(2000):
        u = a / (K @ v)
        v = b / (K.T @ u)
    np.testing.assert_allclose(got, u[:, None] * K * v, atol=1e-6)
    # Marginals hold even where the steps are far too few.
    for P in (got, align.sinkhorn(cost, a, b, entropy=0.001, steps=3)):
        np.testing.assert_allclose(P.sum(1), a, atol=2e-7)
        np.testing.assert_allclose(P.sum(0), b, atol=2e-7)


def test_the_cost_nears_that_of_the_linear_program(problem):
    cost, a, b = problem
    n, m = cost.shape
    sums = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    least = linprog(cost.ravel(), A_eq=sums, b_eq=np.concatenate([a, b])).fun
    smaller = min(-(p * np.log(p)).sum() for p in (a, b))
    gaps = {
        eps: (np.asarray(align.sinkhorn(cost, a, b, entropy=eps), float) * cost).sum() - least
        for eps in (0.1, 0.03, 0.01)
    }
    for eps, gap in gaps.items():
        assert -1e-6 < gap < eps * smaller
    assert gaps[0.01] < 1e-4 < gaps[0.1]


def test_a_finite_balance_is_stationary(problem):
    cost, a, b = problem
    P = np.asarray(align.sinkhorn(cost, a, b, entropy=0.1, balance=0.3), float)
    np.testing.assert_allclose(P.sum(1), a, atol=2e-7)
    # The gradient of the objective is that of the constraint: one number for each row.
    slope = cost + 0.1 * np.log(P) + 0.3 * np.log(P.sum(0) / b)
    np.testing.assert_allclose(slope, np.broadcast_to(slope[:, :1], slope.shape), atol=2e-6)


def forward(net, x):
    """The activations of each layer of a chain of ReLU layers, and its outputs."""
    h, seen = np.maximum(x @ net["in"], 0), []
    for kernel, bias in zip(net["kernel"], net["bias"], strict=True):
        h = np.maximum(h @ kernel + bias, 0)
        seen.append(h)
    return seen, h @ net["out"]


@pytest.fixture(scope="module")
def hidden():
    """A network, its copy of twice the width and more layers, and inputs."""
    rng = np.random.default_rng(3)
    n, index = 6, rng.permutation(np.repeat(np.arange(6), 2))
    a = {
        "in": rng.normal(size=(8, n)),
        "kernel": rng.normal(size=(3, n, n)) / n**0.5,
        "bias": rng.uniform(0, 2, size=(3, n)),
        "out": rng.normal(size=(n, 2)),
    }
    b = {
        "in": a["in"][:, index],
        "kernel": a["kernel"][PLANT][:, index][:, :, index] / 2,
        "bias": a["bias"][PLANT][:, index],
        "out": a["out"][index] / 2,
    }
    b["kernel"][INSERTED], b["bias"][INSERTED] = np.eye(2 * n), 0
    return a, b, index, rng.normal(size=(200, 8))


def axes(net):
    names = {"in": "x* h", "kernel": "layer h* h", "bias": "layer h", "out": "h* y"}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in net.items()}
    spaces = {"h": "relu", "layer": "stack", "{x,y}": "outer"}
    return params, spec(params, names, spaces=spaces)


@pytest.mark.soak
def test_a_hidden_copy_of_other_width_and_depth_is_found(hidden):
    a, b, index, x = hidden
    (of_a, out_a), (of_b, out_b) = forward(a, x), forward(b, x)
    np.testing.assert_allclose(out_a, out_b)
    assert min(layer.std(axis=0).min() for layer in of_a) > 0.1  # no unit is dead
    found = align.transport_layers(of_a, of_b)
    np.testing.assert_allclose(found.layers, np.eye(3)[PLANT], atol=1e-6)
    exact = align.transport_layers(of_a, of_b, entropy=0.001)
    np.testing.assert_array_equal(exact.layers, np.eye(3)[PLANT])
    for k, i in enumerate(PLANT):
        np.testing.assert_allclose(12 * found.couplings[k][i], np.eye(6)[index], atol=1e-2)
        np.testing.assert_allclose(12 * exact.couplings[k][i], np.eye(6)[index], atol=1e-6)
        assert found.costs[k, i] < 1e-3 < 0.1 < np.delete(found.costs[k], i).min()

    # From activations alone, the parameters of one become those of the other.
    width = align.barycentric(exact.couplings[0][0])
    depth = growth.deepen(3, 5, matrix=exact.layers)
    params, s = axes(a)
    got = change_basis(params, s, {"h": width, "layer": depth})
    order = growth.deepen(3, 5, lambda old, new: np.argmax(exact.layers, axis=1))
    fresh = growth.inserted(order)
    got = growth.overwrite(got, {"kernel": "identity", "bias": "zeros"}, fresh)
    for name, want in b.items():
        np.testing.assert_allclose(got[name], want, atol=1e-6)

    # And back: copies are averaged, and their readers are summed.
    back = align.barycentric(align.transport_units(of_b[0], of_a[0], entropy=0.001)[0])
    params, s = axes(b)
    small = change_basis(params, s, {"h": back})
    for name, want in a.items():
        kept = [0, 2, 3] if name in ("kernel", "bias") else slice(None)
        np.testing.assert_allclose(np.asarray(small[name])[kept], want, atol=1e-6)


@pytest.mark.slow
def test_copies_in_unequal_numbers_need_less_balance(hidden):
    a, _, _, x = hidden
    layer, index = forward(a, x)[0][0], np.array([3, 0, 0, 5, 1, 0, 2, 4])
    plant = np.eye(6)[index] / 8
    even = align.transport_units(layer, layer[:, index])[0]
    free = align.transport_units(layer, layer[:, index], balance=0)[0]
    assert np.abs(even - plant).max() > 0.04
    np.testing.assert_allclose(free, plant, atol=1e-4)


@pytest.mark.slow
def test_constant_units_cost_one_and_gradients_are_finite():
    x = jax.random.normal(jax.random.key(0), (20, 3)).at[:, 1].set(2.0)
    loss = jax.jit(lambda x, y: align.transport_units(x, y, entropy=0.1)[1])
    cost, slope = jax.value_and_grad(loss)(x, x)
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(cost, 1 / 3, atol=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: align.sinkhorn(np.ones(3)), r"cost .*\(3,\)"),
        (lambda: align.sinkhorn(np.full((2, 2), np.nan)), "cost must be a finite"),
        (lambda: align.sinkhorn(np.ones((2, 2)), entropy=0.0), "entropy .* 0"),
        (lambda: align.sinkhorn(np.ones((2, 2)), balance=-1.0), "balance .* -1"),
        (lambda: align.sinkhorn(np.ones((2, 2)), steps=0), "steps .* 0"),
        (lambda: align.sinkhorn(np.ones((2, 2)), np.ones(3)), r"rows .*\(3,\)"),
        (lambda: align.sinkhorn(np.ones((2, 2)), columns=np.ones(2)), "columns .* 2"),
        (lambda: align.transport_units(np.ones((3, 2)), np.ones((4, 2))), "same inputs"),
        (lambda: align.transport_units(np.ones((3, 2)), np.full((3, 2), np.inf)), "activations"),
        (lambda: align.transport_layers([], [np.ones((3, 2))]), "got 0 and 1"),
        (
            lambda: align.transport_layers([np.ones((3, 2))], [np.ones((3, 2)), np.ones((2, 2))]),
            r"old\[0\] and new\[1\]",
        ),
        (lambda: align.barycentric(np.zeros((2, 2))), "mass in every"),
        (lambda: align.barycentric(np.ones(2)), r"\(2,\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
