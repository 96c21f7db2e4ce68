"""HTML views of results in notebooks: a title, and a table of at most ten rows."""

import html
from collections.abc import Iterable, Sequence

from sail_jax.checks import escaped, shortened

ROWS = 10
"""The most rows that a view shows."""
# The most characters of a cell, and of the title.
_CELL, _TITLE = 120, 1000


def view(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Renders a title and rows of cells as HTML.

    Args:
      title: The title. Further lines of it are text.
      rows: The rows. The number of those that are not shown is stated.
      header: The names of the columns; empty for none.

    Returns:
      The HTML, with all texts escaped.

    >>> view("a < b", [("x", 1)])
    '<strong>a &lt; b</strong><table><tr><td>x</td><td>1</td></tr></table>'
    """
    rows = [*rows]
    shown = [_row(row, "td") for row in rows[:ROWS]]
    if header:
        shown.insert(0, _row(header, "th"))
    more = f"<p>and {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""
    name, *lines = (html.escape(escaped(line)) for line in shortened(title, _TITLE).splitlines())
    about = f"<p>{'<br>'.join(lines)}</p>" if lines else ""
    return f"<strong>{name}</strong>{about}<table>{''.join(shown)}</table>{more}"


def _row(cells: Iterable[object], tag: str) -> str:
    texts = (html.escape(shortened(escaped(str(cell)), _CELL)) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"
