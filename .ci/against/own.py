"""Modules of other packages, permuted, grown, and run by their own code.

Each case is a small module of a package with random weights. Its spec is inferred from one batch,
and must be the same for another batch and size. All comparisons are at the other batch, and use
`certificate`:

- the traced function and the module itself;
- the module before and after its parameters are written back with all spaces permuted at random;
- the module before and after each space alone is doubled by `lemon`, with the module as it was;
- the module, and a module of twice the widths by its own constructor with the grown parameters. If
  the constructor has no argument for widths, all spaces are doubled that can be doubled alone.

The difference is the largest in relation to its tolerance. A growth with a reported loss is not
compared. The last column counts the spaces; those doubled alone; those whose size the code of the
module states, so that it fails or divides its parameters otherwise; and those with a loss, with the
reason. It counts the parameter axes in spaces, among axes with more than one unit,
and lists why the other axes are fixed. If a module computes with a size, the numbers are listed.

The last cases run code of a page, which prints True.

Run alone, `python .ci/against/own.py [CASE ...]` prints a line for each case, and more about given
cases.
"""

import collections
import contextlib
import io
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Outcome
from modules import MODULES, Arrays, Own, Runs
from spaces import axes_listed

from sail_jax import certificate, change_basis, growth, spec_of
from sail_jax.basis.certificate import Certificate
from sail_jax.basis.families import Family
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.tracing import Inferred
from sail_jax.tracing.multiples import Multiples
from sail_jax.trees import leaf_paths


class Grown(NamedTuple):
    """What came of doubling each space alone.

    Attributes:
      measured: Comparisons of outputs, by space.
      stated: Spaces whose size the code of the module states.
      lost: Reasons why the others cannot be doubled, by space.
    """

    measured: dict[str, Certificate]
    stated: list[str]
    lost: dict[str, str]


def compare(name: str, _folder: Path) -> Outcome:
    """Runs a case."""
    own = MODULES[name]
    module, given, other = own.make(1), own.inputs(0), own.inputs(1)
    found = spec_of(module.apply, module.params, *given)
    if spec_of(module.apply, module.params, *other).spec != found.spec:
        raise RuntimeError("inputs of another shape give another spec")
    measured = {"traced": _traced(module, other)} | _permuted(module, found, other)
    alone = _doubled(module, found, other)
    together, more = _together(own, module, found, alone)
    measured |= alone.measured | together
    spaces = len(alone.measured) + len(alone.stated) + len(alone.lost)
    note = f"{spaces} spaces, {len(alone.measured)} doubled"
    if alone.stated:
        note += f", {len(alone.stated)} stated by the code"
    for why, count in collections.Counter(map(_short, alone.lost.values())).items():
        note += f", {count} with a loss ({why})"
    note += more
    worst = max(measured.values(), key=_excess)
    apart = [place for place, one in measured.items() if not one.preserved]
    note = f"{', '.join(apart)}; " * bool(apart) + note
    note += f"; {axes_listed(found, module.params)}"
    if found.unknown:
        note += f"; no rule for {', '.join(found.unknown)}"
    return Outcome(worst.absolute, worst.scale, worst.tolerance, note)


def _together(
    own: Own, module: Runs, found: Inferred, alone: Grown
) -> tuple[dict[str, Certificate], str]:
    """Doubles spaces together; returns the comparison, if nothing is lost, and a note."""
    wide = own.make(2) if own.wider else module
    after = spec_of(wide.apply, wide.params, *own.inputs(0))
    to, note = _sizes(found, after), ""
    if own.wider and _shapes(wide.params) != _grown_shapes(module, found, to):
        note = "; twice the widths need axes in no space"
        wide, after, to = module, found, {}
    to = to or {name: 2 * found.spec.space(name).size for name in alone.measured}
    if not to:
        return {}, note
    large, grown = growth.grow(module.params, {}, to, "lemon", rules=found.spec, untie=False)
    note += f"; {len(to)} doubled together"
    if grown.report.lost:
        count = sum(bool(row.lost) for row in grown.report.spaces)
        return {}, f"{note}, {count} of them with a loss"
    result = _larger(module, wide, large, own.inputs(1))
    numbers = _changed(found.multiples, after.multiples)
    if numbers and not result.preserved:
        off = f"off by {result.absolute:.1g} because the code computes with {numbers}"
        return {}, f"{note}, {off}"
    return {"all": result}, note


def _excess(one: Certificate) -> float:
    return one.absolute / one.tolerance if one.tolerance else float(one.absolute > 0)


def _short(why: str) -> str:
    """A reason without names of spaces and leaves, and without advice."""
    return re.sub(r".*'[^']*': |[;:] (untie|give) .*", "", why)


def _inner(found: Inferred) -> list[Any]:
    """The spaces that may change."""
    return [s for s in found.spec.spaces if "outer" not in s.nonlinearity.split()]


def _sizes(found: Inferred, after: Inferred) -> dict[str, int]:
    """The spaces that have another size in a larger module, and this size."""
    larger = {space.name: space.size for space in after.spec.spaces}
    sizes = {space.name: larger.get(space.name, space.size) for space in _inner(found)}
    return {name: n for name, n in sizes.items() if n != found.spec.space(name).size}


