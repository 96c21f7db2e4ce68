"""The page on the notation of specs shows a table that can be read and applied."""

import re
from pathlib import Path

import jax
import pytest

from sail_jax.checkpoint.recipe.tables import read_table

PAGE = Path(__file__).parents[4] / "docs/how_to/spec_notation.md"


@pytest.mark.parametrize("biased", [True, False])
def test_the_table_of_the_page_is_read(tmp_path, biased):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "table.yaml").write_text(text)
    rules = read_table(tmp_path / "table.yaml")
    shapes = {"embed": (9, 4)}
    for i in range(2):
        shapes |= {f"blocks.{i}.up": (4, 6), f"blocks.{i}.down": (6, 4)}
        shapes |= {f"blocks.{i}.bias": (6,)} if biased else {}
    found = rules.spec({k: jax.ShapeDtypeStruct(n, "float32") for k, n in shapes.items()})
    assert {s.name: (s.size, s.nonlinearity) for s in found.spaces} == {
        "hidden.0": (6, "elementwise"),
        "hidden.1": (6, "elementwise"),
        "stream": (4, "outer"),
        "tokens": (9, "outer"),
    }
    roles = {use.path: use.role for use in found.uses("hidden.0")}
    bias = {"blocks.0.bias": "write"} if biased else {}
    assert roles == {"blocks.0.up": "write", "blocks.0.down": "read"} | bias
    assert rules.scales == {"embed": ("stream", 0.5)}
