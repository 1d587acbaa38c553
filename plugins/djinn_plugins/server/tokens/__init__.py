"""The authenticator ``tokens``: one token for all clients, or a file of tenants with their tokens.

Provides ``djinn token``, which writes that file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from djinn_plugins.server.kinds.authenticator import AuthenticatorFactory

__all__ = ("djinn_register_authenticators", "djinn_register_commands")


@hookimpl
def djinn_register_authenticators(register: Callable[[AuthenticatorFactory], None]) -> None:
    """Register the authenticator."""
    from djinn_plugins.server.tokens.authenticators import TokenAuthentication

    register(TokenAuthentication())


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add the commands ``djinn token create``, ``rotate``, ``revoke`` and ``list``."""
    import typer

    from djinn_plugins.server.tokens.token_command import create, list_tokens, revoke, rotate

    tokens = typer.Typer(name="token", no_args_is_help=True, help="Say who may use a server: make, replace, take away "
                                                                  "and list tokens.")
    tokens.command("create")(create)
    tokens.command("rotate")(rotate)
    tokens.command("revoke")(revoke)
    tokens.command("list")(list_tokens)
    app.add_typer(tokens)
