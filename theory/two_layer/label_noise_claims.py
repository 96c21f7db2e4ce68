"""Label noise and schedules of the learning rate, with modes compared with whole matrices."""

import numpy as np
from jaxtyping import Array

from theory.claims import Estimate, generator
from theory.two_layer import label_noise, matrices
from theory.two_layer.tasks import claim, rotations

D = 4
SIGMA, IMBALANCE = np.array([2.0, 1.0, 0.6, 0.3]), np.array([1.5, 1.0, 0.5, 0.8])
RATE, NOISE, STEPS, CALM = 0.01, 0.5, 1_500, 400
SOURCE = "Section 4.2, beyond: pre-training with label noise"
SETTING = (
    f"d={D}, σ={tuple(SIGMA.tolist())}, a²-b²={tuple(IMBALANCE.tolist())} at first, ν={NOISE},"
    f" {STEPS} steps"
)


def _rates(schedule: str) -> np.ndarray:
    decay = 1 - np.arange(STEPS) / STEPS if schedule == "linear" else np.ones(STEPS)
    return RATE * decay


def _descend(schedule: str, key: Array, quick: bool) -> matrices.Pair:
    """Descends with many networks from one minimum, in general position."""
    u, v = rotations()
    turn = np.linalg.qr(np.cos(np.outer(np.arange(D), np.arange(D)) + 1.0))[0]
    size = np.hypot(IMBALANCE, 2 * SIGMA)
    a, b = np.sqrt((size + IMBALANCE) / 2), np.sqrt((size - IMBALANCE) / 2)
    count = 48 if quick else 240
    pair = (np.tile(w, (count, 1, 1)) for w in ((u * a) @ turn, turn.T @ (b[:, None] * v.T)))
    first, second = pair
    rng = generator(key)
    # Steps without noise remove the noise in the map and move nothing else.
    last = first, second
    for noise, rates in ((NOISE, _rates(schedule)), (0.0, np.full(CALM, RATE))):
        last = matrices.label_noise(rng, last, (u * SIGMA) @ v.T, noise, rates)
    return last


def _traces(pair: matrices.Pair) -> np.ndarray:
    """Computes the traces of the Hessian, 2d (|W_1|^2 + |W_2|^2)."""
    first, second = (np.sum(w**2, (1, 2)) for w in pair)
    return matrices.paired(2 * D * (first + second))


def _imbalances(pair: matrices.Pair) -> np.ndarray:
    """Computes |W_1^T u|^2 - |W_2 v|^2 for the first pair of singular vectors."""
    u, v = rotations()
    left, right = pair[0].mT @ u[:, 0], pair[1] @ v[:, 0]
    return matrices.paired(np.sum(left**2, -1) - np.sum(right**2, -1))


def _after(schedule: str) -> np.ndarray:
    return label_noise.drift(IMBALANCE, SIGMA, NOISE, _rates(schedule))[-1]


@claim("LN-imbalance-{schedule}/limit", each=(("constant",), ("linear",)))
def _(schedule):
    """Label noise lowers log(a²-b²) of each mode by about 4dν² Ση². The fall of the first mode is
    compared

    This is the limit of small rates. The prediction has the next order, too.

    Source: {SOURCE}
    Domain: {SETTING}, η={RATE}, {schedule}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        left = Estimate.mean(_imbalances(_descend(schedule, key, quick)))
        fall = float(np.log(IMBALANCE[0] / left.value))
        return Estimate(fall, stderr=(left.stderr or np.nan) / left.value)

    return np.log(IMBALANCE[0] / _after(schedule)[0]), simulate


@claim("LN-schedule/limit")
def _():
    """A decay ends the drift. The rise of the trace of the Hessian after it is compared

    Source: {SOURCE}
    Domain: {SETTING}, η={RATE}: linear decay to 0 against a constant rate, {CALM} calm steps after
      both
    """

    def trace(schedule: str) -> float:
        return 2 * D * float(np.sum(np.hypot(_after(schedule), 2 * SIGMA)))

    def simulate(key: Array, quick: bool) -> Estimate:
        decayed, constant = (_traces(_descend(s, key, quick)) for s in ("linear", "constant"))
        return Estimate.mean(decayed - constant)

    return trace("linear") - trace("constant"), simulate


@claim("LN-anneal/limit")
def _(rate=0.02, noise=1.0, sigma=1.0):
    """Once a mode is balanced, a decay raises a² + b² by ην²/(1-ηS) (8σ²-2D²)/S² with D = a²-b² and
    S² = D² + 4σ²

    The noise holds ab below σ as long as the rate is high.

    Source: {SOURCE}
    Domain: d=1, σ={sigma:g}, a=b, ν={noise:g}, η={rate}
    """

    def simulate(key: Array, quick: bool) -> Estimate:
        """Computes 2 sigma minus the mean a^2 + b^2 at a constant rate, over networks and steps."""
        start = np.full((100 if quick else 400, 1, 1), np.sqrt(sigma))
        sums, skipped, steps = np.zeros(len(start)), 200, 800

        def watch(step: int, pair: matrices.Pair) -> None:
            if step > skipped:
                sums[:] += (pair[0] ** 2 + pair[1] ** 2)[:, 0, 0]

        rates, target = np.full(steps, rate), np.eye(1) * sigma
        matrices.label_noise(generator(key), (start, start), target, noise, rates, watch)
        return Estimate.mean(matrices.paired(2 * sigma - sums / (steps - skipped)))

    return label_noise.annealing_rise(rate, noise, 0.0, sigma), simulate
