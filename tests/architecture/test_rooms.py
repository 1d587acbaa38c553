"""Each room of the plugins says what it is, and a plugin imports no other plugin."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from support.pages.import_graph import imported_at_run_time, rooms

ROOT = Path(__file__).parents[2]
PLUGINS: set[str] = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["djinn"].values()}
OPEN = ("djinn_plugins.client.later", "djinn_plugins.cluster.asking", "djinn_plugins.cluster.kinds",
        "djinn_plugins.cluster.messages", "djinn_plugins.server.kinds", "djinn_plugins.server.options",
        "djinn_plugins.server.tenant_limits", "djinn_plugins.server.tenants", "djinn_plugins.server.turn_queue",
        "djinn_plugins.sessions.named.face", "djinn_plugins.sessions.named.kept")
"""Modules of plugins that others may import: what they agree on with the plugins around them."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


def plugin_of(module: str) -> str:
    """Name the plugin that a module belongs to; empty if it belongs to none."""
    parts = module.split(".")
    return next((name for length in range(len(parts), 1, -1) if (name := ".".join(parts[:length])) in PLUGINS), "")


def is_open(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in OPEN)


def imports_of_plugins(folder: str) -> set[tuple[str, str]]:
    return {(module_of(path), name) for path in sorted((ROOT / folder).rglob("*.py"))
            for name in imported_at_run_time(path)
            if name.startswith("djinn_plugins.") and plugin_of(name) and not is_open(name)}


def test_a_plugin_imports_no_other_plugin_but_the_one_around_it() -> None:
    found = {(module, name) for module, name in imports_of_plugins("plugins")
             if plugin_of(module) != plugin_of(name) and not plugin_of(module).startswith(f"{plugin_of(name)}.")}
    assert not found


def test_the_conformance_kit_reaches_plugins_through_the_plugin_manager_only() -> None:
    assert not imports_of_plugins("conformance")


def test_each_open_module_is_imported_by_another_plugin() -> None:
    used = {name for folder in ("plugins", "conformance") for path in (ROOT / folder).rglob("*.py")
            for name in imported_at_run_time(path) if plugin_of(name) != plugin_of(module_of(path))}
    assert [each for each in OPEN if not any(name == each or name.startswith(f"{each}.") for name in used)] == []


def test_each_room_has_a_page_that_says_what_it_is_and_where_its_tests_and_laws_are() -> None:
    lacking = {}
    for room, folder in rooms().items():
        page = folder / "README.md"
        text = page.read_text() if page.exists() else ""
        missing = [word for word in ("It may import:", "Tests:", "Laws:") if word not in text]
        if not text.startswith(f"# {room}\n") or missing or len(text.splitlines()) > 12:
            lacking[room] = missing
    assert not lacking


def test_the_picture_of_the_rooms_names_each_of_them() -> None:
    drawn = set(re.findall(r"<text x=[^>]*>([a-z]+)</text>", (ROOT / "docs" / "rooms.svg").read_text()))
    assert drawn == {"kernel", *rooms()}


def test_the_architecture_page_begins_with_ten_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## The ten files to read first\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. \[([\w/.]+)\]", section, re.MULTILINE)
    assert len(files) == 10
    assert [file for file in files if not (ROOT / file).is_file()] == []
