"""Searches for a violation of a bound by ascent of simulated / predicted from random points.

A claim that is an inequality may have a `Domain`, the problems to which it applies. `attack`
searches the domain for the problem at which the bound is closest to being violated. It uses
gradients where both sides are smooth, and CMA-ES elsewhere. Independent code, `again`, evaluates
the result a second time.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from theory.fingerprints import fingerprint

if TYPE_CHECKING:
    from jaxtyping import Array

# A bound is attained if the ratio of its sides reaches ATTAINED. It is not sharp if the ratio stays
# below LOOSE, which is just under a half. Several bounds reach a half to the last bit.
ATTAINED = 0.95
LOOSE = ATTAINED / 2
# A ratio may exceed 1 by this much through rounding.
ROUNDING = 1e-9
# The largest difference between two evaluations of a ratio, relative to the ratio or to a tenth,
# whichever is larger. Differences of networks that are 1e-6 apart have four good digits.
AGREES = 1e-3

STARTS, CLIMBERS, STEPS, ROUNDS = 512, 8, 300, 4
RATE = 0.05  # of Adam, in units in which the box is about 10 wide


@dataclass(frozen=True)
class Box:
    """The range of one number, or of each entry of an array.

    Attributes:
      low: The smallest value.
      high: The largest value.
      shape: Shape of the array; () for a number.
      log: Whether the logarithm is uniform at the random starts; `low` must then be positive.
    """

    low: float
    high: float
    shape: tuple[int, ...] = ()
    log: bool = False

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    def place(self, share: Any) -> Any:
        """Maps fractions in [0, 1] to values, differentiably.

        Args:
          share: The fractions.

        Returns:
          The values.
        """
        if self.log:
            return self.low * (self.high / self.low) ** share
        return self.low + (self.high - self.low) * share


Problem = Mapping[str, Any]
Ratio = Callable[[Problem], Any]


@dataclass(frozen=True)
class Domain:
    """The problems to which a bound applies.

    Attributes:
      problems: A description of them.
      boxes: The ranges of their parts, by name.
      ratio: The ratio of both sides at a problem. The bound states that it is at most 1. It is
        simulated / predicted for "<=", and predicted / simulated for ">=".
      again: The same ratio by independent code, in NumPy and without derivatives.
      allowed: A number that is >= 0 where a problem satisfies the bound's assumptions. None if all
        problems in the boxes satisfy them.
      smooth: Whether JAX can differentiate `ratio` and `allowed`. Otherwise they take NumPy arrays.
      without: Ratios by the name of a term of the bound, each for the bound without that term.
    """

    problems: str
    boxes: Mapping[str, Box]
    ratio: Ratio
    again: Ratio
    allowed: Ratio | None = None
    smooth: bool = True
    without: Mapping[str, Ratio] = field(default_factory=dict)

    def at(self, shares: Any) -> dict[str, Any]:
        """Returns the problem at a point of the unit cube.

        Args:
          shares: A vector with an entry in [0, 1] for each number in the boxes.

        Returns:
          Its parts by name.
        """
        found, start = {}, 0
        for name, box in self.boxes.items():
            part = shares[start : start + box.size].reshape(box.shape)
            found[name] = box.place(part)
            start += box.size
        return found


@dataclass(frozen=True)
class Attack:
    """The outcome of a search.

    Attributes:
      id: The id of the claim.
      problems: A description of the problems that were searched.
      ratio: The largest ratio of both sides. It is at most 1 if the bound holds.
      again: The ratio at the same problem, by independent code.
      at: The problem.
      evaluations: The number of evaluated problems.
      terms: The largest ratio for the bound without a term, by the name of the term.
      code: The fingerprint of the code that was searched.
      searched: Whether this is the code of this version. Otherwise, this version has only evaluated
        the ratios at the problem.
    """

    id: str
    problems: str
    ratio: float
    again: float
    at: dict[str, Any]
    evaluations: int
    terms: dict[str, float] = field(default_factory=dict)
    code: str = ""
    searched: bool = True

    @property
    def confirmed(self) -> bool:
        """Whether both evaluations agree within `AGREES`, which is required for every bound."""
        if not (math.isfinite(self.ratio) and math.isfinite(self.again)):
            return self.ratio == self.again
        largest = max(abs(self.ratio), abs(self.again), 0.1)
        return abs(self.ratio - self.again) <= AGREES * largest

    @property
    def broken(self) -> bool:
        """Whether the bound is violated in both evaluations."""
        return min(self.ratio, self.again) > 1 + ROUNDING

    @property
    def kind(self) -> str:
        """The sharpness of the bound, as one word."""
        ratio = min(self.ratio, self.again)
        if not self.confirmed:
            return "not confirmed"
        if self.broken:
            return "broken"
        if not self.searched:
            return "not searched"
        return "attained" if ratio >= ATTAINED else "within 2" if ratio >= LOOSE else "not sharp"

    @property
    def finding(self) -> str:
        """The sharpness of the bound, in words."""
        ratio = min(self.ratio, self.again)
        match self.kind:
            case "not sharp" if not ratio > 0:
                return "never near: the sides have opposite signs"
            case "not sharp":
                return f"slack {1 / ratio:.2g}: not sharp"
            case "within 2":
                return f"within {1 / ratio:.3g} x"
            case "not confirmed":
                return f"not confirmed (ratio {self.ratio:.4g}, again {self.again:.4g})"
            case "not searched":
                former = replace(self, searched=True).finding
                return f"not searched since its code changed; at the former problem {former}"
            case kind:
                return f"{kind} ({ratio:.4g})"


@functools.cache
def quadrature(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the nodes of Gauss-Legendre quadrature over [0, 1], for both sides of a bound.

    Args:
      count: The number of nodes.

    Returns:
      The nodes and their weights.

    >>> nodes, weights = quadrature(3)
    >>> round(float(weights @ nodes**5), 12)
    0.166666666667
    """
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1) / 2, weights / 2


