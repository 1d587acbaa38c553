"""Finding, checking and choosing plugins, with real distributions and no stand-ins for pluggy or importlib."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import djinn
import djinn.plugins
from djinn.errors import (
    AmbiguousPluginError,
    ConfigurationError,
    PluginError,
    PluginLoadError,
    PluginValidationError,
)
from djinn.plugins import DEFAULTS, KINDS, Plugins, PluginSelection, installed
from djinn.plugins.checks import hook_of
from djinn_plugins.cli.commands import add_commands
from djinn_plugins.cli.listing import rows_of
from djinn_plugins.schedule.schedule import ExecutionSchedule

Install = Callable[..., Path]

SCHEDULER = """
    from djinn.hookspecs import hookimpl

    class Scheduler:
        name = "{name}"
        def schedule(self, graph, devices):
            raise NotImplementedError

    @hookimpl
    def djinn_register_schedulers(register):
        register(Scheduler())
"""

TRANSPORT = """
    from djinn.hookspecs import hookimpl

    class Transport:
        name = "{name}"
        scheme = "{scheme}"
        def connect(self, address, options):
            raise NotImplementedError
        def listen(self, address, options):
            raise NotImplementedError

    @hookimpl
    def djinn_register_transports(register):
        register(Transport())
"""

COMMAND = """
    from djinn.hookspecs import hookimpl

    @hookimpl
    def djinn_register_commands(app):
        @app.command("{name}")
        def run():
            print("{name} ran")
