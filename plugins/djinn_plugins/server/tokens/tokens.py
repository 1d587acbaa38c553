"""Tokens: a file of the tenants that may use a server. The file contains digests, no usable tokens."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from djinn.errors import ConfigurationError
from djinn.settings.privacy import remedy_of
from djinn_plugins.common.files.identity import FileIdentity, identity_in
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import NAME
from djinn_plugins.server.tokens.expiry import LATEST_S

__all__ = ("Secret", "TokenFile", "TokenRecord", "Tokens", "default_path")

TOKEN_BYTES = 32
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_IDENTITY_BYTES = 16
_MAX_FILE_BYTES = 2**24
_HEX = re.compile(r"[0-9a-f]+")


class Secret(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The stored record of a token.

    A token is 256 random bits and cannot be guessed, so its digest needs a salt but no slow hash function.

    Attributes:
        salt, digest: In hexadecimal.
        created: When it was created, in seconds since 1970.
        expires: When it expires, in seconds since 1970; 0: never.
    """

    salt: str
    digest: str
    created: int
    expires: Annotated[int, Meta(ge=0, le=LATEST_S)] = 0

    @property
    def identity(self) -> bytes:
        """An identifier that distinguishes this token from others and reveals nothing about it."""
        return bytes.fromhex(self.digest)[:_IDENTITY_BYTES]

    def is_valid(self, now_s: float) -> bool:
        """Whether the token is valid at a time, in seconds since 1970."""
        return not self.expires or now_s < self.expires