def attack(name: str, domain: Domain, *, seed: int = 0, seconds: float = math.inf) -> Attack:
    """Searches for the problem at which a bound is closest to being violated, in float64.

    Args:
      name: The claim's id.
      domain: The problems.
      seed: Seed of the random starts.
      seconds: The time limit of the search. A round that has started is finished.

    Returns:
      The outcome of the search. It depends on the seed, and on the time limit only if it is too
      short for all rounds.
    """
    import jax

    with jax.enable_x64(True):
        parts = 1 + len(domain.without)
        shares, ratio, evaluations = _search(domain, seed, seconds / parts)
        terms = {}
        for term, weaker in domain.without.items():
            _, terms[term], more = _search(replace(domain, ratio=weaker), seed, seconds / parts)
            evaluations += more
        problem = {k: np.asarray(v) for k, v in domain.at(shares).items()}
        again = float(domain.again(problem))
    return Attack(
        id=name,
        problems=domain.problems,
        ratio=ratio,
        again=again,
        at={k: v.tolist() for k, v in problem.items()},
        evaluations=evaluations,
        terms=terms,
        code=fingerprint(domain),
    )


def evaluated(found: Attack, domain: Domain) -> Attack:
    """Re-evaluates the outcome of an earlier search with the code of this version.

    Args:
      found: The outcome of a search.
      domain: The problems of the bound in this version.

    Returns:
      The outcome with both ratios at its problem and without terms. It is not `searched`.

    Raises:
      ValueError: If the problem does not belong to the domain.
    """
    import jax

    problem = {name: np.asarray(value) for name, value in found.at.items()}
    sizes = {name: value.shape for name, value in problem.items()}
    expected = {name: box.shape for name, box in domain.boxes.items()}
    if sizes != expected:
        raise ValueError(f"{found.id}: expected a problem with parts {expected}, got {sizes}")
    with jax.enable_x64(True):
        if domain.allowed is not None and not float(domain.allowed(problem)) >= -ROUNDING:
            raise ValueError(f"{found.id}: expected a problem of the domain, got another")
        ratio, again = float(domain.ratio(problem)), float(domain.again(problem))
    return replace(found, ratio=ratio, again=again, terms={}, searched=False)


def _search(domain: Domain, seed: int, seconds: float) -> tuple[np.ndarray, float, int]:
    """Returns the best point of the unit cube, its ratio, and the number of evaluations."""
    deadline = time.perf_counter() + seconds
    rng = np.random.default_rng(seed)
    size = sum(box.size for box in domain.boxes.values())
    search = _climb if domain.smooth else _evolve
    return search(domain, rng, size, deadline)


