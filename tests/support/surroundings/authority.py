"""Certificates as nobody should accept them: expired, not valid yet, for another purpose, revoked."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

DAY = datetime.timedelta(days=1)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """An authority, or a certificate that acts as one.

    Args:
        folder: For its files.
        name: Its name.
        within: Who has signed it; itself, if ``None``.
        is_authority: Whether its certificate says that it is one.
    """

    def __init__(self, folder: Path, name: str, within: Authority | None = None, *, is_authority: bool = True) -> None:
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        above, key = (self._name, self._key) if within is None else (within._name, within._key)
        self._certificate = x509.CertificateBuilder(
            above, self._name, self._key.public_key(), x509.random_serial_number(), now - 9 * DAY, now + 9 * DAY,
        ).add_extension(x509.BasicConstraints(is_authority, None), critical=True).sign(key, hashes.SHA256())
        self.path = self._written(name, self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, first_day: int = -1, last_day: int = 1,
              uses: Sequence[ObjectIdentifier] = (SERVER, CLIENT), chained: bool = False) -> tuple[str, int]:
        """Make a certificate with its key.

        Args:
            name: Of its file.
            hosts: For which it is.
            first_day, last_day: When it is valid, from now.
            uses: What for.
            chained: Whether its file has this authority's certificate, too.

        Returns:
            Its file and its number.
        """
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        names = [x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdecimal() else x509.DNSName(host)
                 for host in hosts]
        builder = x509.CertificateBuilder(
            self._name, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")]), key.public_key(),
            x509.random_serial_number(), now + first_day * DAY, now + last_day * DAY,
        ).add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(self._key, hashes.SHA256())
        return self._written(name, key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            *(each.public_bytes(serialization.Encoding.PEM)
              for each in ([made, self._certificate] if chained else [made]))), made.serial_number

    def revoking(self, *numbers: int) -> str:
        """Write a file with this authority's certificate and the list of certificates that it has revoked."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder(self._name, now - DAY, now + DAY)
        for number in numbers:
            builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(number, now - DAY).build())
        return self._written("authority-with-revoked", self._certificate.public_bytes(serialization.Encoding.PEM),
                             builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _written(self, name: str, *parts: bytes) -> str:
        path = self._folder / f"{name}.pem"
        path.write_bytes(b"".join(parts))
        return str(path)
