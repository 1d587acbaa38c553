"""Certificates for transports that encrypt, made for one run of the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import attrs

__all__ = ("FOLDER", "Certificates", "can_be_made", "certificates")

FOLDER = "DJINN_CONFORMANCE_CERTIFICATES"
"""Environment variable with which the processes of one run have the same."""


@attrs.frozen
class Certificates:
    """Files: whom clients trust, and what a server on 127.0.0.1 shows, with its key."""

    authority: str
    server: str


def can_be_made() -> bool:
    """Whether what makes them is installed."""
    try:
        import trustme  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def certificates() -> Certificates:
    """Make them, or find those that the process which started this one has made."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        import trustme

        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="djinn-certificates-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(Path(folder) / "authority.pem"))
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(str(Path(folder) / "server.pem"))
    return Certificates(str(Path(folder) / "authority.pem"), str(Path(folder) / "server.pem"))
