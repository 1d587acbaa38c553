"""Certificates for encrypting transports, created for one run of the tests."""

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
"""Environment variable through which the processes of one run share the certificates."""


@attrs.frozen
class Certificates:
    """Files: the authorities that clients trust, and the certificate and key of a server on 127.0.0.1."""

    authority: str
    server: str


def can_be_made() -> bool:
    """Whether the library that creates them is installed."""
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
