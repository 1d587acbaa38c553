"""Settings of plugins: declared once, taken from several sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch

import djinn
import djinn.plugins
from djinn.errors import ConfigurationError, PluginValidationError
from djinn.hookspecs import hookimpl
from djinn.plugins import Plugins
from djinn.settings import Declarations, Settings, setting
from djinn.settings.privacy import remedy_of
from djinn_plugins.cli.settings_command import settings_of


@attrs.frozen
class Pace:
    """Settings as a plugin has them."""

    pace_ops: int = setting(8, help="operations at a time", minimum=1)
    pace_s: float = setting(0.5, help="seconds to wait", above=0)
    pace_kind: Literal["even", "bursts"] = setting("even", help="how to wait")
    pace_hosts: tuple[str, ...] = setting((), help="where")
    pace_limit_bytes: int | None = setting(None, help="most bytes", minimum=0)
    pace_key: str = setting("", help="a key", secret=True)
    pace_on: bool = setting(False, help="whether to wait")


class Plugin:
    """Declares settings, of a session if nothing else is said."""

    def __init__(self, kind: type = Pace, side: str = "session") -> None:
        self.kind, self.side = kind, side

    @hookimpl
    def djinn_add_settings(self, settings: Declarations) -> None:
        settings.add(self.kind, self.side)


@pytest.fixture
def plugin() -> Iterator[str]:
    """The name of a plugin of this process with the settings `Pace`."""
    take_back = djinn.plugins.register(Plugin())
    yield "in-process-Plugin"
    take_back()


def resolved(given: Mapping[str, Any], environ: Mapping[str, str], side: Any = "session") -> Settings:
    plugins = Plugins.load(names=("in-process-Plugin",))
    plugins.configure(given, environ, side)
    return plugins.settings


def file(tmp_path: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    """Environment variables that name a file with that text."""
    path = tmp_path / "djinn.toml"
    path.write_text(text)
    path.chmod(mode)
    return {"DJINN_CONFIG": str(path)}


def test_code_wins_over_the_environment_and_that_over_the_file(plugin: str, tmp_path: Path) -> None:
    environ = file(tmp_path, 'pace-ops = 1\npace-s = 1\npace-kind = "bursts"\n')
    made = resolved({"pace_ops": 3}, {"DJINN_PACE_OPS": "2", "DJINN_PACE_S": "2", **environ})
    assert made(Pace) == Pace(pace_ops=3, pace_s=2.0, pace_kind="bursts")
    assert made.origins["pace_ops"] == "given in the program"
    assert made.origins["pace_s"] == "DJINN_PACE_S"
    assert made.origins["pace_kind"] == environ["DJINN_CONFIG"]
    assert "pace_on" not in made.origins


def test_values_are_read_as_their_types(plugin: str) -> None:
    made = resolved({"pace_limit_bytes": None, "pace_hosts": ["a", "b"]}, {"DJINN_PACE_ON": "yes"})
    assert made(Pace) == Pace(pace_hosts=("a", "b"), pace_on=True)
    assert resolved({}, {"DJINN_PACE_HOSTS": "a, b", "DJINN_PACE_LIMIT_BYTES": "5"})(Pace) == Pace(
        pace_hosts=("a", "b"), pace_limit_bytes=5)


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("pace_ops", 0, "a whole number from 1"),
    ("pace_ops", True, "a whole number from 1"),
    ("pace_ops", 1.5, "a whole number from 1"),
    ("pace_s", 0, "a number of seconds above 0"),
    ("pace_s", float("nan"), "a number of seconds above 0"),
    ("pace_kind", "odd", "one of even, bursts"),
    ("pace_limit_bytes", -1, "a whole number of bytes from 0, or None"),
    ("pace_hosts", 3, "texts separated by commas"),
    ("pace_on", "maybe", "true"),
])
def test_an_invalid_value_is_refused_with_its_origin_and_what_is_allowed(
    plugin: str, name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved({name: value}, {})
    assert f"{name} is {value!r} (given in the program)" in caught.value.summary
    assert allowed in caught.value.hint


@pytest.mark.parametrize("origin", ["given in the program", "djinn.toml"])
def test_an_unknown_setting_is_refused_by_name(plugin: str, tmp_path: Path, origin: str) -> None:
    environ = file(tmp_path, "pace-opps = 3\n") if origin == "djinn.toml" else {}
    with pytest.raises(ConfigurationError, match=rf"'pace_opps' \(.*{origin}\)") as caught:
        resolved({} if environ else {"pace_opps": 3}, environ)
    assert "Did you mean pace_ops?" in caught.value.hint


def test_a_secret_is_never_repeated(plugin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved({"pace_key": b"hunter2"}, {})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="Others can read") as caught:
        resolved({}, file(tmp_path, 'pace-key = "hunter2"\n', 0o644))
    assert "hunter2" not in str(caught.value)
    made = resolved({"pace_key": "hunter2"}, {})
    assert made(Pace).pace_key == "hunter2"
    assert "hunter2" not in repr(made(Pace))
    plugins = Plugins.load(names=(plugin,))
    plugins.configure({"pace_key": "hunter2"}, {})
    rows = {row.name: row for row in settings_of(plugins)}
    assert rows["pace_key"].value == "set"
    assert "hunter2" not in str(rows)


@pytest.mark.parametrize(("mode", "owner", "user", "remedy"), [
    (0o600, 7, 7, ""), (0o640, 7, 7, "chmod 600 file"), (0o602, 7, 7, "chmod 600 file"), (0o400, 0, 7, ""),
    (0o440, 0, 7, ""), (0o460, 0, 7, "chmod 600 file"), (0o444, 0, 7, "chmod 600 file"),
    (0o440, 0, 0, "chmod 600 file"), (0o600, 7, 8, "chown 8 file"), (0o600, 7, 0, "chown 0 file")])
def test_who_may_read_a_file_with_a_secret(mode: int, owner: int, user: int, remedy: str) -> None:
    """The administrator may let a group of this user read one, as Kubernetes gives secrets."""
    assert remedy_of(Path("file"), os.stat_result((mode, 0, 0, 0, owner, 0, 0, 0, 0, 0)), user) == remedy


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for environ in (file(tmp_path, "no toml"), {"DJINN_CONFIG": str(tmp_path / "nowhere.toml")}):
        with pytest.raises(ConfigurationError, match=environ["DJINN_CONFIG"]):
            Plugins.configured({}, environ)


@pytest.mark.parametrize("origin", ["given in the program", "djinn.toml"])
def test_an_unknown_setting_may_be_one_of_a_plugin_that_is_switched_off(tmp_path: Path, origin: str) -> None:
    environ = file(tmp_path, "recovery-budget-s = 1\n") if origin == "djinn.toml" else {}
    given = {} if environ else {"recovery_budget_s": 1}
    with pytest.raises(ConfigurationError, match=rf"no setting 'recovery_budget_s' \(.*{origin}\).*-backend-replay"):
        Plugins.configured({"plugins": "-djinn-backend-replay", **given}, environ)
    Plugins.configured({"plugins": "-djinn-backend-replay"}, {"DJINN_RECOVERY_BUDGET_S": "1"})


def test_a_setting_of_servers_is_none_of_a_session(tmp_path: Path) -> None:
    take_back = djinn.plugins.register(Plugin(side="server"))
    try:
        with pytest.raises(ConfigurationError, match="pace_ops .* is one of a server"):
            resolved({"pace_ops": 3}, {})
        environ = file(tmp_path, "pace-ops = 3\n")
        assert resolved({}, environ)(Pace) == Pace(), "a file may be shared"
        assert resolved({}, environ, "server")(Pace) == Pace(pace_ops=3)
    finally:
        take_back()


def test_two_plugins_cannot_have_a_setting_of_the_same_name(plugin: str) -> None:
    @attrs.frozen
    class Other:
        pace_ops: int = setting(1, help="something else")

    declared = Declarations()
    declared.of("first").add(Pace)
    declared.of("second").add(Pace)
    with pytest.raises(PluginValidationError, match=r"'first' and 'third' both have a setting 'pace_ops'"):
        declared.of("third").add(Other)


def test_a_field_that_is_no_setting_is_refused() -> None:
    @attrs.frozen
    class Plain:
        words: int = 3

    with pytest.raises(PluginValidationError, match=r"Plain\.words of the plugin 'mine' is no setting"):
        Declarations().of("mine").add(Plain)


def test_a_type_that_cannot_be_read_is_refused() -> None:
    @attrs.frozen
    class Odd:
        words: bytes = setting(b"", help="words")

    with pytest.raises(PluginValidationError, match=r"'words' of the plugin 'mine' has the type <class 'bytes'>"):
        Declarations().of("mine").add(Odd)


def test_a_plugin_reads_its_settings_as_a_typed_object(plugin: str) -> None:
    seen: list[Pace] = []

    class Reader:
        @hookimpl
        def djinn_wrap_backend(self, context: Any) -> None:
            seen.append(context.settings(Pace))

    take_back = djinn.plugins.register(Reader())
    try:
        djinn.init(pace_ops=5)
        assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2
    finally:
        take_back()
        djinn.shutdown()
    assert seen == [Pace(pace_ops=5)]


def test_an_object_that_a_plugin_registers_is_given_the_settings(plugin: str) -> None:
    class Watcher:
        name = "watcher"
        pace = Pace()

        def use_settings(self, settings: Settings) -> None:
            self.pace = settings(Pace)

        def observe(self, stats: Mapping[str, int]) -> None:
            pass

    watcher = Watcher()
    take_back = djinn.plugins.register(watcher)
    try:
        plugins = Plugins.load(names=(plugin, "in-process-observer-watcher"))
        plugins.configure({"pace_ops": 4}, {})
    finally:
        take_back()
    assert watcher.pace == Pace(pace_ops=4)


_TWO = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


@pytest.mark.parametrize(("given", "said"), [
    ({"servers": _TWO[:1], "placement": "phases"}, "there is only one"),
    ({"servers": _TWO, "result_cache_bytes": 1000}, "one executor only"),
    ({"server": _TWO[0], "plugins": "backend=fleet", "result_cache_bytes": 1000}, "one executor only"),
    ({"servers": _TWO, "name": "lab"}, "needs one server"),
    ({"cluster": "tcp://127.0.0.1:1/lab", "name": "lab", "recovery": "replay"}, "cannot be recovered"),
    ({"server": _TWO[0], "name": "lab", "recovery": "replay"}, "cannot be recovered"),
    ({"server": _TWO[0], "tls_key": "key.pem"}, "no tls_cert"),
    ({"server": _TWO[0], "servers": _TWO}, "Both"),
], ids=lambda value: value if isinstance(value, str) else ", ".join(value))
def test_settings_that_contradict_each_other_are_refused_before_anything_connects(
    given: dict[str, Any], said: str,
) -> None:
    running = djinn.init()
    with pytest.raises(ConfigurationError, match=said) as refused:
        djinn.init(**given)
    assert refused.value.hint
    assert not running.closed
    djinn.shutdown()
