"""Cross-task linearity (arXiv 2402.03660), Lemmas 1 and 2, equation 1: as printed, as true."""

from functools import partial
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from theory.claims import Claim
from theory.linearity import bounds, identities, networks, trees
from theory.linearity.networks import network
from theory.linearity.tasks import (
    DEEP,
    EXPERTS,
    HALVES,
    ORDER,
    PAPER,
    SHALLOW,
    TANH,
    WEIGHTS,
    fine_tuned,
    gap,
    inputs,
    labels,
    mean,
    measured,
    order,
    outputs,
    product_gap,
    shrunk,
    size,
    tanh_experts,
    tanh_loss,
    tanh_network,
)


def _proportional() -> Array:
    """f = w_2 w_1: one output, so features are proportional; both models have loss 0 at y = 1."""
    thetas = tuple(jnp.array(w).reshape(2, 1, 1) for w in ((1.0, 2.0), (1.0, 0.5)))
    one = jnp.ones((1, 1))
    return networks.mean_squared_error(network, mean(thetas, HALVES), one, one)


def _readouts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and labels of a linear model, and 100 x 2 readouts of equal squared loss: the second
    is where a random line through the first meets the same level again."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=(12, 1))
    start, line = rng.normal(size=(100, 1, 4)), rng.normal(size=(100, 1, 4))
    slope = np.sum((line @ x.T) * (start @ x.T - y.T), (1, 2))
    second = start - (2 * slope / np.sum((line @ x.T) ** 2, (1, 2)))[:, None, None] * line
    return x, y, np.stack([start, second], 1)


@jax.jit
def _readout_loss(theta: Array) -> Array:
    """Of readouts [... 1 4]."""
    x, y, _ = _readouts()
    return jnp.mean((theta @ x.T - y.T) ** 2, (-1, -2))


def _worst_excess() -> float:
    """Largest L(theta_alpha) - L(theta_i) over pairs of equal loss and alpha."""
    _, _, pairs = _readouts()
    alphas = np.linspace(0.0, 1.0, 21)[:, None, None, None]
    merged = _readout_loss(alphas * pairs[:, 0] + (1 - alphas) * pairs[:, 1])
    return float(np.max(merged - np.max(_readout_loss(pairs), 1)))


squared_loss = jax.jit(identities.squared_loss)


def _ensemble_loss() -> float:
    """Of the first pair of readouts, merged, by the identity."""
    x, y, pairs = _readouts()
    return float(squared_loss(pairs[0] @ x.T, y.T, HALVES)) / len(x)


def _squared_loss() -> float:
    """Of the merged experts, by the identity from their outputs and gap."""
    thetas, x = tanh_experts(), inputs()
    rest = gap(tanh_network, thetas, WEIGHTS, x)
    return float(squared_loss(outputs(thetas, x), labels()[1], WEIGHTS, rest)) / len(x)


def _merged_tanh_loss() -> Array:
    return tanh_loss(mean(tanh_experts(), WEIGHTS))


@jax.jit
def _cross_entropy(logits: Array) -> Array:
    """Against the pre-training teacher's classes."""
    return networks.cross_entropy(logits, jax.nn.one_hot(jnp.argmax(labels()[0], axis=-1), 2))


def _lipschitz_bound() -> float:
    thetas, x = tanh_experts(), inputs()
    losses = np.array([_cross_entropy(logits) for logits in outputs(thetas, x)])
    rest = np.linalg.norm(gap(tanh_network, thetas, WEIGHTS, x), axis=1).mean()
    return float(bounds.loss_bound(jnp.asarray(losses), WEIGHTS, rest, sqrt(2)))


def _merged_cross_entropy() -> Array:
    merged = mean(tanh_experts(), WEIGHTS)
    return _cross_entropy(tanh_network(merged, inputs()))


def _lemma_1() -> list[Claim]:
    source = f"{PAPER} Lemma 1, Sec. 3 and App. A.1"
    linear = "linear model, squared loss, two readouts of equal loss"
    return [
        Claim(
            f"{PAPER}/L1-proportional/ours",
            "LLFC up to a factor (Definition 2) is not enough for Lemma 1: L(θ_i) = 0 < L(θ_α)",
            source,
            "f = w₂w₁, models (1,1) and (2,½), α=½, y=1",
            lambda: 1 / 64,
            measured(_proportional),
            note="proportional is not equal: with one output every net is proportional",
        ),
        Claim(
            f"{PAPER}/L1/exact",
            "exact CTL (factor 1), convex loss, equal losses: max L(θ_α) - L(θ_i) ≤ 0",
            source,
            f"{linear}, 100 pairs, 21 α",
            lambda: 0.0,
            measured(_worst_excess),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/L1-LMC/ours",
            "L(θ_α) = Σ aᵢLᵢ - Σ aᵢ|fᵢ - f̄|²",
            source,
            f"{linear}, α=½",
            _ensemble_loss,
            measured(lambda: _readout_loss(_readouts()[2][0].mean(0))),
        ),
        Claim(
            f"{PAPER}/L1-squared/ours",
            "L(θ̄) = Σ aᵢLᵢ - Σ aᵢ|fᵢ - f̄|² + 2 gap·(f̄ - y) + |gap|²",
            source,
            f"tanh {TANH}, {EXPERTS}, gap measured",
            _squared_loss,
            measured(_merged_tanh_loss),
            note="without exact CTL, without equal losses",
        ),
        Claim(
            f"{PAPER}/L1-approximate/ours",
            "L(θ̄) ≤ Σ aᵢLᵢ + √2 mean|gap| for cross-entropy",
            source,
            f"tanh {TANH}, {EXPERTS}, two classes",
            _lipschitz_bound,
            measured(_merged_cross_entropy),
            relation="<=",
        ),
    ]


