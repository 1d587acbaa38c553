"""Settings of plugins are options of ``djinn serve``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import attrs
import pytest
import typer
from typer.testing import CliRunner

import djinn.plugins
from djinn.hookspecs import hookimpl
from djinn.plugins import Plugins
from djinn.settings import setting
from djinn_plugins.server.config_file import use_config
from djinn_plugins.server.plugin_settings import environment_of, with_settings


@attrs.frozen
class Quota:
    """Settings of a server."""

    quota_ops: int = setting(8, help="operations at a time", minimum=1)
    quota_hosts: tuple[str, ...] = setting((), help="where")
    quota_key: str = setting("", help="a key", secret=True)


class Plugin:
    @hookimpl
    def djinn_add_settings(self, settings: Any) -> None:
        settings.add(Quota, "server")


seen: list[Any] = []


def _configured(context: typer.Context, path: str) -> str:
    return use_config(context, path, serve)


def serve(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port.")] = 0,
    config: Annotated[str, typer.Option(is_eager=True, callback=_configured)] = "",
) -> None:
    """Stand in for the command."""
    seen.append((port, context.obj))


@pytest.fixture
def plugins() -> Any:
    take_back = djinn.plugins.register(Plugin())
    yield Plugins.load(names=("in-process-Plugin",))
    take_back()
    seen.clear()


def run(plugins: Plugins, *arguments: str, **environment: str) -> Any:
    app = typer.Typer()
    app.command()(with_settings(serve, plugins))
    return CliRunner(env=environment).invoke(app, list(arguments))


def test_a_setting_of_servers_is_an_option_and_the_command_line_wins(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 5\nquota-ops = 2\nquota-hosts = ["a", "b"]\nquota-key = "x"\n')
    done = run(plugins, "--config", str(file), "--quota-ops", "4", DJINN_QUOTA_KEY="y")
    assert done.exit_code == 0, done.output
    assert seen == [(5, {"quota_ops": "4", "quota_hosts": "a,b", "quota_key": "y"})]
    plugins.configure(seen[0][1], {}, "server")
    assert plugins.settings(Quota) == Quota(4, ("a", "b"), "y")


def test_a_worker_gets_the_settings_and_no_secret(plugins: Plugins) -> None:
    plugins.configure({"quota_ops": 3, "quota_hosts": ["a", "b"], "quota_key": "y"}, {}, "server")
    passed = environment_of(plugins)
    assert passed == {"DJINN_QUOTA_OPS": "3", "DJINN_QUOTA_HOSTS": "a,b"}
    plugins.configure({}, passed, "server")
    assert plugins.settings(Quota) == Quota(3, ("a", "b"))


def test_the_help_names_the_plugin_the_default_and_what_is_allowed(plugins: Plugins) -> None:
    text = " ".join(run(plugins, "--help", COLUMNS="200").output.split())
    assert "--quota-ops" in text
    assert "a whole number from 1" in text
    assert "in-process-Plugin" in text
    assert "quota_ops" not in inspect.signature(serve).parameters


def test_an_option_that_no_plugin_declares_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("quota-opps = 2\n")
    assert run(plugins, "--quota-opps", "4").exit_code == 2
    done = run(plugins, "--config", str(file))
    assert done.exit_code == 2
    assert "quota-opps" in done.output