def _shapes(params: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(params)]


def _grown_shapes(module: Runs, found: Inferred, to: dict[str, int]) -> list[tuple[int, ...]]:
    """The shapes of the parameters after growth."""
    plan = growth.plan(module.params, {}, to, "lemon", rules=found.spec, untie=False)
    return [plan.leaves[path].shape for path in leaf_paths(module.params)]


def _traced(module: Runs, inputs: Arrays) -> Certificate:
    """Compares the traced function with the module."""

    def either(pair: tuple[bool, Any], inputs: Arrays) -> Any:
        own, params = pair
        return module.run(params, inputs) if own else jax.jit(module.apply)(params, *inputs)

    return certificate(either, (True, module.params), (False, module.params), inputs)


def _permuted(module: Runs, found: Inferred, inputs: Arrays) -> dict[str, Certificate]:
    """Permutes all spaces; if the outputs change, also each, to find the wrong ones."""
    rng = np.random.default_rng(0)
    maps: dict[str, SpaceMap] = {}
    for space in _inner(found):
        order = rng.permutation(space.size)
        # Half of all permutations of two units change nothing.
        order = np.roll(order, 1) if (order == np.arange(space.size)).all() else order
        maps[space.name] = select(order, space.size, family=Family.PERMUTATION)
    measured = {"all permuted": _moved(module, found, maps, inputs)}
    if not measured["all permuted"].preserved:
        for name, one in maps.items():
            measured[f"{name} permuted"] = _moved(module, found, {name: one}, inputs)
    return measured


def _moved(module: Runs, found: Inferred, maps: dict[str, SpaceMap], inputs: Arrays) -> Certificate:
    """Compares a module before and after a change of basis."""
    moved = change_basis(module.params, found.spec, maps)
    return certificate(module.run, module.params, moved, inputs)


def _doubled(module: Runs, found: Inferred, inputs: Arrays) -> Grown:
    """Doubles each space alone."""
    result = Grown({}, [], {})
    for space in _inner(found):
        to = {space.name: 2 * space.size}
        try:
            large, grown = growth.grow(module.params, {}, to, "lemon", rules=found.spec)
        except ValueError as error:
            result.lost[space.name] = str(error)
            continue
        if grown.report.lost:
            result.lost[space.name] = grown.report.lost
            continue
        try:
            one = certificate(module.resized, module.params, large, inputs)
        # Whatever the code of a module raises, its shapes do not fit the size that it states.
        except Exception:
            result.stated.append(space.name)
            continue
        if one.preserved or _follows(module, large, inputs, to):
            result.measured[space.name] = one
        else:
            result.stated.append(space.name)
    return result


def _follows(module: Runs, large: Any, inputs: Arrays, to: dict[str, int]) -> bool:
    """Checks whether a space has the new size in the code of the module, too."""
    spaces = spec_of(module.apply, large, *inputs).spec.spaces
    sizes = {space.name: space.size for space in spaces}
    return all(sizes.get(name) == size for name, size in to.items())


def _larger(module: Runs, wide: Runs, large: Any, inputs: Arrays) -> Certificate:
    """Writes grown parameters into a module of the new size, and compares it with the old one."""
    run = module.resized if wide is module else wide.run
    large = jax.tree.unflatten(jax.tree.structure(wide.params), jax.tree.leaves(large))

    def either(pair: tuple[bool, Any], inputs: Arrays) -> Any:
        new, params = pair
        return (run if new else module.run)(params, inputs)

    return certificate(either, (False, module.params), (True, large), inputs)


def _changed(old: Multiples, new: Multiples) -> str:
    """The factors in a forward pass that change with its size."""
    pairs = zip(old.numbers, new.numbers, strict=False)
    changed = {f"{a.value:.3g} or {b.value:.3g}" for a, b in pairs if a.value != b.value}
    return ", ".join(sorted(changed))


_PAGE = Path(__file__).parents[2] / "docs/how_to/own_networks.md"


def page(package: str, _folder: Path) -> Outcome:
    """Runs the code of the page for a package, which prints whether a larger module is the same."""
    section = _PAGE.read_text().split("\n## From your module to a larger module\n")[1]
    blocks = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    x = jax.random.normal(jax.random.key(1), (16, 3))
    (code,) = [text for text in blocks if ">>>" not in text and package in text]
    known = {"jax": jax, "jnp": jnp, "spec_of": spec_of, "growth": growth}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, known | {"x": x, "sizes": {"hidden": 16}})
    return Outcome(float(printed.getvalue() != "True\n"), 1, 0, "")


CASES = [Case(name, own.kind, partial(compare, name)) for name, own in MODULES.items()]
CASES += [
    Case(f"the page's {package}", "code that does not print True", partial(page, package))
    for package in ("equinox", "torch")
]


def main(wanted: list[str]) -> None:
    """Prints a line for each case."""
    warnings.filterwarnings("ignore")
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                got = case.run(Path(folder))
                line = f"{got.difference:.1e} of {got.tolerance:.1e}, {got.note}"
                line = ("" if got.difference <= got.tolerance else "APART ") + line
            except Exception as error:
                if wanted:
                    traceback.print_exc()
                line = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        print(f"{case.name}: {line} [{time.process_time() - start:.1f} s]", flush=True)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
