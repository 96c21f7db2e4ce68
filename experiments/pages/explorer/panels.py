"""Panels of the explorer, which draw lines over one axis: their formulas and controls.

Each panel evaluates one function of this module, which `javascript` translates. The page's "copy as
Python" calls the function here. Quantities that require a solver in NumPy have no panel.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from experiments.pages.explorer import formulas
from theory import deep_linear as dl
from theory import problems
from theory.deep_linear import penalised, regularised, scales
from theory.deep_linear.wishart import Learned
from theory.merging import dense_moments
from theory.two_layer import fine_tuning, low_rank

POINTS = 241  # of a line
MOST = 6.0  # imbalance of the two layers, of either sign
LONGEST = 1e6  # of a source with infinite length
FAR = 32  # tasks that are merged
LARGE = 1000.0  # dimension


class Control(NamedTuple):
    """A number that the reader can set.

    Attributes:
      key: Its name, also in the page's address.
      label: Its label on the page.
      value: The initial value; None is the special value.
      low: The smallest value.
      high: The largest value.
      step: The distance between the slider's values; 0 for a logarithmic scale.
      special: The meaning of None, such as "∞"; "" if None is not allowed.
      python: Python's spelling of None.
      other: The first value when None is switched off.
    """

    key: str
    label: str
    value: float | None
    low: float
    high: float
    step: float = 0.01
    special: str = ""
    python: str = "None"
    other: float = 1


class Panel(NamedTuple):
    """A section of the page: sliders, lines over one axis, and some numbers.

    Attributes:
      function: The function that computes the lines and the numbers, by name. Its name is that of
        the panel.
      title: The question.
      text: The comparison, in a sentence or two.
      heading: The heading of the picture.
      x: Name of the values along the axis, among the results.
      x_label: The label of that axis, with its unit.
      y_label: The label of the other axis.
      logarithmic: Whether the x axis is logarithmic.
      lines: Names of the lines, among the results.
      numbers: The meaning of each number, by its name among the results.
      note: The assumptions of the formulas, and their precision.
      rows: For each line, the claims of the ledger that support it.
      controls: One for each argument of the function, in order. A key that ends in "theta" is an
        angle. It is in degrees on the page and in radians in the function.
    """

    function: Callable[..., dict[str, Array]]
    title: str
    text: str
    heading: str
    x: str
    x_label: str
    y_label: str
    logarithmic: bool
    lines: tuple[str, ...]
    numbers: Mapping[str, str]
    note: str
    rows: tuple[tuple[str, str], ...]
    controls: tuple[Control, ...]

    @property
    def name(self) -> str:
        """The name of its function, the prefix of its controls' keys in the address."""
        return self.function.__name__


@problems.unchecked_in_float64
def adapter(
    rank: ArrayLike,
    scale: ArrayLike,
    start: ArrayLike,
    ratio: ArrayLike,
    duration: ArrayLike,
    decay: ArrayLike,
) -> dict[str, Array]:
    """Computes the pre-training loss after fine-tuning with an adapter, and with all weights.

    The pre-training is that of `formulas.pretraining`, from e^-6 I. The adapter is on the first
    layer. Initially, its B is 0 and its A is a constant in each of the first modes.

    Args:
      rank: Number of these modes.
      scale: The adapter's scale s, >= 0.
      start: The initial value of A.
      ratio: Singular values of the fine-tuning task over the pre-training task's.
      duration: Time of fine-tuning.
      decay: Exponent of the decay of the singular values, >= 0.

    Returns:
      Along "time", the time of pre-training: the losses "pre-trained", "adapter" and "all weights".
      As numbers, "turn of adapter" and "turn of all weights", the times where these losses are
      smallest; NaN if the loss never increases again.
    """
    sigma, at, y = formulas.path(decay, 6.0)
    target = ratio * sigma
    before = jnp.sum((y - sigma) ** 2, -1)
    a = jnp.where(jnp.arange(sigma.size) < rank, start, 0.0)
    raised = low_rank.degradation(
        duration, y, sigma, target, scale * jnp.sqrt(y), b=jnp.zeros(()), a=a
    )
    tuned = fine_tuning.mode(duration, y, target)
    losses = {
        "pre-trained": before,
        "adapter": before + raised,
        "all weights": jnp.sum((tuned - sigma) ** 2, -1),
    }
    found = {"time": at(jnp.arange(formulas.TIMES, dtype=float)), **losses}
    for name in ("adapter", "all weights"):
        found[f"turn of {name}"], _ = formulas.turn(losses[name], at)
    return found


