"""Claims compare a closed form with a simulator, and a ledger lists the verdicts.

A claim that is wrong as printed is kept as printed and is expected to fail. The ledger is sound if
every claim has the expected verdict. The score shows the size of the error of a misprint.
"""

import contextlib
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sail_jax import extensions
from sail_jax.checks import argument, nearest, one_of
from theory import coverage

# JAX is slow to import. It is only required to check a claim, and is imported there.
if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Array

    from theory.adversary import Domain

# |z| above which agreement is rejected. A true Gaussian claim exceeds it with probability 6e-5, and
# any of a hundred claims with probability 0.6 %. Seeds are fixed, so a sound ledger remains sound.
Z_MAX = 4.0

# The default effect: the change of the prediction that a claim must detect. It is 5 % of the
# prediction, or .05 where the prediction is 0. An effect is detected if it is overlooked with a
# probability of at most MISS.
EFFECT = 0.05
MISS = 0.01

# The rounding error of hundreds of operations on numbers of order one, in float64.
ROUNDING = 1e-12

# The status of a claim, by the last part of its id.
STATUSES = {
    "exact": "exact as printed",
    "open": "holds here, unproved",
    "limit": "holds in the stated limit",
    "printed": "wrong as printed",
    "corrected": "corrected",
    "reading": "our interpretation",
    "ours": "ours, not in the paper",
}

Relation = Literal["=", "<=", ">="]


@dataclass(frozen=True)
class Estimate:
    """A simulated number with one kind of error.

    Attributes:
      value: The number.
      stderr: The standard error of a Monte Carlo mean; its z is Gaussian by the central limit
        theorem.
      tolerance: The largest error of a deterministic computation. The claim's note explains it.
    """

    value: float
    stderr: float | None = None
    tolerance: float | None = None

    def __post_init__(self):
        if (self.stderr is None) == (self.tolerance is None):
            raise ValueError("an Estimate needs exactly one of stderr and tolerance")

    @classmethod
    def mean(cls, values: "Array | np.ndarray | list[float]") -> "Estimate":
        """Computes the mean of independent draws, with its standard error.

        Args:
          values: The draws, a vector of two or more.

        Returns:
          The estimate.
        """
        draws = np.asarray(values)
        return cls(float(draws.mean()), stderr=float(draws.std(ddof=1)) / math.sqrt(draws.size))


Simulate = Callable[["Array", bool], Estimate]  # (key, quick)


@dataclass(frozen=True, eq=False)
class Claim:
    """A statement from a paper, or an additional one, with two sides that can be compared.

    Attributes:
      id: "paper/statement/variant". The variant is a key of `STATUSES`.
      statement: A formula or a sentence.
      source: The paper, and the number of the theorem or equation.
      domain: The numbers at which both sides are evaluated.
      predict: Returns the predicted value.
      simulate: Takes a key and a flag that reduces the work to a tenth, and returns the simulated
        value with its error.
      relation: "=", "<=" or ">=", as in "simulated = predicted", within the error of the
        simulation.
      note: Explains why the printed statement is wrong, or the tolerance or effect.
      effect: The smallest change of the prediction that the simulation must detect. None means 5 %
        of the prediction, or .05 where it is 0.
      draws: A name for the random numbers. None means "paper/statement". Claims with the same name
        share a key. The printed and the corrected statement are therefore compared with the same
        number, which is computed once.
      without: Functions by the name of a term. Each computes the prediction without this term.
      attack: The problems on which a bound can be attacked, or the reason why there are none. None
        for equalities and misprints.
      overlooks: The wrong predictions (see `mutants`) with which the claim is known to hold in a
        whole run too. They are separated by "; ".
      sharper: For a bound that is not sharp, the id of a sharper one without the paper, such as
        "T1/ours", or the reason why none is known.
    """

    id: str
    statement: str
    source: str
    domain: str
    predict: Callable[[], float]
    simulate: Simulate
    relation: Relation = "="
    note: str = ""
    effect: float | None = None
    draws: str | None = None
    without: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    attack: "Domain | str | None" = None
    overlooks: str = ""
    sharper: str = ""

    @property
    def status(self) -> str:
        """The status of the claim, in words."""
        return STATUSES[self.id.rsplit("/", 1)[-1]]

    @property
    def expected(self) -> bool:
        """Whether the claim is expected to hold; only misprints are not."""
        return not self.id.endswith("/printed")

    @property
    def bound(self) -> bool:
        """Whether the claim is an inequality that is expected to hold."""
        return self.expected and self.relation != "="


