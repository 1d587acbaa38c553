"""Choosing what is tested, and being told what exists."""

from __future__ import annotations

from typing import Any

import pytest

from djinn.plugins import Plugins
from djinn_conformance.compositions import COMPOSED, composed
from djinn_conformance.subjects import SelectionError, select

_TWO_KINDS = """
from djinn.hookspecs import hookimpl
from djinn_plugins.graph.kinds import Annotations


class Thing:
    name = "both"

    def observe(self, stats):
        pass

    def annotate(self, graph, matches):
        return Annotations()


@hookimpl
def djinn_register_observers(register):
    register(Thing())


@hookimpl
def djinn_register_analyzers(register):
    register(Thing())
"""


def test_without_a_name_everything_is_chosen() -> None:
    chosen = select(None, Plugins.load())
    assert {"executor", "shapes", "scheduler", "transport", "classifier", "interceptor"} <= {s.kind for s in chosen}


@pytest.mark.parametrize(("name", "subjects"), [
    ("scheduler:single", ["djinn-scheduler-single:single"]),
    ("single", ["djinn-scheduler-single:single"]),
    ("djinn-scheduler-single", ["djinn-scheduler-single:single"]),
    ("transport:djinn-transport-local", ["djinn-transport-local:local"]),
    ("djinn-shapes-meta", ["djinn-shapes-meta:meta"]),
])
def test_a_name_may_be_a_plugins_an_objects_or_qualified(name: str, subjects: list[str]) -> None:
    assert list(map(str, select(name, Plugins.load()))) == subjects


def test_an_executor_is_tested_on_each_type_of_device() -> None:
    chosen = select("executor:cpu", Plugins.load())
    types = [subject.device.partition(":")[0] for subject in chosen]
    assert "cpu" in types
    assert len(set(types)) == len(types)


@pytest.mark.parametrize("served", [True, False])
def test_sessions_of_a_thorough_run_have_different_names(served: bool) -> None:
    names = list(map(str, composed(select(None, Plugins.load()), COMPOSED, served=served)))
    assert sorted(names) == sorted(set(names))
    assert "session:defaults@cpu" in names
    assert ("session:defaults in process@cpu" in names) is served


@pytest.mark.parametrize("name", ["nothing", "shapes:single", "weather:single", ""])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(name, Plugins.load())
    assert f"--djinn-plugin={name}" in str(caught.value)
    assert "scheduler:single  of djinn-scheduler-single (djinn-torch " in str(caught.value)


def test_the_run_ends_at_an_unknown_name(kit: Any) -> None:
    outcome = kit.run("--djinn-plugin=nothing")
    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert "scheduler:single  of djinn-scheduler-single" in outcome.output
    assert "Traceback" not in outcome.output


def test_one_plugin_of_two_kinds_is_tested_as_both(kit: Any) -> None:
    kit.install("acme-both", "acme_both", _TWO_KINDS)
    outcome = kit.run("--djinn-plugin=acme-both")
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    table = [line for line in outcome.output.splitlines() if "acme-both:both" in line and "kept" in line]
    assert [line.split()[0] for line in table] == ["analyzer", "observer"]
    assert "test_analyzer.py" not in kit.run("--djinn-plugin=observer:both", "-v").output


def test_a_plugin_without_anything_that_has_laws_passes_and_says_so(kit: Any) -> None:
    kit.install("acme-commands", "acme_commands", "")
    outcome = kit.run("--djinn-plugin=acme-commands")
    assert outcome.status == pytest.ExitCode.OK, outcome.output
    assert "acme-commands registers nothing that has laws." in outcome.output


def test_a_plugin_that_cannot_be_imported_is_named(kit: Any) -> None:
    kit.install("acme-broken", "acme_broken", "import no_such_module\n")
    outcome = kit.run("--djinn-plugin=acme-broken")
    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert "no_such_module" in outcome.output
    assert "acme-broken" in outcome.output
    healthy = kit.run("--djinn-plugin=scheduler:single")
    assert healthy.status == pytest.ExitCode.OK, healthy.output


def test_an_unknown_profile_lists_the_known_ones(kit: Any) -> None:
    outcome = kit.run("--djinn-plugin=scheduler:single", profile="thorough")
    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert "thorough" in outcome.output
    assert "nightly" in outcome.output


def test_a_failure_shows_law_source_and_call(kit: Any) -> None:
    outcome = kit.run(f"--djinn-plugin={kit.install_broken('observer')}")
    assert "observer.stats_unchanged: The mapping is neither changed nor written to." in outcome.output
    assert "source: djinn/kinds/observer.py" in outcome.output
    assert "counters afterwards: got " in outcome.output
    assert "should be " in outcome.output
    assert "test_stats_unchanged[broken-observer:takes-away-observer.stats_unchanged]" in outcome.output
