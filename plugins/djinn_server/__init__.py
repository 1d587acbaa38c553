"""``djinn serve`` and ``djinn token``: lets sessions in other processes and on other machines use an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn serve`` and ``djinn token``."""
    import typer

    from djinn_server.command import serve
    from djinn_server.token_command import create, list_tokens, revoke

    app.command("serve")(serve)
    tokens = typer.Typer(name="token", no_args_is_help=True, help="Say who may use a server: make, take away and list "
                                                                  "tokens.")
    tokens.command("create")(create)
    tokens.command("revoke")(revoke)
    tokens.command("list")(list_tokens)
    app.add_typer(tokens)