Sides = Callable[..., Any]  # returns the prediction and the simulator, or the prediction alone


@dataclass(frozen=True)
class Stated:
    """The claims that `claim` makes from a function. `beside` adds other variants of them.

    Attributes:
      claims: One claim for each problem.
      problems: The numbers of each problem by the function's parameters.
    """

    claims: tuple[Claim, ...]
    problems: tuple[Mapping[str, Any], ...]

    def beside(
        self,
        status: str,
        relation: Relation | None = None,
        *,
        effect: float | None = None,
        without: Mapping[str, Callable[[], float]] | None = None,
        attack: "Domain | str | None" = None,
        overlooks: str = "",
        sharper: str = "",
    ) -> Callable[[Sides], "Stated"]:
        """Decorates a function that states the same in another form, for example corrected.

        The claim has the simulation and the domain of this one, and also its source unless the
        docstring has its own.

        Args:
          status: A key of `STATUSES`.
          relation: As for `Claim`. None takes the relation of this claim.
          effect: As for `Claim`. None takes the effect of this claim.
          without: As for `Claim`.
          attack: As for `Claim`.
          overlooks: As for `Claim`.
          sharper: As for `Claim`.

        Returns:
          A decorator of a function that returns the prediction alone. It may have parameters with
          the names of this claim's function.
        """

        def decorate(predict: Sides) -> Stated:
            taken, made = inspect.signature(predict).parameters, []
            for first, numbers in zip(self.claims, self.problems, strict=True):
                name = f"{first.id.rpartition('/')[0]}/{status}"
                texts = _texts(name, predict, numbers)
                predicted = _lazily(predict, {name: numbers[name] for name in taken})
                changed = replace(
                    first,
                    id=name,
                    statement=texts.statement,
                    source=texts.source or first.source,
                    predict=lambda predicted=predicted: float(predicted()),
                    relation=relation or first.relation,
                    note=texts.note,
                    effect=first.effect if effect is None else effect,
                    without=without or {},
                    attack=attack,
                    overlooks=overlooks,
                    sharper=sharper,
                )
                made.append(changed)
            return _registered(predict, Stated(tuple(made), self.problems))

        return decorate


