"""Every law is broken by some plugin, and the kit says which law it was."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from djinn_conformance import specs
from djinn_conformance.laws import is_thorough

_FOLDER = Path(__file__).parent / "broken"


def _broken(kind: str) -> dict[str, tuple[str, set[str]]]:
    path = _FOLDER / f"broken_{kind}.py"
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return dict(module.BROKEN)


@pytest.mark.parametrize("kind", specs.kinds())
def test_each_law_has_a_plugin_that_breaks_it(kind: str) -> None:
    laws = {law.id for law in specs.kind_spec(kind).laws}
    assert {law for law, _ in _broken(kind).values()} == laws


@pytest.mark.parametrize("kind", specs.kinds())
def test_broken_plugins_are_caught_by_the_law_named_for_them(kind: str, kit: Any) -> None:
    broken = _broken(kind)
    laws = {law.id for law in specs.kind_spec(kind).laws}
    plugin = kit.install_broken(kind)
    # Whether no other law is broken either is looked at where there is time.
    named = () if is_thorough() else ("-k", _of_the_laws(kind, broken))
    outcome = kit.run(f"--djinn-plugin={kind}:{plugin}", *named)
    healthy = set(outcome.laws) - set(broken)
    assert healthy, outcome.output
    assert outcome.status == pytest.ExitCode.TESTS_FAILED, outcome.output
    faults = [f"{name} is healthy and breaks {outcome.failed(name)}" for name in healthy if outcome.failed(name)]
    for name, (law, also) in broken.items():
        assert set(outcome.laws[name]) == (laws if is_thorough() else {law}), name
        if law not in outcome.failed(name):
            faults.append(f"{name} breaks {law}, which {outcome.laws[name].get(law)}")
        if outcome.failed(name) - {law} - also:
            faults.append(f"{name} breaks {law}, and these failed too: {outcome.failed(name) - {law} - also}")
        if not re.search(rf"^{kind} .*broken-{kind}:{name}\b.* {re.escape(law)}\b", outcome.output, re.MULTILINE):
            faults.append(f"the closing table does not say that {name} breaks {law}")
    assert not faults, "\n".join([*faults, outcome.output[-3000:]])


def _of_the_laws(kind: str, broken: dict[str, tuple[str, set[str]]]) -> str:
    """Select what is healthy, and of every broken plugin the law that it breaks."""
    unharmed = " and ".join(f"not broken-{kind}:{name}" for name in broken)
    return " or ".join([f"({unharmed})", *(f"(broken-{kind}:{name} and {law})" for name, (law, _) in broken.items())])
