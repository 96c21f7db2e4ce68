"""Cross-task linearity (arXiv 2402.03660), Lemmas 1 and 2 and equation 1, as printed and corrected.

Merged networks are measured by forward passes in NumPy.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import measured
from theory.linearity import bounds, domains, identities, networks, trees
from theory.linearity.networks import network
from theory.linearity.tasks import (
    DEEP,
    EXPERTS,
    HALVES,
    ORDER,
    SHALLOW,
    TANH,
    WEIGHTS,
    claim,
    fine_tuned,
    gap,
    inputs,
    labels,
    mean,
    order,
    outputs,
    product_gap,
    shrunk,
    size,
    tanh_experts,
    tanh_loss,
    tanh_network,
)

# --- Lemma 1 --------------------------------------------------------------------------------------

LEMMA_1, LEMMA_2 = (
    "Lemma 1, Sec. 3, and its proof, App. A.1",
    "Lemma 2, Sec. 4.2, and its proof, App. A.2",
)
LINEAR, TRAINED = "linear model, squared loss, two readouts", f"tanh {TANH}, {EXPERTS}"
LEVEL = 2.0  # the loss of every readout


def _readouts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs [12 4] and labels [12 1] of a linear model, and 100 x 2 readouts [1 4] of loss
    LEVEL in random directions from the best one.
    """
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=(12, 1))
    least = np.linalg.lstsq(x, y)[0].T
    away = rng.normal(size=(100, 2, 1, 4))
    rise = np.mean((away @ x.T) ** 2, (-1, -2), keepdims=True)
    floor = np.mean((least @ x.T - y.T) ** 2)
    return x, y, least + away * np.sqrt((LEVEL - floor) / rise)


def _merged_readout_loss(alphas: np.ndarray) -> np.ndarray:
    """Computes the loss of every pair of readouts, merged by each alpha, `[alphas 100]`."""
    x, y, pairs = _readouts()
    a = alphas[:, None, None, None]
    return np.mean(((a * pairs[:, 0] + (1 - a) * pairs[:, 1]) @ x.T - y.T) ** 2, (-1, -2))


squared_loss = jax.jit(identities.squared_loss)


@jax.jit
def _cross_entropy(logits: Array) -> Array:
    """Computes the cross-entropy against the pre-training teacher's classes."""
    return networks.cross_entropy(logits, jax.nn.one_hot(jnp.argmax(labels()[0], axis=-1), 2))


def _lipschitz_bound(members: bool = True, lipschitz: bool = True) -> float:
    thetas, x = tanh_experts(), inputs()
    losses = np.array([_cross_entropy(logits) for logits in outputs(thetas, x)])
    rest = np.linalg.norm(gap(tanh_network, thetas, WEIGHTS, x), axis=1).mean()
    kept = jnp.asarray(losses if members else 0 * losses)
    return float(bounds.loss_bound(kept, WEIGHTS, rest, sqrt(2) if lipschitz else 0.0))


@claim("L1/exact", "<=", attack=domains.EQUAL_LOSSES)
def _():
    """If f(θ_α) = αf(θ_i) + (1-α)f(θ_j), with a convex loss and L(θ_i) = L(θ_j), then L(θ_α) ≤
    L(θ_i)

    Source: {LEMMA_1}
    Domain: {LINEAR} of loss {LEVEL:g}; the largest of 100 pairs, α = .05, .1, ..., .95
    """
    return LEVEL, measured(lambda: _merged_readout_loss(np.linspace(0.05, 0.95, 19)).max())


@claim("L1-proportional/ours")
def _():
    """LLFC up to a factor (Definition 2) is not enough for Lemma 1: L(θ_i) = 0 < L(θ_α)

    With one output all features are proportional, here by 9/8.

    Source: Definition 2 and {LEMMA_1}
    Domain: f = w₂w₁, models (1,1) and (2,½), α=½, y=1
    """
    first, second = np.mean([(1.0, 1.0), (2.0, 0.5)], 0)  # both of loss 0
    return (9 / 8 - 1) ** 2, measured(lambda: (first * second - 1) ** 2)


@claim("L1-LMC/ours")
def _():
    """L(θ_α) = Σ aᵢLᵢ - Σ aᵢ|fᵢ - f̄|², so Lemma 1's ≤ holds, and Definition 1's ≈ does not

    Source: Definition 1 and {LEMMA_1}
    Domain: {LINEAR}, α=½
    """
    x, y, pairs = _readouts()
    predicted = squared_loss(pairs[0] @ x.T, y.T, HALVES) / len(x)
    return predicted, measured(lambda: _merged_readout_loss(np.array([0.5]))[0, 0])


@claim("L1-squared/ours")
def _():
    """L(θ̄) = Σ aᵢLᵢ - Σ aᵢ|fᵢ - f̄|² + 2 gap·(f̄ - y) + |gap|²

    It holds without exact CTL and without equal losses.

    Source: {LEMMA_1}
    Domain: {TRAINED}, gap measured
    """
    thetas, x = tanh_experts(), inputs()
    rest = gap(tanh_network, thetas, WEIGHTS, x)
    predicted = squared_loss(outputs(thetas, x), labels()[1], WEIGHTS, rest) / len(x)
    return predicted, measured(lambda: tanh_loss(mean(thetas, WEIGHTS)))


