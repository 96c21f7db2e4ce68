"""Self-contained HTML pages with embedded pictures and a light and a dark theme."""

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

# Characters that a page would hide, reverse or fail to encode: controls, directions, surrogates.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


Picture: TypeAlias = tuple[str, bytes]
"""An alternative text, and a PNG or SVG."""


class Section(NamedTuple):
    """One question of a page, with its answer and the supporting figures and tables.

    Attributes:
      heading: Its title.
      question: The question.
      answer: The computed answer.
      pictures: Its figures.
      tables: Rows of cells; the first row of each table is its header. A table of more than
        `FOLDED` rows is collapsed.
      details: The settings and versions of the run, by name. They are collapsed.
      about: The subject of the section, in a sentence for a newcomer.
      more: The command that shows more of it.
      verdict: The answer in one or two sentences. It comes first, and the answer is then collapsed
        with the tables.
    """

    heading: str
    question: str
    answer: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Sequence[Sequence[str]]] = ()
    details: Mapping[str, str] = MappingProxyType({})
    about: str = ""
    more: str = ""
    verdict: str = ""


FOLDED = 8
"""The most rows of a table that a page shows unfolded."""


def page(title: str, sections: Sequence[Section], about: Mapping[str, str]) -> str:
    """Renders the page of finished runs.

    Args:
      title: The title of the document.
      sections: One for each question. A page with more than 3 sections begins with a list of their
        headings, with the verdict or the question of each.
      about: Names and values for the footer of the page.

    Returns:
      The whole HTML document.
    """
    return render("runs", title=title, sections=sections, about=about, folded=FOLDED)


def render(
    template: str,
    *,
    title: str,
    generator: str = "sail-jax",
    styles: Sequence[str] = ("page",),
    scripts: Sequence[str] = (),
    **values: object,
) -> str:
    """Renders a template as one HTML document with all texts escaped.

    Control characters and direction marks are written as in `repr`.

    Args:
      template: The name of the template in the folder `templates`, without its extension.
      title: The title of the document.
      generator: The mark that distinguishes pages of this kind from other files.
      styles: Names of style sheets in that folder, which are concatenated.
      scripts: Names of scripts, likewise. The page's security policy allows no other styles or
        scripts.
      values: The values for the template, by name.

    Returns:
      The whole HTML document.
    """
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("sail_jax.drawing")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_visible,
    )  # fmt: skip
    environment.filters |= {"base64": _base64, "exact": _exact, "kind": _kind}

    def joined(names: Sequence[str], kind: str) -> Markup:
        return Markup("".join(loader.get_source(environment, f"{n}.{kind}")[0] for n in names))

    style, script = joined(styles, "css"), joined(scripts, "js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)};"
        f" script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(f"{template}.html").render(
        **values, title=title, generator=generator, style=style, script=script,
        policy=Markup(policy),
    )  # fmt: skip


def _visible(value: object) -> object:
    """Escapes characters that a page would not show; values other than text stay unchanged."""
    return HIDDEN.sub(_spelt, value) if type(value) is str else value


def _spelt(found: re.Match[str]) -> str:
    """Writes a character as in `repr`."""
    return repr(found[0])[1:-1]


def _digest(text: str) -> str:
    """Returns an inline style's or script's name in a security policy; 'none' for an empty one."""
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" if text else "'none'"


def _base64(data: bytes) -> str:
    """Encodes bytes as text in base64."""
    return base64.b64encode(data).decode()


def _kind(image: bytes) -> str:
    """Returns the media type of a picture."""
    return "svg+xml" if image.lstrip().startswith(b"<") else "png"


def _exact(x: float | None) -> str:
    """Formats a number with 9 significant digits; empty for None, NaN and infinities."""
    return "" if x is None or not math.isfinite(x) else f"{x:.9g}"