@problems.unchecked_in_float64
def layers(load: ArrayLike, theta: ArrayLike, sigma: ArrayLike) -> dict[str, Array]:
    """Computes how the relative size of two layers affects fine-tuning, in the limit n, d -> inf.

    Args:
      load: Target samples over dimension, in [0, 1).
      theta: Angle between the tasks in radians, in [0, pi].
      sigma: Standard deviation of the label noise.

    Returns:
      Along "imbalance" r, as in `theory.deep_linear.scales`: the risks "fine-tuning", "frozen
      features" (the limit r -> inf) and "scratch". As numbers: "risk of balanced", the risk at r =
      0, and the angles in degrees up to which fine-tuning helps: "balanced" at r = 0, "rich" and
      "lazy" at the ends of the line. "opposite" is the angle beyond which it helps again, at the
      rich end.
    """
    imbalance = MOST * jnp.linspace(-1.0, 1.0, POINTS)

    def most(r: float) -> Array:
        return jnp.degrees(scales.unbalanced_boundary(load=load, sigma=sigma, imbalance=r))

    return {
        "imbalance": imbalance,
        "fine-tuning": scales.unbalanced_risk(
            load=load, theta=theta, sigma=sigma, imbalance=imbalance
        ),
        "frozen features": _level(
            dl.fine_tuning_risk(load=load, theta=theta, sigma=sigma, depth=1)
        ),
        "scratch": _level(dl.scratch_limit(load=load, sigma=sigma)),
        "risk of balanced": scales.unbalanced_risk(
            load=load, theta=theta, sigma=sigma, imbalance=0.0
        ),
        "rich": most(-MOST),
        "balanced": most(0.0),
        "lazy": most(MOST),
        "opposite": jnp.degrees(scales.opposite_boundary(load=load, sigma=sigma, imbalance=-MOST)),
    }


@problems.unchecked_in_float64
def pull(sigma: ArrayLike, scale: ArrayLike, source: ArrayLike) -> dict[str, Array]:
    """Computes the angle beyond which a pull towards the source makes ridge regression worse.

    Args:
      sigma: Standard deviation of the noise on the source's labels.
      scale: The factor on the source, > 0.
      source: Samples of the source over dimension, for the numbers.

    Returns:
      Along "samples", the source's samples over dimension: angles in degrees for a source with "no
      penalty" and with the "best penalty" for its own task. As numbers, "without" and "with" the
      penalty at `source`.
    """
    samples = 10.0 ** jnp.linspace(-1.0, 1.0, POINTS)

    def angle(overlap: Array, size2: Array) -> Array:
        times = jnp.asarray(scale, float)
        return jnp.degrees(regularised.l2sp_boundary(Learned(times * overlap, times**2 * size2)))

    def shrunk(load: Array) -> Array:
        # Only n / d matters for these two, but the number of samples n must be an integer.
        learned = 1 - penalised.best_risk(n=LARGE * load, d=LARGE, distance=1.0, sigma=sigma)
        return angle(learned, learned)

    here = jnp.asarray(source, float)
    return {
        "samples": samples,
        "no penalty": angle(*_learned(samples, sigma)),
        "best penalty": shrunk(samples),
        "without": angle(*_learned(here, sigma)),
        "with": shrunk(here),
    }


