"""The site of the documentation, built by ``nox -s docs`` with Sphinx."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from furo.navigation import get_navigation_tree
from sphinx.application import Sphinx
from sphinx.environment.adapters.toctree import global_toctree_for_doc

_HERE = Path(__file__).parent
_USE = ("tutorial", "notebooks/first_steps", "notebooks/what_a_graph_means", "notebooks/a_shared_server", "run",
        "run_cuda", "libraries", "models", "named", "api", "configuration", "server", "cluster", "dashboard",
        "deployment", "recovery", "cuda", "dynamo", "patterns", "pictures", "planning", "async", "several", "earlier",
        "errors", "troubleshooting")
_KNOW = ("capabilities", "documents", "compatibility", "conformance", "performance", "foreign", "reliability", "scale",
         "threats")
_EXTEND = ("architecture", "glossary", "plugins/index",
           *(f"autoapi/{package}/index" for package in ("djinn", "djinn_plugins")))
_ENTRY = re.compile(r'<li class="toctree-l(\d+)([^"]*)"><a class="([^"]*)" href="([^"]*)">(.*?)</a>(<input )?')
"""An entry of the sidebar, with the checkbox that opens the entries below it."""
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
autoapi_dirs = ["../djinn", "../plugins/djinn_plugins"]
# Of the other rooms, only the contracts are for authors of plugins.
autoapi_ignore = [f"*/djinn_plugins/{room.name}/[!k_]*" for room in (_HERE.parent / "plugins/djinn_plugins").iterdir()
                  if room.name not in {"common", "graph", "models", "schedule", "sessions"}]
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


@cache
def _sidebar(app: Sphinx) -> str:
    """Make the tree of all pages as the start page shows it; making it for every page takes half of the build."""
    tree = global_toctree_for_doc(app.env, app.config.root_doc, app.builder, tags=app.tags, titles_only=True,
                                  maxdepth=-1)
    return str(get_navigation_tree(app.builder.render_partial(tree)["fragment"]))


def _leave_out_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    context["toctree"] = lambda **_: ""


def _add_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Adapt the tree of all pages to one of them: links start from it, and the way to it is open."""
    own = app.builder.get_target_uri(page)
    up = "../" * page.count("/")
    way: list[int] = []
    opened: dict[int, int] = {}
    for entry in _ENTRY.finditer(_sidebar(app)):
        opened[int(entry[1])] = entry.start()
        if entry[4] == own:
            way = [opened[level] for level in range(1, int(entry[1]) + 1)]
            break

    def adapted(entry: re.Match[str]) -> str:
        level, classes, link_classes, target, title, box = entry.groups(default="")
        if entry.start() in way:
            classes += " current"
            box = box and f'{box}checked="" '
        if entry.start() in way[-1:]:
            classes += " current-page"
            link_classes = f"current {link_classes}"
        target = "#" if target == own else up + target
        return f'<li class="toctree-l{level}{classes}"><a class="{link_classes}" href="{target}">{title}</a>{box}'

    context["furo_navigation_tree"] = _ENTRY.sub(adapted, _sidebar(app))


def setup(app: Sphinx) -> None:
    """Register what adapts the pages."""
    app.connect("source-read", _adapt)
    # The theme makes its own in between.
    app.connect("html-page-context", _leave_out_sidebar, priority=400)
    app.connect("html-page-context", _add_sidebar, priority=600)