def claim(
    paper: str,
    name: str,
    relation: Relation = "=",
    *,
    effect: float | None = None,
    draws: str | None = None,
    without: Mapping[str, Callable[[], float]] | None = None,
    attack: "Domain | str | None" = None,
    overlooks: str = "",
    sharper: str = "",
    each: Iterable[Sequence[Any]] = ((),),
) -> Callable[[Sides], Stated]:
    """Decorates a function that states a claim and returns the prediction and its simulator.

    The function is called in float64 when the claim is checked. Its docstring contains all texts of
    the claim: the statement, then the paragraphs of the note, if any, and at the end

        Source: the location of the statement in the paper
        Domain: the numbers at which both sides are evaluated

    The paper's name is prepended to the source unless the source already contains it, as in "beyond
    paper: Thm 3.9 in finite time". The theorems and equations in the source determine which
    statement of `theory.coverage` the claim tests. `{name}` in a docstring is replaced by a
    parameter of the function or by a value of its module. The parameters are the numbers of the
    problem.

    Args:
      paper: The paper, with which the claim's id begins.
      name: The claim's id after the paper's, "statement/variant". Parameters are replaced.
      relation: "=", "<=" or ">=", as in "simulated = predicted".
      effect: As for `Claim`.
      draws: As for `Claim`.
      without: As for `Claim`.
      attack: As for `Claim`.
      overlooks: As for `Claim`.
      sharper: As for `Claim`.
      each: Values of the function's first parameters, a claim for each. The other parameters have
        their defaults.

    Returns:
      The decorator.
    """

    def decorate(sides: Sides) -> Stated:
        made, problems = [], []
        for values in each:
            bound = inspect.signature(sides).bind(*values)
            bound.apply_defaults()
            numbers = bound.arguments
            found, full = _lazily(sides, numbers), f"{paper}/{name}".format(**numbers)
            texts = _texts(full, sides, numbers)
            if not (texts.source and texts.domain):
                raise ValueError(
                    f"{full}: expected a docstring that ends with 'Source: ...' and"
                    f" 'Domain: ...', got {texts.source!r} and {texts.domain!r}"
                )
            if nested := [p for p in numbers if f"{{{p}" in texts.source + texts.domain]:
                raise ValueError(
                    f"{full}: {nested} in the value of a name is not replaced; write it in the"
                    " docstring itself"
                )
            stated = Claim(
                full,
                texts.statement,
                texts.source,
                texts.domain,
                lambda found=found: float(found()[0]),
                lambda key, quick, found=found: found()[1](key, quick),
                relation,
                texts.note,
                effect,
                draws,
                without or {},
                attack,
                overlooks,
                sharper,
            )
            made.append(stated)
            problems.append(numbers)
        return _registered(sides, Stated(tuple(made), tuple(problems)))

    return decorate


class _Texts(NamedTuple):
    statement: str
    note: str
    source: str
    domain: str


def _texts(name: str, function: Sides, numbers: Mapping[str, Any]) -> _Texts:
    """Reads the texts of a claim in the docstring of its function."""
    docstring = inspect.getdoc(function) or ""
    known = ChainMap(dict(numbers), inspect.unwrap(function).__globals__)
    try:
        statement, *notes = docstring.format_map(known).split("\n\n")
    except KeyError as exc:
        raise ValueError(
            f"{name}: its docstring has {{{exc.args[0]}}}, expected a parameter or a name of"
            " its module; write braces twice"
        ) from exc
    if not statement:
        raise ValueError(f"{name}: expected a docstring that states the claim, got none")
    place = notes.pop() if notes and notes[-1].startswith("Source: ") else ""
    source, _, domain = " ".join(place.removeprefix("Source: ").split()).partition(" Domain: ")
    paper = name.partition("/")[0]
    if source and paper not in source:
        source = f"{paper} {source}"
    return _Texts(" ".join(statement.split()), " ".join(" ".join(notes).split()), source, domain)


def _lazily(function: Sides, numbers: Mapping[str, Any]) -> Callable[[], Any]:
    """Delays a call of a function, in float64, until its result is required, and calls it once."""

    @functools.cache
    def called() -> Any:
        import jax

        with jax.enable_x64(True):
            return function(**numbers)

    return called


# The claims of each imported module, in their order, and the module's spec when it stated them.
_STATED: dict[str, list[Claim]] = {}
_SPECS: dict[str, object] = {}


def _registered(function: Sides, stated: Stated) -> Stated:
    """Checks that claims are complete, and registers them under the module of their function."""
    for made in stated.claims:
        one_of(f"{made.id}: its last part", made.id.rpartition("/")[2], tuple(STATUSES))
        if made.bound and made.attack is None:
            raise ValueError(
                f"{made.id}: expected {argument('attack', '...')}, problems on which the bound can"
                " be attacked or the reason why there are none, got none"
            )
    module, ids = function.__module__, {made.id for made in stated.claims}
    # `importlib.reload` gives the module a new spec. A notebook has none, and its cells run again.
    spec = inspect.unwrap(function).__globals__.get("__spec__")
    if _SPECS.get(module) is not spec:
        _STATED[module] = []
    before = _STATED.get(module, [])
    _STATED[module] = [*(c for c in before if spec or c.id not in ids), *stated.claims]
    _SPECS[module] = spec
    return stated


