"""The program ``djinn``. It has two built-in commands; plugins provide the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from djinn.errors import ConfigurationError, DjinnError, PluginError
from djinn.plugins.manager import Plugins, Registered
from djinn.settings.resolved import selection_of
from djinn.settings.selection import PluginSelection
from djinn_plugins.cli.commands import add_commands, import_djinn_first, reflow
from djinn_plugins.cli.listing import PluginRow, rows_of
from djinn_plugins.cli.settings_command import SettingRow, settings_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ("build", "main")

_SELF_REPORTING = ("plugins", "doctor")
"""Commands that report broken plugins themselves."""

_SHOWN_KINDS = ("mode",)
"""Kinds whose objects the help of a command lists; their modules import PyTorch when they are used."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: Always. The status is 1 if a djinn error was printed, 2 if the command line is wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app, problems = build(os.environ)
        command = next((argument for argument in given if not argument.startswith("-")), "")
        if command not in _SELF_REPORTING:
            for problem in problems:
                print(f"djinn: left out: {problem}", file=sys.stderr)
        app(given, prog_name="djinn")
    except DjinnError as error:
        if os.environ.get("DJINN_DEBUG", "").lower() not in ("", "0", "false", "no", "off"):
            raise
        print(f"djinn: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        sys.exit(1)


def build(environ: Mapping[str, str]) -> tuple[typer.Typer, list[DjinnError]]:
    """Create the program, with all plugins' commands.

    Plugins register hardly any objects here, since that imports PyTorch: help and mistakes are answered without it.
    Commands that need the objects load the plugins themselves.

    Args:
        environ: Environment variables; ``DJINN_PLUGINS`` selects plugins.

    Returns:
        The program, and the errors of broken plugins, which are left out.
    """
    problems: list[DjinnError] = []
    broken: list[PluginError] = []
    selection = PluginSelection()
    try:
        selection = selection_of({}, environ)
    except ConfigurationError as error:
        problems.append(error)
    plugins = Plugins.load(selection, problems=broken, kinds=_SHOWN_KINDS)
    app = typer.Typer(name="djinn", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_program)
    commands: list[Registered] = []
    _add_plugins(app, selection, commands, problems)
    _add_settings(app, plugins, environ)
    _add_doctor(app, selection, problems, environ)
    commands += add_commands(plugins, app, broken)
    reflow(app)
    import_djinn_first(app)
    problems += broken
    return app, problems


def _print_version(wanted: bool) -> None:
    if wanted:
        from djinn_plugins.cli.versions import djinn_version

        print(f"djinn {djinn_version()}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Unmodified PyTorch on an accelerator that is somewhere else."""


def _add_plugins(
    app: typer.Typer, selection: PluginSelection, commands: Sequence[Registered], problems: Sequence[DjinnError]
) -> None:
    @app.command("plugins")
    def list_plugins(
        as_json: JsonOption = False,
        layers: Annotated[bool, typer.Option("--layers", help="List the layers of a session, in their order.")] = False,
    ) -> None:
        """List the active plugins, their distributions, and the plugins that they replace."""
        if layers:
            _print_layers(as_json=as_json)
            return
        plugins, found = _complete(selection, problems)
        rows = rows_of(plugins, commands)
        if as_json:
            _print_json({"plugins": rows, "problems": [_told(problem) for problem in found]})
        elif sys.stdout.isatty():
            _print_table(_plugin_table(rows))
        else:
            _print_lines([_plugin_cells(row) for row in rows])
        if not as_json:
            for problem in found:
                print(f"djinn: {problem}", file=sys.stderr)
        if found:
            raise typer.Exit(1)


def _print_layers(*, as_json: bool) -> None:
    import djinn
    from djinn_plugins.cli.session_layers import layers_of

    rows = layers_of(djinn.init())
    djinn.shutdown()
    if as_json:
        _print_json({"layers": rows})
    else:
        _print_lines([attrs.astuple(row) for row in rows])


def _add_settings(app: typer.Typer, plugins: Plugins, environ: Mapping[str, str]) -> None:
    @app.command("settings")
    def list_settings(as_json: JsonOption = False) -> None:
        """List every setting: its value here, where that comes from, and what is allowed."""
        plugins.configure({}, environ)
        rows = list(settings_of(plugins))
        if as_json:
            _print_json({"settings": rows})
        elif sys.stdout.isatty():
            _print_table(_settings_table(rows))
        else:
            _print_lines([(row.name, row.value, row.origin or "default", row.variable, row.plugin or "djinn", row.help)
                          for row in rows])


def _add_doctor(
    app: typer.Typer, selection: PluginSelection, problems: Sequence[DjinnError], environ: Mapping[str, str]
) -> None:
    @app.command("doctor")
    def doctor(
        server: Annotated[str, typer.Option(help="Address to try, instead of DJINN_SERVER.")] = "",
        token: Annotated[str, typer.Option(help="Token to try, instead of DJINN_TOKEN.")] = "",
        as_json: JsonOption = False,
    ) -> None:
        """Check everything that a session needs, and say how to fix each problem."""
        from djinn_plugins.cli.doctor import examine
        from djinn_plugins.cli.doctor_view import lines_of, print_checks

        plugins, found = _complete(selection, problems)
        try:
            plugins.configure({"server": server or None, "token": token or None}, environ)
        except ConfigurationError as error:
            found.append(error)
        checks = examine(plugins, found)
        healthy = all(check.ok for check in checks)
        if as_json:
            _print_json({"ok": healthy, "checks": checks})
        elif sys.stdout.isatty():
            print_checks(checks)
        else:
            print("\n".join(lines_of(checks)))
        if not healthy:
            raise typer.Exit(1)


def _complete(selection: PluginSelection, problems: Sequence[DjinnError]) -> tuple[Plugins, list[DjinnError]]:
    """Load the plugins with their objects; return them, and the problems of these and of the commands."""
    broken: list[PluginError] = []
    plugins = Plugins.load(selection, problems=broken)
    told = {str(problem) for problem in broken}
    return plugins, [*(problem for problem in problems if str(problem) not in told), *broken]


def _told(problem: DjinnError) -> dict[str, str]:
    return {"code": problem.code, "summary": problem.summary, "hint": problem.hint}


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, default=attrs.asdict, indent=2))


def _print_lines(lines: Sequence[Sequence[str]]) -> None:
    for cells in lines:
        print("\t".join(" ".join(cell.split()) for cell in cells))


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _plugin_cells(row: PluginRow) -> tuple[str, ...]:
    state = "active" if row.active else row.note or "inactive"
    return (row.kind, row.name, state, row.plugin, row.distribution, row.replaced)


def _plugin_table(rows: Sequence[PluginRow]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("kind", "name", "state", "plugin", "distribution", "replaced", title="Plugins")
    for row in rows:
        table.add_row(*map(escape, _plugin_cells(row)), style=None if row.active else "dim")
    return table


def _settings_table(rows: Sequence[SettingRow]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "from", "variable", "plugin", "meaning", title="Settings")
    for row in rows:
        table.add_row(*map(escape, (row.name, row.value, row.origin or "default", row.variable, row.plugin or "djinn",
                                    f"{row.help}; {row.allowed}")))
    return table