class TokenRecord(Secret, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The stored record of a tenant: its newest token, its other valid tokens, and its limits.

    Attributes:
        weight: The tenant's share of contended resources, relative to other tenants.
        limits: The tenant's limits.
        others: Older tokens, the newest first.
        first: Digest of the tenant's first token, if the token was rotated since. It distinguishes the tenant from an
            earlier one of the same name.
        models: Names or patterns of the gated models that the tenant may use.
        share: The group of tenants that keep equal uploads in memory once; see
        `djinn_plugins.server.tenants.Tenant.share`.
    """

    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    limits: Limits = Limits()
    others: tuple[Secret, ...] = ()
    first: str = ""
    models: tuple[str, ...] = ()
    share: Annotated[str, Meta(pattern=f"{NAME}|^$")] = ""

    @property
    def key(self) -> str:
        """A key of the tenant that stays the same when its tokens are rotated."""
        return self.first or self.digest

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All tokens, the newest first."""
        return Secret(self.salt, self.digest, self.created, self.expires), *self.others


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a token file.

    Attributes:
        version: Of the form.
        tenants: Entries by name.
    """

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    tenants: dict[Annotated[str, Meta(pattern=NAME)], TokenRecord] = {}

    def find(self, token: str) -> tuple[str, Secret] | None:
        """Return a token's tenant and record. The time this takes reveals nothing about the token."""
        presented = token.encode("utf-8", "surrogateescape")
        found = None
        for name, entry in self.tenants.items():
            for secret in entry.secrets:
                if hmac.compare_digest(_digest(bytes.fromhex(secret.salt), presented), secret.digest):
                    found = name, secret
        return found


def default_path() -> Path:
    """Return the default path of the token file."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "djinn" / "tokens.json"


class TokenFile:
    """A file of tokens that only its owner can read, and that is replaced atomically.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Tokens:
        """Read the file; a missing file contains no tokens.

        Raises:
            ConfigurationError: The content is invalid, or other users could have written it.
        """
        try:
            with self.path.open("rb") as file:
                if remedy := remedy_of(self.path, os.fstat(file.fileno())):
                    raise ConfigurationError(f"Others can read or write {self.path}.",
                                             hint=f"See who has, and run: {remedy}")
                data = file.read(_MAX_FILE_BYTES)
        except FileNotFoundError:
            return Tokens()
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            tokens = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.path} is no file of tokens: {error}.",
                                     hint="Move it away and create the tokens anew.") from None
        if not all(_is_hex(secret.salt, _SALT_BYTES) and _is_hex(secret.digest, _DIGEST_BYTES)
                   for entry in tokens.tenants.values() for secret in entry.secrets):
            raise ConfigurationError(f"{self.path} has an entry that is none of a token.",
                                     hint="Move it away and create the tokens anew.")
        return tokens

    def create(self, name: str, *, weight: float = 1.0, limits: Limits | None = None, expires: int = 0,
               models: Iterable[str] = (), share: str = "") -> str:
        """Create a token for a new tenant, and return it. The token itself is not stored.

        Args:
            name: The tenant.
            weight: See `TokenRecord.weight`.
            limits: See `TokenRecord.limits`.
            expires: When it expires, in seconds since 1970; 0: never.
            models: See `TokenRecord.models`.
            share: See `TokenRecord.share`.

        Raises:
            ConfigurationError: The name is taken or invalid, or the file cannot be used.
        """
        if not re.fullmatch(NAME, name):
            raise ConfigurationError(f"{name!r} is no name of a tenant.",
                                     hint="Use up to 64 letters, digits, dots, dashes and underscores.")
        if share and not re.fullmatch(NAME, share):
            raise ConfigurationError(f"{share!r} is no name of a group.",
                                     hint="Use up to 64 letters, digits, dots, dashes and underscores.")
        token, secret = _made(expires)
        entry = TokenRecord(secret.salt, secret.digest, secret.created, secret.expires, weight, limits or Limits(),
                            models=tuple(models), share=share)
        with self._locked():
            if name in self.read().tenants:
                raise ConfigurationError(f"There is a token for {name!r} already.",
                                         hint=f"Take it away first: djinn token revoke {name}")
            self._put(name, entry)
        return token

    def rotate(self, name: str, overlap_s: int, expires: int | None = None) -> str:
        """Create another token for a tenant, and return it. The token itself is not stored.

        Args:
            name: The tenant.
            overlap_s: How long the tenant's current tokens stay valid, in seconds, unless they expire earlier.
            expires: When the new one expires, in seconds since 1970; 0: never; ``None``: after the lifetime of the
                previous token.

        Raises:
            ConfigurationError: There is no such tenant, or the file cannot be used.
        """
        with self._locked():
            entry, now_s = self._entry(name), int(time.time())
            if expires is None:
                expires = entry.expires and now_s + entry.expires - entry.created
            token, secret = _made(expires)
            until = now_s + overlap_s
            kept = [msgspec.structs.replace(other, expires=min(other.expires or until, until))
                    for other in entry.secrets]
            self._put(name, msgspec.structs.replace(
                entry, salt=secret.salt, digest=secret.digest, created=secret.created, expires=secret.expires,
                others=tuple(other for other in kept if other.is_valid(now_s)), first=entry.key))
        return token

    def revoke(self, name: str) -> None:
        """Remove all tokens of a tenant.

        Raises:
            ConfigurationError: There is no such tenant, or the file cannot be used.
        """
        with self._locked():
            self._entry(name)
            self._put(name, None)

    def state(self) -> FileIdentity | None:
        """Return a value that changes when the file changes; ``None`` if there is no file."""
        try:
            return identity_in(self.path.stat())
        except OSError:
            return None

    def _entry(self, name: str) -> TokenRecord:
        entry = self.read().tenants.get(name)
        if entry is None:
            raise ConfigurationError(f"There is no token for {name!r} in {self.path}.",
                                     hint="See which there are: djinn token list")
        return entry

    def _put(self, name: str, entry: TokenRecord | None) -> None:
        others = {other: kept for other, kept in self.read().tenants.items() if other != name}
        self._write(Tokens(tenants=others if entry is None else others | {name: entry}))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file against writes by other processes."""
        import fcntl

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, tokens: Tokens) -> None:
        data = msgspec.json.format(msgspec.json.encode(tokens), indent=2)
        temporary = ""
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            # `mkstemp` makes the file readable for its owner only.
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}.") from None


def _made(expires: int) -> tuple[str, Secret]:
    """Create a token, and the record to store."""
    token, salt = secrets.token_urlsafe(TOKEN_BYTES), secrets.token_bytes(_SALT_BYTES)
    return token, Secret(salt.hex(), _digest(salt, token.encode()), int(time.time()), expires)


def _is_hex(text: str, size_bytes: int) -> bool:
    return _HEX.fullmatch(text) is not None and len(text) == 2 * size_bytes


def _digest(salt: bytes, token: bytes) -> str:
    return hashlib.blake2b(token, digest_size=_DIGEST_BYTES, salt=salt).hexdigest()


_decoder = msgspec.json.Decoder(Tokens)
