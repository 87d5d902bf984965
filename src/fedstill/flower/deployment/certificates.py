"""Certificates and keys of a federation: its own certificate authority, the server's certificate,
the key with which the server signs instructions, and a key for each client.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.errors import ConfigError
from fedstill.core.files import write_secret, write_whole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

DAYS, AUTHORITY_DAYS = 825, 3650
"""The validity of the certificates of the server and the authority, in days."""


@dataclass(frozen=True)
class Authority:
    """A certificate authority: its public certificate, and its secret signing key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def require_cryptography() -> None:
    """Raise ConfigError if the library is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"deploying needs Flower: pip install 'fedstill[flower]' ({error})"
        ) from error


def make_authority(name: str, days: int = AUTHORITY_DAYS) -> Authority:
    """Create an authority that only signs certificates of servers."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(_named(name), _named(name), key.public_key(), _end_after(days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def make_server(
    folder: Path, authority: Authority, hosts: Sequence[str], days: float = DAYS
) -> None:
    """Write ``ca.crt``, ``server.crt`` and ``server.key``, with a certificate for these hosts and
    addresses. It expires with the authority at the latest, because it is useless afterwards.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    end = min(_end_after(days), authority.certificate.not_valid_after_utc)
    builder = _builder(authority.certificate.subject, _named(hosts[0]), key.public_key(), end)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(signer, critical=False)
    server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(server, critical=False)
    write_whole(folder / "ca.crt", _pem(authority.certificate))
    write_whole(folder / "server.crt", _pem(builder.sign(authority.key, hashes.SHA256())))
    write_secret(folder / "server.key", _private(key))


def last_day(path: Path) -> datetime.datetime:
    """The expiry date of the certificate in a file; raises ConfigError if there is none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a certificate: {error}") from error


def trusted_pem(path: Path) -> bytes:
    """The authority's certificate in a client's file, as PEM; raises ConfigError if it is unusable
    for TLS.
    """
    try:
        data = path.read_bytes()
        ssl.create_default_context(cadata=data.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a certificate: {error}") from error
    return data


def named_hosts(path: Path) -> set[str]:
    """The hosts and addresses in the certificate in a file."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(one.value) for one in listed}


def make_client(path: Path) -> None:
    """Write a client's private key, and its public key with the suffix ``.pub``, in OpenSSH's
    formats.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    none = serialization.NoEncryption()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, none
    )
    write_secret(path, private)
    write_whole(path.with_name(path.name + ".pub"), public + b"\n")


def client_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key in a file of ``make_client``; raises ConfigError if there is none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key of the type that `deploy init` creates")
    return key


def make_signing_key(path: Path) -> None:
    """Write the private key with which a server signs instructions, and its public key with the
    suffix ``.pub``.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_secret(path, _private(key))
    write_whole(path.with_suffix(".pub"), public)


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Read the key in a file of ``make_signing_key``; raises ConfigError if there is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a private key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key")
    return key


def authority_of(folder: Path) -> Authority:
    """The authority whose certificate and key are in a folder, for signing a new certificate.

    Raises ConfigError if they are missing.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no certificate authority, ca.crt and ca.key: {error}"
        ) from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Authority(certificate, key)


def write_authority(folder: Path, authority: Authority) -> None:
    """Write ``ca.crt`` and ``ca.key``."""
    write_whole(folder / "ca.crt", _pem(authority.certificate))
    write_secret(folder / "ca.key", _private(authority.key))


def _end_after(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(min(begin, end))
        .not_valid_after(end)
    )


def _named(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    kinds = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return key.private_bytes(*kinds)
