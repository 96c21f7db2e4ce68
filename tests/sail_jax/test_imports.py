"""The modules that are imported with the packages."""

import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = ("matplotlib", "xarray", "flax", "optax", "experiments")
THEORY = ("deep_linear", "student_teacher", "two_layer", "linearity", "initialisation", "merging")
FORBIDDEN = {
    "sail_jax": (*STUDIES, "scipy", "theory", "huggingface_hub"),
    "sail_jax.distances": ("scipy",),  # which a matching needs, when there is one
    # a merge that starts late is late
    "sail_jax.checkpoint.operations.merging": tuple(
        f"sail_jax.{name}" for name in ("align", "architectures", "growth", "probe")
    ),
    "sail_jax.checkpoint": ("huggingface_hub",),  # which the name of a model needs
    "sail_jax.cli.merge_report": ("matplotlib",),
    "sail_jax.interop.torch": ("torch", "torchax"),
    **{f"theory.{name}": STUDIES for name in THEORY},
}


@pytest.mark.slow
def test_imports_are_light():
    """One after another, so that the first importer of a module is reported."""
    code = (
        "import importlib, jax, sys; before = set(sys.modules)\n"
        f"for package, forbidden in {FORBIDDEN}.items():\n"
        "    importlib.import_module(package)\n"
        "    for name in set(forbidden) & set(sys.modules) - before: print(package, name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize("package", ["sail_jax", "sail_jax.checkpoint"])
def test_what_is_imported_late_is_there(package):
    module, names = importlib.import_module(package), {}
    assert {*module.__all__} <= {*dir(module)}
    exec(f"from {package} import *", names)
    assert {*module.__all__} <= {*names}
    assert names["merge_checkpoints"].__name__ == "merge_checkpoints"
    assert package != "sail_jax" or names["probe"].__name__ == "sail_jax.probe"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        getattr(module, "nothing")  # noqa: B009


def test_rooms_are_imported_late_and_listed():
    code = (
        "import pkgutil, theory, experiments, sys\n"
        "assert 'jax' not in sys.modules\n"
        "for package in (theory, experiments):\n"
        "    rooms = {room.name for room in pkgutil.iter_modules(package.__path__)}\n"
        "    functions = {*package.__all__} - rooms\n"
        "    assert rooms <= {*package.__all__} <= {*dir(package)}, rooms\n"
        "    lab = {'GridResult', 'Result', 'list', 'run', 'run_grid'}\n"
        "    assert functions == (lab if package is experiments else set())\n"
        "print(theory.coverage.__name__, experiments.lab.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "theory.coverage experiments.lab\n", found.stderr


def test_dir_lists_what_is_for_users():
    """In all packages that hand on names, and in modules that are handed on themselves."""
    import experiments
    import sail_jax
    import theory

    rooms = [sail_jax.transforms, sail_jax.reductions, sail_jax.lora]
    for package in (sail_jax, theory, experiments):
        for file in Path(package.__path__[0]).rglob("__init__.py"):
            if "__all__" in file.read_text():
                inner = file.parent.relative_to(package.__path__[0]).parts
                rooms.append(importlib.import_module(".".join((package.__name__, *inner))))
    assert len(rooms) > 20
    for room in rooms:
        shown = [name for name in dir(room) if not name.startswith("__")]
        assert sorted(shown) == sorted(room.__all__), room.__name__
        others = {"jax", "jnp", "np", "Any", "TYPE_CHECKING", "lazily", "listed", "Callable"}
        assert not others & {*shown}, room.__name__


def test_type_checkers_read_every_file_of_methods():
    """They do not run the loop that finds the methods of all others."""
    folder = Path(__file__).parents[2] / "sail_jax" / "methods"
    starred = re.findall(
        r"from sail_jax.methods.(\w+) import \*", (folder / "__init__.py").read_text()
    )
    assert starred == sorted(file.stem for file in folder.glob("[!_]*.py"))


def test_what_the_pages_list_is_in_the_package():
    import sail_jax

    pages = (Path(__file__).parents[2] / "docs" / "how_to").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    tables = re.findall(r"^\| in `sail_jax` \|.*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    rows = [row.split("|")[1] for table in tables for row in table.splitlines()]
    assert len(tables) == 2
    assert len(rows) > 12
    for row in rows:
        here: object = sail_jax
        for name in re.findall(r"`([\w.*]+)`", row):
            *outer, last = name.split(".")
            for part in outer:  # `methods.ties`, `pcb`: the second is one of methods, too
                here = getattr(sail_jax, part)
            assert fnmatch.filter(dir(here), last), name
            assert all(getattr(here, found) for found in fnmatch.filter(dir(here), last))


def test_types_and_version_are_there():
    from importlib.metadata import version

    import sail_jax
    import theory

    assert sail_jax.__version__ == version("sail-jax")
    for package in (sail_jax, theory):
        assert (Path(str(package.__file__)).parent / "py.typed").is_file()
