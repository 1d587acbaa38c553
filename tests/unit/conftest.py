"""Small real distributions, installed into a folder of the test's own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that brings one plugin, and make it importable here.

    ``install(plugin, code, distribution=..., version=..., module=...)`` gives the folder to put on a path.
    """
    known = set(sys.modules)

    def make(
        plugin: str, code: str, *, distribution: str = "", version: str = "1.2.3", module: str = "",
    ) -> Path:
        module = module or plugin.replace("-", "_")
        distribution = distribution or plugin
        folder = tmp_path / distribution
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[djinn]\n{plugin} = {module}\n")
        (folder / f"{module}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
