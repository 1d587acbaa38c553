"""The command ``djinn serve``."""

from __future__ import annotations

import contextlib
import enum
import gc
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer

from djinn.errors import ConfigurationError
from djinn.gc_pause import paused_collection
from djinn_plugins.server.config_file import reread, use_config
from djinn_plugins.server.options import DeclaredOption, ServeOptions, declared, options_from

if TYPE_CHECKING:
    from djinn_plugins.server.gateway import Gateway
    from djinn_plugins.server.signals import ServerLoop

__all__ = ("serve",)

USAGE_ERROR = 2
"""Exit status of an invalid command line."""
_log = logging.getLogger("djinn.server")


def serve(context: typer.Context, config: str = "", with_parent: bool = False, **_: Any) -> None:
    """Serve a device of this machine to PyTorch programs in other processes or on other machines.

    Prints one line, "djinn serving tcp://HOST:PORT", "djinn serving tls://HOST:PORT" or "djinn serving unix://PATH",
    once it accepts connections; give that address to clients as DJINN_SERVER or djinn.init(server=...). Logs go to
    standard error at DJINN_LOG_LEVEL. SIGTERM lets sessions finish for --drain-s seconds; a second SIGTERM, or Ctrl-C,
    ends the server at once. SIGHUP reloads tokens, certificates and limits, and ends no session.

    Anyone who can connect can compute here and use this machine's memory. An address that other machines can reach is
    therefore refused unless it has both: encryption (--tls-cert), and a token or tokens.
    """
    values = dict(context.params)
    if values["log_format"].value == "text":
        with contextlib.suppress(OSError):  # the log's disk may be full
            typer.echo("djinn: loading PyTorch; the address follows when the server accepts connections", err=True)
    with paused_collection():
        # This takes seconds, which `--help` and a mistaken option do not need. The package comes before its modules.
        import djinn

        assert djinn.__version__
        from djinn_plugins.server.opening import ListenError, open_server
        from djinn_plugins.server.signals import ServerLoop, catch_signals

        # What has been imported lasts as long as the process, and no collection need look at it.
        gc.freeze()

    parent = os.getppid() if with_parent else 0
    signals = catch_signals()

    def read() -> tuple[ServeOptions, list[str]]:
        now, left = reread(config, context, serve, values)
        return options_from(now), left

    try:
        options = options_from(values)
        server, reloading = open_server(options, read, context.obj or {})
        operation = ServerLoop(server, reloading.reload, lambda: reloading.options.sessions.drain_s,
                               lambda: _announce(server.address), parent)
        _run(server, operation, signals)
    except (ConfigurationError, ListenError) as error:
        typer.echo(f"djinn: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None


def _configured(context: typer.Context, path: str) -> str:
    return use_config(context, path, serve)


def _parameters() -> Iterator[inspect.Parameter]:
    """List the parameters of the command: its context, the options of `ServeOptions`, and two more."""
    yield _parameter("context", typer.Context)
    for each in declared():
        yield _parameter(each.option.parameter, _annotation(each), _default(each))
    yield _parameter("with_parent", Annotated[bool, typer.Option(
        "--with-parent", help="End, as on SIGTERM, when the process that started this one has ended.")], False)
    yield _parameter("config", Annotated[str, typer.Option(
        show_default=False, metavar="PATH", is_eager=True, callback=_configured,
        help="TOML file with values of these options, such as max-sessions = 4; the command line and the environment "
             "win. SIGHUP reloads limits, certificates, the token and drain-s.")], "")


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _annotation(each: DeclaredOption) -> Any:
    option, least, most = each.option, each.bounds.ge, each.bounds.le
    if option.unit != 1:
        # Rounded to where the attribute is within its bounds.
        least, most = least and -(-least // option.unit), most and most // option.unit
    return Annotated[_type_on_the_command_line(each.value_type), typer.Option(
        help=option.help, metavar=option.metavar or None, envvar=option.variable or None,
        show_default=option.shows_default, min=least, max=most)]


def _type_on_the_command_line(kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return enum.Enum("Choice", [(choice, choice) for choice in get_args(kind)])
    return list[str] | None if get_origin(kind) is tuple else kind


def _default(each: DeclaredOption) -> Any:
    if get_origin(each.value_type) is tuple:
        return None
    return each.default // each.option.unit if each.option.unit != 1 and each.default is not None else each.default


# Typer and `config_file` read the options from here.
serve.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]  # of any function
serve.__annotations__ = {each.name: each.annotation for each in _parameters()}


def _announce(address: str) -> None:
    try:
        print(f"djinn serving {address}", flush=True)  # noqa: T201  # the one line that callers read the address from
    except OSError as error:
        _log.warning("serving %s, which cannot be printed: %s", address, error)


def _run(server: Gateway, operation: ServerLoop, caught: list[signal.Signals]) -> NoReturn:
    """Serve until a signal arrives."""
    import anyio

    from djinn_plugins.server.signals import SIGNALS

    async def run() -> int:
        # The signals are received until the end, so that none ends the server before its workers.
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            return await server.run(lambda: operation.run(_all(caught, signals)))

    try:
        status = anyio.run(run)
    except BaseExceptionGroup as group:
        raise _only(group) from None
    # Nothing is left to clean up, and tearing PyTorch down takes seconds.
    logging.shutdown()
    os._exit(status)


async def _all(caught: list[signal.Signals], signals: AsyncIterable[signal.Signals]) -> AsyncIterator[signal.Signals]:
    """Return the signals that were caught before the event loop received them, and then those that it receives."""
    while caught:
        yield caught.pop(0)
    async for number in signals:
        yield number


def _only(group: BaseExceptionGroup) -> BaseException:
    """Return the error that ended a server, without the groups of tasks that it has passed."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
