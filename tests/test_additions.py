"""The pages "add a ..." are followed in a scratch folder: what they write has to be enough."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.compile(r"^<!-- add to (\S+) -->\n```\w+\n(.*?)^```", re.M | re.S)


def linked(source: Path, folder: Path) -> None:
    """Makes a folder of links to all that another one holds."""
    folder.unlink(missing_ok=True)
    folder.mkdir()
    for entry in source.iterdir():
        if entry.name != "__pycache__":  # where the changed files would leave what they compile to
            (folder / entry.name).symlink_to(entry)


def followed(page: str, folder: Path) -> Path:
    """The repository as links, but for the files to which a page adds: these are copies, and new.

    A block goes to the end of the file that is named above it.
    """
    blocks = BLOCKS.findall((ROOT / "docs" / "additions" / page).read_text())
    assert blocks, page
    linked(ROOT, here := folder / "repository")
    for name, code in blocks:
        file = here / name
        for part in reversed(file.relative_to(here).parents[:-1]):
            if (here / part).is_symlink():
                linked(ROOT / part, here / part)
        before = file.read_text() + "\n\n" if file.exists() else ""
        file.unlink(missing_ok=True)
        file.parent.mkdir(exist_ok=True)
        file.write_text(before + code)
    return here


def prints(folder: Path, code: str) -> list[str]:
    """The lines that a program prints that is run on the packages of a folder."""
    path = os.pathsep.join(str(folder / part) for part in (".", "tests/helpers", "docs"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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
    lines = prints(followed("method.md", tmp_path), METHOD)
    about = "Takes, for each entry, the median of the models' changes."
    listed = lines.index(f"median: {about}")
    assert lines[listed + 1 : listed + 3] == [
        "    1 or more models; a base; 1 pass, in pieces",
        "    parameters: weight, scale=1.0",
    ]
    (row,) = (line for line in lines if "method-median.md" in line)
    assert about in row
