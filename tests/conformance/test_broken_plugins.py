"""Every law is broken by some plugin, and the kit says which law it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from djinn_conformance import specs

_FOLDER = Path(__file__).parent / "broken"


def _broken(kind: str) -> dict[str, tuple[str, set[str]]]:
    path = _FOLDER / f"broken_{kind}.py"
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return dict(module.BROKEN)


@pytest.mark.parametrize("kind", specs.kinds())
def test_each_law_has_a_plugin_that_breaks_it(kind: str) -> None:
    laws = {law.id for law in specs.kind_spec(kind).laws}
    assert {law for law, _ in _broken(kind).values()} == laws


@pytest.mark.parametrize("kind", specs.kinds())
def test_broken_plugins_are_caught_by_the_law_named_for_them(kind: str, kit: Any) -> None:
    outcome = kit.run(f"--djinn-plugin={kit.install_broken(kind)}")
    broken = _broken(kind)
    laws = {law.id for law in specs.kind_spec(kind).laws}
    healthy = set(outcome.laws) - set(broken)
    assert healthy and outcome.status == 1, outcome.output
    for name in healthy:
        assert not outcome.failed(name), f"{name} is healthy and fails: {outcome.output}"
    for name, (law, also) in broken.items():
        assert set(outcome.laws[name]) == laws, name
        assert law in outcome.failed(name), f"{name} breaks {law}, which passed: {outcome.laws[name]}"
        assert outcome.failed(name) <= {law} | also, f"{name} breaks {law}, and these failed: {outcome.failed(name)}"
        assert f"broken-{kind}:{name}" in outcome.output
        assert law in outcome.output
