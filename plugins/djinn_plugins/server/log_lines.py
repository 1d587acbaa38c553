"""Log lines of the server's processes."""

from __future__ import annotations

import datetime
import json
import logging
import os
import stat
import sys
from collections.abc import Sequence
from typing import TextIO

from djinn_plugins.server.options import LogFormat

__all__ = ("keep_log", "printable", "write_to")

_HIDDEN = "***"


def printable(text: object) -> str:
    """Replace unprintable characters, for text of an error or other text that may repeat what a client sent."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def write_to(stream: TextIO, form: LogFormat, *, secrets: Sequence[str] = (), **fields: str) -> None:
    """Make this process, which must be djinn's own, write its log to a stream, one line per record.

    Text that others control, such as an error's text, can neither forge a line nor affect a terminal: control
    characters are replaced.

    Args:
        stream: Where to write.
        form: ``text``, or ``json``: an object with ``time``, ``level``, ``component``, ``process``, ``message`` and, if
            there is one, ``error``.
        secrets: Strings that are removed from the log; empty ones are ignored.
        fields: Added to each record of ``json``.
    """
    handler = logging.StreamHandler(stream)
    hidden = tuple(filter(None, secrets))
    handler.setFormatter(_JsonFormatter(hidden, fields) if form == "json" else _TextFormatter(hidden))
    logging.getLogger().addHandler(handler)


def keep_log() -> None:
    """Let this process, and those that it starts, only append to the log, if it is a file.

    They share its position, which a worker that is taken over could set back. Its sandbox forbids it to change this.
    """
    if sys.platform == "linux" and stat.S_ISREG(os.fstat(2).st_mode):
        import fcntl

        fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)


class _TextFormatter(logging.Formatter):
    """Formats a record for people. Further lines, such as a traceback, are indented so that none looks like one."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        lines = [f"{self.formatTime(record)} {record.levelname} {record.name}: {printable(record.getMessage())}"]
        # Not the text that `logging` caches in the record: another handler may have formatted it differently.
        if record.exc_info and record.exc_info[0] is not None:
            lines += [f"    {printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return _without(self._secrets, "\n".join(lines))


class _JsonFormatter(logging.Formatter):
    """Formats a record for programs."""

    def __init__(self, secrets: Sequence[str], fields: dict[str, str]) -> None:
        super().__init__()
        self._secrets = secrets
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        content = {
            "time": time.isoformat(timespec="milliseconds"), "level": record.levelname,
            "component": record.name.removeprefix("djinn."), "process": record.process, **self._fields,
            "message": _without(self._secrets, printable(record.getMessage()))}
        if record.exc_info and record.exc_info[0] is not None:
            content["error"] = _without(self._secrets, self.formatException(record.exc_info))
        # ASCII only, so that no character has a special meaning.
        return json.dumps(content)


def _without(secrets: Sequence[str], text: str) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text