def _product(sizes: tuple[int, ...]) -> float:
    terms = product_gap(fine_tuned(network, sizes), WEIGHTS)
    return size(inputs() @ terms.sum(0).T)


def _centroid() -> Array:
    """Of three models e_1, e_2, e_3 of f = w_3 w_2 w_1."""
    thetas = tuple(row.reshape(3, 1, 1) for row in jnp.eye(3))
    return gap(network, thetas, jnp.full(3, 1 / 3), jnp.ones((1, 1)))[0, 0]


def _simplex_ratio(k: int) -> Array:
    """The gap at the centroid over that of a pair's middle, f = |theta|^2 / 2."""

    def half_square(theta: Array) -> Array:
        return jnp.sum(theta**2) / 2

    return gap(half_square, jnp.eye(k), jnp.full(k, 1 / k)) / gap(
        half_square, jnp.eye(k)[:2], HALVES
    )


def _largest_pair() -> float:
    telescope = trees.telescope(tanh_network, tanh_experts(), WEIGHTS, inputs())
    return trees.growth(WEIGHTS) * max(map(size, telescope.gaps))


def _lemma_2() -> list[Claim]:
    source, tanh = f"{PAPER} Lemma 2, Sec. 4.2 and App. A.2", f"tanh {TANH}, {EXPERTS}"
    merged_gap = measured(lambda: size(gap(tanh_network, tanh_experts(), WEIGHTS, inputs())))
    return [
        *(
            Claim(
                f"{PAPER}/eq1-linear-L{len(sizes) - 1}/ours",
                "gap of W_L…W₁ = - Σ over ≥ 2 deviations in the product"
                if len(sizes) > 3
                else "gap of W₂W₁ = -½ Σ aᵢaⱼ ΔW₂ΔW₁",
                f"{PAPER} eq. (1), Sec. 4.2",
                f"linear {sizes}, {EXPERTS}; |gap| on data",
                partial(_product, sizes),
                measured(
                    lambda sizes=sizes: size(
                        gap(network, fine_tuned(network, sizes), WEIGHTS, inputs())
                    )
                ),
            )
            for sizes in (SHALLOW, DEEP)
        ),
        Claim(
            f"{PAPER}/eq1-order/ours",
            "gap = -½ Σ aᵢ D²f(θ̄)[dᵢ,dᵢ] + third order",
            f"{PAPER} eq. (1), Sec. 4.2",
            tanh,
            lambda: 3.0,
            order(shrunk(WEIGHTS)),
            note=ORDER,
        ),
        Claim(
            f"{PAPER}/L2/printed",
            "exact CTL of every pair in Θ gives it for k models",
            source,
            "f = w₃w₂w₁, Θ = {e₁, e₂, e₃}: f = 0 on all segments",
            lambda: 0.0,
            measured(_centroid),
            note="the proof needs running means in Θ: a convex Θ, where exact CTL makes f affine",
        ),
        Claim(
            f"{PAPER}/L2/corrected",
            "gap of k models = Σ_v s_v × gap of the pair merged at v, for any f and any tree",
            source,
            f"{tanh}; Huffman's tree",
            lambda: size(trees.telescope(tanh_network, tanh_experts(), WEIGHTS, inputs()).total),
            merged_gap,
        ),
        Claim(
            f"{PAPER}/L2-growth/ours",
            "|gap of k models| ≤ growth × largest |gap| of a pair merged on the way",
            source,
            f"{tanh}; Huffman's tree, growth {trees.growth(WEIGHTS):.2f}",
            _largest_pair,
            merged_gap,
            relation="<=",
            note="uniform weights: log2 k at powers of two; one by one (k + 1)/2 - 1/k",
        ),
        Claim(
            f"{PAPER}/L2-quadratic/ours",
            "k equidistant models, quadratic f: gap = 2 (k - 1)/k × a pair's, whatever k",
            source,
            "k=5, f=|θ|²/2, vertices of a simplex",
            lambda: 2 * 4 / 5,
            measured(partial(_simplex_ratio, 5)),
        ),
    ]


CLAIMS = (*_lemma_1(), *_lemma_2())