def of_room(room: str) -> tuple[Claim, ...]:
    """Imports a module and returns the claims that it states.

    Args:
      room: The module's name, such as one of `rooms`.

    Returns:
      The claims, in their order in the module.
    """
    importlib.import_module(room)
    return tuple(_STATED.get(room, ()))


@functools.cache
def rooms() -> tuple[str, ...]:
    """Finds the modules that state claims: `claims` and `*_claims` in the folders of `theory`.

    Returns:
      Their names, in the order of the papers' statements to which their first claims answer.
    """
    folder = Path(__file__).parent
    names = [
        f"{folder.name}.{file.parent.name}.{file.stem}" for file in folder.glob("*/*claims.py")
    ]
    return tuple(sorted(names, key=lambda room: (coverage.position(of_room(room)[0]), room)))


def in_file(path: str | Path) -> ModuleType:
    """Runs a Python file as a module, to check the claims that it states.

    Args:
      path: The file. Like a script, it can import other files of its folder.

    Returns:
      The module.

    Raises:
      ValueError: If running the file raises an error, or it states no claim. The message contains
        the path.
    """
    path = Path(path).resolve()
    name = f"claims_in_{path.stem}"
    sys.path.insert(0, str(path.parent))
    _STATED.pop(name, None)
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("expected a Python file, in .py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # It may raise any exception.
    except Exception as error:
        sys.path.remove(str(path.parent))
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    of_module(module)
    return module


def of_module(module: ModuleType) -> tuple[Claim, ...]:
    """Returns the claims that an imported module or package states.

    Args:
      module: The module. For a package, the claims of its imported modules are included.

    Returns:
      The claims, in the order in which they were stated.

    Raises:
      ValueError: If it states none.
    """
    name = module.__name__
    homes = [room for room in _STATED if f"{room}.".startswith(f"{name}.")]
    if not homes:
        raise ValueError(f"{getattr(module, '__file__', None) or name} states no claim")
    return tuple(c for room in homes for c in _STATED[room])


def compiled(formula: Callable[..., Any], *given: Any, **options: Any) -> float:
    """Evaluates a closed form in one compiled program.

    Otherwise, JAX compiles a closed form operation by operation, which takes longer.

    Args:
      formula: The closed form, such as `deep_linear.scratch_risk`.
      *given: Its arguments, which become arguments of the program. Their values are not checked.
      **options: Further arguments, which become constants of the program.

    Returns:
      The number.

    >>> compiled(lambda x, power: x**power, 3.0, power=2)
    9.0
    """
    import jax

    return float(jax.jit(functools.partial(formula, **options))(*given))


def generator(key: "Array") -> np.random.Generator:
    """Makes a NumPy random generator from a JAX key.

    It is for simulations that would use JAX only for random numbers.

    Args:
      key: Random key.

    Returns:
      The generator.
    """
    import jax

    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def once(draw: Callable[["Array", bool], Any]) -> Callable[["Array", bool], Any]:
    """Caches the last result of a draw that several simulators share.

    Claims that measure the same draws in several ways, with one name for `draws`, draw once.

    Args:
      draw: Takes a key and a flag that reduces the work to a tenth.

    Returns:
      The same function. A repeated call returns the cached result.

    >>> import jax
    >>> drawn = once(lambda key, quick: [key])
    >>> drawn(jax.random.key(0), True) is drawn(jax.random.key(0), True)
    True
    >>> drawn(jax.random.key(1), True) is drawn(jax.random.key(0), True)
    False
    """
    last: list[Any] = [None, None]

    @functools.wraps(draw)
    def remembering(key: "Array", quick: bool) -> Any:
        import jax

        about = np.asarray(jax.random.key_data(key)).tobytes(), quick
        if last[0] != about:
            last[:] = about, draw(key, quick)
        return last[1]

    return remembering


@contextlib.contextmanager
def optimised() -> Iterator[None]:
    """Enables JAX's compiler optimisations in a `with` block or in a decorated function.

    It is for loops of thousands of steps, whose run time exceeds their compile time. Elsewhere, the
    command disables optimisations to compile quickly.

    Yields:
      Nothing.
    """
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    try:
        jax.config.update(name, False)
        yield
    finally:
        jax.config.update(name, before)


def measured(compute: Callable[[], Any], tolerance: float = ROUNDING) -> Simulate:
    """Makes a simulator of a deterministic computation, which ignores the key and `quick`.

    Args:
      compute: The computation.
      tolerance: The largest rounding error of its result.

    Returns:
      The simulator.
    """
    return lambda key, quick: Estimate(float(compute()), tolerance=tolerance)


@dataclass(frozen=True)
class Power:
    """The power of a comparison, for errors that are Gaussian or within the tolerance.

    An equality is assumed to be true. The error of a misprint and the slack of a bound are assumed
    to be as in the simulation.

    Attributes:
      effect: The change of the prediction that the claim must detect. For a misprint it is the
        error of the printed value. A bound is tightened by this amount.
      sees: The smallest change that is overlooked with a probability of at most `MISS`.
      false_alarm: The probability that a true claim does not hold. For a bound, it is the
        probability where the bound is attained.
      miss: The probability that the claim still holds if its prediction is changed by `effect`. For
        a misprint, it is the probability that the printed value holds.
      slack: The distance between simulation and bound, for a bound that is expected to hold; 0 for
        other claims.
    """

    effect: float
    sees: float
    false_alarm: float
    miss: float
    slack: float = 0.0

    @property
    def enough(self) -> bool:
        """Whether the effect is overlooked with a probability of at most `MISS`."""
        return self.miss <= MISS


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking one claim.

    Attributes:
      claim: The claim.
      predicted: The value of the closed form.
      simulated: The value of the simulation.
      stderr: Its standard error. None for a deterministic simulation.
      score: (simulated - predicted) in standard errors, or in tolerances.
      score_name: Which of the two: "z" or "err/tol".
      holds: Whether the claim holds.
      power: The power of the comparison.
      seconds: Its duration.
      unnoticed: Names of wrong predictions (see `mutants`) for which the claim would also hold.
    """

    claim: Claim
    predicted: float
    simulated: float
    stderr: float | None
    score: float
    score_name: str
    holds: bool
    power: Power
    seconds: float
    unnoticed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the claim has the expected verdict."""
        return self.holds == self.claim.expected


def check(claim: Claim, *, seed: int = 0, quick: bool = False) -> Verdict:
    """Evaluates both sides of a claim in float64 and compares them.

    Args:
      claim: The claim.
      seed: Seed of the simulation. The simulator's key depends only on the seed and on the name of
        the claim's draws, not on the other claims that are checked.
      quick: Whether the simulator does only about a tenth of the work.

    Returns:
      The verdict.
    """
    import jax

    start = time.perf_counter()
    with jax.enable_x64(True):
        predicted = float(claim.predict())
        name = claim.draws or claim.id.rpartition("/")[0]
        estimate = _simulated(claim.simulate, name, seed, quick)
        wrong = mutants(claim, predicted)
    return judge(claim, predicted, estimate, time.perf_counter() - start, wrong)


# Claims of one statement are mostly consecutive, so a small cache is sufficient.
@functools.lru_cache(maxsize=32)
def _simulated(simulate: Simulate, draws: str, seed: int, quick: bool) -> Estimate:
    """Simulates a claim. Claims with the same simulator and draws share the result."""
    return simulate(claim_key(draws, seed), quick)


def _score(predicted: float, estimate: Estimate) -> float:
    """Computes (simulated - predicted) in standard errors, or in tolerances."""
    difference = estimate.value - predicted
    unit = estimate.stderr if estimate.stderr is not None else estimate.tolerance
    # Without an error only equality agrees. inf * 0 would be NaN.
    return difference / unit if unit else difference * math.inf if difference else 0.0


def _holds(relation: Relation, score: float, estimate: Estimate) -> bool:
    excess = {"=": abs(score), "<=": score, ">=": -score}[relation]
    return excess <= (Z_MAX if estimate.stderr is not None else 1.0)  # NaN does not hold


def judge(
    claim: Claim,
    predicted: float,
    estimate: Estimate,
    seconds: float = 0.0,
    wrong: Mapping[str, float] | None = None,
) -> Verdict:
    """Compares the two sides of a claim.

    Args:
      claim: The claim.
      predicted: The value of its formula.
      estimate: The outcome of its simulation.
      seconds: The duration of both.
      wrong: Wrong predictions by name (see `mutants`), if any.

    Returns:
      The verdict.
    """
    score = _score(predicted, estimate)
    return Verdict(
        claim=claim,
        predicted=predicted,
        simulated=estimate.value,
        stderr=estimate.stderr,
        score=score,
        score_name="z" if estimate.stderr is not None else "err/tol",
        holds=_holds(claim.relation, score, estimate),
        power=power(claim, predicted, estimate),
        seconds=seconds,
        unnoticed=tuple(
            name
            for name, value in (wrong or {}).items()
            if _holds(claim.relation, _score(value, estimate), estimate)
        ),
    )


def _effect(claim: Claim, predicted: float) -> float:
    """Returns the change of the prediction that a claim must detect if it should hold."""
    return EFFECT * (abs(predicted) or 1.0) if claim.effect is None else claim.effect


def mutants(claim: Claim, predicted: float) -> dict[str, float]:
    """Makes wrong predictions from the prediction of a claim that should hold.

    An equality is moved by its effect in both directions, and a bound is tightened by it. Each term
    in `claim.without` is omitted in turn.

    Args:
      claim: The claim.
      predicted: Its prediction.

    Returns:
      Wrong predictions by name. A misprint gets none, because it is already wrong.
    """
    if not claim.expected:
        return {}
    effect = _effect(claim, predicted)
    moved = {
        "=": {"raised": predicted + effect, "lowered": predicted - effect},
        "<=": {"tightened": predicted - effect},
        ">=": {"tightened": predicted + effect},
    }[claim.relation]
    left_out = {f"without {term}": float(rest()) for term, rest in claim.without.items()}
    return {**moved, **left_out}


def power(claim: Claim, predicted: float, estimate: Estimate) -> Power:
    """Computes the power of the comparison of a claim with an estimate.

    Args:
      claim: The claim. Its relation, its effect and its expected verdict are used.
      predicted: Its prediction.
      estimate: Its simulation. Its error is used, and also its value unless the claim is an
        equality.

    Returns:
      The effect, the smallest detected change, the two probabilities of error, and the slack.
    """
    two_sided, normal = claim.relation == "=", NormalDist()
    inside = {"=": 0.0, "<=": predicted - estimate.value, ">=": estimate.value - predicted}
    room = float(inside[claim.relation])
    if claim.expected:
        effect, slack = _effect(claim, predicted), room
    else:
        effect, slack = abs(estimate.value - predicted) if two_sided else -room, 0.0
    if estimate.stderr is None:
        # If the true value is unknown, both it and the simulated value may be off by the tolerance.
        unknown = 2 if claim.expected and two_sided else 1
        sees = slack + unknown * float(estimate.tolerance or 0.0)
        return Power(effect, sees, 0.0, float(not effect > sees), slack)
    stderr = float(estimate.stderr)
    sees = slack + (Z_MAX + normal.inv_cdf(1 - MISS)) * stderr
    beyond = effect - slack
    ratio = beyond / stderr if stderr else math.copysign(math.inf, beyond)
    miss = normal.cdf(Z_MAX - ratio) - (normal.cdf(-Z_MAX - ratio) if two_sided else 0.0)
    return Power(effect, sees, (1 + two_sided) * normal.cdf(-Z_MAX), miss, slack)


def claim_key(name: str, seed: int) -> "Array":
    """Makes a key from a seed and the bytes of a name, stable across processes and versions.

    Args:
      name: A name, such as the `draws` of a claim.
      seed: The seed.

    Returns:
      A typed key, a scalar.
    """
    import jax

    key = jax.random.key(seed)
    for byte in name.encode():
        # Python's `hash` of a string would differ between processes.
        key = jax.random.fold_in(key, byte)
    return key


def all_claims() -> tuple[Claim, ...]:
    """Returns every claim of `theory`, in the order of the papers' statements.

    Returns:
      The claims.

    Raises:
      ValueError: If two claims share an id.
    """
    return _distinct(c for room in rooms() for c in of_room(room))


def _distinct(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Checks that ids are unique."""
    claims = tuple(claims)
    counts = Counter(c.id for c in claims)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"claims share an id: {repeated}")
    return claims


@functools.cache
def _added() -> tuple[ModuleType, ...]:
    """Imports the modules that other packages declare as `sail_jax.claims`."""
    return tuple(map(extensions.loaded, extensions.declared("claims").values()))


def select(patterns: str = "*", of: ModuleType | None = None) -> list[Claim]:
    """Selects claims by globs of their ids.

    Args:
      patterns: Globs such as "features-are-fate/T3.9*", separated by commas.
      of: A module that states claims. None selects among the claims of `theory` and of installed
        packages with an entry point in the group `sail_jax.claims`.

    Returns:
      The claims, in the order of the papers' statements; others last.

    Raises:
      ValueError: If a glob matches no claim, claims share an id, or the module of a package cannot
        be imported.
    """
    modules = _added() if of is None else (of,)
    papers = all_claims() if of is None else ()
    claims = _distinct([*papers, *(c for module in modules for c in of_module(module))])
    selected = set[str]()
    for pattern in patterns.split(","):
        matching = {c.id for c in claims if fnmatch.fnmatchcase(c.id, pattern.strip())}
        if not matching:
            raise ValueError(f"no claim matches {pattern!r}{_near(pattern.strip(), claims)}")
        selected |= matching
    return [c for c in claims if c.id in selected]


def _near(pattern: str, claims: Iterable[Claim]) -> str:
    """Suggests the names nearest to a glob that matches no claim, at its first part that fails."""
    ids, parts = [c.id.split("/") for c in claims], pattern.split("/")
    for k in range(1, 4):
        known = dict.fromkeys("/".join(one[:k]) for one in ids)
        ids = [one for one in ids if fnmatch.fnmatchcase(one[k - 1], "/".join(parts[k - 1 : k]))]
        if not ids:
            return nearest("/".join(parts[:k]), known)
    return ""


def named(name: str) -> Claim:
    """Looks up a claim, for a task of a cluster, which names it by its id.

    Args:
      name: The id.

    Returns:
      The claim.
    """
    imported = (claim for stated in _STATED.values() for claim in stated if claim.id == name)
    return next(imported, None) or next(claim for claim in select(name) if claim.id == name)


def table(
    patterns: str | ModuleType = "*", *, check: bool = False, seed: int = 0, quick: bool = False
) -> "pd.DataFrame":
    """Lists claims as a table, and checks them with `check=True`.

    Args:
      patterns: Globs of ids, as in `select`; or a module, for all claims that it states.
      check: Whether both sides are evaluated. This takes some minutes for all claims.
      seed: Seed of the simulations.
      quick: Whether simulators do only about a tenth of the work.

    Returns:
      A data frame with a row for each claim: its statement, source, status and relation. With
      `check` also the predicted and the simulated value, the standard error, the score, whether
      the claim holds, and whether that is expected.

    Raises:
      ValueError: If no claim matches, or the module states none.

    >>> table("features-are-fate/T3.7/*")["relation"].unique().tolist()
    ['=']
    """
    import pandas as pd

    chosen = select(patterns) if isinstance(patterns, str) else select("*", patterns)
    about = ("statement", "source", "status", "relation")
    rows = {one.id: {name: getattr(one, name) for name in about} for one in chosen}
    if check:
        found = ("predicted", "simulated", "stderr", "score", "score_name", "holds")
        for one in chosen:
            verdict = _check(one, seed=seed, quick=quick)
            rows[one.id] |= {name: getattr(verdict, name) for name in found}
            rows[one.id]["expected"] = one.expected
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("claim")


_check = check