"""


def test_a_selection_reads_the_same_from_text_items_and_mapping() -> None:
    wanted = PluginSelection({"djinn-transport-tcp"}, {"scheduler": "mine", "shapes": "meta"})
    assert PluginSelection.parse("scheduler=mine, -djinn-transport-tcp,shapes=meta") == wanted
    assert PluginSelection.parse(["scheduler=mine", "-djinn-transport-tcp", "shapes = meta"]) == wanted
    assert PluginSelection.parse(
        {"scheduler": "mine", "shapes": "meta", "disabled": ["djinn-transport-tcp"]}) == wanted
    assert PluginSelection.parse(wanted) is wanted
    assert PluginSelection.parse("") == PluginSelection.parse(None) == PluginSelection()


@pytest.mark.parametrize("given", ["nonsense", "scheduler=", "=mine", "painter=mine", "-", ["scheduler=a", ""], [3], 3])
def test_a_selection_that_means_nothing_names_the_item_and_what_is_allowed(given: object) -> None:
    with pytest.raises(ConfigurationError, match="plugins") as caught:
        PluginSelection.parse(given)  # type: ignore[arg-type]  # wrong on purpose
    assert "kind=name" in caught.value.hint
    assert all(kind in caught.value.hint for kind in KINDS)


def test_a_selection_cannot_choose_two_of_a_kind() -> None:
    with pytest.raises(ConfigurationError, match="'a' and 'b'"):
        PluginSelection.parse("scheduler=a,scheduler=b")


def test_merging_lets_the_later_choice_win_and_keeps_both_switched_off() -> None:
    merged = PluginSelection.parse("-a,scheduler=x,shapes=y").merged(PluginSelection.parse("-b,scheduler=z"))
    assert merged == PluginSelection({"a", "b"}, {"scheduler": "z", "shapes": "y"})


def test_a_selection_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PluginSelection.parse("scheduler=a").chosen["scheduler"] = "b"  # type: ignore[index]  # wrong on purpose


def test_the_built_in_plugins_load_and_bring_every_default() -> None:
    plugins = Plugins.load()
    for kind, name in DEFAULTS.items():
        found = plugins.find(kind, name)
        assert (found.name, found.plugin) == (name, f"djinn-{kind}-{name}")
        assert found.distribution.startswith("djinn-torch ")
    assert plugins.transport_for("tcp").name == "tcp"
    assert plugins.transport_for("local").name == "local"


def test_a_third_partys_plugin_is_found_and_known_by_its_distribution(install: Install) -> None:
    install("acme-scheduler", SCHEDULER.format(name="acme"), distribution="acme-tools", version="4.5")
    assert "acme-scheduler" in installed()
    found = Plugins.load(PluginSelection.parse("scheduler=acme")).find("scheduler", "single")
    assert (found.name, found.plugin, found.distribution) == ("acme", "acme-scheduler", "acme-tools 4.5")


def test_where_nothing_is_chosen_the_default_is_used(install: Install) -> None:
    install("acme-scheduler", SCHEDULER.format(name="acme"))
    assert Plugins.load().choose("scheduler", "single").name == "single"


def test_a_plugin_that_is_switched_off_is_not_imported(install: Install, tmp_path: Path) -> None:
    install("acme-broken", f"open({str(tmp_path / 'imported')!r}, 'w')\nraise RuntimeError('must not be imported')")
    plugins = Plugins.load(PluginSelection.parse("-acme-broken"))
    assert plugins.disabled == {"acme-broken": "acme-broken 1.2.3"}
    assert [(row.active, row.note) for row in rows_of(plugins) if row.plugin == "acme-broken"] == [
        (False, "switched off")]
    off = {"plugins": "-acme-broken"}
    Plugins.configured(off, {"DJINN_WHATEVER": "1", "DJINN_BROKEN_PLACE": "1"})
    with pytest.raises(ConfigurationError, match="switched off: acme-broken"):
        Plugins.configured({**off, "broken_place": 1}, {})
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("selection", ["scheduler=acme", "-djinn-scheduler-single"])
def test_a_replacement_is_used_and_says_what_it_replaced(install: Install, selection: str) -> None:
    install("acme-scheduler", SCHEDULER.format(name="acme"))
    # Third-party schedulers that are installed here as well would make the second selection ambiguous.
    names = ["acme-scheduler", "djinn-scheduler-single"]
    plugins = Plugins.load(PluginSelection.parse(selection), names=names)
    assert plugins.choose("scheduler", "single").name == "acme"
    row = next(row for row in rows_of(plugins) if row.name == "acme")
    assert (row.active, row.replaced) == (True, "djinn-scheduler-single")
    assert [row.active for row in rows_of(plugins) if row.plugin == "djinn-scheduler-single"] == [False]


def test_two_plugins_with_one_name_are_ambiguous_until_one_is_switched_off(install: Install) -> None:
    install("acme-one", SCHEDULER.format(name="same"), distribution="acme-tools")
    install("acme-two", SCHEDULER.format(name="same"), distribution="zeta-tools")
    with pytest.raises(AmbiguousPluginError) as caught:
        Plugins.load(PluginSelection.parse("scheduler=same")).choose("scheduler", "single")
    for named in ("acme-one", "acme-tools 1.2.3", "acme-two", "zeta-tools 1.2.3"):
        assert named in caught.value.summary
    assert "DJINN_PLUGINS=-acme-two" in caught.value.hint
    resolved = Plugins.load(PluginSelection.parse("scheduler=same,-acme-two"))
    assert resolved.find("scheduler").plugin == "acme-one"


def test_several_candidates_without_a_choice_are_ambiguous_and_the_remedy_works(install: Install) -> None:
    install("acme-one", SCHEDULER.format(name="first"))
    install("acme-two", SCHEDULER.format(name="second"))
    names = ["acme-one", "acme-two"]
    with pytest.raises(AmbiguousPluginError, match="'first' of acme-one .* and 'second' of acme-two") as caught:
        Plugins.load(names=names).choose("scheduler", "single")
    assert "DJINN_PLUGINS=scheduler=first" in caught.value.hint
    assert Plugins.load(PluginSelection.parse("scheduler=first"), names=names).choose("scheduler").name == "first"


def test_transports_are_chosen_by_scheme_and_may_be_ambiguous(install: Install) -> None:
    install("acme-one", TRANSPORT.format(name="one", scheme="acme"))
    install("acme-two", TRANSPORT.format(name="two", scheme="acme"))
    with pytest.raises(AmbiguousPluginError, match="'one' of acme-one .* and 'two' of acme-two"):
        Plugins.load().transport_for("acme")
    chosen = Plugins.load(PluginSelection.parse("transport=two"))
    assert chosen.transport_for("acme").name == "two"
    assert chosen.transport_for("tcp").name == "tcp"
    install("acme-tcp", TRANSPORT.format(name="mine", scheme="tcp"))
    assert Plugins.load().transport_for("tcp").name == "tcp", "without a choice, djinn's own is used"
    assert Plugins.load(PluginSelection.parse("transport=mine")).transport_for("tcp").name == "mine"
    assert Plugins.load(PluginSelection.parse("-djinn-transport-tcp")).transport_for("tcp").name == "mine"
    with pytest.raises(PluginError, match="pigeon://.*acme://.*tcp://"):
        chosen.transport_for("pigeon")


def test_two_distributions_with_one_plugin_name_are_ambiguous(install: Install) -> None:
    install("acme-scheduler", SCHEDULER.format(name="acme"), distribution="acme-old")
    install("acme-scheduler", SCHEDULER.format(name="acme"), distribution="acme-new", version="2.0")
    with pytest.raises(AmbiguousPluginError, match=r"'acme-scheduler'.*acme-new 2\.0 and by acme-old 1\.2\.3"):
        Plugins.load()


@pytest.mark.parametrize("marked", ["@hookimpl", ""])
def test_an_unknown_hook_names_the_plugin_the_nearest_hook_and_the_remedy(install: Install, marked: str) -> None:
    install("acme-typo", f"""
        from djinn.hookspecs import hookimpl
        {marked}
        def djinn_register_scheduler(register):
            pass
    """)
    named = r"'acme-typo' of acme-typo 1\.2\.3.*djinn_register_scheduler\."
    with pytest.raises(PluginValidationError, match=named) as caught:
        Plugins.load()
    assert "djinn_register_schedulers?" in caught.value.hint
    assert "DJINN_PLUGINS=-acme-typo" in caught.value.hint


def test_a_hook_that_does_not_follow_the_prefix_is_unknown_too(install: Install) -> None:
    install("acme-other", """
        from djinn.hookspecs import hookimpl
        @hookimpl
        def at_start(session):
            pass
    """)
    with pytest.raises(PluginValidationError, match="'acme-other'.*at_start"):
        Plugins.load()


def test_a_hook_that_is_not_marked_is_an_error_and_not_silence(install: Install) -> None:
    install("acme-forgot", """
        def djinn_register_schedulers(register):
            pass
    """)
    with pytest.raises(PluginValidationError, match="'acme-forgot'.*not marked") as caught:
        Plugins.load()
    assert "hookimpl" in caught.value.hint


def test_a_helper_imported_from_elsewhere_is_no_hook(install: Install) -> None:
    folder = install("acme-helper", """
        from acme_library import djinn_helper
    """)
    (folder / "acme_library.py").write_text("def djinn_helper():\n    pass\n")
    Plugins.load()


def test_a_hook_with_an_argument_that_does_not_exist_names_plugin_and_argument(install: Install) -> None:
    install("acme-arguments", """
        from djinn.hookspecs import hookimpl
        @hookimpl
        def djinn_register_schedulers(register, colour):
            pass
    """)
    with pytest.raises(PluginValidationError, match="'acme-arguments'.*colour"):
        Plugins.load()


def test_a_plugin_that_fails_to_import_names_itself_the_cause_and_a_remedy_that_works(install: Install) -> None:
    install("acme-broken", "import a_module_that_does_not_exist", distribution="acme-tools", version="0.9")
    with pytest.raises(PluginLoadError) as caught:
        Plugins.load()
    for named in ("'acme-broken'", "acme-tools 0.9", "a_module_that_does_not_exist"):
        assert named in caught.value.summary
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "DJINN_PLUGINS=-acme-broken" in caught.value.hint
    assert Plugins.load(PluginSelection.parse("-acme-broken")).choose("scheduler", "single").name == "single"


def test_a_plugin_that_fails_inside_a_hook_names_itself_and_the_hook(install: Install) -> None:
    install("acme-late", """
        from djinn.hookspecs import hookimpl
        @hookimpl
        def djinn_register_patterns(register):
            raise OSError("no such library")
    """)
    with pytest.raises(PluginLoadError, match="'acme-late'.*djinn_register_patterns.*OSError: no such library"):
        Plugins.load()


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_lacks_what_its_kind_asks_for_is_refused(install: Install, kind: str) -> None:
    hook = hook_of(kind)
    install("acme-hollow", f"""
        from djinn.hookspecs import hookimpl

        class Hollow:
            name = "hollow"

        @hookimpl
        def {hook}(register):
            register(Hollow())
    """)
    with pytest.raises(PluginValidationError, match=f"'acme-hollow'.*Hollow as {kind}, which lacks [a-z]") as caught:
        Plugins.load()
    assert re.search(r"See djinn(_plugins\.\w+)?\.kinds\.", caught.value.hint)
    assert "name" not in caught.value.summary.rpartition("lacks")[2].split()


def test_every_missing_part_is_named_and_something_that_cannot_be_called_counts_as_missing(install: Install) -> None:
    install("acme-half", """
        from djinn.hookspecs import hookimpl

        class Half:
            name = "half"
            scheme = "half"
            connect = 5

        @hookimpl
        def djinn_register_transports(register):
            register(Half())
    """)
    with pytest.raises(PluginValidationError, match=r"lacks connect\."):
        Plugins.load()


def test_registering_the_class_instead_of_an_object_is_refused(install: Install) -> None:
    install("acme-class", SCHEDULER.format(name="acme").replace("register(Scheduler())", "register(Scheduler)"))
    with pytest.raises(PluginValidationError, match="'acme-class'.*class Scheduler itself") as caught:
        Plugins.load()
    assert "register(Scheduler())" in caught.value.hint


@pytest.mark.parametrize("name", ["", "two words", "a,b", "a=b"])
def test_a_name_that_cannot_be_chosen_is_refused(install: Install, name: str) -> None:
    install("acme-name", SCHEDULER.format(name=name))
    with pytest.raises(PluginValidationError, match="'acme-name'.*with the name"):
        Plugins.load()


def test_one_plugin_cannot_register_a_name_twice(install: Install) -> None:
    install("acme-twice", SCHEDULER.format(name="acme") + "        register(Scheduler())\n")
    with pytest.raises(PluginValidationError, match="'acme-twice'.*two objects of the kind scheduler named 'acme'"):
        Plugins.load()


def test_problems_can_be_collected_and_leave_nothing_behind(install: Install) -> None:
    install("acme-broken", "import a_module_that_does_not_exist")
    install("acme-half", SCHEDULER.format(name="half") + """
    @hookimpl
    def djinn_register_patterns(register):
        register(object())

    @hookimpl
    def djinn_session_closed(stats):
        raise AssertionError("must not be called")
    """)
    problems: list[PluginError] = []
    plugins = Plugins.load(problems=problems)
    assert sorted(type(problem).__name__ for problem in problems) == ["PluginLoadError", "PluginValidationError"]
    assert "half" not in plugins.registered("scheduler")
    assert plugins.choose("scheduler", "single").name == "single"
    plugins.hook.djinn_session_closed(stats=Counter())


def test_switching_off_what_is_not_there_says_what_may_be_meant() -> None:
    with pytest.raises(PluginError, match="'djinn-transport-tpc'") as caught:
        Plugins.load(PluginSelection.parse("-djinn-transport-tpc"))
    assert "'djinn-transport-tcp'" in caught.value.hint


def test_choosing_what_is_not_there_says_what_there_is() -> None:
    plugins = Plugins.load(PluginSelection.parse("scheduler=mine"))
    with pytest.raises(PluginError, match="no scheduler named 'mine'.*'single' of djinn-scheduler-single"):
        plugins.choose("scheduler", "single")


def test_what_is_missing_because_it_is_switched_off_says_so() -> None:
    plugins = Plugins.load(PluginSelection.parse("-djinn-shapes-meta"))
    with pytest.raises(PluginError, match="no shapes.*Switched off are: djinn-shapes-meta"):
        plugins.choose("shapes", "meta")


def test_session_hooks_reach_every_plugin(install: Install) -> None:
    install("acme-watcher", """
        from djinn.hookspecs import hookimpl
        seen = []
        @hookimpl
        def djinn_session_closed(stats):
            seen.append(stats)
    """)
    plugins = Plugins.load()
    plugins.hook.djinn_session_closed(stats={"operations": 3})
    assert sys.modules["acme_watcher"].seen == [{"operations": 3}]
    assert ("hook", "djinn_session_closed") in [(row.kind, row.name) for row in rows_of(plugins)]


def test_commands_are_added_and_put_down_to_their_plugin(install: Install) -> None:
    install("acme-command", COMMAND.format(name="greet"))
    app = typer.Typer()
    plugins = Plugins.load()
    commands = add_commands(plugins, app, [])
    assert ("command", "greet", "acme-command") in [
        (row.kind, row.name, row.plugin) for row in rows_of(plugins, commands)]
    assert "greet" in [command.name for command in app.registered_commands]


def test_two_commands_of_one_name_are_an_error_and_the_second_is_taken_back(install: Install) -> None:
    install("acme-command", COMMAND.format(name="greet"))
    install("zeta-command", COMMAND.format(name="greet"))
    problems: list[PluginError] = []
    app = typer.Typer()
    add_commands(Plugins.load(), app, problems)
    assert [command.name for command in app.registered_commands].count("greet") == 1
    assert ["zeta-command" in problem.summary and "greet" in problem.summary for problem in problems] == [True]


def test_loading_only_some_plugins_leaves_the_others_alone(install: Install) -> None:
    install("acme-broken", "raise RuntimeError('must not be imported')")
    plugins = Plugins.load(names=["djinn-interceptor-device"])
    assert list(plugins.registered("interceptor")) == ["device"]
    assert not plugins.registered("scheduler")


def test_importing_the_plugin_machinery_imports_nothing_heavy() -> None:
    code = "import sys, djinn.plugins; print(sorted({'cattrs', 'rich', 'typer', 'networkx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# Plugins of this process.


def test_a_scheduler_a_pattern_and_an_observer_need_no_package() -> None:
    seen: list[str] = []

    class Backwards:
        name = "backwards"

        def schedule(self, graph: Any, devices: Any) -> ExecutionSchedule:
            seen.append(self.name)
            order = tuple(node.id for node in graph.topological_sort())
            return ExecutionSchedule(order, dict.fromkeys(order, devices[0].id), scheduler=self.name)

    class Nothing:
        name = "nothing"

        def find(self, graph: Any) -> list[Any]:
            seen.append(self.name)
            return []

    class Reader:
        name = "reader"

        def observe(self, stats: Mapping[str, int]) -> None:
            seen.append(self.name)

    taken_back = [djinn.plugins.register(plugin) for plugin in (Backwards(), Nothing(), Reader())]
    try:
        djinn.init(plugins=["scheduler=backwards"])
        assert (torch.ones(3, device="remote_accelerator:0") * 2).sum().item() == 6
        with djinn.capture() as captured:
            torch.ones(3, device="remote_accelerator:0") + 1
        assert captured.patterns == ()
    finally:
        djinn.shutdown()
        for take_back in taken_back:
            take_back()
    assert seen[0] == "backwards"
    assert {"nothing", "reader"} <= set(seen)
    assert "backwards" not in Plugins.load().registered("scheduler")


def test_a_cell_that_runs_again_replaces_its_plugin() -> None:
    class Reader:
        name = "reader"

        def observe(self, stats: Mapping[str, int]) -> None:
            """Read nothing."""

    first, second = Reader(), Reader()
    djinn.plugins.register(first)
    take_back = djinn.plugins.register(second)
    try:
        assert second in Plugins.load().all("observer")
        assert first not in Plugins.load().all("observer")
    finally:
        take_back()


def test_an_object_of_no_kind_is_refused_and_so_is_one_of_several() -> None:
    with pytest.raises(PluginValidationError, match="is of no kind"):
        djinn.plugins.register(object())

    class Both:
        name = "both"

        def find(self, graph: Any) -> list[Any]:
            return []

        def observe(self, stats: Mapping[str, int]) -> None:
            """Read nothing."""

    with pytest.raises(PluginValidationError, match="is of pattern and observer"):
        djinn.plugins.register(Both())
    djinn.plugins.register(Both(), "observer")()
