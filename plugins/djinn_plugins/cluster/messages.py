"""Messages between a directory, the servers that it lists, and those that ask it.

Each message is one line of JSON. Nothing else is decoded, and every field is bounded.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from djinn_plugins.common.settings.connection import MAX_NAME as MAX_SESSION_NAME

__all__ = (
    "MAX_LINE_BYTES",
    "MAX_LOAD_BYTES",
    "MAX_MODELS",
    "MAX_NAMED",
    "Accepted",
    "AskedDirectory",
    "DirectoryProblem",
    "DrainOrder",
    "Draining",
    "Join",
    "ListServers",
    "ListedServer",
    "LoadReport",
    "RenameOrder",
    "Resolve",
    "ServerList",
    "decoded",
    "encoded",
)

MAX_LINE_BYTES = 2**15
"""Longest first line of a connection."""
MAX_LOAD_BYTES = 2**22
"""Longest line of a server that has joined, and longest answer."""
MAX_MODELS = 4000
MAX_NAMED = 10_000
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Secret: TypeAlias = Annotated[str, Meta(max_length=4096)]
_Address: TypeAlias = Annotated[str, Meta(max_length=512, pattern=r"^[^\x00-\x20\x7f-\xa0]+$")]
_Model: TypeAlias = Annotated[str, Meta(max_length=256)]
_Name: TypeAlias = Annotated[str, Meta(max_length=64)]


class Join(msgspec.Struct, frozen=True, tag="join"):
    """From a server: list it for as long as this connection lasts.

    Attributes:
        key: The secret that servers share with their directory.
        name: The cluster's name; empty for any.
        address: Where clients reach the server.
    """

    key: _Secret
    name: _Name
    address: _Address


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """From a server that has joined: its present load.

    Attributes:
        problem: Why sessions cannot begin; empty if they can.
        sessions: Its sessions.
        held_bytes: Bytes that they hold.
        limit_bytes: How many they may hold; 0 if nothing is known.
        models: Names and digests of the models in its store.
        metrics: URL of its metrics; empty if it serves none.
        named: Its named sessions, as digests of tenant and name; see `djinn_plugins.server.tenants.session_digest`.
        began: When each of them began, in seconds since 1970.
    """

    problem: Annotated[str, Meta(max_length=1000)] = ""
    sessions: _Count = 0
    held_bytes: _Count = 0
    limit_bytes: _Count = 0
    models: Annotated[tuple[_Model, ...], Meta(max_length=2 * MAX_MODELS)] = ()
    metrics: Annotated[str, Meta(max_length=512)] = ""
    named: Annotated[tuple[_Name, ...], Meta(max_length=MAX_NAMED)] = ()
    began: Annotated[tuple[_Count, ...], Meta(max_length=MAX_NAMED)] = ()


class Resolve(msgspec.Struct, frozen=True, tag="resolve"):
    """From a client: name servers.

    Attributes:
        token: The token that the servers require.
        name: The cluster's name; empty for any.
        recent: Addresses that the client was given a moment ago; others are preferred.
        models: Names or digests of models that the client will use.
        memory_bytes: How much memory it will need.
        session: The name of its session; empty if it has none.
        failed: The address that it was given just now, and that does not answer; empty if there is none.
    """

    token: _Secret
    name: _Name = ""
    recent: Annotated[tuple[_Address, ...], Meta(max_length=16)] = ()
    models: Annotated[tuple[_Model, ...], Meta(max_length=16)] = ()
    memory_bytes: _Count = 0
    session: Annotated[str, Meta(max_length=MAX_SESSION_NAME)] = ""
    failed: Annotated[str, Meta(max_length=512)] = ""


class ListServers(msgspec.Struct, frozen=True, tag="list"):
    """From an operator: list all servers.

    Attributes:
        key: As in `Join`.
    """

    key: _Secret


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """To a server: it is listed from its first load on."""


class DrainOrder(msgspec.Struct, frozen=True, tag="drain"):
    """To a server that has joined: refuse new sessions, and end after the last one; the operator has asked for it."""


class RenameOrder(msgspec.Struct, frozen=True, tag="rename"):
    """To a server that has joined: rename a named session, because another server has a later one of that name.

    Attributes:
        named: The session, as in `LoadReport`.
        holder: Address of the other server.
    """

    named: _Name
    holder: _Address


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """From a server: the answer to `DrainOrder`, unless it is a `DirectoryProblem`."""


class ListedServer(msgspec.Struct, frozen=True):
    """A server in an answer: its address and the URL of its metrics; operators are also given its load."""

    address: _Address
    load: LoadReport | None = None
    metrics: Annotated[str, Meta(max_length=512)] = ""


class ServerList(msgspec.Struct, frozen=True, tag="servers"):
    """To a client: servers, the best one first; to an operator: all."""

    servers: Annotated[tuple[ListedServer, ...], Meta(max_length=4000)]


class DirectoryProblem(msgspec.Struct, frozen=True, tag="problem"):
    """Why there is no other answer, as the code, summary and hint of a `djinn.errors.DjinnError`."""

    code: Annotated[str, Meta(max_length=16)]
    summary: Annotated[str, Meta(max_length=4000)]
    hint: Annotated[str, Meta(max_length=4000)] = ""


_Message: TypeAlias = (
    Join | LoadReport | Resolve | ListServers | Accepted | DrainOrder | RenameOrder | Draining | ServerList
    | DirectoryProblem)
AskedDirectory: TypeAlias = Resolve | ListServers
_decoder = msgspec.json.Decoder(_Message)


def encoded(message: _Message) -> bytes:
    """Return the line of a message."""
    return msgspec.json.encode(message) + b"\n"


def decoded(line: bytes) -> _Message:
    """Read a line.

    Raises:
        msgspec.DecodeError: It is no message.
    """
    try:
        found: _Message = _decoder.decode(line)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    return found
