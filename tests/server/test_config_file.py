"""The file of ``djinn serve --config``: what it may say, and what wins over it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from djinn.errors import ConfigurationError
from djinn_plugins.server.command import serve
from djinn_plugins.server.config_file import RELOADED, read_config, reread, use_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "djinn.toml"


def test_options_by_their_names_and_nothing_else(file: Path) -> None:
    file.write_text('port = 7777\ndevice = "cuda:0,cuda:1"\nlease-s = 5\nmemory-warning = 0.7\nlook-ahead = false\n'
                    'allow-namespace = ["mine", "yours"]\nlog-format = "json"\nkeep-mib = 0\n')
    assert read_config(file, serve) == {
        "port": 7777, "device": "cuda:0,cuda:1", "lease_s": 5, "memory_warning": 0.7, "look_ahead": False,
        "allow_namespace": ["mine", "yours"], "log_format": "json", "keep_mib": 0}


@pytest.mark.parametrize(("text", "said"), [
    ("port = 70000", "it is more than 65535"), ("port = true", "port = True"), ("port = 1.5", "port = 1.5"),
    ("max-sessions = -1", "it is less than 0"), ('host = ["a"]', "host = ['a']"), ("lease-s = nan", "lease-s = nan"),
    ("allow-namespace = 1", "allow-namespace"), ('log-format = "xml"', "log-format = 'xml'"),
    ("look-ahead = 1", "look-ahead = 1"), ("lease_s = 5", "'lease_s', which is no option"),
    ('config = "x"', "'config', which is no option"), ("with-parent = true", "'with-parent', which is no option"),
    ("[max-sessions]\na = 1", "max-sessions"), ("port =", "is no TOML"), ("\xff", "is no TOML"),
])
def test_what_cannot_be_is_refused_by_name(file: Path, text: str, said: str) -> None:
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError) as caught:
        read_config(file, serve)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_token_in_a_file_that_others_can_read_is_refused(file: Path) -> None:
    file.write_text('token = "secret"')
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600") as caught:
        read_config(file, serve)
    assert "secret" not in str(caught.value)
    file.chmod(0o600)
    assert read_config(file, serve) == {"token": "secret"}


def configured(context: typer.Context, path: str) -> str:
    return use_config(context, path, small)


SEEN: list[Any] = []


def small(
    context: typer.Context,
    max_sessions: Annotated[int, typer.Option(min=0)] = 0,
    max_nodes: Annotated[int, typer.Option(min=0, envvar="SMALL_NODES")] = 0,
    max_handles: Annotated[int, typer.Option(min=0)] = 0,
    host: Annotated[str, typer.Option()] = "here",
    config: Annotated[str, typer.Option(is_eager=True, callback=configured)] = "",
) -> None:
    """Stands for `serve`, of which a test would have to start servers."""
    SEEN.append(dict(context.params))
    Path(config).write_text('max-sessions = 4\nmax-nodes = 5\nhost = "there"\n')
    SEEN.append(reread(config, context, small, context.params))


def test_the_command_line_and_the_environment_win_now_and_after_a_reload(
    file: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    SEEN.clear()
    monkeypatch.setenv("SMALL_NODES", "7")
    file.write_text('max-sessions = 1\nmax-nodes = 2\nmax-handles = 3\nhost = "elsewhere"\n')
    app = typer.Typer()
    app.command()(small)
    app(["--config", str(file), "--max-sessions", "9"], standalone_mode=False)
    began, (now, left) = SEEN
    assert began == {"max_sessions": 9, "max_nodes": 7, "max_handles": 3, "host": "elsewhere", "config": str(file)}
    assert now == began | {"max_handles": 0}, "what is not in the file any more is what it is without one"
    assert left == ["host"]
    assert {"max_sessions", "max_nodes", "max_handles"} <= RELOADED


def test_every_name_that_is_reloaded_is_an_option_of_the_command() -> None:
    assert set(RELOADED) <= set(inspect.signature(serve).parameters)
