"""The pages "add a ..." are followed in a temporary folder; their code must be sufficient."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.compile(r"^<!-- (add to|change|file:) (\S+) -->\n```\w+\n(.*?)^```", re.M | re.S)
UNMARKED = re.compile(r"^\n```python\n(.*?)^```", re.M | re.S)


def linked(source: Path, folder: Path) -> None:
    """Makes a folder of links to all that another one holds."""
    folder.unlink(missing_ok=True)
    folder.mkdir()
    for entry in source.iterdir():
        if entry.name != "__pycache__":  # where the changed files would store their bytecode
            (folder / entry.name).symlink_to(entry)


def followed(page: str, folder: Path) -> Path:
    """The repository as links, but for the files to which a page adds: these are copies, and new.

    A block to add is appended to the file that is named above it. A change is a diff, of
    lines that occur once in the file.
    """
    blocks = BLOCKS.findall((ROOT / "docs" / page).read_text())
    assert blocks, page
    linked(ROOT, here := folder / "repository")
    for how, name, code in blocks:
        file = here / name
        for part in reversed(file.relative_to(here).parents[:-1]):
            if (here / part).is_symlink():
                linked(ROOT / part, here / part)
        before = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        file.parent.mkdir(exist_ok=True)
        added = f"{before}\n\n{code}" if before else code
        file.write_text(changed(before, code) if how == "change" else added)
    return here


def changed(source: str, diff: str) -> str:
    """A source with a diff applied."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(x[1:] for x in lines if x[0] != sign) for sign in "+-")
    assert source.count(old) == 1, diff
    return source.replace(old, new)


def prints(folder: Path, *argv: str) -> list[str]:
    """The lines that Python prints with these arguments, on the packages of a folder."""
    path = os.pathsep.join(str(folder / part) for part in ("..", ".", "tests/helpers", "docs"))
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def run_tests(folder: Path, *argv: str) -> None:
    """Runs tests in the folder; some have to be selected, and all have to pass."""
    prints(folder, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *argv)


METHOD = """
import doctest
import elementwise_reference, generate, numpy as np
from sail_jax import methods
from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.cli.main import main

assert methods.median is methods.get("median") and "median" in dir(methods)
found = doctest.DocTestFinder().find(methods.median, globs=vars(methods.elementwise))
assert doctest.DocTestRunner().run(found[0]) == (0, 1)

trees = [{"w": np.random.default_rng(k).normal(size=7).astype(np.float32)} for k in range(4)]
for k, tree in enumerate(trees):
    save_checkpoint(f"{k}.npz", tree)
entries = "".join(f"  - {{model: {k}.npz, parameters: {{weight: 1.5}}}}\\n" for k in (1, 2, 3))
with open("recipe.yaml", "w") as file:
    file.write("merge_method: median\\nbase_model: 0.npz\\nparameters: {scale: 0.5}\\n")
    file.write("models:\\n" + entries)
assert main(["merge", "recipe.yaml", "out.npz", "--quiet"]) == 0
want = elementwise_reference.median(trees[1:], trees[0], [1.5] * 3, None, scale=0.5)
assert np.abs(load_checkpoint("out.npz")["w"] - want["w"]).max() < 1e-6
main(["merge", "--methods"])
print(generate.methods_page())
"""


@pytest.mark.slow
def test_a_method(tmp_path):
    """Registry, recipes, `merge --methods` and the site know it; its example and reference hold."""
    lines = prints(followed("additions/method.md", tmp_path), "-c", METHOD)
    about = "Takes, for each entry, the median of the models' changes."
    listed = lines.index(f"median: {about}")
    assert lines[listed + 1 : listed + 3] == [
        "    1 or more models; a base; 1 pass, in pieces",
        "    parameters: weight, scale=1.0",
    ]
    (row,) = (line for line in lines if "method-median.md" in line)
    assert about in row


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["additions/method.md", "how_to/add_a_format.md", "how_to/add_a_study.md"]
)
def test_the_tests_that_a_page_names_pass(page, tmp_path):
    here = followed(page, tmp_path)
    text = (ROOT / "docs" / page).read_text()
    prints(here, "-c", "\n".join(UNMARKED.findall(text)))
    (command,) = re.findall("[`\n]pytest ([^`\n]+)", text)
    run_tests(here, *shlex.split(command))


@pytest.mark.slow
def test_a_method_that_refuses_negative_weights(tmp_path):
    """The laws of signed weights ask of it that it refuses them."""
    file = followed("additions/method.md", tmp_path) / "sail_jax" / "methods" / "elementwise.py"
    end = "reduce(kernel(_median)), scale=scale"
    source = file.read_text()
    assert source.count(end) == 1
    file.write_text(source.replace(end, f"{end}, positive_weights=True"))
    run_tests(tmp_path / "repository", "tests/sail_jax/methods", "-k", "median", "-m", "")


@pytest.mark.slow
def test_growth_methods_of_a_page_pass_the_tests_of_all(tmp_path):
    """The additions of its code are in the table before the tests are collected."""
    page = (ROOT / "docs" / "how_to" / "add_a_growth_method.md").read_text()
    (tmp_path / "the_page.py").write_text("\n".join(UNMARKED.findall(page)))
    linked(ROOT, here := tmp_path / "repository")
    run_tests(here, "-p", "the_page", "tests/sail_jax/growth", "-k", "mirror or last_units")
