"""Settings of the documentation site: `python -m sphinx -W docs docs/_build/html`.

Pages under `generated` are written anew at every build from the code itself (see `generate.py`).
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# Read by the notebooks' kernels, which are processes of their own, and by autodoc's imports.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
os.environ["COLUMNS"] = "88"
os.environ["TTY_COMPATIBLE"] = "0"  # notebooks ask for colours, which text would show as codes
# The command `sail-jax`, as cells call it, is that of this environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# What the pages compile is kept, so that they build faster the next time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE / "_build" / ".programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import accessible  # noqa: E402
import docstrings  # noqa: E402
import elsewhere  # noqa: E402
import generate  # noqa: E402
import streams  # noqa: E402
from markup import WORDS  # noqa: E402
from sphinx.util import logging  # noqa: E402

import sail_jax  # noqa: E402
from sail_jax.cli.kernels import quick_flags  # noqa: E402

# The pages' programs run once: to optimise them takes longer than what they lose without.
os.environ.setdefault("XLA_FLAGS", quick_flags())

project = "sail-jax"
author = "the authors of sail-jax"
version = release = sail_jax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "myst_nb",
]
exclude_patterns = ["_build", "README.md"]
suppress_warnings = ["config.cache"]

# The words of docstrings: plain text with names in single backticks.
default_role = "code"
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Inventories are written here: nothing is fetched.
intersphinx_mapping = elsewhere.inventories(HERE / "_build" / ".inventories")

html_theme = "furo"
html_title = "sail-jax"
# MathJax is one file of the site, so formulas need no network. Pages without a formula lack it.
mathjax_path = "tex-svg-full.js"
html_static_path = ["_static", str(elsewhere.mathjax())]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def contents_nearby(app, pagename, templatename, context, doctree):
    """Opens the contents of the site at the page, and leaves them out of pages of source.

    All of the contents on every page would be most of the site.
    """
    contents = context["toctree"]
    if pagename.startswith("_modules/"):
        context["toctree"] = lambda **_: ""
    else:
        context["toctree"] = lambda **options: contents(**options | {"collapse": True})


def owned(app, doctree):
    """Makes a page the document of all its nodes.

    Those of a block of reStructuredText have their own, which Sphinx would store with all of its
    environment, 4 MB for each page.
    """
    for node in doctree.findall():
        node.document = doctree


def measured(app, doctree, docname):
    """Warns of a page that is too long to be read."""
    words = len(doctree.astext().split())
    if words > WORDS:
        logging.getLogger(__name__).warning(
            "%d words, more than %d: divide the page", words, WORDS, location=docname
        )


def setup(app):
    """Writes the generated pages before any page is read, and reads docstrings as plain text."""
    app.connect("html-page-context", contents_nearby, priority=100)
    app.connect("doctree-read", owned)
    app.connect("doctree-resolved", measured)
    app.connect("builder-inited", lambda app: generate.write_all(HERE / "generated"))
    docstrings.connect(app)
    accessible.connect(app)
    streams.mend()
