"""SAIL, Appendix D (Lemma 1, Theorem 4) and F: risks that transfer, maps of width and depth."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.stats import norm

from sail_jax.basis.change_basis import change_basis
from sail_jax.basis.spaces import spec
from sail_jax.distances import total_variation_gaussian
from sail_jax.growth import mix_layers
from sail_jax.growth.learned import sail_init, sail_maps, sail_spec, width_gradients
from theory.claims import Claim, Estimate, Simulate
from theory.initialisation import transfer
from theory.initialisation.settings import PAPER, generator, measured

N, DELTA = 30, 0.1
SOURCE, TARGET = np.array([0.5, -0.5]), np.array([0.8, -0.2])
APART = 0.3  # both classes move alike


def _variation() -> float:
    return float(total_variation_gaussian(np.array([APART])))


# Compiled whole: operation by operation it takes longer to compile.
empirical_total_variation = jax.jit(transfer.empirical_total_variation, static_argnums=(2, 3))


worst_gap = jax.jit(jax.vmap(transfer.worst_gap, in_axes=(0, 0, None)))


def _samples(key: Array, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Of N points of the source, x and y in the order of x."""
    rng = generator(key)
    side = rng.integers(0, 2, (draws, N))  # 0 for y = 1
    x = rng.normal(size=side.shape) + SOURCE[side]
    order = np.argsort(x, 1)
    return np.take_along_axis(x, order, 1), 1 - 2.0 * np.take_along_axis(side, order, 1)


def _gaps(means: np.ndarray, key: Array, quick: bool) -> np.ndarray:
    """sup over thresholds of the risk under `means` less the empirical risk on the source."""
    return np.asarray(worst_gap(*_samples(key, 1_000 if quick else 20_000), jnp.asarray(means)))


def _worst(means: np.ndarray) -> Simulate:
    return lambda key, quick: Estimate.mean(_gaps(means, key, quick))


def _violated(means: np.ndarray, bound: Callable[[], Any]) -> Simulate:
    """How often some threshold's risk exceeds its bound, which is `bound` at no empirical risk."""

    def simulate(key: Array, quick: bool) -> Estimate:
        violated = _gaps(means, key, quick) > float(bound())
        # no fewer than one event, so that none seen in n draws has an error of 1 / n
        return Estimate(float(violated.mean()), stderr=sqrt(max(violated.sum(), 1)) / violated.size)

    return simulate


def _complexity(key: Array, quick: bool) -> Estimate:
    """Of the losses of thresholds on one sample: sup_t of their mean under random signs."""
    _, y = _samples(key, 1)
    above = np.arange(N) >= np.arange(N + 1)[:, None]  # which points are called y = 1
    losses = (above != (y > 0)).astype(float)
    s = generator(key).choice([-1.0, 1.0], (4_000 if quick else 100_000, N))
    return Estimate.mean((s @ losses.T).max(1) / N)


def _lipschitz_ratio(scale: float) -> float:
    """Complexity of the losses |phi - y'| / scale of predictors of values {0, scale}, where y' has
    them too, over the complexity of the predictors; all signs of six points are summed over."""
    s = np.array(np.meshgrid(*[[-1.0, 1.0]] * 6)).reshape(6, -1).T
    predictors = scale * (np.arange(6) >= np.arange(7)[:, None])
    y = scale * np.array([0, 0, 1, 0, 1, 1.0])
    losses = np.abs(predictors - y) / scale

    def complexity(values: np.ndarray) -> float:
        return float((s @ values.T).max(1).mean()) / 6

    return complexity(losses) / complexity(predictors)


def _event(key: Array, quick: bool) -> Estimate:
    """J* - J_i of the loss 2 where x is likelier under the target: classes moved by `APART`."""
    rng, n = generator(key), 20_000 if quick else 400_000
    y, noise = rng.integers(0, 2, n), rng.normal(size=n)
    likelier = [noise + m[y] > SOURCE[y] + APART / 2 for m in (TARGET, SOURCE)]
    return Estimate.mean(2.0 * (likelier[0].astype(float) - likelier[1]))


def _cells(cells: int) -> tuple[np.ndarray, ...]:
    """The source's and the target's class y = 1 in cells of equal share of the former."""
    edges = SOURCE[0] + norm.ppf(np.arange(cells + 1) / cells)
    return tuple(np.diff(norm.cdf(edges - m)) for m in (SOURCE[0], TARGET[0]))


def _sampled_variation(cells: int | None) -> Simulate:
    """Of N points of each law: in cells, or as they are."""

    def simulate(key: Array, quick: bool) -> Estimate:
        shape = (2, 400 if quick else 4_000, N)
        x = generator(key).normal(size=shape) + np.array([SOURCE[0], TARGET[0]])[:, None, None]
        if cells is not None:
            inner = SOURCE[0] + norm.ppf(np.arange(1, cells) / cells)
            x = np.searchsorted(inner, x)
        variations = []
        for source, target in zip(*x, strict=True):
            values, index = np.unique(np.concatenate([source, target]), return_inverse=True)
            counts = (np.bincount(i, minlength=len(values)) for i in (index[:N], index[N:]))
            variations.append(np.abs(np.subtract(*counts)).sum() / (2 * N))
        if cells is None:  # all alike
            return Estimate(float(np.mean(variations)), tolerance=1e-12)
        return Estimate.mean(variations)

    return simulate


