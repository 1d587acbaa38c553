"""Certificates of workers: each worker has its own key, so that none needs the server's."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Iterator

import attrs

from djinn.kinds.transport import PINNED_NAME

__all__ = ("Pair", "make_pair", "placed", "why_none")

VALID = datetime.timedelta(days=3650)
"""Longer than the lifetime of any worker; the certificate is discarded with its worker."""
SKEW = datetime.timedelta(days=30)
"""How far a client's clock may be behind."""


@attrs.frozen
class Pair:
    """A certificate and its key, as PEM."""

    certificate: str
    key: str = attrs.field(repr=False)


def why_none() -> str:
    """Return the reason why worker certificates cannot be made here; empty if they can."""
    try:
        import cryptography  # noqa: F401  # imported to check that it is installed
    except ImportError:
        return 'the package cryptography is not installed (pip install "djinn-torch[tls]")'
    return ""


def make_pair() -> Pair:
    """Create a key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, PINNED_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=name, subject_name=name, public_key=key.public_key(), serial_number=x509.random_serial_number(),
        not_valid_before=now - SKEW, not_valid_after=now + VALID,
    ).add_extension(x509.SubjectAlternativeName([x509.DNSName(PINNED_NAME)]), critical=False)
    made = builder.sign(key, hashes.SHA256())
    return Pair(
        made.public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                          serialization.NoEncryption()).decode())


@contextlib.contextmanager
def placed(pem: str) -> Iterator[str]:
    """Provide a certificate and its key as a file, for APIs that need a path; the file exists within the context.

    On Linux it is never written to disk.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(pem)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
