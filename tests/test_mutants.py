"""The list of `.ci/mutants` fits the tree; the errors themselves are applied by that program."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def program(name: str = "mutants"):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = program().listed()


@pytest.mark.slow
def test_every_error_can_be_made():
    assert len(MUTANTS) >= 64
    assert len({(m.room, m.name) for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        ast.parse(mutant.source(ROOT))
        assert mutant.tests or mutant.equivalent
        missing = [test for test in mutant.tests if not (ROOT / test.split("::")[0]).is_file()]
        assert not missing, mutant.name


@pytest.mark.parametrize("old", ["as ", "nowhere to be found"])
def test_old_text_that_is_not_there_once_is_refused(old):
    with pytest.raises(ValueError, match=r"expected once in .*transforms\.py"):
        MUTANTS[0]._replace(file="sail_jax/merging/transforms.py", old=old).source(ROOT)


@pytest.mark.slow
def test_an_error_is_found_if_a_test_fails_that_passes_without_it(tmp_path, monkeypatch, capsys):
    """In a tree of one function, with a test that notices, one that does not and one that fails."""
    module = program("mutants_of_a_small_tree")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q -n 2'\n",
        "twice.py": "def twice(x):\n    return x + x\n",
        "test_three.py": "from twice import twice\n\ndef test_it():\n    assert twice(3) == 6\n",
        "test_two.py": "from twice import twice\n\ndef test_it():\n    assert twice(2) == 4\n",
        "test_wrong.py": "def test_it():\n    assert False\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for test, found in (("test_three.py", 1), ("test_two.py", 0), ("test_wrong.py", 0)):
        mutant = module.Mutant("room", test, "twice.py", "x + x", "x * x", (test,))
        monkeypatch.setattr(module, "listed", lambda mutant=mutant: [mutant])
        assert module.main([]) == 1 - found
        assert f"{found} of 1 found, 0 equivalent" in capsys.readouterr().out
