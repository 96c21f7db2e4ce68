"""Markdown that several of the scripts here write."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WORDS = 6000
"""The most words of a page."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without the end of its last line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def toctree(stems: Iterable[str]) -> str:
    """The contents of a page, which only the sidebar shows."""
    return "\n".join(["```{toctree}", ":hidden:", "", *stems, "```\n"])


class Page(NamedTuple):
    """A page, which may be the index of others.

    Attributes:
      stem: The file name, without its suffix.
      title: The title.
      text: The text below the title; empty for a row of an index without a page.
      about: The further cells of its row in the index above it.
      columns: The names of the columns of its table of pages.
      parts: The pages of the table.
      more: The text below the table.
    """

    stem: str
    title: str
    text: str
    about: Sequence[str] = ()
    columns: Sequence[str] = ()
    parts: "Sequence[Page]" = ()
    more: str = ""


def written(page: Page) -> dict[str, str]:
    """Writes a page and, if it is an index, the pages below it.

    Args:
      page: The page.

    Returns:
      The pages in Markdown, by file name.
    """
    texts = [f"# {page.title}", page.text.rstrip()]
    below = [part for part in page.parts if part.text]
    if page.parts:
        links = (f"[{p.title}]({p.stem}.md)" if p.text else p.title for p in page.parts)
        rows = [(link, *p.about) for link, p in zip(links, page.parts, strict=True)]
        texts += [table(page.columns, rows), page.more.rstrip(), toctree(p.stem for p in below)]
    found = {f"{page.stem}.md": "\n\n".join(filter(None, texts)).rstrip() + "\n"}
    return found | {name: text for part in below for name, text in written(part).items()}