@claim(
    "L1-approximate/ours",
    "<=",
    without={
        "Σ aᵢLᵢ": partial(_lipschitz_bound, members=False),
        "√2 mean|gap|": partial(_lipschitz_bound, lipschitz=False),
    },
    attack=domains.LOSS,
    overlooks="tightened; without Σ aᵢLᵢ; without √2 mean|gap|",
)
def _():
    """L(θ̄) ≤ Σ aᵢLᵢ + √2 mean|gap| for cross-entropy

    Source: {LEMMA_1}
    Domain: {TRAINED}, two classes
    """
    merged = mean(tanh_experts(), WEIGHTS)
    return _lipschitz_bound(), measured(lambda: _cross_entropy(tanh_network(merged, inputs())))


# --- equation 1 and Lemma 2 -----------------------------------------------------------------------


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _gap_size(
    thetas: tuple[Array, ...], activation: Callable[[np.ndarray], np.ndarray] = _same
) -> float:
    """Computes |f(Σ aᵢθᵢ) - Σ aᵢf(θᵢ)| of stacked networks on the inputs, by forward passes in
    NumPy.
    """
    stacked, a = [np.asarray(layer) for layer in thetas], np.array(WEIGHTS)

    def forward(layers: list[np.ndarray]) -> np.ndarray:
        *hidden, last = layers
        return reduce(lambda v, w: activation(v @ w.T), hidden, np.asarray(inputs())) @ last.T

    merged = forward([np.tensordot(a, layer, 1) for layer in stacked])
    alone = [forward([layer[k] for layer in stacked]) for k in range(len(a))]
    return float(np.linalg.norm(merged - np.tensordot(a, alone, 1)))


def _at_simplex(f: Callable[[np.ndarray], float], k: int) -> float:
    """Computes the gap at the centroid of the k unit vectors."""
    return f(np.full(k, 1 / k)) - float(np.mean([f(vertex) for vertex in np.eye(k)]))


@claim(
    "eq1-linear-L{depth}/ours",
    each=(
        (2, SHALLOW, "gap of W₂W₁ = -½ Σ aᵢaⱼ ΔW₂ΔW₁"),
        (3, DEEP, "gap of W_L…W₁ = - Σ over ≥ 2 deviations in the product"),
    ),
)
def _(depth, sizes, statement, experts=EXPERTS):
    """{statement}

    Source: eq. (1), Sec. 4.2
    Domain: linear {sizes}, {experts}; |gap| on data
    """
    del depth, statement, experts
    terms = product_gap(fine_tuned(network, sizes), WEIGHTS)
    predicted = size(inputs() @ terms.sum(0).T)
    return predicted, measured(lambda: _gap_size(fine_tuned(network, sizes)))


@claim("eq1-order/ours")
def _(power=3.0, note=ORDER):
    """gap = -½ Σ aᵢ D²f(θ̄)[dᵢ,dᵢ] + third order

    {note}

    Source: eq. (1), Sec. 4.2
    Domain: {TRAINED}
    """
    del note
    return power, order(shrunk(WEIGHTS))


@claim("L2/printed")
def _():
    """f(αθ_i+(1-α)θ_j) = αf(θ_i)+(1-α)f(θ_j) for pairs in Θ implies f(Σαᵢθᵢ) = Σαᵢf(θᵢ) for k
    models

    The proof needs running means in Θ, that is a convex Θ, where exact CTL makes f affine.

    Source: {LEMMA_2}
    Domain: f = w₃w₂w₁, Θ = {{e₁, e₂, e₃}}: f = 0 on all segments; gap at the centroid
    """
    return 0.0, measured(lambda: _at_simplex(np.prod, 3))


@claim("L2/corrected")
def _():
    """gap of k models = Σ_v s_v × gap of the pair merged at v, for any f and any tree

    Source: {LEMMA_2}
    Domain: {TRAINED}; Huffman's tree
    """
    telescope = trees.telescope(tanh_network, tanh_experts(), WEIGHTS, inputs())
    return size(telescope.total), measured(lambda: _gap_size(tanh_experts(), np.tanh))


GROWTH = trees.growth(WEIGHTS)


@claim("L2-growth/ours", "<=", attack=domains.GROWTH, overlooks="tightened")
def _():
    """|gap of k models| ≤ growth × largest |gap| of a pair merged on the way

    For uniform weights the growth is log2 k at powers of two, and (k + 1)/2 - 1/k one by one.

    Source: {LEMMA_2}
    Domain: {TRAINED}; Huffman's tree, growth {GROWTH:.2f}
    """
    telescope = trees.telescope(tanh_network, tanh_experts(), WEIGHTS, inputs())
    largest = trees.growth(WEIGHTS) * max(map(size, telescope.gaps))
    return largest, measured(lambda: _gap_size(tanh_experts(), np.tanh))


@claim("L2-quadratic/ours")
def _(k=5):
    """For k equidistant models and quadratic f the gap is 2 (k-1)/k times a pair's, which is -1/4
    here for all k

    Source: {LEMMA_2}
    Domain: k={k}, f=|θ|²/2, vertices of a simplex
    """
    return 2 * (k - 1) / k * -1 / 4, measured(lambda: _at_simplex(lambda x: float(x @ x) / 2, k))