@problems.unchecked_in_float64
def mixture(
    first: ArrayLike,
    first_theta: ArrayLike,
    second: ArrayLike,
    second_theta: ArrayLike,
    sigma: ArrayLike,
) -> dict[str, Array]:
    """Computes the risk of the best mixture of two sources, in the limit n, d -> inf.

    All tasks are in one plane. The second source may be on either side of the target. The sources
    are minimum-norm fits. The best weights are the same before and after fine-tuning.

    Args:
      first: Samples of the first source over dimension.
      first_theta: Angle of the first source in radians.
      second: Samples of the second source over dimension.
      second_theta: Its angle, for the numbers; negative on the other side of the target.
      sigma: Standard deviation of the noise on the sources' labels, > 0.

    Returns:
      Along "angle", the angle of the second source in degrees: the risks "best weights", "weights
      of sum 1", "first alone" and "second alone", where one source alone has its best weight. As
      numbers, the best "first weight" and "second weight" at `second_theta`, and the "risk there".
    """
    degrees = 180 * jnp.linspace(-1.0, 1.0, POINTS)
    (m_1, v_1), (m_2, v_2) = (_learned(load, sigma) for load in (first, second))

    def solved(theta: ArrayLike) -> tuple[Array, ...]:
        # G a = g, for weights in units that make the diagonal of G 1, because the norm of a source
        # may be very large.
        one = m_1 / jnp.sqrt(v_1) * jnp.cos(first_theta)
        two = m_2 / jnp.sqrt(v_2) * jnp.cos(theta)
        both = m_1 * m_2 / jnp.sqrt(v_1 * v_2) * jnp.cos(jnp.subtract(first_theta, theta))
        left = 1 - both**2
        a, b = (one - both * two) / left, (two - both * one) / left
        return a / jnp.sqrt(v_1), b / jnp.sqrt(v_2), 1 - a * one - b * two, 1 - one**2, 1 - two**2

    *_, best, alone, other = solved(jnp.radians(degrees))
    # Along weights a and 1 - a the risk is a parabola.
    theta = jnp.radians(degrees)
    g_1, g_2 = m_1 * jnp.cos(first_theta), m_2 * jnp.cos(theta)
    both = m_1 * m_2 * jnp.cos(first_theta - theta)
    bend, slope = v_1 + v_2 - 2 * both, v_2 - both + g_1 - g_2
    affine = 1 - 2 * g_2 + v_2 - slope**2 / bend
    weight, rest, risk, *_ = solved(second_theta)
    return {
        "angle": degrees,
        "best weights": best,
        "weights of sum 1": affine,
        "first alone": jnp.broadcast_to(alone, degrees.shape),
        "second alone": other,
        "first weight": weight,
        "second weight": rest,
        "risk there": risk,
    }


@problems.unchecked_in_float64
def merges(
    heterogeneity: ArrayLike, noise: ArrayLike, density: ArrayLike, tasks: ArrayLike
) -> dict[str, Array]:
    """Computes the risks of merges of Gaussian task vectors, as fractions of the base's risk.

    Args:
      heterogeneity: Standard deviation of each task's own part; the shared part has 1.
      noise: Standard deviation of an expert around its optimum.
      density: The fraction of entries that DARE keeps.
      tasks: Number of tasks, for the numbers.

    Returns:
      Along "tasks", their number: the excess risks of "average" and "DARE" at scale 1, and at their
      best scales. As numbers, the "scale of average" and the "scale of DARE".
    """
    count = jnp.linspace(1.0, FAR, POINTS)

    def of(tasks: ArrayLike, kept: ArrayLike) -> tuple[Array, Array]:
        return dense_moments(tasks, 1.0, heterogeneity, noise, kept)

    found = {"tasks": count}
    for name, kept in (("average", 1.0), ("DARE", density)):
        square, start = of(count, kept)
        found[name] = (square - start) / start
        found[f"{name}, best scale"] = 1 - start / square
        square, start = of(tasks, kept)
        found[f"scale of {name}"] = start / square
    return found


def _level(value: Array) -> Array:
    return jnp.broadcast_to(value, (POINTS,))


