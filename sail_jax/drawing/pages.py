"""A report as one self-contained HTML page: figures inside, nothing fetched, light and dark."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import NamedTuple

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --paper: #fdfdfc;
        --line: #d9dde3; --card: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa5b4; --paper: #14171c; --line: #323a45; --card: #1b2027; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.2rem; background: var(--paper);
       color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: .4rem 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .3rem; }
p { max-width: 44rem; } .soft, footer { color: var(--soft); }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff;
         border: 1px solid var(--line); border-radius: .5rem; padding: .4rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; font-size: .85rem; background: var(--card); min-width: 60rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem;
         border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; } nav ul { padding-left: 1.1rem; } a { color: inherit; }
summary { cursor: pointer; color: var(--soft); }
"""


class Section(NamedTuple):
    """One question: what was asked, the computed answer, pictures by alternative text, tables,
    what was run in detail."""

    heading: str
    question: str
    answer: str
    pictures: Sequence[tuple[str, bytes]] = ()  # (alternative text, PNG)
    tables: Sequence[Sequence[Sequence[str]]] = ()  # the first row of each is its header
    details: Mapping[str, str] = MappingProxyType({})  # folded away


def page(title: str, sections: Sequence[Section], about: Mapping[str, str]) -> str:
    """The whole document; every text is escaped, `about` becomes the foot of the page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{_contents(sections)}{"".join(_section(i, section) for i, section in enumerate(sections))}
<footer>{_facts(about)}</footer>
</body>
</html>
"""


def _contents(sections: Sequence[Section]) -> str:
    """Where to find what, once there is more than a glance takes in."""
    if len(sections) < 4:
        return ""
    items = "".join(
        f'<li><a href="#part-{i}">{escape(section.heading)}</a> '
        f'<span class="soft">{escape(section.question)}</span></li>\n'
        for i, section in enumerate(sections)
    )
    return f"<nav><ul>{items}</ul></nav>\n"


def _facts(about: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in about.items())
    return f"<dl>{rows}</dl>"


def _section(number: int, section: Section) -> str:
    pictures = "".join(
        f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}"></figure>\n'
        for alt, data in section.pictures
    )
    tables, details = "".join(map(_table, section.tables)), ""
    if section.details:
        details = f"<details><summary>What was run</summary>{_facts(section.details)}</details>\n"
    return (
        f'<section id="part-{number}">\n<h2>{escape(section.heading)}</h2>\n'
        f'<p class="soft">{escape(section.question)}</p>\n<p>{escape(section.answer)}</p>\n'
        f"{pictures}{tables}{details}</section>\n"
    )


def _table(table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n'
