"""The code of the page on adding an architecture runs: the architecture is recognised and grown."""

import re
from pathlib import Path

import pytest

from sail_jax.architectures import detect

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_an_architecture.md"


@pytest.mark.slow
def test_the_page_adds_a_table_that_growth_uses(monkeypatch):
    monkeypatch.setattr(detect, "_BY_TYPE", dict(detect._BY_TYPE))
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)), {})