def _learned(load: ArrayLike, sigma: ArrayLike) -> tuple[Array, Array]:
    """Returns how much of its task a minimum-norm fit learns: the overlap, and |w|^2."""
    seen = dl.source_limit(load=load, theta=0.0, sigma=sigma)
    size = jnp.where(jnp.isinf(seen.size), LONGEST, seen.size)
    return jnp.minimum(jnp.asarray(load, float), 1.0), size**2


PANELS = (
    Panel(
        adapter,
        "Does a low-rank adapter spare pre-training?",
        "Fine-tuning changes the network above by an adapter of low rank on its first layer, or in "
        "all weights. Both raise the pre-training loss. The adapter moves only the modes it has.",
        "Pre-training loss after fine-tuning",
        "time",
        "pre-training time t (gradient flow)",
        "loss (squared Frobenius norm)",
        True,
        ("adapter", "all weights", "pre-trained"),
        {
            "turn of adapter": "With the adapter, more pre-training hurts from t",
            "turn of all weights": "With all weights, it hurts from t",
        },
        "Exact for gradient flow. Tasks share their singular vectors, and pre-training starts from "
        "e⁻⁶ I. B is initially 0; A is one number in each of the first r modes. – means never.",
        (
            ("adapter", "overtrained/LoRA-mode-zero/ours"),
            ("adapter", "overtrained/LoRA-real/ours"),
            ("adapter", "overtrained/LoRA-rate/ours"),
            ("all weights", "overtrained/A.7-flow/ours"),
        ),
        (
            Control("rank", "rank r of the adapter", 2, 1, formulas.WIDTH, 1),
            Control("scale", "scale s of the adapter", 1, 0.25, 4),
            Control("start", "start of A", 0.1, 0.001, 1, 0),
            Control("ratio", "new task over old, σ_ft/σ_pre", 3, 0.5, 6),
            Control("duration", "time of fine-tuning", 0.6, 0, 5),
            Control("decay", "decay of the spectrum", 1, 0, 2),
        ),
    ),
    Panel(
        layers,
        "From rich to lazy: what does the size of the layers do?",
        "Both layers of the source are rescaled before fine-tuning, and the network still computes "
        "the same function. A large first layer freezes the features. With a large last layer, "
        "the features grow faster than they turn.",
        "Risk after fine-tuning",
        "imbalance",
        "imbalance r of the layers (of |βₛ|)",
        "risk (of |βₜ|²)",
        False,
        ("fine-tuning", "frozen features", "scratch"),
        {
            "risk of balanced": "Risk of balanced layers, r = 0",
            "rich": "Fine-tuning helps up to this angle at r = −6, degrees",
            "balanced": "Up to this angle at r = 0",
            "lazy": "Up to this angle at r = 6",
            "opposite": "Fine-tuning helps again beyond this angle at r = −6, degrees",
        },
        "Limits of large n and d, for fewer samples than dimensions. At r < 0 the network is one "
        "neuron. Beyond 90° its output weight may change its sign, and the risk jumps there.",
        (
            ("fine-tuning", "features-are-fate/layers-risk-1.5/ours"),
            ("fine-tuning", "features-are-fate/layers-risk-0.5/ours"),
            ("fine-tuning", "features-are-fate/layers-boundary/ours"),
            ("fine-tuning", "features-are-fate/layers-opposite-160/ours"),
            ("fine-tuning", "features-are-fate/layers-opposite-170/ours"),
            ("frozen features", "features-are-fate/layers-between/ours"),
        ),
        (
            Control("load", "target samples n/d", 0.3, 0.02, 0.98),
            Control("theta", "angle θ between the tasks, degrees", 50, 0, 180, 0.5),
            Control("sigma", "noise σ of the labels", 0.8, 0, 2),
        ),
    ),
    Panel(
        pull,
        "When does a pull towards the source help?",
        "L2-SP is ridge regression with a penalty on the distance from the source. It helps below "
        "this angle, at any common penalty, for any number of target samples and any noise.",
        "Largest angle at which the pull helps",
        "samples",
        "source samples nₛ/d",
        "angle θ (degrees)",
        True,
        ("no penalty", "best penalty"),
        {
            "without": "Angle for a source without a penalty, degrees",
            "with": "Angle for one with its best penalty, degrees",
        },
        "The law is exact at any n and d. How much the source has learned is a limit of large nₛ "
        "and d. A source with its best penalty and without rescaling gives 60° for any number of "
        "samples.",
        (
            ("no penalty", "features-are-fate/L2-SP-boundary-few/ours"),
            ("no penalty", "features-are-fate/L2-SP-boundary-many/ours"),
            ("best penalty", "features-are-fate/source-distance-scaled/ours"),
            ("best penalty", "features-are-fate/sixty-degrees/ours"),
        ),
        (
            Control("sigma", "noise σₛ of the source's labels", 0.5, 0, 2),
            Control("scale", "scale of the source", 1, 0.05, 2),
            Control("source", "source samples nₛ/d, for the numbers", 2, 0.1, 10, 0),
        ),
    ),
    Panel(
        mixture,
        "How should two sources be weighted?",
        "Fine-tuning begins from a weighted sum of two sources. Sources on both sides of the "
        "target correct each other, and two on one side repeat each other.",
        "Risk of the initial weights",
        "angle",
        "angle of the second source (degrees)",
        "risk (of |βₜ|²)",
        False,
        ("best weights", "weights of sum 1", "first alone", "second alone"),
        {
            "first weight": "Best weight of the first source",
            "second weight": "Best weight of the second source",
            "risk there": "Risk with both",
        },
        "Limits of large nₛ and d, for least-norm sources. Weights of sum 1 are SAIL's. With n "
        "target samples fine-tuning multiplies all risks by 1 - n/d and adds one number.",
        (
            ("best weights", "features-are-fate/sources-risk/ours"),
            ("best weights", "features-are-fate/sources-weight-1/ours"),
            ("best weights", "features-are-fate/sources-tuned-risk/ours"),
            ("weights of sum 1", "sail/T3-expected/ours"),
        ),
        (
            Control("first", "samples of the first source, n₁/d", 2, 0.1, 10, 0),
            Control("first_theta", "angle of the first source, degrees", 40, 0, 180, 0.5),
            Control("second", "samples of the second source, n₂/d", 4, 0.1, 10, 0),
            Control(
                "second_theta", "angle of the second, for the numbers, degrees", -30, -180, 180, 0.5
            ),
            Control("sigma", "noise σ of the sources' labels", 0.3, 0.05, 2),
        ),
    ),
    Panel(
        merges,
        "How far may a merge be scaled?",
        "Task vectors are normal, and all tasks use all entries. DARE drops entries of each "
        "expert at random and rescales the rest. The noise that this adds makes DARE's own scale "
        "too large.",
        "Excess risk of a merge",
        "tasks",
        "number of tasks T",
        "excess risk (of the base's)",
        False,
        ("average, best scale", "average", "DARE, best scale", "DARE"),
        {
            "scale of average": "Best scale of the average",
            "scale of DARE": "Best scale of DARE",
        },
        "Exact for entries with equal distributions, also between whole numbers of tasks. Above 1 "
        "the base is better. TIES and trimming need sums that a page does not compute.",
        (
            ("average", "unified-merging/merge-dense-average/ours"),
            ("average", "unified-merging/merge-bayes/ours"),
            ("DARE", "unified-merging/merge-dense-dare/ours"),
        ),
        (
            Control("heterogeneity", "heterogeneity, relative to the shared part", 1, 0, 3),
            Control("noise", "noise of the experts, relative to the shared part", 0.5, 0, 3),
            Control("density", "density of DARE", 0.5, 0.05, 1),
            Control("tasks", "tasks T, for the numbers", 8, 1, FAR, 1),
        ),
    ),
)  # fmt: skip
