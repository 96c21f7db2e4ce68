"""The page on packages of one's own: its package is installed, and its parts are found and run."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from experiments.lab import registry
from sail_jax import extensions, methods
from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.cli import main as cli
from sail_jax.methods.registry import known
from sail_jax.searching.arms import arms
from theory import claims

PAGE = (Path(__file__).parents[1] / "docs" / "how_to" / "own_package.md").read_text()
FILES = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", PAGE, re.M | re.S))
CLAIM = "coins/variance/exact"


def written(folder: Path, **changes: str) -> Path:
    """The files of the page, with other texts for some of them."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(changes.get(Path(name).stem, text))
    return folder


def registered(folder: Path, name: str = "coin-lab") -> None:
    """What an installer writes of the entry points in pyproject.toml."""
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def forget() -> None:
    """Removes all that is remembered of the package."""
    for cached in (registry.studies, claims._added, known):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "coin_lab"]:
        del sys.modules[name]
    methods.METHODS.pop("trimmed_sum", None)
    claims._STATED.pop("coin_lab.claims", None)
    importlib.invalidate_caches()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs the package of the page in a folder, with other texts for some of its files."""

    def installed(**changes: str) -> None:
        registered(written(tmp_path / "site", **changes))
        monkeypatch.syspath_prepend(tmp_path / "site")
        forget()

    yield installed
    forget()


def test_nothing_is_imported_before_it_is_looked_up(install):
    install()
    methods.get("ties")
    assert registry.load("coin").question.startswith("How far is the share of heads")
    assert [one.id for one in claims.of_room("theory.two_layer.batch_claims")]
    assert not {"coin_lab.claims", "coin_lab.coin", "coin_lab.methods"} & sys.modules.keys()
    assert "trimmed_sum" not in methods.METHODS
    assert methods.get("trimmed_sum").__module__ == "coin_lab.methods"
    (claim,) = claims.select("coins/*")
    assert claim.id == CLAIM
    assert claims.check(claim).power.enough


def test_its_claim_is_checked(install, capsys):
    install()
    assert cli.main(["verify", "--claims", "coins/*", "--quick"]) == 0
    assert f"holds                {CLAIM}" in capsys.readouterr().out
    assert claims.named(CLAIM).source == "coins any textbook"
    assert CLAIM not in {one.id for one in claims.all_claims()}  # of which pages are made


@pytest.mark.slow
def test_its_study_is_listed_and_runs(install, capsys, tmp_path, monkeypatch):
    install()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 0
    assert "How far is the share of heads in n throws from 1/2?" in capsys.readouterr().out
    assert cli.main(["run", "coin", "--preset", "tiny", "--draws", "400"]) == 0
    assert "The share of heads in 16 throws is wrong by" in capsys.readouterr().out
    squared = xr.load_dataset("results/coin/result.nc").squared
    error = squared.std("draw") / 20
    np.testing.assert_array_less(abs(squared.mean("draw") - [1 / 16, 1 / 64]), 4 * error)


@pytest.mark.slow
def test_its_method_is_in_recipes_and_in_the_search(install, tmp_path, monkeypatch, capsys):
    install()
    monkeypatch.chdir(tmp_path)
    for name, x in {"base": [0.0, 0, 0, 0], "a": [4.0, 1, 0, -3], "b": [0.5, 2, 9, 0]}.items():
        save_checkpoint(f"{name}.npz", {"w": np.array(x, np.float32)})
    (tmp_path / "r.yaml").write_text(
        "merge_method: trimmed_sum\nbase_model: base.npz\nparameters: {density: 0.5, scale: 2}\n"
        "models: [{model: a.npz}, {model: b.npz}]\n"
    )
    assert cli.main(["merge", "r.yaml", "out.npz", "--quiet"]) == 0
    assert load_checkpoint("out.npz")["w"].tolist() == [8, 4, 18, -6]
    capsys.readouterr()
    assert cli.main(["merge", "--methods"]) == 0
    assert "trimmed_sum: Adds the largest entries of each task vector." in capsys.readouterr().out
    assert arms(2, True, ["trimmed_sum"])[0].bounds["density"] == (0.05, 1.0)


SHARED = '"sail", "T1/printed"'
PROJECT = FILES["pyproject.toml"]
WRONG = {
    "a method of ours": (
        {"methods": FILES["coin_lab/methods.py"].replace("trimmed_sum", "ties")},
        lambda: methods.get("trimmed_sum"),
        "sail_jax.methods.sparse has a method called ties; choose another",
    ),
    "an error in a module": (
        {"claims": "1 / 0"},
        lambda: claims.select("*"),
        "coin_lab = coin_lab.claims of the package coin-lab cannot be imported: ZeroDivisionError",
    ),
    "no claim": (
        {"claims": ""},
        lambda: claims.select("*"),
        r"claims.py states no claim",
    ),
    "an id of another claim": (
        {"claims": FILES["coin_lab/claims.py"].replace('"coins", "variance/exact"', SHARED)},
        lambda: claims.select("*"),
        r"claims share an id: \['sail/T1/printed'\]",
    ),
    "a study of ours": (
        {"pyproject": PROJECT.replace("coin =", "ledger =")},
        lambda: registry.load("ledger"),
        "sail_jax.studies ledger = coin_lab.coin of the package coin-lab: there is a study",
    ),
    "a study that is missing": (
        {"pyproject": PROJECT.replace("coin_lab.coin", "coin_lab.coins")},
        lambda: registry.load("ledger"),
        "sail_jax.studies coin = coin_lab.coins .* cannot be imported: ModuleNotFoundError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_part_that_cannot_be_used_is_named(case, install):
    changes, use, message = WRONG[case]
    install(**changes)
    with pytest.raises(ValueError, match=message):
        use()


def test_two_packages_with_one_name_are_refused(install, tmp_path):
    install()
    other = tmp_path / "site" / "pyproject.toml"
    other.write_text(PROJECT.replace("coin_lab.methods", "other.methods"))
    registered(tmp_path / "site", "other-lab")
    with pytest.raises(ValueError, match=r"other-lab: .*coin-lab has|coin-lab: .*other-lab has"):
        extensions.declared("methods")


def test_the_claims_of_one_file_are_checked(tmp_path, capsys, monkeypatch):
    folder = written(tmp_path) / "coin_lab"
    (folder / "throwing.py").write_text("SHARE = 0.5\n")
    text = "from throwing import SHARE\n" + FILES["coin_lab/claims.py"].replace("- 0.5", "- SHARE")
    (folder / "mine.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = str(folder / "mine.py")
    assert cli.main(["verify", "--from", file, "--quick"]) == 0
    assert "1 claim holds." in capsys.readouterr().out
    assert cli.main(["verify", "--from", file, "--claims", "coin/*"]) == 2
    assert "no claim matches 'coin/*' (nearest: 'coins')" in capsys.readouterr().err
    for text, message in (("x = 1 / 0", "ZeroDivisionError"), ("", "states no claim")):
        (folder / "mine.py").write_text(text)
        assert cli.main(["verify", "--from", file]) == 2
        assert f"mine.py{': ' if text else ' '}{message}" in capsys.readouterr().err
    assert cli.main(["verify", "--from", file, "--on", "local:2"]) == 2
    assert "--from is for this machine" in capsys.readouterr().err


def test_the_claims_of_a_module_are_a_table(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(written(tmp_path))
    try:
        module = importlib.import_module("coin_lab.claims")
        table = claims.table(module, check=True, quick=True)
        assert table.index.tolist() == [CLAIM]
        assert table["holds"].all()
        assert claims.table(importlib.import_module("coin_lab")).index.tolist() == [CLAIM]
        with pytest.raises(ValueError, match="states no claim"):
            claims.table(np)
    finally:
        forget()
