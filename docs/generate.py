"""Generates pages from the code: reference, methods, recipes, commands, papers."""

import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import lookup, normalize

import figures
import gallery
import method_pages
import spaces
from markup import Page, table, toctree, written

if TYPE_CHECKING:
    from theory.coverage import Statement

HERE = Path(__file__).parent

PACKAGES = (
    "sail_jax",
    "sail_jax.methods",
    "sail_jax.merging.transforms",
    "sail_jax.merging.reductions",
    "sail_jax.growth",
    "sail_jax.growth.learned",
    "sail_jax.align",
    "sail_jax.architectures",
    "sail_jax.architectures.forward",
    "sail_jax.checkpoint",
    "sail_jax.interop.layouts",
    "sail_jax.interop.torch",
    "sail_jax.interop.transformers",
    "sail_jax.lora",
    "sail_jax.transplant",
    "sail_jax.probe",
    "sail_jax.proximal",
    "sail_jax.distances",
)
"""The packages of `sail_jax` that users import from; `theory` is listed as it is found."""

CLAIMS = 40
"""The most claims on one page."""
NAMES = 18
"""The most names of a package that are on one page."""

Row = Sequence[str]

_imported = importlib.import_module


def write_all(folder: Path) -> None:
    """Writes the generated pages that have changed. Sphinx then reads only these pages again.

    Args:
      folder: The folder of the pages. Other files in it are removed.
    """
    folder.mkdir(exist_ok=True)
    pages = {
        **written(api()),
        "methods.md": methods_page(),
        **method_pages.pages(),
        "growth.md": growth_page(),
        "heads.md": heads_page(),
        "recipes.md": recipes_page(),
        **written(commands()),
        **written(studies()),
        "gallery.md": gallery.page(),
        "spaces.svg": spaces.picture(),
        **written(papers()),
    }
    for old in {path.name for path in folder.iterdir()} - pages.keys():
        (folder / old).unlink()
    for name, page in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            path.write_text(page, encoding="utf-8")


# Names


def api() -> Page:
    """Makes the pages on public names.

    Returns:
      Their index, with a page for each package, which may be an index of its modules.
    """
    parts = [_package(name) for name in PACKAGES]
    parts += [_package(name, _modules(name)) for name in _theory()]
    about = "All public names, package by package."
    return Page("api", "Every name", about, columns=("package", "contains"), parts=parts)


def _theory() -> list[str]:
    """The parts of `theory`, with the general ones first."""
    import theory

    first = ("claims", "coverage", "problems")
    parts = [part.name for part in pkgutil.iter_modules(theory.__path__)]
    return [f"theory.{name}" for name in sorted(parts, key=lambda n: (n not in first, n))]


def _modules(name: str) -> list[str]:
    """The modules of a package of theory, without the modules of claims."""
    package = _imported(name)
    if not hasattr(package, "__path__"):
        return []
    found = (part.name for part in pkgutil.iter_modules(package.__path__))
    return [f"{name}.{part}" for part in found if not part.endswith("claims")]


def _public(module: types.ModuleType) -> list[str]:
    """The public names of a module: the names in `__all__`, or else the names that it defines."""
    if hasattr(module, "__all__"):
        names = list(module.__all__)
    else:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    hidden = types.ModuleType | typing.ParamSpec | typing.TypeVar
    return [n for n in names if not isinstance(getattr(module, n), hidden)]


def _package(name: str, modules: Iterable[str] = ()) -> Page:
    """Makes the page of a package. One with many names is an index of its modules."""
    package = _imported(name)
    shown = _public(package)
    if name == "sail_jax.methods":
        shown.remove("Merge")  # which `sail_jax` has, too
    # The names of each module: those that the package shows, and those that only the module has.
    own = {part: [n for n in _public(_imported(part)) if n not in shown] for part in modules}
    many = len(shown) + sum(map(len, own.values())) > NAMES
    homes: dict[str, list[str]] = {name: [], **{part: [] for part in own}}
    for n in shown:
        homes.setdefault(_home(name, getattr(package, n)) if many else name, []).append(n)
    parts = [
        Page(
            part.replace(f"{name}.", f"{name}-"),
            part,
            _documented(part, {name: homes[part], part: own.get(part, [])}, no_index=True),
            about=(_sentence(_imported(part)),),
        )
        for part in sorted(homes.keys() - {name})
    ]
    text = _documented(name, {name: homes[name]}, listed=shown)
    return Page(name, name, text, (_sentence(package),), ("module", "contains"), parts)


