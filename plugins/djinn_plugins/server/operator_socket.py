"""The operator's socket: where ``djinn sessions`` and ``djinn kick`` reach a running server.

A Unix-domain socket that only the server's user can connect to. Each connection carries one request and its answer, one
line of JSON each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketListener, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from djinn import errors
from djinn.errors import ConfigurationError, DjinnError, ProtocolError, RefusedError, TransportError
from djinn_plugins.common.net.accepting import Visit, accept_forever

__all__ = ("Handler", "OperatorSocket", "ask", "check_path", "default_folder", "servers")

Handler: TypeAlias = Callable[[dict[str, Any]], Awaitable[Any]]
"""Executes a command with its arguments; the result can be serialized as JSON."""
MAX_REQUEST_BYTES = 2**16
MAX_ANSWER_BYTES = 2**26
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
MAX_OPERATORS = 8
STARTING_S = 10.0
"""A server that has bound its socket listens on it within this time."""
"""Maximum number of concurrent connections; further ones are refused."""
_MAX_PATH_BYTES = 107
_LEFT = (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound)
"""Raised when the other side is gone, is too slow (a `TimeoutError`), or says too little or too much."""
_CREDENTIALS = struct.Struct("3i")
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}
_log = logging.getLogger("djinn.server")


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    command: str
    arguments: dict[str, Any] = {}


class _Problem(msgspec.Struct):
    code: str
    summary: str
    hint: str = ""


class _Answer(msgspec.Struct, omit_defaults=True):
    result: Any = None
    problem: _Problem | None = None


def default_folder() -> Path:
    """Return the folder of this user's server sockets: in ``XDG_RUNTIME_DIR``, or else beside the tokens."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "djinn"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "djinn" / "run"


def check_path(path: Path) -> None:
    """Check that a socket can be bound to a path.

    Raises:
        ConfigurationError: It cannot.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigurationError(f"{path} is too long for a socket: {_MAX_PATH_BYTES} bytes at most.",
                                 hint="Give another with --control.")
    if path.parent.exists() and not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"{path.parent} cannot be written to.", hint="Give another path with --control.")


def servers(folder: Path) -> Iterator[Path]:
    """List the sockets in a folder, oldest first, and remove those of servers that died."""
    found = list[tuple[float, Path]]()
    for path in folder.glob("*.sock"):
        # A server may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    for bound_s, path in sorted(found):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except BlockingIOError:
                pass  # it is there, with more callers than it has answered
            except ConnectionRefusedError:
                if not _is_starting(path, bound_s):
                    path.unlink(missing_ok=True)
                continue
            except OSError as error:
                _log.info("%s: %s", path, error)
                continue
        yield path


def _is_starting(path: Path, bound_s: float) -> bool:
    """Return whether the server that a default path is named after may have bound its socket a moment ago."""
    if time.time() - bound_s > STARTING_S:
        # Its process has ended, and another one may have its number.
        return False
    try:
        os.kill(int(path.stem), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def ask(path: Path, command: str, **arguments: Any) -> Any:
    """Send a command to a server, and return its answer.

    Raises:
        TransportError: No server listens there, or it does not answer.
        DjinnError: The error that the server answered with.
    """
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(ANSWER_TIMEOUT_S)
            sock.connect(str(path))
            sock.sendall(msgspec.json.encode(_Request(command, arguments)) + b"\n")
            data = _line(sock, MAX_ANSWER_BYTES)
        answer = _answer_decoder.decode(data)
    except (OSError, msgspec.DecodeError) as error:
        raise TransportError(f"No server answers at {path}: {error}.", hint="See whether it runs.") from None
    if answer.problem is not None:
        raise _CODES.get(answer.problem.code, DjinnError)(answer.problem.summary, hint=answer.problem.hint)
    return answer.result


class OperatorSocket:
    """Listens for commands and runs their handlers.

    Args:
        path: Path of the socket; a missing folder is created, accessible only to this user.
        handlers: Handlers by command.

    Raises:
        ConfigurationError: The socket cannot be bound to that path.

    Concurrency:
        `run` is a task; `close` is called by any thread once that has ended.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self.path = path
        self._handlers = handlers
        check_path(path)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_stale()
            # On Linux the file gets the socket's mode, so there is no moment at which others could connect.
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(f"Cannot listen for the operator at {path}: {error.strerror or error}.",
                                     hint="Give a path of this machine with --control.") from None

    async def run(self) -> None:
        """Answer operators until cancelled."""
        await accept_forever(await SocketListener.from_socket(self._socket), self._serve, MAX_OPERATORS)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        with contextlib.suppress(OSError):  # where nothing can be written, the next server replaces it
            self.path.unlink()

    def _remove_stale(self) -> None:
        if not self.path.is_socket():
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink(missing_ok=True)

    async def _serve(self, stream: SocketStream, visit: Visit) -> None:
        try:
            answer = await self._answer(stream, visit)
            with anyio.fail_after(REQUEST_TIMEOUT_S):
                await stream.send(msgspec.json.encode(answer) + b"\n")
        except _LEFT as error:
            _log.info("an operator has left: %s", error)

    async def _answer(self, stream: SocketStream, visit: Visit) -> _Answer:
        try:
            _check_user(stream.extra(SocketAttribute.raw_socket))  # noqa: S610  # no part of Django
            with anyio.fail_after(REQUEST_TIMEOUT_S):
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_REQUEST_BYTES)
            request = _request_decoder.decode(line)
            handler = self._handlers.get(request.command)
            if handler is None:
                raise ProtocolError(f"There is no command {request.command[:40]!r}.",
                                    hint="Use the djinn release of the server.")
            # The dashboard asks for the sessions each second.
            level = logging.DEBUG if request.command == "sessions" else logging.INFO
            _log.log(level, "the operator asks: %s", request.command)
            with visit.busy():
                return _Answer(await handler(request.arguments))
        except DjinnError as error:
            return _Answer(problem=_Problem(error.code, error.summary, error.hint))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return _Answer(problem=_Problem(ProtocolError.code, f"That is no request: {error}."))
        except _LEFT:
            raise
        except Exception as error:  # noqa: BLE001  # logged in full; it must not end the server
            _log.exception("a command of the operator failed")
            return _Answer(problem=_Problem(DjinnError.code, f"The command failed: {error}.", "See the server's log."))


def _check_user(sock: socket.socket) -> None:
    """Accept only the server's user and root, where the system reports the peer; elsewhere the file's mode ensures it.

    Raises:
        RefusedError: The peer is another user.
    """
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user not in (0, os.geteuid()):
            raise RefusedError("Only the server's user may do that.")


def _line(sock: socket.socket, limit_bytes: int) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        part = sock.recv(2**16)
        data += part
        if not part or len(data) > limit_bytes:
            raise OSError("the other side has said too little, or too much")
    return bytes(data)


_answer_decoder = msgspec.json.Decoder(_Answer)
_request_decoder = msgspec.json.Decoder(_Request)