def _climb(
    domain: Domain, rng: np.random.Generator, size: int, deadline: float
) -> tuple[np.ndarray, float, int]:
    import jax
    import jax.numpy as jnp
    import optax

    def value(z: "Array") -> tuple["Array", "Array"]:
        """Computes the ratio and the distance of the problem from the domain."""
        problem = domain.at(jax.nn.sigmoid(z))
        outside = 0.0 if domain.allowed is None else jnp.maximum(-domain.allowed(problem), 0.0)
        return domain.ratio(problem), jnp.asarray(outside)

    def loss(z: "Array") -> tuple["Array", "Array"]:
        ratio, outside = value(z)
        kept = jnp.where(outside > 0, -jnp.inf, ratio)
        # The logarithm of positive ratios, because they differ by orders of magnitude.
        gain = jnp.where(ratio > 0, jnp.log(jnp.where(ratio > 0, ratio, 1.0)), ratio - 1)
        return 10 * outside - gain, jnp.where(jnp.isfinite(kept), kept, -jnp.inf)

    adam = optax.adam(RATE)

    @jax.jit
    @jax.vmap
    def climb(z: "Array") -> tuple["Array", "Array"]:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            z, state, best, most = carry
            (_, kept), slope = jax.value_and_grad(loss, has_aux=True)(z)
            best, most = jnp.where(kept > most, z, best), jnp.maximum(kept, most)
            slope = jnp.where(jnp.isfinite(slope), slope, 0.0)
            change, state = adam.update(slope, state)
            return (jnp.clip(z + change, -30, 30), state, best, most), None

        start = z, adam.init(z), z, -jnp.inf
        (_, _, best, most), _ = jax.lax.scan(step, start, None, STEPS)
        return best, most

    several = jax.jit(jax.vmap(lambda z: loss(z)[1]))
    best, most, evaluations = np.zeros(size), -math.inf, 0
    for _ in range(ROUNDS):
        starts = rng.logistic(size=(STARTS, size))
        ratios = np.asarray(several(starts))
        # Starts outside of the domain come last. The ascent brings them back.
        chosen = starts[np.argsort(-ratios)[:CLIMBERS]]
        places, found = map(np.asarray, climb(chosen))
        evaluations += STARTS + CLIMBERS * STEPS
        if found.max() > most:
            best, most = places[found.argmax()], float(found.max())
        if time.perf_counter() > deadline:
            break
    return np.asarray(jax.nn.sigmoid(best)), most, evaluations


def _evolve(
    domain: Domain, rng: np.random.Generator, size: int, deadline: float
) -> tuple[np.ndarray, float, int]:
    import cmaes

    def value(shares: np.ndarray) -> float:
        """Computes the ratio; outside the domain, a negative number that increases towards it."""
        problem = domain.at(shares)
        margin = math.inf if domain.allowed is None else float(domain.allowed(problem))
        ratio = float(domain.ratio(problem)) if margin >= 0 else margin - 1
        return ratio if math.isfinite(ratio) else -math.inf

    starts = rng.uniform(size=(STARTS // 8, size))
    ratios = [value(shares) for shares in starts]
    order = np.argsort(ratios)[::-1]
    best, most = starts[order[0]], ratios[order[0]]
    evaluations = len(starts)
    bounds = np.tile([0.0, 1.0], (size, 1))
    for mean in starts[order[:ROUNDS]]:
        strategy = cmaes.CMA(mean, 0.2, bounds=bounds, seed=int(rng.integers(2**31)))
        for _ in range(STEPS // 3):
            asked = [strategy.ask() for _ in range(strategy.population_size)]
            values = [value(shares) for shares in asked]
            evaluations += len(asked)
            if max(values) > most:
                best, most = asked[int(np.argmax(values))], max(values)
            if strategy.should_stop() or time.perf_counter() > deadline:
                break
            worst = min((v for v in values if math.isfinite(v)), default=0.0)
            kept = [v if math.isfinite(v) else worst - 1 for v in values]
            strategy.tell([(s, -v) for s, v in zip(asked, kept, strict=True)])
        if time.perf_counter() > deadline:
            break
    return best, most, evaluations
