"""Serves the page and its data over HTTP/1.1, with TLS if there is a certificate.

Nothing is kept for a browser: each request for data carries a token or the operator's key, and there are no cookies.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Protocol

import anyio
import anyio.to_thread
import attrs
import h11
from anyio.abc import ByteStream, SocketListener, SocketStream
from anyio.streams.tls import TLSStream

from djinn.errors import ConfigurationError, DjinnError, RefusedError
from djinn_plugins.common.net.accepting import Visit, accept_forever
from djinn_plugins.common.net.host_names import HostNames
from djinn_plugins.common.net.stranger_log import StrangerLog

__all__ = ("DashboardEndpoint", "DashboardModel")

TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 2**14
MAX_BODY_BYTES = 2**12
MAX_ANSWERS = 8
"""How many requests for data are answered at a time."""
_PAGES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"),
          "/page.js": ("page.js", "text/javascript")}
_OWN = "script-src 'self'; style-src 'self'; connect-src 'self'"
_NONE = "form-action 'none'; frame-ancestors 'none'"
_HEADERS = (
    ("Content-Security-Policy", f"default-src 'none'; {_OWN}; base-uri 'none'; {_NONE}"),
    ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"), ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"), ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Connection", "close"))
_LEFT = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.RemoteProtocolError)
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


class DashboardModel(Protocol):
    """What the page shows and does.

    Concurrency:
        Any thread.
    """

    def state(self, secret: str) -> Mapping[str, Any]:
        """Return the content of the page.

        Args:
            secret: A client's token, or the operator's key.

        Raises:
            RefusedError: It is neither.
        """

    def act(self, secret: str, action: str, target: str) -> Mapping[str, Any]:
        """Execute a command of the operator.

        Returns:
            What has happened, in words, as ``said``; more is for programs.

        Raises:
            RefusedError: The secret is not the operator's key.
            DjinnError: The command is unknown, or has failed.
        """


@attrs.frozen
class _Answer:
    status: int
    content: bytes
    kind: str = "application/json"


class DashboardEndpoint:
    """Answers browsers. Each connection carries one request.

    Args:
        model: What the page shows and does.
        host: The host that is listened on.
        context: For encrypted connections; ``None`` for plain ones.

    Concurrency:
        Tasks of one event loop; the model is asked in threads.
    """

    def __init__(self, model: DashboardModel, host: str, context: ssl.SSLContext | None) -> None:
        self._model = model
        self._context = context
        self._names = HostNames(host)
        self._threads = anyio.CapacityLimiter(MAX_ANSWERS)

    async def run(self, listener: SocketListener) -> None:
        """Answer until cancelled."""
        await accept_forever(listener, self._attend, MAX_CONNECTIONS)

    async def _attend(self, plain: SocketStream, visit: Visit) -> None:
        try:
            with anyio.fail_after(TIMEOUT_S):
                stream: ByteStream = plain if self._context is None else await TLSStream.wrap(
                    plain, server_side=True, ssl_context=self._context, standard_compatible=False)
                connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
                request, body = await _received(stream, connection)
            with visit.busy():
                answer = (_refused(413, "The request is too long.") if body is None
                          else await self._answer(request, body))
            with anyio.fail_after(TIMEOUT_S):
                await stream.send(_encoded(connection, answer, has_body=request.method != b"HEAD"))
        except (*_LEFT, ssl.SSLError) as error:
            _strangers.write(logging.INFO, "readers of the dashboard that left", "a reader of the dashboard left: %s",
                             str(error) or type(error).__name__)

    async def _answer(self, request: h11.Request, body: bytes) -> _Answer:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        path = request.target.decode("latin-1").partition("?")[0]
        method = request.method.decode("latin-1")
        if not self._names.has(headers.get("host", "")):
            return _refused(421, "This server is known by other names; use its address.")
        if path in _PAGES and method in ("GET", "HEAD"):
            name, kind = _PAGES[path]
            content = await anyio.to_thread.run_sync(files("djinn_plugins.common.dashboard").joinpath("assets",
                                                                                                      name).read_bytes)
            return _Answer(200, content, f"{kind}; charset=utf-8")
        if (path, method) not in (("/state", "GET"), ("/act", "POST")):
            return _refused(404, "There is /, /state and, for commands, /act.")
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        return await anyio.to_thread.run_sync(self._data, path, secret, body, limiter=self._threads,
                                                abandon_on_cancel=True)

    def _data(self, path: str, secret: str, body: bytes) -> _Answer:
        try:
            if path == "/state":
                return _Answer(200, _json(self._model.state(secret)))
            action, target = _command(body)
            return _Answer(200, _json(self._model.act(secret, action, target)))
        except RefusedError as error:
            return _refused(401, error.summary, error.hint)
        except DjinnError as error:
            return _refused(400, error.summary, error.hint)


async def _received(stream: ByteStream, connection: h11.Connection) -> tuple[h11.Request, bytes | None]:
    """Receive a request and its body; without a body that is too long."""
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await stream.receive(2**14))
            except anyio.EndOfStream:
                connection.receive_data(b"")
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
            if len(body) > MAX_BODY_BYTES and request is not None:
                return request, None
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, body
        else:
            raise anyio.EndOfStream


def _encoded(connection: h11.Connection, answer: _Answer, *, has_body: bool) -> bytes:
    headers = [("Content-Type", answer.kind), ("Content-Length", str(len(answer.content))), *_HEADERS]
    events: Iterable[Any] = (
        h11.Response(status_code=answer.status, headers=headers),
        *([h11.Data(data=answer.content)] if has_body else []), h11.EndOfMessage())
    return b"".join(connection.send(event) or b"" for event in events)


def _command(body: bytes) -> tuple[str, str]:
    try:
        given = json.loads(body)
        action, target = given["action"], given.get("target", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        action = target = None
    if not isinstance(action, str) or not isinstance(target, str):
        raise ConfigurationError("That is no command.", hint='Send {"action": ..., "target": ...}.')
    return action, target


def _refused(status: int, summary: str, hint: str = "") -> _Answer:
    return _Answer(status, _json({"problem": summary, "hint": hint}))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()
