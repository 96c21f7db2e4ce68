"""The order of rooms in docs/architecture.md, compared with the imports of all three packages."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/architecture.md").read_text(), re.M)
PACKAGES = ("sail_jax", "theory", "experiments")
OUTER = ("sail_jax", "sail_jax.checkpoint", "experiments")  # modules lie in their rooms alone


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a block and of the blocks inside, a tenth of what `ast.walk` visits."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, block, ()))


def imported(source: str, known: set[str]) -> Iterator[str]:
    """Which of the known modules are imported anywhere: in functions, for types alone, too."""
    for node in statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else str(node.module)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    files = modules()
    return {
        name: set(imported(file.read_text(), set(files))) - {name} for name, file in files.items()
    }


def room(module: str) -> str:
    """The narrowest room that a module is in."""
    name = module
    while name not in ROOMS:
        name = name.rpartition(".")[0]
    assert name == module or name not in OUTER, f"{module}: no room"
    return name


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, none if there is no such circle."""
    left = {name: targets & graph.keys() for name, targets in graph.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    if not left:
        return []
    walk = [min(left)]
    while (step := min(left[walk[-1]] & left.keys())) not in walk:
        walk.append(step)
    return walk[walk.index(step) :]


def test_rooms_are_listed_once():
    assert len(ROOMS) == len(set(ROOMS)) > 20
    assert set(ROOMS) <= set(modules())


@pytest.mark.slow
def test_imports_point_up_the_list(graph):
    place = {module: ROOMS.index(room(module)) for module in graph}
    wrong = [
        f"{module} imports {target}, from a room below its own"
        for module, targets in graph.items()
        for target in targets
        if place[target] > place[module]
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles(package, graph):
    own = {name: targets for name, targets in graph.items() if name.split(".")[0] == package}
    assert circle(own) == []


def studies_between(graph: dict[str, set[str]]) -> list[str]:
    """Imports from the folder of one study to that of another."""
    own = {
        module: module.split(".")[2]
        for module in graph
        if module.startswith("experiments.studies.") and module.split(".")[2] != "shared"
    }
    return [
        f"{module} imports {target}"
        for module in sorted(own)
        for target in sorted(graph[module] & own.keys())
        if own[target] != own[module]
    ]


@pytest.mark.slow
def test_no_study_imports_another(graph):
    """Code shared by two studies is in `experiments.studies.shared`, or further up the list."""
    assert studies_between(graph) == []


def test_an_import_between_studies_would_be_found():
    a, b, shared = (f"experiments.studies.{name}.run" for name in ("a", "b", "shared"))
    assert studies_between({a: {shared}, b: {shared}, shared: set()}) == []
    assert studies_between({a: {b}, b: set()}) == [f"{a} imports {b}"]


def test_a_circle_would_be_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    known = {"p.q", "p"}
    late = "def f():\n    from p import q\n\nif TYPE_CHECKING:\n    import p\n"
    assert set(imported(late, known)) == known


BATCHED = re.compile(
    r"\b(jnp|jax\.numpy)\.linalg\.(?!norm\b)"
    r"|\b(jnp|jax\.numpy)\.linalg\.norm\([^()]*, (ord=)?(2|.nuc.)\)"
    r"|\blax\.linalg\b|\bjax\.scipy\.linalg\b(?! import block_diag)"
    r"|\brandom\.(orthogonal|multivariate_normal)\b|\binitializers\.orthogonal\b"
)


@pytest.mark.slow
def test_matrices_are_decomposed_in_one_room():
    """`sail_jax.linalg` says why: LAPACK must not get a batch."""
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for name, file in modules().items()
        if name != "sail_jax.linalg"
        for match in BATCHED.finditer(file.read_text())
    ]
    assert found == []


INTERNALS = "sail_jax.jax_internals"
PRIVATE = re.compile(r"\bjax\.(_src|extend|interpreters)\b|from jax import .*\b(_src|extend)\b")


def reads_internals(source: str) -> list[str]:
    """Lines that name JAX's internals, or read the parameters of an equation."""
    lines = source.splitlines()
    found = [line for line in lines if PRIVATE.search(line)]
    if ".params" not in source:  # most modules: nothing to parse
        return found
    named = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    if INTERNALS in set(imported(source, {INTERNALS})) or "eqns" in {node.attr for node in named}:
        found += [lines[node.lineno - 1] for node in named if node.attr == "params"]
    return found


@pytest.mark.slow
def test_one_module_reads_the_internals_of_jax():
    wrong = [
        f"{name}: {line}"
        for name, file in modules().items()
        for line in reads_internals(file.read_text())
        if name != INTERNALS
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jax.extend.core",
        "from jax.interpreters import mlir",
        "from jax import lax, extend",
        "sizes = [eqn.params['axes'] for eqn in jaxpr.eqns]",
        "from sail_jax.jax_internals import operation\naxes = eqn.params.get('axes')",
        "from sail_jax import jax_internals\nparams = eqn.params",
    ],
)
def test_a_reader_of_internals_would_be_found(line):
    assert reads_internals(f"import jax\n\n{line}\n") == [line.split("\n")[-1]]


def test_the_library_does_not_speak_of_flags():
    """Messages contain arguments like `resume=True`; the command line prints `--resume`."""
    flag = re.compile(r"(^|[\s(';])--[a-z]")
    for file in sorted((ROOT / "sail_jax").rglob("*.py")):
        if "cli" in file.relative_to(ROOT).parts:
            continue
        text = file.read_text()
        if "--" not in text:
            continue
        tree = ast.parse(text)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                told = id(node) not in documentation and flag.search(node.value)
                assert not told, f"{file}:{node.lineno}: {node.value}"
