"""Lets autodoc read docstrings that are plain text with Google sections, and little RST."""

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import formulas
import generate
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

_FIELD = re.compile(r"^(\s*)(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?=:( |$))")
_STATEMENT = re.compile(
    r"(?<![\w(])(?:\(\d+\)"
    r"|(?:Theorem|Thm|Lemma|Proposition|Prop\.|Corollary) [A-Z]?\.?\d[\d.]*(?<!\.))"
)
_PAPER = re.compile(r"\barXiv:? ?(\d{4}\.\d{5})\b")
_SECTIONS = {
    *("Args", "Attributes", "Example", "Examples", "Note", "Notes"),
    *("Raises", "References", "Returns", "Warning", "Yields"),
}


def escaped(text: str) -> str:
    """Escapes what RST would take for markup, but for names in backticks, and links papers.

    >>> escaped("|x|^2 of theta_ * `a*b`")
    '\\\\|x\\\\|^2 of theta\\\\_ \\\\* `a*b`'
    >>> escaped("WSM (arXiv 2507.17634), eq. (3)")
    'WSM (`arXiv 2507.17634 <https://arxiv.org/abs/2507.17634>`__), eq. (3)'
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            # A backtick that a letter follows does not end RST's literal: `x`s.
            parts[i] = part + ("\\ " if re.match(r"\w", parts[i + 1]) else "")
            parts[i] = ("\\ " if re.search(r"[\w({\[]$", parts[i - 1]) else "") + parts[i]
        else:
            part = re.sub(r"([*|`\\])|(?<=\w)(_)(?!\w)", r"\\\1\2", part)
            parts[i] = _PAPER.sub(r"`\g<0> <https://arxiv.org/abs/\1>`__", part)
    return "".join(parts)


def plain(lines: list[str], *, mathematics: bool = False) -> Iterator[str]:
    """Escapes the text of a docstring, and makes indented blocks below a sentence literal.

    Doctests stay as they are, and so do formulas (`.. math::`) and the headings of Google sections.

    Args:
      lines: The lines of the docstring.
      mathematics: Whether indented blocks that are formulas are set.

    Yields:
      The lines in reStructuredText.
    """
    section_indent: int | None = None
    in_doctest = in_literal = in_formula = False
    block_indent = 0
    item_indent: int | None = None  # of the text of the list item that a line may belong to
    paragraph_indent = 0
    for number, line in enumerate(lines):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        before = lines[number - 1].strip() if number else ""
        if not stripped:
            in_doctest = False
            yield ""
            continue
        if in_literal and indent >= block_indent:
            if not in_formula:
                yield line
            continue
        in_literal = in_formula = False
        if stripped.startswith(">>>") or in_doctest:
            if not in_doctest and before:
                yield ""
            in_doctest = True
            yield line
            continue
        if stripped.removesuffix(":") in _SECTIONS and stripped.endswith(":") and not before:
            section_indent, item_indent, paragraph_indent = indent, None, indent
            yield line
            continue
        if section_indent is not None and indent <= section_indent:
            section_indent = None
        item = re.match(r"(- |\* |\d+\. )", stripped)
        if item:
            item_indent = indent + len(item[0])
        elif item_indent is not None and indent < item_indent:
            item_indent = None
        if stripped.startswith(".. math::"):
            in_literal, block_indent = True, indent + 1
            yield line
            continue
        in_field = section_indent is not None
        if (
            not before
            and not in_field
            and not item
            and indent > max(paragraph_indent, item_indent or 0)
        ):
            in_literal, block_indent = True, indent
            formula = formulas.tex(_block(lines[number:], indent)) if mathematics else None
            in_formula = formula is not None
            if formula:
                yield from ("", " " * paragraph_indent + ".. math::", "")
                yield from (" " * (paragraph_indent + 3) + row for row in formula)
            else:  # a table or a program, shown as it is
                yield from (" " * paragraph_indent + "::", "", line)
            continue
        if not in_field:
            paragraph_indent = indent if item_indent is None else item_indent
        yield _line(line, in_field, bool(item))


def _block(lines: list[str], indent: int) -> list[str]:
    """The first lines that are indented as far, or empty."""
    deep = (not line.strip() or len(line) - len(line.lstrip()) >= indent for line in lines)
    return [line for line, _ in zip(lines, itertools.takewhile(bool, deep), strict=False)]


def _line(line: str, in_field: bool, item: bool) -> str:
    if item:
        mark = re.match(r"\s*(- |\* |\d+\. )", line)
        assert mark is not None
        return mark[0] + escaped(line[mark.end() :])
    field = _FIELD.match(line) if in_field else None
    if field:  # napoleon escapes the names of arguments itself
        return line[: field.end()] + escaped(line[field.end() :])
    return escaped(line)


def _escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "data":
        lines[:] = _of_constant(name, obj)
    # Formulas of theory are mathematics, those of other packages often programs.
    lines[:] = _cited(list(plain(lines, mathematics=name.startswith("theory"))))


def _cited(lines: list[str]) -> list[str]:
    """Links the statements and equations of our papers to their claims, in one paragraph each."""
    of_paper: dict[str, str] = {}
    for i, line in enumerate(lines):
        if number := _PAPER.search(line):
            of_paper = _statements().get(number[1], {})
        elif not line.strip():
            of_paper = {}
        if not of_paper:
            continue
        place = number.end() if number else 0
        link = functools.partial(_linked, of_paper)
        lines[i] = line[:place] + _STATEMENT.sub(link, line[place:])
    return lines


def _linked(of_paper: dict[str, str], found: re.Match[str]) -> str:
    name = found[0]
    label = of_paper.get(name.replace("Thm", "Theorem").replace("Prop.", "Proposition"))
    return f":ref:`{name} <{label}>`" if label else name


_statements = functools.cache(generate.statements)


def _of_constant(name: str, value: Any) -> list[str]:
    """The text under the definition of a constant, wherever it was imported from."""
    last = name.rsplit(".", 1)[-1]
    root = name.split(".")[0]
    for home, module in list(sys.modules.items()):
        if home.split(".")[0] == root and vars(module).get(last) is value:
            with contextlib.suppress(PycodeError):
                found = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", last))
                if found:
                    return found
    return []


def _keep_sentence(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Undoes what napoleon makes of "word: more" in a property, and shortens types."""
    if what == "property" and lines and lines[-1 - (not lines[-1])].startswith(":type: "):
        kind = lines.pop(-1 - (not lines[-1]))
        lines[0] = f"{kind.removeprefix(':type: ')}: {lines[0]}"
    for i, line in enumerate(lines):
        if match := re.match(r"( *:vartype \w+: )(.+)", line):
            lines[i] = f"{match[1]}``{short(match[2])}``"


def short(annotation: str) -> str:
    """Drops the modules from the names in a type.

    >>> short("jaxtyping.Float[jaxlib._jax.Array, '*b 3'] | None")
    "Float[Array, '*b 3'] | None"
    """
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", annotation).replace("``", "")


def _signature(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Shortens the arrays of jaxtyping: Float[jaxlib._jax.Array, "n"]."""
    short_signature, short_returned = (
        text and text.replace("[jaxlib._jax.Array", "[Array") for text in (signature, returned)
    )
    return short_signature, short_returned


def _skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of NamedTuples, which the class describes as attributes."""
    return True if type(obj).__name__ in ("_tuplegetter", "member_descriptor") else None


def connect(app: Any) -> None:
    """Registers the hooks, before and after napoleon reads sections (at 500)."""
    app.connect("autodoc-process-docstring", _escape, priority=100)
    app.connect("autodoc-process-docstring", _keep_sentence, priority=900)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