def _appendix_d() -> list[Claim]:
    rademacher, source = f"{PAPER} Lemma 1 (p. 26)", f"{PAPER} Theorem 4 (p. 26)"
    task = f"thresholds on two normal classes, 0-1 loss, n={N}"
    complexity = transfer.threshold_complexity(N)
    return [
        Claim(
            f"{PAPER}/D2-thresholds/ours",
            "R̂(ℓ∘H) = (E|S_n| - P(S_n > 0)) / n for thresholds, any sample",
            f"{PAPER} Definition 2 (p. 26)",
            task,
            lambda: complexity,
            _complexity,
        ),
        Claim(
            f"{PAPER}/L1/exact",
            "P(some J > Ĵ + 2R̂(ℓ∘H) + 3C√(ln(2/δ)/2n)) ≤ δ",
            rademacher,
            f"{task}, δ=.1",
            lambda: DELTA,
            _violated(SOURCE, lambda: transfer.rademacher_bound(0.0, complexity, N, DELTA)),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/L1-mean/ours",
            "E sup (J - Ĵ) ≤ 2 E R̂(ℓ∘H)",
            f"{rademacher}, by symmetrisation",
            task,
            lambda: 2 * complexity,
            _worst(SOURCE),
            relation="<=",
        ),
        Claim(
            f"{PAPER}/T4-step1/exact",
            "|J* - J_i| ≤ 2C D_TV(D_i, D*)",
            f"{source}, step 1 (p. 27)",
            "C=2, classes moved by .3; loss C where the target is likelier",
            lambda: 2 * 2 * _variation(),
            _event,
            relation="<=",
            note="twice what it need be",
        ),
        Claim(
            f"{PAPER}/T4-step1-sharp/ours",
            "|J* - J_i| ≤ C D_TV(D_i, D*), attained",
            f"{source}, step 1 (p. 27)",
            "C=2, classes moved by .3; loss C where the target is likelier",
            lambda: 2 * _variation(),
            _event,
        ),
        Claim(
            f"{PAPER}/T4-empirical/printed",
            "D_TV(D̂_i, D̂*) ≈ D_TV(D_i, D*)",
            f"{source}, step 2 (p. 27)",
            f"n={N}, a normal feature moved by .3",
            _variation,
            _sampled_variation(None),
            note="samples of continuous laws share no point: the printed bound is ≥ 2C, vacuous",
        ),
        Claim(
            f"{PAPER}/T4-empirical/corrected",
            "D_TV(D̂_i, D̂*) = 1 for continuous laws",
            f"{source}, step 2 (p. 27)",
            f"n={N}, a normal feature moved by .3",
            lambda: 1.0,
            _sampled_variation(None),
        ),
        Claim(
            f"{PAPER}/T4-empirical-cells/ours",
            "E D_TV(D̂_i, D̂*) = ½ Σ E|B(n,p)/n - B(n,q)/n| ≥ D_TV",
            f"{source}, step 2 (p. 27)",
            f"n={N}, 4 cells, a normal feature moved by .3",
            lambda: float(empirical_total_variation(*_cells(4), N, N)),
            _sampled_variation(4),
        ),
        Claim(
            f"{PAPER}/T4-contraction/printed",
            "R̂(ℓ∘H) ≤ R̂(H)",
            f"{source}, statement",
            "predictors of values {0, ¼}, loss 4|φ - y|, 6 points",
            lambda: 1.0,
            measured(lambda: _lipschitz_ratio(0.25)),
            relation="<=",
            note="the constant L of its step 5 is lost in the statement",
        ),
        Claim(
            f"{PAPER}/T4-contraction/exact",
            "R̂(ℓ∘H) ≤ L R̂(H) for ℓ L-Lipschitz, attained",
            f"{source}, step 5 (p. 28)",
            "predictors of values {0, ¼}, loss 4|φ - y|, 6 points",
            lambda: 4.0,
            measured(lambda: _lipschitz_ratio(0.25)),
            note="Assumption 5 is of J in θ; it is ℓ in φ that has to be Lipschitz",
        ),
        Claim(
            f"{PAPER}/T4-informative/ours",
            "repaired, the right side falls below C, which bounds all risks, for large samples",
            source,
            "n=400, δ=.1, classes moved by .3; thresholds, no empirical risk",
            lambda: 1.0,
            measured(
                lambda: transfer.transfer_bound(
                    0.0, _variation(), transfer.threshold_complexity(400), 400, DELTA
                )
            ),
            relation="<=",
            note="with 2C D_TV of continuous samples, which is 2C, it never does",
        ),
        Claim(
            f"{PAPER}/T4/corrected",
            "P(some J* > Ĵ_i + C D_TV + 2R̂(ℓ∘H) + 3C√(ln(2/δ)/2n)) ≤ δ",
            source,
            f"{task}, δ=.1, classes moved by .3",
            lambda: DELTA,
            _violated(
                TARGET,
                lambda: transfer.transfer_bound(0.0, _variation(), complexity, N, DELTA),
            ),
            relation="<=",
            note="C for 2C, laws for samples, losses for predictors; no λ, no δ/2",
        ),
        Claim(
            f"{PAPER}/T4-mean/ours",
            "E sup (J* - Ĵ_i) ≤ C D_TV + 2 E R̂(ℓ∘H)",
            source,
            f"{task}, classes moved by .3",
            lambda: _variation() + 2 * complexity,
            _worst(TARGET),
            relation="<=",
        ),
    ]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(size=shape)


