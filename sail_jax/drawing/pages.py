"""Pages of HTML that stand alone: pictures inside, nothing fetched, light and dark."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Section", "page", "render"]


class Section(NamedTuple):
    """One question: what was asked, the computed answer, pictures by alternative text, tables,
    what was run in detail, what it is about in a sentence for a newcomer, and the command that
    shows more of it."""

    heading: str
    question: str
    answer: str
    pictures: Sequence[tuple[str, bytes]] = ()  # (alternative text, PNG)
    tables: Sequence[Sequence[Sequence[str]]] = ()  # the first row of each is its header
    details: Mapping[str, str] = MappingProxyType({})  # folded away
    about: str = ""
    more: str = ""


def page(title: str, sections: Sequence[Section], about: Mapping[str, str]) -> str:
    """The page of finished runs; `about` becomes its foot."""
    return render("runs", title=title, sections=sections, about=about)


def render(
    template: str,
    *,
    title: str,
    generator: str = "sail-jax",
    styles: Sequence[str] = ("page",),
    scripts: Sequence[str] = (),
    **values: Any,
) -> str:
    """The whole document of a template, in which every text is escaped.

    Args:
      template: Its name, as of the styles and scripts, which alone the page may run.
      title: Of the document.
      generator: What tells pages of this kind from other files.
      styles: Style sheets, one after the other.
      scripts: The same of scripts.
      values: What the template shows.
    """
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("sail_jax.drawing")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"base64": _base64, "exact": _exact}

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


def _digest(text: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" if text else "'none'"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _exact(x: float | None) -> str:
    return "" if x is None or not math.isfinite(x) else f"{x:.9g}"
