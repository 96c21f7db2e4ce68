"""Repairs markup of the theme and of Sphinx that screen readers and keyboards cannot use."""

import re
from typing import Any

_PARAMETERS = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")


def repaired(html: str) -> str:
    """Repairs part of a page.

    Captions of the sidebar get a level of heading. Tables and code can be focused, so arrow keys
    scroll them. The parameters of a long signature become plain lines instead of definitions.

    Args:
      html: The part, as Sphinx or the theme wrote it.

    Returns:
      The repaired part.

    >>> repaired('<p class="caption" role="heading">')
    '<p class="caption" role="heading" aria-level="2">'
    >>> repaired('<dl>\\n<dd>a,</dd>\\n</dl>')
    '<div class="sig-lines">\\n<div>a,</div>\\n</div>'
    """
    html = html.replace(' role="heading">', ' role="heading" aria-level="2">')
    html = html.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    html = html.replace('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">')
    return _PARAMETERS.sub(_as_lines, html)


def _as_lines(found: re.Match[str]) -> str:
    lines = re.sub(r"^<dd>(.*)</dd>$", r"<div>\1</div>", found[1], flags=re.M)
    return f'<div class="sig-lines">\n{lines}</div>'


def _repair(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = repaired(context[part])


def connect(app: Any) -> None:
    """Registers the hook, after the theme has made its parts (at 500)."""
    app.connect("html-page-context", _repair, priority=900)
