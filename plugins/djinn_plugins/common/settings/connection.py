"""The settings of connections to servers. The transports that connect declare them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import attrs

from djinn.errors import ConfigurationError
from djinn.settings import Declarations, setting

if TYPE_CHECKING:
    from djinn.plugins.manager import Plugins

__all__ = ("MAX_NAME", "ResumeSettings", "TlsSettings", "UploadSettings", "add_connection_settings",
           "client_authorities", "configured_here", "settings_here")

_Settings = TypeVar("_Settings")
MAX_NAME = 128
"""Characters in the name of a session, or of a value that it keeps."""


@attrs.frozen
class TlsSettings:
    """Encryption of connections, and the client's certificate."""

    tls_ca: str = setting(
        "", help="file with the certificates of the authorities that the client trusts for a `tls://` server; empty: "
                 "the system's")
    tls_cert: str = setting("", help="file with the client's certificate, for servers that require one")
    tls_key: str = setting("", help="file with its key; empty: the key is in the certificate's file")

    def __attrs_post_init__(self) -> None:
        if self.tls_key and not self.tls_cert:
            raise ConfigurationError("There is a tls_key and no tls_cert.", hint="Give both, or neither.")


@attrs.frozen
class ResumeSettings:
    """What happens when a connection breaks and the server is alive."""

    resume: bool = setting(
        True, help="when a connection breaks and the server lives, the session resumes over a new one")
    resume_timeout_s: float = setting(30.0, help="seconds to try that", above=0)
    resume_bytes: int = setting(
        64 * 2**20, help="bytes of sent data that the client may keep for that", minimum=0)
    early_answers: bool = setting(
        True, help="a server that has run ahead of a loop sends the values that the loop will ask for; needs `resume`")


@attrs.frozen
class UploadSettings:
    """Whether a server may keep uploads."""

    owner: str = setting(
        "auto", help="a secret of yours: uploads of sessions with the same secret are kept by the server, and not sent "
                     "again; `auto`: this process alone, and only if the server is another machine; empty: nothing is "
                     "kept", secret=True)


def client_authorities() -> str:
    """Return the setting `tls_ca` of clients here, for a program that is no session and connects as a client does.

    Raises:
        ConfigurationError: A setting is unknown or has an invalid value.
    """
    return settings_here(TlsSettings).tls_ca


def settings_here(kind: type[_Settings]) -> _Settings:
    """Return settings of a plugin as `configured_here` gives them.

    Raises:
        ConfigurationError: A setting is unknown or has an invalid value.
    """
    return configured_here().settings(kind)


def configured_here() -> Plugins:
    """Return plugins with the settings that the environment and the file give, for a program that is no session.

    Raises:
        ConfigurationError: A setting is unknown or has an invalid value.
    """
    from djinn.plugins.manager import Plugins
    from djinn.settings.resolved import selection_of

    plugins = Plugins.load(selection_of({}, os.environ), kinds=())
    plugins.configure({}, os.environ)
    return plugins


def add_connection_settings(settings: Declarations) -> None:
    """Declare the settings of connections."""
    for kind in (TlsSettings, ResumeSettings, UploadSettings):
        settings.add(kind)
