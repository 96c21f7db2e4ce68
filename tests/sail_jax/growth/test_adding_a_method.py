"""The code of the page on adding a growth method runs, and what it adds is found by name."""

import re
from pathlib import Path

import pytest

from sail_jax.cli import main as cli
from sail_jax.growth import METHODS, ORDERS

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_growth_method.md"


@pytest.fixture
def scratch():
    """Leaves the tables as they were before the test."""
    before = dict(METHODS), dict(ORDERS)
    yield
    for table, rows in zip((METHODS, ORDERS), before, strict=True):
        table.clear()
        table.update(rows)


def test_the_page_adds_an_order_of_depth_and_a_method_that_widens(scratch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec("\n".join(blocks), {})
    assert cli.main(["grow", "--methods"]) == 0
    printed = capsys.readouterr().out
    for name in ("mirror", "last_units"):
        assert f"{METHODS[name].about} (this page)" in printed
