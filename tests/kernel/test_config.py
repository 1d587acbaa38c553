"""Arguments over environment over defaults, and every mistake told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins, PluginSelection
from djinn.settings import Config
from djinn.settings.core import LOG_LEVELS
from djinn.settings.resolved import selection_of


def resolved(given: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Resolve the kernel's settings; no plugin is loaded."""
    plugins = Plugins.load(selection_of(given, environ), names=())
    plugins.configure(given, environ)
    return plugins.settings(Config)


def test_nothing_given_gives_the_defaults() -> None:
    assert resolved({}, {}) == Config()
    assert resolved({}, {"DJINN_SERVER": "", "DJINN_DEBUG": "", "DJINN_PLUGINS": ""}) == Config()


def test_every_environment_variable_arrives() -> None:
    config = resolved({}, {
        "DJINN_SERVER": "tcp://host:1", "DJINN_TOKEN": "secret", "DJINN_PLUGINS": "scheduler=mine,-other",
        "DJINN_LOG_LEVEL": "debug", "DJINN_LOG_COMPONENT": "session,transport", "DJINN_DEBUG": "1", "PATH": "/bin",
    })
    assert config == Config(
        server="tcp://host:1", token="secret", plugins=PluginSelection({"other"}, {"scheduler": "mine"}),
        log_level="DEBUG", log_component="session,transport", debug=True)


def test_arguments_win_over_the_environment() -> None:
    environ = {"DJINN_SERVER": "tcp://host:1", "DJINN_DEBUG": "yes", "DJINN_TOKEN": "theirs"}
    config = resolved({"server": "tcp://other:2", "debug": False, "token": None}, environ)
    assert (config.server, config.debug, config.token) == ("tcp://other:2", False, "theirs")


def test_an_empty_server_wins_over_the_environment_too() -> None:
    assert resolved({"server": ""}, {"DJINN_SERVER": "tcp://host:1"}).server == ""


def test_plugins_add_to_the_environment_and_win_where_both_choose() -> None:
    made = selection_of({"plugins": {"scheduler": "mine"}}, {"DJINN_PLUGINS": "-broken,scheduler=theirs,shapes=x"})
    assert made == PluginSelection({"broken"}, {"scheduler": "mine", "shapes": "x"})


def test_none_means_never_where_it_can_mean_something() -> None:
    config = resolved({"flush_every": None, "request_timeout_s": None, "connect_timeout_s": None}, {})
    assert config == Config(flush_every=None, request_timeout_s=None)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_flags_mean_what_people_write(text: str, value: bool) -> None:
    assert resolved({}, {"DJINN_DEBUG": text}).debug is value


@pytest.mark.parametrize(("setting", "value", "allowed"), [
    ("server", "host:1", "tcp://host:port"),
    ("server", 3, "tcp://host:port"),
    ("device", 0, "cuda:0"),
    ("flush_every", 0, "from 1, or None"),
    ("flush_every", True, "from 1, or None"),
    ("flush_every", 2.5, "from 1, or None"),
    ("debug", "maybe", "true"),
    ("debug", 2, "true"),
    ("log_level", "LOUD", ", ".join(LOG_LEVELS)),
    ("log_component", ["session"], "commas"),
    ("connect_timeout_s", 0, "above 0"),
    ("connect_timeout_s", float("inf"), "above 0"),
    ("request_timeout_s", float("nan"), "above 0, or None"),
    ("request_timeout_s", "soon", "above 0, or None"),
])
def test_a_wrong_value_names_the_setting_the_value_and_what_is_allowed(
    setting: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved({setting: value}, {})
    assert f"{setting} is {value!r}" in caught.value.summary
    assert f"{setting} may be" in caught.value.hint
    assert allowed in caught.value.hint


def test_a_wrong_environment_variable_is_called_by_its_own_name() -> None:
    with pytest.raises(ConfigurationError, match="DJINN_LOG_LEVEL"):
        resolved({}, {"DJINN_LOG_LEVEL": "LOUD"})


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved({"flush_every": 0, "colour": "red"}, {"DJINN_DEBUG": "maybe"})
    for told in ("flush_every", "'colour'", "DJINN_DEBUG"):
        assert told in caught.value.summary
    assert all(field.name in caught.value.hint for field in attrs.fields(Config))


def test_a_token_is_never_shown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved({"token": b"hunter2"}, {})
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(Config(token="hunter2"))


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Config().debug = True  # type: ignore[misc]  # wrong on purpose
