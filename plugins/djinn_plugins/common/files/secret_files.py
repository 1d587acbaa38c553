"""Files with a secret, which only this user can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from djinn.errors import ConfigurationError
from djinn.settings.privacy import remedy_of

__all__ = ("key_in",)

MIN_KEY_CHARACTERS = 16


def key_in(path: Path, *, makes: bool = False) -> str:
    """Read a secret.

    Args:
        path: Its file.
        makes: Whether to make one if there is none.

    Raises:
        ConfigurationError: The file cannot be used, or others can read it.
    """
    try:
        if makes and not path.exists():
            _make(path)
        with path.open(encoding="utf-8") as file:
            remedy, found = remedy_of(path, os.fstat(file.fileno())), file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The key {path} cannot be read{' or made' if makes else ''}: {error}.",
                                 hint="Give a file that this user can read.") from None
    if remedy:
        raise ConfigurationError(f"Others can read the key {path}.", hint=f"Run {remedy}.")
    if len(found) < MIN_KEY_CHARACTERS:
        raise ConfigurationError(f"The key {path} has fewer than {MIN_KEY_CHARACTERS} characters.",
                                 hint="Remove the file, and let another one be made.")
    return found


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123  # a descriptor
            file.write(secrets.token_urlsafe(32) + "\n")
    except OSError:
        # A full disk must not leave an empty key, which nothing would replace.
        path.unlink()
        raise
