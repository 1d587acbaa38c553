"""The program ``djinn``, up to the import of PyTorch, which takes seconds.

Help, and mistakes on the command line, need no PyTorch. An address in use is the most common mistake with ``djinn
serve``, and service managers cause it when they start a server while another one is still ending.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from djinn_plugins.postponing import postpone

__all__ = ("main", "taken_address")

USAGE_ERROR = 2
"""As `djinn_plugins.server.command.USAGE_ERROR`, which cannot be imported without PyTorch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit; see `djinn_plugins.cli.app.main`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        from djinn_plugins.run.leaving import expect_to_leave

        expect_to_leave()
    else:
        # Modes are for programs. A server must not take the remote device for an accelerator of its own.
        os.environ.pop("DJINN_RUN_AS", None)
    if given[:1] == ["serve"] and "--help" not in given and (taken := taken_address(given[1:])):
        sys.stderr.write(f"djinn: [DJ301] Cannot listen on {taken}: {os.strerror(errno.EADDRINUSE)}. Stop the server "
                         "that listens there, or choose another address.\n")
        sys.exit(USAGE_ERROR)
    if given[:1] != ["run"] or given[1:2] == ["--help"]:
        # A program that is run needs all of it in any case, in whatever way it imports it.
        postpone("djinn")
    from djinn_plugins.cli.app import main as run

    run(given)


def taken_address(arguments: Sequence[str]) -> str:
    """Return the address that ``djinn serve`` would listen on if another process already does.

    All other checks are left to the command itself, which reads the same options again.

    Args:
        arguments: Arguments of ``djinn serve``.

    Returns:
        Empty if no process is known to listen there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--host", "--port", "--unix", "--tls-cert", "--config"):
        parser.add_argument(name, default=None)
    try:
        given = vars(parser.parse_known_args(list(arguments))[0])
        content = tomllib.loads(Path(given["config"]).read_text(encoding="utf-8")) if given["config"] else {}
        wanted = {name: content.get(name.replace("_", "-")) if value is None else value
                  for name, value in given.items()}
        if wanted["unix"]:
            return _taken_path(str(wanted["unix"]))
        port = int(wanted["port"] or 0)
        return _taken_port(str(wanted["host"] or "127.0.0.1"), port, "tls" if wanted["tls_cert"] else "tcp")
    except (argparse.ArgumentError, AttributeError, OSError, ValueError, OverflowError):
        return ""


def _taken_port(host: str, port: int, scheme: str) -> str:
    """Bind, as a server does, but do not listen: clients must not connect to a socket that is about to close."""
    if not port:
        return ""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            # As `djinn_plugins.common.net.urls` does it, whose package imports PyTorch.
            named = f"[{host}]" if ":" in host else host
            return f"{scheme}://{named}:{port}" if error.errno == errno.EADDRINUSE else ""
    return ""


def _taken_path(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.5)
        probe.connect(path)
    return f"unix://{Path(path).absolute()}"