def _loss(grown: Array) -> Array:
    return jnp.sum(jnp.sin(grown) * jnp.arange(grown.size).reshape(grown.shape))


def _widths() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """theta, c_in, c_out, square so that the printed products exist."""
    return _normal(3, 3), _normal(3, 3) + np.eye(3), _normal(3, 3) - np.eye(3)


def _error(side: int) -> float:
    """Of `width_gradients` relative to autodiff."""
    theta, c_in, c_out = map(jnp.asarray, _widths())

    def grown(c_in: Array, c_out: Array) -> Array:
        return c_in @ theta @ c_out.T

    autodiff = jax.grad(lambda *c: _loss(grown(*c)), argnums=side)(c_in, c_out)
    formula = width_gradients(theta, c_in, c_out, jax.grad(_loss)(grown(c_in, c_out)))[side]
    return float(jnp.linalg.norm(formula - autodiff) / jnp.linalg.norm(autodiff))


def _svd_error() -> float:
    """theta grown by the maps of `sail_init` less W_in S W_out^T with the W it drew."""
    net = {"w": _normal(4, 3)}
    layout = spec(net, {"w": "h* o"}, spaces={"{h,o}": "outer"})
    free = sail_init(net, layout, {"h": 6, "o": 5}, key=jax.random.key(0))
    grown = change_basis(net, sail_spec(layout), sail_maps(free))["w"]
    U, S, Vt = np.linalg.svd(net["w"], full_matrices=False)
    W_in, W_out = (np.asarray(free[f"w@{k}.0"]["c"]) @ basis for k, basis in ((0, U), (1, Vt.T)))
    return float(np.abs(grown - W_in * S @ W_out.T).max())


def _depth_gradient() -> tuple[float, float]:
    """dL/dgamma_01 by autodiff through the stack, and d_01 (g_1 - sum_j d_0j g_j)."""
    layers, logits = jnp.asarray(_normal(3, 4)), jnp.asarray(_normal(2, 3))

    def loss(logits: Array) -> Array:
        return _loss(jnp.asarray(mix_layers(logits).write) @ layers)

    @jax.jit
    def gradients(logits: Array) -> tuple[Array, Array]:
        mix = jax.nn.softmax(logits)
        g = layers @ jax.grad(_loss)(mix @ layers)[0]
        return jax.grad(loss)(logits)[0, 1], mix[0, 1] * (g[1] - mix[0] @ g)

    autodiff, formula = gradients(logits)
    return float(autodiff), float(formula)


def _appendix_f() -> list[Claim]:
    width, depth = f"{PAPER} Appendix F.1 (pp. 32-33)", f"{PAPER} Appendix F.2 (p. 34)"
    claims = [
        Claim(
            f"{PAPER}/F1-gradient-{name}/reading",
            f"∂L/∂c_{name} = {true}, G = ∂L/∂(c_in θ c_outᵀ)",
            width,
            "3x3 matrices; relative error",
            lambda: 0.0,
            measured(lambda side=side: _error(side)),
            note="the chain rule is printed without the order of its factors",
        )
        for side, (name, true) in enumerate((("in", "G c_out θᵀ"), ("out", "Gᵀ c_in θ")))
    ]
    return [
        *claims,
        Claim(
            f"{PAPER}/F1-svd/exact",
            "c_in = W_in Ũᵀ, c_out = W_out Ṽᵀ: c_in θ c_outᵀ = W_in Σ̃ W_outᵀ",
            width,
            "4x3 to 6x5; largest difference",
            lambda: 0.0,
            measured(_svd_error),
        ),
        Claim(
            f"{PAPER}/F2-softmax/exact",
            "d = softmax(γ) is positive and Σ_i d_ki = 1",
            depth,
            "2 of 3 layers; largest |Σ - 1|",
            lambda: 0.0,
            measured(
                lambda: jnp.abs(jnp.asarray(mix_layers(_normal(2, 3)).write).sum(1) - 1).max()
            ),
        ),
        Claim(
            f"{PAPER}/F2-gradient/ours",
            "∂L/∂γ_ki = d_ki (g_ki - Σ_j d_kj g_kj), g_ki = ⟨∂L/∂θ̃ᵏ, θⁱ⟩",
            depth,
            "2 of 3 layers of 4 parameters",
            lambda: _depth_gradient()[1],
            measured(lambda: _depth_gradient()[0]),
        ),
    ]


CLAIMS = (*_appendix_d(), *_appendix_f())
