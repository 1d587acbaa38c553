"""The site of the documentation, built by ``nox -s docs`` with Sphinx."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_HERE = Path(__file__).parent
_USE = ("tutorial", "notebooks/first_steps", "notebooks/what_a_graph_means", "notebooks/a_shared_server", "api",
        "configuration", "server", "recovery", "cuda", "dynamo", "patterns", "pictures", "planning", "async", "several",
        "errors")
_KNOW = ("compatibility", "conformance", "performance", "foreign", "reliability", "threats")
_LIBRARIES = tuple(sorted(path.name for path in (_HERE.parent / "plugins").glob("djinn_lib_*")))
_EXTEND = ("architecture", "glossary", "plugins/index",
           *(f"autoapi/{package}/index" for package in ("djinn", *_LIBRARIES)))
_LINK_UP = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)[^)]*\)")

project = "djinn"
version = release = tomllib.loads((_HERE.parent / "pyproject.toml").read_text())["project"]["version"]
extensions = ["autoapi.extension", "myst_nb", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = f"djinn {version}"
exclude_patterns = ["results/*.csv"]
# Anchors are those that GitHub gives to headings, where the pages are read, too.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# The modules are read, not imported, so neither PyTorch nor djinn has to be installed.
autoapi_dirs = ["../djinn", *(f"../plugins/{library}" for library in _LIBRARIES)]
autoapi_root = "autoapi"
autoapi_add_toctree_entry = False
# Fields that "Attributes:" describes are listed once more with their types.
napoleon_use_ivar = True
autoapi_options = ["members", "undoc-members", "show-inheritance", "show-module-summary"]
autoapi_member_order = "groupwise"
# Tests run the notebooks; the site shows what they printed then.
nb_execution_mode = "off"
suppress_warnings = ["autoapi.python_import_resolution"]


def _adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what GitHub's readers do not need: the tree of pages; and leave out links to files of the repository."""
    page = Path(app.env.doc2path(name))
    if page.suffix != ".md":
        return

    def kept(link: re.Match[str]) -> str:
        return link[0] if (page.parent / link[2]).resolve().is_relative_to(_HERE) else link[1]

    text = _LINK_UP.sub(kept, source[0])
    for caption, pages in (("Use", _USE), ("Know", _KNOW), ("Extend", _EXTEND)) if name == "index" else ():
        text += "\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"
    if name == "plugins/index":
        kinds = sorted(page.stem for page in (_HERE / "plugins").glob("*.md") if page.stem != "index")
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(kinds) + "\n```\n"
    source[0] = text


def setup(app: Sphinx) -> None:
    """Register what adapts the pages."""
    app.connect("source-read", _adapt)
