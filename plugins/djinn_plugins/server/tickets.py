"""Tickets: a redirected client presents its ticket from the gateway to the worker that admits it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
import time

from djinn.errors import RefusedError

__all__ = ("KEY_BYTES", "VALID_S", "TicketCheck", "issue")

KEY_BYTES = 32
VALID_S = 30.0
_NONCE_BYTES = 16
_PROOF_BYTES = 16
_EXPIRY = struct.Struct("<Q")
_WIDTH = _NONCE_BYTES + _EXPIRY.size + _PROOF_BYTES


def issue(key: bytes, token: bytes = b"") -> str:
    """Create a ticket for the worker that has this key; no other worker has it.

    A ticket consists of 128 random bits, a time on the monotonic clock of this machine, the identity of the client's
    token, and a MAC of 128 bits. So the worker can verify it without a message from the gateway.
    """
    claim = secrets.token_bytes(_NONCE_BYTES) + _EXPIRY.pack(time.monotonic_ns() + int(VALID_S * 1e9)) + token
    return (claim + _proof(key, claim)).hex()


class TicketCheck:
    """Accepts each ticket once.

    Concurrency:
        Any thread.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._used: dict[bytes, int] = {}

    def redeem(self, ticket: str) -> bytes:
        """Accept a ticket, and return the identity of its client's token.

        Raises:
            RefusedError: It is invalid, belongs to another worker, was used, or has expired; the error does not say
                which.
        """
        now = time.monotonic_ns()
        try:
            data = bytes.fromhex(ticket)
        except ValueError:
            data = b""
        claim, proof = data[:-_PROOF_BYTES], data[-_PROOF_BYTES:]
        good = len(data) >= _WIDTH and hmac.compare_digest(_proof(self._key, claim), proof)
        expires = _EXPIRY.unpack_from(claim, _NONCE_BYTES)[0] if good else 0
        with self._lock:
            self._used = {used: until for used, until in self._used.items() if until > now}
            if expires <= now or claim in self._used:
                raise RefusedError("The ticket is not valid here, or not any more.",
                                   hint="Connect to the server's own address.")
            self._used[claim] = expires
        return claim[_NONCE_BYTES + _EXPIRY.size:]


def _proof(key: bytes, claim: bytes) -> bytes:
    return hashlib.blake2b(claim, digest_size=_PROOF_BYTES, key=key).digest()
