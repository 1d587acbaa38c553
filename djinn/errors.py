"""Errors of djinn's own machinery.

Operations raise the same exceptions as eager PyTorch. The classes here cover everything else: a connection, a plugin, a
configuration, a message. Each has a fixed ``code`` (listed in ``specs/errors.toml`` and ``docs/errors.md``), says what
happened, and ends with what to do.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = (
    "AmbiguousPluginError", "ConfigurationError", "DeviceLostError", "DeviceNameTakenError", "DjinnError",
    "DocumentError", "InputsError", "LimitError", "NothingCapturedError", "OperationCancelledError",
    "OutOfMemoryError", "PeerError", "PluginError", "PluginLoadError", "PluginValidationError", "ProgramTimeoutError",
    "ProgramTooLargeError", "ProtocolError", "ProtocolVersionError", "RecoveryBudgetError", "RefusedError",
    "RemoteTimeoutError", "ScheduleError", "SchemaMismatchError", "ServerDrainingError", "SessionClosedError",
    "SessionTerminatedError", "StateLostError", "TokenEndedError", "TransportError", "UnknownHandleError",
    "UnknownOperatorError", "UnsupportedTensorError", "UnsupportedTorchError",
)


class DjinnError(Exception):
    """Base class of all djinn errors.

    Attributes:
        code: Stable identifier, for example ``DJ301``.
        summary: What happened.
        hint: What to do about it; may be empty.
        retry_after_s: When to try again, as suggested by the server; 0 if it suggests nothing.
    """

    code: ClassVar[str] = "DJ000"

    def __init__(self, summary: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(summary, hint)
        self.summary = summary
        self.hint = hint
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        remedy = f" {self.hint}" if self.hint else ""
        return f"[{self.code}] {self.summary}{remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.summary, self.hint)


def _rebuild(kind: type[DjinnError], summary: str, hint: str) -> DjinnError:
    return kind(summary, hint=hint)


class ConfigurationError(DjinnError, ValueError):
    """An argument of ``djinn.init``, an environment variable or a command-line option is invalid."""

    code = "DJ101"


class DeviceNameTakenError(DjinnError, RuntimeError):
    """Another package renamed PyTorch's one spare device in this process before djinn was imported."""

    code = "DJ102"


class SessionClosedError(DjinnError, RuntimeError):
    """A lazy tensor outlived the session that holds its value."""

    code = "DJ103"


class UnsupportedTensorError(DjinnError, NotImplementedError):
    """The tensor's kind (sparse, quantized, nested, ...) or the request (``from_dlpack``) is not supported remotely."""

    code = "DJ104"


class DocumentError(DjinnError, ValueError):
    """A document does not contain an annotated graph."""

    code = "DJ105"


class InputsError(DjinnError, ValueError):
    """The inputs given to `djinn.execute` do not fit the graph; nothing was run."""

    code = "DJ106"


class NothingCapturedError(DjinnError, RuntimeError):
    """A graph is requested, and no operation has been captured."""

    code = "DJ107"


class PluginError(DjinnError):
    """A plugin is missing, broken or of the wrong kind."""

    code = "DJ201"


class PluginLoadError(PluginError, ImportError):
    """The module of a plugin could not be imported."""

    code = "DJ202"


class PluginValidationError(PluginError):
    """A plugin implements an unknown hook or registers something that is not of its kind."""

    code = "DJ203"


class AmbiguousPluginError(PluginError):
    """Two plugins match one choice."""

    code = "DJ204"


class ScheduleError(DjinnError, ValueError):
    """A scheduler's result broke a rule of execution schedules; nothing was run."""

    code = "DJ205"


class UnsupportedTorchError(PluginLoadError):
    """The installed PyTorch lacks what a plugin needs of it."""

    code = "DJ206"


class TransportError(DjinnError, ConnectionError):
    """The connection to an executor could not be made, or broke."""

    code = "DJ301"


class RemoteTimeoutError(TransportError, TimeoutError):
    """The other side did not answer in time."""

    code = "DJ302"


class ProtocolError(DjinnError, ValueError):
    """A frame or message is malformed."""

    code = "DJ303"


class ProtocolVersionError(ProtocolError):
    """Client and server speak different versions of the protocol."""

    code = "DJ304"


class RefusedError(TransportError):
    """The server refused the connection, for example because of the token."""

    code = "DJ305"


class UnknownHandleError(DjinnError, LookupError):
    """A message names a value that the executor does not hold."""

    code = "DJ306"


class UnknownOperatorError(DjinnError, NotImplementedError):
    """A program uses an operator that the executor does not have or refuses to run."""

    code = "DJ307"


class SchemaMismatchError(UnknownOperatorError):
    """An operator has another schema in the executor's PyTorch release."""

    code = "DJ308"


class PeerError(TransportError):
    """A server could not reach another one, was not allowed to, or lost it while a value was in flight between them."""

    code = "DJ309"


class OutOfMemoryError(DjinnError, RuntimeError):
    """No executor has room for a value; the message names the sizes."""

    code = "DJ310"


class StateLostError(DjinnError, RuntimeError):
    """A value was lost with its server, and could not be recomputed."""

    code = "DJ311"


class LimitError(DjinnError, RuntimeError):
    """A session requested more than the server allows."""

    code = "DJ312"


class ProgramTooLargeError(DjinnError, RuntimeError):
    """A step would take more memory than the server allows a program; the step was not run."""

    code = "DJ313"


class ProgramTimeoutError(DjinnError, RuntimeError):
    """A program ran longer than the server allows a single run; the server has ended the session."""

    code = "DJ314"


class SessionTerminatedError(DjinnError, RuntimeError):
    """The server's operator has ended the session."""

    code = "DJ315"


class OperationCancelledError(DjinnError, RuntimeError):
    """The operation was queued and has not run: its session was interrupted, or has ended."""

    code = "DJ316"


class ServerDrainingError(RefusedError):
    """The server is shutting down: existing sessions may finish, and new ones are refused."""

    code = "DJ317"


class TokenEndedError(RefusedError):
    """The token has expired or was revoked; sessions that used it end."""

    code = "DJ318"


class RecoveryBudgetError(DjinnError, RuntimeError):
    """A recovery may take longer than its budget; logged as a warning, not raised."""

    code = "DJ319"


class DeviceLostError(DjinnError, RuntimeError):
    """The device is no longer usable in the process that ran the session; the server starts another process."""

    code = "DJ320"


ENDED_FOR_GOOD = (DeviceLostError, ProgramTimeoutError, SessionTerminatedError)
"""With these errors a server ends a session for good: resuming elsewhere, or repeating the work, would be wrong."""
