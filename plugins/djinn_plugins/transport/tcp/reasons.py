"""Error messages for clients: why a connection cannot be used."""

from __future__ import annotations

import msgspec

from djinn.errors import (
    ENDED_FOR_GOOD,
    ProtocolError,
    ProtocolVersionError,
    RefusedError,
    RemoteTimeoutError,
    ServerDrainingError,
    TokenEndedError,
    TransportError,
)
from djinn.wire.messages import Goodbye, Refusal
from djinn_plugins.common.net.terminal_text import harmless
from djinn_plugins.transport.tcp.opening import reason_of
from djinn_plugins.transport.tcp.tls import TlsError

__all__ = ("AGAIN", "explained", "goodbye", "refused", "unanswered")

_FINAL = {kind.code: kind for kind in ENDED_FOR_GOOD}
_REFUSALS = {kind.code: kind for kind in (RefusedError, ServerDrainingError, TokenEndedError, TransportError)}
AGAIN = "What it held is lost. See the server's log for the reason, then call djinn.init() to start a new session."


def goodbye(address: str, said: Goodbye) -> Exception:
    """Return the error for the server's goodbye, with its reason if it gave one."""
    if said.code:
        return refused(address, Refusal(said.code, said.summary, said.hint))
    return TransportError(f"The connection to {address} is gone: the server has ended the session.", hint=AGAIN)


def unanswered(address: str, silence_s: float) -> RemoteTimeoutError:
    """Return the error for a greeting without an answer."""
    return RemoteTimeoutError(f"{address} did not answer the greeting within {silence_s:.3g} s.",
                              hint="See whether a djinn server listens there and what its log says; allow more time "
                                   "with connect_timeout_s if it only has too much to do.")


def refused(address: str, refusal: Refusal) -> Exception:
    """Return the error for the server's refusal."""
    refusal = msgspec.structs.replace(refusal, code=harmless(refusal.code), summary=harmless(refusal.summary),
                                      hint=harmless(refusal.hint))
    if refusal.code == ProtocolVersionError.code:
        return ProtocolVersionError(f"The server says: {refusal.summary}", hint=refusal.hint)
    if refusal.code in _FINAL:
        return _FINAL[refusal.code](f"{address} has ended the session: {refusal.summary}", hint=refusal.hint)
    code = "" if refusal.code in _REFUSALS else f" [{refusal.code}]"
    kind = _REFUSALS.get(refusal.code, RefusedError)
    return kind(f"The server at {address} says:{code} {refusal.summary}", hint=refusal.hint,
                retry_after_s=refusal.retry_after_s)


def explained(address: str, error: Exception) -> Exception:
    """Convert an error of a connection to one that names the address and the remedy; other errors are unchanged."""
    if isinstance(error, ProtocolVersionError):
        return ProtocolVersionError(f"{address} cannot be used: {error.summary}", hint=error.hint)
    if isinstance(error, TransportError):
        return error
    if isinstance(error, ProtocolError):
        return TransportError(f"The exchange with {address} failed: {error.summary}", hint=error.hint or AGAIN)
    if isinstance(error, TlsError):
        return TransportError(f"{address} cannot be used: {error}.", hint=error.hint or AGAIN)
    if isinstance(error, TimeoutError):
        return RemoteTimeoutError(f"The connection to {address} is dead: {reason_of(error)}.", hint=AGAIN)
    if isinstance(error, OSError):
        return TransportError(f"The connection to {address} broke: {reason_of(error)}.", hint=AGAIN)
    if isinstance(error, EOFError):
        return TransportError(f"The connection to {address} is gone: {error}.", hint=AGAIN)
    return error
