"""The engine ``ray`` where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.ray.engine import RayEngines


def test_without_ray_the_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"needs the package ray.* pip install 'djinn-torch\[ray\]'"):
        RayEngines().open(tmp_path)
    assert list(tmp_path.iterdir()) == []