def _home(package: str, value: Any) -> str:
    """The module or package right below a package in which a value is defined."""
    home = getattr(value, "__module__", "")
    inside = home.startswith(f"{package}.")
    return ".".join(home.split(".")[: package.count(".") + 2]) if inside else package


def _documented(
    module: str, names: Mapping[str, Sequence[str]], listed: Sequence[str] = (), no_index=False
) -> str:
    """The docstring of a module, a table of names, and their docstrings, by what has the names."""
    lines = [f".. automodule:: {module}\n   :no-members:\n" + "   :no-index:\n" * no_index]
    for package, own in names.items():
        if shown := sorted(listed or own, key=lambda n: (n[0].isupper(), n)):
            lines.append(f".. currentmodule:: {package}\n\n.. autosummary::\n")
            lines += [f"   {n}" for n in shown]
            lines.append("")
            ordered = (n for n in shown if n in own)
            lines += [_directive(n, getattr(_imported(package), n)) for n in ordered]
    return "```{eval-rst}\n" + "\n".join(lines) + "```\n"


def _directive(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n"
    if callable(value) and hasattr(value, "__name__") and inspect.isroutine(value):
        return f".. autofunction:: {name}\n"
    return f".. autodata:: {name}\n   :no-value:\n"


# Methods


def methods_page() -> str:
    """Makes the table of merging methods, from what `sail-jax merge --methods` prints.

    Returns:
      The page in Markdown.
    """
    from sail_jax import methods

    in_recipes: dict[str, list[Row]] = {}
    for name, card in method_pages.cards().items():
        made = methods.get(name)
        row = (
            _method(name),
            _with_source(card.about, made),
            f"{card.models}; {card.base}; {card.reads}",
            "<br>".join(map(method_pages.code, filter(None, (card.parameters, card.keys)))),
        )
        in_recipes.setdefault(made.__module__, []).append(row)
    head = ("method", "what it does", "models, base, reading", "parameters")
    kinds = "\n\n".join(
        f"### {_sentence(_imported(module)).rstrip('.')}\n\n{table(head, rows)}"
        for module, rows in sorted(in_recipes.items())
    )
    linked = {row[0] for rows in in_recipes.values() for row in rows}
    others = []
    for name in dir(methods):
        value, link = getattr(methods, name), _method(name)
        about_methods = getattr(value, "__module__", "") == methods.get.__module__
        if inspect.isroutine(value) and link not in linked and not about_methods:
            knobs = ", ".join(inspect.signature(value).parameters)
            others.append((link, _with_source(_sentence(value), value), f"`{knobs}`"))
    return f"""# Merging methods

This page is made from the registry that the command `sail-jax merge --methods` prints.

## In recipes and in Python

`parameters` are those of a recipe, with their defaults there (`compat: mergekit`); in Python see
the signatures in [`sail_jax.methods`](sail_jax.methods.md). A pass is one reading of a large
tensor from the disk; *in pieces* means that memory does not grow with the tensor.

{kinds}

## With data, statistics or a model for each task

These take arrays or functions, which a recipe cannot hold, and are called in Python.

{table(("function", "what it does", "arguments"), others)}

(conventions)=
## What `compat` changes

What the docstrings say of it; see [what each convention means](../explanation/compat.md).

{table(("method", "conventions"), _conventions())}

{toctree(map(method_pages.stem, method_pages.advice()))}"""


def _conventions() -> list[Row]:
    """What each method that knows `compat` says of it."""
    from sail_jax import methods

    rows = []
    for name in sorted(methods.METHODS):
        text = inspect.getdoc(methods.get(name)) or ""
        said = re.search(r"^  compat: ((?:.*\n)(?:    .*\n)*)", text, re.M)
        if said:
            differ = re.search(
                r"^Programs of this name differ:\n\n((?:- .*\n|  .*\n|\n(?=- ))+)", text, re.M
            )
            parts = re.split(r"^- ", differ[1], flags=re.M)[1:] if differ else []
            lines = [" ".join(part.split()) for part in (said[1], *parts)]
            rows.append((_method(name), "<br>".join(map(_escaped, lines))))
    return rows


def _method(name: str) -> str:
    """A link to the page of a method, or else to its docstring."""
    if name in method_pages.advice():
        return f"[`{name}`]({method_pages.stem(name)}.md)"
    return _link("sail_jax.methods", name)


def _with_source(about: str, value: Any) -> str:
    """A sentence, followed by links to the papers in a docstring's references."""
    text = inspect.getdoc(value) or ""
    found = re.search(r"^References:\n((?:  .*\n|\n(?=  ))+)", text + "\n", re.M)
    return f"{about}<br>*{_arxiv(' '.join(found[1].split()))}*" if found else about


def _arxiv(text: str) -> str:
    return re.sub(r"arXiv:? ?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def growth_page() -> str:
    """Makes the table of growth methods, from the registry of `sail-jax grow --methods`.

    Returns:
      The page in Markdown.
    """
    from sail_jax.growth import METHODS

    def row(name: str) -> Row:
        method = METHODS[name]
        options = ", ".join(f"`{key}={value}`" for key, value in method.options.items())
        more = [
            f"deepens by `{method.deepens_by}`" if method.widens else "",
            "random" if method.draws is True else "",
        ]
        kept = "yes, if the architecture allows it" if method.lossless else "no"
        about = "; ".join(filter(None, [method.about, *more]))
        return f"`{name}`", about, kept, options, method.source

    head = ("method", "what it does", "keeps the function", "options", "source")
    wider = [row(name) for name, method in METHODS.items() if method.widens]
    deeper = [row(name) for name, method in METHODS.items() if method.deepens]
    smaller = [row(name) for name, method in METHODS.items() if method.prunes]
    return f"""# Growth methods

This page is generated from the registry that `sail-jax grow --methods` prints. Whether the function
of a network is preserved depends on the method and on the network. A run of both networks measures
it. `grow` prints the result, and writes it to `growth.json` in the output.

## Width

{table(head, wider)}

## Depth

{table(head, deeper)}

## Smaller sizes

{table(head, smaller)}

Maps that are learned by gradients (LiGO, SAIL) are in [`sail_jax.growth.learned`
](sail_jax.growth.learned.md); the makers of single maps in [`sail_jax.growth`
](sail_jax.growth.md).
"""


def heads_page() -> str:
    """Makes the tables of known architectures, and of their heads.

    Returns:
      The page in Markdown.
    """
    from sail_jax.architectures.files import Table, model_types, read
    from sail_jax.architectures.forward.heads import HEADS

    def row(family: str, head: Any) -> Row:
        of = f"classes that end in {_code(head.classes)}" if head.classes else ""
        tied = "may be tied to the embeddings" if head.implied else ""
        tensors = _code(name.removeprefix("?") for name in head.axes) or f"`{head.weight}`"
        return f"`{family}`", tensors, head.about, f"`{head.output}`", of or tied

    rows = [row(family, head) for family, listed in HEADS.items() for head in listed]

    def known(name: str, table: Table) -> Row:
        holds = (f"`{key}`: {_code(map(str, values))}" for key, values in table.holds.items())
        scaled = (f"`{size}`^{power:g}" for size, power in table.scales.values())
        states = dict.fromkeys(key for key, _ in table.settings)
        return f"`{name}`", _code(states), "; ".join(holds), ", ".join(scaled)

    tables = [known(name, read(name)) for name in model_types()]
    return f"""# Architectures

The table lists the model types with a file of feature spaces. The second column has the entries of
config.json that set the sizes of the spaces. The third column has the required values of other
entries. With another value, the network is refused, or its spaces are inferred if torch is
installed. The last column has the factor of the embeddings, and growth compensates for it. T5, CLIP
and its towers, trees of MaxText and Tunix, and the Flax networks of this project are also known.

{table(("model type", "sizes", "required values", "factor of embeddings"), tables)}

## Heads

[The forward passes](sail_jax.architectures.forward.md) compute the outputs of these heads, and
`grow` and `align` compare them. Mistral, Qwen 2 and 3 belong to the family `llama`, and XLM-RoBERTa
to the family `roberta`. A network without a head returns its states: `last_hidden_state`, and
`pooler_output` if it has a pooler. CLIP returns `logits_per_image`, `image_embeds` and
`text_embeds`. A tower of CLIP with a projection returns its embeddings. transformers also returns
the states of the tower, and they are not compared.

{table(("family", "tensors", "computes", "output", "note"), rows)}
"""


# Recipes


def recipes_page() -> str:
    """Makes the tables of recipe keys from their declarations.

    Returns:
      The page in Markdown.
    """
    from sail_jax.checkpoint.recipe import mergekit, parts

    titles = {
        parts.Recipe: "The recipe",
        parts.Module: "A module",
        parts.Slice: "A slice",
        parts.Source: "A source: an entry of `models` or `sources`",
        parts.Model: "A model as a mapping",
        parts.Growth: "`grow`",
        parts.Alignment: "`align`",
        parts.Tokenizer: "`tokenizer`",
        parts.Token: "An entry of `tokens`",
        parts.Row: "A row: `source` of a token",
    }
    sections = []
    for part, title in titles.items():
        texts = _attributes(part)
        rows = [
            (_keys(name, field), _type(field.annotation, field), _default(field), texts[name])
            for name, field in part.model_fields.items()
            if not field.exclude and name != "where"
        ]
        about = _sentence(part)
        sections.append(
            f"## {title}\n\n{about}\n\n{table(('key', 'value', 'default', 'meaning'), rows)}\n"
        )
    sections.append(
        "`grow` also takes `depth_method`, `untie`, `require_lossless` and the options of its "
        f"[method](growth.md). `align` also takes {_code(parts.ALIGNMENT)}, the options of "
        "`sail_jax.checkpoint.align_checkpoints`.\n"
    )
    names = {
        p.name: p.theirs
        for listed in mergekit.MERGEKIT.values()
        for p in listed.parameters.values()
        if p.theirs
    }
    sections += [
        f"`{name}` (mergekit's name: `{theirs}`) is a parameter of many methods. A recipe may use "
        "either name; if it uses both, their values must be equal.\n"
        for name, theirs in names.items()
    ]
    return (
        "# Recipe keys\n\nThis page is generated from the declarations of the recipe reader. Any "
        "other key is an error, and the message has the line and the nearest key. The parameters "
        "of each method are in [the table of methods](methods.md).\n\n" + "\n".join(sections)
    )


def _attributes(value: Any) -> dict[str, str]:
    """The descriptions of a class's attributes in its docstring, by name."""
    text = inspect.getdoc(value) or ""
    section = re.search(r"^Attributes:\n((?:  .*\n?|\n(?=  ))+)", text, re.M)
    entries = re.findall(r"^  (\w+): ((?:.*\n?)(?:    .*\n?)*)", section[1], re.M)
    return {name: " ".join(about.split()) for name, about in entries}


def _keys(name: str, field: Any) -> str:
    alias = field.validation_alias
    return _code([str(a) for a in getattr(alias, "choices", [alias or name])], " or ")


def _type(annotation: Any, field: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if field.annotation is str and any("_target" in str(m) for m in field.metadata):
        return "a config.json, factors or entries"
    if origin is typing.Literal:
        return _code(map(str, inner), ", ")
    if origin in (typing.Union, types.UnionType):
        kinds = [_type(a, field) for a in inner if a is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is typing.Annotated:
        return _type(inner[0], field)
    name = getattr(origin or annotation, "__name__", str(annotation))
    words = {"str": "text", "bool": "`true`, `false`", "int": "a whole number", "Ref": "a model",
             "tuple": "a list", "dict": "a mapping", "Mapping": "parameters", "Entry": "a method",
             "NoneType": "nothing", "Location": "path[@revision]"}  # fmt: skip
    return words.get(name, f"see *{name.lower()}*")


def _default(field: Any) -> str:
    if field.is_required():
        return "must be given"
    if field.default is None or field.default_factory:
        return ""
    return f"`{str(field.default).lower() if field.default is False else field.default}`"


# Commands and studies


def commands() -> Page:
    """Makes the pages of the commands, with the output of `--help` of each.

    Returns:
      Their index.
    """
    from sail_jax.cli import finder

    bench = _imported("experiments.bench")
    benchmarks = [part.name for part in pkgutil.iter_modules(bench.__path__)]
    parts = []
    for name, command in finder.commands().items():
        inner = [n for n in benchmarks if n[0] != "_"] if name == "bench" else command.inner()
        texts = [_text(_printed(name, "--help"))]
        texts += [
            f"## `sail-jax {name} {n}`\n\n{_text(_printed(name, n, '--help'))}" for n in inner
        ]
        title = f"`sail-jax {name}`"
        parts.append(Page(f"commands-{name}", title, "\n".join(texts), (_escaped(command.about),)))
    about = f"The output of `--help` of each command.\n\n{_text(_printed('--help'))}"
    return Page("commands", "Commands", about, columns=("command", "what it does"), parts=parts)


def studies() -> Page:
    """Makes the pages of the studies: findings, figures, presets and the fields of their configs.

    Returns:
      Their index.
    """
    from experiments.lab import registry

    parts = []
    for name, study in registry.studies().items():
        _, _, more = (inspect.getdoc(_imported(study.module)) or "").partition("?")
        text = (
            f"{gallery.shown(name)}## {study.question}\n\n{_prose(more)}\n\n"
            f"Presets: {_code(study.presets)}\n\n{_text(_printed('run', name, '--help'))}"
        )
        about = (study.question, gallery.PICTURES[name].caption)
        parts.append(Page(f"study-{name}", f"`{name}`", text, about))
    about = (
        "These pages are generated from the studies. `sail-jax run NAME` runs a study. It writes "
        "one result with its figures, and prints a finding for each claim. See "
        "[Experiments](../how_to/experiments.md)."
    )
    return Page("studies", "Studies", about, columns=("study", "question", "finding"), parts=parts)


def _printed(*argv: str) -> str:
    from sail_jax.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(argv)
    return out.getvalue()


# Papers


def papers() -> Page:
    """Makes the pages of the papers of the ledger: their statements, and the claims that test them.

    Returns:
      Their index, with a page for each paper. That of a paper that is covered is an index of its
      statements, whose pages have the claims.
    """
    from theory import claims

    printed, every = figures.read(), {claim.id: claim for claim in claims.all_claims()}
    parts = [_paper(key, every, printed.get(key)) for key in bibliography()]
    counts = {key: [*paper.counts().values()] for key, paper in printed.items()}
    reach = [
        (f"[{bibliography()[key]['title']}](paper-{key}.md)", *map(str, found))
        for key, found in counts.items()
    ]
    total = [str(sum(found)) for found in zip(*counts.values(), strict=True)]
    meaning = "\n".join(f"{status}\n: {text}\n" for status, text in figures.HOW_FAR.items())
    about = """Five papers are covered statement by statement and figure by figure. The ledger has
claims on one statement of each of the others. A *statement* is a theorem, a lemma, a figure or a
numbered equation. A *claim* is a closed form and a simulation of the same quantity. A statement
that is wrong as printed stays in the ledger. It is expected to fail, and has a correction next to
it. This page is generated from the ledger, like the output of `sail-jax verify --coverage`.
`sail-jax verify` computes the verdicts."""
    more = f"""(how-far)=
## How far figures and settings were run

Each paper's page also lists every figure, table and setting, with the command that runs it. The
table counts them. If the panels of a figure were run differently, the panels are counted.

{table(("paper", *figures.HOW_FAR), [*reach, ("**all**", *total)])}

{meaning}"""
    head = ("paper", "citation", "statements", "claims", "wrong as printed")
    return Page("papers", "The papers", about, columns=head, parts=parts, more=more)


def _paper(key: str, claims: Mapping[str, Any], printed: figures.Paper | None) -> Page:
    """The page of a paper. That of a paper that is covered is an index of its statements."""
    from theory import coverage

    paper = bibliography()[key]
    own = {i: claim for i, claim in claims.items() if i.startswith(f"{key}/")}
    wrong = sum(not claim.expected for claim in own.values())
    check = f"Check them: `sail-jax verify --claims '{key}/*'`."
    about = _citation(paper), "1", str(len(own)), str(wrong)
    if printed is None:
        text = f"The ledger has {len(own)} claims on one statement of this paper. {check}\n\n"
        text += "\n".join(_claim(i, claim) for i, claim in own.items())
        return Page(f"paper-{key}", paper["title"], f"{about[0]}\n\n{text}", about)
    answers = coverage.answers(claims.values())
    covered = [statement for statement in answers if statement.paper == key]
    parts = [page for s in covered for page in _statement(s, answers[s], claims)]
    text = (
        f"{about[0]}\n\n{coverage.EQUATIONS[key]} numbered equations, {len(covered)} statements, "
        f"{len(own)} claims, {wrong} of them wrong as printed. {check} {_bounds(own.values())}"
    )
    return Page(
        f"paper-{key}",
        paper["title"],
        text,
        (about[0], str(len(covered)), *about[2:]),
        ("statement", "equations", "claims", "wrong as printed"),
        parts,
        _figures(printed, key, own),
    )


def _bounds(claims: Iterable[Any]) -> str:
    """Counts how sharp the bounds of a paper are."""
    from experiments.studies.ledger import attacks

    found = attacks.tally([attacks.kind(claim) for claim in claims if claim.bound])
    return f"Bounds: {found} (see [Read a row of the ledger](../tutorials/ledger.md))."


def _statement(
    statement: "Statement", tests: Sequence[str], claims: Mapping[str, Any]
) -> Iterator[Page]:
    """The rows of a statement in the index of its paper, each with a page of at most `CLAIMS`
    claims. A claim on several statements is on the page of the first."""
    from theory import coverage

    place = coverage.STATEMENTS.index(statement)
    paper = f"A part of [{bibliography()[statement.paper]['title']}](paper-{statement.paper}.md)."
    runs = [tests[k : k + CLAIMS] for k in range(0, len(tests), CLAIMS)] or [()]
    for number, run in enumerate(runs, 1):
        title = statement.name + f" ({number} of {len(runs)})" * (len(runs) > 1)
        texts = [_claim(i, claims[i]) for i in run if coverage.position(claims[i]) == place]
        links = ", ".join(f"[{_short(i)}](#{_anchor(i)})" for i in run)
        wrong = sum(not claims[i].expected for i in run)
        yield Page(
            f"paper-{statement.paper}-{_slug(title)}",
            _escaped(title),
            "\n".join([f"{paper}\n", *texts]) if texts else "",
            (
                coverage._spelt(statement.equations),
                links or f"none: {_escaped(statement.reason)}",
                str(wrong or ""),
            ),
        )


def statements() -> dict[str, dict[str, str]]:
    """Finds where the site has the claims on each statement.

    Returns:
      For each paper by its number at arXiv, labels by statement: "Theorem 3.6", "(10)".
    """
    from theory import claims, coverage

    keys = {key: entry.get("journal", "") for key, entry in bibliography().items()}
    numbers = {key: re.search(r"\d{4}\.\d{5}", text) for key, text in keys.items()}
    every = {claim.id: claim for claim in claims.all_claims()}
    found: dict[str, dict[str, str]] = {}
    for statement, names in coverage.answers(every.values()).items():
        if names and (number := numbers[statement.paper]):
            of_paper = found.setdefault(number[0], {})
            # A claim on the statement's own page, if there is one.
            own = max(names, key=lambda i: coverage.position(every[i]))
            for name in (statement.name, *(f"({n})" for n in statement.equations)):
                of_paper.setdefault(name.partition(",")[0], _anchor(own))
    return found


def _figures(paper: figures.Paper, key: str, claims: Iterable[str]) -> str:
    """The section on the figures, tables and settings of a paper."""
    found = paper.counts()
    counts = ", ".join(f"{n} {status}" for status, n in found.items() if n)
    rows = [_figure(line, key, claims) for line in paper.lines]
    return (
        "## Figures, tables and settings\n\n"
        f"The paper has {sum(found.values())} figures (or panels, if they differ), tables and "
        f"settings: {counts}. [Meaning of these words](#how-far). `sail-jax run` runs the studies."
        f"\n\n{table(('printed', 'how far', 'here', 'what differs'), rows)}\n"
    )


def _figure(line: figures.Line, key: str, claims: Iterable[str]) -> Row:
    """The row of a figure, table or setting: its subject, its status, the commands, the reason."""
    here, own = ([_command(c) for c in commands] for commands in (line.here, line.own))
    names = figures.statements(line, (i.removeprefix(f"{key}/") for i in claims))
    links = [f"[{_escaped(n.rsplit('/', 1)[0])}](#{_anchor(f'{key}/{n}')})" for n in names]
    places = [*here, *(["*the paper's own setting:*", *own] if own else [])]
    places += [f"claims {', '.join(links)}"] if links else []
    about = f"**{_escaped(line.item)}**: {_escaped(line.shows)}"
    return about, line.how_far, "<br>".join(places), _escaped(line.why)


def _command(text: str) -> str:
    """A command of `figures.yaml` in its printed form: `sail-jax run` is left out of studies."""
    return f"`{text}`" if figures.command(text)[0] == "run" else f"`sail-jax {text}`"


def bibliography() -> dict[str, dict[str, str]]:
    """Reads the papers' entries.

    Returns:
      The fields of each paper in `papers.bib`, by its key.
    """
    text = re.sub(r"\{\\(\W|u|v|c)\{?(\w)\}?\}", _accented, (HERE / "papers.bib").read_text())
    entries = re.findall(r"^@(?!software)\w+\{([\w-]+),\n(.*?)^\}", text, re.M | re.S)
    return {
        key: {name: " ".join(value.split())
              for name, value in re.findall(r"(\w+)\s*=\s*\{(.*?)\},?\n", body, re.S)}
        for key, body in entries
    }  # fmt: skip


def _accented(letter: re.Match[str]) -> str:
    """Converts a letter with an accent, such as `{\\u{g}}`, from BibTeX's form."""
    accents = {"'": "acute accent", "`": "grave accent", '"': "diaeresis", "~": "tilde"}
    accents |= {"^": "circumflex accent", "u": "breve", "v": "caron", "c": "cedilla"}
    return normalize("NFC", letter[2] + lookup(f"combining {accents[letter[1]]}"))


def _citation(paper: dict[str, str]) -> str:
    people = paper["author"].split(" and ")
    names = [" ".join(reversed(p.split(", "))) for p in people]
    where = paper.get("journal", paper.get("note", "")).removeprefix("arXiv preprint ")
    parts = [", ".join(names), _arxiv(where), paper.get("year", "")]
    return ". ".join(filter(None, parts)) + "."


def _short(name: str) -> str:
    return _escaped(name.split("/", 1)[1])


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def _anchor(name: str) -> str:
    return f"claim-{_slug(name)}"


def _claim(name: str, claim: Any) -> str:
    from experiments.studies.ledger import attacks

    found, sharp = attacks.known(claim), attacks.sharpness(claim)
    if found:
        sharp += f"; problems: {found.problems}; nearest at {attacks.point(found)}"
    facts = [
        f"**Status.** {claim.status}" + ("" if claim.expected else ": expected to fail"),
        f"**Claim.** {_escaped(claim.statement)}",
        f"**Source.** {_escaped(claim.source)}",
        f"**Evaluated at.** {_escaped(claim.domain)}",
        f"**Compared.** simulated {_escaped(claim.relation)} predicted",
        f"**Sharpness.** {_escaped(sharp)}" if sharp else "",
        f"**Note.** {_escaped(claim.note)}" if claim.note else "",
    ]
    body = "\n".join(f"- {fact}" for fact in facts if fact)
    return f"({_anchor(name)})=\n## {_short(name)}\n\n{body}\n"


# Words and tables


def _sentence(value: Any) -> str:
    """The first sentence of a docstring."""
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(first.split())


def _prose(text: str) -> str:
    return "\n\n".join(_escaped(" ".join(p.split())) for p in text.strip().split("\n\n"))


def _escaped(text: str) -> str:
    """Escapes the markup of Markdown, except names in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if i % 2 else re.sub(r"([*_<>\[\]$\\|~^])", r"\\\1", p)
                   for i, p in enumerate(parts))  # fmt: skip


def _text(printed: str) -> str:
    # Lines of this language wrap; those of other printed text, such as tables, do not.
    return f"```none\n{printed.rstrip()}\n```\n"


def _code(names: Iterable[str], join: str = ", ") -> str:
    return join.join(f"`{name}`" for name in names)


def _link(module: str, name: str) -> str:
    return f"{{py:obj}}`{name} <{module}.{name}>`"
