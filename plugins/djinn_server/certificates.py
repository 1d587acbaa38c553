"""Certificates of workers: each has a key of its own, so that none has the server's."""

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
"""A worker lives for a shorter time; its certificate goes with it."""
SKEW = datetime.timedelta(days=30)
"""How far a client's clock may be behind."""


@attrs.frozen
class Pair:
    """A certificate and its key, as PEM."""

    certificate: str
    key: str = attrs.field(repr=False)


def why_none() -> str:
    """Say why there can be no certificates of workers here; empty if there can be."""
    try:
        import cryptography  # noqa: F401  # whether it is here is the question
    except ImportError:
        return 'the package cryptography is not installed (pip install "djinn-torch[tls]")'
    return ""


def make_pair() -> Pair:
    """Make a key, and a certificate that it has signed itself."""
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
    """Put a certificate and its key where a file of them is wanted, which lasts for as long as the context does.

    On Linux no disk sees it.
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
