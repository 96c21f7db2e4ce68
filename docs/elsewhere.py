"""What the site takes from other projects: MathJax, and links to their names."""

import importlib.metadata
import zlib
from pathlib import Path

PROJECTS = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
}
NAMES = {
    "python": {
        "library/collections.abc.html": ("Callable", "Iterable", "Iterator", "Mapping", "Sequence"),
        "library/pathlib.html": ("pathlib.Path",),
        "library/typing.html": ("typing.Any", "typing.Literal", "typing.NamedTuple"),
        "library/functions.html": ("bool", "complex", "float", "int"),
        "library/stdtypes.html": ("bytes", "dict", "list", "str", "tuple"),
        "library/exceptions.html": ("KeyError", "OSError", "TypeError", "ValueError"),
    },
    "numpy": {
        "reference/generated/$.html": ("numpy.ndarray",),
        "reference/arrays.scalars.html": ("numpy.bool", "numpy.number"),
        "reference/random/generator.html": ("numpy.random.Generator",),
    },
    "jax": {"_autosummary/$.html": ("jax.Array", "jax.jit", "jax.grad", "jax.vmap")},
    "optax": {
        "api/transformations.html": ("optax.GradientTransformation",),
        "api/optimizers.html": ("optax.adam", "optax.adamw", "optax.sgd"),
    },
}
"""The names that link to other projects, by project and page; `$` is the name."""


def mathjax() -> Path:
    """Finds MathJax, which `sphinx-mathjax-offline` installs.

    Returns:
      The file with the reader of TeX, its extensions, and the output as SVG, which needs no fonts.
    """
    files = importlib.metadata.files("sphinx-mathjax-offline") or []
    (file,) = (file for file in files if file.name == "tex-svg-full.js")
    return Path(str(file.locate()))


def inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes an inventory of `NAMES` for each project.

    Sphinx would fetch whole inventories from the projects' sites, and a build without a network
    would warn.

    Args:
      folder: Where the inventories go.

    Returns:
      The value of `intersphinx_mapping`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, address in PROJECTS.items():
        lines = [_line(name, page) for page, names in NAMES[project].items() for name in names]
        head = (
            "# Sphinx inventory version 2\n"
            f"# Project: {project}\n"
            "# Version: \n"
            "# The remainder of this file is compressed using zlib.\n"
        )
        file = folder / f"{project}.inv"
        file.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
        mapping[project] = (address, str(file))
    return mapping


def _line(name: str, page: str) -> str:
    if page.endswith("collections.abc.html"):
        name = f"collections.abc.{name}"
    last = name.rsplit(".", 1)[-1]
    role = "class" if last[0].isupper() or name in TYPES else "function"
    role = "exception" if last.endswith("Error") else role
    line = f"{name} py:{role} 1 {page.replace('$', name)}#{name} -\n"
    if name != "jax.Array":
        return line
    return line + line.replace(name, "jax.jaxlib._jax.Array", 1)  # its name in signatures


TYPES = {
    *("bool", "bytes", "complex", "dict", "float", "int", "list", "str", "tuple"),
    *("numpy.bool", "numpy.ndarray", "numpy.number"),
}
"""Classes with small letters."""
